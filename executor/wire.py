"""The wire: every message between processes and its MessagePack encoding. The only file that knows the format.

A frame is one MessagePack map with a key ``t`` that names its kind. Nothing is decoded through an object hook, there is
no pickle, no callable and no class name, so the worst a hostile frame can do is to be refused with ``WireError``.

What changes with every step is columnar: little-endian arrays packed as ``bin``. A row is one output's news in one
step. Rows of a whole batch cost one decode, and ``StepRecords.rows`` gives them out through C iterators, so a usual row
costs tens of nanoseconds. What never changes about a stream (its spec) travels once, in ``Open``, ahead of the first
row and in the same frame or an earlier one; the executor passes it on as bytes it never decodes.

    kind      from -> to              columns (i8, u4, u2, i4, f8 = bytes per value)
    submit    front end -> executor   -
    abort     front end -> executor   -
    release   front end -> executor   -                  the client has everything: forget the request
    cancel    worker    -> executor   -                  [[rid, index], ...]; index -1 is the whole request
    joined    launcher  -> executor   -
    lost      launcher  -> executor   -                  with what the clients of its requests have already
    steps     executor  -> worker     rid i8, index u2, count u2, token i4; logprobs: lp records (logprob_records.py),
                                      lp_row u4, lp_n u2 records of that row, lp_k u4 alternatives of a record
    emissions worker    -> front end  rid i8, epoch u4, index u2, count u4, flags u1, size u4; one blob cut by size
    status    executor  -> front end  -
    rejected  executor  -> front end  -
    gone      -> executor             -                  a front end
    resubmit  front end -> executor   -                  a submit, with what the client has already
    synced    front end -> executor   -
    recall    executor  -> worker     -
    histories worker    -> executor   as steps

A column in which every value is the usual one is left out: index 0, a step's count 1, epoch 0, flags 0; lp_row where
every row has log-probabilities, lp_n 1, lp_k where all are equal. In plain streams that is half of them, and at 16 rows
a frame the columns' fixed cost is half of all. ``stamp`` and ``sent`` of emissions are left out where they are 0.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgpack

from executor.columns import KnownRids, pack, pack_rids, pack_unusual, unpack, unpack_unusual
from executor.engines.base import TokenLogprob
from executor.histogram import is_report
from executor.logprob_records import RecordRows, alternatives, cut_equal_records, cut_records
from executor.messages import (
    FINISH_REASONS,
    MAX_EPOCH,
    MAX_FRONTEND,
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    REJECTIONS,
    Abort,
    Cancel,
    Emissions,
    Finish,
    FrontendLost,
    Histories,
    Message,
    Open,
    Recall,
    Rejected,
    Release,
    Resubmit,
    Status,
    StepRecords,
    Synced,
    WireError,
    WorkerJoined,
    WorkerLost,
)
from executor.request import GenerationRequest, SamplingParams
from executor.result import Logprob, OutputDelta

#: Bytes; a larger frame is refused by the socket already (ZMQ_MAXMSGSIZE).
MAX_FRAME = 256 << 20
#: Entries of one array, keys of one map, arrays and maps of one frame. The first is what the largest request needs, or
#: a worker with very many of them when it is lost.
MAX_ITEMS, MAX_NAMES, MAX_CONTAINERS = 1 << 20, 1 << 10, 1 << 20

# ------------------------------------------------------------------------------------------------------ fields


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


def _stats(fields: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Numbers by name, and among them histograms, which are lists."""
    values = _typed(fields, field, dict)
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    if not all(isinstance(name, str) and is_report(value) for name, value in lists.items()):
        raise WireError(f"{field}: a histogram is its sum and a count for each of its buckets")
    _numbers({field: {name: value for name, value in values.items() if name not in lists}}, field)
    return dict(values)


# ------------------------------------------------------------------------------------------------------ one kind each


