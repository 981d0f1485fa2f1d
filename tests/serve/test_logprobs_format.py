"""Log-probabilities as the two endpoints write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import TokenLogprob
from executor.result import Logprob
from serve.logprobs_format import (
    FLOOR,
    MAX_IDS,
    ChatTokens,
    CompletionLogprobs,
    completion_logprobs,
    finite,
)
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


def chat_items(entries: Sequence[Logprob], top: int) -> Any:
    return strict_json(b"[" + ChatTokens(VOCABULARY).writer(top).items(entries) + b"]")


def test_chat_items_have_text_bytes_and_alternatives() -> None:
    (item,) = chat_items([Logprob(A, -0.5, [(A, -0.5), (END, -1.5), (B, -2.5)], "a")], 2)
    assert item == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "<|end|>", "logprob": -1.5, "bytes": list(b"<|end|>")},
        ],
    }
    assert chat_items([Logprob(A, -0.5, [(A, -0.5)], "a")], 0)[0]["top_logprobs"] == []
    assert chat_items([Logprob(A, -0.5, [(A, -0.5)], "a")], 9)[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]}
    ]
    assert chat_items([], 2) == []


def test_parts_of_a_character_have_their_own_bytes() -> None:
    items = chat_items([Logprob(HEAD, -0.5, (), ""), Logprob(TAIL, -0.5, (), "😀")], 0)
    assert [item["token"] for item in items] == ["\ufffd", "\ufffd\ufffd"]
    assert bytes(items[0]["bytes"] + items[1]["bytes"]).decode() == "😀"


def as_dicts(entries: Sequence[Logprob], top: int) -> bytes:
    """What the items are, written the plain way."""

    def token(token_id: int, value: float) -> dict[str, Any]:
        raw = VOCABULARY.token_bytes(token_id)
        return {"token": VOCABULARY.token_text(token_id), "logprob": finite(value), "bytes": list(raw)}

    items = [
        token(e.token_id, e.logprob) | {"top_logprobs": [token(i, value) for i, value in e.top[:top]]} for e in entries
    ]
    return orjson.dumps(items)[1:-1]


TOKENS = st.integers(0, VOCABULARY.size - 1)
ENTRIES = st.builds(Logprob, TOKENS, st.floats(), st.lists(st.tuples(TOKENS, st.floats()), max_size=4))


@given(st.lists(ENTRIES, max_size=3), st.integers(0, 4))
def test_items_are_what_the_same_values_are_as_dicts(entries: list[Logprob], top: int) -> None:
    """Byte for byte, whatever the numbers; and a token is remembered with nothing of its last number."""
    writer = ChatTokens(VOCABULARY).writer(top)
    for _ in range(2):
        assert writer.items(entries) == as_dicts(entries, top)


class Percent:
    """A vocabulary with a token per id, full of what templates are made of."""

    def token_bytes(self, token_id: int) -> bytes:
        return b'%%b%s"\\%' + str(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode()


def test_a_token_may_look_like_a_place_for_a_number() -> None:
    (item,) = strict_json(b"[" + ChatTokens(Percent()).writer(1).items([Logprob(5, -0.5, [(6, -1.0)])]) + b"]")
    assert (item["token"], item["top_logprobs"][0]["token"]) == ('%%b%s"\\%5', '%%b%s"\\%6')
    assert bytes(item["bytes"]).decode() == item["token"]


def test_a_vocabulary_without_end_is_not_remembered_whole() -> None:
    table = ChatTokens(Percent()).alternatives
    for token_id in range(MAX_IDS + 9):
        assert table[token_id] % b"-1.5" == orjson.dumps(
            {"token": Percent().token_text(token_id), "logprob": -1.5, "bytes": list(Percent().token_bytes(token_id))}
        )
    assert len(table) == MAX_IDS


def test_requests_share_what_is_known_of_a_vocabulary() -> None:
    assert VOCABULARY.table(ChatTokens) is VOCABULARY.table(ChatTokens)
    assert VOCABULARY.table(ChatTokens) is not vocabulary("pieces").table(ChatTokens)
    assert VOCABULARY.table(ChatTokens).writer(2) is VOCABULARY.table(ChatTokens).writer(2)


@pytest.mark.parametrize("bad", [-1, VOCABULARY.size, 2**31 - 1])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_an_alternative_that_does_not_exist_ends_its_request_alone(endpoint: str, bad: int) -> None:
    requested: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if endpoint == CHAT else {"logprobs": 2}
    bench = Bench(spec_of(endpoint, stream=True, **requested))
    bench.give(row([A], logprobs=[TokenLogprob(-1.0, [(A, -1.0), (B, -2.0)])]))
    bench.give(row([A], logprobs=[TokenLogprob(-1.0, [(A, -1.0), (bad, -2.0)])]))
    assert bench.ended and b"token_ids" in bench.payloads[-1] and bench.cancels == [(0, 0)]


def completion_columns(writer: CompletionLogprobs, *entries: Logprob) -> Any:
    return strict_json(completion_logprobs(writer.rows(entries, VOCABULARY)))


def test_completion_columns() -> None:
    writer = CompletionLogprobs(2, offset=4)
    alternatives = [(B, -0.25), (END, -1.0), (HEAD, -2.0)]
    assert completion_columns(writer, Logprob(A, -0.5, alternatives, "a"), Logprob(HEAD, -1.5, [], "")) == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"b": -0.25, "<|end|>": -1.0, "a": -0.5}, {"\ufffd": -1.5}],
        "text_offset": [4, 5],
    }
    more = completion_columns(writer, Logprob(TAIL, -0.5, (), "😀"), Logprob(B, -0.5, (), "b"))
    assert more["text_offset"] == [5, 6]
    without = completion_columns(CompletionLogprobs(0), Logprob(A, -0.5, [(B, -0.25)], "a"))
    assert without["top_logprobs"] == [None]
    assert completion_columns(writer) is None


def test_of_alternatives_that_read_the_same_the_most_likely_is_told() -> None:
    part = tokens("\\xf0\\x9f\\x98")[0]
    entry = Logprob(A, -3.0, [(HEAD, -0.1), (part, -0.2), (A, -3.0)], "a")
    (top,) = completion_columns(CompletionLogprobs(3), entry)["top_logprobs"]
    assert top == {"\ufffd": -0.1, "a": -3.0}


@given(ENTRIES, st.integers(1, 4))
def test_alternatives_are_in_the_order_in_which_they_came(entry: Logprob, top: int) -> None:
    expected: dict[str, float] = {}
    for token_id, value in entry.top[:top]:
        expected.setdefault(VOCABULARY.token_text(token_id), finite(value))
    expected[VOCABULARY.token_text(entry.token_id)] = finite(entry.logprob)
    ((_, _, made, _),) = CompletionLogprobs(top).rows([entry], VOCABULARY)
    assert orjson.dumps(made) == orjson.dumps(expected)


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
