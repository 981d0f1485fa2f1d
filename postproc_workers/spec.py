"""The spec of a stream: all that never changes about it and that a worker needs, sent once, before the first token.

What a client has received after k tokens is a pure function of this spec and those k tokens. So everything random or
clock-like (response id, creation time) is already inside, and a worker that takes over a stream needs nothing else.

On the wire a spec is one MessagePack map from field name to plain data (nil, bool, int, float, str, array, map with
str keys). The executor carries the bytes without decoding them, so :meth:`StreamSpec.decode` is the only gate between
a damaged frame and a worker's state: it accepts exactly the fields below, checks every type and length, and names the
field it refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from executor.messages import MAX_OUTPUTS
from postproc_workers.stop_gate import read_gate
from postproc_workers.stop_strings import MAX_STOPS

MAX_STOP_CHARS = 1024  #: a stop string may be held back for its whole length
MAX_STOP_TOKEN_IDS = 1024
MAX_VISIBLE_TOKENS = 64
MAX_TOP_LOGPROBS = 20
MAX_STREAM_INTERVAL = 1000  #: tokens whose text one event may wait for
MAX_TOKEN_ID = (1 << 31) - 1  #: ids are 4 bytes, signed, in a step's columns
MAX_DEPTH = 256  #: nesting of ``args`` and ``recording``; MessagePack libraries themselves give up at 511 to 1024


class SpecError(ValueError):
    """A spec that cannot be used; the message names the field."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Everything a worker knows of one request's stream besides its tokens.

    post_processor: name in the table of post-processors that the worker was given.
    args: the post-processor's arguments, plain data.
    outputs: choices over all prompts, 1 to 65536.
    streaming: events as they come, or one document at the end.
    prompt_tokens: length of all prompts together, in tokens; counted once however many choices a prompt has.
    continuation: the text continues the prompt (completions): a space before its first word stays.
    visible_tokens: texts of special tokens that are shown even where special tokens are skipped: parsers look for them.
    stop: up to 16 strings that end an output; ``include_stop`` leaves the one that matched in the text.
    stop_gate: (inside, opens, closes) of a reasoning block in which stop strings are not looked for (``stop_gate.py``).
    stop_token_ids: the client's own; an output that one of them ended reports it as its stop reason.
    logprobs: None is off, 0 the sampled token's only, k > 0 also the k most likely ones.
    stream_interval: tokens per event, 1 to 1000; None: as the worker was started. A document has no events.
    split_steps: every token that makes text has an event of its own, however many came in a row; ``stream_interval`` is
        1 then, whatever it says.
    token_pieces: the post-processor wants the text of each token (``CompletionOutput.pieces``), to count tokens by it.
    recording: what a recording server keeps about the request: ``name``, ``endpoint``, ``request``, ``server`` and
        perhaps ``prompt``, under the keys of the public recording format; None when nothing is recorded.
    """

    post_processor: str
    args: dict[str, Any]
    outputs: int
    streaming: bool
    prompt_tokens: int
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    continuation: bool = False
    visible_tokens: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_gate: tuple[Any, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    stream_interval: int | None = None
    split_steps: bool = False
    token_pieces: bool = False
    recording: dict[str, Any] | None = None

    def encode(self) -> bytes:
        """The spec as a MessagePack map. Raises SpecError if ``args`` or ``recording`` hold more than plain data."""
        try:
            packed = msgpack.packb({name: getattr(self, name) for name in _FIELDS})
        except (TypeError, ValueError, OverflowError) as error:
            raise SpecError(f"spec: not plain data: {error}") from error
        assert isinstance(packed, bytes)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> StreamSpec:
        """The inverse of :meth:`encode`. Raises SpecError for anything that ``encode`` cannot have written."""
        try:
            fields = msgpack.unpackb(data, ext_hook=_no_extension)
        except (TypeError, ValueError) as error:  # truncated, trailing bytes, bad UTF-8, a key that is no str
            raise SpecError(f"spec: not a MessagePack map: {error}") from error
        if not isinstance(fields, dict):
            raise SpecError(f"spec: a map is needed, got {type(fields).__name__}")
        _check_names(fields)
        return cls(**{name: _CHECKS[name](name, value) for name, value in fields.items()})


_FIELDS = tuple(f.name for f in dataclasses.fields(StreamSpec))
_REQUIRED = tuple(f.name for f in dataclasses.fields(StreamSpec) if f.default is dataclasses.MISSING)


def _check_names(fields: dict[Any, Any]) -> None:
    for name in _REQUIRED:
        if name not in fields:
            raise SpecError(f"{name}: missing")
    for name in fields:
        if name not in _CHECKS:
            raise SpecError(f"{name!r}: unknown field")


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} is not plain data")


def _refuse(name: str, expected: str, value: object) -> SpecError:
    return SpecError(f"{name}: {expected} is needed, got {type(value).__name__}")


def _name(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(name, "a string", value)
    if not 1 <= len(value) <= 128:
        raise SpecError(f"{name}: 1 to 128 characters are needed, got {len(value)}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, "a boolean", value)
    return value


def _number(low: int, high: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _refuse(name, "an integer", value)
        if not low <= value <= high:
            raise SpecError(f"{name}: {low} to {high} is needed, got {value}")
        return value

    return check


def _optional(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _tuple_of(check: Callable[[str, object], Any], most: int) -> Callable[[str, object], tuple[Any, ...]]:
    def check_all(name: str, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _refuse(name, "an array", value)
        if len(value) > most:
            raise SpecError(f"{name}: at most {most} entries, got {len(value)}")
        return tuple(check(f"{name}[{i}]", entry) for i, entry in enumerate(value))

    return check_all


def _stop(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(name, "a string", value)
    if not 1 <= len(value) <= MAX_STOP_CHARS:
        raise SpecError(f"{name}: 1 to {MAX_STOP_CHARS} characters are needed, got {len(value)}")
    return value


def _gate(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _refuse(name, "an array", value)
    _check_plain(name, value)
    try:
        read_gate(value)
    except ValueError as error:
        raise SpecError(str(error)) from error
    return tuple(value)


def _plain_map(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(name, "a map", value)
    _check_plain(name, value)
    return value


def _check_plain(name: str, value: object) -> None:
    """Breadth first, one level at a time: a nested value costs no stack, and its depth is the number of rounds."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for container in level for child in _children(name, container)]
        if not level:
            return
    raise SpecError(f"{name}: nested deeper than {MAX_DEPTH} levels")


