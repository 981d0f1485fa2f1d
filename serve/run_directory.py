"""The directory of a server's sockets: ours alone (mode 0700), and gone when the server is.

A launcher that is killed cannot remove its directory. It holds a lock in there, which ends with it, so the next server
of the same user sees whose time is over and removes what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger("tailrace.serve")

_PREFIX = "tailrace-"
_LOCK = "lock"
#: A Unix socket's path has 107 bytes at most, and the longest name in the directory may be worker-1234567.
_MAX_LENGTH = 90


class RunDirectory:
    """One directory, from ``make`` to ``remove``."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, parent: str | None = None) -> RunDirectory:
        """A new directory in ``parent``, by default the one for temporary files; those of dead servers there are
        removed. ValueError if its name is too long for a socket's."""
        parent = tempfile.gettempdir() if parent is None else parent
        _remove_stale(Path(parent))
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        if len(os.fsencode(path)) > _MAX_LENGTH:
            os.rmdir(path)
            raise ValueError(f"{path} is too long a path for a socket's directory; set TMPDIR to a shorter one")
        return cls(Path(path), _take_lock(Path(path)))

    def remove(self) -> None:
        """Remove it with all that is in it; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _take_lock(path: Path) -> int:
    """The lock gets its name once it is held: nobody can find it free in between."""
    unnamed = path / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unnamed.rename(path / _LOCK)
    return lock


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        # Without a lock it is just being made, or removed. With one that is held, its server lives.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            _remove_if_free(path)


def _remove_if_free(path: Path) -> None:
    lock = os.open(path / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        logger.info("removing %s, which a dead server has left", path)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
