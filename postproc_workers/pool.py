"""The workers' lives: N seats, each with one worker process at a time (``executor.seat``).

What happens when a worker dies: its seat notices, and ``on_lost`` is told which request it was handling, if any (the
front end says from where its requests go on, the executor opens them on the other workers: ``executor/dispatcher.py``).
Then the seat starts another one, under a new id: what was sent to the dead one must not reach it. Workers that die soon
after their start, or hang, or cannot start, are replaced after growing pauses; when one cannot start several times in a
row and no other one works, ``on_hopeless`` says so, since a server whose workers cannot start must end rather than
respawn for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from executor.child import ChildProcess, beat_interval
from executor.seat import Seat
from executor.supervision import State
from postproc_workers.marker import NOBODY, Marker

logger = logging.getLogger("tailrace.pool")

MAX_FAILED_STARTS = 5


@dataclass(frozen=True)
class _Worker:
    """One worker, from its spawn on. Its files lie side by side in the directory of its socket."""

    id: int
    address: str

    @property
    def socket(self) -> Path:
        return Path(self.address.removeprefix("ipc://"))

    @property
    def marker(self) -> Path:
        return self.socket.with_name(f"{self.socket.name}.marker")

    def remove_files(self) -> None:
        """Nobody will use them any more; one that cannot be removed is no reason to stop the supervision."""
        for file in (self.socket, self.marker):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("worker-%d: %s", self.id, error)


class WorkerPool:
    """N worker processes, kept at N.

    config: what every worker's config has in common (``postproc_workers.process``). address: worker id -> its address,
    ``ipc://``. Called on the event loop: on_joined(worker, address); on_lost(worker, culprit), culprit: the id of the
    request that it was handling when it ended, or -1; on_hopeless(reason), once: no worker will come.
    hang_timeout: seconds after which a worker whose loop stands still is killed; 0: never.
    """

    def __init__(
        self,
        size: int,
        config: Mapping[str, Any],
        address: Callable[[int], str],
        on_joined: Callable[[int, str], None],
        on_lost: Callable[[int, int], None],
        on_hopeless: Callable[[str], None],
        *,
        hang_timeout: float = 10.0,
    ) -> None:
        self.size = size
        self._config = {**config, "beat_interval": beat_interval(hang_timeout)}
        self._address = address
        self._on_joined, self._on_lost, self._on_hopeless = on_joined, on_lost, on_hopeless
        self._ids = itertools.count()
        self._hopeless = False
        self._seats = [self._seat(number, hang_timeout) for number in range(size)]
        #: seat number -> the worker that was started in it last
        self._workers: dict[int, _Worker] = {}

    def _seat(self, number: int, hang_timeout: float) -> Seat:
        return Seat(
            f"worker seat {number}",
            partial(self._spawn, number),
            on_ready=partial(self._joined, number),
            on_lost=partial(self._lost, number),
            on_hopeless=self._give_up,
            others_alive=lambda: bool(self.alive),
            hang_timeout=hang_timeout,
            max_failed_starts=MAX_FAILED_STARTS,
        )

    @property
    def alive(self) -> dict[int, int]:
        """Worker id -> process id, of those that can work."""
        children = ((number, seat.child) for number, seat in enumerate(self._seats))
        return {self._workers[number].id: child.pid for number, child in children if child is not None}

    @property
    def restarts(self) -> int:
        """Attempts to start a worker again, failed ones included: a crash loop shows in their number."""
        return sum(seat.restarts for seat in self._seats)

    @property
    def paused(self) -> int:
        """Seats without a worker that wait before they start the next one: a crash loop shows here at once."""
        return sum(seat.state is State.PAUSED for seat in self._seats)

    @property
    def ends(self) -> list[str]:
        """How the last worker of each seat ended, or why it could not start; seats that have lost none are left out."""
        return [seat.last_end for seat in self._seats if seat.last_end is not None]

    async def start(self) -> None:
        """Start all workers; returns when they can work. ChildError with the reason if one cannot start; then, and when
        it is cancelled, none is left."""
        started = False
        try:
            results = await asyncio.gather(*(seat.start() for seat in self._seats), return_exceptions=True)
            for failure in filter(None, results):
                raise failure
            started = True
        finally:
            if not started:
                await self.stop()

    async def stop(self, timeout: float = 5.0) -> None:
        """End all workers; idempotent."""
        await asyncio.gather(*(seat.stop(timeout) for seat in self._seats))
        for worker in self._workers.values():
            worker.remove_files()

    async def _spawn(self, number: int) -> ChildProcess:
        if (failed := self._workers.get(number)) is not None:
            failed.remove_files()
        worker_id = next(self._ids)
        worker = self._workers[number] = _Worker(worker_id, self._address(worker_id))
        Marker.create(worker.marker)
        config = {**self._config, "worker": worker.id, "address": worker.address, "marker": str(worker.marker)}
        return await ChildProcess.spawn(f"worker-{worker.id}", "postproc_workers.process", config)

    def _joined(self, number: int, child: ChildProcess, info: Mapping[str, Any]) -> None:
        worker = self._workers[number]
        self._on_joined(worker.id, worker.address)

    def _lost(self, number: int, child: ChildProcess, reason: str) -> None:
        worker = self._workers[number]
        culprit = Marker.read(worker.marker)
        worker.remove_files()
        at = "" if culprit == NOBODY else f" while it handled request {culprit}"
        logger.error("%s ended%s: %s; its requests go on elsewhere", child.name, at, reason)
        self._on_lost(worker.id, culprit)

    def _give_up(self, reason: str) -> None:
        if not self._hopeless:
            self._hopeless = True
            self._on_hopeless(reason)
