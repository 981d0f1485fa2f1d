"""The log-probabilities that a step brought to an output, as records: whoever writes them as text reads the records,
everybody else reads a sequence of ``Logprob``, made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from executor.engines.base import TokenLogprob
from executor.logprob_records import pack_entry, unpack_entry
from executor.result import Logprob


class StepLogprobs(Sequence[Logprob]):
    """The entries of a step's tokens. tokens, records, pieces: equally many; see ``Logprob`` and
    ``executor/logprob_records.py``."""

    __slots__ = ("tokens", "records", "pieces")

    def __init__(self, tokens: Sequence[int], records: Sequence[bytes], pieces: Sequence[str]) -> None:
        self.tokens, self.records, self.pieces = tokens, records, pieces

    @classmethod
    def of(cls, entries: Sequence[Logprob]) -> StepLogprobs:
        """Any sequence of entries."""
        if type(entries) is cls:  # isinstance takes ten times as long for an abstract base
            return entries
        records = [pack_entry(TokenLogprob(entry.logprob, entry.top)) for entry in entries]
        return cls([entry.token_id for entry in entries], records, [entry.piece for entry in entries])

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, place: int) -> Logprob: ...
    @overload
    def __getitem__(self, place: slice) -> StepLogprobs: ...
    def __getitem__(self, place: int | slice) -> Logprob | StepLogprobs:
        if isinstance(place, slice):
            return StepLogprobs(self.tokens[place], self.records[place], self.pieces[place])
        return _entry(self.tokens[place], self.records[place], self.pieces[place])

    def __iter__(self) -> Iterator[Logprob]:
        return map(_entry, self.tokens, self.records, self.pieces)

    def __add__(self, other: Sequence[Logprob]) -> StepLogprobs:
        more = StepLogprobs.of(other)
        return StepLogprobs([*self.tokens, *more.tokens], [*self.records, *more.records], [*self.pieces, *more.pieces])


def _entry(token: int, record: bytes, piece: str) -> Logprob:
    return Logprob(token, *unpack_entry(record), piece)
