"""The wire: every message between processes and its MessagePack encoding. The only file that knows the format.

A frame is one MessagePack map with a key ``t`` that names its kind. Nothing is decoded through an object hook, there is no
pickle, no callable and no class name, so the worst a hostile frame can do is to be refused with ``WireError``.

What changes with every step is columnar: little-endian arrays packed as ``bin``. A row is one output's news in one step.
Rows of a whole batch cost one decode, and ``StepRecords.rows`` gives them out through C iterators, so a usual row costs
tens of nanoseconds. What never changes about a stream (its spec) travels once, in ``Open``, ahead of the first row and in
the same frame or an earlier one; the executor passes it on as bytes it never decodes.

    kind      from -> to              columns (i8, u4, u2, i4, f8 = bytes per value)
    submit    front end -> executor   -
    abort     front end -> executor   -
    release   front end -> executor   -                  the client has everything: forget the request
    cancel    worker    -> executor   -                  [[rid, index], ...]; index -1 is the whole request
    joined    launcher  -> executor   -
    lost      launcher  -> executor   -                  with what the clients of its requests have already
    steps     executor  -> worker     rid i8, index u2, count u2, token i4; logprobs: row u4, value f8, k u2, id i4, alt f8
    emissions worker    -> front end  rid i8, epoch u4, index u2, count u4, flags u1, size u4; one blob cut by size
    status    executor  -> front end  -

A column in which every value is the usual one is left out: index 0, a step's count 1, epoch 0, flags 0. In plain streams
that is half of them, and at 16 rows a frame the columns' fixed cost is half of all.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import msgpack

from executor.engines.base import StepRow, TokenLogprob
from executor.request import GenerationRequest, SamplingParams
from executor.result import Logprob, OutputDelta

MAX_FRAME = 256 << 20
"""Bytes; a larger frame is refused by the socket already (ZMQ_MAXMSGSIZE)."""

MAX_COUNT = 0xFFFF
"""Tokens in one row at most (column ``count`` is u2); a longer history travels as several rows."""

MAX_OUTPUTS = 1 << 16
"""Outputs of one request at most (column ``index`` is u2)."""

MAX_ITEMS = 1 << 20
"""Entries of one array at most: a worker's requests when it is lost, a request's prompts or outputs."""

FINISH_REASONS = frozenset(("stop", "length", "abort", "error"))


class WireError(ValueError):
    """A frame that does not hold what its kind promises; the message names the field."""


# ------------------------------------------------------------------------------------------------------ messages


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
    """A worker ended outputs by itself (stop string, hook, failure): (rid, index) pairs, index -1 for all outputs."""

    outputs: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker listens at ``address``."""

    worker: int
    address: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone. ``delivered``: rid -> per output (tokens whose bytes the client has, whether it has the end)."""

    worker: int
    delivered: Mapping[int, Sequence[tuple[int, bool]]]


@dataclass(frozen=True, slots=True)
class Open:
    """First word about a request to a worker. ``delivered`` as in WorkerLost, empty for a new request; rows that repeat
    what the client has are folded silently. ``epoch`` grows by one with every resume."""

    rid: int
    epoch: int
    frontend: int
    spec: bytes
    delivered: Sequence[tuple[int, bool]] = ()


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


# ------------------------------------------------------------------------------------------------------ columns

_SIZES = {"q": 8, "I": 4, "H": 2, "i": 4, "B": 1, "d": 8}
_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[Any]) -> bytes:
    column = array(code, values)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def _unpack(fields: Mapping[str, Any], name: str, code: str) -> list[Any]:
    try:
        # No copy into an array first: half the cost.
        values: list[Any] = memoryview(fields[name]).cast(code).tolist()  # type: ignore[call-overload]
    except (KeyError, TypeError):
        raise WireError(f"{name}: a column of {_SIZES[code]}-byte values is needed") from None
    if _SWAP:
        column = array(code, values)
        column.byteswap()
        return column.tolist()
    return values


def _pack_unusual(frame: dict[str, Any], name: str, code: str, values: Sequence[int], usual: int) -> None:
    if values.count(usual) != len(values):
        frame[name] = _pack(code, values)


def _unpack_unusual(fields: Mapping[str, Any], name: str, code: str, rows: int, usual: int) -> list[int]:
    return _unpack(fields, name, code) if name in fields else [usual] * rows


class StepRecords:
    """One engine step, or several merged, for one worker: columns, sparse finishes, and logprobs where asked for.

    rids, indexes, counts: one value a row. tokens: the rows' ids one after another, ``sum(counts)`` of them.
    finishes: row number -> Finish. logprobs: row number -> one TokenLogprob per id of that row.
    stamp: CLOCK_MONOTONIC nanoseconds at which the executor shipped the step.
    Lengths are checked when it is built (WireError); ``rows`` is the one place that gives rows out.
    """

    __slots__ = ("opens", "rids", "indexes", "counts", "tokens", "finishes", "logprobs", "stamp")

    def __init__(
        self,
        rids: list[int],
        indexes: list[int],
        counts: list[int],
        tokens: list[int],
        finishes: Mapping[int, Finish] | None = None,
        logprobs: Mapping[int, Sequence[TokenLogprob]] | None = None,
        opens: Sequence[Open] = (),
        stamp: int = 0,
    ) -> None:
        self.rids, self.indexes, self.counts, self.tokens = rids, indexes, counts, tokens
        self.finishes, self.logprobs = finishes or {}, logprobs or {}
        self.opens, self.stamp = opens, stamp
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
        if sum(self.counts) != len(self.tokens):
            raise WireError(f"token: {len(self.tokens)} ids, but count adds up to {sum(self.counts)}")
        for i in self.finishes:
            if not 0 <= i < n:
                raise WireError(f"finish: row {i} of {n}")
        for i, entries in self.logprobs.items():
            if not 0 <= i < n or len(entries) != self.counts[i]:
                raise WireError(f"logprobs: row {i} does not have one entry per token")

    def rows(self) -> Iterator[Row]:
        """All rows in order. In the usual step (one token a row) every value comes out of a C iterator."""
        n = len(self.rids)
        finishes = map(self.finishes.get, range(n)) if self.finishes else repeat(None)
        logprobs = map(self.logprobs.get, range(n)) if self.logprobs else repeat(None)
        single = len(self.tokens) == n and (not n or min(self.counts) == 1)
        tokens: Iterable[Sequence[int]] = zip(self.tokens) if single else self._token_slices()
        return zip(self.rids, self.indexes, tokens, finishes, logprobs)

    def _token_slices(self) -> Iterator[Sequence[int]]:
        start = 0
        for count in self.counts:
            yield self.tokens[start : start + count]
            start += count


#: Emission flags. OUTPUT_END: the output's last bytes; REQUEST_END: the request's; FAILED: with REQUEST_END, an error;
#: BODY: the bytes are a whole JSON document, not part of an event stream.
OUTPUT_END, REQUEST_END, FAILED, BODY = 1, 2, 4, 8


EmissionRow = tuple[int, int, int, int, int, bytes]
"""(rid, epoch, index, count, flags, bytes)"""


class Emissions:
    """What a worker made of one or more steps for one front end: a row per output that has something to say.

    counts: how many tokens of the output, from its start, the client has been told of once it has the row's bytes; a
    resume starts there. payload: all rows' bytes, cut by ``sizes``.
    stats: a worker's counters, now and then, else None. Lengths are checked when built (WireError).
    """

    __slots__ = ("worker", "rids", "epochs", "indexes", "counts", "flags", "sizes", "payload", "stats")

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
    ) -> None:
        self.worker, self.rids, self.epochs, self.indexes = worker, rids, epochs, indexes
        self.counts, self.flags, self.sizes, self.payload, self.stats = counts, flags, sizes, payload, stats
        n = len(rids)
        if not (len(epochs) == len(indexes) == len(counts) == len(flags) == len(sizes) == n):
            raise WireError("emissions: columns of different lengths")
        if sum(sizes) != len(payload):
            raise WireError(f"size: adds up to {sum(sizes)}, but the payload has {len(payload)} bytes")

    @classmethod
    def build(cls, worker: int, rows: Sequence[EmissionRow], stats: Mapping[str, Any] | None = None) -> Emissions:
        """Columns of (rid, epoch, index, count, flags, bytes) rows."""
        if not rows:
            return cls(worker, (), (), (), (), (), (), b"", stats)
        # Transposing once in C is cheaper than appending to six lists per row, and columns made so agree with each other.
        made = cls.__new__(cls)
        made.rids, made.epochs, made.indexes, made.counts, made.flags, payloads = zip(*rows)
        made.sizes, made.payload = list(map(len, payloads)), b"".join(payloads)
        made.worker, made.stats = worker, stats
        return made

    def rows(self) -> Iterator[EmissionRow]:
        """(rid, epoch, index, count, flags, bytes) of every row, in order."""
        return zip(self.rids, self.epochs, self.indexes, self.counts, self.flags, self._cut())

    def _cut(self) -> Iterator[bytes]:
        start, payload = 0, self.payload
        for size in self.sizes:
            yield payload[start : start + size]
            start += size


Message = (
    GenerationRequest | Abort | Release | Cancel | WorkerJoined | WorkerLost | StepRecords | Emissions | Status
)


# ------------------------------------------------------------------------------------------------------ field checks


def _int(fields: Mapping[str, Any], name: str, low: int = 0, high: int = 2**63 - 1) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{name}: an integer from {low} to {high} is needed")
    return value


def _typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise WireError(f"{name}: {kind.__name__} is needed, not {type(value).__name__}")
    return value


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in value):
        raise WireError(f"{name}: a list of token ids is needed")
    return value


def _pairs(value: Any, name: str, first: type, second: type) -> list[tuple[Any, Any]]:
    if not isinstance(value, list):
        raise WireError(f"{name}: a list of pairs is needed")
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not first or type(pair[1]) is not second:
            raise WireError(f"{name}: pairs of {first.__name__} and {second.__name__} are needed")
    return [(pair[0], pair[1]) for pair in value]


def _delivered(value: Any) -> list[tuple[int, bool]]:
    pairs = _pairs(value, "delivered", int, bool)
    if len(pairs) > MAX_OUTPUTS or any(not 0 <= count < 2**32 for count, _ in pairs):
        raise WireError("delivered: a count is out of range, or there are more outputs than a request can have")
    return pairs


def _numbers(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = _typed(fields, name, dict)
    if not all(isinstance(key, str) and isinstance(value, (int, float)) for key, value in values.items()):
        raise WireError(f"{name}: a map of numbers by name is needed")
    return dict(values)


# ------------------------------------------------------------------------------------------------------ one kind each


def _encode_submit(m: GenerationRequest) -> dict[str, Any]:
    sampling = m.sampling.changed()
    if "logit_bias" in sampling:
        sampling["logit_bias"] = [[k, float(v)] for k, v in m.sampling.logit_bias.items()]
    return {
        "t": "submit", "rid": m.rid, "prompts": [_pack("i", p) for p in m.prompts], "sampling": sampling,
        "spec": m.spec, "n": m.n, "frontend": m.frontend,
    }  # fmt: skip


_NUMBERS = {
    "max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int,
    "ignore_eos": bool, "min_tokens": int, "presence_penalty": float, "frequency_penalty": float,
    "repetition_penalty": float, "logprobs": int,
}  # fmt: skip


def _decode_sampling(fields: Mapping[Any, Any]) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "stop_token_ids":
            values[name] = tuple(_ids(value, name))
        elif name == "logit_bias":
            values[name] = dict(_pairs(value, name, int, float))
        elif (kind := _NUMBERS.get(name)) is None:
            raise WireError(f"sampling: unknown field {str(name)[:40]!r}")
        elif kind is float and type(value) in (int, float):
            values[name] = float(value)
        elif type(value) is kind:
            values[name] = value
        else:
            raise WireError(f"sampling.{name}: {kind.__name__} is needed")
    return SamplingParams(**values)


def _decode_submit(f: Mapping[str, Any]) -> GenerationRequest:
    raw = _typed(f, "prompts", list)
    n = _int(f, "n", 1, MAX_OUTPUTS)
    if not raw or len(raw) * n > MAX_OUTPUTS:
        raise WireError(f"prompts: {len(raw)} prompts with n={n} make no valid number of outputs")
    prompts = [_unpack({"prompts": p}, "prompts", "i") for p in raw]
    sampling = _decode_sampling(_typed(f, "sampling", dict))
    return GenerationRequest(_int(f, "rid"), prompts, sampling, _typed(f, "spec", bytes), n, _int(f, "frontend"))


def _encode_lost(m: WorkerLost) -> dict[str, Any]:
    delivered = [[rid, [[count, end] for count, end in outputs]] for rid, outputs in m.delivered.items()]
    return {"t": "lost", "worker": m.worker, "delivered": delivered}


def _decode_lost(f: Mapping[str, Any]) -> WorkerLost:
    items = _pairs(f.get("delivered"), "delivered", int, list)
    return WorkerLost(_int(f, "worker"), {rid: _delivered(outputs) for rid, outputs in items})


def _encode_steps(m: StepRecords) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "t": "steps", "stamp": m.stamp, "rid": _pack("q", m.rids), "token": _pack("i", m.tokens)
    }  # fmt: skip
    _pack_unusual(frame, "index", "H", m.indexes, 0)
    _pack_unusual(frame, "count", "H", m.counts, 1)
    if m.finishes:
        frame["finish"] = [[row, f.reason, f.stop_token, f.message] for row, f in m.finishes.items()]
    if m.logprobs:
        frame |= _encode_logprobs(m.logprobs)
    if m.opens:
        frame["open"] = [
            [o.rid, o.epoch, o.frontend, o.spec, [[count, end] for count, end in o.delivered]] for o in m.opens
        ]
    return frame


def _encode_logprobs(rows: Mapping[int, Sequence[TokenLogprob]]) -> dict[str, bytes]:
    entries = [entry for row in rows.values() for entry in row]
    tops = [pair for entry in entries for pair in entry.top]
    return {
        "lp_row": _pack("I", rows), "lp_n": _pack("H", map(len, rows.values())),
        "lp_value": _pack("d", [e.logprob for e in entries]), "lp_k": _pack("H", [len(e.top) for e in entries]),
        "lp_id": _pack("i", [pair[0] for pair in tops]), "lp_alt": _pack("d", [pair[1] for pair in tops]),
    }  # fmt: skip


def _decode_logprobs(f: Mapping[str, Any]) -> dict[int, list[TokenLogprob]]:
    rows, sizes = _unpack(f, "lp_row", "I"), _unpack(f, "lp_n", "H")
    values, ks = _unpack(f, "lp_value", "d"), _unpack(f, "lp_k", "H")
    ids, alts = _unpack(f, "lp_id", "i"), _unpack(f, "lp_alt", "d")
    if len(rows) != len(sizes) or sum(sizes) != len(values) or len(values) != len(ks) or sum(ks) != len(ids):
        raise WireError("logprobs: columns of different lengths")
    if len(ids) != len(alts) or len(set(rows)) != len(rows):
        raise WireError("logprobs: alternatives of different lengths, or a row twice")
    pairs, entries = iter(zip(ids, alts)), []
    for value, k in zip(values, ks):
        entries.append(TokenLogprob(value, tuple(next(pairs) for _ in range(k)) if k else ()))
    cut = iter(entries)
    return {row: [next(cut) for _ in range(size)] for row, size in zip(rows, sizes)}


def _decode_finishes(value: Any) -> dict[int, Finish]:
    if not isinstance(value, list):
        raise WireError("finish: a list is needed")
    finishes: dict[int, Finish] = {}
    for item in value:
        if not isinstance(item, list) or [type(v) for v in item] != [int, str, bool, str]:
            raise WireError("finish: [row, reason, stop_token, message] is needed")
        if item[1] not in FINISH_REASONS or item[0] in finishes:
            raise WireError(f"finish: unknown reason {item[1][:40]!r}, or row {item[0]} twice")
        finishes[item[0]] = Finish(*item[1:])
    return finishes


def _decode_open(item: Any) -> Open:
    if not isinstance(item, list) or [type(v) for v in item] != [int, int, int, bytes, list]:
        raise WireError("open: [rid, epoch, frontend, spec, delivered] is needed")
    rid, epoch, frontend, spec, delivered = item
    # Both come back in the columns of an emission: what does not fit there must not come in.
    if not (0 <= rid < 2**63 and 0 <= epoch < 2**32 and 0 <= frontend < 2**31):
        raise WireError("open: rid, epoch or frontend is out of range")
    return Open(rid, epoch, frontend, spec, _delivered(delivered))


def _decode_steps(f: Mapping[str, Any]) -> StepRecords:
    opens = [_decode_open(item) for item in _typed(f, "open", list)] if "open" in f else []
    rids = _unpack(f, "rid", "q")
    return StepRecords(
        rids,
        _unpack_unusual(f, "index", "H", len(rids), 0),
        _unpack_unusual(f, "count", "H", len(rids), 1),
        _unpack(f, "token", "i"),
        _decode_finishes(f["finish"]) if "finish" in f else None,
        _decode_logprobs(f) if "lp_row" in f else None,
        opens,
        _int(f, "stamp"),
    )


def _encode_emissions(m: Emissions) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "t": "emissions", "worker": m.worker, "rid": _pack("q", m.rids), "count": _pack("I", m.counts),
        "size": _pack("I", m.sizes), "payload": m.payload,
    }  # fmt: skip
    _pack_unusual(frame, "epoch", "I", m.epochs, 0)
    _pack_unusual(frame, "index", "H", m.indexes, 0)
    _pack_unusual(frame, "flags", "B", m.flags, 0)
    if m.stats is not None:
        frame["stats"] = dict(m.stats)
    return frame


def _decode_emissions(f: Mapping[str, Any]) -> Emissions:
    rids = _unpack(f, "rid", "q")
    return Emissions(
        _int(f, "worker"), rids, _unpack_unusual(f, "epoch", "I", len(rids), 0),
        _unpack_unusual(f, "index", "H", len(rids), 0), _unpack(f, "count", "I"),
        _unpack_unusual(f, "flags", "B", len(rids), 0), _unpack(f, "size", "I"), _typed(f, "payload", bytes),
        _numbers(f, "stats") if "stats" in f else None,
    )  # fmt: skip


_ENCODERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    GenerationRequest: _encode_submit,
    Abort: lambda m: {"t": "abort", "rid": m.rid},
    Release: lambda m: {"t": "release", "rid": m.rid},
    Cancel: lambda m: {"t": "cancel", "outputs": [[rid, index] for rid, index in m.outputs]},
    WorkerJoined: lambda m: {"t": "joined", "worker": m.worker, "address": m.address},
    WorkerLost: _encode_lost,
    StepRecords: _encode_steps,
    Emissions: _encode_emissions,
    Status: lambda m: {"t": "status", "values": dict(m.values)},
}

_DECODERS: dict[str, Callable[[Mapping[str, Any]], Message]] = {
    "submit": _decode_submit,
    "abort": lambda f: Abort(_int(f, "rid")),
    "release": lambda f: Release(_int(f, "rid")),
    "cancel": lambda f: Cancel(_pairs(f.get("outputs"), "outputs", int, int)),
    "joined": lambda f: WorkerJoined(_int(f, "worker"), _typed(f, "address", str)),
    "lost": _decode_lost,
    "steps": _decode_steps,
    "emissions": _decode_emissions,
    "status": lambda f: Status(_numbers(f, "values")),
}


def encode(message: Message) -> bytes:
    """The frame of a message."""
    frame: bytes = msgpack.packb(_ENCODERS[type(message)](message))
    return frame


_SMALL_FRAME = 1 << 18
"""Bytes up to which a frame of nothing but containers costs some 40 ms and 20 MB: not worth counting them."""

_MAX_CONTAINERS = 1 << 19
MAX_NAMES = 1 << 10
"""Keys of one map at most."""


def _budget() -> dict[str, Callable[[Any], Any]]:
    """Hooks that only count. An empty list is one byte on the wire and 64 in memory, so 16 MB of them would take a process
    20 seconds and 1.2 GB; what is large and legitimate is made of columns, specs and prompts, which are bytes."""
    left = itertools.count(-_MAX_CONTAINERS)

    def counted(container: Any) -> Any:
        if next(left) >= 0:
            raise ValueError(f"more than {_MAX_CONTAINERS} containers")
        return container

    return {"list_hook": counted, "object_hook": counted}


def decode(frame: bytes) -> Message:
    """The message of a frame; WireError for anything that is not one, never another exception."""
    if len(frame) > MAX_FRAME:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME}")
    try:
        hooks = _budget() if len(frame) > _SMALL_FRAME else {}
        fields = msgpack.unpackb(frame, max_array_len=MAX_ITEMS, max_map_len=MAX_NAMES, **hooks)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise WireError(f"not MessagePack: {error}") from None
    if not isinstance(fields, dict):
        raise WireError(f"a map is needed, not {type(fields).__name__}")
    kind = fields.get("t")
    decoder = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise WireError(f"t: unknown kind {str(kind)[:40]!r}")
    return decoder(fields)


# ------------------------------------------------------------------------------------------------------ deltas


def encode_delta(delta: OutputDelta) -> bytes:
    """One step of one output for a handle. Payloads joined on the way still read as their steps."""
    logprobs = [[p.token_id, p.logprob, [list(pair) for pair in p.top], p.piece] for p in delta.logprobs]
    fields = [delta.index, list(delta.token_ids), delta.text, logprobs, delta.finish_reason, delta.stop_reason]
    payload: bytes = msgpack.packb(fields)
    return payload


def encode_failure(message: str) -> bytes:
    """The end of a failed request for a handle."""
    payload: bytes = msgpack.packb(message)
    return payload


def decode_deltas(payload: bytes) -> Iterator[OutputDelta | str]:
    """The steps of a payload in order; a str is the reason why the request failed. WireError for anything else."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(payload), 1), max_array_len=MAX_ITEMS)
    unpacker.feed(payload)
    read = 0
    while read < len(payload):
        try:
            item = unpacker.unpack()
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise WireError(f"delta: not MessagePack: {error}") from None
        read = unpacker.tell()
        yield item if isinstance(item, str) else _delta(item)


def _delta(item: Any) -> OutputDelta:
    if not isinstance(item, list) or len(item) != 6:
        raise WireError("delta: a list of six values or a message is needed")
    index, ids, text, logprobs, finish_reason, stop_reason = item
    if type(index) is not int or not 0 <= index < MAX_OUTPUTS or not isinstance(text, str):
        raise WireError("delta: index and text are needed")
    if not isinstance(finish_reason, str | None) or not isinstance(stop_reason, str | int | None):
        raise WireError("delta: finish_reason is a string or nil, stop_reason an integer too")
    if not isinstance(logprobs, list):
        raise WireError("delta: a list of log-probabilities is needed")
    return OutputDelta(index, _ids(ids, "delta"), text, [_logprob(e) for e in logprobs], finish_reason, stop_reason)


def _logprob(item: Any) -> Logprob:
    if not isinstance(item, list) or [type(v) for v in item] != [int, float, list, str]:
        raise WireError("delta: [id, value, alternatives, piece] is needed")
    return Logprob(item[0], item[1], _pairs(item[2], "delta", int, float), item[3])
