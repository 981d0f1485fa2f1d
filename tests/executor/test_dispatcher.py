"""The dispatcher: every worker gets every token of its requests once and in order, whoever dies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from executor.dispatcher import MAX_FRUITLESS, Dispatcher
from executor.engines.base import StepColumns, StepRow, TokenLogprob
from executor.messages import MAX_COUNT, Open, StepRecords, WorkerLost
from executor.request import GenerationRequest, SamplingParams
from executor.rids import Rids
from tests.helpers import Columns


def request(rid: int, outputs: int = 1, frontend: int = 0) -> GenerationRequest:
    return GenerationRequest(rid, [[1]], SamplingParams(), b"spec%d" % rid, outputs, frontend)


#: Front ends of the random test.
FRONTENDS = 2


def frontend_of(rid: int) -> int:
    return rid % FRONTENDS


class Worker:
    """What a worker makes of its messages: per request the epoch, what was delivered before, and each output's rows."""

    def __init__(self) -> None:
        self.opens: dict[int, Open] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.logprobs: dict[tuple[int, int], list[TokenLogprob]] = {}
        self.finishes: dict[tuple[int, int], str] = {}

    def take(self, steps: StepRecords) -> None:
        for opened in steps.opens:
            assert opened.rid not in self.opens, "opened twice on one worker"
            self.opens[opened.rid] = opened
        for rid, index, ids, finish, logprobs in steps.rows():
            assert rid in self.opens, "a row before its open"
            key = rid, index
            assert key not in self.finishes, "a row behind the end"
            assert ids or finish, "an empty row"
            self.tokens.setdefault(key, []).extend(ids)
            self.logprobs.setdefault(key, []).extend(logprobs or ())
            if finish is not None:
                self.finishes[key] = finish.reason


