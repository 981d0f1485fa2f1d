"""What a worker gets with the next message, gathered as the columns that it will be.

A step of the engine is a list of rows, and most of them bring one id of a request's only output. Such a row is two
appends, done by whoever has it (``rids``, ``tokens``: the lists stay the same for good, so their methods can be kept).
What is unusual about a row is noted beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import Finish, Open, StepRecords

#: Tokens of history in one message. With 20 alternatives each they are 130 MB, and a frame of 256 MB is refused.
MAX_HISTORY = 1 << 19
#: Rows in one message, for the same reason: a worker that stands still may have that many waiting.
MAX_ROWS = MAX_HISTORY // 2


class Batch:
    """Rows for one worker. opens: requests that it hears of first. history: tokens of resent histories among the rows;
    not 0 while what is left of a part that was taken waits."""

    __slots__ = ("opens", "rids", "tokens", "history", "_shapes", "_finishes", "_logprobs")

    def __init__(self) -> None:
        self.opens: list[Open] = []
        self.rids: list[int] = []
        self.tokens: list[int] = []
        self.history = 0
        #: row -> (index, number of ids), where that is not (0, 1)
        self._shapes: dict[int, tuple[int, int]] = {}
        self._finishes: dict[int, Finish] = {}
        self._logprobs: dict[int, Sequence[TokenLogprob]] = {}

    def __bool__(self) -> bool:
        return bool(self.rids or self.opens)

    def add(self, row: StepRow) -> None:
        """Take a row of any kind."""
        rid, index, token_ids, reason, stop_token, message, logprobs = row
        number = len(self.rids)
        self.rids.append(rid)
        self.tokens += token_ids
        if index or len(token_ids) != 1:
            self._shapes[number] = index, len(token_ids)
        if reason:
            self._finishes[number] = Finish(reason, stop_token, message)
        if logprobs is not None:
            self._logprobs[number] = logprobs

    def take(self, stamp: int, incarnation: int) -> StepRecords:
        """Everything, or the first part of what is too much for one message; the rest stays."""
        count = len(self.rids)
        indexes, counts = [0] * count, [1] * count
        for number, (index, size) in self._shapes.items():
            indexes[number], counts[number] = index, size
        if self.history > MAX_HISTORY or count > MAX_ROWS:
            count = _rows_of_a_message(counts)
        size = len(self.tokens) if count == len(self.rids) else sum(counts[:count])
        steps = StepRecords(
            self.rids[:count], indexes[:count], counts[:count], self.tokens[:size],
            {number: finish for number, finish in self._finishes.items() if number < count},
            {number: entries for number, entries in self._logprobs.items() if number < count},
            self.opens, stamp, incarnation,
        )  # fmt: skip
        self._drop(count, size)
        return steps

    def _drop(self, count: int, size: int) -> None:
        """Forget the first rows; those that are left begin at 0."""
        del self.rids[:count], self.tokens[:size]
        self.opens = []
        self.history = max(self.history - size, len(self.rids))  # never 0 while rows are left, nor more than need be
        self._shapes = {number - count: shape for number, shape in self._shapes.items() if number >= count}
        self._finishes = {number - count: finish for number, finish in self._finishes.items() if number >= count}
        self._logprobs = {number - count: entries for number, entries in self._logprobs.items() if number >= count}


def _rows_of_a_message(counts: Sequence[int]) -> int:
    tokens = number = 0
    while number < len(counts) and tokens < MAX_HISTORY:
        tokens += counts[number]
        number += 1
    return number
