"""GenerationExecutor: submit to the executor, and abort, from another process.

It knows, for every open request, who waits for it (a sink) and how much that one has been given; so when a worker is
lost it can say from where each request has to go on, and emissions of an earlier epoch (the last words of a dead
worker) are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from executor.channel import bind_pull, connect_push, drain, try_send
from executor.messages import (
    FAILED,
    OUTPUT_END,
    REQUEST_END,
    Abort,
    Emissions,
    Message,
    Release,
    Status,
    WireError,
    WorkerJoined,
    WorkerLost,
)
from executor.request import GenerationRequest
from executor.result import AbortedError, GenerationResult, OutputDelta, ResultError
from executor.wire import FrameReader, decode_deltas, encode

logger = logging.getLogger("tailrace.proxy")


class Sink(Protocol):
    """Who waits for a request's bytes. Called on the event loop; must not block."""

    def feed(self, payload: bytes, flags: int) -> None:
        """More bytes; ``flags`` as in ``executor.messages``. Nothing follows REQUEST_END."""

    def fail(self, message: str) -> None:
        """The request cannot go on (the executor is gone); nothing follows."""


@dataclass(slots=True)
class _Pending:
    sink: Sink | None
    epoch: int = 0
    #: per output: tokens whose bytes the sink has, and whether it has the output's end
    delivered: list[tuple[int, bool]] = field(default_factory=list)
    worker: int | None = None


class _ResultSink:
    """Feeds a GenerationResult."""

    def __init__(self, result: GenerationResult) -> None:
        self._result = result

    def feed(self, payload: bytes, flags: int) -> None:
        try:
            for step in decode_deltas(payload):
                self._deliver(step)
        except WireError as error:  # an exception here would keep the other requests of the frame from their bytes
            self._result.deliver(ResultError(f"the worker's answer cannot be read: {error}"))
        if flags & FAILED and not payload:
            self._result.deliver(ResultError("the request was refused by its worker"))
        elif flags & REQUEST_END:
            # Every result ends, also where a post-processor's last step did not say so.
            self._result.deliver(ResultError("the request ended without a result"))

    def fail(self, message: str) -> None:
        self._result.deliver(ResultError(message))

    def _deliver(self, step: OutputDelta | str) -> None:
        if isinstance(step, str):
            self._result.deliver(ResultError(step))
        elif step.index >= len(self._result.outputs):
            raise WireError(f"delta: there is no output {step.index}")
        elif step.finish_reason == "abort":
            self._result.deliver(AbortedError("the generation was aborted"))
        else:
            self._result.deliver(step)


