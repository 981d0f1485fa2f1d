"""Which worker has which request, what it has generated, and how it goes on when its worker is gone.

Events in, step records out; pure. The executor keeps every open request's ids until its client has all the bytes, so
what happens when a worker dies is one method, ``worker_lost``: its requests are opened again on other workers under the
next epoch, with their history and with how much of it each client has. The new worker folds that much in silence and
goes on. A new executor takes over what its predecessor had with ``adopt``.

A request may be what kills its workers. Each worker notes which one it is handling, so the second death with the same
request in hand condemns that request, and nobody else's. Where a death tells nothing (memory that grew, say), a request
fails after ``MAX_FRUITLESS`` of them without a word to its client.

``validate`` says what must hold between two events; tests call it after each.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from executor.batch import Batch
from executor.cohort import Cohort, Lane
from executor.engines.base import Part, StepColumns, StepRow
from executor.history import OutputHistory
from executor.ledger import Ledger
from executor.messages import MAX_EPOCH, Delivered, Open, Resubmit, StepRecords, WorkerLost
from executor.request import GenerationRequest
from executor.rids import Rids

logger = logging.getLogger("tailrace.executor")

#: Deaths of workers with the same request in hand, until it is taken for their cause and fails.
MAX_KILLS = 2
#: Workers that a request may lose one after the other without a word to its client in between, until it fails too.
MAX_FRUITLESS = 8


@dataclass(slots=True)
class Route:
    """One open request. worker: None while no worker has it. kills: workers that died while they handled
    it. fruitless: workers lost one after the other since its client got anything; delivered: how much that was.

    first: outputs that have to end on the worker before it gets rows of the others (behind), because their end is with
    the client already, and was lost here. What ends the whole response (usage, [DONE]) comes with the end of the last
    output, and would be lost if that one were folded in silence.
    """

    request: GenerationRequest
    outputs: list[OutputHistory]
    worker: int | None = None
    epoch: int = 0
    kills: int = 0
    fruitless: int = 0
    delivered: Delivered = ()
    first: set[int] = field(default_factory=set)
    behind: Sequence[int] = ()


class Dispatcher:
    """Routes rows to workers. Requests are spread by how many each worker has open.

    Each front end announces the workers that it knows of, and gets none of another: so it knows of everyone that may
    send it something. Each also says when one is lost, and only then do its requests go on elsewhere: before that, more
    of the lost worker's last words may reach its clients. They are in *limbo* meanwhile.
    """

    def __init__(self, max_fruitless: int = MAX_FRUITLESS, incarnation: int = 0) -> None:
        self._max_fruitless = max_fruitless
        self._incarnation = incarnation
        #: rows that came for a request or output that was closed already
        self.late_rows = 0
        #: requests that were opened again after a worker was lost
        self.resumed = 0
        #: open requests, until ``release``
        self._routes: dict[int, Route] = {}
        #: worker -> its open requests
        self._load: dict[int, set[int]] = {}
        #: worker -> front ends that have announced it, and not said that it is lost
        self._known: dict[int, set[int]] = {}
        #: lost worker -> requests whose front end does not know
        self._limbo: dict[int, set[int]] = {}
        #: worker -> what it gets with the next ``take``
        self._batches: dict[int, Batch] = {}
        #: requests of which a usual row of output 0 has to go on: where to, see ``_record_columns``
        self._usual: dict[int, Lane] = {}
        #: what is known of the last columns
        self._cohort = Cohort(Rids(), self._usual)
        #: what enters ids into the histories
        self._ledger = Ledger()
        #: requests without a worker, in the order in which they wait
        self._parked: dict[int, Delivered] = {}

    @property
    def open_requests(self) -> int:
        """Requests that were not released yet."""
        return len(self._routes)

    def num_outputs(self, rid: int) -> int:
        """Outputs of an open request, 0 for others."""
        route = self._routes.get(rid)
        return len(route.outputs) if route is not None else 0

    def frontend(self, rid: int) -> int | None:
        """Who waits for an open request, None for others."""
        route = self._routes.get(rid)
        return route.request.frontend if route is not None else None

    def submit(self, request: GenerationRequest) -> None:
        """Take a new request. ValueError if its rid is open already."""
        if request.rid in self._routes:
            raise ValueError(f"rid {request.rid} is already open")
        self._routes[request.rid] = Route(request, self._histories(request))
        self._place(request.rid, ())

    def adopt(self, known: Resubmit, outputs: Sequence[OutputHistory] = (), epoch: int = 0, worker: int = -1) -> None:
        """Take over a request of an executor that died. outputs: what was generated, () if nobody knows; epoch, worker:
        who has or had it; a worker that is not there leaves it to be opened anew. ValueError as for ``submit``."""
        request = known.request
        if request.rid in self._routes:
            raise ValueError(f"rid {request.rid} is already open")
        route = Route(request, list(outputs) or self._histories(request))
        for output in route.outputs:
            output.ledger = self._ledger
        self._routes[request.rid] = route
        route.epoch = min(max(epoch, known.epoch) + 1, MAX_EPOCH)
        if worker in self._load:
            if any(end and not output.closed for (_, end), output in zip(known.delivered, route.outputs)):
                self._place(request.rid, known.delivered, worker)  # anew: that end has to be there first, see ``Route``
                return
            route.worker, route.epoch = worker, epoch
            self._load[worker].add(request.rid)
            self._speed_up(route)
            return
        if worker in self._limbo and request.frontend in self._known[worker]:
            route.epoch = epoch
            self._limbo[worker].add(request.rid)
            return
        self._place(request.rid, known.delivered)

    def _histories(self, request: GenerationRequest) -> list[OutputHistory]:
        return [OutputHistory(self._ledger) for _ in range(request.num_outputs)]

    def remaining(self, rid: int) -> list[tuple[int, Sequence[int]]]:
        """What the engine still has to do for an adopted request: each open output with the ids it has."""
        outputs = self._routes[rid].outputs
        return [(index, output.tokens) for index, output in enumerate(outputs) if not output.closed]

    def dismiss(self, worker: int, rid: int, indexes: Iterable[int]) -> None:
        """End outputs on a worker that nobody wants any more, and of which there is no route."""
        if worker in self._batches:
            for index in indexes:
                self._batches[worker].add(StepRow(rid, index, (), "abort"))

    def of_frontend(self, frontend: int) -> list[int]:
        """The open requests of a front end."""
        return [rid for rid, route in self._routes.items() if route.request.frontend == frontend]

    def record(self, parts: Iterable[Part]) -> int:
        """Take what an engine made: into the histories, and into the next batch of their workers. Returns how many ids
        that were."""
        total = 0
        for part in parts:
            total += len(part.token_ids)
            if isinstance(part, StepColumns):
                self._record_columns(part)
            else:
                self._record(part)
        return total

    def _record_columns(self, columns: StepColumns) -> None:
        """The rows of a batch barely change from step to step: what there is to know of them is known already, and no
        row is looked at. Measured, 256 rows of one worker: 0.03 µs a row, 0.2 where a request has come or gone; as rows
        1.2."""
        cohort = self._cohort
        if cohort.rids is not columns.rids:
            cohort = self._cohort = Cohort(columns.rids, self._usual, cohort)
        cohort.give(columns.token_ids, self._ledger)
        for rid, at in cohort.odd.items():
            self._record(StepRow(rid, 0, columns.token_ids[at : at + 1]))

    def _record(self, row: StepRow) -> None:
        route = self._routes.get(row.rid)
        if route is None or route.outputs[row.index].closed:
            self.late_rows += 1
            return
        route.outputs[row.index].add(row)
        if row.finish_reason is not None and not row.index:
            self._slow_down(row.rid)
        if route.worker is None:
            return
        if not route.first or row.index in route.first:
            self._batches[route.worker].add(row)
        if route.first and row.finish_reason is not None:
            self._settle(route, row.index)

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
            self._settle(route, i)
        if 0 in open_ones:
            self._slow_down(rid)
        return open_ones

    def release(self, rid: int) -> list[int]:
        """Forget a request; returns outputs that were still open, which the engine has to stop. They end on the worker
        too: where a front end had the last bytes from an earlier executor's time, a worker may have begun anew."""
        open_ones = self.end(rid, "abort")
        route = self._routes.pop(rid, None)
        self._parked.pop(rid, None)
        for limbo in self._limbo.values():
            limbo.discard(rid)
        if route is not None and route.worker is not None:
            self._load[route.worker].discard(rid)
        self._rest()
        return open_ones

    @property
    def workers(self) -> Collection[int]:
        """Those that take requests."""
        return self._load.keys()

    def worker_joined(self, worker: int, frontend: int = 0) -> None:
        """A worker can take requests of a front end; those that waited for one go to it."""
        self._known.setdefault(worker, set()).add(frontend)
        if worker in self._limbo:  # another front end knows better
            return
        self._load.setdefault(worker, set())
        self._batches.setdefault(worker, Batch())
        parked, self._parked = self._parked, {}
        for rid, delivered in parked.items():
            self._place(rid, delivered)

    def worker_lost(self, lost: WorkerLost) -> list[GenerationRequest]:
        """A worker is gone: open its requests elsewhere, from what their clients have; those of the front end that says
        so. Returns those that seem to kill every worker: they are forgotten, and reach no further one."""
        condemned = []
        self._to_limbo(lost.worker)
        for rid in self._out_of_limbo(lost.worker, lost.frontend):
            route = self._routes[rid]
            delivered = lost.delivered.get(rid, ())
            route.kills += rid == lost.culprit
            route.fruitless = route.fruitless + 1 if delivered == route.delivered else 1
            route.delivered = delivered
            if route.kills >= MAX_KILLS or route.fruitless >= self._max_fruitless:
                logger.error("request %d fails: it has cost %d workers", rid, max(route.kills, route.fruitless))
                condemned.append(self._routes.pop(rid).request)
                continue
            route.epoch = min(route.epoch + 1, MAX_EPOCH)
            self.resumed += 1
            self._place(rid, delivered)
        self._rest()
        return condemned

    def tidy(self) -> None:
        """Do what can be done between two steps."""
        self._ledger.tidy()

    def _rest(self) -> None:
        """Where nothing is open, keep nothing of what was."""
        if not self._routes:
            self._ledger.settle()
            self._cohort = Cohort(Rids(), self._usual)

    def frontend_lost(self, frontend: int) -> None:
        """A front end is gone, and its requests are released. The workers stay: another one will come in its place."""
        for worker, known in list(self._known.items()):
            known.discard(frontend)
            self._forget_lost(worker)

    def _to_limbo(self, worker: int) -> None:
        """Somebody has said that a worker is gone."""
        if worker in self._load:
            del self._batches[worker]
            self._limbo[worker] = self._load.pop(worker)
            for rid in self._limbo[worker]:
                self._routes[rid].worker = None
                self._slow_down(rid)

    def _out_of_limbo(self, worker: int, frontend: int) -> list[int]:
        """A front end takes nothing more from a lost worker; returns its requests that were there."""
        if worker not in self._limbo:
            return []
        self._known[worker].discard(frontend)
        limbo = self._limbo[worker]
        rids = sorted(rid for rid in limbo if self._routes[rid].request.frontend == frontend)
        limbo.difference_update(rids)
        self._forget_lost(worker)
        return rids

    def _forget_lost(self, worker: int) -> None:
        if worker in self._limbo and not self._known[worker]:
            del self._limbo[worker], self._known[worker]

    def take(self, stamp: int, busy: Container[int] = ()) -> list[tuple[int, StepRecords]]:
        """What each worker gets now. A busy worker gets nothing: its rows wait here and go in one message later, so the
        engine never waits for a worker and a slow one gets fewer, larger messages."""
        return [
            (worker, batch.take(stamp, self._incarnation))
            for worker, batch in self._batches.items()
            if batch and worker not in busy
        ]

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
        limbo = {rid for rids in self._limbo.values() for rid in rids}
        assert placed | set(self._parked) | limbo == set(self._routes), "a request neither placed nor parked"
        assert len(placed) + len(self._parked) + len(limbo) == len(self._routes), "a request in two places"
        assert self._batches.keys() == self._load.keys(), "a batch for a worker that is not there"
        assert self._known.keys() == self._load.keys() | self._limbo.keys(), "a worker that nobody has announced"
        self._validate_lanes()
        for worker, rids in self._load.items():
            assert all(self._routes[rid].worker == worker for rid in rids), "route and load disagree"

    def _validate_lanes(self) -> None:
        for rid, (batch, history) in self._usual.items():
            route = self._routes[rid]
            assert route.worker is not None and not route.outputs[0].closed and not route.first, "not so usual"
            assert batch is self._batches[route.worker] and history is route.outputs[0].settled, "a lane elsewhere"
        self._cohort.validate(self._usual)

    def _settle(self, route: Route, index: int) -> None:
        """An output has ended; if it was the last that had to, the others follow."""
        if index not in route.first:
            return
        route.first.remove(index)
        if not route.first and route.worker is not None:
            self._resend(route, route.behind)

    def _resend(self, route: Route, indexes: Iterable[int]) -> None:
        """Give the worker what outputs have generated so far."""
        assert route.worker is not None
        batch, rid = self._batches[route.worker], route.request.rid
        for index in indexes:
            for row in route.outputs[index].rows(rid, index):
                batch.add(row)
            batch.history += len(route.outputs[index].tokens)
        self._speed_up(route)

    def _speed_up(self, route: Route) -> None:
        """Let the usual rows of a request take the fast lane, if they are sure to be usual."""
        if not route.outputs[0].closed and not route.first:
            assert route.worker is not None
            self._usual[route.request.rid] = self._batches[route.worker], route.outputs[0].settled
            if route.request.rid in self._cohort.odd:
                self._cohort.lapse()

    def _slow_down(self, rid: int) -> None:
        """A row of a request is not usual any more."""
        if self._usual.pop(rid, None) is not None:
            self._cohort.lapse()

    def _place(self, rid: int, delivered: Delivered, worker: int | None = None) -> None:
        """Give a request to a worker, else to the one with the fewest open ones, with all that was generated so far."""
        route = self._routes[rid]
        route.first = set()
        request = route.request
        if worker is None:
            workers = [worker for worker in self._load if request.frontend in self._known[worker]]
            if not workers:
                route.worker = None
                self._parked[rid] = delivered
                return
            worker = min(workers, key=lambda w: (len(self._load[w]), w))
        route.worker = worker
        self._load[worker].add(rid)
        self._batches[worker].opens.append(Open(rid, route.epoch, request.frontend, request.spec, delivered))
        ended = [index for index, ((_, end), _) in enumerate(zip(delivered, route.outputs)) if end]
        route.behind = [index for index in range(len(route.outputs)) if index not in ended]
        route.first = {index for index in ended if not route.outputs[index].closed}
        self._resend(route, ended)
        if not route.first:
            self._resend(route, route.behind)
