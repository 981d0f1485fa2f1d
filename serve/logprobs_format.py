"""Log-probabilities as the two endpoints write them (OpenAI API reference, chat and legacy completions).

``bytes`` are a token's raw bytes, so a client can put a character together that several tokens share; ``token`` is the
same as text, with U+FFFD for what is no character. Minus infinity is no JSON: -9999.0 stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from executor.result import Logprob, TokenBytes

FLOOR = -9999.0


def finite(value: float) -> float:
    """A log-probability that JSON can hold."""
    if value == math.inf:
        return 0.0
    return value if value > FLOOR else FLOOR  # not max(): NaN has to become the floor too


def chat_entries(entries: Sequence[Logprob], vocabulary: TokenBytes, top: int) -> list[dict[str, Any]]:
    """``logprobs.content`` items; ``top_logprobs`` holds at most ``top`` alternatives."""
    items = []
    for entry in entries:
        item = _chat_token(entry.token_id, entry.logprob, vocabulary)
        item["top_logprobs"] = [_chat_token(i, value, vocabulary) for i, value in entry.top[:top]]
        items.append(item)
    return items


def _chat_token(token_id: int, logprob: float, vocabulary: TokenBytes) -> dict[str, Any]:
    raw = vocabulary.token_bytes(token_id)
    return {"token": vocabulary.token_text(token_id), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The columns of a completion's ``logprobs`` object.

    offset: characters in front of the next token; starts behind an echoed prompt.
    """

    __slots__ = ("offset", "_top")

    def __init__(self, top: int, offset: int = 0) -> None:
        self.offset = offset
        self._top = top

    def columns(self, entries: Sequence[Logprob], vocabulary: TokenBytes) -> dict[str, list[Any]]:
        """tokens, token_logprobs, top_logprobs and text_offset of these tokens, which follow those of earlier calls."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            columns["tokens"].append(vocabulary.token_text(entry.token_id))
            columns["token_logprobs"].append(finite(entry.logprob))
            columns["top_logprobs"].append(self._alternatives(entry, vocabulary))
            columns["text_offset"].append(self.offset)
            self.offset += len(entry.piece)
        return columns

    def _alternatives(self, entry: Logprob, vocabulary: TokenBytes) -> dict[str, float] | None:
        if not self._top:
            return None
        alternatives: dict[str, float] = {}
        for token_id, value in entry.top[: self._top]:
            # Parts of characters all read as U+FFFD here: the most likely one is told.
            alternatives.setdefault(vocabulary.token_text(token_id), finite(value))
        # The sampled token is always among them (the API's documented "up to logprobs + 1 elements").
        return alternatives | {vocabulary.token_text(entry.token_id): finite(entry.logprob)}
