"""``split_steps``: a stream has the bytes of an engine that makes one token a step, however its tokens come.

To the letter, and row by row: where a chunk ends, what is told about tokens, and in which order. The other laws compare
merged streams, in which all of that is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow
from executor.messages import OUTPUT_END, REQUEST_END, EmissionRow, Open, StepRecords
from postproc_workers.hook import Emit, Replace
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from tests.helpers import ALL_POST_PROCESSORS, CHAT, COMPLETIONS, Bench, row, spec_of, tokens
from tests.laws.cases import PAIRS, Case, cases, steps
from tests.laws.test_resume_with_formats import CASES as FORMATS
from tests.laws.test_split_fold_resume import histories
from tests.recordings.checker import events, strict_json

STREAMS = [stream for stream, _ in PAIRS]
HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def split(case: Case) -> Case:
    """The same request, which wants an event for each token."""
    return replace(case, body=case.body | {"split_steps": True})


def singles(rows: Iterable[StepRow]) -> list[StepRow]:
    """The rows as an engine gives them that makes one token a step."""
    found = []
    for each in rows:
        logprobs = each.logprobs or [None] * len(each.token_ids)
        pairs = list(zip(each.token_ids, logprobs))
        for token, entry in pairs[:-1]:
            found.append(StepRow(each.rid, each.index, [token], logprobs=None if entry is None else [entry]))
        last = [] if not pairs else [pairs[-1][0]]
        entries = None if each.logprobs is None else [entry for _, entry in pairs[-1:] if entry is not None]
        found.append(each._replace(token_ids=last, logprobs=entries))
    return found


def flat(backlogs: Iterable[Iterable[Iterable[StepRow]]]) -> list[StepRow]:
    """The rows of steps and backlogs in their order."""
    return [each for backlog in backlogs for step in backlog for each in step]


@pytest.mark.parametrize("name", STREAMS)
@given(st.data(), st.sampled_from([1, 5]))
def test_however_tokens_come_the_stream_is_that_of_single_ones(name: str, data: st.DataObject, started: int) -> None:
    """Joined by the engine, by waiting, or both: the same rows with the same bytes, and the same ends."""
    case = data.draw(cases(name, intervals=False))
    backlogs = data.draw(steps(case))
    single = case.bench()
    for each in singles(flat(backlogs)):
        single.give(each)
    bench = split(case).bench(stream_interval=started)
    for backlog in backlogs:
        bench.backlog(backlog)
    assert bench.rows == single.rows
    assert bench.cancels == single.cancels
    assert bench.worker.stats.late == single.worker.stats.late and bench.worker.open_requests == 0


@pytest.mark.parametrize("name", STREAMS)
@given(st.data())
def test_of_one_choice_the_bytes_are_those_of_the_undisturbed_run(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, most=1, intervals=False))
    bench = split(case).bench()
    for backlog in data.draw(steps(case)):
        bench.backlog(backlog)
    assert bench.body == case.play(case.each())


@pytest.mark.parametrize("name", [unary for _, unary in PAIRS])
@given(st.data())
def test_a_document_is_the_same(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    bench = split(replace(case, body={key: case.body[key] for key in case.body if key != "stream_interval"})).bench()
    for backlog in data.draw(steps(case)):
        bench.backlog(backlog)
    assert bench.body == case.play(case.each())


@pytest.mark.parametrize("name", STREAMS)
@given(st.data(), st.integers(0, 40), st.integers(0, 8))
def test_a_resume_inside_a_row(name: str, data: st.DataObject, heard: int, ahead: int) -> None:
    """What the client has ends inside of a history that comes as one row: the rest is what it lacks, to the letter."""
    case = data.draw(cases(name, most=1, intervals=False))
    rows = case.each()
    first = case.bench()
    for each in rows:
        first.give(each)
    told = first.rows[: min(heard, len(first.rows))]
    if told and told[-1][4]:
        return
    known = told[-1][3] if told else 0
    history = histories(rows[: known + ahead], set())
    second = split(case).bench(delivered=[(known, False)])
    second.backlog([[*history, *rows[known + ahead :]]] if data.draw(st.booleans()) else [[*history]])
    for each in rows[known + ahead :]:
        second.give(each)
    assert second.body == b"".join(payload for _, _, _, _, _, payload in first.rows[len(told) :])


def by_choice(body: bytes) -> dict[int, list[Any]]:
    """The events of each choice."""
    found: dict[int, list[Any]] = {}
    for event in events(body)[:-1]:
        (choice,) = strict_json(event)["choices"]
        found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("name", STREAMS)
@given(st.data(), st.integers(0, 40), st.integers(0, 8))
def test_a_resume_of_several_choices(name: str, data: st.DataObject, heard: int, ahead: int) -> None:
    """Each choice has the events of the undisturbed run. In which order those of several come is the steps' business:
    a history brings one choice after the other."""
    case = data.draw(cases(name, failing=False, intervals=False))
    case = replace(case, body={key: case.body[key] for key in case.body if key != "stream_options"}, options={})
    rows = case.each()
    heard = min(heard, len(rows))
    first = split(case).bench()
    for each in rows[:heard]:
        first.give(each)
    if first.ended:
        return
    delivered = [(0, False)] * len(case.outputs)
    for _, _, index, count, flags, _ in first.rows:
        delivered[index] = (count, bool(flags & OUTPUT_END))
    second = split(case).bench(delivered=delivered)
    for each in histories(rows[: heard + ahead], {i for i, (_, ended) in enumerate(delivered) if ended}):
        second.give(each)
    for each in rows[heard + ahead :]:
        second.give(each)
    assert by_choice(first.body + second.body) == by_choice(case.play(rows))


# ------------------------------------------------------------------------------------------------------ with a format


def numberless(rows: Iterable[EmissionRow]) -> list[tuple[Any, ...]]:
    """Rows without the numbers of their events, which go on elsewhere behind a resume."""
    return [(*told, b"".join(_without_number(line) for line in payload.split(b"\n"))) for *told, payload in rows]


def _without_number(line: bytes) -> bytes:
    head, number, tail = line.rpartition(b'"sequence_number":')
    return head + tail.lstrip(b"0123456789") if number else line


class Run:
    """A worker with one request that the rows are given to, in backlogs."""

    def __init__(self, spec: StreamSpec, vocabulary: Vocabulary, delivered: Sequence[tuple[int, bool]] = ()) -> None:
        self._worker = PostprocWorker(vocabulary, ALL_POST_PROCESSORS, stream_interval=4 if spec.split_steps else 1)
        self.rows: list[EmissionRow] = []
        self.give(StepRecords([], [], [], [], opens=[Open(0, 0, 0, spec.encode(), delivered)]))

    def give(self, *steps: StepRecords) -> None:
        for _, emissions in self._worker.receive(steps).emissions:
            self.rows += emissions.rows()


def drawn_steps(data: st.DataObject, ids: Sequence[int]) -> list[StepRow]:
    """The ids in rows of any size; the last one ends the output."""
    rows, start = [], 0
    for size in [*data.draw(st.lists(st.integers(1, 9), max_size=12)), len(ids)]:
        rows.append(StepRow(0, 0, ids[start : start + size]))
        start += size
        if start >= len(ids):
            break
    rows[-1] = rows[-1]._replace(finish_reason="stop")
    return rows


FORMAT_CASES = {name: case for name, case in FORMATS.items() if case[0].stream_interval is None}


@pytest.mark.parametrize("name", FORMAT_CASES)
@given(st.data())
def test_reasoning_tools_harmony_and_responses(name: str, data: st.DataObject) -> None:
    spec, vocabulary, texts, encode, _ = FORMAT_CASES[name]
    ids = encode(data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=8)))
    rows = drawn_steps(data, ids)
    single = Run(spec, vocabulary)
    for each in singles(rows):
        single.give(StepRecords.build([each]))
    asked = replace(spec, split_steps=True)
    run, waiting = Run(asked, vocabulary), data.draw(st.integers(1, 4))
    for at in range(0, len(rows), waiting):
        run.give(*(StepRecords.build([each]) for each in rows[at : at + waiting]))
    assert run.rows == single.rows

    told = data.draw(st.integers(0, len(single.rows) - 1))
    if told and single.rows[told - 1][4] & REQUEST_END:
        return
    known = single.rows[told - 1][3] if told else 0
    resumed = Run(asked, vocabulary, [(known, False)])
    resumed.give(StepRecords.build([StepRow(0, 0, ids, "stop")]))  # the border is inside of a row
    assert numberless(resumed.rows) == numberless(single.rows[told:])


# ------------------------------------------------------------------------------------------------------ by example


@pytest.mark.parametrize(("endpoint", "role"), [(CHAT, 1), (COMPLETIONS, 0)])
def test_every_token_that_makes_text_has_an_event(endpoint: str, role: int) -> None:
    bench, joined = Bench(spec_of(endpoint, split_steps=True)), Bench(spec_of(endpoint))
    for each in (bench, joined):
        each.backlog([[row(HELLO[:3])], [row(HELLO[3:7])], [row(HELLO[7:], "stop", stop_token=True)]])
    assert [count for _, _, _, count, _, _ in bench.rows] == list(range(1, len(HELLO) + 1))
    assert len(events(bench.body)) == role + len(HELLO) + 1  # and [DONE]
    assert len(joined.rows) == 1


def test_others_that_wait_are_joined_as_ever() -> None:
    worker = PostprocWorker(Vocabulary.text(), ALL_POST_PROCESSORS)
    specs = [spec_of(CHAT, split_steps=asked).encode() for asked in (True, False)]
    worker.receive([StepRecords([], [], [], [], opens=[Open(rid, 0, 0, spec) for rid, spec in enumerate(specs)])])
    waiting = [StepRecords.build([StepRow(rid, 0, [65 + step, 66]) for rid in range(2)]) for step in range(3)]
    made = list(dict(worker.receive(waiting).emissions)[0].rows())
    assert [(rid, count) for rid, _, _, count, _, _ in made] == [(1, 6), *((0, count) for count in range(1, 7))]
    assert worker.stats.coalesced == 2


def test_the_set_of_such_streams_empties() -> None:
    """A request of the same rid that is opened again may be another: what is asked for is read each time."""
    worker = PostprocWorker(Vocabulary.text(), ALL_POST_PROCESSORS)
    for asked, chunks in ((True, 2), (False, 1)):
        spec = spec_of(CHAT, split_steps=asked).encode()
        worker.receive([StepRecords([], [], [], [], opens=[Open(0, 0, 0, spec)])])
        waiting = [StepRecords.build([StepRow(0, 0, [token])]) for token in (65, 66)]
        assert len(dict(worker.receive(waiting).emissions)[0].rids) == chunks
    worker.receive([StepRecords.build([StepRow(0, 0, [], "stop")])])
    assert worker.open_requests == 0 and not worker._apart


def test_a_hook_is_asked_about_each_token() -> None:
    asked = []

    class Hook:
        def __call__(self, output: Any, text: str) -> Emit | Replace:
            asked.append(text)
            return Replace(text.upper())

    bench = Bench(spec_of(CHAT, split_steps=True), hook=Hook)
    bench.give(row(HELLO[:3]))
    assert asked == ["Hello", " world", ","] and b"WORLD" in bench.body and len(bench.rows) == 3
