"""The worker: isolation, refusals, backlogs, chunk intervals, and that nothing stays behind."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END, Finish, Open, Recall, StepRecords
from executor.result import DetokenizedGenerationResultBase
from executor.wire import decode, encode
from postproc_workers.hook import EMIT, Emit, HookAction
from postproc_workers.post_processor import PostProcessor
from postproc_workers.spec import StreamSpec
from postproc_workers.stream import default_record_creator
from postproc_workers.worker import PostprocWorker, WorkerOutput
from tests.helpers import ALL_POST_PROCESSORS, CHAT, COMPLETIONS, Bench, each, row, spec_of, tokens, vocabulary
from tests.recordings.checker import merge_document, merge_stream

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")
BAD = 9999


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def worker_of(table: Mapping[str, PostProcessor] = ALL_POST_PROCESSORS, **options: Any) -> PostprocWorker:
    return PostprocWorker(vocabulary(), table, **options)


def opened(rid: int, spec: StreamSpec, frontend: int = 0) -> Open:
    return Open(rid, 0, frontend, spec.encode())


def bytes_by_rid(*outputs: WorkerOutput) -> dict[int, bytes]:
    """What each request got, over all front ends."""
    bodies: dict[int, bytes] = {}
    for output in outputs:
        for _, emissions in output.emissions:
            for rid, _, _, _, _, payload in emissions.rows():
                bodies[rid] = bodies.get(rid, b"") + payload
    return bodies


# ------------------------------------------------------------------------------------------------------ isolation


def raises(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


class BreaksAt:
    """A hook that breaks at a text."""

    def __call__(self, output: object, text: str) -> HookAction:
        if "answer" in text:
            raise KeyError(text)
        return EMIT


def process_breaks(record: DetokenizedGenerationResultBase, args: Any) -> bytes:
    if " answer" in record.updated.text_diff:
        raise ZeroDivisionError("post-processor")
    return ALL_POST_PROCESSORS["chat_stream"].process(record, args)


CHAT_STREAM = ALL_POST_PROCESSORS["chat_stream"]
BROKEN: dict[str, PostProcessor] = {
    "process": CHAT_STREAM._replace(process=process_breaks, express=None),
    "arguments": CHAT_STREAM._replace(make_args=raises(KeyError("id"))),
}


def rows_of(rid: int, at: int, ids: list[int]) -> StepRow:
    last = at == len(ids) - 1
    return StepRow(rid, 0, [ids[at]], "stop" if last else None, last)


@pytest.mark.parametrize(
    "where",
    ["process", "bad id", "negative id", "alternative", "hook", "arguments", "hook's constructor", "spec", "output"],
)
def test_a_request_fails_alone(where: str) -> None:
    """Others in the same step get the bytes they get without it; it gets an error, and the engine is told."""

    class BreaksInConstructor:
        made = 0

        def __init__(self) -> None:
            BreaksInConstructor.made += 1
            if BreaksInConstructor.made == 2:
                raise OSError("no licence")

        def __call__(self, output: object, text: str) -> HookAction:
            return EMIT

    spec = spec_of(CHAT, logprobs=where == "alternative" or None)
    sick = spec_of(CHAT, logprobs=where == "alternative" or None, top_logprobs=3 if where == "alternative" else None)
    if where in BROKEN:
        sick = StreamSpec(where, spec.args, 1, True, 3)
    hook = {"hook": BreaksAt, "hook's constructor": BreaksInConstructor}.get(where)
    specs = {1: spec.encode(), 2: b"\xc1" if where == "spec" else sick.encode(), 3: spec.encode()}
    other = [token for token in HELLO if token != HELLO[4]]  # the hook breaks at the answer
    ids = {1: other, 2: [*HELLO[:4], {"bad id": BAD, "negative id": -1}.get(where, HELLO[4]), *HELLO[5:]], 3: other}

    worker = worker_of({**ALL_POST_PROCESSORS, **BROKEN}, hook_factory=hook)
    healthy = Bench(spec)
    outputs = [
        worker.receive([StepRecords([], [], [], [], opens=[Open(rid, 0, 0, data) for rid, data in specs.items()])])
    ]
    for at in range(len(HELLO)):
        rows = [rows_of(rid, at, ids[rid]) for rid in (1, 2, 3) if at < len(ids[rid])]
        if where == "alternative":
            top = ((BAD, -0.5),) if at == 4 else ()
            rows = [each_row._replace(logprobs=[TokenLogprob(-0.5, top)]) for each_row in rows]
        if where == "output" and at == 4:
            rows[1] = rows[1]._replace(index=1)
        outputs.append(worker.receive([StepRecords.build(rows)]))
        if at < len(other):
            healthy.give(rows[0]._replace(rid=0))
    bodies = bytes_by_rid(*outputs)
    assert bodies[1] == bodies[3] == healthy.body
    cancels = [pair for output in outputs for pair in output.cancels]
    if where in ("arguments", "spec"):
        assert bodies[2] == b"" and cancels == [(2, -1)]
        flags = [r[4] for output in outputs for _, emissions in output.emissions for r in emissions.rows() if r[0] == 2]
        assert flags == [REQUEST_END | FAILED | BODY]
    elif where == "hook's constructor":
        assert "OSError" in (merge_document(bodies[2], CHAT).error or {})["message"] and cancels == [(2, 0)]
    else:
        merged = merge_stream(bodies[2], CHAT)
        assert merged.error is not None and merged.choices[0].content == "Hello world, the"
        assert merged.error["type"] == "server_error" and cancels == [(2, 0)]
    assert worker.open_requests == 0 and worker.stats.failed == 1
    indexes = {r[2] for output in outputs for _, emissions in output.emissions for r in emissions.rows()}
    assert indexes == {0}, "a front end drops rows of outputs that do not exist, and would wait for ever"


def test_a_failure_before_the_first_event_is_a_document() -> None:
    for endpoint in (CHAT, COMPLETIONS):
        for stream in (True, False):
            bench = Bench(spec_of(endpoint, stream=stream, n=2))
            bench.give(row([BAD], index=1))
            assert str(BAD) in (merge_document(bench.body, endpoint).error or {})["message"]
            assert [r[4] for r in bench.rows] == [OUTPUT_END | REQUEST_END | FAILED | BODY]
            assert sorted(bench.cancels) == [(0, 0), (0, 1)] and bench.worker.open_requests == 0


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("split", [[1] * 6, [6], [2, 4], [3, 3]])
def test_what_comes_before_a_bad_id_is_sent(split: list[int], interval: int) -> None:
    bench, ids = Bench(spec_of(CHAT), stream_interval=interval), [*HELLO[:4], BAD, HELLO[4]]
    for count in split:
        bench.give(row(ids[:count]))
        ids = ids[count:]
    merged = merge_stream(bench.body, CHAT)
    assert merged.error is not None and merged.choices[0].content == "Hello world, the"


@pytest.mark.parametrize("split", [[1] * 5, [5], [3, 2], [4, 1]])
def test_a_bad_id_behind_a_stop_string_is_late(split: list[int]) -> None:
    bench, ids = Bench(spec_of(CHAT, stop=["the"], n=2)), [*HELLO[:4], BAD]
    for count in split:
        bench.give(row(ids[:count]))
        ids = ids[count:]
    bench.give(row(HELLO[:1], "length", index=1))
    merged = merge_stream(bench.body, CHAT)
    assert merged.error is None and [c.content for c in merged.choices.values()] == ["Hello world, ", "Hello"]
    assert bench.worker.stats.late == 1 and bench.cancels == [(0, 0)]


def test_a_hook_that_breaks_on_what_comes_before_a_bad_id() -> None:
    """Two failures in one row must not take the process along."""
    bench = Bench(spec_of(CHAT), hook=BreaksAt)
    bench.give(row(HELLO[:2]))
    bench.give(row([HELLO[4], BAD]))
    merged = merge_stream(bench.body, CHAT)
    assert merged.error is not None and merged.choices[0].content == "Hello world"
    assert bench.cancels == [(0, 0)]


def test_a_failing_output_ends_the_whole_request() -> None:
    bench = Bench(spec_of(CHAT, n=3))
    bench.give(
        row(HELLO[:1], "length"), row(HELLO[:1], index=1), row([HELLO[0], BAD], index=2), row(HELLO[:1], index=1)
    )
    merged = merge_stream(bench.body, CHAT)
    assert merged.error is not None and merged.choices[0].finish_reason == "length"
    assert bench.cancels == [(0, 1), (0, 2)] and bench.worker.stats.late == 1


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "spec",
    [b"", b"\x80", b"\xff", b"\x93\x01\x02\x03", StreamSpec("no_such", {}, 1, True, 0).encode(),
    StreamSpec("chat_stream", {}, 1, True, 0).encode(),
     StreamSpec("chat_stream", {"n": "x"}, 1, True, 0).encode(), StreamSpec("completion_unary", {"n": None}, 1, False,
     0).encode()],
)  # fmt: skip
def test_a_spec_that_cannot_be_used(spec: bytes) -> None:
    worker = worker_of()
    output = worker.receive([StepRecords.build([row(HELLO[:1], rid=7)], [Open(7, 3, 2, spec)])])
    assert list(dict(output.emissions)[2].rows()) == [(7, 3, 0, 0, REQUEST_END | FAILED | BODY, b"")]
    assert output.cancels == [(7, -1)] and worker.open_requests == 0
    assert (worker.stats.failed, worker.stats.late) == (1, 1)


def test_rows_of_unknown_requests_are_late() -> None:
    worker = worker_of()
    output = worker.receive([StepRecords.build([row([1, 2], rid=5), row([], "abort", rid=6)])])
    assert output.emissions == [] and output.cancels == [] and worker.stats.late == 2


def test_tokens_behind_an_end_are_late_and_say_nothing() -> None:
    bench = Bench(spec_of(CHAT, n=2))
    bench.give(row(HELLO[:2], "length"))
    before = bench.body
    assert bench.give(row(HELLO[:3]), row([], "stop"), row(HELLO[:1], "stop")) == b""
    assert bench.body == before and bench.worker.stats.late == 4
    bench.give(row([], "abort", index=1))
    assert bench.ended and bench.worker.open_requests == 0
    assert bench.give(row(HELLO[:1], index=1)) == b"" and bench.worker.stats.late == 5


def test_emissions_go_to_the_front_end_that_waits() -> None:
    worker = worker_of()
    opens = [opened(rid, spec_of(CHAT), frontend=rid % 2) for rid in range(4)]
    output = worker.receive([StepRecords.build([row(HELLO[:1], rid=rid) for rid in range(4)], opens)])
    assert {frontend: [r[0] for r in emissions.rows()] for frontend, emissions in output.emissions} == {
        0: [0, 2],
        1: [1, 3],
    }


def test_a_reopened_request_starts_again() -> None:
    worker, spec = worker_of(), spec_of(CHAT)
    first = worker.receive([StepRecords.build([row(HELLO[:2], rid=1)], [opened(1, spec)])])
    again = Open(1, 1, 0, spec.encode(), [(1, False)])
    second = worker.receive(
        [StepRecords.build([row(HELLO[2:3], rid=1)]), StepRecords.build([row(HELLO[:2], rid=1)], [again])]
    )
    rows = list(dict(second.emissions)[0].rows())
    assert [(r[1], r[3]) for r in rows] == [(0, 3), (1, 2)]
    assert bytes_by_rid(first)[1].startswith(b"data: ") and b'" world"' in rows[1][5] and b"role" not in rows[1][5]
    assert worker.open_requests == 1


# --------------------------------------------------------------------------------------------------- ends without bytes


def silent(record: DetokenizedGenerationResultBase, args: Any) -> bytes:
    return b""


@pytest.mark.parametrize("streams", [True, False])
def test_an_end_without_bytes_is_told(streams: bool) -> None:
    table = {"silent": PostProcessor(silent, lambda args: None, lambda args, message: (b"", False), streams)}
    for rows, flags in (
        ([row(HELLO[:2], "stop")], OUTPUT_END | REQUEST_END),
        ([row([BAD])], OUTPUT_END | REQUEST_END | FAILED),
    ):
        bench = Bench(StreamSpec("silent", {}, 1, streams, 0), table=table)
        bench.give(*rows)
        assert [(r[4] & ~BODY, r[5]) for r in bench.rows] == [(flags, b"")] and bench.worker.open_requests == 0


def test_a_unary_record_keeps_its_text() -> None:
    """What the contract of PostProcessor promises, on the fast lane too."""

    def process(record: DetokenizedGenerationResultBase, args: Any) -> bytes:
        return record.outputs[0].text.encode() if record.finished else b""

    table = {"text": PostProcessor(process, lambda args: None, lambda args, message: (b"", True), streams=False)}
    bench = Bench(StreamSpec("text", {}, 1, False, 0), table=table)
    bench.give(*each(HELLO, "stop", stop_token=True))
    assert bench.body == b"Hello world, the answer is 42."


# ------------------------------------------------------------------------------------------------------ backlogs


def test_a_backlog_is_joined_per_output() -> None:
    spec = spec_of(CHAT, n=2)
    backlog = [[row(HELLO[at : at + 1]), row(HELLO[at : at + 1], index=1)] for at in range(6)]
    backlog += [[row(HELLO[6:], "stop", stop_token=True)], [row([], "length", index=1)]]
    joined, stepped = Bench(spec), Bench(spec)
    joined.backlog(backlog)
    for step in backlog:
        stepped.give(*step)
    one, other = merge_stream(joined.body, CHAT), merge_stream(stepped.body, CHAT)
    assert one.choices == other.choices and len(one.chunks) < len(other.chunks)
    assert len(joined.rows) == 2
    assert joined.worker.stats.coalesced == 12 and joined.worker.stats.rows == 14 and joined.worker.stats.steps == 9


def test_a_backlog_holds_opens_and_rows_of_many() -> None:
    worker, spec = worker_of(), spec_of(CHAT)
    steps = [
        StepRecords.build([row(HELLO[:1], rid=1)], [opened(1, spec)]),
        StepRecords.build([row(HELLO[1:2], rid=1), row(HELLO[:1], rid=2)], [opened(2, spec)]),
        StepRecords.build([row(HELLO[2:3], "length", rid=1), row([BAD], rid=2)]),
    ]
    bodies = bytes_by_rid(worker.receive(steps))
    assert merge_stream(bodies[1], CHAT).choices[0].content == "Hello world,"
    failed = merge_stream(bodies[2], CHAT)
    assert failed.error is not None and failed.choices[0].content == "Hello"
    assert worker.open_requests == 0


def test_rows_behind_an_end_in_the_same_backlog_are_late() -> None:
    bench = Bench(spec_of(CHAT))
    bench.backlog([[row(HELLO[:1])], [row(HELLO[1:2], "length")], [row(HELLO[2:4])], [row([], "stop")]])
    merged = merge_stream(bench.body, CHAT)
    assert (merged.choices[0].content, merged.choices[0].finish_reason) == ("Hello world", "length")
    assert bench.worker.stats.late == 2


@given(st.lists(st.sampled_from(((), (0,), (1,), (0, 1))), min_size=len(HELLO), max_size=len(HELLO)))
def test_what_is_a_blocked_front_ends_waits_and_nobody_else_does(blocked: list[tuple[int, ...]]) -> None:
    worker, spec = worker_of(), spec_of(CHAT)
    outputs = [worker.receive([StepRecords.build([], [opened(rid, spec, frontend=rid) for rid in (0, 1)])])]
    for at, (token, full) in enumerate(zip(HELLO, blocked)):
        end = "length" if at == len(HELLO) - 1 else None
        outputs.append(worker.receive([StepRecords.build([row([token], end, rid=rid) for rid in (0, 1)])], full))
        assert sorted(dict(outputs[-1].emissions)) == [frontend for frontend in (0, 1) if frontend not in full]
        for frontend, emissions in outputs[-1].emissions:
            assert emissions.counts[-1] == at + 1, f"front end {frontend} lags behind"
        assert worker.holds == bool(full)
    outputs.append(worker.receive([]))
    for body in bytes_by_rid(*outputs).values():
        assert merge_stream(body, CHAT).choices[0].content == "Hello world, the answer is 42."
    assert not worker.holds and worker.open_requests == 0 and worker.stats.late == 0


def test_what_is_held_comes_again_with_a_new_executor_or_a_new_open() -> None:
    bench = Bench(spec_of(CHAT))
    bench.give(row(HELLO[:1]))
    bench.worker.receive([StepRecords.build([row(HELLO[1:2])])], blocked=(0,))
    assert bench.worker.holds
    assert told(recalled(bench)) == [(0, HELLO[:1], None)] and not bench.worker.holds
    again = StepRecords.build([row(HELLO[1:2])])
    again.incarnation = 1
    bench.worker.receive([again], blocked=(0,))
    anew = StepRecords.build([row(HELLO[:3])], [Open(0, 1, 0, spec_of(CHAT).encode(), [(1, False)])])
    anew.incarnation = 1
    ((_, emissions),) = bench.worker.receive([anew]).emissions
    assert [(row[1], row[3]) for row in emissions.rows()] == [(1, 3)]
    assert b"world," in emissions.payload and b"Hello" not in emissions.payload


def test_ends_and_odd_rows_in_a_usual_step_keep_their_place() -> None:
    """Of many streams in one step: most on the express lane, some ending, one with half a character, one unknown."""
    worker, spec = worker_of(), spec_of(CHAT)
    opens = [opened(rid, spec) for rid in range(6)]
    outputs = [worker.receive([StepRecords.build([row(HELLO[:1], rid=rid) for rid in range(6)], opens)])]
    half = tokens("<0xC3>", "<0xA9>")
    for at in range(2):
        rows = [row([HELLO[1 + at]], rid=rid) for rid in range(3)]
        rows += [row([half[at]], rid=3), row([HELLO[1]], "length" if at else None, rid=4), row(HELLO[:1], rid=99)]
        rows += [row([HELLO[1 + at]], rid=4 if at else 5), row([BAD if at else HELLO[1]], rid=5)]
        outputs.append(worker.receive([StepRecords.build(rows)]))
    outputs.append(worker.receive([StepRecords.build([row([], "length", rid=rid) for rid in range(4)])]))
    bodies = {rid: merge_stream(body, CHAT) for rid, body in bytes_by_rid(*outputs).items()}
    assert [bodies[rid].choices[0].content for rid in range(3)] == ["Hello world,"] * 3
    assert bodies[3].choices[0].content == "Helloé"
    assert (bodies[4].choices[0].content, bodies[4].choices[0].finish_reason) == ("Hello world world", "length")
    assert bodies[5].choices[0].content == "Hello world world" and bodies[5].error is not None
    assert worker.stats.late == 3 and sorted(dict(outputs[1].emissions)[0].rids) == [0, 1, 2, 4, 5, 5]


def test_logprobs_of_a_backlog_stay_with_their_tokens() -> None:
    bench = Bench(spec_of(CHAT, logprobs=True))
    bench.backlog([[row(HELLO[at : at + 1], logprobs=[TokenLogprob(-float(at))])] for at in range(3)])
    bench.give(row([], "abort"))
    assert [e["logprob"] for e in merge_stream(bench.body, CHAT).choices[0].logprobs] == [0.0, -1.0, -2.0]


# ------------------------------------------------------------------------------------------------------ stream interval


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@given(interval=st.integers(1, 12), sizes=st.lists(st.integers(1, 4), max_size=12))
def test_an_interval_joins_chunks_and_changes_no_text(endpoint: str, interval: int, sizes: list[int]) -> None:
    bench, whole, ids = (
        Bench(spec_of(endpoint, n=2), stream_interval=interval),
        Bench(spec_of(endpoint, n=2)),
        list(HELLO),
    )
    first = bench.give(row(ids[:1]))
    assert b"Hello" in first, "the first token waits for nothing"
    whole.give(row(ids[:1]))
    del ids[0]
    for size in [*sizes, 100]:
        finish = "stop" if size >= len(ids) else None
        for each_bench in (bench, whole):
            each_bench.give(row(ids[:size], finish, stop_token=finish is not None))
        del ids[:size]
        if finish:
            break
    for each_bench in (bench, whole):
        each_bench.give(row([], "abort", index=1))
    one, other = merge_stream(bench.body, endpoint), merge_stream(whole.body, endpoint)
    assert one.choices == other.choices and len(one.chunks) <= len(other.chunks)
    counts = [r[3] for r in bench.rows if r[2] == 0]
    assert all(later - earlier >= min(interval, len(HELLO) - earlier) for earlier, later in zip(counts, counts[1:]))


def test_an_interval_does_not_delay_the_end() -> None:
    for rows, content in (
        (each(HELLO[:7]), "Hello world, the "),  # a stop string
        ([*each(HELLO[:3]), row([], "abort")], "Hello world,"),
    ):
        bench = Bench(spec_of(CHAT, stop=["answer"]), stream_interval=100)
        for step in rows:
            bench.give(step)
        assert bench.ended and merge_stream(bench.body, CHAT).choices[0].content == content


@pytest.mark.parametrize("last", [row([], "error", message="broken"), row(HELLO[3:4], "error", message="broken")])
def test_an_interval_does_not_hold_an_error_or_what_came_before(last: StepRow) -> None:
    bench = Bench(spec_of(CHAT), stream_interval=100)
    for step in (*each(HELLO[:3]), last):
        bench.give(step)
    merged = merge_stream(bench.body, CHAT)
    assert merged.error is not None and merged.error["message"] == "broken"
    assert merged.choices[0].content == "Hello world," + (" the" if last.token_ids else "")


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("asked", "started"), [(4, 1), (1, 4), (3, 100)])
def test_a_requests_interval_counts_and_not_the_workers(endpoint: str, asked: int, started: int) -> None:
    own, other = (
        Bench(spec_of(endpoint, stream_interval=asked), stream_interval=started),
        Bench(spec_of(endpoint), stream_interval=asked),
    )
    for step in each(HELLO, "stop", stop_token=True):
        assert own.give(step) == other.give(step)
    assert own.rows == other.rows and own.ended
    told = [count for _, _, _, count, _, _ in own.rows]
    assert told == [*range(1, len(HELLO), asked), len(HELLO)]


@pytest.mark.parametrize("asked", [None, 100])
def test_an_interval_is_not_for_documents(asked: int | None) -> None:
    bench = Bench(spec_of(CHAT, stream=False, stream_interval=asked), stream_interval=100)
    bench.give(*each(HELLO, "stop", stop_token=True))
    assert merge_document(bench.body, CHAT).choices[0].content == "Hello world, the answer is 42."


# ------------------------------------------------------------------------------------------------------ what stays


def test_finished_requests_leave_no_state() -> None:
    """10 000 of them, in every way a request can end."""

    class Hook:
        def __call__(self, output: object, text: str) -> HookAction:
            return Emit()

    worker = worker_of(hook_factory=Hook, stream_interval=2)
    specs = [
        spec_of(CHAT, stop=["answer"], n=2).encode(), spec_of(COMPLETIONS, logprobs=1).encode(), spec_of(CHAT,
        stream=False).encode(), b"\xc1",
    ]  # fmt: skip
    ends = [
        [row(HELLO[:5]), row([], "abort", index=1)], [row([*HELLO[:3], BAD])], [row(HELLO, "stop", stop_token=True)],
        [row([1], "stop")],
    ]  # fmt: skip

    def requests(start: int, count: int) -> None:
        for rid in range(start, start + count):
            worker.receive(
                [StepRecords.build([r._replace(rid=rid) for r in ends[rid % 4]], [Open(rid, 0, 0, specs[rid % 4])])]
            )

    requests(0, 2000)  # fills what is kept on purpose: escaped texts, a decoder's caches
    gc.collect()
    before = sys.getallocatedblocks()
    requests(2000, 8000)
    gc.collect()
    after = sys.getallocatedblocks()
    assert worker.open_requests == 0 and worker.stats.opened == 10_000
    assert worker.stats.finished == 7500 and worker.stats.failed == 5000
    assert after - before < 800, f"{(after - before) / 8000:.1f} objects stay per request"


def test_records_may_be_made_by_the_caller() -> None:
    made: list[tuple[int, bool]] = []

    def creator(rid: int, spec: StreamSpec, vocabulary: Any, keep_text: bool) -> DetokenizedGenerationResultBase:
        made.append((rid, keep_text))
        return default_record_creator(rid, spec, vocabulary, keep_text)

    worker = worker_of(record_creator=creator)
    worker.receive(
        [StepRecords([], [], [], [], opens=[opened(4, spec_of(CHAT)), opened(5, spec_of(CHAT, stream=False))])]
    )
    assert made == [(4, False), (5, True)]


# ------------------------------------------------------------------------------------------------------ too large


def test_a_response_larger_than_a_frame_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiving socket would drop its frame without a word, and the client wait for ever."""
    monkeypatch.setattr("postproc_workers.worker.MAX_PAYLOAD", 1000)
    large, small = (Bench(spec_of(CHAT, stream=False)) for _ in range(2))
    document = merge_document(small.give(row(HELLO, "length")), CHAT)
    assert document.choices[0].content == "Hello world, the answer is 42."
    body = json.loads(large.give(row(HELLO * 40, "length")))
    assert "larger than 1000 bytes" in body["error"]["message"]
    assert large.worker.open_requests == 0 and large.worker.stats.failed == 1


