"""The bytes of events: what is encoded once, and that every text is escaped right."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.chunks import DONE, ESCAPED, GAP, NULL, ChunkFormat, usage_json

AWKWARD = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n\r\t\x00\x1f\x7f\u2028\u2029</\ufeff😀'),
    max_size=40,
)
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def parsed(event: bytes) -> dict[str, object]:
    """One event, strictly: a data line and a blank line, no other line break."""
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    chunk: dict[str, object] = json.loads(event[6:-2])
    return chunk


@given(AWKWARD)
def test_every_text_survives(text: str) -> None:
    for _ in range(2):  # the second time from memory
        data = ESCAPED[text]
        assert data == orjson.dumps(text) and json.loads(data) == text and b"\n" not in data and b"\r" not in data


def test_memory_for_escaped_texts_is_bounded() -> None:
    table = type(ESCAPED)()
    for number in range((1 << 16) + 100):
        assert table[str(number)] == b'"%d"' % number
    assert len(table) == 1 << 16
    assert table["x" * 33] == b'"' + b"x" * 33 + b'"' and "x" * 33 not in table


@given(AWKWARD, AWKWARD, st.sampled_from([None, "stop", "x"]), st.sampled_from([None, 7, "s"]), st.booleans())
def test_a_head_a_delta_and_a_tail_are_one_chunk(
    identity: str, text: str, finish: str | None, reason: object, usage: bool
) -> None:
    chunks = ChunkFormat(identity, "chat.completion.chunk", 17, "m", "delta", usage)
    event = chunks.head(3) + b'{"content":' + ESCAPED[text] + b"}" + chunks.tail(NULL, finish, reason)
    choice = {"index": 3, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    wanted = {
        "id": identity,
        "object": "chat.completion.chunk",
        "created": 17,
        "model": "m",
        "choices": [choice if finish is None else choice | {"stop_reason": reason}],
    }
    assert parsed(event) == (wanted | {"usage": None} if usage else wanted)


def test_the_final_usage_stands_alone() -> None:
    chunks = ChunkFormat("i", "text_completion", 17, "m", "text", True)
    assert json.loads(usage_json(3, 4)) == USAGE
    event = parsed(chunks.usage(usage_json(3, 4)))
    assert event["choices"] == [] and event["usage"] == USAGE
    tail = chunks.head(0) + b'"x"' + chunks.tail(usage=usage_json(3, 4))
    assert parsed(tail)["usage"] == USAGE


def test_the_end_of_a_stream() -> None:
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("around", [b"", b"[", b'{"content":['])
def test_what_is_put_into_a_gap_is_part_of_the_tail(around: bytes, usage: bool) -> None:
    made = [ChunkFormat(name, "k", 1, "m", "delta", usage) for name in ("a", "b")]
    before, behind = made[0].around(around + GAP)
    assert before + b"1" + behind == made[0].tail(around + b"1")
    assert made[1].around(around + GAP)[0] is before
