"""Harmony for tests: a small vocabulary with its marks, and streams through a worker, cut in any way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken

from executor.engines.base import StepRow
from executor.messages import Open, StepRecords
from postproc_workers.hook import HookFactory
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from serve.post_processors import POST_PROCESSORS
from tests.helpers import CHAT, FACTS, spec_of
from tests.recordings.build_tokenizers import byte_level
from tests.recordings.checker import Merged, merge_document, merge_stream

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
#: Special tokens that no frame has a place for.
STRANGE = ("<|startoftext|>", "<|reserved_200009|>", "<|endoftext|>")
#: Words that are tokens of their own; all other text is spelled with bytes.
WORDS = ("assistant", "analysis", "commentary", "final", "functions", "json", " to", "comment", "ary", "get_weather")

HARMONY = replace(FACTS, tool_parser="harmony", reasoning_parser="harmony")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "search", "ping")
]

_PARTS = re.compile(f"({'|'.join(map(re.escape, (*MARKS, *STRANGE, *WORDS)))})")


@lru_cache
def _tokenizer(special: bool = True) -> Any:
    tokenizer = byte_level()
    marks = [AddedToken(text, special=special, normalized=False) for text in (*MARKS, *STRANGE)]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WORDS])
    return tokenizer


@lru_cache
def vocabulary(special: bool = True) -> Vocabulary:
    """The vocabulary. Marks are special tokens, or with the same ids not special; ids 0..255 are the bytes, WORDS are
    ordinary tokens."""
    return Vocabulary.from_library(_tokenizer(special))


@lru_cache
def byte_ids() -> dict[int, int]:
    """byte -> id"""
    return {data[0]: i for i in range(256) if len(data := vocabulary().token_bytes(i)) == 1}


def spell(data: bytes) -> list[int]:
    """Ids of bytes, one each."""
    return [byte_ids()[byte] for byte in data]


def encode(text: str) -> list[int]:
    """Ids of a text in which marks are marks."""
    known: list[int] = []
    for part in _PARTS.split(text):
        token = _tokenizer().token_to_id(part) if part in (*MARKS, *STRANGE, *WORDS) else None
        known += spell(part.encode()) if token is None else [token]
    return known


def rows(ids: Sequence[int], cuts: Sequence[int], finish: str, *, index: int = 0) -> list[StepRow]:
    """The ids in steps that end at ``cuts``; a mark at the end of a stopped output is its stop token."""
    ends = [*sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    steps = [StepRow(0, index, ids[start:end]) for start, end in zip([0, *ends], ends)]
    stops = finish == "stop" and bool(ids) and vocabulary().token_bytes(ids[-1]).startswith(b"<|")
    return [*steps[:-1], StepRow(0, index, steps[-1].token_ids, finish, stops)]


def play(
    spec: StreamSpec, steps: Sequence[StepRow], *, hook: HookFactory | None = None, words: Vocabulary | None = None
) -> bytes:
    """The body that a worker makes of the steps."""
    return b"".join(play_steps(spec, steps, hook=hook, words=words))


def play_steps(
    spec: StreamSpec,
    steps: Sequence[StepRow],
    *,
    hook: HookFactory | None = None,
    words: Vocabulary | None = None,
    delivered: Sequence[tuple[int, bool]] = (),
) -> list[bytes]:
    """What each step adds to the body. delivered: per output the tokens that the client has already, and the end."""
    worker = PostprocWorker(words or vocabulary(), POST_PROCESSORS, hook)
    worker.receive([StepRecords([], [], [], [], opens=[Open(0, 0, 0, spec.encode(), delivered)])])
    parts = []
    for step in steps:
        emissions = dict(worker.receive([StepRecords.build([step])]).emissions).get(0)
        parts.append(b"".join(row[5] for row in emissions.rows()) if emissions is not None else b"")
    assert worker.open_requests == 0
    return parts


def spec(*, stream: bool = True, prompt: str = "<|start|>assistant", **request: Any) -> StreamSpec:
    """The spec of a chat request to a harmony model, with TOOLS."""
    made = spec_of(CHAT, stream=stream, facts=HARMONY, **{"tools": TOOLS} | request)
    return replace(made, args=made.args | {"prompt_tail": prompt})


def chat(
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    finish: str = "stop",
    *,
    stream: bool = True,
    hook: HookFactory | None = None,
    words: Vocabulary | None = None,
    **request: Any,
) -> Merged:
    """What a chat response with these ids merges to."""
    body = play(spec(stream=stream, **request), rows(ids, cuts, finish), hook=hook, words=words)
    if not stream:
        return merge_document(body, CHAT)
    asked = request.get("stream_options", {})
    return merge_stream(body, CHAT, include_usage=bool(asked.get("include_usage")))


def every_cut(count: int) -> list[list[int]]:
    """One step; a step per id; steps of two, three and seven; two steps, cut anywhere."""
    regular = [list(range(size, count, size)) for size in (1, 2, 3, 7)]
    return [[], *regular, *([place] for place in range(1, count))]
