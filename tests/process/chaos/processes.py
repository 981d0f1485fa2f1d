"""The server's processes and its files, seen from outside: by /proc, without asking the server.

A process is ready once it listens on its socket in the run directory; the socket's name says which worker it is.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROLES = {"executor.process": "executor", "postproc_workers.process": "worker"}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the server. created tells it from a later one with the same pid. sockets: names of those that it
    listens on in the run directory; none: it is not ready."""

    pid: int
    role: str
    created: float
    sockets: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether it runs still; a process that has ended and was not waited for does not."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        return False

    @property
    def descriptors(self) -> int:
        """Open descriptors, 0 once it is gone."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        return 0

    @property
    def memory(self) -> int:
        """Resident bytes, 0 once it is gone."""
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0


def members(launcher: int, run_directory: Path) -> list[Member]:
    """The launcher and its children, the oldest first. Children that have ended are left out."""
    found = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(launcher)
        found.append(Member(launcher, "launcher", process.create_time()))
        sockets = _listening(run_directory)
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [_member(child, sockets)] if child.status() != psutil.STATUS_ZOMBIE else []
    return sorted(found, key=lambda member: (member.created, member.pid))


def zombies(launcher: int) -> list[int]:
    """Children that have ended and that the launcher has not taken note of."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [child.pid] if child.status() == psutil.STATUS_ZOMBIE else []
    return found


def _member(child: psutil.Process, sockets: dict[str, str]) -> Member:
    role = next((_ROLES[word] for word in child.cmdline() if word in _ROLES), "other")
    own = tuple(sorted(sockets[inode] for inode in _socket_inodes(child.pid) if inode in sockets))
    return Member(child.pid, role, child.create_time(), own)


def _listening(run_directory: Path) -> dict[str, str]:
    """inode -> name of each listening socket in the directory."""
    found = {}
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        # Num RefCount Protocol Flags Type St Inode Path; __SO_ACCEPTCON is 0x10000
        words = line.split(maxsplit=7)
        if len(words) == 8 and int(words[3], 16) & 0x10000 and Path(words[7]).parent == run_directory:
            found[words[6]] = Path(words[7]).name
    return found


def _socket_inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def files(run_directory: Path) -> set[str]:
    """All in the run directory, as relative paths."""
    return {str(path.relative_to(run_directory)) for path in run_directory.rglob("*")}


def ownerless(run_directory: Path, living: list[Member], constant: set[str]) -> list[str]:
    """Files that no living process needs: neither there from the beginning, nor a socket of one of them, nor named
    with the number of a living worker."""
    sockets = {name for member in living for name in member.sockets}
    numbers = {number for name in sockets for number in _NUMBER.findall(name)}
    left = sorted(files(run_directory) - sockets - constant)
    return [name for name in left if not numbers & set(_NUMBER.findall(Path(name).name))]
