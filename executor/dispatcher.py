"""Which worker has which request, what it has generated, and how it goes on when its worker is gone.

Events in, step records out; pure. The executor keeps every open request's ids until its client has all the bytes, so
what happens when a worker dies is one method, ``worker_lost``: its requests are opened again on other workers under the
next epoch, with their history and with how much of it each client has. The new worker folds that much in silence and
goes on.

``validate`` says what must hold between two events; tests call it after each.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import MAX_COUNT, Open, StepRecords, WorkerLost
from executor.request import GenerationRequest

logger = logging.getLogger("tailrace.executor")

#: Tokens of history in one message. With 20 alternatives each they are 130 MB, and a frame of 256 MB is refused.
MAX_HISTORY = 1 << 19
#: Rows in one message, for the same reason: a worker that stands still may have that many waiting.
MAX_ROWS = MAX_HISTORY // 2
#: Workers that a request may lose one after the other without a word to its client in between. Then it is taken for
#: what kills them, and fails.
MAX_FRUITLESS = 4


@dataclass(slots=True)
class OutputHistory:
    """What one output has generated.

    closed: no row of it is wanted any more: the engine ended it, or a worker did (stop string, hook, failure).
    last: the engine's finishing row, without its ids; it is sent again behind the history.
    """

    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] | None = None
    closed: bool = False
    last: StepRow | None = None


@dataclass(slots=True)
class Route:
    """One open request. worker: None while no worker is there to take it. fruitless: workers lost one after the other
    since its client got anything; delivered: how much that was."""

    request: GenerationRequest
    outputs: list[OutputHistory]
    worker: int | None = None
    epoch: int = 0
    fruitless: int = 0
    delivered: Sequence[tuple[int, bool]] = ()


@dataclass(slots=True)
class _Batch:
    opens: list[Open] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)
    #: tokens of resent histories among the rows
    history: int = 0


class Dispatcher:
    """Routes rows to workers. Requests are spread by how many each worker has open."""

    def __init__(self, max_fruitless: int = MAX_FRUITLESS) -> None:
        self._max_fruitless = max_fruitless
        #: rows that came for a request or output that was closed already
        self.late_rows = 0
        #: requests that were opened again after a worker was lost
        self.resumed = 0
        #: open requests, until ``release``
        self._routes: dict[int, Route] = {}
        #: worker -> its open requests
        self._load: dict[int, set[int]] = {}
        #: worker -> what it gets with the next ``take``
        self._batches: dict[int, _Batch] = {}
        #: requests without a worker, in the order in which they wait
        self._parked: dict[int, Sequence[tuple[int, bool]]] = {}

    @property
    def open_requests(self) -> int:
        """Requests that were not released yet."""
        return len(self._routes)

    def num_outputs(self, rid: int) -> int:
        """Outputs of an open request, 0 for others."""
        route = self._routes.get(rid)
        return len(route.outputs) if route is not None else 0

    def submit(self, request: GenerationRequest) -> None:
        """Take a new request. ValueError if its rid is open already."""
        if request.rid in self._routes:
            raise ValueError(f"rid {request.rid} is already open")
        outputs = [OutputHistory() for _ in range(request.num_outputs)]
        self._routes[request.rid] = Route(request, outputs)
        self._place(request.rid, ())

    def record(self, rows: Iterable[StepRow]) -> None:
        """Take the rows of an engine step: into the histories, and into the next batch of their workers."""
        routes, batches = self._routes, self._batches
        for row in rows:
            route = routes.get(row.rid)
            if route is None or route.outputs[row.index].closed:
                self.late_rows += 1
                continue
            self._remember(route.outputs[row.index], row)
            if route.worker is not None:
                batches[route.worker].rows.append(row)

    def end(self, rid: int, reason: str, message: str = "") -> list[int]:
        """End what is still open of a request with ``abort`` or ``error``; returns those outputs' indexes."""
        route = self._routes.get(rid)
        if route is None:
            return []
        indexes = [i for i, output in enumerate(route.outputs) if not output.closed]
        self.record([StepRow(rid, i, (), reason, False, message) for i in indexes])
        return indexes

    def cancel(self, rid: int, index: int, worker: int | None = None) -> list[int]:
        """An output (-1: all of them) has ended on ``worker``: close it; returns the indexes that the engine has to
        stop. A worker that does not have the request any more is not heard."""
        route = self._routes.get(rid)
        if route is None or index >= len(route.outputs) or worker not in (None, route.worker):
            return []
        indexes = range(len(route.outputs)) if index < 0 else [index]
        open_ones = [i for i in indexes if not route.outputs[i].closed]
        for i in open_ones:
            route.outputs[i].closed = True
        return open_ones

    def release(self, rid: int) -> list[int]:
        """Forget a request; returns outputs that were still open, which the engine has to stop."""
        open_ones = self.cancel(rid, -1)
        route = self._routes.pop(rid, None)
        self._parked.pop(rid, None)
        if route is not None and route.worker is not None:
            self._load[route.worker].discard(rid)
        return open_ones

    def worker_joined(self, worker: int) -> None:
        """A worker can take requests; those that waited for one go to it."""
        self._load.setdefault(worker, set())
        self._batches.setdefault(worker, _Batch())
        parked, self._parked = self._parked, {}
        for rid, delivered in parked.items():
            self._place(rid, delivered)

    def worker_lost(self, lost: WorkerLost) -> list[int]:
        """A worker is gone: open its requests elsewhere, from what their clients have. Returns requests that fail now
        because they seem to kill every worker: the engine has to stop them."""
        condemned = []
        self._batches.pop(lost.worker, None)
        for rid in sorted(self._load.pop(lost.worker, ())):
            route = self._routes[rid]
            route.epoch += 1
            self.resumed += 1
            delivered = lost.delivered.get(rid, ())
            route.fruitless = route.fruitless + 1 if delivered == route.delivered else 1
            route.delivered = delivered
            if route.fruitless >= self._max_fruitless:
                logger.error("request %d has cost %d workers in a row and fails", rid, route.fruitless)
                route.outputs = [_failed(rid, index) for index in range(len(route.outputs))]
                condemned.append(rid)
                delivered = ()
            self._place(rid, delivered)
        return condemned

    def take(self, stamp: int, busy: Container[int] = ()) -> list[tuple[int, StepRecords]]:
        """What each worker gets now. A busy worker gets nothing: its rows wait here and go in one message later, so the
        engine never waits for a worker and a slow one gets fewer, larger messages."""
        messages = []
        for worker, batch in self._batches.items():
            if (batch.rows or batch.opens) and worker not in busy:
                large = batch.history > MAX_HISTORY or len(batch.rows) > MAX_ROWS
                rest = _cut_history(batch) if large else _Batch()
                messages.append((worker, StepRecords.build(batch.rows, batch.opens, stamp)))
                self._batches[worker] = rest
        return messages

    @property
    def unsent_history(self) -> bool:
        """Whether a history was too long for one message: then ``take`` has more to give though the engine is
        silent."""
        return any(batch.history for batch in self._batches.values())

    def stats(self) -> Mapping[str, int]:
        """Counters for /metrics."""
        return {
            "open": len(self._routes),
            "parked": len(self._parked),
            "late_rows": self.late_rows,
            "resumed": self.resumed,
        }

    def validate(self) -> None:
        """Raise AssertionError unless the tables agree with each other."""
        placed = {rid for rids in self._load.values() for rid in rids}
        assert sum(map(len, self._load.values())) == len(placed), "a request on two workers"
        assert placed | set(self._parked) == set(self._routes), "a request neither placed nor parked"
        assert not placed & set(self._parked), "a request placed and parked"
        assert self._batches.keys() == self._load.keys(), "a batch for a worker that is not there"
        for worker, rids in self._load.items():
            assert all(self._routes[rid].worker == worker for rid in rids), "route and load disagree"

    def _remember(self, output: OutputHistory, row: StepRow) -> None:
        if len(row.token_ids) == 1:
            output.tokens.append(row.token_ids[0])
        else:
            output.tokens.extend(row.token_ids)
        if row.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs.extend(row.logprobs)
        if row.finish_reason is not None:
            output.closed, output.last = True, row

    def _place(self, rid: int, delivered: Sequence[tuple[int, bool]]) -> None:
        """Give a request to the worker with the fewest open ones, with all that was generated so far."""
        route = self._routes[rid]
        if not self._load:
            route.worker = None
            self._parked[rid] = delivered
            return
        worker = min(self._load, key=lambda w: (len(self._load[w]), w))
        route.worker = worker
        self._load[worker].add(rid)
        batch = self._batches[worker]
        request = route.request
        batch.opens.append(Open(rid, route.epoch, request.frontend, request.spec, delivered))
        # Outputs whose end the client has come first. What ends the whole response (usage, [DONE]) comes with the end
        # of the last output, and would be lost if that one were folded in silence.
        ended = {index for index, (_, end) in enumerate(delivered) if end}
        for index in sorted(range(len(route.outputs)), key=lambda index: index not in ended):
            batch.rows += _history_rows(rid, index, route.outputs[index])
            batch.history += len(route.outputs[index].tokens)


