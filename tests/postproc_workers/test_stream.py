"""One request's stream: where a stop cuts ids, text, logprobs and usage; hidden stop tokens; tails; resume;
recordings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from executor.request import SamplingParams
from executor.result import OutputDelta
from executor.wire import decode_deltas
from postproc_workers.deltas import deltas_request
from postproc_workers.spec import StreamSpec
from tests.helpers import CHAT, COMPLETIONS, Bench, row, spec_of, tokens
from tests.recordings.build_tokenizers import ids as ids_of
from tests.recordings.checker import Choice, Merged, merge_stream

END = tokens("<|end|>")[0]
USAGE = {"stream_options": {"include_usage": True}}


def cuts(count: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive (start, stop) of these sizes, the rest in one; at least one."""
    ends, at = [], 0
    for size in sizes:
        at += size
        if at >= count:
            break
        ends.append(at)
    return list(zip([0, *ends], [*ends, count]))


def run(
    spec: StreamSpec,
    ids: Sequence[int],
    finish: str = "stop",
    *,
    stop_token: bool = False,
    sizes: Sequence[int] = (),
    **options: Any,
) -> Bench:
    """One output, cut into rows of these sizes; logprobs are -1, -2, ... where the spec asks for them."""
    bench = Bench(spec, **options)
    logprobs = (
        [TokenLogprob(-float(i + 1), ((ids[i], -float(i + 1)),)) for i in range(len(ids))]
        if spec.logprobs is not None
        else None
    )
    for start, stop in cuts(len(ids), sizes):
        last = stop == len(ids)
        part = logprobs[start:stop] if logprobs is not None else None
        bench.give(row(ids[start:stop], finish if last else None, stop_token=stop_token and last, logprobs=part))
    return bench


def chat(spec: StreamSpec, *args: Any, **kwargs: Any) -> tuple[Choice, Merged, Bench]:
    bench = run(spec, *args, **kwargs)
    merged = merge_stream(bench.body, CHAT, include_usage=b'"usage":{' in bench.body)
    return merged.choices[0], merged, bench


SIZES = st.lists(st.integers(1, 4), max_size=10)

# ------------------------------------------------------------------------------------------------------ stop strings


@given(SIZES)
def test_a_stop_cuts_at_the_token_that_completes_it(sizes: list[int]) -> None:
    ids = tokens("a", "ST", "OP", ".", " the", "<|end|>")
    spec = spec_of(CHAT, stop=["STOP"], logprobs=True, top_logprobs=1, **USAGE)
    choice, merged, bench = chat(spec, ids, stop_token=True, sizes=sizes)
    assert (choice.content, choice.finish_reason, choice.stop_reason) == ("a", "stop", "STOP")
    assert [entry["logprob"] for entry in choice.logprobs] == [-1.0, -2.0, -3.0]
    assert merged.usage == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert bench.cancels == ([] if ended_by_engine(sizes, 6, 3) else [(0, 0)])
    assert [r[3] for r in bench.rows][-1] == 3


def ended_by_engine(sizes: Sequence[int], count: int, at: int) -> bool:
    """Whether the row that has token number ``at`` is the one that brings the engine's finish."""
    start, stop = next(part for part in cuts(count, sizes) if part[0] < at <= part[1])
    return stop == count


def test_a_stop_found_here_is_told_upstream_and_one_found_by_the_engine_is_not() -> None:
    assert chat(spec_of(CHAT, stop=["b"]), tokens("a", "b", "a"), sizes=[1, 1, 1])[2].cancels == [(0, 0)]
    assert chat(spec_of(CHAT, stop=["b"]), tokens("a", "b", "a"), sizes=[])[2].cancels == []


@given(SIZES)
def test_a_stop_inside_of_a_token(sizes: list[int]) -> None:
    """Text in front of it in the same token is sent, text behind it is gone, the token counts."""
    ids = tokens("Hello", " answer", " is")
    choice, merged, _ = chat(spec_of(CHAT, stop=["nsw"], **USAGE), ids, "length", sizes=sizes)
    assert (choice.content, choice.stop_reason) == ("Hello a", "nsw")
    assert merged.usage is not None and merged.usage["completion_tokens"] == 2


@given(SIZES)
def test_a_shown_stop_is_part_of_the_text(sizes: list[int]) -> None:
    ids = tokens("a", "ST", "OP", ".", "a")
    choice, _, _ = chat(spec_of(CHAT, stop=["TO"], include_stop_str_in_output=True), ids, "length", sizes=sizes)
    assert (choice.content, choice.stop_reason) == ("aSTO", "TO")


