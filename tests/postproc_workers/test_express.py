"""The express lane by columns: what it writes is what every row alone would have been."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow
from executor.messages import Open, Recall, RecordRow, StepRecords
from executor.rids import Rids
from executor.wire import FrameReader, encode
from postproc_workers import express
from postproc_workers.express import ExpressLane, runs
from postproc_workers.worker import PostprocWorker, WorkerOutput
from tests.helpers import ALL_POST_PROCESSORS, CHAT, COMPLETIONS, row, spec_of, tokens, vocabulary, whole_rows

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".")
HALF = tokens("<0xC3>", "<0xA9>")
BAD = 9999


class Pair:
    """A worker that gets steps as they come over the wire, and one that gets every row in a step of its own."""

    def __init__(self, opens: Sequence[Open]) -> None:
        self.columns, self.rows = (PostprocWorker(vocabulary(), ALL_POST_PROCESSORS) for _ in range(2))
        self._reader = FrameReader(logging.getLogger("test"))
        #: what their front ends have been told
        self.known: list[dict[int, tuple[bytes, bytes]]] = [{}, {}]
        #: (rid, bytes, told tokens, flags) of each, in order
        self.made: list[list[tuple[int, bytes, int, int]]] = [[], []]
        for worker in (self.columns, self.rows):
            worker.receive([StepRecords([], [], [], [], opens=opens)])

    def give(self, *steps: Sequence[StepRow]) -> None:
        frames = [encode(StepRecords.build(rows)) for rows in steps]
        self.note(0, self.columns.receive([read for frame in frames if (read := self._read(frame))]))
        for rows in steps:
            for one in rows:
                self.note(1, self.rows.receive([StepRecords.build([one])]))

    def recall(self) -> list[tuple[int, list[int]]]:
        """What each says it has; the same."""
        told = []
        for worker in (self.columns, self.rows):
            (histories,) = worker.receive([Recall(0)]).histories
            told.append(sorted((rid, list(ids)) for rid, _, ids, _, _ in histories.steps.rows()))
        assert told[0] == told[1]
        return told[0]

    def agree(self) -> None:
        """The same bytes and counts, whatever the rows of other requests between them."""
        columns, rows = ({rid: b"" for rid, *_ in made} for made in self.made)
        for made, found in zip(self.made, (columns, rows)):
            for rid, payload, _, _ in made:
                found[rid] += payload
        assert columns == rows
        assert _last(self.made[0]) == _last(self.made[1])

    def _read(self, frame: bytes) -> StepRecords:
        step = self._reader.read(frame)
        assert isinstance(step, StepRecords)
        return step

    def note(self, which: int, output: WorkerOutput) -> None:
        for _, emissions in output.emissions:
            for rid, _, _, count, flags, payload in whole_rows(emissions, self.known[which]):
                self.made[which].append((rid, payload, count, flags))


def _last(made: Sequence[tuple[int, bytes, int, int]]) -> dict[int, tuple[int, int]]:
    return {rid: (count, flags) for rid, _, count, flags in made}


def opens(count: int, formats: Sequence[str] = (CHAT,), frontends: int = 1) -> list[Open]:
    return [Open(rid, 0, rid % frontends, spec_of(formats[rid % len(formats)]).encode()) for rid in range(count)]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


@pytest.fixture(autouse=True, params=[2, 32], ids=["pieces", "events"])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows from which a message has pieces alone."""
    rows: int = request.param
    monkeypatch.setattr(express, "OWN_MESSAGE", rows)
    return rows


def test_a_stable_batch_is_one_kept_column_per_front_end() -> None:
    pair = Pair(opens(6, frontends=2))
    for token in HELLO:
        pair.give([row([token], rid=rid) for rid in range(6)])
    pair.agree()
    reader = FrameReader(logging.getLogger("test"))
    columns: list[list[object]] = [[], []]
    for token in HELLO[:3]:
        step = reader.read(encode(StepRecords.build([row([token], rid=rid) for rid in range(6)])))
        assert isinstance(step, StepRecords)
        for frontend, emissions in pair.columns.receive([step]).emissions:
            columns[frontend].append(emissions.rids)
            assert list(emissions.rids) == [rid for rid in range(6) if rid % 2 == frontend]
    assert all(one is found[0] for found in columns for one in found) and len(columns[0]) == len(columns[1]) == 3


