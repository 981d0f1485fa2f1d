"""The executor without its sockets: messages in, an engine stepped, messages out. A test drives it in one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

from executor.dispatcher import Dispatcher
from executor.engines.base import Engine, EngineInfo, Part, StepColumns, UnsupportedError
from executor.messages import (
    Abort,
    Cancel,
    FrontendLost,
    Histories,
    Message,
    Rejected,
    Release,
    Resubmit,
    StepRecords,
    Synced,
    WorkerJoined,
    WorkerLost,
)
from executor.recovery import Recovery
from executor.request import GenerationRequest
from executor.waiting import WaitingRequests

logger = logging.getLogger("tailrace.executor")

RETRY = 0.005
"""Seconds after which what did not fit a message, or its worker's queue, is tried again."""


class ExecutorCore:
    """Joins an engine and a dispatcher. ``receive`` takes a message, ``step`` moves what the engine has made; before
    the messages that have come together ``tick`` says when that is.

    incarnation: how many executors this server has had before. frontends: how many front ends will say what they have.
    clock: seconds of CPU; what the engine takes of them is counted (``engine_seconds``). wall: seconds by the wall.
    """

    def __init__(
        self,
        engine: Engine,
        waiting: WaitingRequests | None = None,
        *,
        incarnation: int = 0,
        frontends: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        wall: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.dispatcher = Dispatcher(incarnation=incarnation)
        self.waiting = waiting if waiting is not None else WaitingRequests()
        self.tokens = 0
        self.steps = 0
        #: requests taken over from an earlier executor: with what they had, and without
        self.adopted = self.restarted = 0
        #: (front end, answer), until somebody sends them
        self.answers: list[tuple[int, Rejected]] = []
        self.engine_seconds = 0.0
        #: seconds by the wall that the engine took in the last ``step``; None if it had made nothing
        self.collecting: float | None = None
        self._engine = engine
        self._clock, self._wall = clock, wall
        self._recovery = Recovery(frontends)
        #: front ends that have spoken and are not known to be gone; and those whose predecessor's end is yet to be told
        self._present: set[int] = set()
        self._replaced: set[int] = set()
        #: aborts of requests that are not taken over yet
        self._aborted: set[int] = set()
        self._now = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            GenerationRequest: self._submit,
            Abort: self._abort,
            Release: self._release,
            Cancel: self._cancel,
            WorkerJoined: self._worker_joined,
            WorkerLost: self._worker_lost,
            FrontendLost: self._frontend_lost,
            Resubmit: self._resubmit,
            Histories: self._recovery.histories,
            Synced: self._synced,
        }

    @property
    def workers(self) -> Collection[int]:
        """Those that take requests."""
        return self.dispatcher.workers

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        """Start the engine; see ``Engine.start``."""
        return self._engine.start(wake)

    def tick(self, stamp: int) -> None:
        """The time, nanoseconds: what comes from here on is timed from it."""
        self._now = stamp

    def receive(self, message: Message) -> None:
        """Handle one message from a front end, a worker or the launcher; others are logged and dropped."""
        handler = self._handlers.get(type(message))
        if handler is None:
            logger.warning("dropped a message of kind %s that is not for the executor", type(message).__name__)
            return
        handler(message)
        recovery = self._recovery
        if (recovery.wanted or recovery.held) and recovery.complete:
            self._take_over()

    def step(self, stamp: int, busy: Container[int] = ()) -> list[tuple[int, StepRecords]]:
        """Collect what the engine made and return what goes to each worker that is not busy. stamp: the time,
        nanoseconds."""
        self.tick(stamp)
        begin, since = self._clock(), self._wall()
        parts = self._engine.collect()
        self.collecting = self._wall() - since if parts else None
        self.engine_seconds += self._clock() - begin
        if parts:
            self.steps += 1
            self._leave(parts)
            self.tokens += self.dispatcher.record(parts)
        for rid in self.waiting.expired(stamp):
            self._reject(rid, "timeout")
        return self.dispatcher.take(stamp, busy)

    def _leave(self, parts: Iterable[Part]) -> None:
        """Let those wait no longer who have a token."""
        for part in parts:
            if isinstance(part, StepColumns):
                self.waiting.leave_all(part.rids)
            else:
                self.waiting.leave(part.rid)

    def tidy(self) -> None:
        """Do what can be done between two steps, when nobody waits."""
        self.dispatcher.tidy()

    def poll_timeout(self) -> float | None:
        """Seconds until ``step`` should be called without being woken; None: whenever something happens."""
        due = self._engine.poll_timeout()
        return due if not self.dispatcher.unsent_history else min(RETRY, RETRY if due is None else due)

    def stats(self) -> dict[str, Any]:
        """Counters of engine and dispatcher, for /metrics."""
        engine = {f"engine_{name}": value for name, value in self._engine.stats().items()}
        own = {
            "tokens": self.tokens,
            "steps": self.steps,
            "adopted": self.adopted,
            "restarted": self.restarted,
            "waiting": len(self.waiting),
            "waiting_tokens": self.waiting.tokens,
        }
        refused = {f"refused_{reason}": count for reason, count in self.waiting.refused.items()}
        return {**own, **refused, **engine, **self.dispatcher.stats()}

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    # -------------------------------------------------------------------------------- requests

    def _submit(self, request: GenerationRequest) -> None:
        if self.dispatcher.num_outputs(request.rid) or request.rid in self._recovery.wanted:
            logger.error("submit dropped: rid %d is already open", request.rid)
            return
        if not self.waiting.admit(request, self._now):
            self.answers.append((request.frontend, Rejected(request.rid, "queue")))
            return
        self.dispatcher.submit(request)
        for index in range(request.num_outputs):
            if not self._generate(request, index):
                return

    def _generate(self, request: GenerationRequest, index: int, history: Iterable[int] = ()) -> bool:
        """Have the engine make an output; False when the request failed instead."""
        prompt = request.prompts[index // request.n]
        try:
            self._engine.add(request.rid, index, prompt, request.sampling, list(history))
        except UnsupportedError as error:
            self._end(request.rid, "error", str(error))
            return False
        return True

    def _abort(self, message: Abort) -> None:
        """The engine stops, and the request ends on its worker like any other: its last emission tells the front
        end."""
        if message.rid in self._recovery.wanted:
            self._aborted.add(message.rid)
        self._end(message.rid, "abort")

    def _release(self, message: Release) -> None:
        self._recovery.release(message.rid)
        self.waiting.leave(message.rid)
        self._stop(message.rid, self.dispatcher.release(message.rid))

    def _cancel(self, message: Cancel) -> None:
        for rid, index in message.outputs:
            self._stop(rid, self.dispatcher.cancel(rid, index, message.worker))

    def _reject(self, rid: int, reason: str) -> None:
        """Its front end answers with a release, and what the worker has goes then. Were the worker told now, its last
        emission might be there first."""
        frontend = self.dispatcher.frontend(rid)
        if frontend is not None:
            self._stop(rid, range(self.dispatcher.num_outputs(rid)))
            self.answers.append((frontend, Rejected(rid, reason)))

    def _end(self, rid: int, reason: str, message: str = "") -> None:
        self.waiting.leave(rid)
        self._stop(rid, self.dispatcher.end(rid, reason, message))

    def _stop(self, rid: int, indexes: Iterable[int]) -> None:
        for index in indexes:
            self._engine.cancel(rid, index)

    # -------------------------------------------------------------------------------- who comes and goes

    def _worker_joined(self, message: WorkerJoined) -> None:
        self._recovery.worker_joined(message.worker, message.frontend)
        self.dispatcher.worker_joined(message.worker, message.frontend)

    def _worker_lost(self, message: WorkerLost) -> None:
        self._recovery.worker_lost(message)
        for request in self.dispatcher.worker_lost(message):
            self.waiting.leave(request.rid)
            self._stop(request.rid, range(request.num_outputs))
            self.answers.append((request.frontend, Rejected(request.rid, "poison")))

    def _frontend_lost(self, message: FrontendLost) -> None:
        if message.frontend in self._replaced:  # it is its predecessor that is meant
            self._replaced.discard(message.frontend)
            return
        self._present.discard(message.frontend)
        self._abandon(message.frontend)
        self.dispatcher.frontend_lost(message.frontend)

    def _synced(self, message: Synced) -> None:
        """A front end has said all. One that is there already is another one in its place, and came before the news of
        that one's end."""
        if message.frontend in self._present:
            self._replaced.add(message.frontend)
            self._abandon(message.frontend)
        self._present.add(message.frontend)
        self._recovery.synced(message.frontend)

    def _abandon(self, frontend: int) -> None:
        """Nobody waits for its requests any more."""
        self._recovery.forget_frontend(frontend)
        rids = self.dispatcher.of_frontend(frontend)
        if rids:
            logger.warning("front end %d is gone: %d requests are aborted", frontend, len(rids))
        for rid in rids:
            self._release(Release(rid))

    # -------------------------------------------------------------------------------- after an earlier executor

    def _resubmit(self, message: Resubmit) -> None:
        rid = message.request.rid
        if self.dispatcher.num_outputs(rid):
            logger.error("resubmit dropped: rid %d is already open", rid)
            return
        self._recovery.resubmit(message)

    def _take_over(self) -> None:
        """Everybody has spoken: go on with what is wanted, and end on the workers what is not."""
        recovery = self._recovery
        for rid, orphan in recovery.orphans():
            if self.dispatcher.num_outputs(rid):  # a worker that was announced twice: its requests are well known
                continue
            self.dispatcher.dismiss(orphan.worker, rid, orphan.outputs)
        for rid, known in recovery.wanted.items():
            held = recovery.held.get(rid)
            if held is None:
                self.dispatcher.adopt(known)
                self.restarted += 1
            else:
                outputs = held.histories(known.request.num_outputs)
                self.dispatcher.adopt(known, outputs, held.epoch, held.worker)
                self.adopted += 1
            for index, history in self.dispatcher.remaining(rid):
                if not self._generate(known.request, index, history):
                    break
        recovery.wanted.clear()
        recovery.held.clear()
        for rid in self._aborted:
            self._end(rid, "abort")
        self._aborted.clear()
