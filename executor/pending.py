"""An open request of a front end: who waits for it, and how much that one has. And many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from executor.request import GenerationRequest
from executor.rids import Rids
from executor.sink import Sink


@dataclass(slots=True, eq=False)
class Pending:
    """One open request. sink: None when nobody reads it any more. cohort: where its count is, if that is newer.

    executors: those that died since the sink got anything, and what it had by then.
    """

    sink: Sink | None
    request: GenerationRequest
    aborted: bool = False
    executors: int = 0
    had: list[tuple[int, bool]] = field(default_factory=list)
    epoch: int = 0
    worker: int | None = None
    #: per output: tokens whose bytes the sink has, and whether it has the output's end
    counts: list[int] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    cohort: Cohort | None = None

    @property
    def delivered(self) -> list[tuple[int, bool]]:
        """What the sink has, as it is told."""
        if self.cohort is not None:
            self.cohort.settle()
        return list(zip(self.counts, self.ends))

    def alone(self) -> None:
        """Something happens to this request, and not to others: it leaves its cohort, which ends with that."""
        if self.cohort is not None:
            self.cohort.dissolve()


class Cohort:
    """The requests of one column of rids, each with one output, which a worker's messages bring again and again: found
    once, and fed without a further look at them.

    What a message tells of how much their sinks have stays a column, until somebody asks one of them.
    """

    __slots__ = ("_rids", "_epochs", "_pendings", "_feeds", "_counts")

    def __init__(self, rids: Rids, epochs: Sequence[int], worker: int, pendings: Sequence[Pending]) -> None:
        for old in {id(p.cohort): p.cohort for p in pendings}.values():
            if old is not None:
                old.dissolve()
        self._rids: Rids | None = rids
        self._epochs, self._pendings = epochs, pendings
        self._feeds: list[Callable[[bytes, int], None]] = []
        self._counts: Sequence[int] = ()
        for pending, epoch in zip(pendings, epochs):
            assert pending.sink is not None
            pending.epoch, pending.worker, pending.cohort = epoch, worker, self
            self._feeds.append(pending.sink.feed)

    @staticmethod
    def fits(rids: Rids, epochs: Sequence[int], pendings: Collection[Pending | None]) -> bool:
        """Whether all are open, read, and not on from here under a newer epoch."""
        return (
            None not in pendings
            and len(set(rids)) == len(rids)
            and all(p is not None and p.sink is not None and e >= p.epoch for p, e in zip(pendings, epochs))
        )

    def has(self, rids: Sequence[int], epochs: Sequence[int]) -> bool:
        """Whether a message's rows are these, in this order."""
        return rids is self._rids and epochs == self._epochs

    def feed(self, counts: Sequence[int], payloads: Iterator[bytes]) -> None:
        """A message that ends nothing: counts and payloads as in ``Emissions``."""
        self._counts = counts
        for feed, payload, flags in zip(self._feeds, payloads, repeat(0)):
            feed(payload, flags)

    def settle(self) -> None:
        """Tell the requests how much their sinks have."""
        for pending, count in zip(self._pendings, self._counts):
            pending.counts[0] = count
        self._counts = ()

    def dissolve(self) -> None:
        """Its requests go on one by one."""
        self.settle()
        for pending in self._pendings:
            pending.cohort = None
        self._rids, self._pendings, self._feeds = None, (), []
