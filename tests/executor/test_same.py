"""Columns of one value: they are sequences like any other, and known without being looked through."""

from __future__ import annotations

import pytest

from executor.same import all_are, same


@pytest.mark.parametrize("count", [0, 1, 256, 5000])
def test_same_values(count: int) -> None:
    column = same(1, count)
    assert list(column) == [1] * count
    assert all_are(column, 1) and all_are([1] * count, 1)
    assert all_are(column, 0) == (count == 0) == all_are([1] * count, 0)


def test_one_that_differs() -> None:
    assert not all_are([1, 1, 2], 1) and not all_are(same(1, 3)[:2] + (0,), 1)
