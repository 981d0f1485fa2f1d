"""The spec of a stream: what is encoded comes back, and nothing else is let in."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.messages import MAX_OUTPUTS
from postproc_workers.spec import MAX_DEPTH, MAX_STOP_CHARS, SpecError, StreamSpec
from postproc_workers.stop_strings import MAX_STOPS

SMALLEST = StreamSpec(post_processor="chat_stream", args={}, outputs=1, streaming=True, prompt_tokens=0)

FULL = StreamSpec(
    post_processor="completion_unary",
    args={"id": "cmpl-1", "created": 1_700_000_000, "echo": ["Once", "é😀"], "logprobs": None, "bias": -0.5},
    outputs=4,
    streaming=False,
    prompt_tokens=(1 << 31) + 5,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    continuation=True,
    stop=("END", "\n\n", "。"),
    include_stop=True,
    stop_token_ids=(0, 7, (1 << 31) - 1),
    logprobs=20,
    stream_interval=1000,
    split_steps=True,
    recording={"name": "r", "endpoint": "/v1/completions", "request": {"prompt": ""}, "server": {"tokenizer": None}},
)

TEXT = st.text("aZ 5\n\x00é。\uffff😀")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
PLAIN_MAP = st.dictionaries(TEXT, PLAIN, max_size=5)

SPECS = st.builds(
    StreamSpec,
    post_processor=TEXT.filter(bool).map(lambda text: text[:128]),
    args=PLAIN_MAP,
    outputs=st.integers(1, MAX_OUTPUTS),
    streaming=st.booleans(),
    prompt_tokens=st.integers(0, 1 << 40),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    continuation=st.booleans(),
    stop=st.lists(TEXT.filter(bool), max_size=MAX_STOPS).map(tuple),
    include_stop=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, (1 << 31) - 1), max_size=20).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    stream_interval=st.none() | st.integers(1, 1000),
    split_steps=st.booleans(),
    recording=st.none() | PLAIN_MAP,
)


def fields(spec: StreamSpec, **changed: Any) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)} | changed


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


@pytest.mark.parametrize("spec", [SMALLEST, FULL])
def test_comes_back(spec: StreamSpec) -> None:
    assert StreamSpec.decode(spec.encode()) == spec


@given(SPECS)
def test_any_spec_comes_back(spec: StreamSpec) -> None:
    assert StreamSpec.decode(spec.encode()) == spec


def test_lists_become_tuples() -> None:
    decoded = StreamSpec.decode(FULL.encode())
    assert isinstance(decoded.stop, tuple) and isinstance(decoded.stop_token_ids, tuple)


def test_absent_fields_have_their_defaults() -> None:
    required = {name: getattr(SMALLEST, name) for name in ("post_processor", "args", "outputs", "streaming")}
    assert StreamSpec.decode(pack(required | {"prompt_tokens": 0})) == SMALLEST


@pytest.mark.parametrize("name", ["post_processor", "args", "outputs", "streaming", "prompt_tokens"])
def test_names_a_missing_field(name: str) -> None:
    without = fields(SMALLEST)
    del without[name]
    with pytest.raises(SpecError, match=f"^{name}: missing"):
        StreamSpec.decode(pack(without))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("post_processor", 1),
        ("post_processor", ""),
        ("post_processor", "x" * 129),
        ("post_processor", b"chat"),
        ("args", []),
        ("args", None),
        ("args", {"raw": b"bytes"}),
        ("args", {"deep": [{"raw": b"bytes"}]}),
        ("args", {"when": msgpack.Timestamp(1)}),
        ("args", {"map": {b"key": 1}}),
        ("outputs", 0),
        ("outputs", MAX_OUTPUTS + 1),
        ("outputs", True),
        ("outputs", 1.0),
        ("outputs", None),
        ("streaming", 1),
        ("streaming", None),
        ("prompt_tokens", -1),
        ("prompt_tokens", "12"),
        ("skip_special_tokens", 0),
        ("spaces_between_special_tokens", "yes"),
        ("continuation", None),
        ("stop", "END"),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x" * (MAX_STOP_CHARS + 1)]),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop", None),
        ("include_stop", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1 << 31]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", {}),
        ("stop_token_ids", list(range(2000))),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", False),
        ("stream_interval", 0),
        ("stream_interval", 1001),
        ("stream_interval", True),
        ("stream_interval", "2"),
        ("split_steps", None),
        ("split_steps", 1),
        ("recording", []),
        ("recording", {"request": b""}),
        ("surprise", 1),
    ],
)
def test_names_the_field_it_refuses(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"^'?{name}"):
        StreamSpec.decode(pack(fields(FULL, **{name: value})))


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_is_bounded() -> None:
    deep = dataclasses.replace(SMALLEST, args={"x": nested(MAX_DEPTH - 1)})
    assert StreamSpec.decode(deep.encode()) == deep
    with pytest.raises(SpecError, match="^args: nested deeper"):
        StreamSpec.decode(dataclasses.replace(SMALLEST, args={"x": nested(MAX_DEPTH)}).encode())


@pytest.mark.parametrize("value", [{"x": object()}, {"x": 1 << 64}, {"x": nested(2000)}, {"x": "\ud800"}])
def test_encode_refuses_what_is_not_plain(value: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        dataclasses.replace(SMALLEST, args=value).encode()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000, pack([1]), pack(None), pack({b"k": 1}), pack({1: 1})])
def test_refuses_what_is_no_map_of_fields(data: bytes) -> None:
    with pytest.raises(SpecError):
        StreamSpec.decode(data)


def test_extension_types_are_refused() -> None:
    with pytest.raises(SpecError):
        StreamSpec.decode(pack(fields(SMALLEST, args={"x": msgpack.ExtType(5, b"code")})))


def test_every_truncation_is_refused() -> None:
    data = FULL.encode()
    for end in range(len(data)):
        with pytest.raises(SpecError):
            StreamSpec.decode(data[:end])


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(SpecError):
        StreamSpec.decode(FULL.encode() + b"\x00")


@given(st.data())
def test_damaged_bytes_are_a_spec_or_a_spec_error(data: st.DataObject) -> None:
    damaged = bytearray(FULL.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        spec = StreamSpec.decode(bytes(damaged))
    except SpecError:
        return
    assert StreamSpec.decode(spec.encode()) == spec or "nan" in repr(spec)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(SpecError):
        StreamSpec.decode(data)


@given(st.sampled_from([f.name for f in dataclasses.fields(StreamSpec)]), PLAIN)
def test_any_value_in_any_field_is_stored_or_refused_by_name(name: str, value: Any) -> None:
    try:
        StreamSpec.decode(pack(fields(FULL, **{name: value})))
    except SpecError as error:
        assert str(error).startswith(name)