def test_the_messages_of_one_batch_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postproc_workers.worker.MAX_PAYLOAD", 1000)
    worker, spec = worker_of(), spec_of(CHAT)
    worker.receive([StepRecords([], [], [], [], opens=[opened(rid, spec) for rid in range(20)])])
    output = worker.receive([StepRecords.build([row(HELLO[:1], rid=rid) for rid in range(20)])])
    messages = [message for _, message in output.emissions]
    assert len(messages) > 1 and all(len(message.payload) <= 1000 for message in messages)
    assert [rid for message in messages for rid in message.rids] == list(range(20))


# ------------------------------------------------------------------------------------------------------ a new executor


def recalled(bench: Bench, incarnation: int = 1) -> StepRecords:
    """What a worker says it has, in one message."""
    (histories,) = bench.worker.receive([Recall(incarnation)]).histories
    assert histories.last and decode(encode(histories)).worker == 0  # type: ignore[union-attr]
    return histories.steps


def told(steps: StepRecords) -> list[tuple[int, list[int], Any]]:
    return [(index, list(ids), finish) for _, index, ids, finish, _ in steps.rows()]


def test_a_worker_tells_a_new_executor_what_it_has() -> None:
    bench = Bench(spec_of(CHAT, n=3, stop=["the end"]))
    bench.give(row(HELLO[:3]), row(tokens("the", " "), index=1), row(HELLO, "stop", index=2, stop_token=True))
    steps = recalled(bench)
    assert [(opened.rid, opened.epoch, opened.spec) for opened in steps.opens] == [(0, 0, b"")]
    assert told(steps) == [
        (0, HELLO[:3], None),
        (1, tokens("the", " "), None),
        (2, HELLO, Finish("stop", True)),
    ]


