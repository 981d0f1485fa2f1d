"""CPU time that a server on this machine used, by process; all of it from /proc.

The server is whoever listens on its port, with the processes it descends from as far as these are the same program in
the same process group (a launcher whose children listen), and with all their descendants. Ancestors of ours, such as a
test or a script that started both, are no part of it. The kernel counts in ticks of usually 10 ms, so a process that
used less than a second has no second decimal.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_NAME_LENGTH = 32


class CpuError(OSError):
    """The server's processes cannot be found."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process at one moment. started: in ticks since boot; with the pid it says who it is, for pids come again."""

    pid: int
    parent: int
    group: int
    started: int
    cpu_seconds: float
    name: str


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread at one moment. name: as the kernel has it; a thread that took no name has its maker's."""

    id: int
    name: str
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of a process in a span of time."""

    pid: int
    name: str
    cpu_seconds: float


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ProcessTable:
    """What /proc says. root: where it is mounted."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._ticks = os.sysconf("SC_CLK_TCK")

    def server(self, port: int) -> set[int]:
        """The pids that a server on a port begins with. Raises CpuError if nobody is seen to listen there."""
        inodes = {*self._listening(port)}
        listeners = {pid for pid in self._pids() if inodes & {*self._sockets(pid)}}
        if not listeners:
            raise CpuError(f"nobody is seen to listen on port {port} (another user's process, or in a container)")
        table = self._all()
        ours = {*self._lineage(os.getpid(), table)}
        return {self._top(pid, table, ours) for pid in listeners if pid in table}

    def tree(self, roots: Iterable[int]) -> dict[int, Process]:
        """Processes with these pids and all that descend from them, but for this process."""
        table, found = self._all(), {}
        children: dict[int, list[int]] = {}
        for process in table.values():
            children.setdefault(process.parent, []).append(process.pid)
        waiting = [*roots]
        while waiting:
            pid = waiting.pop()
            if pid in table and pid not in found and pid != os.getpid():
                found[pid] = table[pid]
                waiting += children.get(pid, [])
        return found

    def threads(self, pid: int) -> dict[int, Thread]:
        """A process's threads by id; the main thread's id is the process's. Empty of a process that is gone."""
        try:
            ids = [int(entry.name) for entry in os.scandir(self._root / str(pid) / "task")]
        except OSError:
            return {}
        found = (self._thread(self._root / str(pid) / "task" / str(id), id) for id in ids)
        return {thread.id: thread for thread in found if thread is not None}

    # -------------------------------------------------------------------------------- who listens

    def _listening(self, port: int) -> Iterator[str]:
        """Inodes of the sockets that listen on a port."""
        for name in ("tcp", "tcp6"):
            for line in self._read(self._root / "net" / name).splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    yield rest[5]

    def _sockets(self, pid: int) -> Iterator[str]:
        """Inodes of a process's sockets; none of a process that is gone or another user's."""
        try:
            links = [os.readlink(entry) for entry in os.scandir(self._root / str(pid) / "fd")]
        except OSError:
            return
        yield from (link[len("socket:[") : -1] for link in links if link.startswith("socket:["))

    def _top(self, pid: int, table: Mapping[int, Process], ours: set[int]) -> int:
        for above in list(self._lineage(pid, table))[1:]:
            same = table[above].group == table[pid].group and self._program(above) == self._program(pid)
            if above in ours or not same:
                break
            pid = above
        return pid

    def _program(self, pid: int) -> str:
        try:
            return os.readlink(self._root / str(pid) / "exe")
        except OSError:
            return f"unknown {pid}"

    @staticmethod
    def _lineage(pid: int, table: Mapping[int, Process]) -> Iterator[int]:
        while pid in table and pid > 1:
            yield pid
            pid = table[pid].parent

    # -------------------------------------------------------------------------------- what a process is

    def _pids(self) -> list[int]:
        return [int(entry.name) for entry in os.scandir(self._root) if entry.name.isdigit()]

    def _all(self) -> dict[int, Process]:
        found = (self._process(pid) for pid in self._pids())
        return {process.pid: process for process in found if process is not None}

    def _process(self, pid: int) -> Process | None:
        """None of one that is gone."""
        place = self._root / str(pid)
        title, fields = self._stat(place)
        if not fields:
            return None
        name = program_name(self._read(place / "cmdline").split("\0")) or title
        return Process(pid, int(fields[1]), int(fields[2]), int(fields[19]), self._seconds(fields), name)

    def exact(self, process: Process) -> float:
        """A process's CPU seconds, finer than in ticks where the kernel tells its threads' time in nanoseconds. Threads
        that have ended are in the ticks alone."""
        return max(process.cpu_seconds, sum(thread.cpu_seconds for thread in self.threads(process.pid).values()))

    def _thread(self, place: Path, id: int) -> Thread | None:
        """None of one that is gone."""
        name, fields = self._stat(place)
        if not fields:
            return None
        nanoseconds = self._read(place / "schedstat").split()[:1]
        return Thread(id, name, int(nanoseconds[0]) / 1e9 if nanoseconds else self._seconds(fields))

    def _stat(self, place: Path) -> tuple[str, list[str]]:
        """(name, fields from the state on) of a process or thread; no fields if it is gone."""
        before, _, after = self._read(place / "stat").rpartition(")")
        return before.partition("(")[2], after.split()

    def _seconds(self, fields: list[str]) -> float:
        return (int(fields[11]) + int(fields[12])) / self._ticks

    @staticmethod
    def _read(file: Path) -> str:
        try:
            return file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


def program_name(words: list[str]) -> str:
    """A short name for a command line: the module or script that a Python runs, else the program; empty if none."""
    words = [word for word in words if word]
    if not words:
        return ""
    program, *rest = words
    if not os.path.basename(program).startswith("python"):
        return _short(program)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2 if rest[0] in ("-X", "-W") else 1 :]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return rest[1][:_NAME_LENGTH]
    if rest[:1] == ["-c"] and len(rest) > 1:
        return f"python -c {rest[1]}"[:_NAME_LENGTH]
    return _short(rest[0]) if rest else _short(program)


def _short(program: str) -> str:
    # A title that a process gave itself ("worker: idle") is no path.
    return (os.path.basename(program) if program.startswith("/") else program)[:_NAME_LENGTH]


def usage(before: Mapping[int, Process], after: Mapping[int, Process]) -> list[Usage]:
    """What each process used from one moment to another, the most first.

    One that started in between is counted from its start; one that ended in between is not counted.
    """
    found = []
    for pid, process in after.items():
        earlier = before.get(pid)
        known = earlier is not None and earlier.started == process.started
        used = process.cpu_seconds - (earlier.cpu_seconds if known and earlier else 0.0)
        found.append(Usage(pid, process.name, used))
    return sorted(found, key=lambda entry: (-entry.cpu_seconds, entry.pid))
