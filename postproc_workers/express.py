"""The express lane: usual events of usual streams, written a column at a time.

Most rows of most streams are one id, and their event is the id's text between two constants. What there is to know of
such a stream is its ``Lane``. A step brings the same rows as the one before, or nearly, so the lanes of a column of
rids are gathered once and kept as columns themselves, a ``Cohort``: a step then is a look-up of pieces, a join and a
few sums, each one call into C for all rows. No object of a stream is touched: with thousands of streams, each one that
is costs a miss of the processor's cache, which made 0.9 µs of a row's 0.34.

The ids of a cohort are columns too until somebody wants them by stream (``settle``). That has to happen before anything
but this file looks at a stream's ids, so a worker calls ``leave`` before it does anything else than ``take``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress, groupby
from operator import not_
from typing import NamedTuple

from executor.ledger import Ledger
from executor.messages import Emissions, RecordRow, StepRecords
from executor.rids import Change, Rids, change, picker
from executor.same import all_are, same
from postproc_workers.pieces import PieceTable
from postproc_workers.post_processor import Express
from postproc_workers.stream import Stream

#: Rows of usual events that are a message of their own whatever else there is: one costs about what 30 rows do.
OWN_MESSAGE = 32

_NOTHING: Mapping[int, tuple[bytes, bytes]] = {}


class Kind(NamedTuple):
    """What lanes need to have in common to be a cohort: the front end that events go to, and where pieces come from."""

    frontend: int
    table: PieceTable


class Lane(NamedTuple):
    """What is needed to write the usual events of a stream. ids: its output's so far; head, tail: the bytes around a
    piece; kind: the same object for all lanes that are equal in this."""

    ids: array[int]
    head: bytes
    tail: bytes
    epoch: int
    kind: Kind


def _row(lane: Lane) -> tuple[array[int], int, int, tuple[bytes, bytes]]:
    """Its values in the columns of a cohort."""
    ids, head, tail, epoch, _ = lane
    return ids, epoch, len(ids), (head, tail)


class Cohort:
    """Lanes of one kind, as columns. places: the numbers of their rows in a step; None for all of them. around: head
    and tail of each.

    Of each step ``pieces`` are looked up first; if all are there, ``emit`` makes the message.
    """

    __slots__ = (
        "kind", "rids", "places", "around", "_fill", "_piece",  "_pick", "_ids", "_epochs", "_counts", "_zeros",
        "_ledger",
    )  # fmt: skip

    def __init__(self, rids: Rids, kind: Kind, lanes: Sequence[Lane], places: Sequence[int] | None) -> None:
        self.kind = kind
        self._fill, self._piece = kind.table.fill, kind.table.pieces.__getitem__
        columns = map(list, zip(*map(_row, lanes)))
        self._ids, self._epochs, self._counts, self.around = columns
        #: ids that the streams do not have yet
        self._ledger = Ledger()
        self._stand(rids, places)

    def change(self, rids: Rids, how: Change, lanes: Sequence[Lane], places: Sequence[int] | None) -> None:
        """Some lanes are gone, and others have come. lanes: the latter."""
        self.settle()
        # Copies: some are in messages that have been given away, and in the same process nobody encodes those first.
        self._epochs, self._counts = list(self._epochs), list(self._counts)
        columns = self._ids, self._epochs, self._counts, self.around
        for at in reversed(how.gone):
            for column in columns:
                del column[at]
        for at, lane in zip(how.come, lanes):
            for column, value in zip(columns, _row(lane)):
                column.insert(at, value)
        self._stand(rids, places)

    def _stand(self, rids: Rids, places: Sequence[int] | None) -> None:
        self.rids = rids
        self.places: Sequence[int] = range(len(rids)) if places is None else places
        self._pick = None if places is None else picker(places)
        self._zeros = same(0, len(rids))

    def pieces(self, tokens: Sequence[int]) -> list[bytes | None]:
        """Those of a step's ids; None where an id is not that simple."""
        own = tokens if self._pick is None else self._pick(tokens)
        pieces: list[bytes | None] = list(map(self._piece, own))
        if not all(pieces):
            pieces = [self._fill(token) if piece is None else piece for token, piece in zip(own, pieces)]
        return pieces

    def emit(
        self,
        worker: int,
        tokens: Sequence[int],
        pieces: Sequence[bytes],
        around: Mapping[int, tuple[bytes, bytes]] | None,
    ) -> Emissions:
        """The events of a step: pieces, and ``around`` as in ``Emissions``."""
        self._ledger.enter(self._ids, tokens if self._pick is None else self._pick(tokens))
        self._ledger.tidy()
        self._counts = counts = [count + 1 for count in self._counts]
        if around is None:
            pieces = [head + piece + tail for (head, tail), piece in zip(self.around, pieces)]
        zeros, sizes = self._zeros, list(map(len, pieces))
        payload = b"".join(pieces)
        return Emissions(worker, self.rids, self._epochs, zeros, counts, zeros, sizes, payload, around=around)

    def settle(self) -> None:
        """Give the streams their ids."""
        self._ledger.settle()


