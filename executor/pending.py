"""An open request of a front end: who waits for it, and how much that one has. And many of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeGuard

from executor.request import GenerationRequest
from executor.rids import Rids, change, without
from executor.sink import Sink

#: Requests that leave a cohort one by one: each is looked for. With more of them, all go.
_LEAVERS = 64


@dataclass(slots=True, eq=False)
class Pending:
    """One open request. sink: None when nobody reads it any more. cohort: where its count is, if that is newer.

    executors: those that died since the sink got anything, and what it had by then. around: what stands around the
    pieces that come without it, once it has been told: a function of the request, so whoever tells it.
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
    around: tuple[bytes, bytes] | None = None

    @property
    def delivered(self) -> list[tuple[int, bool]]:
        """What the sink has, as it is told."""
        if self.cohort is not None:
            self.cohort.settle()
        return list(zip(self.counts, self.ends))

    def alone(self) -> None:
        """Something happens to this request, and not to others: it leaves its cohort."""
        if self.cohort is not None:
            self.cohort.leave(self)


class Cohort:
    """The requests of one column of rids, each with one output, which a worker's messages bring again and again: found
    once, and fed without a further look at them. bare: its messages have pieces, as ``Emissions.around`` says.

    What a message tells of how much their sinks have stays a column, until somebody asks one of them.
    """

    __slots__ = ("bare", "_rids", "_epochs", "_pendings", "_feeds", "_heads", "_tails", "_counts", "_left")

    def __init__(
        self, rids: Rids, epochs: Sequence[int], worker: int, pendings: Sequence[Pending], bare: bool = False
    ) -> None:
        for old in {id(p.cohort): p.cohort for p in pendings}.values():
            if old is not None:
                old.dissolve()
        self.bare = bare
        self._rids: Rids | None = rids
        self._epochs = list(epochs)
        #: by place; None where one has left: nothing of what is over is kept
        self._pendings: list[Pending | None] = list(pendings)
        self._feeds: list[Callable[..., None]] = []
        self._heads: list[bytes] = []
        self._tails: list[bytes] = []
        for at, pending in enumerate(pendings):
            self._take(at, pending, epochs[at], worker)
        self._counts: Sequence[int] = ()
        #: places of those that have left
        self._left: set[int] = set()

    def _take(self, at: int, pending: Pending, epoch: int, worker: int) -> None:
        assert pending.sink is not None
        pending.epoch, pending.worker, pending.cohort = epoch, worker, self
        self._feeds.insert(at, pending.sink.feed_parts if self.bare else pending.sink.feed)
        head, tail = pending.around or (b"", b"")
        self._heads.insert(at, head)
        self._tails.insert(at, tail)

    @staticmethod
    def fits(
        pendings: Sequence[Pending | None], epochs: Sequence[int], bare: bool = False
    ) -> TypeGuard[Sequence[Pending]]:
        """Whether all are open, read, and not on from here under a newer epoch; and known, if pieces come."""
        return all(
            p is not None and p.sink is not None and e >= p.epoch and not (bare and p.around is None)
            for p, e in zip(pendings, epochs)
        )

    def has(self, rids: Sequence[int], epochs: Sequence[int]) -> bool:
        """Whether a message's rows are these, in this order."""
        return rids is self._rids and not self._left and list(epochs) == self._epochs

    def outweighs(self, rids: Sequence[int]) -> bool:
        """Whether it stands, and is far larger than a message: that has what came beside its rows."""
        return self._rids is not None and not self._left and len(self._rids) > 2 * len(rids)

    def change(self, rids: Rids, epochs: Sequence[int], worker: int, find: Callable[[int], Pending | None]) -> bool:
        """Become the cohort of a message with nearly the same column, which has to be fed then: it tells those that
        stay how much they have. find: a request by its rid."""
        how = None if self._rids is None else change(self._rids, rids)
        if how is None or not self._left.issubset(how.gone):
            return False
        come = [find(rids[at]) for at in how.come]
        same = without(self._epochs, how.gone) == without(epochs, how.come)
        if not same or not self.fits(come, [epochs[at] for at in how.come], self.bare):
            return False
        for at in reversed(how.gone):
            self._let_go(at)
            del self._pendings[at], self._feeds[at], self._heads[at], self._tails[at]
        self._rids, self._epochs, self._counts, self._left = rids, list(epochs), (), set()
        for at, pending in zip(how.come, come):
            pending.alone()
            self._pendings.insert(at, pending)
            self._take(at, pending, epochs[at], worker)
        return True

    def feed(self, counts: Sequence[int], payloads: Iterator[bytes]) -> None:
        """A message that ends nothing: counts and payloads as in ``Emissions``."""
        self._counts = counts
        if self.bare:
            for feed, head, piece, tail in zip(self._feeds, self._heads, payloads, self._tails):
                feed(head, piece, tail)
        else:
            for feed, payload, flags in zip(self._feeds, payloads, repeat(0)):
                feed(payload, flags)

    def settle(self) -> None:
        """Tell the requests how much their sinks have."""
        for pending, count in zip(self._pendings, self._counts):
            if pending is not None:
                pending.counts[0] = count
        self._counts = ()

    def leave(self, pending: Pending) -> None:
        """One goes on by itself."""
        self._let_go(self._pendings.index(pending))
        if len(self._left) > _LEAVERS:
            self.dissolve()

    def _let_go(self, at: int) -> None:
        pending = self._pendings[at]
        if pending is None:
            return
        if self._counts:
            pending.counts[0] = self._counts[at]
        pending.cohort = None
        self._pendings[at], self._feeds[at] = None, _nobody
        self._left.add(at)

    def dissolve(self) -> None:
        """All go on by themselves."""
        self.settle()
        for pending in self._pendings:
            if pending is not None:
                pending.cohort = None
        self._rids, self._pendings, self._feeds, self._heads, self._tails = None, [], [], [], []


def _nobody(*payload: object) -> None:
    """Where the bytes of one go that has left while the others of its message are being fed."""
