"""The executor without its sockets: messages in, an engine stepped, messages out. A test drives it in one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from typing import Any

from executor.dispatcher import Dispatcher
from executor.engines.base import Engine, EngineInfo, UnsupportedError
from executor.messages import Abort, Cancel, Message, Release, StepRecords, WorkerJoined, WorkerLost
from executor.request import GenerationRequest

logger = logging.getLogger("tailrace.executor")

RETRY = 0.005
"""Seconds after which what did not fit a message, or its worker's queue, is tried again."""


class ExecutorCore:
    """Joins an engine and a dispatcher. ``receive`` takes a message, ``step`` moves what the engine has made."""

    def __init__(self, engine: Engine) -> None:
        self.dispatcher = Dispatcher()
        self.tokens = 0
        self.steps = 0
        self._engine = engine
        self._handlers: dict[type, Callable[[Any], None]] = {
            GenerationRequest: self._submit,
            Abort: self._abort,
            Release: self._release,
            Cancel: self._cancel,
            WorkerJoined: lambda m: self.dispatcher.worker_joined(m.worker),
            WorkerLost: self._worker_lost,
        }

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        """Start the engine; see ``Engine.start``."""
        return self._engine.start(wake)

    def receive(self, message: Message) -> None:
        """Handle one message from a front end, a worker or the launcher; others are logged and dropped."""
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.warning("dropped a message of kind %s that is not for the executor", type(message).__name__)
            return
        handler(message)

    def step(self, stamp: int, busy: Container[int] = ()) -> list[tuple[int, StepRecords]]:
        """Collect what the engine made and return what goes to each worker that is not busy."""
        rows = self._engine.collect()
        if rows:
            self.steps += 1
            self.tokens += sum(len(row.token_ids) for row in rows)
            self.dispatcher.record(rows)
        return self.dispatcher.take(stamp, busy)

    def poll_timeout(self) -> float | None:
        """Seconds until ``step`` should be called without being woken; None: whenever something happens."""
        due = self._engine.poll_timeout()
        return due if not self.dispatcher.unsent_history else min(RETRY, RETRY if due is None else due)

    def stats(self) -> dict[str, Any]:
        """Counters of engine and dispatcher, for /metrics."""
        engine = {f"engine_{name}": value for name, value in self._engine.stats().items()}
        return {"tokens": self.tokens, "steps": self.steps, **engine, **self.dispatcher.stats()}

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _submit(self, request: GenerationRequest) -> None:
        try:
            self.dispatcher.submit(request)
        except ValueError as error:
            logger.error("submit dropped: %s", error)
            return
        for index in range(request.num_outputs):
            try:
                self._engine.add(request.rid, index, request.prompts[index // request.n], request.sampling)
            except UnsupportedError as error:
                self._stop(request.rid, self.dispatcher.end(request.rid, "error", str(error)))
                return

    def _abort(self, message: Abort) -> None:
        """The engine stops, and the request ends on its worker like any other: its last emission tells the front
        end."""
        self._stop(message.rid, self.dispatcher.end(message.rid, "abort"))

    def _release(self, message: Release) -> None:
        self._stop(message.rid, self.dispatcher.release(message.rid))

    def _cancel(self, message: Cancel) -> None:
        for rid, index in message.outputs:
            self._stop(rid, self.dispatcher.cancel(rid, index, message.worker))

    def _worker_lost(self, message: WorkerLost) -> None:
        for rid in self.dispatcher.worker_lost(message):
            self._stop(rid, range(self.dispatcher.num_outputs(rid)))

    def _stop(self, rid: int, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._engine.cancel(rid, index)