class GenerationExecutor:
    """One front end's end of the channel. All methods are called on the event loop's thread."""

    def __init__(self, frontend: int = 0) -> None:
        self.frontend = frontend
        #: emission rows for requests that are gone or under a newer epoch
        self.late_rows = 0
        self._frames = FrameReader(logger)
        #: messages that the executor's full queue refused
        self.dropped_messages = 0
        #: the executor's last report, and each worker's
        self.status: dict[str, Any] = {}
        self.worker_stats: dict[int, dict[str, Any]] = {}
        self._pending: dict[int, _Pending] = {}
        #: workers that are gone; their ids are never given again
        self._lost: set[int] = set()
        # Never reused, not even by a front end that starts again while the executor lives: it starts at the clock.
        self._rids = itertools.count((time.time_ns() // 1024) * 1024 + frontend, 1024)
        self._send: Callable[[Message], None] = _not_connected
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inbound: zmq.Socket[bytes] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def connect(self, executor_address: str, own_address: str) -> None:
        """Open the sockets, on the running event loop. AddressError or zmq.ZMQError where an address cannot be used."""
        self._context = zmq.Context()
        self._inbound = bind_pull(self._context, own_address)
        outbound = connect_push(self._context, executor_address)
        self._send = lambda message: self._push(outbound, message)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbound.fileno(), self._on_readable)
        loop.call_soon(self._on_readable)

    def connect_in_process(self, send: Callable[[Message], None]) -> None:
        """Use a function instead of sockets; emissions come in through ``receive``."""
        self._send = send

    def close(self) -> None:
        """Close the sockets; idempotent."""
        if self._context is None or self._inbound is None:
            return
        asyncio.get_running_loop().remove_reader(self._inbound.fileno())
        self._context.destroy(linger=500)
        self._context = self._inbound = None

    @property
    def refused_frames(self) -> int:
        """Malformed frames."""
        return self._frames.refused

    @property
    def open_requests(self) -> int:
        """Requests that have not had their last bytes."""
        return len(self._pending)

    async def wait_idle(self) -> None:
        """Return once no request is open."""
        while self._pending:
            self._idle.clear()
            await self._idle.wait()

    def mint(self) -> int:
        """A new rid."""
        return next(self._rids)

    def open(self, request: GenerationRequest, sink: Sink) -> None:
        """Submit a request whose bytes go to ``sink``. ResultError when the executor takes none; RuntimeError before
        ``connect``."""
        self._pending[request.rid] = _Pending(sink, delivered=[(0, False)] * request.num_outputs)
        sent = False
        try:
            self._send(request)
            sent = True
        finally:
            if not sent:  # the caller has the exception, and nobody would ever end what is not submitted
                del self._pending[request.rid]

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Submit a request of the ``deltas`` post-processor (``deltas_request``) and get a handle to step."""
        prompt_tokens = sum(map(len, request.prompts))
        result = GenerationResult(request.rid, request.num_outputs, prompt_tokens, self.abort)
        self.open(request, _ResultSink(result))
        return result

    def abort(self, rid: int) -> None:
        """Stop a request. Its state stays until the executor has confirmed: an abort that is forgotten too early leaves
        a generation running to its limit. Aborting twice, or a request that is over, does nothing."""
        if rid in self._pending:
            self._send(Abort(rid))

    def discard(self, rid: int) -> None:
        """Abort a request that nobody reads any more."""
        pending = self._pending.get(rid)
        if pending is not None and pending.sink is not None:
            pending.sink = None
            self._send(Abort(rid))

    def send(self, message: Message) -> None:
        """Pass a message on to the executor."""
        self._send(message)

    def worker_joined(self, worker: int, address: str) -> None:
        """Tell the executor about a worker."""
        self._send(WorkerJoined(worker, address))

    def worker_lost(self, worker: int) -> None:
        """A worker is gone: tell the executor what the clients of its requests have.

        What the dead worker had sent before may still lie in our socket. From here on it is dropped: the request goes
        on from ``delivered`` elsewhere, so the same bytes come again under the next epoch. A request that this worker
        had taken over from another dead one, and had not answered yet, is still known here as the other's: hence all
        lost ones.
        """
        self._lost.add(worker)
        self.worker_stats.pop(worker, None)
        self._send(
            WorkerLost(worker, {r: list(p.delivered) for r, p in self._pending.items() if p.worker in self._lost})
        )

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            if entry.sink is not None:
                entry.sink.fail(message)
        self._idle.set()

    def receive(self, message: Message) -> None:
        """Handle emissions or a status."""
        if isinstance(message, Emissions):
            self._emissions(message)
        elif isinstance(message, Status):
            self.status = dict(message.values)
        else:
            logger.warning("dropped a message of kind %s that is not for a front end", type(message).__name__)

    def _on_readable(self) -> None:
        if self._inbound is None:
            return
        frames = list(drain(self._inbound))
        for frame in frames:
            self._receive_frame(frame)
        if frames:
            # The descriptor of a ZeroMQ socket is edge-triggered: nobody calls again for what is left unread. Reading
            # on in a later turn of the loop lets the connections write in between.
            asyncio.get_running_loop().call_soon(self._on_readable)

    def _receive_frame(self, frame: bytes) -> None:
        message = self._frames.read(frame)
        if message is not None:
            self.receive(message)

    def _emissions(self, message: Emissions) -> None:
        if message.worker in self._lost:
            self.late_rows += len(message.rids)
            return
        if message.stats is not None:
            self.worker_stats[message.worker] = dict(message.stats)
        for rid, epoch, index, count, flags, payload in message.rows():
            pending = self._pending.get(rid)
            if pending is None or epoch < pending.epoch or index >= len(pending.delivered):
                self.late_rows += 1
                continue
            pending.epoch, pending.worker = epoch, message.worker
            pending.delivered[index] = (count, bool(flags & OUTPUT_END))
            if pending.sink is not None:
                pending.sink.feed(payload, flags)
            if flags & REQUEST_END:
                self._finished(rid)

    def _push(self, outbound: zmq.Socket[bytes], message: Message) -> None:
        """Send without waiting. Behind a full queue (100,000 messages: the executor hangs) a new request is refused;
        what ends one is only counted, since the caller has other requests to see to."""
        if try_send(outbound, encode(message)):
            return
        self.dropped_messages += 1
        logger.error("the executor's queue is full: dropped a message of kind %s", type(message).__name__)
        if isinstance(message, GenerationRequest):
            raise ResultError("the executor does not take requests")

    def _finished(self, rid: int) -> None:
        del self._pending[rid]
        self._send(Release(rid))
        if not self._pending:
            self._idle.set()


def _not_connected(message: Message) -> None:
    raise RuntimeError("GenerationExecutor: connect() first")
