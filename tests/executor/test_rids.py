"""Columns of rids, and how one became another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor.columns import KnownRids, pack
from executor.rids import Change, Rids, change

COLUMN = st.lists(st.integers(0, 30), unique=True, max_size=20)


@given(COLUMN, COLUMN)
def test_a_change_turns_the_old_column_into_the_new(old: list[int], new: list[int]) -> None:
    how = change(old, new)
    if how is not None:
        made = [rid for at, rid in enumerate(old) if at not in how.gone]
        for at in how.come:
            made.insert(at, new[at])
        assert made == new


@given(COLUMN.filter(lambda column: len(column) > 7), st.data())
def test_one_that_goes_and_one_that_comes_are_found(old: list[int], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(old) - 1))
    new = old[:gone] + old[gone + 1 :]
    come = data.draw(st.integers(0, len(new)))
    new.insert(come, 99)
    assert change(Rids(old), Rids(new)) == Change([gone], [come])


def test_what_is_no_small_change() -> None:
    column = list(range(12))
    assert change(column, column) == Change([], [])
    assert change(column, column[::-1]) is None, "another order"
    assert change(column, column[4:]) is None, "a third of it"
    assert change([], column) is None
    assert change(column, [*column, 20, 20]) is None, "one twice"


def test_many_that_go_and_come() -> None:
    how = change(range(200), range(20, 220))
    assert how == Change(list(range(20)), list(range(180, 200)))


def test_a_column_stays_the_same_object_beside_others() -> None:
    known = KnownRids()
    stays = pack("q", [1, 2, 3])
    first = known.unpack({"rid": stays}, 7)
    assert first == (1, 2, 3)
    for other in range(4):
        assert known.unpack({"rid": pack("q", [other])}, 7) == (other,)
        assert known.unpack({"rid": bytes(stays)}, 7) is first
    assert known.unpack({"rid": stays}, 8) is not first, "another sender's"
