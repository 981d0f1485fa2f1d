"""The executor's life as the front end sees it: started, watched, replaced, and what is told to whom meanwhile.

When it dies, the requests stay open: their ids are with their workers, and what each client has is in the proxy, which
tells the next one (``executor/recovery.py``). Nobody new is admitted until it is there. One that cannot be started
again, or dies as soon as it lives, ends the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from executor.child import ChildProcess, beat_interval
from executor.engines.base import EngineInfo
from executor.seat import Seat
from serve.config import Config
from serve.gateway import ServerState

logger = logging.getLogger("tailrace.serve")

#: Replacements that fail to start in a row, and executors in a row that die soon after their start.
MAX_FAILED_STARTS, MAX_SHORT_LIVES = 3, 6


class ToldOfExecutors(Protocol):
    """Who has to know whether there is an executor: see ``GenerationExecutor``."""

    @property
    def open_requests(self) -> int:
        """Requests that go on with the next one."""

    def executor_joined(self, address: str) -> None:
        """There is one, at ``address``."""

    def executor_lost(self) -> None:
        """It is gone."""


class ExecutorSeat:
    """One executor at a time.

    address, frontends: where it listens, and where its answers go. told: of each that comes or goes.
    on_hopeless(reason): there will be none any more.
    engine_args: what the engine is made with.
    """

    def __init__(
        self,
        config: Config,
        address: str,
        frontends: Sequence[str],
        engine_args: Mapping[str, Any],
        told: ToldOfExecutors,
        state: ServerState,
        on_hopeless: Callable[[str], None],
    ) -> None:
        self._config, self._address, self._frontends = config, address, list(frontends)
        self._engine_args = engine_args
        self._told, self._state, self._on_hopeless = told, state, on_hopeless
        self._incarnation = 0
        self._info: EngineInfo | None = None
        self._seat = Seat(
            "executor",
            self._spawn,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_hopeless=self._give_up,
            hang_timeout=config.hang_timeout,
            max_failed_starts=MAX_FAILED_STARTS,
            max_short_lives=MAX_SHORT_LIVES,
        )

    @property
    def pid(self) -> int | None:
        """The executor's process id, None while there is none."""
        return self._seat.child.pid if self._seat.child is not None else None

    async def start(self) -> EngineInfo:
        """Start it; returns what its engine says of itself. ChildError with the reason if it cannot work."""
        await self._seat.start()
        assert self._info is not None
        return self._info

    async def stop(self, timeout: float) -> None:
        """End it; idempotent."""
        await self._seat.stop(timeout)

    async def _spawn(self) -> ChildProcess:
        config = {
            "address": self._address,
            "frontends": self._frontends,
            "incarnation": self._incarnation,
            "engine": self._config.engine,
            "engine_args": dict(self._engine_args),
            "max_queued_tokens": self._config.max_queued_tokens,
            "queue_timeout": self._config.queue_timeout,
            "beat_interval": beat_interval(self._config.hang_timeout),
            "log_level": self._config.log_level,
        }
        self._incarnation += 1  # also for one that fails to start: it may have bound its socket, and said something
        return await ChildProcess.spawn("executor", "executor.process", config)

    def _on_ready(self, child: ChildProcess, said: dict[str, Any]) -> None:
        info = EngineInfo(**said | {name: tuple(said[name]) for name in ("supported", "eos_token_ids")})
        if self._info not in (None, info):
            logger.error("the new executor is another one: %s, not %s", info, self._info)
        self._info = info
        self._state.restarting = None
        self._told.executor_joined(self._address)
        if self._seat.restarts:
            logger.warning("the executor works again; %d requests go on", self._told.open_requests)

    def _on_lost(self, child: ChildProcess, reason: str) -> None:
        logger.error("the executor ended: %s; a new one is started for %d requests", reason, self._told.open_requests)
        self._state.restarting = "restarting its executor"
        self._state.executor_restarts = self._seat.restarts + 1
        self._told.executor_lost()

    def _give_up(self, reason: str) -> None:
        self._on_hopeless(f"the executor cannot be restarted: {reason}")