@given(SIZES)
def test_a_stop_over_a_character_that_tokens_share(sizes: list[int]) -> None:
    """The token that completes the character completes the stop."""
    ids = tokens("a", "\\xf0\\x9f", "\\x98\\x80", "a", "a")
    choice, merged, _ = chat(spec_of(CHAT, stop=["😀"], logprobs=True, **USAGE), ids, "length", sizes=sizes)
    assert (choice.content, choice.stop_reason, len(choice.logprobs)) == ("a", "😀", 3)
    assert merged.usage is not None and merged.usage["completion_tokens"] == 3


@given(SIZES)
def test_a_stop_that_only_the_tail_completes(sizes: list[int]) -> None:
    """An incomplete character at the end becomes U+FFFD with the last id, hidden or not, in whatever row that comes."""
    ids = tokens("a", "\\xf0\\x9f", "<|end|>")
    choice, merged, _ = chat(spec_of(CHAT, stop=["\ufffd"], logprobs=True, **USAGE), ids, stop_token=True, sizes=sizes)
    assert (choice.content, choice.stop_reason, len(choice.logprobs)) == ("a", "\ufffd", 3)
    assert merged.usage is not None and merged.usage["completion_tokens"] == 3


@given(SIZES)
def test_a_held_prefix_is_text_at_the_end(sizes: list[int]) -> None:
    choice, _, bench = chat(spec_of(CHAT, stop=["STOP", "b"]), tokens("a", "STO"), "length", sizes=sizes)
    assert (choice.content, choice.finish_reason, choice.stop_reason) == ("aSTO", "length", None)
    assert bench.cancels == []


@given(SIZES)
def test_special_tokens_do_not_make_a_stop(sizes: list[int]) -> None:
    """What the client is not shown is not searched either, unless it asks to see it."""
    ids = tokens("a", "<|role|>", "b")
    assert chat(spec_of(CHAT, stop=["<|role|>"]), ids, "length", sizes=sizes)[0].content == "ab"
    shown = spec_of(CHAT, stop=["<|role|>"], skip_special_tokens=False)
    assert chat(shown, ids, "length", sizes=sizes)[0].content == "a"


def test_each_choice_stops_alone() -> None:
    bench = Bench(spec_of(CHAT, n=3, stop=["STOP"]))
    bench.give(row(tokens("a", "ST")), row(tokens("ST"), index=1), row(tokens("OP"), index=2))
    bench.give(row(tokens("OP")), row(tokens("a"), index=1), row(tokens("ST"), "length", index=2))
    bench.give(row(tokens("a")), row(tokens("STOP"), index=1))
    choices = merge_stream(bench.body, CHAT).choices
    assert [choices[i].content for i in range(3)] == ["a", "STa", "OPST"]
    assert bench.cancels == [(0, 0), (0, 1)] and bench.worker.stats.late == 1


def test_nothing_of_a_stop_leaves_early() -> None:
    bench = Bench(spec_of(CHAT, stop=["STOP it"]))
    for text in ("a", "ST", "OP", " ", "i"):
        bench.give(row(tokens(text)))
        assert b"S" not in bench.body.replace(b"data", b"")
    bench.give(row(tokens("b")))
    assert b'"STOP ib"' in bench.body


# ------------------------------------------------------------------------------------------------------ stop tokens


@pytest.mark.parametrize("skip", [True, False])
@given(sizes=SIZES)
def test_the_stop_token_is_hidden_but_counts(skip: bool, sizes: list[int]) -> None:
    ids = tokens("a", "b", "<|end|>")
    choice, merged, _ = chat(
        spec_of(CHAT, skip_special_tokens=skip, logprobs=True, **USAGE), ids, stop_token=True, sizes=sizes
    )
    assert (choice.content, choice.finish_reason, choice.stop_reason) == ("ab", "stop", None)
    assert merged.usage is not None and merged.usage["completion_tokens"] == 3 and len(choice.logprobs) == 3


@given(SIZES)
def test_the_clients_own_stop_token_is_the_reason(sizes: list[int]) -> None:
    (b,) = tokens("b")
    ids = [*tokens("a"), b]
    choice = chat(spec_of(CHAT, stop_token_ids=[b]), ids, stop_token=True, sizes=sizes)[0]
    assert (choice.content, choice.stop_reason) == ("a", b)
    shown = spec_of(CHAT, stop_token_ids=[b], include_stop_str_in_output=True)
    choice = chat(shown, ids, stop_token=True, sizes=sizes)[0]
    assert (choice.content, choice.stop_reason) == ("ab", b)


