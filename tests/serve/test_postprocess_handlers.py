"""The text endpoints' streams and documents, chunk by chunk."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from executor.engines.base import TokenLogprob
from executor.result import DetokenizedGenerationResultBase
from serve.postprocess_handlers import (
    POST_PROCESSORS,
    ChatPostprocArgs,
    CompletionPostprocArgs,
    chat_stream_post_processor,
    chat_unary_post_processor,
    completion_stream_post_processor,
    completion_unary_post_processor,
)
from tests.helpers import CHAT, COMPLETIONS, Bench, row, spec_of, tokens, vocabulary
from tests.recordings.checker import events, merge_document, merge_stream, strict_json

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")
ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
INCLUDE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def chunks(body: bytes) -> list[dict[str, Any]]:
    """The chunks of a whole stream, without [DONE]."""
    data = events(body)
    assert data[-1] == "[DONE]"
    return [strict_json(event) for event in data[:-1]]


def streamed(endpoint: str, *, count: int = len(HELLO), **body: Any) -> bytes:
    bench = Bench(spec_of(endpoint, **body))
    for token in HELLO[: count - 1]:
        bench.give(row([token]))
    last = count == len(HELLO)
    bench.give(row(HELLO[count - 1 : count], "stop" if last else "length", stop_token=last))
    return bench.body


# ------------------------------------------------------------------------------------------------------ usage guard
# These two stand on their own: they must turn red when usage and [DONE] are written before the record is finished.


def test_chat_usage_and_done_wait_for_the_record_to_finish() -> None:
    args = ChatPostprocArgs(spec_of(CHAT, n=2, **INCLUDE).args)
    record = DetokenizedGenerationResultBase(1, 2, 3, vocabulary=vocabulary())
    sent = []
    for index, text, finish in ((0, "a", None), (1, "b", None), (0, "", "stop"), (1, "c", None), (1, "", "length")):
        record.advance(index, [7] if text else [], text)
        if finish:
            record.finish_output(index, finish)
        sent.append(chat_stream_post_processor(record, args))
        assert (b"[DONE]" in sent[-1]) == (b'"completion_tokens"' in sent[-1]) == record.finished
    assert b"".join(sent).count(b"[DONE]") == 1 and record.finished


def test_completion_usage_and_done_wait_for_the_record_to_finish() -> None:
    args = CompletionPostprocArgs(spec_of(COMPLETIONS, n=2, **INCLUDE).args)
    record = DetokenizedGenerationResultBase(1, 2, 3, vocabulary=vocabulary())
    sent = []
    for index, text, finish in ((0, "a", None), (1, "b", None), (0, "", "stop"), (1, "c", None), (1, "", "length")):
        record.advance(index, [7] if text else [], text)
        if finish:
            record.finish_output(index, finish)
        sent.append(completion_stream_post_processor(record, args))
        assert (b"[DONE]" in sent[-1]) == (b'"completion_tokens"' in sent[-1]) == record.finished
    assert b"".join(sent).count(b"[DONE]") == 1 and record.finished


@pytest.mark.parametrize(
    ("process", "endpoint", "make"),
    [
        (chat_unary_post_processor, CHAT, ChatPostprocArgs),
        (completion_unary_post_processor, COMPLETIONS, CompletionPostprocArgs),
    ],
)
def test_a_document_waits_for_the_record_to_finish(process: Any, endpoint: str, make: Any) -> None:
    args = make(spec_of(endpoint, n=2, stream=False).args)
    record = DetokenizedGenerationResultBase(1, 2, 3, vocabulary=vocabulary())
    for index, text, finish in ((0, "a", None), (1, "b", "stop"), (0, "c", None)):
        record.advance(index, [7], text)
        if finish:
            record.finish_output(index, finish)
        assert process(record, args) == b""
    record.advance(0, [], "")
    record.finish_output(0, "length")
    merged = merge_document(process(record, args), endpoint)
    assert [choice.content for choice in merged.choices.values()] == ["ac", "b"]


# ------------------------------------------------------------------------------------------------------ chat chunks


def test_a_chat_stream_chunk_by_chunk() -> None:
    head = {"id": "r-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m"}

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more]}

    assert chunks(streamed(CHAT, model="m", count=3)) == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hello"}),
        chunk({"content": " world"}),
        chunk({"content": ","}),
        chunk({}, finish_reason="length", stop_reason=None),
    ]


def test_a_completion_stream_chunk_by_chunk() -> None:
    head = {"id": "r-1", "object": "text_completion", "created": 1_700_000_000, "model": "m"}

    def chunk(text: str, **more: Any) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None} | more]}

    assert chunks(streamed(COMPLETIONS, model="m", count=3)) == [
        chunk("Hello"),
        chunk(" world"),
        chunk(",", finish_reason="length", stop_reason=None),
    ]


def test_a_chat_document() -> None:
    bench = Bench(spec_of(CHAT, stream=False, stop=["answer"]))
    for token in HELLO[:5]:
        bench.give(row([token]))
    assert json.loads(bench.body) == {
        "id": "r-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world, the "},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "answer",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
    }


def test_a_completion_document() -> None:
    bench = Bench(spec_of(COMPLETIONS, stream=False, echo=True, prompt="Once"))
    bench.give(row(HELLO[:2], "length"))
    assert json.loads(bench.body) == {
        "id": "r-1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {"index": 0, "text": "OnceHello world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


@ENDPOINTS
def test_finish_reason_is_null_until_a_choices_last_chunk(endpoint: str) -> None:
    made = chunks(streamed(endpoint, n=1))
    assert [chunk["choices"][0]["finish_reason"] for chunk in made] == [None] * (len(made) - 1) + ["stop"]
    assert all("stop_reason" not in chunk["choices"][0] for chunk in made[:-1])


@ENDPOINTS
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_an_empty_answer(endpoint: str, reason: str) -> None:
    for stream in (True, False):
        bench = Bench(spec_of(endpoint, stream=stream))
        bench.give(row([], reason))
        merged = merge_stream(bench.body, endpoint) if stream else merge_document(bench.body, endpoint)
        assert (merged.choices[0].content, merged.choices[0].finish_reason) == ("", reason)
    assert len(chunks(streamed(endpoint, count=1))) == (3 if endpoint == CHAT else 1)


def test_the_role_comes_with_the_first_step_even_without_text() -> None:
    """A client sees that its answer has begun; nothing else is said before there is something to say."""
    bench = Bench(spec_of(CHAT))
    first = bench.give(row(tokens("\\xf0\\x9f")))
    assert first.count(b"data: ") == 1 and b'"role":"assistant"' in first
    assert bench.give(row(tokens("<|pad|>"))) == b""
    assert b'"content":"' in bench.give(row(tokens("a")))


@ENDPOINTS
def test_steps_without_text_say_nothing(endpoint: str) -> None:
    bench = Bench(spec_of(endpoint, stop=["STOP"]))
    bench.give(row(tokens("a")))
    assert bench.give(row(tokens("ST"))) == b"" and bench.give(row(tokens("<|pad|>"))) == b""
    assert b'"STa"' in bench.give(row(tokens("a")))


# ------------------------------------------------------------------------------------------------------ several choices


def test_every_choice_of_a_chat_begins_with_its_role_and_ends_once() -> None:
    bench = Bench(spec_of(CHAT, n=3))
    bench.give(row(HELLO[:1], index=2))
    bench.give(row(HELLO[:1], "length", index=0), row(HELLO[1:2], index=2))
    bench.give(row([], "abort", index=1), row(HELLO[2:3], "stop", index=2))
    by_choice: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks(bench.body):
        (item,) = chunk["choices"]
        by_choice.setdefault(item["index"], []).append(item)
    assert sorted(by_choice) == [0, 1, 2]
    for items in by_choice.values():
        assert items[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in item["delta"] for item in items) == 1
        assert [item["finish_reason"] for item in items[:-1]] == [None] * (len(items) - 1) and items[-1][
            "finish_reason"
        ]


def test_several_prompts_and_choices_of_a_completion() -> None:
    for stream in (True, False):
        bench = Bench(spec_of(COMPLETIONS, prompt=["A:", "B:"], n=2, echo=True, stream=stream))
        for index in (3, 0, 2, 1):
            bench.give(row(HELLO[index : index + 1], "length", index=index))
        merged = merge_stream(bench.body, COMPLETIONS) if stream else merge_document(bench.body, COMPLETIONS)
        texts = [merged.choices[index].content for index in range(4)]
        assert texts == ["A:Hello", "A: world", "B:,", "B: the"]


def test_the_echo_comes_first_and_once() -> None:
    bench = Bench(spec_of(COMPLETIONS, prompt="Once", echo=True))
    first = bench.give(row(tokens("\\xf0\\x9f")))
    assert [chunk["choices"][0]["text"] for chunk in chunks(first + b"data: [DONE]\n\n")] == ["Once"]
    assert b"Once" not in bench.give(row(HELLO[:1], "length"))
    assert b"Once" not in streamed(COMPLETIONS, prompt="Once")


def test_offsets_start_behind_the_echo() -> None:
    """Admission refuses echo with logprobs; a recording of another server may hold both."""
    bench = Bench(spec_of(COMPLETIONS, prompt="Once", echo=True, logprobs=0))
    bench.give(row(HELLO[:2], "length", logprobs=[TokenLogprob(-1.0)] * 2))
    assert [entry["text_offset"] for entry in merge_stream(bench.body, COMPLETIONS).choices[0].logprobs] == [4, 9]


# ------------------------------------------------------------------------------------------------------ usage


@ENDPOINTS
def test_usage_comes_only_when_asked_for(endpoint: str) -> None:
    assert all("usage" not in chunk for chunk in chunks(streamed(endpoint)))
    for options in ({"include_usage": False}, None):
        assert all("usage" not in chunk for chunk in chunks(streamed(endpoint, stream_options=options)))


@ENDPOINTS
def test_usage_is_null_but_in_a_last_chunk_without_choices(endpoint: str) -> None:
    made = chunks(streamed(endpoint, **INCLUDE))
    assert [chunk["usage"] for chunk in made[:-1]] == [None] * (len(made) - 1)
    assert all(chunk["choices"] for chunk in made[:-1])
    assert made[-1]["choices"] == [] and made[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
    }


@ENDPOINTS
def test_continuous_usage_is_cumulative_over_all_choices(endpoint: str) -> None:
    bench = Bench(spec_of(endpoint, n=2, **CONTINUOUS))
    bench.give(row(HELLO[:1]), row(HELLO[:2], index=1))
    bench.give(row(HELLO[1:4]), row(HELLO[2:3], "length", index=1))
    bench.give(row(HELLO[4:], "stop", stop_token=True))
    made = chunks(bench.body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in made]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 13 and set(counts) == {1, 3, 6, 7, 13}
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in made) and made[-1]["choices"] == []
    merge_stream(bench.body, endpoint, include_usage=True, continuous=True)


@ENDPOINTS
def test_a_document_always_has_usage(endpoint: str) -> None:
    bench = Bench(spec_of(endpoint, n=2, stream=False, prompt_tokens=9))
    bench.give(row(HELLO[:3], "length"), row(HELLO, "stop", index=1, stop_token=True))
    assert merge_document(bench.body, endpoint).usage == {
        "prompt_tokens": 9,
        "completion_tokens": 13,
        "total_tokens": 22,
    }


# ------------------------------------------------------------------------------------------------------ errors


@ENDPOINTS
def test_an_error_before_the_first_byte_is_a_document(endpoint: str) -> None:
    for stream in (True, False):
        bench = Bench(spec_of(endpoint, stream=stream))
        bench.give(row([], "error", message="no memory"))
        assert strict_json(bench.body) == {
            "error": {"message": "no memory", "type": "server_error", "param": None, "code": "engine_error"}
        }


@ENDPOINTS
def test_an_error_after_it_is_an_event_and_done(endpoint: str) -> None:
    bench = Bench(spec_of(endpoint, **INCLUDE))
    bench.give(row(HELLO[:2]))
    sent = bench.give(row([], "error", message='no "memory"\n'))
    assert [strict_json(event) if event != "[DONE]" else event for event in events(sent)] == [
        {"error": {"message": 'no "memory"\n', "type": "server_error", "param": None, "code": "engine_error"}},
        "[DONE]",
    ]
    assert b'"usage":{' not in sent


@ENDPOINTS
def test_an_error_in_a_document_that_has_text_already(endpoint: str) -> None:
    bench = Bench(spec_of(endpoint, stream=False))
    bench.give(row(HELLO[:2]), row(HELLO[2:3], "error", message="no memory"))
    assert strict_json(bench.body)["error"]["message"] == "no memory"


def test_a_completion_that_has_sent_nothing_yet_can_still_be_a_document() -> None:
    """The first step had no text, so no byte has left."""
    bench = Bench(spec_of(COMPLETIONS))
    bench.give(row(tokens("<|pad|>")))
    assert bench.body == b""
    bench.give(row([], "error", message="no memory"))
    assert strict_json(bench.body)["error"]["message"] == "no memory"


# ------------------------------------------------------------------------------------------------------ text


@ENDPOINTS
def test_every_text_leaves_as_strict_json(endpoint: str) -> None:
    texts = [
        '"',
        "\\",
        "\n",
        "\r",
        "\t",
        "\x00",
        "\x1f",
        "\u2028",
        "\u2029",
        "\ufeff",
        "😀",
        "{",
        "}",
        "'",
        "/",
        "&amp;",
    ]
    bench = Bench(spec_of(endpoint))
    for text in texts:
        bench.give(row(tokens(text)))
    bench.give(row([], "length"))
    assert merge_stream(bench.body, endpoint).choices[0].content == "".join(texts)


@pytest.mark.parametrize("name", ['mo"del', "mödel\n", "\u2028", "x" * 300])
def test_the_name_of_the_model_is_escaped_too(name: str) -> None:
    spec = spec_of(CHAT, model=name)
    bench = Bench(spec)
    bench.give(row(HELLO[:1], "length"))
    assert all(chunk["model"] == name for chunk in chunks(bench.body))


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_arguments_that_are_missing_or_wrong_are_refused(name: str) -> None:
    """A worker answers a request with arguments like these with an error; it must see an exception for that."""
    spec = spec_of(CHAT if "chat" in name else COMPLETIONS)
    POST_PROCESSORS[name].make_args(spec.args)
    for key in ("id", "created", "model", "n", "include_usage", "logprobs"):
        with pytest.raises((KeyError, TypeError, ValueError)):
            POST_PROCESSORS[name].make_args({other: value for other, value in spec.args.items() if other != key})
    for key, value in (("n", "x"), ("n", None), ("created", None)):
        with pytest.raises((KeyError, TypeError, ValueError)):
            POST_PROCESSORS[name].make_args({**spec.args, key: value})


@pytest.mark.parametrize("args", [{"n": 1 << 40}, {"n": 0}, {"n": 1 << 9, "prompt_count": 1 << 9}], ids=str)
def test_nothing_is_made_for_more_choices_than_a_request_can_have(args: dict[str, int]) -> None:
    spec = spec_of(COMPLETIONS)
    with pytest.raises(ValueError, match="choices"):
        CompletionPostprocArgs({**spec.args, **args})
