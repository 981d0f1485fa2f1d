"""What a launcher tells front ends that are processes of their own: who is there, and how the server stands.

Each line says all of it, so a front end that comes later, or missed one, knows what the others know; what has changed
it sees for itself (``Follower``). Lines go through the child's stdin, behind its config: see ``executor/child.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from executor.proxy import GenerationExecutor
from serve.gateway import ServerState


@dataclass(frozen=True, slots=True)
class Roster:
    """All there is to know.

    executor: the how-manieth one works, None while none does. workers: id -> address, of those that can work; culprits:
    of those that are gone, the request that each was handling, where that is known. restarting, ending,
    executor_restarts: as in ServerState; worker_restarts, paused_workers: as in WorkerPool. hurry: open streams are not
    waited for any more.
    """

    executor: int | None = None
    workers: Mapping[int, str] = field(default_factory=dict)
    culprits: Mapping[int, int] = field(default_factory=dict)
    restarting: str | None = None
    ending: str | None = None
    executor_restarts: int = 0
    worker_restarts: int = 0
    paused_workers: int = 0
    hurry: bool = False

    def encode(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes | str) -> Roster:
        """ValueError or TypeError for a line that ``encode`` has not written."""
        values: dict[str, Any] = json.loads(line)
        for name in ("workers", "culprits"):
            values[name] = {int(worker): value for worker, value in values[name].items()}
        return cls(**values)


class RemotePool:
    """What a front end knows of the workers' lives; as ``WorkerPool`` has it."""

    def __init__(self) -> None:
        self.alive: Mapping[int, object] = {}
        self.restarts = self.paused = 0


class Follower:
    """Brings a front end up to date. executor: the address of whichever executor there is."""

    def __init__(self, proxy: GenerationExecutor, state: ServerState, pool: RemotePool, executor: str) -> None:
        self._proxy, self._state, self._pool, self._executor = proxy, state, pool, executor
        self._before = Roster()

    def follow(self, roster: Roster) -> None:
        """Do what has to be done about the changes. Losses first: nothing may go to who is not there."""
        before, self._before = self._before, roster
        state, pool = self._state, self._pool
        state.restarting, state.ending = roster.restarting, roster.ending
        state.executor_restarts = roster.executor_restarts
        pool.alive, pool.restarts, pool.paused = roster.workers, roster.worker_restarts, roster.paused_workers
        if before.executor is not None and before.executor != roster.executor:
            self._proxy.executor_lost()
        for worker in before.workers.keys() - roster.workers.keys():
            self._proxy.worker_lost(worker, roster.culprits.get(worker, -1))
        for worker in sorted(roster.workers.keys() - before.workers.keys()):
            self._proxy.worker_joined(worker, roster.workers[worker])
        if roster.executor is not None and before.executor != roster.executor:
            self._proxy.executor_joined(self._executor)
        if roster.ending is not None and before.ending is None:
            self._proxy.fail_all(roster.ending)