def _children(name: str, container: dict[str, Any] | list[Any]) -> list[Any]:
    """The containers directly inside ``container``; its other entries must be plain scalars, its keys strings."""
    if isinstance(container, dict) and not all(isinstance(key, str) for key in container):
        raise SpecError(f"{name}: a key inside is not a string")
    found = []
    for entry in container.values() if isinstance(container, dict) else container:
        if isinstance(entry, dict | list):
            found.append(entry)
        elif entry is not None and not isinstance(entry, str | int | float):
            raise SpecError(f"{name}: {type(entry).__name__} inside is not plain data")
    return found


#: one check per field: (name, decoded value) -> the value to store, or SpecError
_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "post_processor": _name,
    "args": _plain_map,
    "outputs": _number(1, MAX_OUTPUTS),
    "streaming": _flag,
    "prompt_tokens": _number(0, (1 << 63) - 1),
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "continuation": _flag,
    "visible_tokens": _tuple_of(_name, MAX_VISIBLE_TOKENS),
    "stop": _tuple_of(_stop, MAX_STOPS),
    "include_stop": _flag,
    "stop_gate": _optional(_gate),
    "stop_token_ids": _tuple_of(_number(0, MAX_TOKEN_ID), MAX_STOP_TOKEN_IDS),
    "logprobs": _optional(_number(0, MAX_TOP_LOGPROBS)),
    "stream_interval": _optional(_number(1, MAX_STREAM_INTERVAL)),
    "split_steps": _flag,
    "token_pieces": _flag,
    "recording": _optional(_plain_map),
}
