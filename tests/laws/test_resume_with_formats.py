"""Resume where a format stands between the text and the client: reasoning, tool calls, harmony, the Responses API.

The other laws of these formats stand beside their parsers. Resume is the worker's law as much as theirs: their state
has to come back from the tokens alone, and numbers that they give to events have to go on behind those that the client
has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow
from executor.messages import OUTPUT_END, REQUEST_END, Open, StepRecords
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from tests.helpers import ALL_POST_PROCESSORS, CHAT, FACTS, spec_of
from tests.recordings.checker import Merged, merge_stream, strict_json
from tests.serve import harmony
from tests.serve.test_responses_utils import TOOLS as RESPONSE_TOOLS
from tests.serve.test_responses_utils import spec as response_spec

HERMES = replace(FACTS, tool_parser="hermes", reasoning_parser="qwen3")
TEXTS = [
    *(
        "<think>",
        "<thi",
        "nk>",
        "</think>",
        "</thi",
        "\n",
        "Hi ",
        "é😀",
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "{",
        "ST",
    ),
    *('{"name": "search", ', '"arguments": {"q": "a"}}', '{"name": "search", "arguments": {"q": "b"}}', "STOP"),
]
HARMONY_TEXTS = [
    *(
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|end|>",
        "<|start|>assistant",
        "Hm ",
        "é😀",
        "ST",
    ),
    *(
        "<|channel|>commentary to=functions.search json<|message|>",
        '{"q": "a"}',
        "<|call|>",
        "STOP",
        "<|channel|>",
        "final",
    ),
]
STOP = {"stop": ["STOP"]}


def text_ids(parts: Sequence[str]) -> list[int]:
    return [ord(char) for part in parts for char in part]


def harmony_ids(parts: Sequence[str]) -> list[int]:
    return [token for part in parts for token in harmony.encode(part)]


def chat(body: bytes) -> Merged:
    merged = merge_stream(body, CHAT)
    merged.chunks = []
    return merged


def response(body: bytes) -> list[Any]:
    """The events of a response with the deltas of a kind that follow each other joined; they are numbered upwards."""
    joined: list[Any] = []
    last = -1
    for block in body.decode().rstrip("\n").split("\n\n"):
        event = strict_json(block.partition("\ndata: ")[2])
        assert event["sequence_number"] > last, "numbers go up"
        last = event.pop("sequence_number")
        if joined and event["type"].endswith(".delta") and joined[-1]["type"] == event["type"]:
            joined[-1]["delta"] += event["delta"]
        else:
            joined.append(event)
    return joined


Reader = Callable[[bytes], Any]
CASES: dict[str, tuple[StreamSpec, Vocabulary, list[str], Callable[[Sequence[str]], list[int]], Reader]] = {
    "chat": (spec_of(CHAT, facts=HERMES, tools=harmony.TOOLS), Vocabulary.text(), TEXTS, text_ids, chat),
    "chat with stops": (
        spec_of(CHAT, facts=HERMES, tools=harmony.TOOLS, **STOP),
        Vocabulary.text(),
        TEXTS,
        text_ids,
        chat,
    ),
    "harmony": (harmony.spec(), harmony.vocabulary(), HARMONY_TEXTS, harmony_ids, chat),
    "harmony with stops": (harmony.spec(**STOP), harmony.vocabulary(), HARMONY_TEXTS, harmony_ids, chat),
    "response": (response_spec(HERMES, tools=RESPONSE_TOOLS), Vocabulary.text(), TEXTS, text_ids, response),
    "chat in threes": (
        spec_of(CHAT, facts=HERMES, tools=harmony.TOOLS, stream_interval=3, **STOP),
        *(Vocabulary.text(), TEXTS, text_ids, chat),
    ),
    "harmony in threes": (harmony.spec(stream_interval=3), harmony.vocabulary(), HARMONY_TEXTS, harmony_ids, chat),
    "response in threes": (
        response_spec(HERMES, tools=RESPONSE_TOOLS, stream_interval=3),
        *(Vocabulary.text(), TEXTS, text_ids, response),
    ),
    "plain response": (response_spec(FACTS), Vocabulary.text(), TEXTS, text_ids, response),
    "harmony response": (
        response_spec(harmony.HARMONY, tools=RESPONSE_TOOLS, prompt="<|start|>assistant"),
        *(harmony.vocabulary(), HARMONY_TEXTS, harmony_ids, response),
    ),
}


def emitted(worker: PostprocWorker, records: StepRecords) -> list[tuple[int, int, bytes]]:
    """What a step adds: (tokens, flags, bytes)."""
    rows = [row for _, emissions in worker.receive([records]).emissions for row in emissions.rows()]
    return [(count, flags, payload) for _, _, _, count, flags, payload in rows]


@pytest.mark.parametrize("name", CASES)
@given(st.data())
def test_a_lost_worker_costs_nothing(name: str, data: st.DataObject) -> None:
    spec, vocabulary, texts, encode, read = CASES[name]
    ids = encode(data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=8)))
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=12))
    rows, start = [], 0
    for size in [*sizes, len(ids)]:
        rows.append(StepRow(0, 0, ids[start : start + size]))
        start += size
        if start >= len(ids):
            break
    rows[-1] = rows[-1]._replace(finish_reason="stop")

    def worker_with(delivered: Sequence[tuple[int, bool]], opening: StreamSpec) -> tuple[PostprocWorker, list[bytes]]:
        worker = PostprocWorker(vocabulary, ALL_POST_PROCESSORS)
        opened = StepRecords([], [], [], [], opens=[Open(0, int(bool(delivered)), 0, opening.encode(), delivered)])
        return worker, [payload for _, _, payload in emitted(worker, opened)]

    whole, undisturbed = worker_with((), spec)
    for row in rows:
        undisturbed += [payload for _, _, payload in emitted(whole, StepRecords.build([row]))]

    heard, ahead = data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, 3))
    first, got = worker_with((), spec)
    told = [each for row in rows[:heard] for each in emitted(first, StepRecords.build([row]))]
    got += [payload for _, _, payload in told]
    count, flags, _ = told[-1] if told else (0, 0, b"")
    if flags & REQUEST_END:
        return
    history = [token for row in rows[: heard + ahead] for token in row.token_ids]
    again, more = worker_with([(count, bool(flags & OUTPUT_END))], spec)
    got += more
    finish = rows[-1].finish_reason if heard + ahead >= len(rows) else None
    for row in [StepRow(0, 0, history, finish), *rows[heard + ahead :]] if history or finish else rows:
        got += [payload for _, _, payload in emitted(again, StepRecords.build([row]))]
    assert read(b"".join(got)) == read(b"".join(undisturbed))
