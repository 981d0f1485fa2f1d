"""What a round has left behind: requests, descriptors, files, processes, memory.

Before the disturbance an idle server is looked at; once it is over the server must come to look like that again. What
lies in between (a worker that is being replaced, the executor's next report) is waited for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.process.chaos.processes import Member, files, members, ownerless, zombies
from tests.process.client import fetch
from tests.process.server import OPEN, Server

#: Descriptors that a process may have more than one of its role had before: a connection of our own, a log that rolls.
FEW_DESCRIPTORS = 4
#: Bytes that the launcher may grow by. An allocator keeps the pages of the largest crowd there was, and the store of
#: responses fills: 20 to 50 MiB with 200 clients and floods of 320, after 20 s and after 60 s alike. A leak of 10 kB a
#: request is as much again within two minutes.
MAX_GROWTH = 96 << 20

SETTLE_TIMEOUT = 30.0
#: The server may take so long to end: longer than its own deadline, and all of its streams have ended before.
END_TIMEOUT = 20.0


@dataclass(slots=True)
class Leaks:
    """What is left, counted. growth: bytes of the launcher. what: the same in words."""

    requests: int = 0
    descriptors: int = 0
    files: int = 0
    processes: int = 0
    growth: int = 0
    what: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Look:
    """An idle server: its processes, what /metrics says is open, its run directory."""

    members: list[Member]
    open: dict[str, float]
    files: set[str]
    descriptors: dict[int, int]
    memory: int

    def most(self, role: str) -> int:
        """The most descriptors that a process of a role has."""
        return max((self.descriptors[each.pid] for each in self.members if each.role == role), default=0)


async def metrics(url: str) -> dict[str, float]:
    """name -> its sum over all labels, as /metrics has it."""
    text = (await fetch(url, "/metrics", method="GET")).body.decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def look(url: str, launcher: int, run_directory: Path) -> Look:
    """The server as it is now."""
    values = await metrics(url)
    there = members(launcher, run_directory)
    return Look(
        members=there,
        open={name: values.get(name, 0.0) for name in OPEN if values.get(name)},
        files=files(run_directory),
        descriptors={each.pid: each.descriptors for each in there},
        memory=there[0].memory if there else 0,
    )


async def settled(
    url: str, launcher: int, run_directory: Path, before: Look | None, workers: int
) -> tuple[Look, Leaks]:
    """Wait until nothing is left, at most SETTLE_TIMEOUT; returns the last look and what was left then."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_TIMEOUT
    while True:
        now = await look(url, launcher, run_directory)
        leaks = _left(now, before or now, launcher, run_directory, workers)
        if not leaks.what or loop.time() > deadline:
            leaks.growth = now.memory - before.memory if before is not None else 0
            return now, leaks
        await asyncio.sleep(0.25)


def _left(now: Look, before: Look, launcher: int, run_directory: Path, workers: int) -> Leaks:
    leaks = Leaks(requests=int(sum(now.open.values())))
    leaks.what += [f"{name} is {value:.0f}" for name, value in now.open.items()]
    for each in now.members:
        more = now.descriptors[each.pid] - before.most(each.role)
        if more > FEW_DESCRIPTORS:
            leaks.descriptors += more
            leaks.what.append(f"{each.role} {each.pid} has {more} descriptors more than one had before")
    left = ownerless(run_directory, now.members, _constant(before))
    leaks.files = len(left)
    leaks.what += [f"file {name}" for name in left]
    _check_processes(leaks, now, launcher, workers)
    return leaks


def _constant(before: Look) -> set[str]:
    """Files that were there from the beginning and are no process's own."""
    own = {name for each in before.members for name in each.sockets}
    return {name for name in before.files - own if "worker" not in Path(name).name}


def _check_processes(leaks: Leaks, now: Look, launcher: int, workers: int) -> None:
    wanted = {"launcher": 1, "executor": 1, "worker": workers}
    there = {role: sum(each.role == role for each in now.members) for role in {*wanted, *(m.role for m in now.members)}}
    for role, count in there.items():
        extra = count - wanted.get(role, 0)
        leaks.processes += max(extra, 0)
        leaks.what += [f"{count} processes of the role {role}, not {wanted.get(role, 0)}"] if extra else []
    leaks.what += [f"{each.role} {each.pid} is not ready" for each in now.members[1:] if not each.sockets]
    ended = zombies(launcher)
    leaks.processes += len(ended)
    leaks.what += [f"process {pid} ended and was not waited for" for pid in ended]


async def ended(server: Server, pids: Sequence[int], leaks: Leaks) -> int | None:
    """Wait for the end of a server that was asked to end, and add what is left of it; returns its exit code."""
    for _ in range(int(END_TIMEOUT / 0.1)):
        if server.process.poll() is not None:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)  # a child that ends by itself once its parent is gone gets a moment
    left = {process.pid for process in server.everybody()} | {pid for pid in pids if os.path.exists(f"/proc/{pid}")}
    leaks.processes += len(left)
    leaks.what += [f"process {pid} is there after the end" for pid in left]
    names = sorted(name for name in os.listdir(server.directory / "tmp") if not name.startswith("torchinductor_"))
    leaks.files += len(names)
    leaks.what += [f"{name} is there after the end" for name in names]
    return server.process.poll()
