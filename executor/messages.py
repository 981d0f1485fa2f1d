"""The messages between processes, as objects: what each says, and that its columns agree with each other.

How they look as bytes is ``wire.py``'s business alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from executor.engines.base import StepRow, TokenLogprob
from executor.logprob_records import RecordRows
from executor.request import GenerationRequest
from executor.same import all_are

#: Tokens in one row (column ``count`` is u2); a longer history travels as several rows.
MAX_COUNT = 0xFFFF
#: Outputs of one request (column ``index`` is u2).
MAX_OUTPUTS = 1 << 16

#: Column ``epoch`` is u4. It stays there: a request that somebody lies about must not make a message that no worker
#: reads.
MAX_EPOCH = (1 << 32) - 1
MAX_FRONTEND = (1 << 31) - 1
#: Alternatives of one token: with more, a frame of ``MAX_HISTORY`` tokens would be refused by its socket.
MAX_LOGPROBS = 20

REJECTIONS = frozenset(("queue", "timeout", "poison"))
FINISH_REASONS = frozenset(("stop", "length", "abort", "error"))


class WireError(ValueError):
    """A frame that does not hold what its kind promises; the message names the field."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A front end no longer wants a request."""

    rid: int


@dataclass(frozen=True, slots=True)
class Release:
    """A client has all of a request's bytes; its history may go."""

    rid: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """A worker ended outputs by itself (stop string, hook, failure): (rid, index) pairs, index -1 for all outputs. It
    counts only while the request is that worker's: a dead one's last word must not end what its successor folds."""

    worker: int
    outputs: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A front end knows of a worker, which listens at ``address``. It gets requests of front ends that have said so."""

    worker: int
    address: str
    frontend: int = 0


Delivered = Sequence[tuple[int, bool]]
"""Per output of a request: tokens whose bytes the client has, and whether it has the output's end."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A front end knows that a worker is gone, and takes nothing more from it. delivered: what those of its clients
    have whose requests that worker had, by rid; culprit: the request that it was handling when it died, -1 if none is
    known."""

    worker: int
    delivered: Mapping[int, Delivered]
    culprit: int = -1
    frontend: int = 0


@dataclass(frozen=True, slots=True)
class FrontendLost:
    """A front end is gone, and nobody waits for its requests any more."""

    frontend: int


@dataclass(frozen=True, slots=True)
class Resubmit:
    """A new executor hears of a request that an earlier one had: what its client has, and the highest epoch known."""

    request: GenerationRequest
    delivered: Delivered
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Synced:
    """A front end has told a new executor everything: its workers and its open requests."""

    frontend: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The executor did not take a request (``queue``: too much waits already), lets it wait no longer (``timeout``: no
    token in time), or fails it (``poison``: it kills workers). Only then its client may have bytes of it."""

    rid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Open:
    """First word about a request to a worker. ``delivered`` as in WorkerLost, empty for a new request; rows that repeat
    what the client has are folded silently. ``epoch`` grows by one with every resume."""

    rid: int
    epoch: int
    frontend: int
    spec: bytes
    delivered: Delivered = ()


class Finish(NamedTuple):
    """The end of an output, as the engine gave it: see ``StepRow``."""

    reason: str
    stop_token: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """What the executor says of itself, for /metrics and /health: plain numbers by name."""

    values: Mapping[str, Any]


Row = tuple[int, int, Sequence[int], Finish | None, Sequence[TokenLogprob] | None]
"""(rid, index, token ids, finish, logprobs)"""

RecordRow = tuple[int, int, Sequence[int], Finish | None, Sequence[bytes] | None]
"""The same with records for the logprobs: see ``logprob_records.py``."""


def cut(values: Any, sizes: Iterable[int]) -> Iterator[Any]:
    """Consecutive slices of the given sizes."""
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


_NONE: Iterator[None] = repeat(None)