def _encode_submit(m: GenerationRequest) -> dict[str, Any]:
    sampling = m.sampling.changed()
    if "logit_bias" in sampling:
        sampling["logit_bias"] = [[k, float(v)] for k, v in m.sampling.logit_bias.items()]
    return {
        "t": "submit", "rid": m.rid, "prompts": [pack("i", p) for p in m.prompts], "sampling": sampling,
        "spec": m.spec, "n": m.n, "frontend": m.frontend,
    }  # fmt: skip


_NUMBERS: dict[str, type[Any]] = {
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
        elif type(value) is not kind and not (kind is float and type(value) is int):
            raise WireError(f"sampling.{name}: {kind.__name__} is needed")
        else:
            values[name] = kind(value)
    if not 0 <= (values.get("logprobs") or 0) <= MAX_LOGPROBS:
        raise WireError(f"sampling.logprobs: 0 to {MAX_LOGPROBS} are possible")
    return SamplingParams(**values)


def _decode_submit(f: Mapping[str, Any]) -> GenerationRequest:
    raw = _typed(f, "prompts", list)
    n = _int(f, "n", 1, MAX_OUTPUTS)
    if not raw or len(raw) * n > MAX_OUTPUTS:
        raise WireError(f"prompts: {len(raw)} prompts with n={n} make no valid number of outputs")
    prompts = [unpack({"prompts": p}, "prompts", "i") for p in raw]
    sampling = _decode_sampling(_typed(f, "sampling", dict))
    # What a worker is told of a request must fit an Open: one that is refused takes the rows of others with it.
    frontend = _int(f, "frontend", 0, MAX_FRONTEND)
    return GenerationRequest(_int(f, "rid"), prompts, sampling, _typed(f, "spec", bytes), n, frontend)


def _encode_lost(m: WorkerLost) -> dict[str, Any]:
    delivered = [[rid, [[count, end] for count, end in outputs]] for rid, outputs in m.delivered.items()]
    return {
        "t": "lost", "worker": m.worker, "delivered": delivered, "culprit": m.culprit, "frontend": m.frontend,
    }  # fmt: skip


def _decode_lost(f: Mapping[str, Any]) -> WorkerLost:
    items = _pairs(f.get("delivered"), "delivered", int, list)
    delivered = {rid: _delivered(outputs) for rid, outputs in items}
    return WorkerLost(_int(f, "worker"), delivered, _int(f, "culprit", -1), _int(f, "frontend", 0, MAX_FRONTEND))


def _encode_resubmit(m: Resubmit) -> dict[str, Any]:
    delivered = [[count, end] for count, end in m.delivered]
    return {"t": "resubmit", "request": _encode_submit(m.request), "delivered": delivered, "epoch": m.epoch}


def _decode_resubmit(f: Mapping[str, Any]) -> Resubmit:
    request = _decode_submit(_typed(f, "request", dict))
    delivered = _delivered(f.get("delivered"))
    if len(delivered) != request.num_outputs:
        raise WireError(f"delivered: {len(delivered)} entries for {request.num_outputs} outputs")
    return Resubmit(request, delivered, _int(f, "epoch", 0, MAX_EPOCH))


def _decode_rejected(f: Mapping[str, Any]) -> Rejected:
    reason = f.get("reason")
    if not isinstance(reason, str) or reason not in REJECTIONS:
        raise WireError("reason: none that is known")
    return Rejected(_int(f, "rid"), reason)


def _decode_histories(f: Mapping[str, Any]) -> Histories:
    return Histories(_int(f, "worker"), _decode_steps(f, KnownRids()), _typed(f, "last", bool))


def _encode_steps(m: StepRecords) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "t": "steps", "stamp": m.stamp, "rid": pack_rids(m.rids), "token": pack("i", m.tokens)
    }  # fmt: skip
    pack_unusual(frame, "index", "H", m.indexes, 0)
    pack_unusual(frame, "count", "H", m.counts, 1)
    if m.incarnation:
        frame["incarnation"] = m.incarnation
    if m.finishes:
        frame["finish"] = [[row, f.reason, f.stop_token, f.message] for row, f in m.finishes.items()]
    if m.logprobs:
        frame |= _encode_logprobs(m.logprobs, len(m.rids))
    if m.opens:
        frame["open"] = [
            [o.rid, o.epoch, o.frontend, o.spec, [[count, end] for count, end in o.delivered]] for o in m.opens
        ]
    return frame