class Output:
    """What the test knows of one output. end: None, ``engine`` or ``worker``."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: str | None = None
        self.reason: str | None = None


class DispatcherMachine(RuleBasedStateMachine):
    """Random events, and after each: the tables agree, and each worker will have got exactly what was generated."""

    rids = Bundle("rids")
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(max_fruitless=1000)
        self.requests: dict[int, list[Output]] = {}
        self.alive: dict[int, Worker] = {}
        #: worker -> the front ends that know of it; and dead workers, with those that do not know yet that they are
        self.known: dict[int, set[int]] = {}
        self.dead: dict[int, tuple[Worker, set[int]]] = {}
        self.late = 0
        self.next_rid = self.next_worker = self.next_token = 0
        self.delivered: dict[int, list[tuple[int, bool]]] = {}
        #: requests without log-probabilities, open or not; and those that a step of the engine has rows of
        self.plain: set[int] = set()
        self.batch: list[int] = []
        self.columns = Columns()

    @rule(target=rids, outputs=st.integers(1, 3), plain=st.booleans())
    def submit(self, outputs: int, plain: bool) -> int:
        self.next_rid += 1
        if plain:
            self.plain.add(self.next_rid)
            self.batch.append(self.next_rid)
        self.dispatcher.submit(request(self.next_rid, outputs, frontend_of(self.next_rid)))
        self.requests[self.next_rid] = [Output() for _ in range(outputs)]
        return self.next_rid

    @rule(rid=rids)
    def submit_twice(self, rid: int) -> None:
        if rid in self.requests:
            with pytest.raises(ValueError, match=str(rid)):
                self.dispatcher.submit(request(rid))

    @rule(
        rid=rids,
        index=st.integers(0, 2),
        count=st.integers(1, 3),
        reason=st.none() | st.sampled_from(("stop", "length", "error")),
    )
    def record(self, rid: int, index: int, count: int, reason: str | None) -> None:
        index = index % len(self.requests.get(rid, "?"))
        assert self.dispatcher.record([self.row(rid, index, count, reason)]) == count

    def row(self, rid: int, index: int, count: int = 1, reason: str | None = None) -> StepRow:
        """What the engine makes next of an output."""
        ids = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        outputs = self.requests.get(rid)
        if outputs is None or outputs[index].end:
            self.late += 1
        else:
            outputs[index].tokens += ids
            if reason is not None:
                outputs[index].end, outputs[index].reason = "engine", reason
        logprobs = None if rid in self.plain else [TokenLogprob(-float(i)) for i in ids]
        return StepRow(rid, index, ids, reason, logprobs=logprobs)

    @rule(data=st.data())
    def others_step(self, data: st.DataObject) -> None:
        """The engine has another batch now; perhaps of some that are over."""
        if self.plain:
            self.batch = data.draw(st.lists(st.sampled_from(sorted(self.plain)), unique=True))

    @rule(steps=st.integers(1, 3), columns=st.sampled_from((True, True, False)))
    def step(self, steps: int, columns: bool) -> None:
        """The engine gives usual rows of its batch, as it likes to."""
        rows = [self.row(rid, 0) for _ in range(steps) for rid in self.batch]
        assert self.dispatcher.record(self.columns.of(rows) if columns else rows) == len(rows)

    @rule(ending=st.integers(0, 5))
    def step_with_an_end(self, ending: int) -> None:
        """One of the batch ends, and is in no further step."""
        rows = [self.row(rid, 0, reason="length" if at == ending else None) for at, rid in enumerate(self.batch)]
        self.dispatcher.record(self.columns.of(rows))
        del self.batch[ending : ending + 1]

    @rule(rid=rids, reason=st.sampled_from(("abort", "error")))
    def end(self, rid: int, reason: str) -> None:
        outputs = self.requests.get(rid, [])
        indexes = [i for i, output in enumerate(outputs) if not output.end]
        assert self.dispatcher.end(rid, reason, "why") == indexes
        for i in indexes:
            outputs[i].end, outputs[i].reason = "engine", reason

    @rule(rid=rids, index=st.integers(-1, 3))
    def cancel(self, rid: int, index: int) -> None:
        outputs = self.requests.get(rid, [])
        wanted = range(len(outputs)) if index < 0 else [index] if index < len(outputs) else []
        indexes = [i for i in wanted if not outputs[i].end]
        assert self.dispatcher.cancel(rid, index) == indexes
        for i in indexes:
            outputs[i].end = "worker"

    @rule(rid=rids)
    def release(self, rid: int) -> None:
        outputs = self.requests.pop(rid, [])
        assert self.dispatcher.release(rid) == [i for i, output in enumerate(outputs) if not output.end]

    @rule(target=workers, frontend=st.integers(0, FRONTENDS - 1))
    def join(self, frontend: int) -> int:
        self.next_worker += 1
        self.alive[self.next_worker] = Worker()
        self.known[self.next_worker] = set()
        self.announce(self.next_worker, frontend)
        return self.next_worker

    @rule(worker=workers, frontend=st.integers(0, FRONTENDS - 1))
    def announce(self, worker: int, frontend: int) -> None:
        """A front end hears of a worker, perhaps when another one has seen it die; not behind its own news of that."""
        if worker in self.alive:
            self.known[worker].add(frontend)
            self.dispatcher.worker_joined(worker, frontend)
        elif worker in self.dead and self.dead[worker][1] and frontend not in self.known[worker]:
            self.known[worker].add(frontend)
            self.dead[worker][1].add(frontend)
            self.dispatcher.worker_joined(worker, frontend)

    @rule(worker=workers, frontend=st.integers(0, FRONTENDS - 1), data=st.data())
    def lose(self, worker: int, frontend: int, data: st.DataObject) -> None:
        """A front end has some of what the worker got, and says so; and again what it had of workers lost before."""
        if frontend not in self.known[worker]:
            return
        if worker in self.alive:
            self.dead[worker] = self.alive.pop(worker), set(self.known[worker])
        dead, unaware = self.dead[worker]
        unaware.discard(frontend)
        for rid, outputs in self.requests.items():
            if rid in dead.opens and frontend_of(rid) == frontend:
                counts = [data.draw(st.integers(0, len(dead.tokens.get((rid, i), [])))) for i in range(len(outputs))]
                self.delivered[rid] = [(count, data.draw(st.booleans())) for count in counts]
        delivered = {rid: counts for rid, counts in self.delivered.items() if frontend_of(rid) == frontend}
        self.dispatcher.worker_lost(WorkerLost(worker, delivered, frontend=frontend))

    @rule(frontend=st.integers(0, FRONTENDS - 1))
    def lose_frontend(self, frontend: int) -> None:
        """All that it had is released, and it knows nobody any more."""
        assert set(self.dispatcher.of_frontend(frontend)) == {r for r in self.requests if frontend_of(r) == frontend}
        for rid in self.dispatcher.of_frontend(frontend):
            self.release(rid)
        self.dispatcher.frontend_lost(frontend)
        for known in self.known.values():
            known.discard(frontend)
        for _, unaware in self.dead.values():
            unaware.discard(frontend)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        busy = {worker for worker in self.alive if data.draw(st.booleans())}
        taken = self.dispatcher.take(7, busy)
        assert len({worker for worker, _ in taken}) == len(taken)
        for worker, steps in taken:
            assert worker not in busy and steps.stamp == 7
            self.alive[worker].take(steps)

    @precondition(lambda self: self.alive)
    @rule()
    def everything_arrives(self) -> None:
        """Nobody is busy: what each request's worker has is what was generated."""
        for worker, steps in self.dispatcher.take(0):
            self.alive[worker].take(steps)
        for rid, outputs in self.requests.items():
            holders = [worker for worker in self.alive if rid in self.alive[worker].opens]
            assert len(holders) <= 1, f"request {rid} is on {holders}"
            for holder in holders:
                assert frontend_of(rid) in self.known[holder]
                self.check(rid, outputs, self.alive[holder])
            assert holders or self.waits(rid), f"request {rid} is nowhere"

    def waits(self, rid: int) -> bool:
        """Whether its front end knows nobody who could take it, or has not heard of the end of somebody who had it."""
        unaware = any(frontend_of(rid) in unaware for _, unaware in self.dead.values())
        return unaware or not any(frontend_of(rid) in self.known[worker] for worker in self.alive)

    def check(self, rid: int, outputs: Sequence[Output], worker: Worker) -> None:
        opened = worker.opens[rid]
        assert (opened.spec, opened.frontend) == (b"spec%d" % rid, frontend_of(rid))
        if opened.epoch:
            assert list(opened.delivered) == self.delivered.get(rid, [])
        else:
            assert list(opened.delivered) == []
        for index, output in enumerate(outputs):
            key = rid, index
            assert worker.tokens.get(key, []) == output.tokens
            entries = [-entry.logprob for entry in worker.logprobs.get(key, [])]
            assert entries == ([] if rid in self.plain else output.tokens)
            if output.end == "engine":
                assert worker.finishes[key] == output.reason

    @invariant()
    def tables_agree(self) -> None:
        self.dispatcher.validate()
        assert self.dispatcher.open_requests == len(self.requests)
        assert self.dispatcher.late_rows == self.late
        stats = self.dispatcher.stats()
        assert stats["open"] == len(self.requests) and stats["late_rows"] == self.late
        served = {frontend for worker in self.alive for frontend in self.known[worker]}
        if len(served) == FRONTENDS:
            assert stats["parked"] == 0


