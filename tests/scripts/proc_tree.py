"""A /proc of a test's own making."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.bench.cpu import ProcessTable

TICKS = os.sysconf("SC_CLK_TCK")
SERVER, SHELL, PYTHON = 7000001, 7000000, "/usr/bin/python3.11"


class Proc:
    """A /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "net").mkdir()
        self.listen()

    def listen(self, *ports: tuple[int, str]) -> None:
        """Sockets that listen: port, inode; and one that does not."""
        rows = [f" 0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 1000 0 {inode} 1" for port, inode in ports]
        rows.append(" 9: 0100007F:1F90 0100007F:9999 01 0:0 0:0 0 1000 0 666 1")
        (self.root / "net" / "tcp").write_text("\n".join(["  sl  local_address ...", *rows, ""]))

    def process(
        self, pid: int, parent: int, command: str, *inodes: str, group: int = 7000001, exe: str = PYTHON, cpu: float = 0
    ) -> None:
        place = self.root / str(pid)
        (place / "fd").mkdir(parents=True)
        for number, inode in enumerate(inodes):
            (place / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
        (place / "fd" / "90").symlink_to("/dev/null")
        (place / "exe").symlink_to(exe)
        (place / "cmdline").write_text("\0".join(command.split(" ")) + "\0")
        zeros = " ".join("0" * 7)
        ticks = int(cpu * TICKS)
        stat = f"{pid} (a (b) c) S {parent} {group} 1 {zeros} {ticks} {ticks} 0 0 20 0 1 0 {pid + 5} 0 0"
        (place / "stat").write_text(stat)

    def thread(self, pid: int, id: int, name: str, cpu: float, nanoseconds: int | None = None) -> None:
        """One of a process that is there; with the kernel's finer count if it has one."""
        place = self.root / str(pid) / "task" / str(id)
        place.mkdir(parents=True)
        ticks, zeros = int(cpu * TICKS), " ".join("0" * 10)
        (place / "stat").write_text(f"{id} ({name}) S {zeros} {ticks} 0 0 0 20 0 1 0 5 0 0")
        if nanoseconds is not None:
            (place / "schedstat").write_text(f"{nanoseconds} 1 2\n")

    @property
    def table(self) -> ProcessTable:
        return ProcessTable(self.root)
