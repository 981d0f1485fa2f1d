"""The wire: what is encoded comes back, and nothing malformed gets further than WireError."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from executor.histogram import BOUNDS
from executor.messages import (
    MAX_COUNT,
    MAX_OUTPUTS,
    Abort,
    Cancel,
    Emissions,
    Finish,
    Message,
    Open,
    Release,
    Status,
    StepRecords,
    WireError,
    WorkerJoined,
    WorkerLost,
)
from executor.request import GenerationRequest, SamplingParams
from executor.result import Logprob, OutputDelta
from executor.wire import (
    MAX_FRAME,
    MAX_ITEMS,
    decode,
    decode_deltas,
    encode,
    encode_delta,
    encode_failure,
)

RIDS = st.integers(0, 2**63 - 1)
IDS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text("aé世😀\x00", max_size=5)
DELIVERED = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), max_size=3)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**40),
    temperature=FLOATS,
    top_p=FLOATS,
    top_k=st.integers(0, 100),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop_token_ids=st.lists(IDS, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(IDS, FLOATS, max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)
ENTRIES = st.builds(TokenLogprob, FLOATS, st.lists(st.tuples(IDS, FLOATS), max_size=2).map(tuple))


@st.composite
def step_rows(draw: st.DrawFn) -> StepRow:
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
    reason = draw(st.none() | st.sampled_from(("stop", "length", "abort", "error")))
    logprobs = draw(st.none() | st.lists(ENTRIES, min_size=len(ids), max_size=len(ids)))
    finish = (reason, draw(st.booleans()), draw(TEXT)) if reason else (None, False, "")
    return StepRow(draw(RIDS), draw(st.integers(0, MAX_OUTPUTS - 1)), ids, *finish, logprobs)


ROWS = st.lists(step_rows(), max_size=5)
OPENS = st.lists(
    st.builds(Open, RIDS, st.integers(0, 2**32 - 1), st.integers(0, 9), st.binary(max_size=9), DELIVERED), max_size=2
)
STEPS = st.builds(StepRecords.build, ROWS, OPENS, st.integers(0, 2**62))
EMISSION_ROWS = st.lists(
    st.tuples(RIDS, st.integers(0, 2**32 - 1), st.integers(0, 65535), st.integers(0, 2**32 - 1), st.integers(0, 15),
    st.binary(max_size=9)),
    max_size=5,
)  # fmt: skip
NUMBERS = st.dictionaries(TEXT, st.integers(-5, 5) | FLOATS, max_size=3)
COUNTS = st.lists(st.integers(0, 2**63), min_size=len(BOUNDS) + 1, max_size=len(BOUNDS) + 1)
HISTOGRAMS = st.builds(lambda total, counts: [total, *counts], st.floats(0, 1e9), COUNTS)
REPORTS = st.dictionaries(TEXT, st.integers(-5, 5) | FLOATS | HISTOGRAMS, max_size=3)
TIMES = st.sampled_from((0, 1, 2**63 - 1))


@st.composite
def emissions(draw: st.DrawFn) -> Emissions:
    message = Emissions.build(draw(st.integers(0, 99)), draw(EMISSION_ROWS), draw(st.none() | REPORTS))
    message.stamp, message.sent = draw(TIMES), draw(TIMES)
    return message


REQUESTS = st.builds(
    GenerationRequest,
    rid=RIDS,
    prompts=st.lists(st.lists(IDS, max_size=5), min_size=1, max_size=3),
    sampling=SAMPLING,
    spec=st.binary(max_size=20),
    n=st.integers(1, 4),
    frontend=st.integers(0, 9),
)
MESSAGES: dict[str, st.SearchStrategy[Any]] = {
    "submit": REQUESTS,
    "abort": st.builds(Abort, RIDS),
    "release": st.builds(Release, RIDS),
    "cancel": st.builds(Cancel, st.integers(0, 2**31), st.lists(st.tuples(RIDS, st.integers(-1, 65535)), max_size=4)),
    "joined": st.builds(WorkerJoined, RIDS, TEXT),
    "lost": st.builds(WorkerLost, RIDS, st.dictionaries(RIDS, DELIVERED, max_size=3)),
    "steps": STEPS,
    "emissions": emissions(),
    "status": st.builds(Status, NUMBERS),
}


def plain(message: Any) -> Any:
    """A message as something that compares; columns are lists or tuples, and records are rows."""
    if isinstance(message, StepRecords):
        rows = [(rid, index, list(ids), finish, logprobs) for rid, index, ids, finish, logprobs in message.rows()]
        return rows, [plain(opened) for opened in message.opens], message.stamp
    if isinstance(message, Emissions):
        return message.worker, list(message.rows()), message.stats, message.stamp, message.sent, message.around
    if isinstance(message, Open):
        return message.rid, message.epoch, message.frontend, message.spec, list(message.delivered)
    return message


# ------------------------------------------------------------------------------------------------------ what is encoded


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_comes_back(kind: str) -> None:
    @given(MESSAGES[kind])
    def check(message: Message) -> None:
        frame = encode(message)
        assert msgpack.unpackb(frame)["t"] == kind
        again = decode(frame)
        assert type(again) is type(message) and plain(again) == plain(message)
        assert encode(again) == frame

    check()


@given(ROWS)
def test_rows_of_steps_are_those_they_were_built_of(rows: list[StepRow]) -> None:
    given_out = list(StepRecords.build(rows).rows())
    assert len(given_out) == len(rows)
    for row, (rid, index, ids, finish, logprobs) in zip(rows, given_out):
        assert (rid, index, list(ids), logprobs) == (row.rid, row.index, list(row.token_ids), row.logprobs)
        assert finish == (Finish(row.finish_reason, row.stop_token, row.message) if row.finish_reason else None)


@pytest.mark.parametrize("counts", [[1, 1, 1], [0, 2, 1], [2, 0, 1], [0, 0, 3], [0], []])
def test_rows_get_their_own_ids_when_counts_only_add_up(counts: list[int]) -> None:
    ids = list(range(sum(counts)))
    steps = StepRecords(list(range(len(counts))), [0] * len(counts), counts, ids)
    for records in (steps, decode(encode(steps))):
        assert isinstance(records, StepRecords)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        assert [list(row[2]) for row in records.rows()] == [ids[s : s + c] for s, c in zip(starts, counts)]


@given(EMISSION_ROWS)
def test_rows_of_emissions_are_those_they_were_built_of(rows: list[tuple[int, int, int, int, int, bytes]]) -> None:
    assert list(Emissions.build(3, rows).rows()) == rows


def test_a_request_may_have_as_many_outputs_as_an_index_can_tell() -> None:
    for prompts, n in ((512, 128), (1, MAX_OUTPUTS)):
        message = decode(encode(GenerationRequest(1, [[1]] * prompts, SamplingParams(), b"", n)))
        assert isinstance(message, GenerationRequest) and message.num_outputs == MAX_OUTPUTS
    with pytest.raises(WireError, match="prompts"):
        decode(encode(GenerationRequest(1, [[1]] * 513, SamplingParams(), b"", 128)))
    with pytest.raises(WireError, match="prompts"):
        decode(encode(GenerationRequest(1, [], SamplingParams(), b"")))


def test_only_what_was_asked_for_travels() -> None:
    rows = [StepRow(rid, 0, [7]) for rid in range(3)]
    assert msgpack.unpackb(encode(StepRecords.build(rows))).keys() == {"t", "stamp", "rid", "token"}
    emitted = msgpack.unpackb(encode(Emissions.build(0, [(1, 0, 0, 4, 0, b"a")])))
    assert emitted.keys() == {"t", "worker", "rid", "count", "size", "payload"}
    submit = msgpack.unpackb(encode(GenerationRequest(1, [[1]], SamplingParams(top_k=3), b"")))
    assert submit["sampling"] == {"top_k": 3}


def test_nan_and_infinity_travel() -> None:
    values = [math.inf, -math.inf, math.nan]
    steps = decode(encode(StepRecords.build([StepRow(1, 0, [1, 2, 3], logprobs=[TokenLogprob(v) for v in values])])))
    assert isinstance(steps, StepRecords)
    assert str([entry.logprob for entry in steps.logprobs[0]]) == str(values)


# ------------------------------------------------------------------------------------------------------ what is refused


def survives(frame: bytes) -> None:
    """Decode; what comes out must be a message that can go on its way."""
    try:
        message = decode(frame)
    except WireError as error:
        assert str(error)
        return
    assert plain(decode(encode(message))) == plain(message) or "nan" in repr(plain(message))
    if isinstance(message, StepRecords):
        rows = list(message.rows())
        assert len(rows) == len(message.rids) and sum(len(row[2]) for row in rows) == len(message.tokens)
        for opened in message.opens:  # a worker answers with these numbers
            encode(Emissions.build(0, [(opened.rid, opened.epoch, 0, 0, 0, b"")]))
    if isinstance(message, Emissions):
        assert b"".join(row[5] for row in message.rows()) == message.payload


SAMPLES: dict[str, Message] = {
    "submit": GenerationRequest(
        9,
        [[1, 2], [3]],
        SamplingParams(5, 0.5, seed=-3, stop_token_ids=(7,), logit_bias={3: 1.5}, logprobs=2),
        b"spec",
        2,
        1,
    ),
    "abort": Abort(300),
    "release": Release(2**40),
    "cancel": Cancel(3, [(1, 0), (70000, -1)]),
    "joined": WorkerJoined(2, "ipc:///tmp/x/worker-2"),
    "lost": WorkerLost(2, {5: [(3, False), (70000, True)], 6: []}),
    "steps": StepRecords.build(
        [
            StepRow(1, 0, [5, 6], logprobs=[TokenLogprob(-0.5, ((1, -0.5), (2, -1.5))), TokenLogprob(-1.0)]),
            StepRow(2, 1, [], "error", False, "broken"),
            StepRow(3, 0, [7], "stop", True),
        ],
        [Open(1, 0, 0, b"spec"), Open(2, 3, 1, b"", [(4, False), (5, True)])],
        12345,
    ),
    "plain steps": StepRecords.build([StepRow(1, 0, [5]), StepRow(2, 0, [6])]),
    "emissions": Emissions.build(3, [(1, 0, 0, 4, 1, b"abc"), (2, 1, 1, 5, 0, b"d")], {"rows": 3, "busy_seconds": 0.5}),
    "pieces": Emissions(
        *(3, (1, 2), (0, 0), (0, 0), (4, 5), (0, 0), (1, 2), b"abc"), around={1: (b"data: ", b"\n\n"), 0: (b"", b"")}
    ),
    "report": Emissions(
        *(3, (1,), (0,), (0,), (4,), (0,), (3,), b"abc"),
        *({"rows": 3, "queue_age": [0.5, *range(len(BOUNDS) + 1)]}, 12345, 2**62),
    ),
    "status": Status({"open": 3, "cache": 0.5}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_truncation_is_refused(name: str) -> None:
    frame = encode(SAMPLES[name])
    for end in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:end])
    with pytest.raises(WireError):
        decode(frame + b"\x00")


@pytest.mark.parametrize("name", SAMPLES)
def test_every_changed_byte_is_refused_or_a_message(name: str) -> None:
    frame = encode(SAMPLES[name])
    survives(frame)
    for place in range(len(frame)):
        for value in {
            frame[place] ^ 1,
            frame[place] ^ 0x80,
            frame[place] ^ 0xFF,
            0x00,
            0x7F,
            0x90,
            0xC0,
            0xC1,
            0xCB,
            0xDD,
            0xDF,
        }:
            survives(frame[:place] + bytes([value]) + frame[place + 1 :])


@given(
    st.sampled_from(sorted(SAMPLES)),
    st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), min_size=1, max_size=4),
)
def test_frames_with_several_changes(name: str, changes: list[tuple[int, bytes]]) -> None:
    frame = encode(SAMPLES[name])
    for place, data in changes:
        start = place % len(frame)
        frame = frame[:start] + data + frame[start + (place % 3) :]
    survives(frame)


@given(st.binary(max_size=64))
def test_noise(frame: bytes) -> None:
    survives(frame)
    survives(msgpack.packb({"t": "steps", "rid": frame, "index": frame, "count": frame, "token": frame, "stamp": 0}))


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, math.nan, "", "x" * 50, b"", b"\x01", b"\xff" * 8, [],
    [1], [[]],
    [[1, 2]], [[-1, True]], [[2**32, True]], [None], {}, {"a": 1}, {"t": []}, msgpack.ExtType(5, b"ab"),
    msgpack.Timestamp(1),
)  # fmt: skip


def odd_frames(fields: Mapping[str, Any]) -> list[bytes]:
    """The frame with every field, and every entry of its lists, replaced by every odd value; and with each left out."""
    frames = []
    for name, value in fields.items():
        frames.append({key: other for key, other in fields.items() if key != name})
        frames += [{**fields, name: odd} for odd in ODD_VALUES]
        for path, _ in places(value):
            frames += [{**fields, name: replaced(value, path, odd)} for odd in ODD_VALUES]
    return [msgpack.packb(frame) for frame in frames]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Paths of everything inside a nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [((*path, key), entry) for key, entry in items]
    return inner + [deeper for where, entry in inner for deeper in places(entry, where)]


def replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy of a nested value with one entry replaced."""
    if not path:
        return odd
    items = dict(value) if isinstance(value, dict) else list(value)
    items[path[0]] = replaced(value[path[0]], path[1:], odd)
    return items