TestDispatcher = DispatcherMachine.TestCase


def test_what_a_lost_worker_had_waits_for_its_own_front_end() -> None:
    """Its client may still be getting what that worker has made, as long as its front end does not know."""
    dispatcher = Dispatcher()
    for worker in (0, 1):
        for frontend in (0, 1):
            dispatcher.worker_joined(worker, frontend)
    for rid in (10, 11, 12, 13):  # 10 and 12 go to worker 0
        dispatcher.submit(request(rid, frontend=rid >= 12))
    dispatcher.record([StepRow(rid, 0, [rid]) for rid in (10, 11, 12, 13)])
    assert [opened.rid for opened in taken(dispatcher)[0].opens] == [10, 12]

    dispatcher.worker_lost(WorkerLost(0, {10: [(1, False)]}, frontend=0))
    dispatcher.record([StepRow(12, 0, [99])])
    assert [opened.rid for opened in taken(dispatcher)[1].opens] == [10]
    assert dispatcher.cancel(12, 0, worker=0) == []  # its last word

    dispatcher.worker_lost(WorkerLost(0, {12: [(0, False)]}, frontend=1))
    (steps,) = taken(dispatcher).values()
    assert [(opened.rid, opened.epoch, opened.delivered) for opened in steps.opens] == [(12, 1, [(0, False)])]
    assert [row[:3] for row in steps.rows()] == [(12, 0, [12, 99])]
    assert list(dispatcher.workers) == [1]


