"""Log-probabilities as records: what goes in comes out, and a column is cut into them exactly or not at all."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import TokenLogprob
from executor.logprob_records import (
    RecordRows,
    alternatives,
    cut_equal_records,
    cut_records,
    pack_entry,
    read_record,
    record_readers,
    unpack_entry,
)

IDS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
ENTRIES = st.builds(TokenLogprob, FLOATS, st.lists(st.tuples(IDS, FLOATS), max_size=3).map(tuple))


def test_the_layout() -> None:
    record = pack_entry(TokenLogprob(-0.5, ((7, -0.5), (9, -1.5))))
    assert record == struct.pack("<didid", -0.5, 7, -0.5, 9, -1.5)
    length, values, ids = record_readers(2)
    assert length == len(record) == 8 + 2 * 12 and (values(record), ids(record)) == read_record(record)


@given(ENTRIES)
def test_an_entry_comes_back(entry: TokenLogprob) -> None:
    assert unpack_entry(pack_entry(entry)) == entry
    assert read_record(pack_entry(entry)) == (
        (entry.logprob, *(value for _, value in entry.top)),
        tuple(token for token, _ in entry.top),
    )


@given(ENTRIES, st.integers(0, 4))
def test_fewer_alternatives_may_be_read(entry: TokenLogprob, most: int) -> None:
    assert read_record(pack_entry(entry), most) == read_record(pack_entry(entry._replace(top=entry.top[:most])))


def test_what_json_cannot_hold_comes_back() -> None:
    entry = unpack_entry(pack_entry(TokenLogprob(-math.inf, ((1, math.nan), (2, math.inf)))))
    assert entry.logprob == -math.inf and math.isnan(entry.top[0][1]) and entry.top[1] == (2, math.inf)


@given(st.lists(ENTRIES, max_size=5))
def test_a_column_is_cut_into_its_records(entries: list[TokenLogprob]) -> None:
    records = [pack_entry(entry) for entry in entries]
    assert cut_records(b"".join(records), alternatives(records)) == records
    equal = [record[:8] for record in records]
    assert cut_equal_records(b"".join(equal), len(equal)) == equal


@pytest.mark.parametrize(("size", "number"), [(1, 0), (7, 1), (9, 1), (19, 1), (21, 2), (8, 2), (40, 3), (0, 1)])
def test_a_column_of_another_length_is_refused(size: int, number: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        cut_equal_records(b"\0" * size, number)


@pytest.mark.parametrize(("size", "counts"), [(8, []), (0, [0]), (20, [0, 0]), (28, [1]), (8, [2**32 - 1])])
def test_a_column_that_its_counts_do_not_describe_is_refused(size: int, counts: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        cut_records(b"\0" * size, counts)


# ------------------------------------------------------------------------------------------------------ by row


@given(st.dictionaries(st.integers(0, 5), st.lists(ENTRIES, max_size=3)))
def test_rows_read_as_the_entries_they_were_made_of(entries: dict[int, list[TokenLogprob]]) -> None:
    rows = RecordRows.of(entries)
    assert dict(rows) == entries and len(rows) == len(entries) and RecordRows.of(rows) is rows
    assert rows.get(6) is None
    by_row = list(rows.by_row(6))
    assert [None if records is None else list(map(unpack_entry, records)) for records in by_row] == [
        entries.get(row) for row in range(6)
    ]


def test_each_row_has_as_many_records_as_tokens() -> None:
    rows = RecordRows([0, 2], [1, 2], [b""] * 3)
    assert rows.fits([1, 0, 2]) and rows.fits([1, 5, 2, 1])
    assert not rows.fits([1, 0, 1]) and not rows.fits([1, 0])
    assert RecordRows([0, 1], [1, 1], [b""] * 2).fits([1, 1])
    assert not RecordRows([0, 1], [1, 1], [b""] * 2).fits([1, 2])