def test_the_end_of_sequence_is_no_reason_and_is_not_shown_with_the_stop() -> None:
    spec = spec_of(CHAT, stop_token_ids=[5], include_stop_str_in_output=True, skip_special_tokens=False)
    choice = chat(spec, tokens("a", "<|end|>"), stop_token=True)[0]
    assert (choice.content, choice.stop_reason) == ("a", None)


def test_a_last_id_that_did_not_end_the_output_is_text() -> None:
    (b,) = tokens("b")
    choice = chat(spec_of(CHAT, stop_token_ids=[b]), [*tokens("a"), b], "length")[0]
    assert (choice.content, choice.finish_reason, choice.stop_reason) == ("ab", "length", None)


# ------------------------------------------------------------------------------------------------------ text and tails


@given(SIZES)
def test_offsets_in_the_text_do_not_depend_on_the_cut(sizes: list[int]) -> None:
    ids = tokens("a", "\\xf0\\x9f", "\\x98\\x80", "\\xe4\\xb8", "<|end|>")
    bench = run(spec_of(COMPLETIONS, logprobs=1), ids, stop_token=True, sizes=sizes)
    choice = merge_stream(bench.body, COMPLETIONS).choices[0]
    assert choice.content == "a😀\ufffd"
    # A character belongs to the token that completes it; the hidden stop token comes with what was incomplete.
    assert [entry["text_offset"] for entry in choice.logprobs] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("endpoint", "text"), [(CHAT, "Hello"), (COMPLETIONS, " Hello")])
def test_a_completion_keeps_the_space_of_its_first_word(endpoint: str, text: str) -> None:
    bench = run(spec_of(endpoint), ids_of("pieces", [" Hello"]), "length", names="pieces")
    assert merge_stream(bench.body, endpoint).choices[0].content == text


@pytest.mark.parametrize("body", [{}, {"stop": ["x"]}, {"logprobs": True}])
def test_an_incomplete_tail_is_flushed_once(body: dict[str, Any]) -> None:
    for finish in ("length", "abort"):
        bench = Bench(spec_of(CHAT, **body))
        bench.give(row(tokens("a", "\\xf0\\x9f"), logprobs=[TokenLogprob(-1.0)] * 2 if "logprobs" in body else None))
        assert '"content":"\ufffd'.encode() not in bench.body
        bench.give(row([], finish))
        assert merge_stream(bench.body, CHAT).choices[0].content == "a\ufffd"


def test_an_error_comes_behind_the_tail() -> None:
    bench = Bench(spec_of(CHAT, stop=["STOP"]))
    bench.give(row(tokens("a", "STO")), row([], "error", message="broken"))
    merged = merge_stream(bench.body, CHAT)
    assert merged.choices[0].content == "aSTO" and merged.error is not None and merged.error["message"] == "broken"


def test_a_stop_that_completes_in_the_row_of_an_error_wins() -> None:
    bench = Bench(spec_of(CHAT, stop=["b"]))
    bench.give(row(tokens("a", "b", "a"), "error", message="broken"))
    merged = merge_stream(bench.body, CHAT)
    assert merged.error is None and merged.choices[0].stop_reason == "b"


def test_an_error_without_tokens_is_a_document_and_with_tokens_an_event() -> None:
    bench = Bench(spec_of(CHAT))
    bench.give(row([], "error"))
    assert bench.body.startswith(b"{") and b"the engine failed" in bench.body
    bench = Bench(spec_of(CHAT))
    bench.give(row(tokens("a"), "error", message="no memory"))
    assert merge_stream(bench.body, CHAT).choices[0].content == "a"


# ------------------------------------------------------------------------------------------------------ resume


def resumed(
    spec: StreamSpec, ids: Sequence[int], given_before: int, sizes: Sequence[int], **options: Any
) -> tuple[bytes, bytes]:
    """(what an undisturbed run gives after a number of tokens, what a resumed one gives)."""
    whole = run(spec, ids, "length", sizes=[1] * len(ids), **options)
    after = b"".join(r[5] for r in whole.rows if r[3] > given_before or r[4])
    told = [r[3] for r in whole.rows if r[3] <= given_before and not r[4]]
    count = max(told, default=0)
    assert after == b"".join(r[5] for r in whole.rows if r[3] > count or r[4])
    return after, run(spec, ids, "length", sizes=[count or 1, *sizes], delivered=[(count, False)], **options).body


