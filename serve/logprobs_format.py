"""Log-probabilities as the two endpoints write them (OpenAI API reference, chat and legacy completions).

``bytes`` are a token's raw bytes, so a client can put a character together that several tokens share; ``token`` is the
same as text, with U+FFFD for what is no character. Minus infinity is no JSON: -9999.0 stands for it.

The JSON of a token never changes but for one number, so it is made once for each id that turns up, with a place for the
number: ``{"token":"a","logprob":%b,"bytes":[97]}``. A token and its alternatives are then one join, one ``%`` and one
call that writes all the numbers. With five alternatives that takes 2.5 µs; as dicts it took 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import orjson

from executor.logprob_records import read_record, record_readers
from executor.result import Logprob, TokenBytes
from postproc_workers.logprobs import StepLogprobs
from postproc_workers.vocabulary import Vocabulary

FLOOR = -9999.0
#: Ids that a table remembers; a full one has some 12 MB. What is generated most comes first.
MAX_IDS = 1 << 16

_T = TypeVar("_T")


def finite(value: float) -> float:
    """A log-probability that JSON can hold."""
    if value == math.inf:
        return 0.0
    return value if value > FLOOR else FLOOR  # not max(): NaN has to become the floor too


def all_finite(values: Sequence[float]) -> Sequence[float]:
    """Log-probabilities that JSON can hold."""
    for value in values:  # a loop takes half as long as min(), and NaN does not slip through it
        if not FLOOR < value < math.inf:
            return [finite(value) for value in values]
    return values


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
        if len(self) < MAX_IDS:
            self[token_id] = template
        return template


class ChatTokens:
    """The JSON of a vocabulary's tokens, as it turns up. drawn: of a token that its alternatives follow."""

    __slots__ = ("alternatives", "drawn", "_writers")

    def __init__(self, vocabulary: TokenBytes) -> None:
        self.alternatives = _Templates(vocabulary, b"}")
        self.drawn = _Templates(vocabulary, b',"top_logprobs":[')
        self._writers: dict[int, ChatLogprobs] = {}

    def writer(self, top: int) -> ChatLogprobs:
        """The writer of all requests that want so many alternatives (0 to 20); it has no state of its own."""
        if top not in self._writers:
            self._writers[top] = ChatLogprobs(self, top)
        return self._writers[top]


class ChatLogprobs:
    """Writes ``logprobs.content`` items; ``top_logprobs`` holds at most ``top`` alternatives."""

    __slots__ = ("_alternative", "_drawn", "_ids", "_length", "_top", "_values")

    def __init__(self, tokens: ChatTokens, top: int) -> None:
        self._drawn, self._alternative = tokens.drawn, tokens.alternatives.__getitem__
        self._top = top
        self._length, self._values, self._ids = record_readers(top)

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
            values, ids = self._values(record), self._ids(record)
        else:
            values, ids = read_record(record, self._top)
        template = self._drawn[token_id] + b",".join(map(self._alternative, ids)) + b"]}"
        return template % tuple(orjson.dumps(all_finite(values))[1:-1].split(b","))


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
        if len(self) < MAX_IDS:
            self[token_id] = text
        return text


CompletionRow = tuple[str, float, dict[str, float] | None, int]
"""What one token adds to the columns tokens, token_logprobs, top_logprobs and text_offset."""


class CompletionLogprobs:
    """Makes the rows of a completion's ``logprobs`` object.

    offset: characters in front of the next token; starts behind an echoed prompt.
    """

    __slots__ = ("offset", "_top")

    def __init__(self, top: int, offset: int = 0) -> None:
        self.offset = offset
        self._top = top

    def rows(self, entries: Sequence[Logprob], vocabulary: TokenBytes) -> list[CompletionRow]:
        """The rows of these tokens, which follow those of earlier calls. Raises what the vocabulary raises for an id
        that it does not have."""
        step, texts = StepLogprobs.of(entries), shared(TokenTexts, vocabulary)
        rows: list[CompletionRow] = []
        for token_id, record, piece in zip(step.tokens, step.records, step.pieces):
            raw, ids = read_record(record, self._top)
            values, text = all_finite(raw), texts[token_id]
            others = _alternatives(text, values, [texts[i] for i in ids]) if self._top else None
            rows.append((text, values[0], others, self.offset))
            self.offset += len(piece)
        return rows


def _alternatives(text: str, values: Sequence[float], others: Sequence[str]) -> dict[str, float]:
    """``top_logprobs`` of a token. values: its own, then those of the others."""
    alternatives = dict(zip(others, values[1:]))
    if len(alternatives) < len(others):
        # Parts of characters all read as U+FFFD here: the most likely one is told. A key keeps its first place.
        alternatives |= dict(zip(reversed(others), reversed(values[1:])))
    # The sampled token is always among them (the API's documented "up to logprobs + 1 elements").
    alternatives[text] = values[0]
    return alternatives


def completion_logprobs(rows: Sequence[CompletionRow]) -> bytes:
    """The ``logprobs`` object of a completion; null where there is no token."""
    if not rows:
        return b"null"
    tokens, values, alternatives, offsets = zip(*rows)
    columns = {"tokens": tokens, "token_logprobs": values, "top_logprobs": alternatives, "text_offset": offsets}
    return orjson.dumps(columns)