def _encode_logprobs(entries: Mapping[int, Sequence[TokenLogprob]], rows: int) -> dict[str, bytes]:
    logprobs = RecordRows.of(entries)
    frame: dict[str, bytes] = {"lp": b"".join(logprobs.records)}
    if logprobs.rows != range(rows):
        frame["lp_row"] = pack("I", logprobs.rows)
    pack_unusual(frame, "lp_n", "H", logprobs.sizes, 1)
    if len(set(map(len, logprobs.records))) > 1:
        frame["lp_k"] = pack("I", alternatives(logprobs.records))
    return frame


def _decode_logprobs(f: Mapping[str, Any], count: int) -> RecordRows:
    """count: rows of the step."""
    rows = unpack(f, "lp_row", "I") if "lp_row" in f else range(count)
    sizes = unpack_unusual(f, "lp_n", "H", len(rows), 1)
    if len(rows) != len(sizes) or (type(rows) is list and len(set(rows)) != len(rows)):
        raise WireError("logprobs: columns of different lengths, or a row twice")
    blob, ks = _typed(f, "lp", bytes), unpack(f, "lp_k", "I") if "lp_k" in f else None
    number = sum(sizes)
    if ks is not None and len(ks) != number:
        raise WireError(f"logprobs: {len(ks)} values of lp_k for {number} records")
    try:
        return RecordRows(rows, sizes, cut_equal_records(blob, number) if ks is None else cut_records(blob, ks))
    except ValueError as error:
        raise WireError(f"logprobs: {error}") from None


def _decode_finishes(value: Any) -> dict[int, Finish]:
    if not isinstance(value, list):
        raise WireError("finish: a list is needed")
    finishes: dict[int, Finish] = {}
    for item in value:
        typed = isinstance(item, list) and [type(v) for v in item] == [int, str, bool, str]
        if not typed or item[1] not in FINISH_REASONS or item[0] in finishes:
            raise WireError("finish: [row, known reason, stop_token, message] is needed, and no row twice")
        finishes[item[0]] = Finish(*item[1:])
    return finishes


def _decode_open(item: Any) -> Open:
    if not isinstance(item, list) or [type(v) for v in item] != [int, int, int, bytes, list]:
        raise WireError("open: [rid, epoch, frontend, spec, delivered] is needed")
    rid, epoch, frontend, spec, delivered = item
    # Both come back in the columns of an emission: what does not fit there must not come in.
    if not (0 <= rid < 2**63 and 0 <= epoch <= MAX_EPOCH and 0 <= frontend <= MAX_FRONTEND):
        raise WireError("open: rid, epoch or frontend is out of range")
    return Open(rid, epoch, frontend, spec, _delivered(delivered))


def _decode_steps(f: Mapping[str, Any], known: KnownRids) -> StepRecords:
    opens = [_decode_open(item) for item in _typed(f, "open", list)] if "open" in f else []
    rids = known.unpack(f)
    return StepRecords(
        rids,
        unpack_unusual(f, "index", "H", len(rids), 0),
        unpack_unusual(f, "count", "H", len(rids), 1),
        unpack(f, "token", "i"),
        _decode_finishes(f["finish"]) if "finish" in f else None,
        _decode_logprobs(f, len(rids)) if "lp" in f else None,
        opens,
        _int(f, "stamp"),
        _int(f, "incarnation") if "incarnation" in f else 0,
    )