@pytest.mark.parametrize("name", SAMPLES)
def test_wrong_types_and_ranges(name: str) -> None:
    for frame in odd_frames(msgpack.unpackb(encode(SAMPLES[name]))):
        survives(frame)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rid": b"1234567"}, "rid"),
        ({"rid": "12345678"}, "rid"),
        ({"token": b""}, "token"),
        ({"token": b"\x00" * 20}, "token"),
        ({"count": b"\x01\x00\x01\x00"}, "count"),
        ({"index": b""}, "index"),
        ({"stamp": -1}, "stamp"),
        ({"finish": [[9, "stop", False, ""]]}, "finish"),
        ({"finish": [[0, "tired", False, ""]]}, "finish"),
        ({"finish": [[0, "stop", False, ""], [0, "stop", False, ""]]}, "finish"),
        ({"finish": [[0, "stop", 1, ""]]}, "finish"),
        ({"open": [[1, -1, 0, b"", []]]}, "open"),
        ({"open": [[1, 2**32, 0, b"", []]]}, "open"),
        ({"open": [[1, 0, 2**31, b"", []]]}, "open"),
        ({"open": [[-1, 0, 0, b"", []]]}, "open"),
        ({"open": [[2**63, 0, 0, b"", []]]}, "open"),
        ({"open": [[1, 0, 0, b"", [[-3, True]]]]}, "delivered"),
        ({"open": [[1, 0, 0, b"", [[2**32, True]]]]}, "delivered"),
        ({"lp_row": b"\x09\x00\x00\x00"}, "logprobs"),
        ({"lp_row": b"\x00" * 8, "lp_n": b"\x01\x00" * 2}, "logprobs"),
        ({"lp_row": b"\x00" * 3}, "lp_row"),
        ({"lp_k": b"\x00" * 8}, "logprobs"),
        ({"lp_k": b"\x00" * 12}, "logprobs"),
        ({"lp_n": b"\x03\x00"}, "logprobs"),
        ({"lp": b"\x00" * 41}, "logprobs"),
        ({"lp": [0.5]}, "lp"),
    ],
)
def test_a_refusal_names_the_field(changed: dict[str, Any], named: str) -> None:
    fields = msgpack.unpackb(encode(SAMPLES["steps"])) | changed
    with pytest.raises(WireError, match=named):
        decode(msgpack.packb(fields))


