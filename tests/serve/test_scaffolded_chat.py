"""Answers that are chosen from several generations: which one, what a client gets of it, and the laws of every stream.

The measure is an ordinary response: what is chosen must be what a request for that generation alone would have got.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from executor.result import CompletionOutput, Logprob
from serve.events import Folded
from serve.openai_protocol import Scaffolding
from serve.scaffolded_chat import METHODS, BestOfN, MajorityVote
from serve.votes import EXTRACTORS
from tests.helpers import CHAT, FACTS, Bench, row, spec_of, tokens
from tests.laws.cases import Case, cases, steps
from tests.laws.test_split_fold_resume import histories
from tests.recordings.checker import Choice, Merged, merge_document, merge_stream
from tests.serve import harmony

COMMENT = re.compile(rb"^: (.*)\n\n", re.M)
INCLUDE = {"stream_options": {"include_usage": True}}
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def vote(n: int, **more: Any) -> dict[str, Any]:
    return {"scaffolding": {"method": "majority_vote", "n": n, **more}}


def best(n: int) -> dict[str, Any]:
    return {"scaffolding": {"method": "best_of_n", "n": n}}


def comments(body: bytes) -> list[str]:
    return [text.decode() for text in COMMENT.findall(body)]


def without_comments(body: bytes) -> bytes:
    return COMMENT.sub(b"", body)


def merged(body: bytes, **options: bool) -> Merged:
    return merge_stream(without_comments(body), CHAT, **options)


def answered(texts: Sequence[Sequence[str]], **body: Any) -> tuple[Choice, Choice]:
    """The answer of a stream, and of a document, to generations of these tokens."""
    made = []
    for stream in (True, False):
        bench = Bench(spec_of(CHAT, stream=stream, **body))
        for index, words in enumerate(texts):
            bench.give(row(tokens(*words), "stop", index=index))
        whole = merged(bench.body) if stream else merge_document(bench.body, CHAT)
        assert list(whole.choices) == [0]
        made.append(whole.choices[0])
    return made[0], made[1]


# ------------------------------------------------------------------------------------------------------ by hand


def test_a_stream_comment_by_comment_and_chunk_by_chunk() -> None:
    bench = Bench(spec_of(CHAT, model="m", **vote(2), **INCLUDE))
    assert bench.give(row(tokens("4"), index=1)) == b": scaffolding 0 of 2 generations, 1 tokens\n\n"
    assert bench.give(row(tokens("2"), index=1)) == b""
    assert bench.give(row([], "length", index=1)) == b": scaffolding 1 of 2 generations, 2 tokens\n\n"
    assert bench.give(row(tokens("4"), index=0)) == b""
    told, *chunks, done, end = bench.give(row(tokens("2"), "stop", index=0)).decode().split("\n\n")
    assert told == ": scaffolding 2 of 2 generations, 4 tokens; chose generation 0: 2 votes"
    head = {"id": "r-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m"}

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return head | {"choices": [choice], "usage": None}

    assert [json.loads(each.removeprefix("data: ")) for each in chunks] == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "42"}),
        chunk({}, finish_reason="stop", stop_reason=None),
        head | {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}},
    ]
    assert (done, end) == ("data: [DONE]", "")


def test_a_document_has_one_choice_and_the_usage_of_all() -> None:
    bench = Bench(spec_of(CHAT, stream=False, **vote(3)))
    for index, words in enumerate((["a"], ["b", "b"], ["b", "b"])):
        bench.give(row(tokens(*words), "stop", index=index))
    document = json.loads(bench.body)
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "bb"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert document["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


def test_comments_come_as_tokens_do_and_not_with_each() -> None:
    bench = Bench(spec_of(CHAT, **vote(2)))
    told = [bool(bench.give(row(tokens("a"), index=turn % 2))) for turn in range(200)]
    assert [turn + 1 for turn, comment in enumerate(told) if comment] == [1, 65, 129, 193]
    assert comments(bench.body)[-1] == "scaffolding 0 of 2 generations, 193 tokens"


def test_ties_go_to_the_first_and_what_is_voted_on_can_be_named() -> None:
    assert answered([["a"], ["b"]], **vote(2))[1].content == "a"
    assert answered([["a"], ["b"], [" ", "b"]], **vote(3))[0].content == "b"
    texts = [["a", " ", "42"], ["ab", ".", "42", "."], ["b"]]
    for choice in answered(texts, **vote(3, extract="last_number")):
        assert choice.content == "a 42"
    for choice in answered([["a", "\n", "b"], ["42"], ["ab", "\n", "42"]], **vote(3, extract="last_line")):
        assert choice.content == "42"


def test_reasoning_is_no_part_of_the_vote_and_comes_with_the_answer() -> None:
    facts = replace(FACTS, reasoning_parser="qwen3")
    thoughts = [["<think>", "a", "</think>", "42"], ["<think>", "b", "</think>", "b"], ["<think>", "</think>", "b"]]
    for choice in answered(thoughts, facts=facts, **vote(3)):
        assert (choice.reasoning, choice.content) == ("b", "b")


def test_reasoning_tokens_are_summed_too() -> None:
    bench = Bench(spec_of(CHAT, stream=False, facts=replace(FACTS, reasoning_parser="qwen3"), **vote(2)))
    for index in range(2):
        bench.give(row(tokens("<think>", "a", "b", "</think>", "42"), "stop", index=index))
    usage = json.loads(bench.body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4} and usage["completion_tokens"] == 10


def test_calls_are_voted_on() -> None:
    calls = [f'<tool_call>{{"name": "weather", "arguments": {{"city": "{city}"}}}}</tool_call>' for city in "abb"]
    spec = spec_of(CHAT, facts=replace(FACTS, tool_parser="hermes"), tools=WEATHER, **vote(3))
    bench = Bench(spec, names="text")
    for index, text in enumerate(calls):
        bench.give(row([ord(char) for char in text], "stop", index=index))
    choice = merged(bench.body).choices[0]
    assert choice.tool_calls == [{"name": "weather", "arguments": '{"city": "b"}'}]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_harmony(stream: bool) -> None:
    texts = [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
        *["<|channel|>analysis<|message|>So?<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"] * 2,
    ]
    rows = [harmony.rows(harmony.encode(text), [3, 9], "stop", index=index) for index, text in enumerate(texts)]
    body = harmony.play(harmony.spec(stream=stream, **vote(3)), [step for each in rows for step in each])
    choice = (merged(body) if stream else merge_document(body, CHAT)).choices[0]
    assert (choice.reasoning, choice.content, choice.finish_reason) == ("So?", "Yes.", "stop")


def likely(*values: float) -> list[TokenLogprob]:
    return [TokenLogprob(value, ()) for value in values]


@pytest.mark.parametrize("stream", [True, False])
def test_best_of_n_takes_the_highest_mean_and_tells_no_log_probabilities_unless_asked(stream: bool) -> None:
    for asked in ({}, {"logprobs": True}):
        bench = Bench(spec_of(CHAT, stream=stream, **best(3), **asked))
        bench.give(row(tokens("a", "a"), "stop", index=0, logprobs=likely(-1.0, -2.0)))
        bench.give(row(tokens("b"), index=1, logprobs=likely(-0.5)))
        bench.give(row(tokens("ab"), "stop", index=2, logprobs=likely(-2.0)))
        bench.give(row(tokens("b"), "stop", index=1, logprobs=likely(-1.5)))
        choice = (merged(bench.body) if stream else merge_document(bench.body, CHAT)).choices[0]
        assert choice.content == "bb"
        assert [entry["logprob"] for entry in choice.logprobs] == ([-0.5, -1.5] if asked else [])
        if stream:
            assert comments(bench.body)[-1].endswith("; chose generation 1: mean log-probability -1.0000")


def step(index: int, *values: float) -> CompletionOutput:
    output = CompletionOutput(index)
    output.logprobs_diff = [Logprob(1, value) for value in values]
    return output


def test_best_of_n_without_tokens_or_with_equals() -> None:
    chooser = BestOfN({})
    assert chooser.choose([Folded(), Folded()]) == (0, "mean log-probability -inf")
    for each in (step(1, -1.0), step(0), step(2, -1.0)):
        chooser.observe(each)
    assert chooser.choose([Folded()] * 3)[0] == 1


def test_nobody_has_an_answer() -> None:
    assert MajorityVote({"extract": "last_number"}).choose([Folded(["a"]), Folded(["b"])]) == (0, "0 votes")


def test_the_methods_are_those_of_the_request_field() -> None:
    assert set(METHODS) == set(get_args(Scaffolding.model_fields["method"].annotation))
    extract, _ = get_args(Scaffolding.model_fields["extract"].annotation)
    assert set(EXTRACTORS) == set(get_args(extract))


# ------------------------------------------------------------------------------------------------------ failure


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_generation_that_fails_fails_the_request_with_its_reason(stream: bool, begun: bool) -> None:
    bench = Bench(spec_of(CHAT, stream=stream, **vote(3)))
    if begun:
        bench.give(row(tokens("a"), "stop", index=0))
    bench.give(row([], "error", index=1, message="no memory"))
    whole = merged(bench.body) if stream else merge_document(bench.body, CHAT)
    assert whole.error is not None and whole.error["message"] == "no memory" and not whole.choices
    assert without_comments(bench.body).startswith(b"data: " if stream and begun else b"{")
    assert {index for _, index in bench.cancels} == ({1, 2} if begun else {0, 1, 2})
    assert bench.worker.open_requests == 0


# ------------------------------------------------------------------------------------------------------ laws


@st.composite
def several(draw: st.DrawFn) -> Case:
    """A chat stream of at least two outputs that may be scaffolded."""
    case = draw(cases("chat_stream", most=3, failing=False, intervals=False))
    return case if len(case.outputs) > 1 else replace(case, outputs=case.outputs * 2)


def bench_of(case: Case, method: str, *, stream: bool = True, **options: Any) -> Bench:
    body = case.body if stream else {name: value for name, value in case.body.items() if name != "stream_options"}
    asked = {"method": method, "n": len(case.outputs)}
    return Bench(spec_of(CHAT, stream=stream, scaffolding=asked, **body), **options)


def played(case: Case, method: str, rows: Sequence[StepRow], **options: Any) -> bytes:
    bench = bench_of(case, method, **options)
    for each in rows:
        bench.give(each)
    return bench.body


def chosen(body: bytes) -> int:
    found = re.search(rb"; chose generation (\d+):", body)
    assert found
    return int(found[1])


BOTH = pytest.mark.parametrize("method", METHODS)


@BOTH
@given(several())
def test_the_answer_is_what_its_generation_alone_would_have_said(method: str, case: Case) -> None:
    body = played(case, method, case.each())
    answer = merged(body, **case.options)
    ordinary = list(merge_document(case.play(case.each(), "chat_unary"), CHAT).choices.values())
    assert answer.choices == {0: ordinary[chosen(body)]}
    if method == "majority_vote":
        said = [choice.content.strip() for choice in ordinary]
        assert chosen(body) == said.index(max(said, key=said.count))


@BOTH
@given(several())
def test_the_document_is_the_fold_of_the_stream(method: str, case: Case) -> None:
    streamed = merged(played(case, method, case.each()), **case.options)
    document = merge_document(played(case, method, case.each(), stream=False), CHAT)
    assert streamed.choices == document.choices
    assert streamed.usage in (None, document.usage) and document.usage is not None


@BOTH
@given(several(), st.data(), st.sampled_from([1, 3]))
def test_split_invariance(method: str, case: Case, data: st.DataObject, interval: int) -> None:
    """Not a byte of the answer depends on the steps."""
    bench = bench_of(case, method, stream_interval=interval)
    for backlog in data.draw(steps(case)):
        bench.backlog(backlog)
    assert without_comments(bench.body) == without_comments(played(case, method, case.each()))
    assert bench.worker.open_requests == 0


@BOTH
@given(several(), st.booleans(), st.integers(0, 40), st.integers(0, 8))
def test_resume(method: str, case: Case, stream: bool, heard: int, ahead: int) -> None:
    """Another worker goes on: the client has the same answer, once."""
    rows = case.each()
    heard = min(heard, len(rows))
    first = bench_of(case, method, stream=stream)
    for each in rows[:heard]:
        first.give(each)
    if first.ended:
        return
    delivered = [(0, False)] * len(case.outputs)
    for _, _, index, count, flags, _ in first.rows:
        delivered[index] = (count, bool(flags & 1))
    second = bench_of(case, method, stream=stream, delivered=delivered)
    for each in histories(rows[: heard + ahead], {index for index, (_, ended) in enumerate(delivered) if ended}):
        second.give(each)
    for each in rows[heard + ahead :]:
        second.give(each)
    assert without_comments(first.body + second.body) == without_comments(played(case, method, rows, stream=stream))
