"""What is known of a column of rids, for as long as it is the same object: where the ids beside it have to go."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from executor.batch import Batch
from executor.ledger import Ledger
from executor.rids import Pick, Rids, picker

Lane = tuple[Batch, "array[int]"]
"""Where the usual rows of a request go: its worker's batch, and the history of output 0 (``OutputHistory.settled``)."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The rows of one worker. pick: their values out of a column of all that have a lane; None: they are all."""

    batch: Batch
    rids: Rids
    pick: Pick | None


class Cohort:
    """Made of a column, and of the lanes that there are, by rid. It holds until the lane of one of its requests ends:
    then it ``lapses``. before: the one that was there; the workers' columns stay the objects that they are where they
    bring nothing new.

    rids: the column; None once it has lapsed. odd: rid -> row, of those that have no lane: they go by themselves.
    """

    def __init__(self, rids: Rids, lanes: Mapping[int, Lane], before: Cohort | None = None) -> None:
        self.rids: Rids | None = rids
        self.odd: dict[int, int] = {}
        self._usual: Pick | None = None
        self._histories: tuple[array[int], ...] = ()
        self._shares: list[_Share] = []
        # As little as can be is done row by row: on a busy server, requests come and go in most steps.
        found = list(map(lanes.get, rids))
        if not all(found):
            self.odd = {rids[at]: at for at, lane in enumerate(found) if lane is None}
            self._usual = picker([at for at, lane in enumerate(found) if lane is not None])
            rids, found = Rids(self._usual(rids)), list(filter(None, found))
        if found:
            batches, self._histories = zip(*found)
            self._shares = _shares(rids, batches, {} if before is None else before.columns)

    @property
    def columns(self) -> dict[Batch, Rids]:
        """Each worker's."""
        return {share.batch: share.rids for share in self._shares}

    def give(self, token_ids: list[int], ledger: Ledger) -> None:
        """Have the ids of a step, one for each of the rids, go where they have to; but for the odd ones."""
        if self._usual is not None:
            token_ids = list(self._usual(token_ids))
        ledger.enter(self._histories, token_ids)
        for share in self._shares:
            share.batch.extend(share.rids, token_ids if share.pick is None else list(share.pick(token_ids)))

    def lapse(self) -> None:
        """It does not hold any more."""
        self.rids, self._histories = None, ()

    def validate(self, lanes: Mapping[int, Lane]) -> None:
        """Raise AssertionError unless it holds."""
        if self.rids is None:
            return
        usual = [rid for rid in self.rids if rid in lanes]
        assert list(self.odd) == [rid for rid in self.rids if rid not in lanes], "odd rows that are not"
        assert all(map(lambda rid, history: lanes[rid][1] is history, usual, self._histories)), "histories of others"
        for share in self._shares:
            assert list(share.rids) == [rid for rid in usual if lanes[rid][0] is share.batch], "rows of another worker"
        assert sum(len(share.rids) for share in self._shares) == len(usual) == len(self._histories), "rows left out"


def _shares(rids: Rids, batches: Sequence[Batch], before: Mapping[Batch, Rids]) -> list[_Share]:
    places: dict[Batch, list[int]] = {batch: [] for batch in dict.fromkeys(batches)}
    if len(places) == 1:
        return [_Share(batch, _known(rids, before.get(batch)), None) for batch in places]
    for at, batch in enumerate(batches):  # in C it is no faster
        places[batch].append(at)
    picks = {batch: picker(numbers) for batch, numbers in places.items()}
    return [_Share(batch, _known(Rids(pick(rids)), before.get(batch)), pick) for batch, pick in picks.items()]


def _known(rids: Rids, before: Rids | None) -> Rids:
    """The object that is there already, if it is as good."""
    return before if before is not None and before == rids else rids