ZEROS = [0] * (len(BOUNDS) + 1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"stamp": -1}, "stamp"),
        ({"stamp": 1.0}, "stamp"),
        ({"sent": True}, "sent"),
        ({"sent": 2**63}, "sent"),
        ({"sent": None}, "sent"),
        ({"stats": [0.5]}, "stats"),
        ({"stats": {"a": "b"}}, "stats"),
        ({"stats": {"a": []}}, "stats"),
        ({"stats": {"a": [0.5, *ZEROS[1:]]}}, "stats"),
        ({"stats": {"a": [0.5, *ZEROS, 0]}}, "stats"),
        ({"stats": {"a": [0, *ZEROS]}}, "stats"),
        ({"stats": {"a": [math.nan, *ZEROS]}}, "stats"),
        ({"stats": {"a": [math.inf, *ZEROS]}}, "stats"),
        ({"stats": {"a": [-0.5, *ZEROS]}}, "stats"),
        ({"stats": {"a": [0.5, *ZEROS[1:], -1]}}, "stats"),
        ({"stats": {"a": [0.5, *ZEROS[1:], True]}}, "stats"),
        ({"stats": {"a": [0.5, *ZEROS[1:], 0.5]}}, "stats"),
        ({"stats": {b"a": [0.5, *ZEROS]}}, "stats"),
    ],
)
def test_a_report_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    fields = msgpack.unpackb(encode(SAMPLES["report"]))
    decode(msgpack.packb(fields))
    with pytest.raises(WireError, match=named):
        decode(msgpack.packb(fields | changed))


