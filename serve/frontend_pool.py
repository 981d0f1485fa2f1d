"""Front ends that are processes: K seats, and what they are told.

All listen at the same address, and the kernel gives each connection to one of them (``listening.py``). Whatever a
client may ask, the answer is the same: the launcher tells all of them who is there (``roster.py``), they share counters
(``board.py``, the directory of the metrics) and stored responses (``responses_store.py``).

When one dies its connections are gone, and with them whom its requests were for: the executor notices and aborts them
(``FrontendLost``). The others go on, and another one takes its seat, with its number and its addresses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from executor.child import ChildProcess, beat_interval
from executor.seat import Seat
from serve.board import Board
from serve.config import Config
from serve.frontend import Model
from serve.gateway import ServerState
from serve.metrics import SHARED, Workers
from serve.roster import Roster

logger = logging.getLogger("tailrace.frontends")

MAX_FAILED_STARTS = 5
REFRESH = 1.0
"""Seconds between two looks at what changes without being told."""
_CULPRITS = 100


class FrontendPool:
    """K front end processes, kept at K.

    directory: for what they share. addresses: where they get the workers' answers, one each; executor: where the
    executor listens. on_hopeless(reason), once: no front end will come.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        directory: Path,
        addresses: list[str],
        executor: str,
        on_hopeless: Callable[[str], None],
    ) -> None:
        self._config, self._state, self._directory = config, state, directory
        self._addresses, self._executor, self._on_hopeless = addresses, executor, on_hopeless
        self._board = Board.create(directory / "board", len(addresses))
        (directory / "metrics").mkdir(mode=0o700)
        self._common: dict[str, Any] = {}
        self._workers: dict[int, str] = {}
        self._culprits: dict[int, int] = {}
        self._incarnation, self._connected, self._hurry = 0, False, False
        self._pool: Workers | None = None
        self._told = Roster()
        self._children: dict[int, ChildProcess] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._seats = [self._seat(number) for number in range(len(addresses))]

    def _seat(self, number: int) -> Seat:
        return Seat(
            f"front end seat {number}",
            partial(self._spawn, number),
            on_ready=partial(self._on_ready, number),
            on_lost=partial(self._on_lost, number),
            on_hopeless=self._give_up,
            others_alive=lambda: bool(self.alive),
            hang_timeout=self._config.hang_timeout,
            max_failed_starts=MAX_FAILED_STARTS,
        )

    @property
    def alive(self) -> dict[int, int]:
        """Number -> process id, of those that serve."""
        return {number: seat.child.pid for number, seat in enumerate(self._seats) if seat.child is not None}

    @property
    def open_requests(self) -> int:
        """Of all of them."""
        return self._board.total("taken")

    async def start(
        self, address: tuple[str, int], model: Model, pool: Workers | None, worker: Mapping[str, Any] | None
    ) -> None:
        """Start all; returns when they serve. address: host and port. worker: the config of the worker that each is
        itself, None where there are worker processes. ChildError with the reason if one cannot start; then, and when it
        is cancelled, none is left."""
        self._pool = pool
        files = model.files
        self._common = {
            "settings": self._config.to_plain(),
            "files": None if files is None else {"directory": str(files.directory), "name": files.name},
            "tokenizer": str(model.tokenizer),
            "info": asdict(model.info),
            "executor": self._executor,
            "host": address[0],
            "port": address[1],
            "board": str(self._directory / "board"),
            "responses": str(self._directory / "responses"),
            "started": self._state.started,
            "beat_interval": beat_interval(self._config.hang_timeout),
            "log_level": self._config.log_level,
        }
        self._common["worker"] = worker
        self._refresh()
        results = await asyncio.gather(*(seat.start() for seat in self._seats), return_exceptions=True)
        for failure in filter(None, results):
            await self.stop(0.0)
            raise failure

    async def stop(self, timeout: float) -> None:
        """Have them end, which gives open streams the server's ``shutdown_timeout``, unless there is a hurry; by force
        after ``timeout`` seconds. Idempotent."""
        await asyncio.gather(*(seat.stop(timeout) for seat in self._seats))
        if self._timer is not None:
            self._timer.cancel()

    async def drain(self, hurry: asyncio.Event, timeout: float) -> None:
        """Nobody new is admitted; returns when all streams have ended, and every front end with them."""
        hurrying = asyncio.create_task(self._when(hurry))
        try:
            await self.stop(timeout + 5.0)
        finally:
            hurrying.cancel()

    async def _when(self, hurry: asyncio.Event) -> None:
        await hurry.wait()
        self._hurry = True
        self._announce()

    # -------------------------------------------------------------------------------- what they are told

    def executor_joined(self, address: str) -> None:
        """There is a new executor."""
        self._incarnation, self._connected = self._incarnation + 1, True
        self._announce()

    def executor_lost(self) -> None:
        """It is gone."""
        self._connected = False
        self._announce()

    def worker_joined(self, worker: int, address: str) -> None:
        """There is a worker."""
        self._workers[worker] = address
        self._announce()

    def worker_lost(self, worker: int, culprit: int = -1) -> None:
        """It is gone; culprit: the request that it was handling."""
        del self._workers[worker]
        self._culprits[worker] = culprit
        for old in list(self._culprits)[:-_CULPRITS]:
            del self._culprits[old]
        self._announce()

    def fail_all(self, reason: str) -> None:
        """End every open request: the server ends."""
        self._hurry = True
        self._announce()

    def _roster(self) -> Roster:
        state, pool = self._state, self._pool
        return Roster(
            executor=self._incarnation if self._connected else None,
            workers=dict(self._workers),
            culprits={worker: culprit for worker, culprit in self._culprits.items() if culprit >= 0},
            restarting=state.restarting,
            ending=state.ending,
            executor_restarts=state.executor_restarts,
            worker_restarts=pool.restarts if pool is not None else 0,
            paused_workers=pool.paused if pool is not None else 0,
            hurry=self._hurry,
        )

    def _announce(self) -> None:
        roster = self._roster()
        if roster != self._told:
            self._told = roster
            line = roster.encode()
            for child in self._children.values():
                child.tell(line)

    def _refresh(self) -> None:
        self._announce()
        self._timer = asyncio.get_running_loop().call_later(REFRESH, self._refresh)

    # -------------------------------------------------------------------------------- their lives

    async def _spawn(self, number: int) -> ChildProcess:
        config = {**self._common, "number": number, "address": self._addresses[number]}
        config["roster"] = self._roster().encode().decode()
        environment = {SHARED: str(self._directory / "metrics")}
        return await ChildProcess.spawn(f"front-end-{number}", "serve.frontend_process", config, environment)

    def _on_ready(self, number: int, child: ChildProcess, said: Mapping[str, Any]) -> None:
        self._children[number] = child
        child.tell(self._roster().encode())  # what has changed since its spawn

    def _on_lost(self, number: int, child: ChildProcess, reason: str) -> None:
        del self._children[number]
        self._board.clear(number)
        logger.error("%s ended: %s; its connections are gone", child.name, reason)

    def _give_up(self, reason: str) -> None:
        self._on_hopeless(f"no front end can be started: {reason}")
