"""The default post-processor: steps as plain data, for handles in other processes."""

from __future__ import annotations

from executor.messages import BODY
from executor.request import SamplingParams
from executor.result import OutputDelta
from executor.wire import decode_deltas, encode_delta
from postproc_workers.deltas import POST_PROCESSORS, deltas_request
from postproc_workers.spec import StreamSpec
from tests.helpers import Bench, row, tokens


def test_a_request_and_its_spec_agree() -> None:
    sampling = SamplingParams(max_tokens=5, stop_token_ids=(7,), logprobs=2)
    request = deltas_request(3, [[1], [2, 3]], sampling, n=2, stop=["x"], skip_special_tokens=False, frontend=4)
    assert (request.rid, request.n, request.frontend, request.num_outputs, request.sampling) == (3, 2, 4, 4, sampling)
    spec = StreamSpec.decode(request.spec)
    assert spec.post_processor in POST_PROCESSORS
    assert (spec.outputs, spec.streaming, spec.prompt_tokens, spec.stop) == (4, True, 3, ("x",))
    assert (spec.stop_token_ids, spec.logprobs, spec.skip_special_tokens) == ((7,), 2, False)


def steps(bench: Bench) -> list[OutputDelta | str]:
    return list(decode_deltas(bench.body))


def test_every_step_says_what_is_new() -> None:
    bench = Bench(StreamSpec.decode(deltas_request(0, [[1]], SamplingParams(), n=2, stop=["OP"]).spec))
    bench.give(row(tokens("a", "ST")), row(tokens("b"), index=1))
    bench.give(row(tokens("OP")), row([], "length", index=1))
    assert [
        (step.index, step.text, step.finish_reason, step.stop_reason)
        for step in steps(bench)
        if isinstance(step, OutputDelta)
    ] == [
        (0, "aST", None, None),
        (1, "b", None, None),
        (0, "", "stop", "OP"),
        (1, "", "length", None),
    ]


def test_a_failure_is_a_message_behind_the_steps() -> None:
    bench = Bench(StreamSpec.decode(deltas_request(0, [[1]], SamplingParams()).spec))
    bench.give(row(tokens("a")), row([], "error", message="no memory"))
    first, last = steps(bench)
    assert isinstance(first, OutputDelta) and first.text == "a" and last == "no memory"
    assert not bench.rows[-1][4] & BODY


def test_what_travels_is_what_was_said() -> None:
    delta = OutputDelta(1, (5,), "a")
    (again,) = decode_deltas(encode_delta(delta))
    assert again == delta._replace(token_ids=[5], logprobs=[])