def _failed(rid: int, index: int) -> OutputHistory:
    """An output without a history: its worker is told of the failure and folds nothing that might kill it too."""
    return OutputHistory(
        closed=True, last=StepRow(rid, index, (), "error", False, "its post-processing failed repeatedly")
    )


def _cut_history(batch: _Batch) -> _Batch:
    """Leave the first rows in the batch, and all opens; returns the rest."""
    tokens = count = 0
    while count < len(batch.rows) and tokens < MAX_HISTORY:
        tokens += len(batch.rows[count].token_ids)
        count += 1
    rest = _Batch([], batch.rows[count:])
    rest.history = max(batch.history - tokens, len(rest.rows))  # never 0 while rows are left: new rows were counted too
    del batch.rows[count:]
    return rest


def _history_rows(rid: int, index: int, output: OutputHistory) -> list[StepRow]:
    """An output's history as rows of a size that the wire can count, the finish on the last."""
    rows = []
    for start in range(0, len(output.tokens), MAX_COUNT):
        part = slice(start, start + MAX_COUNT)
        logprobs = output.logprobs[part] if output.logprobs is not None else None
        rows.append(StepRow(rid, index, output.tokens[part].tolist(), logprobs=logprobs))
    if output.closed:
        last = rows.pop() if rows else StepRow(rid, index, ())
        # What a worker ended has no finish of the engine. The next worker ends it at the same token, unless it has a
        # hook that goes by the cut into steps: then this finish ends it, since nothing else would.
        finish = output.last or StepRow(rid, index, (), "stop")
        rows.append(
            last._replace(finish_reason=finish.finish_reason, stop_token=finish.stop_token, message=finish.message)
        )
    return rows