class ExpressLane:
    """The lanes of one worker. size: of the vocabulary.

    lanes: rid -> lane, of the streams whose next row is most likely usual. Any row may still be another: whoever
    handles that takes the stream out, and it may ``enter`` with its next usual one. So all rows of a stream are handled
    in order, and no bytes of a character are held while it is here.
    """

    def __init__(self, worker: int, size: int) -> None:
        self.lanes: dict[int, Lane] = {}
        self._worker, self._size = worker, size
        #: by the identity of id -> text, and of what escapes it
        self._tables: dict[tuple[int, int], PieceTable] = {}
        self._kinds: dict[tuple[int, tuple[int, int]], Kind] = {}
        #: streams that have ever been in ``lanes``, and those whose front end does not know what stands around their
        #: pieces
        self._entered: set[int] = set()
        self._untold: set[int] = set()
        #: of the last step: its lanes, its column of rids, and its rows that have no lane
        self._cohorts: list[Cohort] = []
        self._rids: Sequence[int] | None = None
        self._others: Sequence[int] = ()
        self._other_rids: set[int] = set()

    def enter(self, stream: Stream) -> None:
        """The last row of a stream was usual, and the next one will most likely be."""
        lane, rid = self.lane(stream), stream.rid
        if lane is not None:
            self.lanes[rid] = lane
            if rid not in self._entered:
                self._entered.add(rid)
                self._untold.add(rid)

    def lane(self, stream: Stream) -> Lane | None:
        """The lane of a stream, which has not entered by this. None where it has none, or its next text is not simply
        that of its next id."""
        if stream.lane is None and stream.express is not None:
            stream.lane = self._lane(stream, stream.express)
        detokenizer, lane = stream.stages[0].detokenizer, stream.lane
        return None if lane is None or detokenizer.pending or not detokenizer.strings else lane

    def drop(self, rid: int) -> None:
        """A request is opened anew, or is over."""
        self._entered.discard(rid)
        self._untold.discard(rid)
        if self.lanes.pop(rid, None) is not None:
            self.leave()

    def leave(self) -> None:
        """Something else than ``take`` comes: streams get their ids."""
        for cohort in self._cohorts:
            cohort.settle()
        self._cohorts, self._rids = [], None

    def take(self, step: StepRecords) -> tuple[list[tuple[int, Emissions]], Iterable[RecordRow]]:
        """(front end, message) of the usual rows of a step, and the rows that are not."""
        rids, tokens, lanes = step.rids, step.tokens, self.lanes
        if not lanes or not step.single or min(tokens) < 0 or max(tokens) >= self._size:
            self.leave()
            return [], step.record_rows()
        if step.finishes:
            self._take_out(rids, step.finishes)
        if not all_are(step.indexes, 0):
            self._take_out(rids, compress(range(len(rids)), step.indexes))
        if rids is not self._rids or not lanes.keys().isdisjoint(self._other_rids):
            self._gather(rids)
        found = [cohort.pieces(tokens) for cohort in self._cohorts]
        for at, pieces in enumerate(found):
            if not all(pieces):
                found[at] = self._without_missing(self._cohorts[at], pieces)
        made = [
            (cohort.kind.frontend, cohort.emit(self._worker, tokens, pieces, self._tell(cohort)))  # type: ignore[arg-type]
            for cohort, pieces in zip(self._cohorts, found)
            if pieces
        ]
        return made, step.some_record_rows(self._others) if self._others else ()

    def _tell(self, cohort: Cohort) -> Mapping[int, tuple[bytes, bytes]] | None:
        """What its front end has to be told of a cohort's streams; None where whole events go there: of few rows, that
        may be joined to others."""
        if len(cohort.rids) < OWN_MESSAGE:
            return None
        untold = self._untold
        if not untold or untold.isdisjoint(cohort.rids):
            return _NOTHING
        told = {at: cohort.around[at] for at, rid in enumerate(cohort.rids) if rid in untold}
        untold.difference_update(cohort.rids)
        return told

    def _without_missing(self, cohort: Cohort, pieces: Sequence[bytes | None]) -> list[bytes | None]:
        """Take the lanes out whose ids have no piece, and only those: in some languages there are such in every step.
        Returns the pieces of the others."""
        missing = [at for at, piece in enumerate(pieces) if piece is None]
        gone = [cohort.rids[at] for at in missing]
        for rid in gone:
            del self.lanes[rid]
        self._others = sorted([*self._others, *(cohort.places[at] for at in missing)])
        self._other_rids.update(gone)
        kept = Rids(rid for rid, piece in zip(cohort.rids, pieces) if piece is not None)
        places = [place for place, piece in zip(cohort.places, pieces) if piece is not None]
        cohort.change(kept, Change(missing, ()), (), places)
        return [piece for piece in pieces if piece is not None]

    def _take_out(self, rids: Sequence[int], places: Iterable[int]) -> None:
        """Some rows of a step are not usual. Where one had a lane, ``_gather`` has to follow."""
        for at in places:
            if self.lanes.pop(rids[at], None) is not None:
                self._rids = None

    def _gather(self, rids: Sequence[int]) -> None:
        """Make or change cohorts for a step's rows; each that is not left as it is has its ids settled. There are none
        for a step that has two rows of a lane: those have to be in order."""
        found = list(map(self.lanes.get, rids))
        kept = rids if type(rids) is Rids else Rids(rids)
        places = None
        self._others, self._other_rids = (), set()
        if not all(found):
            places, kept = list(compress(range(len(rids)), found)), Rids(compress(rids, found))
            self._others = list(compress(range(len(rids)), map(not_, found)))
            self._other_rids = {rids[at] for at in self._others}
        if len(set(kept)) != len(kept):
            self._others = range(len(rids))
            self.leave()
            return
        if not self._change(kept, places):
            self._make(rids, found)
        # Any other sequence may be the same object with other values.
        self._rids = rids if type(rids) is Rids else None

    def _change(self, rids: Rids, places: Sequence[int] | None) -> bool:
        """Whether the one cohort that there was could be changed to be this one."""
        if len(self._cohorts) != 1:
            return False
        (cohort,) = self._cohorts
        how = change(cohort.rids, rids)
        if how is None:
            return False
        lanes = [self.lanes[rids[at]] for at in how.come]
        if any(lane.kind is not cohort.kind for lane in lanes):
            return False
        cohort.change(rids, how, lanes, places)
        return True

    def _make(self, rids: Sequence[int], found: Sequence[Lane | None]) -> None:
        self.leave()
        for kind in {id(lane.kind): lane.kind for lane in found if lane is not None}.values():
            places = [at for at, lane in enumerate(found) if lane is not None and lane.kind is kind]
            lanes = [lane for at in places if (lane := found[at]) is not None]
            own = Rids(rids[at] for at in places)
            if len(own) == len(rids):
                self._cohorts.append(Cohort(rids if type(rids) is Rids else own, kind, lanes, None))
            else:
                self._cohorts.append(Cohort(own, kind, lanes, places))

    def _lane(self, stream: Stream, way: Express) -> Lane | None:
        around, strings = way.around(stream.args), stream.stages[0].detokenizer.strings
        if around is None or not strings:
            return None
        kind = self._kind(stream.frontend, strings, way.escaped)
        head, tail = around
        return Lane(stream.stages[0].output.token_ids, head + b'"', _behind(tail), stream.epoch, kind)

    def _kind(self, frontend: int, strings: Sequence[str | None], escaped: Mapping[str, bytes]) -> Kind:
        key = id(strings), id(escaped)  # a table keeps both, so that no others get the same identities
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = PieceTable(strings, escaped, self._size)
        return self._kinds.setdefault((frontend, key), Kind(frontend, table))


def runs(steps: Sequence[StepRecords]) -> Iterator[Sequence[StepRecords]]:
    """The steps in order; those that follow each other and bring one id each to the same rows, together."""
    for rids, group in groupby(steps, key=_usual_rids):
        if rids is None:
            yield from ([step] for step in group)
        else:
            yield list(group)


def _usual_rids(step: StepRecords) -> Rids | None:
    rids = step.rids
    odd = step.finishes or step.logprobs or not step.single or not all_are(step.indexes, 0)
    return None if odd or type(rids) is not Rids or len(set(rids)) != len(rids) else rids


@lru_cache(maxsize=16)
def _behind(tail: bytes) -> bytes:
    """One for all streams that have the same, as in ``serve/chunks.py``."""
    return b'"' + tail