def test_a_front_end_gets_only_workers_that_it_has_announced() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0, frontend=0)
    dispatcher.worker_joined(1, frontend=1)
    for rid in (1, 2, 3):
        dispatcher.submit(request(rid, frontend=1))
    assert {worker: [o.rid for o in steps.opens] for worker, steps in taken(dispatcher).items()} == {1: [1, 2, 3]}
    dispatcher.submit(request(4, frontend=2))
    assert taken(dispatcher) == {} and dispatcher.stats()["parked"] == 1
    dispatcher.worker_joined(0, frontend=2)
    assert [opened.rid for opened in taken(dispatcher)[0].opens] == [4]


def taken(dispatcher: Dispatcher) -> dict[int, StepRecords]:
    dispatcher.validate()
    return dict(dispatcher.take(0))


def test_requests_are_spread_by_load() -> None:
    dispatcher = Dispatcher()
    for worker in (5, 3, 9):
        dispatcher.worker_joined(worker)
    for rid in range(9):
        dispatcher.submit(request(rid))
    spread = {worker: [opened.rid for opened in steps.opens] for worker, steps in taken(dispatcher).items()}
    assert sorted(map(len, spread.values())) == [3, 3, 3]
    for rid in spread[3]:
        dispatcher.release(rid)
    dispatcher.submit(request(20))
    dispatcher.submit(request(21))
    assert [o.rid for o in taken(dispatcher)[3].opens] == [20, 21]


def test_the_requests_of_a_lost_worker_are_spread_too() -> None:
    dispatcher = Dispatcher()
    for worker in range(3):
        dispatcher.worker_joined(worker)
    for rid in range(30):
        dispatcher.submit(request(rid))
    taken(dispatcher)
    dispatcher.worker_lost(WorkerLost(0, {}))
    opens = {worker: steps.opens for worker, steps in taken(dispatcher).items()}
    assert sorted(len(each) for each in opens.values()) == [5, 5]
    assert {opened.epoch for each in opens.values() for opened in each} == {1}
    assert dispatcher.resumed == 10


def test_a_busy_worker_gets_fewer_larger_messages() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1))
    for token in range(5):
        dispatcher.record([StepRow(1, 0, [token])])
        assert dispatcher.take(0, busy={0}) == []
    steps = taken(dispatcher)[0]
    assert len(steps.opens) == 1 and [list(row[2]) for row in steps.rows()] == [[i] for i in range(5)]
    assert taken(dispatcher) == {}


def test_a_batch_that_stays_is_handed_on_as_it_is() -> None:
    dispatcher, rids, column = Dispatcher(), Rids((1, 2, 3)), [7, 8, 9]
    dispatcher.worker_joined(0)
    for rid in rids:
        dispatcher.submit(request(rid))
    for _ in range(3):
        assert dispatcher.record([StepColumns(rids, column)]) == 3
        steps = taken(dispatcher)[0]
        assert steps.rids is rids and steps.tokens is column
    dispatcher.record([StepColumns(rids, column), StepRow(2, 0, [5], "length"), StepColumns(Rids((1, 3)), [6, 6])])
    dispatcher.record([StepColumns(rids, column)])  # the engine is late to hear of that end
    rows = [(rid, list(ids)) for rid, _, ids, _, _ in taken(dispatcher)[0].rows()]
    assert rows == [(1, [7]), (2, [8]), (3, [9]), (2, [5]), (1, [6]), (3, [6]), (1, [7]), (3, [9])]
    assert dispatcher.late_rows == 1
    assert [list(ids) for _, ids in dispatcher.remaining(1)] == [[7, 7, 7, 7, 6, 7]]


def test_a_batch_that_stays_while_its_requests_change() -> None:
    """Nothing is remembered of a column that is not true any more, though it is the same object."""
    dispatcher, rids = Dispatcher(), Rids((1, 2, 3))
    steps = (StepColumns(rids, [10 * n + 1, 10 * n + 2, 10 * n + 3]) for n in range(9))

    def step() -> list[tuple[int, list[int]]]:
        dispatcher.record([next(steps)])
        return [(rid, list(ids)) for each in taken(dispatcher).values() for rid, _, ids, _, _ in each.rows()]

    for rid in rids:
        dispatcher.submit(request(rid, outputs=rid))
    assert step() == []
    dispatcher.worker_joined(0)
    assert step() == [(1, [1]), (2, [2]), (3, [3]), (1, [11]), (2, [12]), (3, [13])]
    assert dispatcher.cancel(2, 1) == [1]
    assert step() == [(1, [21]), (2, [22]), (3, [23])]
    assert dispatcher.cancel(2, 0) == [0]
    assert step() == [(1, [31]), (3, [33])] and dispatcher.late_rows == 1
    dispatcher.worker_joined(1)
    dispatcher.worker_lost(WorkerLost(0, {}))
    resent = [(1, [1, 11, 21, 31]), (1, [41]), (2, []), (2, [2, 12, 22]), (3, [3, 13, 23, 33]), (3, [43])]
    assert sorted(step()) == resent
    dispatcher.release(1)
    assert step() == [(1, []), (3, [53])] and dispatcher.late_rows == 4