@pytest.mark.parametrize(
    "frame", [b"", b"\x01", b"\x90", b"\xa1t", b"\x80", b"\x81\xa1t\x05", b"\x81\xa1t\xa3abc", b"\xc1", b"\x81\x90\x01"]
)
def test_what_is_no_message(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


def test_sampling_fields_are_known_by_name_and_type() -> None:
    fields = msgpack.unpackb(encode(SAMPLES["submit"]))
    for sampling in (
        {"beam": 3},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"ignore_eos": 1},
        {"logit_bias": [[1, 2]]},
        {3: 3},
    ):
        with pytest.raises(WireError):
            decode(msgpack.packb({**fields, "sampling": sampling}))
    whole = decode(msgpack.packb({**fields, "sampling": {"temperature": 1}}))
    assert isinstance(whole, GenerationRequest) and type(whole.sampling.temperature) is float


# ------------------------------------------------------------------------------------------------------ bombs


def bombs() -> dict[str, bytes]:
    """Small frames that declare much, and large ones that are made of the smallest containers."""
    many, array32, map32, bin32 = 1 << 21, b"\xdd", b"\xdf", b"\xc6"
    million, some = struct.pack(">I", 1 << 20), struct.pack(">I", 1 << 18)
    return {
        "declared array": b"\x82\xa1t" + array32 + b"\xff\xff\xff\xff",
        "declared map": map32 + b"\xff\xff\xff\xff",
        "declared bytes": b"\x81\xa1t" + bin32 + b"\xff\xff\xff\xff" + b"abc",
        "declared text": b"\x81\xa1t\xdb\xff\xff\xff\xff" + b"abc",
        "deep arrays": b"\x91" * 5000 + b"\x01",
        "deep maps": b"\x81\xa1a" * 5000 + b"\x01",
        "wide and deep": (array32 + million) * 500 + b"\x00" * (1 << 20),
        "wide and deep maps": (map32 + million + b"\x01") * 500 + b"\x00" * (1 << 20),
        "empty arrays": b"\x81\xa1t" + array32 + struct.pack(">I", many) + b"\x90" * many,
        "lists of empty arrays": b"\x94" + (array32 + some + b"\x90" * (1 << 18)) * 4,
        "empty maps": b"\x94" + (array32 + some + b"\x80" * (1 << 18)) * 4,
        "column of ones": msgpack.packb({"t": "steps", "rid": b"", "count": b"\xff" * (1 << 16), "token": b"",
        "stamp": 0}),
        "zero tokens": msgpack.packb({"t": "steps", "rid": b"\0" * 8, "count": b"\xff\xff", "token": b"", "stamp": 0}),
        "declared alternatives": msgpack.packb(
            {"t": "steps", "rid": b"\0" * 8, "token": b"\0" * 4, "stamp": 0, "lp": b"\0" * 8, "lp_k": b"\xff" * 4}
        ),
        "declared records": msgpack.packb(
            {"t": "steps", "rid": b"\0" * 8, "count": b"\xff\xff", "token": b"", "stamp": 0, "lp": b"\0" * 8,
             "lp_n": b"\xff\xff"}
        ),
        "declared sizes": msgpack.packb(
            {"t": "emissions", "worker": 0, "rid": b"\0" * 8, "count": b"\0" * 4, "size": b"\xff" * 4,
            "payload": b"abc"}
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_costs_little_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on memory is a bound on time too: a process that fills gigabytes with containers hangs for a minute."""
    frame = bombs()[name]
    monkeypatch.setattr("executor.wire.MAX_CONTAINERS", 1 << 12)  # the rule is the same, the test is shorter
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Room for nested lists that are declared, not filled: their pages are never touched.
    limit = 500 * 9 * MAX_ITEMS if name == "wide and deep" else 16 << 20
    assert peak < limit


def test_a_frame_beyond_the_limit_is_not_looked_at() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_FRAME + 1

    with pytest.raises(WireError, match="limit"):
        decode(Huge(b"\x80"))


def test_large_legitimate_messages_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.wire.MAX_CONTAINERS", 1 << 18)
    lost = WorkerLost(1, {rid: [(rid, False)] for rid in range(30_000)})
    frame = encode(lost)
    assert len(frame) > 1 << 18 and decode(frame) == lost
    request = GenerationRequest(1, [list(range(200))] * 2048, SamplingParams(), b"s")
    assert decode(encode(request)) == request
    ended = decode(encode(StepRecords.build([StepRow(1, i, (), "abort") for i in range(MAX_OUTPUTS)])))
    assert isinstance(ended, StepRecords) and len(ended.finishes) == MAX_OUTPUTS
    long = decode(encode(StepRecords.build([StepRow(1, 0, list(range(MAX_COUNT)))] * 2)))
    assert isinstance(long, StepRecords) and [len(row[2]) for row in long.rows()] == [MAX_COUNT] * 2


# ------------------------------------------------------------------------------------------------------ deltas

DELTAS = st.builds(
    OutputDelta,
    st.integers(0, MAX_OUTPUTS - 1),
    st.lists(IDS, max_size=3),
    TEXT,
    st.lists(st.builds(Logprob, IDS, FLOATS, st.lists(st.tuples(IDS, FLOATS), max_size=2), TEXT), max_size=2),
    st.none() | st.sampled_from(("stop", "length", "abort", "error")),
    st.none() | TEXT | IDS,
)


@given(st.lists(DELTAS | TEXT, max_size=4))
def test_joined_deltas_read_as_their_steps(steps: list[OutputDelta | str]) -> None:
    payload = b"".join(encode_failure(step) if isinstance(step, str) else encode_delta(step) for step in steps)
    assert list(decode_deltas(payload)) == steps


def refused_or_read(payload: bytes) -> None:
    try:
        for step in decode_deltas(payload):
            assert isinstance(step, str) or encode_delta(step)
    except WireError as error:
        assert str(error)


def test_malformed_deltas_are_refused() -> None:
    delta = OutputDelta(1, [5, 6], "é", [Logprob(5, -0.5, [(5, -0.5)], "é"), Logprob(6, -1.0)], "stop", "x")
    payload = encode_delta(delta)
    for end in range(1, len(payload)):
        with pytest.raises(WireError):
            list(decode_deltas(payload[:end]))
    for place in range(len(payload)):
        for value in range(0, 256, 5):
            refused_or_read(payload[:place] + bytes([value]) + payload[place + 1 :])
    fields = msgpack.unpackb(payload)
    for path, _ in places(fields):
        for odd in ODD_VALUES:
            refused_or_read(msgpack.packb(replaced(fields, path, odd)))
    for odd in ODD_VALUES:
        refused_or_read(msgpack.packb(odd))
