"""The bytes of one stream's events. What never changes about them is encoded once, when the stream opens.

An event is ``data: {"id", "object", "created", "model", "choices": [{"index", "delta" | "text", "logprobs",
"finish_reason"}]}`` and a blank line (the OpenAI API reference's chat.completion.chunk and text_completion objects).
Per token only the delta is escaped and put between two constants.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
NULL = b"null"
#: Stands where something is put in later; in JSON there is no such byte.
GAP = b"\0"


class _Escapes(dict[str, bytes]):
    """Text -> JSON string, UTF-8, with quotes. Most deltas are one token's text, and those repeat: looking one up costs
    a third of escaping it again. Bounded: long texts and those beyond 64k entries are escaped and forgotten."""

    def __missing__(self, text: str) -> bytes:
        data = orjson.dumps(text)
        if len(text) <= 32 and len(self) < 1 << 16:
            self[text] = data
        return data


#: ``ESCAPED[text]`` is the JSON string of a text.
ESCAPED = _Escapes()


def _tail(logprobs: bytes, finish: str | None, stop_reason: Any, usage: bytes | None) -> bytes:
    end = b',"logprobs":' + logprobs + b',"finish_reason":' + orjson.dumps(finish)
    if finish is not None:
        end += b',"stop_reason":' + orjson.dumps(stop_reason)
    return end + (b"}]}\n\n" if usage is None else b'}],"usage":' + usage + b"}\n\n")


@lru_cache(maxsize=16)
def _around(logprobs: bytes, usage: bytes | None) -> tuple[bytes, bytes]:
    """The same for all streams, so they share it: of thousands, what each has of its own is in no processor's cache."""
    before, _, behind = _tail(logprobs, None, None, usage).partition(GAP)
    return before, behind


class ChunkFormat:
    """How the events of one response are written.

    kind: the ``object`` of each event. field: ``delta`` (chat) or ``text`` (completions).
    usage: whether every event carries a ``usage`` key (null but where a value is given):
    ``stream_options.include_usage``.
    """

    __slots__ = ("_start", "_middle", "_usage")

    def __init__(self, response_id: str, kind: str, created: int, model: str, field: str, usage: bool) -> None:
        head = orjson.dumps({"id": response_id, "object": kind, "created": created, "model": model})
        self._start = b"data: " + head[:-1] + b',"choices":['
        self._middle = b',"' + field.encode() + b'":'
        self._usage = usage

    def head(self, index: int) -> bytes:
        """All of a choice's event before the value of its delta or text."""
        return self._start + b'{"index":%d' % index + self._middle

    def tail(
        self, logprobs: bytes = NULL, finish: str | None = None, stop_reason: Any = None, usage: bytes = NULL
    ) -> bytes:
        """All of it behind that value."""
        return _tail(logprobs, finish, stop_reason, usage if self._usage else None)

    def around(self, logprobs: bytes) -> tuple[bytes, bytes]:
        """A tail without finish reason and usage, before and behind the ``GAP`` in its log-probabilities."""
        return _around(logprobs, NULL if self._usage else None)

    def usage(self, usage: bytes) -> bytes:
        """The event without choices that carries the final usage."""
        return self._start + b'],"usage":' + usage + b"}\n\n"


def usage_json(prompt_tokens: int, completion_tokens: int, reasoning_tokens: int | None = None) -> bytes:
    """The usage object, as JSON. reasoning_tokens: those among the completion's; None where reasoning is not looked
    for."""
    total = prompt_tokens + completion_tokens
    sums = b'"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d' % (prompt_tokens, completion_tokens, total)
    if reasoning_tokens is None:
        return b"{" + sums + b"}"
    return b"{" + sums + b',"completion_tokens_details":{"reasoning_tokens":%d}}' % reasoning_tokens