def test_an_output_that_a_stop_string_ended_has_what_led_to_it() -> None:
    """Whoever reads those ids again ends at the same place; what came behind, a stop token too, is not among them."""
    bench = Bench(spec_of(CHAT, n=2, stop=["END"]))
    bench.give(row(tokens("a", "EN", "D", "b", "<|end|>"), "stop", stop_token=True))
    assert told(recalled(bench)) == [(0, tokens("a", "EN", "D"), Finish("stop")), (1, [], None)]


def test_what_is_held_for_a_chunk_or_asked_for_is_told_too() -> None:
    entries = [TokenLogprob(-0.5, ((token, -0.5),)) for token in HELLO[:5]]
    bench = Bench(spec_of(CHAT, logprobs=True, top_logprobs=1), stream_interval=4)
    for token, entry in zip(HELLO[:5], entries):
        bench.give(row([token], logprobs=[entry]))
    (_, _, ids, finish, logprobs), *_ = recalled(bench).rows()
    assert (list(ids), finish) == (HELLO[:5], None)
    assert logprobs is not None and list(logprobs) == entries


def test_entries_that_some_ids_lack_are_not_told() -> None:
    bench = Bench(spec_of(CHAT, logprobs=True))
    bench.give(row(HELLO[:2]))
    bench.give(row(HELLO[2:3], logprobs=[TokenLogprob(-0.5)]))
    (_, _, ids, _, logprobs), *_ = recalled(bench).rows()
    assert list(ids) == HELLO[:3] and logprobs is None