def test_a_message_stays_as_it_was_given() -> None:
    """In the front end's own process nobody encodes it first."""
    worker = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS)
    worker.receive([StepRecords([], [], [], [], opens=opens(9))])
    given, copies, rids = [], [], Rids(range(9))
    for turn in range(8):
        if turn in (3, 5):
            rids = Rids(rid for rid in rids if rid != turn)
        step = StepRecords(rids, [0] * len(rids), [1] * len(rids), [HELLO[turn]] * len(rids))
        for _, made in worker.receive([step]).emissions:
            given.append(made)
            copies.append(list(made.rows()))
    assert [list(made.rows()) for made in given] == copies
    assert [len(copy) for copy in copies] == [9, 9, 9, 8, 8, 7, 7, 7]


def test_ids_that_are_kept_by_column_are_told_to_a_new_executor() -> None:
    pair = Pair(opens(3))
    for token in HELLO[:5]:
        pair.give([row([token], rid=rid) for rid in range(3)])
    assert pair.recall() == [(rid, HELLO[:5]) for rid in range(3)]
    pair.give([row([HELLO[5]], rid=rid) for rid in range(3)])
    assert pair.recall() == [(rid, HELLO[:6]) for rid in range(3)]
    pair.agree()


def test_columns_are_given_to_their_streams_before_they_are_many() -> None:
    worker = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS)
    worker.receive([StepRecords([], [], [], [], opens=opens(2))])
    rids = Rids((0, 1))
    for number in range(200):
        step = StepRecords(rids, [0, 0], [1, 1], [HELLO[number % 5]] * 2)
        ((_, emissions),) = worker.receive([step]).emissions
        assert list(emissions.counts) == [number + 1] * 2


def test_a_list_that_changes_is_no_kept_column() -> None:
    pair = Pair(opens(4))
    rids = [0, 1]
    for turn in range(4):
        rids[:] = [turn % 3, 3]
        step = StepRecords(rids, [0, 0], [1, 1], [HELLO[turn]] * 2)
        pair.note(0, pair.columns.receive([step]))
        for rid in rids:
            pair.note(1, pair.rows.receive([StepRecords.build([row([HELLO[turn]], rid=rid)])]))
    pair.agree()


def test_two_rows_of_a_request_in_a_step_keep_their_order() -> None:
    pair = Pair(opens(3))
    for turn in range(3):
        pair.give([row([HELLO[turn]], rid=rid) for rid in range(3)])
    pair.give([row([HELLO[3]], rid=0), row([HELLO[3]], rid=1), row([HELLO[4]], rid=0)])
    pair.give([row([HELLO[5]], rid=rid) for rid in range(3)])
    pair.agree()


def test_a_request_of_two_outputs_leaves_the_others_their_column() -> None:
    worker, reader = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS), FrameReader(logging.getLogger("test"))
    both = Open(50, 0, 0, spec_of(CHAT, n=2).encode())
    worker.receive([StepRecords([], [], [], [], opens=[*opens(40), both])])
    columns = []
    for token in HELLO:
        rows = [row([token], rid=rid) for rid in range(40)]
        rows[20:20] = [row([token], rid=50, index=index) for index in (0, 1)]
        step = reader.read(encode(StepRecords.build(rows)))
        assert isinstance(step, StepRecords)
        columns.append([made.rids for _, made in worker.receive([step]).emissions])
    usual, *_ = columns[1]
    assert usual == tuple(range(40)) and all(made[0] is usual for made in columns[1:])
    assert [[tuple(made) for made in rest] for _, *rest in columns[1:]] == [[(50, 50)]] * (len(HELLO) - 1)


