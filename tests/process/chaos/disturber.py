"""Sends the planned signals to the server's processes, and sees what becomes of those that it stopped.

It also watches for processes that end without it: a worker that was not told to die must not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.process.chaos.floods import flood
from tests.process.chaos.plan import Event
from tests.process.chaos.processes import Member, members
from tests.process.chaos.stage import Stage
from tests.process.chaos.templates import Template

#: How long a planned victim is waited for, when nobody of its kind is ready.
_VICTIM_TIMEOUT = 30.0
#: Seconds between two looks at who lives.
_LOOK = 0.25
#: How long the last worker is spared. A server that keeps losing workers pauses before it starts the next one; were
#: they killed as soon as they come, it would have none for most of the time, and nothing would be left to disturb.
_SPARED = 4.0
#: What one that was waited for may do then before it is hurt, in seconds.
_WORKS = 0.5
#: A hung process has to be gone so long after the server's limit; on a busy machine the server's own ticks come late,
#: and those prove nothing to it.
_HANG_SLACK = 10.0


class Disturber:
    """Carries out a plan against the processes of one launcher. flood: the template of a flood and its size."""

    def __init__(
        self,
        stage: Stage,
        launcher: int,
        run_directory: Path,
        hang_timeout: float,
        floods: Sequence[tuple[Template, int]],
    ) -> None:
        self._stage, self._launcher, self._run_directory = stage, launcher, run_directory
        self._hang_timeout, self._floods = hang_timeout, floods
        #: processes that we killed, or stopped for ever, and may end therefore
        self._doomed: set[int] = set()
        #: processes that we stopped and have not continued yet
        self._stopped: set[int] = set()
        self._seen: dict[int, Member] = {}
        self._tasks: list[asyncio.Task[None]] = []
        #: role -> held by the event that looks for a victim: kills that had to wait must not come all at once
        self._turns = {"executor": asyncio.Lock(), "worker": asyncio.Lock()}

    async def run(self, plan: Sequence[Event]) -> None:
        """The whole plan; returns once all that was stopped goes on or is gone."""
        begin = asyncio.get_running_loop().time()
        self._tasks.append(asyncio.create_task(self._watch()))
        for event in plan:
            if not await self._stage.pause(begin + event.at - asyncio.get_running_loop().time()):
                break
            self._tasks.append(asyncio.create_task(self._act(event)))
        await self._stage.over.wait()
        await asyncio.gather(*self._tasks)
        self._note()

    async def _act(self, event: Event) -> None:
        if event.kind == "flood":
            await flood(self._stage, *self._floods[int(event.victim * len(self._floods))])
        elif event.kind == "stop":
            await self._stop(await self._victim(event), event.seconds)
        else:
            await self._kill_some(event)

    # -------------------------------------------------------------------------------- victims

    def _members(self) -> list[Member]:
        return members(self._launcher, self._run_directory)

    def _ready(self, role: str) -> list[Member]:
        """Of a role, those that work, and that nothing was done to yet."""
        spared = self._doomed | self._stopped
        return [each for each in self._members() if each.role == role and each.sockets and each.pid not in spared]

    async def _victim(self, event: Event) -> Member | None:
        """The process that an event means. While none is ready one is waited for, and gets some time to work. None
        when there comes none."""
        loop = asyncio.get_running_loop()
        planned, waited = loop.time(), False
        async with self._turns[event.role]:
            while loop.time() < planned + _VICTIM_TIMEOUT:
                ready = self._ready(event.role)
                if len(ready) > (self._spared(event) if loop.time() < planned + _SPARED else 0):
                    if waited and not await self._stage.pause(_WORKS):
                        return None
                    ready = self._ready(event.role) if waited else ready
                    if ready:
                        return ready[int(event.victim * len(ready))]
                waited = True
                if not await self._stage.pause(0.1):
                    return None
        self._stage.findings.failed(f"no {event.role} is ready within {_VICTIM_TIMEOUT} s")
        return None

    def _spared(self, event: Event) -> int:
        """How many an event leaves alive, if it can: the last worker of several dies only where all are to die."""
        several = event.role == "worker" and self._stage.options.workers > 1
        return int(several and event.count < self._stage.options.workers)

    async def _kill_some(self, event: Event) -> None:
        starting = [each for each in self._members() if each.role == event.role and not each.sockets]
        starting = [each for each in starting if each.pid not in self._doomed]
        if event.starting and starting:
            self._kill(starting[-1:])
            return
        first = await self._victim(event)
        others = [each for each in self._ready(event.role) if first is not None and each.pid != first.pid]
        others = others[: max(0, len(others) - self._spared(event))]
        self._kill([first, *others[: event.count - 1]])

    # -------------------------------------------------------------------------------- signals

    def _kill(self, victims: Sequence[Member | None]) -> None:
        tally = self._stage.tally
        for victim in victims:
            if victim is not None and self._signal(victim, signal.SIGKILL):
                self._doomed.add(victim.pid)
                tally.executor_kills += victim.role == "executor"
                tally.worker_kills += victim.role == "worker"

    def _signal(self, victim: Member, number: int) -> bool:
        self._seen.setdefault(victim.pid, victim)
        if not victim.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, number)
            return True
        return False

    async def _stop(self, victim: Member | None, seconds: float | None) -> None:
        """Stop a process; continue it, or see that it is replaced."""
        if victim is None or not self._signal(victim, signal.SIGSTOP):
            return
        self._stage.tally.stops += 1
        self._stopped.add(victim.pid)
        if seconds is not None:
            await self._stage.pause(seconds)
        else:
            self._doomed.add(victim.pid)
            await self._replaced(victim)
        self._signal(victim, signal.SIGCONT)
        self._stopped.discard(victim.pid)

    async def _replaced(self, victim: Member) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._hang_timeout + _HANG_SLACK
        while victim.alive:
            if loop.time() > deadline:
                self._stage.findings.failed(f"a {victim.role} that stands still was not replaced")
                return
            await asyncio.sleep(0.1)
        self._stage.tally.hangs_replaced += 1

    # -------------------------------------------------------------------------------- what ends by itself

    async def _watch(self) -> None:
        while await self._stage.pause(_LOOK):
            self._note()
            self._stage.tally.outage += 0 if self._stage.whole else _LOOK

    def _note(self) -> None:
        """Who was there and is no more, without our doing?"""
        now = {each.pid: each for each in self._members()}
        able = {each.role for each in now.values() if each.sockets and each.pid not in self._stopped}
        self._stage.whole = {"executor", "worker"} <= able
        for pid, member in list(self._seen.items()):
            if pid not in now and pid not in self._doomed and not member.alive:
                self._stage.findings.failed(f"{member.role} {pid} ended, and nobody had killed it")
            if pid not in now:
                del self._seen[pid]
        self._seen.update(now)


async def eventually(condition: Callable[[], bool], timeout: float) -> bool:
    """Whether something comes true in time."""
    for _ in range(int(timeout / 0.1)):
        if condition():
            return True
        await asyncio.sleep(0.1)
    return condition()