class StepRecords:
    """One engine step, or several merged, for one worker: columns, sparse finishes, and logprobs where asked for.

    rids, indexes, counts: one value a row. tokens: the rows' ids one after another, ``sum(counts)`` of them.
    finishes: row number -> Finish. logprobs: row number -> one TokenLogprob per id of that row; where they came over
    the wire, they are records until somebody reads them.
    stamp: CLOCK_MONOTONIC nanoseconds at which the executor shipped the step.
    incarnation: the how-manieth executor of this server sent it, from 0. A worker that has heard of a newer one drops
    what an older one left behind: its tokens come again.
    Lengths are checked when it is built (WireError); ``rows`` and ``record_rows`` are what gives rows out.
    """

    __slots__ = ("opens", "rids", "indexes", "counts", "tokens", "finishes", "logprobs", "stamp", "incarnation")

    def __init__(
        self,
        rids: Sequence[int],
        indexes: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        finishes: Mapping[int, Finish] | None = None,
        logprobs: Mapping[int, Sequence[TokenLogprob]] | None = None,
        opens: Sequence[Open] = (),
        stamp: int = 0,
        incarnation: int = 0,
    ) -> None:
        self.rids, self.indexes, self.counts, self.tokens = rids, indexes, counts, tokens
        self.finishes, self.logprobs = finishes or {}, logprobs or {}
        self.opens, self.stamp, self.incarnation = opens, stamp, incarnation
        self._check()

    @classmethod
    def build(cls, rows: Sequence[StepRow], opens: Sequence[Open] = (), stamp: int = 0) -> StepRecords:
        """Columns of an engine's rows."""
        tokens: list[int] = []
        for row in rows:
            tokens += row.token_ids
        return cls(
            [row.rid for row in rows],
            [row.index for row in rows],
            [len(row.token_ids) for row in rows],
            tokens,
            {i: Finish(r.finish_reason, r.stop_token, r.message) for i, r in enumerate(rows) if r.finish_reason},
            {i: r.logprobs for i, r in enumerate(rows) if r.logprobs is not None},
            opens,
            stamp,
        )

    def _check(self) -> None:
        n = len(self.rids)
        if len(self.indexes) != n or len(self.counts) != n:
            raise WireError(f"index, count: {len(self.indexes)} and {len(self.counts)} values for {n} rows")
        if not (len(self.tokens) == n and all_are(self.counts, 1)) and sum(self.counts) != len(self.tokens):
            raise WireError(f"token: {len(self.tokens)} ids, but count adds up to {sum(self.counts)}")
        if not (self.finishes or self.logprobs):  # most steps
            return
        if not all(0 <= i < n for i in self.finishes):
            raise WireError(f"finish: a row beyond the {n} there are")
        if isinstance(self.logprobs, RecordRows):
            fits = self.logprobs.fits(self.counts)
        else:
            fits = all(0 <= i < n and len(entries) == self.counts[i] for i, entries in self.logprobs.items())
        if not fits:
            raise WireError("logprobs: a row does not have one entry per token")

    def rows(self) -> Iterator[Row]:
        """All rows in order."""
        logprobs = map(self.logprobs.get, range(len(self.rids))) if self.logprobs else _NONE
        return self._with(logprobs)

    def record_rows(self) -> Iterator[RecordRow]:
        """The same for a worker. In the usual step (one token a row) every value comes out of a C iterator."""
        records = RecordRows.of(self.logprobs).by_row(len(self.rids)) if self.logprobs else _NONE
        return self._with(records)

    @property
    def single(self) -> bool:
        """Whether each row has one token, and there is a row."""
        n = len(self.rids)
        return n > 0 and len(self.tokens) == n and all_are(self.counts, 1)

    def some_record_rows(self, numbers: Sequence[int]) -> Iterator[RecordRow]:
        """Those rows alone, of a step that is ``single``."""
        if self.logprobs:
            return map(list(self.record_rows()).__getitem__, numbers)
        rids, indexes, tokens, finish = self.rids, self.indexes, self.tokens, self.finishes.get
        return ((rids[n], indexes[n], (tokens[n],), finish(n), None) for n in numbers)

    def _with(self, logprobs: Iterator[Any]) -> Iterator[Any]:
        n = len(self.rids)
        tokens: Iterable[Sequence[int]] = zip(self.tokens) if self.single else cut(self.tokens, self.counts)
        finishes = map(self.finishes.get, range(n)) if self.finishes else _NONE
        return zip(self.rids, self.indexes, tokens, finishes, logprobs)


