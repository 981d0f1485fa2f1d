"""GenerationExecutor: submit to the executor, and abort, from another process.

It knows, for every open request, who waits for it (a sink) and how much that one has been given; so when a worker is
lost it can say from where each request has to go on, and emissions of an earlier epoch (the last words of a dead
worker) are dropped.

While there is no executor nothing is sent: what would have been is state here, and a new executor is told the state,
not the messages it has missed (``executor_joined``; what it makes of that: ``executor/recovery.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import zmq

from executor.channel import EMISSIONS_HWM, bind_pull, connect_push, drain, try_send
from executor.histogram import Histogram
from executor.messages import (
    OUTPUT_END,
    REQUEST_END,
    Abort,
    Emissions,
    Message,
    Rejected,
    Release,
    Resubmit,
    Status,
    Synced,
    WorkerJoined,
    WorkerLost,
    cut,
)
from executor.pending import Cohort, Pending
from executor.request import GenerationRequest
from executor.result import GenerationResult, ResultError
from executor.rids import Rids
from executor.same import all_are
from executor.sink import ResultSink, Sink
from executor.wire import FrameReader, encode

logger = logging.getLogger("tailrace.proxy")

#: Executors that may die under a request, one soon after the other and without a word to its client in between. Then it
#: is taken for what kills them, and fails; it should before the server is given up.
MAX_EXECUTORS = 4
#: Seconds: what lets an executor live that long does not kill it.
HARMLESS = 10.0

#: Rows of a message that are worth looking at as a column.
_COLUMN = 2
#: Rows after which other things have their turn on the event loop: each is a write to a connection.
_ROWS_AT_ONCE = 1024

#: reason of ``Rejected``, where no byte can have been sent -> (what the client is told, HTTP status, seconds until it
#: may try again)
REJECTED = {
    "queue": ("Too many prompt tokens wait for the engine already.", 429, 1.0),
    "timeout": ("The request waited too long for its first token.", 503, 5.0),
}


class GenerationExecutor:
    """One front end's end of the channel. All methods are called on the event loop's thread."""

    def __init__(self, frontend: int = 0) -> None:
        self.frontend = frontend
        #: emission rows for requests that are gone or under a newer epoch
        self.late_rows = 0
        self._frames = FrameReader(logger)
        #: messages that the executor's full queue refused
        self.dropped_messages = 0
        #: seconds until the connections had a message's bytes: since the worker sent it, and since the executor shipped
        #: the oldest of its steps
        self.write_lag, self.chunk_lag = Histogram(), Histogram()
        #: of the message that sinks are being fed from: when its oldest step was shipped, as in ``Emissions``
        self.stamp = 0
        #: the executor's last report, and each worker's
        self.status: dict[str, Any] = {}
        self.worker_stats: dict[int, dict[str, Any]] = {}
        self._pending: dict[int, Pending] = {}
        #: worker -> the requests of its last message that was one column
        self._cohorts: dict[int, Cohort] = {}
        #: workers that are gone; their ids are never given again
        self._lost: set[int] = set()
        #: workers that live, and where they listen
        self._workers: dict[int, str] = {}
        #: whether there is an executor to talk to, and since when (seconds, monotonic)
        self._connected, self._joined_at = False, 0.0
        # Never reused, not even by a front end that starts again while the executor lives: it starts at the clock.
        self._rids = itertools.count((time.time_ns() // 1024) * 1024 + frontend, 1024)
        self._transmit: Callable[[Message], None] = _not_connected
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inbound: zmq.Socket[bytes] | None = None
        self._outbound: zmq.Socket[bytes] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def listen(self, own_address: str) -> None:
        """Open the socket on which answers come, on the running event loop. AddressError or zmq.ZMQError where the
        address cannot be used."""
        self._context = zmq.Context()
        self._inbound = bind_pull(self._context, own_address, EMISSIONS_HWM)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbound.fileno(), self._on_readable)
        loop.call_soon(self._on_readable)
        self._transmit = self._push

    def connect_in_process(self, send: Callable[[Message], None]) -> None:
        """Use a function instead of sockets; emissions come in through ``receive``."""
        self._transmit = send
        self._connected = True

    def executor_joined(self, address: str | None = None) -> None:
        """There is an executor, at ``address`` unless in this process: tell it all there is to know."""
        if address is not None:
            assert self._context is not None, "listen() first"
            self._outbound = connect_push(self._context, address)
        self._connected, self._joined_at = True, time.monotonic()
        for worker, where in self._workers.items():
            self._send(WorkerJoined(worker, where, self.frontend))
        for rid, pending in self._pending.items():
            self._send(Resubmit(pending.request, pending.delivered, pending.epoch))
            if pending.aborted:
                self._send(Abort(rid))
        self._send(Synced(self.frontend))

    def executor_lost(self) -> None:
        """The executor is gone: keep what is open for the next one. Requests that nobody reads any more end here, and
        so do those under which one executor after the other has died."""
        self._connected = False
        if self._outbound is not None:
            self._outbound.close(linger=0)
            self._outbound = None
        soon = time.monotonic() - self._joined_at < HARMLESS
        for rid, pending in list(self._pending.items()):
            pending.executors = pending.executors + 1 if soon and pending.delivered == pending.had else 1
            pending.had = pending.delivered
            if pending.sink is None:
                self._forget(rid)
            elif pending.executors >= MAX_EXECUTORS:
                logger.error("request %d fails: %d executors in a row died under it", rid, pending.executors)
                self._forget(rid)
                pending.sink.fail("the executor died repeatedly during this request")

    def close(self) -> None:
        """Close the sockets; idempotent."""
        if self._context is None or self._inbound is None:
            return
        asyncio.get_running_loop().remove_reader(self._inbound.fileno())
        self._context.destroy(linger=500)
        self._context = self._inbound = self._outbound = None
        self._connected = False

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

    def tokens_of(self, rid: int) -> int:
        """Tokens that the sink of an open request has been told of, over all outputs."""
        return sum(count for count, _ in self._pending[rid].delivered)

    def mint(self) -> int:
        """A new rid."""
        return next(self._rids)

    def open(self, request: GenerationRequest, sink: Sink) -> None:
        """Submit a request whose bytes come here, to ``sink``. ResultError when the executor takes none; RuntimeError
        before ``listen``."""
        if self._transmit is _not_connected:
            raise RuntimeError("GenerationExecutor: listen() first")
        # It is kept for as long as it is open: a prompt as a list of integers would be eight times as large.
        prompts = [array("i", prompt) for prompt in request.prompts]
        request = replace(request, prompts=prompts, frontend=self.frontend)
        outputs = request.num_outputs
        self._pending[request.rid] = Pending(sink, request, counts=[0] * outputs, ends=[False] * outputs)
        sent = False
        try:
            self._send(request)
            sent = True
        finally:
            if not sent:  # the caller has the exception, and nobody would ever end what is not submitted
                self._forget(request.rid)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Submit a request of the ``deltas`` post-processor (``deltas_request``) and get a handle to step."""
        prompt_tokens = sum(map(len, request.prompts))
        result = GenerationResult(request.rid, request.num_outputs, prompt_tokens, self.abort)
        self.open(request, ResultSink(result))
        return result

    def abort(self, rid: int) -> None:
        """Stop a request. Its state stays until the executor has confirmed: an abort that is forgotten too early leaves
        a generation running to its limit. Aborting twice, or a request that is over, does nothing."""
        pending = self._pending.get(rid)
        if pending is not None:
            pending.aborted = True
            self._send(Abort(rid))

    def discard(self, rid: int) -> None:
        """Abort a request that nobody reads any more."""
        pending = self._pending.get(rid)
        if pending is None or pending.sink is None:
            return
        pending.alone()
        pending.sink, pending.aborted = None, True
        if self._connected:
            self._send(Abort(rid))
        else:
            self._forget(rid)

    def send(self, message: Message) -> None:
        """Pass a message on to the executor."""
        self._send(message)

    def worker_joined(self, worker: int, address: str) -> None:
        """Tell the executor about a worker."""
        self._workers[worker] = address
        self._send(WorkerJoined(worker, address, self.frontend))

    def worker_lost(self, worker: int, culprit: int = -1) -> None:
        """A worker is gone: tell the executor what the clients of its requests have. culprit: the request that it had
        in hand, -1 if that is not known.

        What the dead worker had sent before may still lie in our socket. From here on it is dropped: the request goes
        on from ``delivered`` elsewhere, so the same bytes come again under the next epoch. A request that this worker
        had taken over from another dead one, and had not answered yet, is still known here as the other's: hence all
        lost ones.
        """
        self._lost.add(worker)
        self._workers.pop(worker, None)
        self._cohorts.pop(worker, None)
        self.worker_stats.pop(worker, None)
        delivered = {r: p.delivered for r, p in self._pending.items() if p.worker in self._lost}
        self._send(WorkerLost(worker, delivered, culprit, self.frontend))

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        pending, self._pending, self._cohorts = self._pending, {}, {}
        for entry in pending.values():
            if entry.sink is not None:
                entry.sink.fail(message)
        self._idle.set()

    def receive(self, message: Message) -> None:
        """Handle emissions, an answer or a status."""
        if isinstance(message, Emissions):
            self._emissions(message)
        elif isinstance(message, Rejected):
            self._rejected(message)
        elif isinstance(message, Status):
            self.status = dict(message.values)
        else:
            logger.warning("dropped a message of kind %s that is not for a front end", type(message).__name__)

    def _on_readable(self) -> None:
        rows = 0
        while self._inbound is not None and rows < _ROWS_AT_ONCE:
            frames = drain(self._inbound, 1)
            if not frames:
                return
            rows += self._receive_frame(frames[0])
        if self._inbound is not None:
            # The descriptor of a ZeroMQ socket is edge-triggered: nobody calls again for what is left unread. Reading
            # on in a later turn of the loop lets the connections write in between.
            asyncio.get_running_loop().call_soon(self._on_readable)

    def _receive_frame(self, frame: bytes) -> int:
        """Returns how many rows that were, or what is as much work."""
        message = self._frames.read(frame)
        if message is not None:
            self.receive(message)
        return 1 + len(message.rids) if isinstance(message, Emissions) else 1

    def _emissions(self, message: Emissions) -> None:
        if message.worker in self._lost:
            self.late_rows += len(message.rids)
            return
        if message.stats is not None:
            self.worker_stats[message.worker] = dict(message.stats)
        self.stamp = message.stamp
        if message.around:
            self._learn(message.rids, message.around)
        cohort = self._cohort(message)
        if cohort is not None:
            cohort.feed(message.counts, cut(message.payload, message.sizes))
        else:
            self._feed(message)
        if message.sent:
            self._note_lag(message)

    def _learn(self, rids: Sequence[int], around: Mapping[int, tuple[bytes, bytes]]) -> None:
        """What stands around the pieces of some streams."""
        for at, constants in around.items():
            pending = self._pending.get(rids[at])
            if pending is not None:
                pending.around = constants

    def _cohort(self, message: Emissions) -> Cohort | None:
        """The requests of a message that is a column: many rows that are no end and say something of only outputs."""
        worker, rids, epochs = message.worker, message.rids, message.epochs
        if (
            len(rids) < _COLUMN
            or type(rids) is not Rids
            or not (all_are(message.flags, 0) and all_are(message.indexes, 0))
        ):
            return None
        bare = message.around is not None
        cohort = self._cohorts.get(worker)
        alike = cohort is not None and cohort.bare is bare
        if cohort is not None and alike and cohort.has(rids, epochs):
            return cohort
        if cohort is not None and cohort.outweighs(rids):
            return None
        if cohort is not None and alike and cohort.change(rids, epochs, worker, self._pending.get):
            return cohort
        pendings = list(map(self._pending.get, rids))
        if len(set(rids)) != len(rids) or not Cohort.fits(pendings, epochs, bare):
            if cohort is not None:  # its requests would leave one by one
                self._cohorts.pop(worker).dissolve()
            return None
        cohort = self._cohorts[worker] = Cohort(rids, epochs, worker, pendings, bare)
        return cohort

    def _feed(self, message: Emissions) -> None:
        pendings, worker, bare = self._pending, message.worker, message.around is not None
        for rid, epoch, index, count, flags, payload in message.rows():
            pending = pendings.get(rid)
            if pending is None or epoch < pending.epoch or index >= len(pending.counts):
                self.late_rows += 1
                continue
            if bare:
                if pending.around is None:  # no worker of ours sends that
                    self.late_rows += 1
                    continue
                payload = pending.around[0] + payload + pending.around[1]
            pending.alone()
            pending.epoch, pending.worker = epoch, worker
            pending.counts[index] = count
            sink = pending.sink
            if not flags:  # all rows but the last one or two of an output
                if sink is not None:
                    sink.feed(payload, 0)
                continue
            pending.ends[index] = bool(flags & OUTPUT_END)
            if sink is not None:
                sink.feed(payload, flags)
            if flags & REQUEST_END:
                self._finished(rid)

    def _note_lag(self, message: Emissions) -> None:
        """Once a message, when all of it is handed over."""
        now = time.monotonic_ns()
        self.write_lag.observe((now - message.sent) / 1e9)
        if message.stamp:
            self.chunk_lag.observe((now - message.stamp) / 1e9)

    def _rejected(self, message: Rejected) -> None:
        pending = self._pending.get(message.rid)
        if pending is None:
            return
        self._finished(message.rid)
        if pending.sink is None:
            return
        if message.reason == "poison":
            pending.sink.fail("The request's post-processing failed repeatedly.")
        else:
            pending.sink.refuse(*REJECTED[message.reason])

    def _send(self, message: Message) -> None:
        if self._connected:
            self._transmit(message)

    def _push(self, message: Message) -> None:
        """Send without waiting. Behind a full queue (100,000 messages: the executor hangs) a new request is refused;
        what ends one is only counted, since the caller has other requests to see to."""
        assert self._outbound is not None
        if try_send(self._outbound, encode(message)):
            return
        self.dropped_messages += 1
        logger.error("the executor's queue is full: dropped a message of kind %s", type(message).__name__)
        if isinstance(message, GenerationRequest):
            raise ResultError("the executor does not take requests")

    def _finished(self, rid: int) -> None:
        self._forget(rid)
        self._send(Release(rid))

    def _forget(self, rid: int) -> None:
        self._pending.pop(rid).alone()
        if not self._pending:
            self._cohorts.clear()
            self._idle.set()


def _not_connected(message: Message) -> None:
    raise RuntimeError("GenerationExecutor: listen() first")
