"""Log-probabilities as the two endpoints write them."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import TokenLogprob
from executor.result import Logprob
from serve.logprobs_format import FLOOR, CompletionLogprobs, chat_entries, finite
from tests.helpers import CHAT, COMPLETIONS, Bench, row, spec_of, tokens, vocabulary
from tests.recordings.checker import merge_document, merge_stream, strict_json

A, B, END = tokens("a", "b", "<|end|>")
HEAD, TAIL = tokens("\\xf0\\x9f", "\\x98\\x80")
VOCABULARY = vocabulary()


@pytest.mark.parametrize(
    ("value", "written"),
    [(-0.5, -0.5), (0.0, 0.0), (-math.inf, FLOOR), (math.nan, FLOOR), (-1e9, FLOOR), (-1e308, FLOOR), (math.inf, 0.0)],
)
def test_values_that_json_cannot_hold(value: float, written: float) -> None:
    assert finite(value) == written


@given(st.floats())
def test_every_float_is_written_as_json(value: float) -> None:
    assert isinstance(strict_json(orjson.dumps(finite(value))), float)


def test_chat_entries_have_text_bytes_and_alternatives() -> None:
    (entry,) = chat_entries([Logprob(A, -0.5, [(A, -0.5), (END, -1.5), (B, -2.5)], "a")], VOCABULARY, 2)
    assert entry == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "<|end|>", "logprob": -1.5, "bytes": list(b"<|end|>")},
        ],
    }
    assert chat_entries([Logprob(A, -0.5, [(A, -0.5)], "a")], VOCABULARY, 0)[0]["top_logprobs"] == []
    assert chat_entries([], VOCABULARY, 2) == []


def test_parts_of_a_character_have_their_own_bytes() -> None:
    entries = chat_entries([Logprob(HEAD, -0.5, (), ""), Logprob(TAIL, -0.5, (), "😀")], VOCABULARY, 0)
    assert [entry["token"] for entry in entries] == ["\ufffd", "\ufffd\ufffd"]
    assert bytes(entries[0]["bytes"] + entries[1]["bytes"]).decode() == "😀"


def test_completion_columns() -> None:
    columns = CompletionLogprobs(2, offset=4)
    first = columns.columns(
        [Logprob(A, -0.5, [(B, -0.25), (END, -1.0), (HEAD, -2.0)], "a"), Logprob(HEAD, -1.5, [], "")], VOCABULARY
    )
    assert first == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"b": -0.25, "<|end|>": -1.0, "a": -0.5}, {"\ufffd": -1.5}],
        "text_offset": [4, 5],
    }
    assert columns.columns([Logprob(TAIL, -0.5, (), "😀"), Logprob(B, -0.5, (), "b")], VOCABULARY)["text_offset"] == [
        5,
        6,
    ]
    assert CompletionLogprobs(0).columns([Logprob(A, -0.5, [(B, -0.25)], "a")], VOCABULARY)["top_logprobs"] == [None]


def test_of_alternatives_that_read_the_same_the_most_likely_is_told() -> None:
    part = tokens("\\xf0\\x9f\\x98")[0]
    (top,) = CompletionLogprobs(3).columns(
        [Logprob(A, -3.0, [(HEAD, -0.1), (part, -0.2), (A, -3.0)], "a")], VOCABULARY
    )["top_logprobs"]
    assert top == {"\ufffd": -0.1, "a": -3.0}


# ------------------------------------------------------------------------------------------------ through the endpoints

TOP = [(A, -0.125), (B, -1.0), (END, -2.0)]


def answered(
    endpoint: str, stream: bool, *, requested: Any, logprobs: list[TokenLogprob] | None = None, **body: Any
) -> list[dict[str, Any]]:
    body |= requested
    bench = Bench(spec_of(endpoint, stream=stream, **body))
    entries = logprobs or [TokenLogprob(-0.125, TOP), TokenLogprob(-1.0, TOP)]
    bench.give(row([A], logprobs=entries[:1]))
    bench.give(row([END], "stop", stop_token=True, logprobs=entries[1:]))
    merged = merge_stream(bench.body, endpoint) if stream else merge_document(bench.body, endpoint)
    return merged.choices[0].logprobs


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("requested", "count"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0),
    ({"logprobs": True, "top_logprobs": 2}, 2)],
)  # fmt: skip
def test_chat_gets_what_it_asked_for(requested: dict[str, Any], count: int | None, stream: bool) -> None:
    got = answered(CHAT, stream, requested=requested)
    if count is None:
        assert got == []
        return
    assert [(entry["token"], entry["logprob"], len(entry["top_logprobs"])) for entry in got] == [
        ("a", -0.125, count),
        ("<|end|>", -1.0, count),
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("asked", "keys"), [(None, None), (0, None), (1, {"a", "<|end|>"}), (2, {"a", "b", "<|end|>"})]
)
def test_completions_get_what_they_asked_for(asked: int | None, keys: set[str] | None, stream: bool) -> None:
    got = answered(COMPLETIONS, stream, requested={"logprobs": asked})
    assert [entry["token"] for entry in got] == ([] if asked is None else ["a", "<|end|>"])
    for entry in got:
        assert (entry["top_logprobs"] is None) == (keys is None)
        if keys is not None:
            assert set(entry["top_logprobs"]) <= keys and entry["top_logprobs"][entry["token"]] == entry["logprob"]


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
def test_infinities_and_nan_leave_as_json(endpoint: str, stream: bool) -> None:
    odd = [TokenLogprob(-math.inf, [(A, math.nan), (B, -math.inf)]), TokenLogprob(math.nan, [(B, math.inf)])]
    requested = {"logprobs": True, "top_logprobs": 2} if endpoint == CHAT else {"logprobs": 2}
    assert [entry["logprob"] for entry in answered(endpoint, stream, requested=requested, logprobs=odd)] == [
        FLOOR,
        FLOOR,
    ]


def test_logprobs_come_although_text_is_held() -> None:
    """A token whose text may be a stop's beginning has its entry at once, in a chunk without text."""
    bench = Bench(spec_of(CHAT, stop=["ab"], logprobs=True))
    bench.give(row([B], logprobs=[TokenLogprob(-1.0)]))
    held = bench.give(row([A], logprobs=[TokenLogprob(-2.0)]))
    assert b'"delta":{}' in held and b"-2.0" in held
    bench.give(row([], "length"))
    choice = merge_stream(bench.body, CHAT).choices[0]
    assert choice.content == "ba" and [entry["logprob"] for entry in choice.logprobs] == [-1.0, -2.0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("endpoint", "asked"), [(CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 1})])
def test_without_tokens_there_is_null(endpoint: str, asked: dict[str, Any], stream: bool) -> None:
    bench = Bench(spec_of(endpoint, stream=stream, **asked))
    bench.give(row([], "length"))
    assert b'"logprobs":null' in bench.body and b'"content":[]' not in bench.body
