"""Columns in which every value is the same, as most are of most messages: known by their type, never looked through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: Values of a column that is kept for the next message of as many rows.
_KEPT = 1 << 12


class Same(tuple[int, ...]):
    """So many times one value; :func:`same` makes them."""


def same(value: int, count: int) -> Same:
    """A column of ``count`` times ``value``."""
    return _kept(value, count) if count <= _KEPT else Same((value,) * count)


@lru_cache(maxsize=64)
def _kept(value: int, count: int) -> Same:
    return Same((value,) * count)


def all_are(values: Sequence[int], value: int) -> bool:
    """Whether every value of a column is that one."""
    if type(values) is Same:
        return not values or values[0] == value
    return values.count(value) == len(values)
