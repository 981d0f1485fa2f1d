"""Columns of rids: which requests the rows of a step are about, in order.

The rows of a batch are the same ones step after step, until a request ends or another begins. So what is known of a
column is kept for as long as it stays, and changed where it changes (``executor/pending.py``,
``postproc_workers/express.py``): otherwise all of it would have to be found out for every row of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

#: Rids that are searched one by one: of more, each would cost a walk through the column.
_FEW = 4


class Rids(tuple[int, ...]):
    """A column that is kept: as long as the same rows come step after step, it is the same object, so whoever has
    looked it over once knows it again by identity. packed: how it is written on the wire, once somebody has.
    """

    packed: bytes | None = None


Pick = Callable[[Sequence[int]], Sequence[int]]
"""Takes values out of a column."""


def picker(places: Sequence[int]) -> Pick:
    """What takes the values at these places out of a column, in C."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


class Change(NamedTuple):
    """How a column became another: first the places of the old one in ``gone`` went, then those of the new one in
    ``come`` were filled. Both ascend."""

    gone: Sequence[int]
    come: Sequence[int]


def change(old: Sequence[int], new: Sequence[int]) -> Change | None:
    """What happened between two columns, the old one without a rid that comes twice. None if the new one has such, if
    the others are not in the same order, or if it is more than a fourth of them: then it is as well to begin anew."""
    before, after = set(old), set(new)
    lost, won = before - after, after - before
    if len(after) != len(new) or 4 * (len(lost) + len(won)) > len(new):
        return None
    made = Change(_places(old, lost), _places(new, won))
    return made if without(old, made.gone) == without(new, made.come) else None


def _places(column: Sequence[int], wanted: set[int]) -> list[int]:
    if len(wanted) <= _FEW:
        return sorted(map(column.index, wanted))
    return [at for at, rid in enumerate(column) if rid in wanted]


def without(values: Sequence[int], places: Sequence[int]) -> list[int]:
    """The values but for those at some places, which ascend."""
    rest: list[int] = []
    start = 0
    for place in places:
        rest += values[start:place]
        start = place + 1
    rest += values[start:]
    return rest