def test_requests_wait_for_the_first_worker() -> None:
    dispatcher = Dispatcher()
    dispatcher.submit(request(1))
    dispatcher.record([StepRow(1, 0, [5]), StepRow(1, 0, [6], "length")])
    assert taken(dispatcher) == {} and dispatcher.stats()["parked"] == 1
    dispatcher.worker_joined(4)
    steps = taken(dispatcher)[4]
    assert steps.opens[0].epoch == 0 and steps.tokens == [5, 6] and steps.finishes[0].reason == "length"


def test_a_parked_request_keeps_what_its_client_has() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1, 2))
    dispatcher.record([StepRow(1, 0, [5, 6]), StepRow(1, 1, [7], "stop", True)])
    taken(dispatcher)
    dispatcher.worker_lost(WorkerLost(0, {1: [(1, False), (1, True)], 99: [(5, False)]}))
    dispatcher.worker_lost(WorkerLost(0, {}))
    dispatcher.worker_joined(1)
    steps = taken(dispatcher)[1]
    assert steps.opens == [Open(1, 1, 0, b"spec1", [(1, False), (1, True)])]
    rows = [(index, list(ids), finish) for _, index, ids, finish, _ in steps.rows()]
    # What its client has the end of comes first: the end of the response comes with the last output, and not in
    # silence.
    assert [(index, ids) for index, ids, _ in rows] == [(1, [7]), (0, [5, 6])]
    assert rows[1][2] is None and rows[0][2] is not None and rows[0][2].stop_token


def test_a_long_history_is_cut_into_rows_that_the_wire_can_count() -> None:
    dispatcher = Dispatcher()
    dispatcher.submit(request(1))
    ids = list(range(MAX_COUNT + 5))
    dispatcher.record([StepRow(1, 0, ids[:MAX_COUNT]), StepRow(1, 0, ids[MAX_COUNT:], "error", False, "broken")])
    dispatcher.worker_joined(0)
    rows = list(taken(dispatcher)[0].rows())
    assert [len(row[2]) for row in rows] == [MAX_COUNT, 5] and rows[0][3] is None
    assert rows[1][3] is not None and rows[1][3].message == "broken"
    assert [token for row in rows for token in row[2]] == ids


