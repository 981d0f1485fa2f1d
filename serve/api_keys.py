"""API keys: where they come from, and whether a request has one.

They are given by ``--api_key``, by ``--api_key_file`` (one per line; blank lines and lines that begin with # do not
count) and by the environment variable ``TAILRACE_API_KEY``. A source that is named and holds no key is an error, never
a server without keys.

A key is compared by its SHA-256 and with each known one, in a time that tells nothing of where two differ, nor of which
one was found. Keys stand in no message and in no log.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, MutableMapping
from pathlib import Path

logger = logging.getLogger("tailrace.serve")

VARIABLE = "TAILRACE_API_KEY"

#: What a header can carry, and what a person can tell apart.
_KEY = re.compile(r"[!-~]+")


class ApiKeyError(ValueError):
    """Keys that cannot be used; the message says where they came from and shows none of them."""


class ApiKeys:
    """The keys of a server. None of them can be read back."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def accept(self, key: bytes) -> bool:
        """Whether a key is one of them."""
        given, found = _digest(key), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The token of ``Authorization: Bearer TOKEN`` (RFC 6750), None without one. headers: as in an ASGI scope."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else None
    return None


def gather_keys(given: Iterable[str], file: str | None, environment: MutableMapping[str, str]) -> tuple[str, ...]:
    """All keys that a server is started with; ApiKeyError for a source without a usable one.

    The variable is taken out of the environment: our children inherit that, and have no use for it.
    """
    keys = list(_checked(given, "--api_key"))
    if file is not None:
        keys += _checked(_lines(Path(file)), f"--api_key_file: {file}")
    if VARIABLE in environment:
        keys += _checked([environment.pop(VARIABLE)], VARIABLE)
    return tuple(dict.fromkeys(keys))


def _checked(keys: Iterable[str], source: str) -> Iterable[str]:
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ApiKeyError(f"{source}: a key is made of visible ASCII characters, at least one, and no spaces")
        yield key


def _lines(path: Path) -> list[str]:
    try:
        text, mode = path.read_text(encoding="utf-8-sig"), stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError, and quotes a byte of the file
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ApiKeyError(f"--api_key_file: {path} cannot be read: {reason}") from None
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ApiKeyError(f"--api_key_file: {path} holds no key")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("--api_key_file: %s can be read by other users (its mode is %04o); 0600 is enough", path, mode)
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
