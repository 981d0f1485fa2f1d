"""What a worker gets with the next message, gathered as the columns that it will be.

A step of the engine is mostly columns already: usual rows, which bring one id of output 0. As long as they are all that
there is, they are kept and handed on as they came; the column of rids stays the object that it is (``Rids``). Where a
worker has not kept up, several steps of the same rows become one: each row has as many ids. What is unusual about a row
is noted beside the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import MAX_COUNT, Finish, Open, StepRecords
from executor.rids import Rids
from executor.same import same

#: Tokens of history in one message. With 20 alternatives each they are 130 MB, and a frame of 256 MB is refused.
MAX_HISTORY = 1 << 19
#: Rows in one message, for the same reason: a worker that stands still may have that many waiting.
MAX_ROWS = MAX_HISTORY // 2


class Batch:
    """Rows for one worker. opens: requests that it hears of first. history: tokens of resent histories among the rows;
    not 0 while what is left of a part that was taken waits."""

    __slots__ = ("opens", "history", "_rids", "_tokens", "_steps", "_shapes", "_finishes", "_logprobs")

    def __init__(self) -> None:
        self.opens: list[Open] = []
        self.history = 0
        self._begin()

    def _begin(self) -> None:
        """Have no rows. The columns are our own lists, but for those of usual rows alone, which belong to all who have
        them."""
        self._rids: Rids | list[int] = []
        self._tokens: list[int] = []
        #: while there are only usual rows, of the same requests: the ids of each step, instead of ``tokens``
        self._steps: list[list[int]] = []
        #: row -> (index, number of ids), where that is not (0, 1)
        self._shapes: dict[int, tuple[int, int]] = {}
        self._finishes: dict[int, Finish] = {}
        self._logprobs: dict[int, Sequence[TokenLogprob]] = {}

    def __bool__(self) -> bool:
        return bool(self._rids or self.opens)

    def extend(self, rids: Rids, token_ids: list[int]) -> None:
        """Take usual rows."""
        if not self._rids:
            self._rids = rids
        if self._rids is rids and len(self._steps) < MAX_COUNT:
            self._steps.append(token_ids)
            return
        self._own().extend(rids)
        self._tokens += token_ids

    def add(self, row: StepRow) -> None:
        """Take a row of any kind."""
        rid, index, token_ids, reason, stop_token, message, logprobs = row
        rids = self._own()
        number = len(rids)
        rids.append(rid)
        self._tokens += token_ids
        if index or len(token_ids) != 1:
            self._shapes[number] = index, len(token_ids)
        if reason:
            self._finishes[number] = Finish(reason, stop_token, message)
        if logprobs is not None:
            self._logprobs[number] = logprobs

    def _own(self) -> list[int]:
        """The column of rids, as one that can be changed, and so the ids."""
        rids = self._rids
        if isinstance(rids, list):
            return rids
        self._rids = owned = list(rids)
        steps, self._steps = self._steps, []
        self._tokens = list(_joined(steps))
        if len(steps) > 1:
            self._shapes = dict.fromkeys(range(len(owned)), (0, len(steps)))
        return owned

    def take(self, stamp: int, incarnation: int) -> StepRecords:
        """Everything, or the first part of what is too much for one message; the rest stays."""
        if self._steps and len(self._rids) <= MAX_ROWS:
            return self._take_steps(stamp, incarnation)
        self._own()
        count = len(self._rids)
        indexes, counts = self._columns(count)
        if len(self._tokens) > MAX_HISTORY or count > MAX_ROWS:
            count = _rows_of_a_message(counts)
        if count < len(self._rids):
            return self._part(count, indexes[:count], counts[:count], stamp, incarnation)
        steps = StepRecords(
            self._rids, indexes, counts, self._tokens, self._finishes, self._logprobs, self.opens, stamp, incarnation
        )
        self.opens, self.history = [], 0
        self._begin()
        return steps

    def _take_steps(self, stamp: int, incarnation: int) -> StepRecords:
        rids, steps, opens = self._rids, self._steps, self.opens
        together = max(1, MAX_HISTORY // len(rids))
        if len(steps) > together:
            steps, self._steps, self.opens = steps[:together], steps[together:], []
            self.history = len(self._steps) * len(rids)
        else:
            self.opens, self.history = [], 0
            self._begin()
        counts = same(len(steps), len(rids))
        return StepRecords(rids, same(0, len(rids)), counts, _joined(steps), {}, {}, opens, stamp, incarnation)

    def _columns(self, count: int) -> tuple[Sequence[int], Sequence[int]]:
        """Each row's index and number of ids."""
        if not self._shapes:
            return same(0, count), same(1, count)
        indexes, counts = [0] * count, [1] * count
        for number, (index, size) in self._shapes.items():
            indexes[number], counts[number] = index, size
        return indexes, counts

    def _part(
        self, count: int, indexes: Sequence[int], counts: Sequence[int], stamp: int, incarnation: int
    ) -> StepRecords:
        """The first rows."""
        size = sum(counts)
        steps = StepRecords(
            self._rids[:count], indexes, counts, self._tokens[:size],
            {number: finish for number, finish in self._finishes.items() if number < count},
            {number: entries for number, entries in self._logprobs.items() if number < count},
            self.opens, stamp, incarnation,
        )  # fmt: skip
        self._drop(count, size)
        return steps

    def _drop(self, count: int, size: int) -> None:
        """Forget the first rows; those that are left begin at 0."""
        rids = self._own()
        del rids[:count], self._tokens[:size]
        self.opens = []
        self.history = max(self.history - size, len(rids))  # never 0 while rows are left, nor more than need be
        self._shapes = {number - count: shape for number, shape in self._shapes.items() if number >= count}
        self._finishes = {number - count: finish for number, finish in self._finishes.items() if number >= count}
        self._logprobs = {number - count: entries for number, entries in self._logprobs.items() if number >= count}


def _joined(steps: Sequence[list[int]]) -> list[int]:
    """The ids of steps of the same rows, row by row."""
    return steps[0] if len(steps) == 1 else list(chain.from_iterable(zip(*steps)))


def _rows_of_a_message(counts: Sequence[int]) -> int:
    tokens = number = 0
    while number < len(counts) and tokens < MAX_HISTORY:
        tokens += counts[number]
        number += 1
    return number