def test_many_histories_come_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postproc_workers.worker.MAX_HISTORY", 4)
    bench = Bench(spec_of(CHAT, n=2))
    bench.give(row(HELLO[:5]), row(HELLO[:2], index=1))
    parts = bench.worker.receive([Recall(1)]).histories
    assert [part.last for part in parts] == [False, True]
    assert [told(part.steps) for part in parts] == [[(0, HELLO[:5], None)], [(1, HELLO[:2], None)]]


def test_nothing_is_told_of_what_is_over() -> None:
    bench = Bench(spec_of(CHAT))
    bench.give(*each(HELLO, "stop", stop_token=True))
    assert told(recalled(bench)) == [] and recalled(bench).opens == []


def test_what_an_older_executor_has_left_behind_is_dropped() -> None:
    """Its tokens come again from the new one. What is told is as of before them, whatever the order of arrival."""
    bench = Bench(spec_of(CHAT))
    bench.give(row(HELLO[:1]))
    old = StepRecords.build([row(HELLO[1:2])])
    output = bench.worker.receive([old, Recall(1), old])
    assert told(output.histories[0].steps) == [(0, HELLO[:1], None)]
    assert output.emissions == [] and bench.worker.stats.stale == 2
    new = StepRecords.build([row(HELLO[1:2])])
    new.incarnation = 1
    assert dict(bench.worker.receive([old, new]).emissions)[0].counts == [2]


def test_the_request_in_hand_is_marked() -> None:
    """In a cell that outlives the worker; nobody's between two batches."""
    seen: list[int] = []

    class Cell(list[int]):
        def __setitem__(self, place: Any, value: Any) -> None:
            seen.append(value)
            super().__setitem__(place, value)

    worker = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS, marker=Cell([-1]))
    opens = [Open(rid, 0, 0, spec_of(CHAT).encode()) for rid in (5, 6)]
    worker.receive([StepRecords.build([row(HELLO[:1], rid=6), row(HELLO[:1], rid=5)], opens)])
    assert seen == [5, 6, 6, 5, -1]