def test_histories_that_fill_a_frame_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens with the first part, rows in order, and new rows behind them."""
    monkeypatch.setattr("executor.batch.MAX_HISTORY", 10)
    dispatcher = Dispatcher()
    for rid in range(5):
        dispatcher.submit(request(rid))
        dispatcher.record([StepRow(rid, 0, [rid] * 4)])
    dispatcher.worker_joined(0)
    parts = []
    while dispatcher.unsent_history:
        parts.append(taken(dispatcher)[0])
        dispatcher.record([StepRow(0, 0, [7])])
    parts.append(taken(dispatcher)[0])
    assert [len(part.opens) for part in parts] == [5, 0, 0] and [len(part.tokens) for part in parts] == [12, 9, 1]
    rows = [(rid, list(ids)) for part in parts for rid, _, ids, _, _ in part.rows()]
    assert rows == [*((rid, [rid] * 4) for rid in range(5)), (0, [7]), (0, [7])] and taken(dispatcher) == {}


def test_a_finish_without_tokens_is_resent_alone() -> None:
    dispatcher = Dispatcher()
    dispatcher.submit(request(1))
    assert dispatcher.end(1, "error", "cannot") == [0]
    dispatcher.worker_joined(0)
    ((_, _, ids, finish, _),) = taken(dispatcher)[0].rows()
    assert list(ids) == [] and finish is not None and (finish.reason, finish.message) == ("error", "cannot")


def test_what_a_worker_ended_ends_on_the_next_worker_too() -> None:
    """It ends at the same token there; where it does not (a hook that goes by steps), nothing else would end it."""
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1, 2))
    dispatcher.record([StepRow(1, 0, [5, 6])])
    assert dispatcher.cancel(1, -1) == [0, 1]
    dispatcher.record([StepRow(1, 0, [7]), StepRow(1, 1, [8])])
    assert dispatcher.late_rows == 2
    taken(dispatcher)
    dispatcher.worker_lost(WorkerLost(0, {}))
    dispatcher.worker_joined(1)
    rows = [(index, list(ids), finish and finish.reason) for _, index, ids, finish, _ in taken(dispatcher)[1].rows()]
    assert rows == [(0, [5, 6], "stop"), (1, [], "stop")]


def test_a_released_request_leaves_nothing() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    for rid in range(1000):
        dispatcher.submit(request(rid, 2))
        dispatcher.record([StepRow(rid, 0, [1], "stop"), StepRow(rid, 1, [1, 2])])
        assert dispatcher.release(rid) == [1]
        assert dispatcher.release(rid) == [] and dispatcher.cancel(rid, 0) == [] and dispatcher.end(rid, "abort") == []
    taken(dispatcher)
    dispatcher.record([StepRow(5, 1, [3])])
    assert dispatcher.open_requests == 0 and dispatcher.late_rows == 1 and taken(dispatcher) == {}
    assert [len(held) for held in (dispatcher._routes, dispatcher._parked, dispatcher._load[0])] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------------ poison


def lose(dispatcher: Dispatcher, worker: int, delivered: Sequence[tuple[int, bool]], culprit: int = -1) -> list[int]:
    """A worker dies, another joins."""
    lost = WorkerLost(worker, {1: list(delivered)} if delivered else {}, culprit)
    condemned = [request.rid for request in dispatcher.worker_lost(lost)]
    dispatcher.worker_joined(worker + 1)
    dispatcher.validate()
    return condemned


def test_a_request_that_costs_every_worker_fails() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1, outputs=2))
    dispatcher.record([StepRow(1, 0, [5]), StepRow(1, 1, [6])])
    assert [lose(dispatcher, worker, ()) for worker in range(MAX_FRUITLESS)] == [[]] * (MAX_FRUITLESS - 1) + [[1]]
    assert dispatcher.open_requests == 0 and dispatcher.take(0) == [], "no further worker gets it"


def test_a_request_fails_with_the_second_worker_that_died_in_its_hands() -> None:
    """And only that request, however many others the workers had, and also if its client had got on."""
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    for rid in (1, 2, 3):
        dispatcher.submit(request(rid))
    dispatcher.record([StepRow(rid, 0, [5, 6, 7]) for rid in (1, 2, 3)])
    assert lose(dispatcher, 0, [(1, False)], culprit=2) == []
    assert lose(dispatcher, 1, [(1, False)], culprit=3) == []
    assert lose(dispatcher, 2, [(2, False)], culprit=-1) == []
    assert lose(dispatcher, 3, [(3, False)], culprit=2) == [2]
    assert lose(dispatcher, 4, [(3, False)], culprit=99) == []


def test_a_request_whose_client_gets_on_is_no_poison() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1))
    dispatcher.record([StepRow(1, 0, [5])] * 20)
    assert [lose(dispatcher, worker, [(worker // 3, False)]) for worker in range(30)] == [[]] * 30


def test_a_dead_workers_cancel_is_not_heard() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1))
    lose(dispatcher, 0, ())
    assert dispatcher.cancel(1, 0, worker=0) == []
    assert dispatcher.cancel(1, 0, worker=1) == [0]


def test_a_history_whose_entries_do_not_fit_is_resent_without_them() -> None:
    dispatcher = Dispatcher()
    dispatcher.worker_joined(0)
    dispatcher.submit(request(1))
    dispatcher.record([StepRow(1, 0, [5, 6])])
    dispatcher.record([StepRow(1, 0, [7], logprobs=[TokenLogprob(-0.5)])])
    lose(dispatcher, 0, ())
    ((_, steps),) = dispatcher.take(0)
    assert [(list(ids), logprobs) for _, _, ids, _, logprobs in steps.rows()] == [([5, 6, 7], None)]
