"""Ids that are on their way into the histories of their outputs.

Most steps bring one id for each of the same outputs. To append each to its history would touch as many objects as there
are outputs, in memory that has gone cold since the last step, though nobody reads most histories before they are
dropped. So the columns are kept whole, and go into the histories many steps at a time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import starmap
from struct import Struct

#: Ids that are worth the while: some 0.3 ms of work when they go.
ENOUGH = 1 << 13
#: Ids that wait at most, where nobody ``tidies``.
MAX_IDS = 1 << 16


class Ledger:
    """Enters what is generated into histories, in the order given, when somebody asks (``settle``), has the time
    (``tidy``), or very much waits."""

    def __init__(self) -> None:
        #: histories -> columns with an id for each of them
        self._runs: list[tuple[Sequence[array[int]], list[Sequence[int]]]] = []
        self._ids = 0

    def enter(self, histories: Sequence[array[int]], token_ids: Sequence[int]) -> None:
        """One id for each history. The same object as the last time costs least."""
        runs = self._runs
        if runs and runs[-1][0] is histories:
            runs[-1][1].append(token_ids)
        else:
            runs.append((histories, [token_ids]))
        self._wait(len(token_ids))

    def extend(self, history: array[int], token_ids: Sequence[int]) -> None:
        """Any number of ids for one history."""
        if not self._runs:
            history.extend(token_ids)
        elif token_ids:
            self._runs.append(((history,), list(zip(token_ids))))
            self._wait(len(token_ids))

    def _wait(self, count: int) -> None:
        self._ids += count
        if self._ids >= MAX_IDS:
            self.settle()

    def tidy(self) -> None:
        """Whoever calls has the time: enter what waits, if that is enough. In the middle of a step it would delay
        the step."""
        if self._ids >= ENOUGH:
            self.settle()

    def settle(self) -> None:
        """Have the histories complete."""
        runs, self._runs, self._ids = self._runs, [], 0
        for histories, columns in runs:
            if len(columns) == 1:
                _each(map(array.append, histories, columns[0]))
            else:  # as bytes: id by id takes twice as long
                pack = Struct(f"={len(columns)}i").pack
                _each(map(array.frombytes, histories, starmap(pack, zip(*columns))))


_each = deque[None](maxlen=0).extend
