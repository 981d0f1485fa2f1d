"""Strategies for every message between processes: whole, and as frames with one thing wrong."""

from __future__ import annotations

import copy
from typing import Any, get_args

import msgpack
from hypothesis import strategies as st

from executor.engines.base import StepRow
from executor.messages import (
    MAX_OUTPUTS,
    REJECTIONS,
    Abort,
    Cancel,
    Emissions,
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
    WorkerJoined,
    WorkerLost,
)
from executor.request import GenerationRequest, SamplingParams
from executor.result import OutputDelta
from executor.wire import encode, encode_delta, encode_failure
from tests.executor.test_wire import EMISSION_ROWS, ENTRIES, NUMBERS, REPORTS, SAMPLING, TEXT
from tests.helpers import CHAT, COMPLETIONS, spec_of

KINDS: tuple[type, ...] = get_args(Message)

# ------------------------------------------------------------------------------------------------------ messages

#: Few, so that messages are about the same requests, and some that nobody has.
RIDS = st.sampled_from((1, 2, 3, 5, 2**40, 2**63 - 1))
WORKERS = st.sampled_from((0, 1, 2, 99, 2**31))
FRONTENDS = st.sampled_from((0, 1, 2**31 - 1))
INDEXES = st.sampled_from((0, 1, 2, MAX_OUTPUTS - 1))
COUNTS = st.sampled_from((0, 1, 3, 70_000, 2**32 - 1))
TOKENS = st.lists(st.sampled_from((0, 5, 97, 255, 999, 1000, 2**31 - 1, -1, -(2**31))), max_size=4)
DELIVERED = st.lists(st.tuples(COUNTS, st.booleans()), max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    """Some of them are what a front end would send."""
    spec = draw(st.sampled_from(SPECS) | st.binary(max_size=20))
    prompts = draw(st.lists(st.lists(st.integers(0, 1010), max_size=5), min_size=1, max_size=3))
    sampling = draw(SAMPLING | st.builds(SamplingParams, st.integers(1, 5), logprobs=st.none() | st.integers(0, 3)))
    return GenerationRequest(draw(RIDS), prompts, sampling, spec, draw(st.integers(1, 3)), draw(FRONTENDS))


@st.composite
def resubmits(draw: st.DrawFn) -> Resubmit:
    request = draw(requests())
    delivered = draw(
        st.lists(st.tuples(COUNTS, st.booleans()), min_size=request.num_outputs, max_size=request.num_outputs)
    )
    return Resubmit(request, delivered, draw(st.sampled_from((0, 1, 2**32 - 2))))


@st.composite
def records(draw: st.DrawFn, specs: st.SearchStrategy[bytes] | None = None) -> StepRecords:
    rows = []
    for _ in range(draw(st.integers(0, 4))):
        ids = draw(TOKENS)
        reason = draw(st.none() | st.sampled_from(("stop", "length", "abort", "error")))
        logprobs = draw(st.none() | st.lists(ENTRIES, min_size=len(ids), max_size=len(ids)))
        ends = (reason, draw(st.booleans()), draw(TEXT)) if reason else (None, False, "")
        rows.append(StepRow(draw(RIDS), draw(INDEXES), ids, *ends, logprobs))
    spec = specs if specs is not None else st.binary(max_size=9)
    opens = st.builds(Open, RIDS, EPOCHS, FRONTENDS, spec, DELIVERED)
    made = StepRecords.build(rows, draw(st.lists(opens, max_size=2)), draw(st.integers(0, 2**62)))
    made.incarnation = draw(st.sampled_from((0, 0, 0, 1, 2**63 - 1)))
    return made


#: Specs of every post-processor, streaming and unary.
SPECS = [
    spec_of(endpoint, stream=stream, **body).encode()
    for endpoint in (CHAT, COMPLETIONS)
    for stream in (True, False)
    for body in ({}, {"n": 2, "stop": ["ab", "a"]}, {"logprobs": True if endpoint == CHAT else 2})
]
PAYLOADS = st.sampled_from(
    (
        b"",
        b"data: 1\n\n",
        encode_delta(OutputDelta(0, [5], "a")),
        encode_delta(OutputDelta(1, [5, 6], "é", (), "stop", 6)),
        encode_delta(OutputDelta(0, [], "", (), "abort")),
        encode_failure("no"),
    )
) | st.binary(max_size=9)
EPOCHS = st.sampled_from((0, 1, 5, 2**32 - 1))
STAMPS = st.sampled_from((0, 1, 10**15, 2**63 - 1))


def stamped(message: Emissions) -> st.SearchStrategy[Emissions]:
    """The message with its times set, and perhaps something told."""

    def note(rest: tuple[int, int, dict[int, tuple[bytes, bytes]] | None]) -> Emissions:
        message.stamp, message.sent, message.around = rest
        return message

    rows = st.integers(0, len(message.rids) - 1) if message.rids else st.nothing()
    told = st.dictionaries(rows, st.tuples(PAYLOADS, PAYLOADS), max_size=3) if message.rids else st.just({})
    return st.tuples(STAMPS, STAMPS, st.none() | told).map(note)


EMISSIONS = st.builds(
    Emissions.build,
    WORKERS,
    EMISSION_ROWS | st.lists(st.tuples(RIDS, EPOCHS, INDEXES, COUNTS, st.integers(0, 255), PAYLOADS), max_size=4),
    st.none() | REPORTS,
).flatmap(stamped)

#: How a message of each kind is drawn. A kind that is not here makes a test red.
STRATEGIES: dict[type, st.SearchStrategy[Any]] = {
    GenerationRequest: requests(),
    Abort: st.builds(Abort, RIDS),
    Release: st.builds(Release, RIDS),
    Cancel: st.builds(Cancel, WORKERS, st.lists(st.tuples(RIDS, st.integers(-1, MAX_OUTPUTS)), max_size=4)),
    WorkerJoined: st.builds(WorkerJoined, WORKERS, TEXT),
    WorkerLost: st.builds(WorkerLost, WORKERS, st.dictionaries(RIDS, DELIVERED, max_size=3), st.just(-1) | RIDS),
    FrontendLost: st.builds(FrontendLost, FRONTENDS),
    Resubmit: resubmits(),
    Synced: st.builds(Synced, FRONTENDS),
    Rejected: st.builds(Rejected, RIDS, st.sampled_from(sorted(REJECTIONS))),
    StepRecords: records(),
    Recall: st.builds(Recall, st.sampled_from((0, 1, 5, 2**63 - 1))),
    Histories: st.builds(Histories, WORKERS, records(), st.booleans()),
    Emissions: EMISSIONS,
    Status: st.builds(Status, NUMBERS),
}
MESSAGES = st.one_of(list(STRATEGIES.values()))


def plain(value: Any) -> Any:
    """A message, or a part of one, as something that compares: columns as rows, records as what they hold."""
    if isinstance(value, StepRecords):
        rows = [(rid, index, list(ids), finish, logprobs) for rid, index, ids, finish, logprobs in value.rows()]
        return [plain(rows), plain(value.opens), value.stamp, value.incarnation]
    if isinstance(value, Emissions):
        told = plain(value.around)
        return [value.worker, plain(list(value.rows())), plain(value.stats), value.stamp, value.sent, told]
    if hasattr(value, "__dataclass_fields__"):
        return [type(value).__name__, *(plain(getattr(value, name)) for name in value.__dataclass_fields__)]
    if isinstance(value, dict):
        return [[plain(key), plain(entry)] for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return repr(value) if isinstance(value, float) else value  # NaN is NaN


# ------------------------------------------------------------------------------------------------------ damage

ODD = st.sampled_from(
    (
        None, True, False, -1, 0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63,
        2**64 - 1, -(2**31) - 1, -(2**63), 0.5, -1.0, float("nan"), float("inf"), "", "a", "steps", "submit", "\x00",
        b"", b"\x00", b"\xff" * 7, b"\xff" * 8, b"\x00" * 24, [], [None], [[]], [[1, 2]], [[1, True]], [[1, []]],
        [[1, [[1, True]]]], [[0, "stop", False, ""]], {}, {"t": "submit"}, {"max_tokens": 2**62}, {"n": -1},
        msgpack.ExtType(5, b""), msgpack.Timestamp(1),
    )
)  # fmt: skip


#: Fields that a frame may have or not, and two that none has.
OPTIONAL = (
    "index", "count", "epoch", "flags", "stats", "open", "finish", "lp", "lp_row", "lp_n", "lp_k", "incarnation",
    "stamp", "sent", "around", "x", 5,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [deeper for key, entry in items for deeper in ((*path, key), *places(entry, (*path, key)))]


@st.composite
def damaged_fields(draw: st.DrawFn, frame: bytes) -> bytes:
    """One field of a frame replaced, left out, added, or a column cut or grown."""
    fields = copy.deepcopy(msgpack.unpackb(frame))
    *path, last = draw(st.sampled_from(places(fields)))
    box = fields
    for key in path:
        box = box[key]
    old = box[last]
    change = draw(st.sampled_from(("replace", "drop", "add", "column", "number")))
    if change == "column" and isinstance(old, (bytes, str, list)) and old:
        size = draw(st.integers(1, 9))
        box[last] = draw(st.sampled_from((old[:-size], old + old[:size], old * 2, old[size:])))
    elif change == "number" and type(old) is int:
        box[last] = draw(st.sampled_from((-old, old + 1, old - 1, old * 2**32, ~old))) % 2**63
    elif change == "drop":
        del box[last]
    elif change == "add" and isinstance(box, dict):
        box[draw(st.sampled_from(OPTIONAL))] = draw(ODD)
    else:
        box[last] = draw(ODD)
    return bytes(msgpack.packb(fields))


@st.composite
def damaged_bytes(draw: st.DrawFn, frame: bytes) -> bytes:
    """One byte changed, or some bytes cut, put in or put behind."""
    place = draw(st.integers(0, len(frame) - 1))
    change = draw(st.sampled_from(("flip", "set", "cut", "end", "insert", "append")))
    if change == "flip":
        return frame[:place] + bytes([frame[place] ^ 1 << draw(st.integers(0, 7))]) + frame[place + 1 :]
    if change == "set":
        return frame[:place] + bytes([draw(st.integers(0, 255))]) + frame[place + 1 :]
    if change == "cut":
        return frame[:place] + frame[place + draw(st.integers(1, 9)) :]
    if change == "end":
        return frame[:place]
    more = draw(st.binary(min_size=1, max_size=9))
    return frame[:place] + more + frame[place:] if change == "insert" else frame + more


def damaged(message: Message) -> st.SearchStrategy[bytes]:
    frame = encode(message)
    return damaged_fields(frame) | damaged_bytes(frame)
