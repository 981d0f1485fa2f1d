"""Columns of single rows: nothing is lost, and the rows of an output keep their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepColumns, StepRow, expand
from executor.engines.gathering import Gathering


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(("usual", "usual", "odd", "end")))), st.data())
def test_every_output_has_its_rows_in_order(made: list[tuple[int, str]], data: st.DataObject) -> None:
    gathering, parts = Gathering(), []
    expected: dict[int, list[tuple[list[int], str | None]]] = {}
    for number, (rid, kind) in enumerate(made):
        if kind == "usual":
            gathering.usual(rid, number)
        else:
            gathering.odd(StepRow(rid, 0, [number], "length" if kind == "end" else None))
        expected.setdefault(rid, []).append(([number], "length" if kind == "end" else None))
        if data.draw(st.booleans()):
            parts += gathering.take()
    parts += gathering.take()
    got: dict[int, list[tuple[list[int], str | None]]] = {}
    for row in expand(parts):
        got.setdefault(row.rid, []).append((list(row.token_ids), row.finish_reason))
    assert got == expected and gathering.take() == []
    for part in parts:
        if isinstance(part, StepColumns):
            assert len(set(part.rids)) == len(part.rids) == len(part.token_ids) > 0


def test_equal_columns_have_the_same_rids() -> None:
    gathering = Gathering()
    for rid in (1, 2, 1, 2):  # two steps at once
        gathering.usual(rid, 10)
    first, second = gathering.take()
    gathering.usual(1, 10)
    gathering.usual(2, 11)
    (third,) = gathering.take()
    gathering.usual(2, 10)
    (fourth,) = gathering.take()
    assert isinstance(first, StepColumns) and isinstance(second, StepColumns)
    assert isinstance(third, StepColumns) and isinstance(fourth, StepColumns)
    assert first.rids is second.rids is third.rids and third.token_ids == [10, 11] and fourth.rids == (2,)
