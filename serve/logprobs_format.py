"""Log-probabilities as the two endpoints write them (OpenAI API reference, chat and legacy completions).

``bytes`` are a token's raw bytes, so a client can put a character together that several tokens share; ``token`` is the
same as text, with U+FFFD for what is no character. Minus infinity is no JSON: -9999.0 stands for it.

The JSON of a token never changes but for one number, so it is made once for each id that turns up, with a place for the
number: ``{"token":"a","logprob":%b,"bytes":[97]}``. A token and its alternatives are then one join, one ``%`` and one
call that writes all the numbers. With five alternatives that takes 2 µs; as dicts it took 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson

from executor.logprob_records import read_record, record_layout
from executor.result import Logprob, TokenBytes
from postproc_workers.logprobs import StepLogprobs
from postproc_workers.vocabulary import Vocabulary

FLOOR = -9999.0
#: Ids whose JSON is remembered, by table: some 6 MB at most. What is generated most comes first.
MAX_TEMPLATES = 1 << 15

_INFINITY = math.inf
_T = TypeVar("_T")


def finite(value: float) -> float:
    """A log-probability that JSON can hold."""
    if value == math.inf:
        return 0.0
    return value if value > FLOOR else FLOOR  # not max(): NaN has to become the floor too


def shared(make: Callable[[TokenBytes], _T], vocabulary: TokenBytes) -> _T:
    """A table of a vocabulary: the one of all requests where there can be one."""
    return vocabulary.table(make) if isinstance(vocabulary, Vocabulary) else make(vocabulary)


# ---------------------------------------------------------------------------------------------------------- chat


class _Templates(dict[int, bytes]):
    """id -> JSON of the token up to ``end``, with ``%b`` where its number belongs."""

    def __init__(self, vocabulary: TokenBytes, end: bytes) -> None:
        self._vocabulary, self._end = vocabulary, end

    def __missing__(self, token_id: int) -> bytes:
        token = orjson.dumps({"token": self._vocabulary.token_text(token_id)})[:-1].replace(b"%", b"%%")
        raw = orjson.dumps(list(self._vocabulary.token_bytes(token_id)))
        template = token + b',"logprob":%b,"bytes":' + raw + self._end
        if len(self) < MAX_TEMPLATES:
            self[token_id] = template
        return template


class ChatTokens:
    """The JSON of a vocabulary's tokens, as it turns up. drawn: of a token that its alternatives follow."""

    __slots__ = ("alternatives", "drawn")

    def __init__(self, vocabulary: TokenBytes) -> None:
        self.alternatives = _Templates(vocabulary, b"}")
        self.drawn = _Templates(vocabulary, b',"top_logprobs":[')


class ChatLogprobs:
    """Writes ``logprobs.content`` items; ``top_logprobs`` holds at most ``top`` alternatives."""

    __slots__ = ("_alternative", "_drawn", "_length", "_top", "_unpack")

    def __init__(self, vocabulary: TokenBytes, top: int) -> None:
        tokens = shared(ChatTokens, vocabulary)
        self._drawn, self._alternative = tokens.drawn, tokens.alternatives.__getitem__
        self._top = top
        layout = record_layout(top)
        self._length, self._unpack = layout.size, layout.unpack

    def items(self, entries: Sequence[Logprob]) -> bytes:
        """The items of these tokens as JSON, without the brackets. Raises what the vocabulary raises for an id that it
        does not have."""
        step = entries if type(entries) is StepLogprobs else StepLogprobs.of(entries)
        records = step.records
        if len(records) == 1:
            return self._item(step.tokens[0], records[0])
        return b",".join(map(self._item, step.tokens, records))

    def _item(self, token_id: int, record: bytes) -> bytes:
        if len(record) == self._length:  # as many alternatives as were asked for, which is usual
            numbers = self._unpack(record)
            values, ids = numbers[: self._top + 1], numbers[self._top + 1 :]
        else:
            values, ids = read_record(record, self._top)
        for value in values:  # a loop takes half as long as min()
            if not FLOOR < value < _INFINITY:
                values = tuple(map(finite, values))
                break
        template = self._drawn[token_id] + b",".join(map(self._alternative, ids)) + b"]}"
        return template % tuple(orjson.dumps(values)[1:-1].split(b","))


def chat_logprobs(items: bytes) -> bytes:
    """The ``logprobs`` object of a chat choice."""
    return b'{"content":[' + items + b'],"refusal":null}'


# ---------------------------------------------------------------------------------------------------------- completions


class TokenTexts(dict[int, str]):
    """id -> text of the token, as it turns up."""

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, token_id: int) -> str:
        text = self._vocabulary.token_text(token_id)
        if len(self) < MAX_TEMPLATES:
            self[token_id] = text
        return text


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
        step, texts = StepLogprobs.of(entries), shared(TokenTexts, vocabulary)
        for token_id, record, piece in zip(step.tokens, step.records, step.pieces):
            values, ids = read_record(record, self._top)
            text, (value, *others) = texts[token_id], map(finite, values)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(value)
            columns["top_logprobs"].append(self._alternatives(text, value, [texts[i] for i in ids], others))
            columns["text_offset"].append(self.offset)
            self.offset += len(piece)
        return columns

    def _alternatives(
        self, text: str, value: float, texts: Sequence[str], values: Sequence[float]
    ) -> dict[str, float] | None:
        if not self._top:
            return None
        alternatives: dict[str, float] = {}
        for other, its in zip(texts, values):
            # Parts of characters all read as U+FFFD here: the most likely one is told.
            alternatives.setdefault(other, its)
        # The sampled token is always among them (the API's documented "up to logprobs + 1 elements").
        alternatives[text] = value
        return alternatives