@dataclass(frozen=True, slots=True)
class Recall:
    """A new executor asks a worker what it has; see ``Histories``. ``incarnation`` as in StepRecords."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Histories:
    """A worker's answer to ``Recall``: its open requests. ``steps.opens`` names each, with its epoch and without its
    spec; ``steps`` rows bring the ids of its outputs, and how those ended that have. last: nothing follows."""

    worker: int
    steps: StepRecords
    last: bool = True


#: Emission flags. OUTPUT_END: the output's last bytes; REQUEST_END: the request's; FAILED: with REQUEST_END, an error;
#: BODY: the bytes are a whole JSON document, not part of an event stream.
OUTPUT_END, REQUEST_END, FAILED, BODY = 1, 2, 4, 8


EmissionRow = tuple[int, int, int, int, int, bytes]
"""(rid, epoch, index, count, flags, bytes)"""


class Emissions:
    """What a worker made of one or more steps for one front end: a row per output that has something to say.

    counts: how many tokens of the output, from its start, the client has been told of once it has the row's bytes; a
    resume starts there. payload: all rows' bytes, cut by ``sizes``.
    around: None where these are whole. Otherwise they are what stands between two constants of their stream, and here
        is, by number of the row, (head, tail) of each stream whose front end has not been told by this worker yet. Of a
        token's event nine tenths are constant, and every process on the way would copy them.
    stats: a worker's counters, now and then, else None: numbers by name, and reports of histograms (``histogram.py``).
    stamp, sent: CLOCK_MONOTONIC nanoseconds at which the executor shipped the oldest of the steps, and at which the
        worker gave the message away; 0 where nobody has looked at a clock.
    Lengths are checked when built (WireError).
    """

    __slots__ = (
        "worker", "rids", "epochs", "indexes", "counts", "flags", "sizes", "payload", "stats", "stamp", "sent",
        "around",
    )  # fmt: skip

    def __init__(
        self,
        worker: int,
        rids: Sequence[int],
        epochs: Sequence[int],
        indexes: Sequence[int],
        counts: Sequence[int],
        flags: Sequence[int],
        sizes: Sequence[int],
        payload: bytes,
        stats: Mapping[str, Any] | None = None,
        stamp: int = 0,
        sent: int = 0,
        around: Mapping[int, tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.worker, self.rids, self.epochs, self.indexes = worker, rids, epochs, indexes
        self.counts, self.flags, self.sizes, self.payload, self.stats = counts, flags, sizes, payload, stats
        self.stamp, self.sent, self.around = stamp, sent, around
        n = len(rids)
        if not (len(epochs) == len(indexes) == len(counts) == len(flags) == len(sizes) == n):
            raise WireError("emissions: columns of different lengths")
        if sum(sizes) != len(payload):
            raise WireError(f"size: adds up to {sum(sizes)}, but the payload has {len(payload)} bytes")
        if around and not all(0 <= at < n for at in around):
            raise WireError(f"around: a row beyond the {n} there are")

    @classmethod
    def build(cls, worker: int, rows: Sequence[EmissionRow], stats: Mapping[str, Any] | None = None) -> Emissions:
        """Columns of (rid, epoch, index, count, flags, bytes) rows."""
        if not rows:
            return cls(worker, (), (), (), (), (), (), b"", stats)
        # Transposing once in C is cheaper than appending to six lists per row, and columns made so agree with each
        # other.
        made = cls.__new__(cls)
        made.rids, made.epochs, made.indexes, made.counts, made.flags, payloads = zip(*rows)
        made.sizes, made.payload = list(map(len, payloads)), b"".join(payloads)
        made.worker, made.stats = worker, stats
        made.stamp = made.sent = 0
        made.around = None
        return made

    def rows(self) -> Iterator[EmissionRow]:
        """(rid, epoch, index, count, flags, bytes) of every row, in order; the bytes as ``around`` says."""
        return zip(self.rids, self.epochs, self.indexes, self.counts, self.flags, cut(self.payload, self.sizes))


Message = (
    GenerationRequest
    | Abort
    | Release
    | Cancel
    | WorkerJoined
    | WorkerLost
    | FrontendLost
    | Resubmit
    | Synced
    | Rejected
    | StepRecords
    | Recall
    | Histories
    | Emissions
    | Status
)
