"""Log-probabilities of tokens as records: how they cross the wire, and how a worker keeps them until it writes them.

As objects a token's entry with five alternatives is a tree of a dozen, built only to be taken apart again a moment
later. A record is one ``bytes`` object, which is cut out of the column, passed on, kept for whoever resumes the stream,
and read once, where the text is made. Measured: 0.12 µs to decode one instead of 1.0, 72 bytes to keep one with two
alternatives instead of 290.

    record = f8 value of the token, then for each of k alternatives i4 id and f8 value; little-endian, no gaps

Its length says how many alternatives it has: 8 + 12 k bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain

from executor.engines.base import TokenLogprob

_VALUE, _ALTERNATIVE = 8, 12


class _Layouts(dict[int, struct.Struct]):
    """Number of alternatives -> layout of a record. Bounded: a stranger's frame can name any number."""

    def __missing__(self, count: int) -> struct.Struct:
        layout = struct.Struct("<d" + "id" * count)
        if count <= 256:
            self[count] = layout
        return layout


_LAYOUTS = _Layouts()


def pack_entry(entry: TokenLogprob) -> bytes:
    """The record of an entry."""
    value, top = entry
    return _LAYOUTS[len(top)].pack(value, *chain.from_iterable(top))


def read_record(record: bytes, most: int | None = None) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(value of the token and then those of its alternatives, ids of the alternatives). most: alternatives wanted."""
    count = (len(record) - _VALUE) // _ALTERNATIVE
    numbers = _LAYOUTS[count].unpack(record)
    end = None if most is None else 1 + 2 * most
    return numbers[:end:2], numbers[1:end:2]


def record_readers(count: int) -> tuple[int, Callable[[bytes], tuple[float, ...]], Callable[[bytes], tuple[int, ...]]]:
    """The length of a record of so many alternatives, and what reads its values, and its ids. For whoever reads many:
    both together take two thirds of the time of ``read_record``, since each passes over what it does not want."""
    size = _VALUE + _ALTERNATIVE * count
    return size, struct.Struct("<d" + "4xd" * count).unpack, struct.Struct("<8x" + "i8x" * count).unpack


def unpack_entry(record: bytes) -> TokenLogprob:
    """The entry of a record."""
    (value, *values), ids = read_record(record)
    return TokenLogprob(value, tuple(zip(ids, values)))


def cut_records(blob: bytes, counts: Sequence[int]) -> list[bytes]:
    """The records of which a column is made. counts: alternatives of each. ValueError if they are not as long as it."""
    ends = list(accumulate([_VALUE + _ALTERNATIVE * count for count in counts], initial=0))
    if ends[-1] != len(blob):
        raise ValueError(f"{len(blob)} bytes, not {ends[-1]}")
    return [blob[start:end] for start, end in zip(ends, ends[1:])]


def cut_equal_records(blob: bytes, number: int) -> list[bytes]:
    """The records of a column, where all have equally many alternatives. ValueError if they cannot."""
    size = len(blob) // number if number else _VALUE
    count, rest = divmod(size - _VALUE, _ALTERNATIVE)
    if size * number != len(blob) or rest or count < 0:
        raise ValueError(f"{len(blob)} bytes are not {number} records")
    return [record for (record,) in struct.iter_unpack(f"{size}s", blob)]


def alternatives(records: Sequence[bytes]) -> list[int]:
    """How many each record has."""
    return [(len(record) - _VALUE) // _ALTERNATIVE for record in records]


class RecordRows(Mapping[int, Sequence[TokenLogprob]]):
    """A step's entries by row, as they came: records. Read as a mapping it makes the entries anew each time.

    rows: the numbers of the rows that have any, none twice; a range where they are the first ones, which is usual and
    quick to see. sizes: records of each. records: all of them.
    """

    __slots__ = ("rows", "sizes", "records", "_ends")

    def __init__(self, rows: Sequence[int], sizes: Sequence[int], records: Sequence[bytes]) -> None:
        self.rows, self.sizes, self.records = rows, sizes, records
        self._ends: dict[int, tuple[int, int]] | None = None

    @classmethod
    def of(cls, entries: Mapping[int, Sequence[TokenLogprob]]) -> RecordRows:
        """The records of entries by row."""
        if isinstance(entries, cls):
            return entries
        layouts, flat = _LAYOUTS, chain.from_iterable
        # Without a call per entry, which would be a quarter of the whole.
        records = [layouts[len(top)].pack(value, *flat(top)) for row in entries.values() for value, top in row]
        rows = list(entries)
        number = len(rows)
        return cls(
            range(number) if rows == list(range(number)) else rows, [len(row) for row in entries.values()], records
        )

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether each row has as many records as ``counts`` says of it."""
        if self.rows == range(len(counts)):
            return self.sizes == counts
        return all(row < len(counts) and counts[row] == size for row, size in zip(self.rows, self.sizes))

    def by_row(self, number: int) -> Iterator[Sequence[bytes] | None]:
        """Of each of ``number`` rows its records, None where it has none."""
        if self.rows == range(number) and self.sizes.count(1) == number:
            return zip(self.records)
        by_row = {row: self.records[start:end] for row, (start, end) in self._spans().items()}
        return map(by_row.get, range(number))

    def _spans(self) -> dict[int, tuple[int, int]]:
        if self._ends is None:
            ends = list(accumulate(self.sizes, initial=0))
            self._ends = dict(zip(self.rows, zip(ends, ends[1:])))
        return self._ends

    def __getitem__(self, row: int) -> list[TokenLogprob]:
        return [unpack_entry(record) for record in self.records[slice(*self._spans()[row])]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
