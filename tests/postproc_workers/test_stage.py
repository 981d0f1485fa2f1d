"""Special tokens that a format is made of: they reach its parser as text, however the ids are cut, and no other does.

Tried on all ways in which ids become text: tables of bytes, tables of pieces, and the library over a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import Open, StepRecords
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from serve.admission import ServerFacts
from tests.helpers import ALL_POST_PROCESSORS, CHAT, FACTS, spec_of
from tests.postproc_workers.tokenizers import KINDS, spelled, tokenizer
from tests.recordings.checker import Merged, merge_document, merge_stream

#: The special tokens of every tokenizer there.
SPECIAL = ("<|end|>", "<｜pad▁｜>", "<é>")


def special_ids(name: str) -> dict[str, int]:
    found = {text: tokenizer(name).token_to_id(text) for text in SPECIAL}
    assert None not in found.values()
    return {text: token for text, token in found.items() if token is not None}


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.from_library(tokenizer(name))


# ------------------------------------------------------------------------------------------------------ the text


@pytest.mark.parametrize("name", KINDS)
@given(st.data())
def test_what_is_kept_is_shown_and_the_rest_is_not(name: str, data: st.DataObject) -> None:
    special, size = special_ids(name), vocabulary(name).size
    keep = frozenset(data.draw(st.sets(st.sampled_from(SPECIAL), min_size=1)))
    token = st.integers(0, size - 1) | st.sampled_from(sorted(special.values()))
    ids = data.draw(st.lists(token, max_size=16))
    detokenizer = vocabulary(name).detokenizer(keep=keep)
    text, start = "", 0
    for end in [*sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=6))), len(ids)]:
        text += detokenizer.decode(ids[start:end])
        start = end
    text += detokenizer.flush()
    hidden = {token for word, token in special.items() if word not in keep}
    shown = vocabulary(name).detokenizer(skip_special_tokens=False)
    assert text == shown.decode([token for token in ids if token not in hidden]) + shown.flush()


@pytest.mark.parametrize("name", ["byte_level", "llama", "wordpiece"])
def test_what_is_kept_does_not_stay_for_others(name: str) -> None:
    """Vocabularies are shared by all requests of a worker."""
    ids = list(special_ids(name).values())
    assert "<|end|>" in vocabulary(name).detokenizer(keep=frozenset({"<|end|>"})).decode(ids)
    assert vocabulary(name).detokenizer().decode(ids) == ""
    for number in range(40):  # more sets than are remembered
        vocabulary(name).detokenizer(keep=frozenset({f"<{number}>"}))
    assert "<|end|>" in vocabulary(name).detokenizer(keep=frozenset({"<|end|>"})).decode(ids)


# ------------------------------------------------------------------------------------------------------ the parsers

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
#: One tokenizer per kind that can spell everything: with each kind, that it has got it.
SPELLING = {"byte_level": "byte_level", "llama": "pieces", "gemma": "pieces", "byte_level_replace": "window"}
FORMATS: ServerFacts = replace(FACTS, reasoning_parser="qwen3", tool_parser="hermes")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '{"name": "f", "arguments": {"a": "é😀"}}'


@cache
def marked(name: str) -> tuple[Tokenizer, Vocabulary]:
    """A tokenizer in which the markers are special tokens, as ``<|end|>`` is."""
    made = KINDS[name][0]()
    made.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in (*MARKERS, "<|x|>")])
    found = Vocabulary.from_library(made)
    assert found.kind == SPELLING[name]
    return made, found


def encode(name: str, *parts: str) -> list[int]:
    """Ids of special tokens, and of text, which is spelled byte by byte."""
    made, ids = marked(name)[0], []
    for part in parts:
        token = made.token_to_id(part) if part in (*MARKERS, "<|x|>", "<|end|>") else None
        ids += spelled(made, part.encode()) if token is None else [token]
    return ids


def played(name: str, spec: StreamSpec, rows: Sequence[StepRow], interval: int = 1) -> bytes:
    worker = PostprocWorker(marked(name)[1], ALL_POST_PROCESSORS, stream_interval=interval)
    steps = [StepRecords([], [], [], [], opens=[Open(0, 0, 0, spec.encode())])]
    steps += [StepRecords.build([row]) for row in rows]
    emissions = [each for step in steps for _, each in worker.receive([step]).emissions]
    return b"".join(row[5] for each in emissions for row in each.rows())


def cut(ids: Sequence[int], places: Sequence[int], logprobs: bool) -> list[StepRow]:
    """The ids in rows that end at these places; the last id ended the output, and is not shown."""
    ends = [*sorted({place for place in places if 0 < place < len(ids)}), len(ids)]
    rows = [StepRow(0, 0, ids[start:end]) for start, end in zip([0, *ends], ends)]
    rows[-1] = rows[-1]._replace(finish_reason="stop", stop_token=True)
    if not logprobs:
        return rows
    return [row._replace(logprobs=[TokenLogprob(-1.0)] * len(row.token_ids)) for row in rows]


def merged(
    name: str, ids: Sequence[int], places: Sequence[int], stream: bool, interval: int = 1, **body: Any
) -> Merged:
    spec = spec_of(CHAT, stream=stream, facts=FORMATS, tools=TOOLS, **body)
    written = played(name, spec, cut(ids, places, body.get("logprobs", False)), interval)
    result = merge_stream(written, CHAT) if stream else merge_document(written, CHAT)
    result.chunks, result.usage = [], None
    return result


TOKENS = (
    *("<think>", "<|x|>", "Hm <t", "<|end|>", "</think>", "Hi é", "<|x|>", " there"),
    *("<tool_call>", CALL, "</tool_call>", "<|end|>"),
)


@pytest.mark.parametrize("name", SPELLING)
@pytest.mark.parametrize("stop", [[], ["STOP", "</tools>"]])
@given(st.data())
def test_markers_that_are_special_tokens_are_parsed(name: str, stop: list[str], data: st.DataObject) -> None:
    ids = encode(name, *TOKENS)
    places = data.draw(st.lists(st.integers(1, len(ids)), max_size=10))
    body = {"logprobs": data.draw(st.booleans()), **({"stop": stop} if stop else {})}
    for stream, interval in ((True, 1), (True, 3), (False, 1)):
        choice = merged(name, ids, places, stream, interval, **body).choices[0]
        assert (choice.reasoning, choice.content) == ("Hm <t", "Hi é there")
        (call,) = choice.tool_calls
        assert (call["name"], call["arguments"]) == ("f", '{"a": "é😀"}')
        assert choice.finish_reason == "tool_calls"
        assert len(choice.logprobs) == (len(ids) if body["logprobs"] else 0)


@pytest.mark.parametrize("name", SPELLING)
def test_where_special_tokens_are_shown_all_of_them_are(name: str) -> None:
    choice = merged(name, encode(name, *TOKENS), [3, 9], True, skip_special_tokens=False).choices[0]
    assert (choice.reasoning, choice.content) == ("<|x|>Hm <t<|end|>", "Hi é<|x|> there")
    assert [call["name"] for call in choice.tool_calls] == ["f"]


@pytest.mark.parametrize("name", SPELLING)
def test_what_no_parser_looks_for_stays_hidden(name: str) -> None:
    """Without tools the tool parser is out, and its markers are special tokens like any other."""
    ids = encode(name, *TOKENS)
    spec = spec_of(CHAT, facts=FORMATS)
    choice = merge_stream(played(name, spec, cut(ids, [5], False)), CHAT).choices[0]
    assert (choice.reasoning, choice.content) == ("Hm <t", "Hi é there" + CALL)
    plain = merge_stream(played(name, spec_of(CHAT), cut(ids, [5], False)), CHAT).choices[0]
    assert (plain.reasoning, plain.content) == ("", "Hm <tHi é there" + CALL)


@pytest.mark.parametrize("name", SPELLING)
@given(st.data())
def test_a_stop_string_may_be_a_marker(name: str, data: st.DataObject) -> None:
    """Stop strings look at the raw text, and a marker is part of it as soon as a parser looks for it."""
    ids = encode(name, *TOKENS)
    places = data.draw(st.lists(st.integers(1, len(ids)), max_size=10))
    choice = merged(name, ids, places, True, stop=["<tool_call>"]).choices[0]
    assert (choice.reasoning, choice.content, choice.tool_calls) == ("Hm <t", "Hi é there", [])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "<tool_call>")