def _encode_emissions(m: Emissions) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "t": "emissions", "worker": m.worker, "rid": pack_rids(m.rids), "count": pack("I", m.counts),
        "size": pack("I", m.sizes), "payload": m.payload,
    }  # fmt: skip
    pack_unusual(frame, "epoch", "I", m.epochs, 0)
    pack_unusual(frame, "index", "H", m.indexes, 0)
    pack_unusual(frame, "flags", "B", m.flags, 0)
    if m.stats is not None:
        frame["stats"] = dict(m.stats)
    if m.stamp:
        frame["stamp"] = m.stamp
    if m.sent:
        frame["sent"] = m.sent
    if m.around is not None:
        frame["around"] = [[at, head, tail] for at, (head, tail) in m.around.items()]
    return frame


def _decode_emissions(f: Mapping[str, Any], known: KnownRids) -> Emissions:
    worker = _int(f, "worker")
    rids = known.unpack(f, worker)
    return Emissions(
        worker, rids, unpack_unusual(f, "epoch", "I", len(rids), 0),
        unpack_unusual(f, "index", "H", len(rids), 0), unpack(f, "count", "I"),
        unpack_unusual(f, "flags", "B", len(rids), 0), unpack(f, "size", "I"), _typed(f, "payload", bytes),
        _stats(f, "stats") if "stats" in f else None, _int(f, "stamp") if "stamp" in f else 0,
        _int(f, "sent") if "sent" in f else 0, _decode_around(f["around"]) if "around" in f else None,
    )  # fmt: skip


def _decode_around(value: Any) -> dict[int, tuple[bytes, bytes]]:
    if not isinstance(value, list):
        raise WireError("around: a list is needed")
    for item in value:
        if not isinstance(item, list) or [type(part) for part in item] != [int, bytes, bytes]:
            raise WireError("around: [row, head, tail] is needed")
    return {at: (head, tail) for at, head, tail in value}


_ENCODERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    GenerationRequest: _encode_submit,
    Abort: lambda m: {"t": "abort", "rid": m.rid},
    Release: lambda m: {"t": "release", "rid": m.rid},
    Cancel: lambda m: {"t": "cancel", "worker": m.worker, "outputs": [[rid, index] for rid, index in m.outputs]},
    WorkerJoined: lambda m: {"t": "joined", "worker": m.worker, "address": m.address, "frontend": m.frontend},
    WorkerLost: _encode_lost,
    StepRecords: _encode_steps,
    Emissions: _encode_emissions,
    Status: lambda m: {"t": "status", "values": dict(m.values)},
    Rejected: lambda m: {"t": "rejected", "rid": m.rid, "reason": m.reason},
    FrontendLost: lambda m: {"t": "gone", "frontend": m.frontend},
    Resubmit: _encode_resubmit,
    Synced: lambda m: {"t": "synced", "frontend": m.frontend},
    Recall: lambda m: {"t": "recall", "incarnation": m.incarnation},
    Histories: lambda m: _encode_steps(m.steps) | {"t": "histories", "worker": m.worker, "last": m.last},
}

_DECODERS: dict[str, Callable[[Mapping[str, Any]], Message]] = {
    "submit": _decode_submit,
    "abort": lambda f: Abort(_int(f, "rid")),
    "release": lambda f: Release(_int(f, "rid")),
    "cancel": lambda f: Cancel(_int(f, "worker"), _pairs(f.get("outputs"), "outputs", int, int)),
    "joined": lambda f: WorkerJoined(
        _int(f, "worker"), _typed(f, "address", str), _int(f, "frontend", 0, MAX_FRONTEND)
    ),
    "lost": _decode_lost,
    "status": lambda f: Status(_stats(f, "values")),
    "rejected": _decode_rejected,
    "gone": lambda f: FrontendLost(_int(f, "frontend")),
    "resubmit": _decode_resubmit,
    "synced": lambda f: Synced(_int(f, "frontend")),
    "recall": lambda f: Recall(_int(f, "incarnation")),
    "histories": _decode_histories,
}


#: The kinds that come with every step.
_STEP_DECODERS: dict[str, Callable[[Mapping[str, Any], KnownRids], Message]] = {
    "steps": _decode_steps,
    "emissions": _decode_emissions,
}


