"""Linear cost: twice the tokens, twice the work; and state per request that is bounded apart from its ids.

Work is counted, not timed: calls of Python and C functions, and bytes that a step allocates at its peak. A copy of all
that was there before shows in the second, a loop over it in the first.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from executor.engines.base import StepRow
from executor.messages import Open, StepRecords
from postproc_workers.worker import PostprocWorker
from tests.helpers import ALL_POST_PROCESSORS, Bench, row, tokens, vocabulary
from tests.laws.cases import NAMES, Case, Output

IDS = tokens("Hello", " world", "ST", "STO", "\\xf0\\x9f", "\\x98\\x80", "<thi", "nk>", "<|pad|>", "世", "aab", ".")
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stops": {"stop": ["STOP!", "aabb", "<think >", "世世"]},
    "logprobs": {"logprobs": True},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
CASES = [(name, kind) for name in NAMES for kind in BODIES if kind != "usage" or name.endswith("stream")]


def case_of(name: str, kind: str, length: int) -> Case:
    body = {"skip_special_tokens": True} | BODIES[kind]
    if "completion" in name and kind == "logprobs":
        body["logprobs"] = 1
    ids = [IDS[place % len(IDS)] for place in range(length)]
    return Case(name, body, [Output(ids, "length", False, kind == "logprobs")])


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, while something runs."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def calls_of(case: Case, sizes: int) -> int:
    bench = case.bench()
    (output,) = case.outputs
    rows = output.rows([sizes] * len(output.ids), 0)
    return calls(lambda: [bench.give(row) for row in rows])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_twice_the_tokens_are_twice_the_calls(name: str, kind: str) -> None:
    for sizes in (1, 7):
        short, long = (calls_of(case_of(name, kind, length), sizes) for length in (240, 480))
        assert long <= 2.05 * short


def test_a_backlog_costs_less_than_its_steps() -> None:
    """What a worker that falls behind lives on."""
    rows = case_of("chat_stream", "plain", 240).each()
    one, other = Bench(case_of("chat_stream", "plain", 240).spec()), Bench(case_of("chat_stream", "plain", 240).spec())
    stepped = calls(lambda: [one.give(row) for row in rows])
    joined = calls(lambda: other.backlog([[row] for row in rows]))
    assert joined < stepped / 2


def peaks(bench: Bench, case: Case, places: range) -> list[int]:
    """Bytes that single steps allocate at their peak."""
    (output,) = case.outputs
    found = []
    for place in places:
        step = output.row(place, place + 1, 0)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        bench.worker.receive([records(step)])
        found.append(tracemalloc.get_traced_memory()[1] - before)
    return found


def records(step: StepRow) -> StepRecords:
    return StepRecords.build([step])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_late_step_allocates_what_an_early_one_does(name: str, kind: str) -> None:
    """The median: now and then a list grows, and moves."""
    case = case_of(name, kind, 1400)
    bench = case.bench()
    tracemalloc.start()
    try:
        peaks(bench, case, range(12))
        early = statistics.median(peaks(bench, case, range(12, 12 + 120)))
        for place in range(132, 1300):
            bench.worker.receive([records(case.outputs[0].row(place, place + 1, 0))])
        late = statistics.median(peaks(bench, case, range(1300, 1400)))
    finally:
        tracemalloc.stop()
    assert late <= early + 200, f"{early} bytes at the start, {late} after 1300 tokens"


@pytest.mark.parametrize("name", [name for name in NAMES if "unary" not in name])
@pytest.mark.parametrize("kind", ["plain", "stops", "logprobs"])
def test_the_state_of_a_stream_is_its_ids_and_a_bound(name: str, kind: str) -> None:
    case = case_of(name, kind, 2000)
    bench = case.bench()
    tracemalloc.start()
    try:
        for place in range(500):
            bench.worker.receive([records(case.outputs[0].row(place, place + 1, 0))])
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for place in range(500, 1500):
            bench.worker.receive([records(case.outputs[0].row(place, place + 1, 0))])
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # A new executor asks for log-probabilities too: 32 bytes for a token with two alternatives, as one object.
    most = 6 + 100 if kind == "logprobs" else 6
    assert grown < 1000 * most, f"{grown / 1000:.1f} bytes a token, of which an id is 4"


def test_many_open_requests_cost_a_step_no_more() -> None:
    """The work of a row does not depend on how many others there are."""
    few, many = (calls_of_a_step(count) for count in (8, 512))
    assert many <= 1.1 * few * 512 / 8


def calls_of_a_step(count: int) -> int:
    worker = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS)
    spec = case_of("chat_stream", "plain", 1).spec().encode()
    worker.receive([StepRecords([], [], [], [], opens=[Open(rid, 0, 0, spec) for rid in range(count)])])
    step = StepRecords.build([row(IDS[:1], rid=rid) for rid in range(count)])
    worker.receive([step])
    return calls(lambda: worker.receive([step]))