def test_a_request_that_is_opened_again_leaves() -> None:
    pair = Pair(opens(3))
    for token in HELLO[:3]:
        pair.give([row([token], rid=rid) for rid in range(3)])
    for worker in (pair.columns, pair.rows):
        anew = Open(1, 1, 0, spec_of(CHAT).encode(), [(3, False)])
        worker.receive([StepRecords.build([row(HELLO[:3], rid=1)], [anew])])
    pair.give([row([HELLO[3]], rid=rid) for rid in range(3)])
    pair.give([row([HELLO[4]], rid=rid) for rid in range(3)])
    assert pair.recall() == [(rid, HELLO[:5]) for rid in range(3)]
    pair.agree()


ROW = st.one_of(
    st.sampled_from(HELLO).map(lambda token: ([token], None)),
    st.sampled_from(HELLO).map(lambda token: ([token], None)),
    st.sampled_from([([HALF[0]], None), ([HALF[1]], None), (HELLO[:2], None), ([HELLO[0]], "length"), ([BAD], None)]),
)


@st.composite
def batches(draw: st.DrawFn) -> list[list[list[StepRow]]]:
    """Steps of a few requests, mostly the same rows with usual ids; some arrive together."""
    batch = sorted(draw(st.sets(st.integers(0, 5), min_size=1)))
    made: list[list[list[StepRow]]] = []
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 3)) == 0:
            batch = draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]
        together = []
        for _ in range(draw(st.sampled_from([1, 1, 1, 3]))):
            together.append([row(*draw(ROW), rid=rid) for rid in batch])
        made.append(together)
    return made


@given(batches(), st.sampled_from([1, 2]), st.booleans())
def test_columns_say_what_rows_say(made: list[list[list[StepRow]]], frontends: int, mixed: bool) -> None:
    """Where steps arrive together the cut into events differs, so there the texts are compared elsewhere (split
    invariance); bytes are, where each came alone."""
    pair = Pair(opens(6, (CHAT, COMPLETIONS) if mixed else (CHAT,), frontends))
    for steps in made:
        for rows in steps:
            pair.give(rows)
        pair.recall()
    pair.agree()


@given(batches())
def test_steps_that_arrive_together_give_each_request_its_ids(made: list[list[list[StepRow]]]) -> None:
    pair = Pair(opens(6))
    for steps in made:
        pair.give(*steps)
        pair.recall()
    assert pair.columns.stats.tokens == pair.rows.stats.tokens


def test_runs_are_steps_with_the_same_usual_rows() -> None:
    same = Rids((1, 2))

    def step(rids: Sequence[int], finish: str | None = None) -> StepRecords:
        built = StepRecords.build([row([HELLO[0]], finish, rid=rid) for rid in rids])
        built.rids = rids
        return built

    twice = Rids((1, 1))
    steps = [step(same), step(same), step([1, 2]), step(same, "stop"), step(same), step(twice), step(twice)]
    assert list(map(len, runs(steps))) == [2, 1, 1, 1, 1, 1]
    assert [one for run in runs(steps) for one in run] == steps


def test_nothing_is_taken_while_nobody_is_there() -> None:
    lane = ExpressLane(0, 100)
    made, others = lane.take(StepRecords.build([row([1], rid=1)]))
    found: Iterator[RecordRow] = iter(others)
    assert made == [] and [rid for rid, *_ in found] == [1]


def test_constants_are_told_once(least: int) -> None:
    """To those that come later too, and again to whoever has a request from the start again."""
    worker = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS)
    worker.receive([StepRecords([], [], [], [], opens=opens(40))])
    told: list[int] = []
    bare = 0

    def give(rids: Sequence[int]) -> None:
        nonlocal bare
        step = StepRecords(Rids(rids), [0] * len(rids), [1] * len(rids), [HELLO[0]] * len(rids))
        for _, made in worker.receive([step]).emissions:
            bare += made.around is not None
            assert made.around is not None or b"data: " in made.payload
            told.extend(made.rids[at] for at in made.around or ())

    for last in (33, 33, 36, 36, 40, 40, 40):
        give(range(last))
    assert sorted(told) == [*range(36), *range(36, 40)] and bare == 6
    worker.receive([StepRecords([], [], [], [], opens=opens(40)[3:4])])
    told.clear()
    for _ in range(3):
        give(range(40))
    assert told == [3]