def encode(message: Message) -> bytes:
    """The frame of a message."""
    frame: bytes = msgpack.packb(_ENCODERS[type(message)](message))
    return frame


def _budget() -> dict[str, Callable[[Any], Any]]:
    """Hooks that only count. An empty list is one byte on the wire and 64 in memory: 16 MB of them took 20 s and 1.2
    GB."""
    left = itertools.count(-MAX_CONTAINERS)

    def counted(container: Any) -> Any:
        if next(left) >= 0:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    return {"list_hook": counted, "object_hook": counted}


def decode(frame: bytes, known: KnownRids | None = None) -> Message:
    """The message of a frame; WireError for anything that is not one, never another exception. known: what earlier
    frames of the same socket have brought."""
    if len(frame) > MAX_FRAME:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME}")
    try:
        if len(frame) <= MAX_CONTAINERS:  # too short to hold more, so nothing has to be counted
            fields = msgpack.unpackb(frame)
        else:
            fields = msgpack.unpackb(frame, max_array_len=MAX_ITEMS, max_map_len=MAX_NAMES, **_budget())
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, MemoryError) as error:
        raise WireError(f"not MessagePack: {error}") from None
    if not isinstance(fields, dict):
        raise WireError(f"a map is needed, not {type(fields).__name__}")
    kind = fields.get("t")
    if isinstance(kind, str):
        if (step_decoder := _STEP_DECODERS.get(kind)) is not None:
            return step_decoder(fields, KnownRids() if known is None else known)
        if (decoder := _DECODERS.get(kind)) is not None:
            return decoder(fields)
    raise WireError(f"t: unknown kind {str(kind)[:40]!r}")


class FrameReader:
    """Decodes what arrives at one process. refused: frames that were none, each told to ``logger``."""

    def __init__(self, logger: logging.Logger) -> None:
        self.refused = 0
        self._logger = logger
        self._known = KnownRids()

    def read(self, frame: bytes) -> Message | None:
        """The message of a frame, None for one that is refused."""
        try:
            return decode(frame, self._known)
        except WireError as error:
            self.refuse("a frame of %d bytes: %s", len(frame), error)
            return None

    def refuse(self, what: str, *args: object) -> None:
        """Count and log something that is not taken."""
        self.refused += 1
        self._logger.warning("refused " + what, *args)


# ------------------------------------------------------------------------------------------------------ deltas


def encode_delta(delta: OutputDelta) -> bytes:
    """One step of one output for a handle. Payloads joined on the way still read as their steps."""
    logprobs = [[p.token_id, p.logprob, [list(pair) for pair in p.top], p.piece] for p in delta.logprobs]
    fields = [delta.index, list(delta.token_ids), delta.text, logprobs, delta.finish_reason, delta.stop_reason]
    return bytes(msgpack.packb(fields))


def encode_failure(message: str) -> bytes:
    """The end of a failed request for a handle."""
    return bytes(msgpack.packb(message))


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
    if not isinstance(item, list) or [type(v) for v in item[:4]] != [int, list, str, list] or len(item) != 6:
        raise WireError("delta: [index, ids, text, logprobs, finish_reason, stop_reason] or a message is needed")
    index, ids, text, logprobs, finish_reason, stop_reason = item
    known = isinstance(finish_reason, str | None) and isinstance(stop_reason, str | int | None)
    if not known or not 0 <= index < MAX_OUTPUTS:
        raise WireError("delta: index, finish_reason or stop_reason is none")
    return OutputDelta(index, _ids(ids, "delta"), text, [_logprob(e) for e in logprobs], finish_reason, stop_reason)


def _logprob(item: Any) -> Logprob:
    if not isinstance(item, list) or [type(v) for v in item] != [int, float, list, str]:
        raise WireError("delta: [id, value, alternatives, piece] is needed")
    return Logprob(item[0], item[1], _pairs(item[2], "delta", int, float), item[3])