@pytest.mark.parametrize(
    "body", [{}, {"stop": ["STOP"]}, {"logprobs": True}, {"stop": ["OPa"], "include_stop_str_in_output": True}]
)
@given(given_before=st.integers(0, 8), first=st.integers(1, 8))
def test_a_resumed_stream_goes_on_where_it_was(body: dict[str, Any], given_before: int, first: int) -> None:
    """Exactly the bytes that are missing, with the same steps behind the border."""
    ids = tokens("a", "\\xf0\\x9f", "\\x98\\x80", "ST", "STO", "a", "STOP", "a")
    after, again = resumed(spec_of(CHAT, **body), ids, given_before, [1] * 8)
    assert again == after


def test_a_bad_id_in_a_history_is_met_again() -> None:
    """The row that holds it is refused as a whole, so none of it may have been folded before."""
    ids = [*tokens("a", "b", "Hello"), 9999]
    for count in range(4):
        for sizes in ([4], [1] * 4, [2, 2]):
            bench = Bench(spec_of(CHAT), delivered=[(count, False)])
            for start, stop in cuts(4, sizes):
                bench.give(row(ids[start:stop]))
            first = Bench(spec_of(CHAT))
            sent = [first.give(row([token])) for token in ids]
            merged = merge_stream(b"".join(sent[:count]) + bench.body, CHAT)
            assert merged.choices[0].content == "abHello" and merged.error is not None
            assert "9999" in merged.error["message"]


def test_an_end_that_the_client_has_is_silent() -> None:
    spec = spec_of(CHAT, n=2, stop=["STOP"])
    bench = Bench(spec, delivered=[(2, True), (1, False)])
    assert bench.give(row(tokens("a", "ST", "OP", "a"))) == b""
    assert bench.cancels == [(0, 0)]
    sent = bench.give(row(tokens("a", "b"), "length", index=1))
    assert b'"index":0' not in sent and b"role" not in sent and sent.endswith(b"[DONE]\n\n")


def test_nothing_is_held_across_the_border() -> None:
    """With an interval, too, a chunk ends where the client's bytes end."""
    ids = tokens("Hello", " world", ",", " the", " answer", " is")
    for count in range(1, 6):
        bench = Bench(spec_of(CHAT), delivered=[(count, False)], stream_interval=3)
        for token in ids:
            bench.give(row([token]))
        bench.give(row([], "length"))
        first = Bench(spec_of(CHAT))
        before = b"".join(first.give(row([token])) for token in ids[:count])
        assert merge_stream(before + bench.body, CHAT).choices[0].content == "Hello world, the answer is"


# ------------------------------------------------------------------------------------------------------ deltas


def test_deltas_carry_ids_text_and_the_reason() -> None:
    request = deltas_request(1, [[1]], SamplingParams(max_tokens=9), stop=["OP"], skip_special_tokens=False)
    bench = Bench(StreamSpec.decode(request.spec))
    payload = bench.give(row(tokens("a", "ST")), row(tokens("<|role|>", "STOP", "a")))
    assert [fields(delta) for delta in decode_deltas(payload)] == [
        ("aST", tokens("a", "ST"), None, None),
        ("<|role|>ST", tokens("<|role|>", "STOP"), "stop", "OP"),
    ]


def fields(delta: OutputDelta | str) -> tuple[Any, ...]:
    assert isinstance(delta, OutputDelta)
    return delta.text, list(delta.token_ids), delta.finish_reason, delta.stop_reason


# ------------------------------------------------------------------------------------------------------ recordings


def test_a_finished_stream_becomes_a_recording() -> None:
    about = {"name": "r", "endpoint": CHAT, "request": {"stop": ["STOP"]}, "server": {}}
    bench = Bench(dataclasses.replace(spec_of(CHAT, n=3, stop=["STOP"]), recording=about))
    bench.give(
        row(tokens("a", "STOP", "b")),
        row(tokens("a"), index=1),
        row(tokens("b", "<|end|>"), "stop", index=2, stop_token=True),
    )
    assert bench.recordings == []
    bench.give(row(tokens("a")), row([], "abort", index=1))
    assert bench.recordings == [
        {
            **about,
            "prompt_tokens": 3,
            "outputs": [
                {"index": 0, "token_ids": tokens("a", "STOP", "b"), "finish_reason": "stop"},
                {"index": 1, "token_ids": tokens("a"), "finish_reason": "abort"},
                {"index": 2, "token_ids": tokens("b", "<|end|>"), "finish_reason": "stop", "stop_token_id": END},
            ],
        }
    ]


def test_stream_rows_do_not_share_what_they_were_given() -> None:
    """A row's lists belong to the caller: held and kept ids are copies."""
    ids = tokens("a", "b")
    step = StepRow(0, 0, ids)
    bench = Bench(spec_of(CHAT), stream_interval=5)
    bench.give(step)
    bench.give(step)
    assert ids == tokens("a", "b")
