"""Who may call: hosts, keys, and what a page in somebody's browser may do.

Three questions are asked of every request, before its body is read.

*By which name was the server called?* A server that listens on a loopback address alone is protected by nothing else.
But a browser on the same machine reaches it too, and a page of evil.example may have that name resolved to 127.0.0.1
once it is loaded (DNS rebinding): to the browser it then talks to its own server, and reads the answers. Its requests
still say ``Host: evil.example``. So without API keys such a server answers to addresses, to localhost, to names under
.localhost and .internal, which nobody can own, to its ``--host`` and to the hosts of ``--cors_origin``. A key makes the
question needless, since the page has none; so does an address that others can reach anyway.

*Does it have a key?* Only if the server has any. ``/live`` and ``/health`` are asked by probes, and tell nothing.
``/metrics`` (how much is asked, and what fails) and ``/version`` (what to look for in a list of faults) do.

*Does a page send what it was not allowed to send?* A page may send a POST to any server without asking, but only with a
content type that an HTML form may have, or without one. So a request with an ``Origin`` has to say that its body is
JSON, and then the browser asks first (CORS); who asks is told no unless ``--cors_origin`` names the page.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, MutableMapping
from dataclasses import replace

from starlette.types import Scope

from serve.api_keys import ApiKeys, bearer, gather_keys
from serve.config import Config
from serve.errors import ApiError, BadRequestError
from serve.http import Header
from serve.tls import check_tls

#: Routes that need no key.
OPEN_ROUTES = frozenset({"/live", "/health"})

#: What a browser puts into ``Origin``: no path, and no slash at the end. "null" stands for anybody.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:]+)(:\d+)?", re.IGNORECASE)
#: Ends of names that nobody can own.
_RESERVED = (".localhost", ".internal")


class AccessError(ValueError):
    """A setting that would let nobody in, or others than was meant; the message names the flag."""


def check_access(config: Config, environment: MutableMapping[str, str]) -> Config:
    """Look at all settings of access before a model is loaded; the config then has every key in ``api_key``, and no
    file of keys. AccessError, ApiKeyError, TlsError (all ValueErrors) for what cannot work."""
    for origin in config.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise AccessError(f"--cors_origin: {origin} is no origin; write https://host or https://host:port, or *")
    check_tls(config)
    return replace(config, api_key=gather_keys(config.api_key, config.api_key_file, environment), api_key_file=None)


class Access:
    """The three questions. config: as ``check_access`` made it."""

    def __init__(self, config: Config) -> None:
        self._keys = ApiKeys(config.api_key) if config.api_key else None
        self._names = _names(config)

    @property
    def secured(self) -> bool:
        """Whether requests need a key."""
        return self._keys is not None

    def check(self, scope: Scope, headers: list[Header]) -> None:
        """ApiError for a request that is not to be answered; its response gets ``headers``."""
        if self._names is not None:
            self._check_host(scope["headers"], self._names)
        if self._keys is not None and scope["path"] not in OPEN_ROUTES:
            self._check_key(scope["headers"], self._keys, headers)
        if scope["method"] == "POST":
            _check_origin(scope["headers"])

    def _check_host(self, headers: Iterable[Header], names: frozenset[str]) -> None:
        name = _host(headers)
        if name and name not in names and not name.endswith(_RESERVED) and not _is_address(name):
            raise ApiError(
                f"This server listens on this machine alone and does not answer to the name {name[:200]}. Call it by "
                "its address, or start it with an API key or with --cors_origin.",
                status=403, type="invalid_request_error", code="host_not_allowed",
            )  # fmt: skip

    def _check_key(self, headers: Iterable[Header], keys: ApiKeys, response: list[Header]) -> None:
        key = bearer(headers)
        if key is not None and keys.accept(key):
            return
        response.append((b"www-authenticate", b"Bearer"))
        message = (
            "The API key is not one of this server's."
            if key is not None
            else "An API key is needed: send it in the header Authorization: Bearer KEY."
        )
        raise BadRequestError(message, status=401, code="invalid_api_key")


def _names(config: Config) -> frozenset[str] | None:
    """The names that the server answers to besides its own; None when it answers to any."""
    if config.api_key or "*" in config.cors_origin or not _is_loopback(config.host):
        return None
    origins = [match[1] for origin in config.cors_origin if (match := _ORIGIN.fullmatch(origin))]
    return frozenset(name.strip("[]").lower() for name in ["localhost", config.host, *origins])


def _host(headers: Iterable[Header]) -> str:
    """The name in ``Host``, without the port; "" without one, which no browser leaves out."""
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").strip().lower()
            host = host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            return host.lstrip("[").rstrip(".")
    return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host.lower() == "localhost"


def _check_origin(headers: Iterable[Header]) -> None:
    said = {name: value for name, value in headers if name in (b"origin", b"content-type")}
    if b"origin" not in said:
        return
    kind = said.get(b"content-type", b"").partition(b";")[0].strip().lower()  # "text/plain; json" is plain text
    if b"json" not in kind:
        raise BadRequestError("A page in a browser must say that its body is application/json.", status=415)
