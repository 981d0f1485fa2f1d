"""A request's own timings, for a client that asks with ``X-Timings: 1``. Nobody else pays for them.

An event stream tells them in a comment behind its last event, like the comments of ``streams.py``: clients ignore it,
and it is no part of what the stream is a function of. A document has them in its head, as ``Server-Timing`` (W3C Server
Timing, https://www.w3.org/TR/server-timing/).

    parse     the request's head is here  ->  its body has been read and checked
    tokenize  that                        ->  the prompt is rendered, tokenized, admitted and sent to the executor
    queue     that                        ->  the first bytes have come from a worker
    first     the request's head is here  ->  the first bytes are handed to the connection
    total     the request's head is here  ->  the last bytes are

All in milliseconds. ``tokens``: generated, over all choices. Of streams also ``chunks``: pieces that came from workers,
of one event or more; ``lag_mean`` and ``lag_max``: from the executor shipping a piece's oldest step to the piece being
handed to the connection.
"""

from __future__ import annotations

import time

import orjson
from starlette.types import Scope

from executor.messages import REQUEST_END
from executor.proxy import GenerationExecutor
from serve.errors import BadRequestError
from serve.streams import ClientStream

_KEY = "tailrace.timings"

#: name -> the marks between which it is
_SPANS = {
    "parse": ("arrived", "parsed"),
    "tokenize": ("parsed", "submitted"),
    "queue": ("submitted", "heard"),
    "first": ("arrived", "first"),
    "total": ("arrived", "ended"),
}


def ask_timings(scope: Scope) -> None:
    """Read ``X-Timings``: 1 asks for timings, 0 is as if absent. BadRequestError for anything else."""
    for name, value in scope["headers"]:
        if name != b"x-timings":
            continue
        if value not in (b"0", b"1"):
            raise BadRequestError("X-Timings must be 0 or 1.", param="X-Timings", code="invalid_value")
        if value == b"1":
            scope["state"][_KEY] = Timings(scope["state"]["arrived"])


def timings_of(scope: Scope) -> Timings | None:
    """The request's timings, where its client has asked for them."""
    timings: Timings | None = scope["state"].get(_KEY)
    return timings


class Timings:
    """arrived: seconds on the monotonic clock. tokens: generated, once that is known."""

    __slots__ = ("tokens", "_marks", "_chunks", "_lags", "_lag", "_worst")

    def __init__(self, arrived: float) -> None:
        self.tokens: int | None = None
        self._marks = {"arrived": arrived}
        #: pieces; those of which the lag is known, the sum of it and its maximum (nanoseconds)
        self._chunks = self._lags = self._lag = self._worst = 0

    def mark(self, name: str) -> None:
        """``parsed``, ``submitted``, ``heard``, ``first`` or ``ended``: it is now. The first time counts."""
        self._marks.setdefault(name, time.monotonic())

    def chunk(self, stamp: int) -> None:
        """A piece has been handed over. stamp: of its oldest step, CLOCK_MONOTONIC nanoseconds; 0 if not known."""
        self._chunks += 1
        if stamp:
            lag = max(0, time.monotonic_ns() - stamp)
            self._lags, self._lag, self._worst = self._lags + 1, self._lag + lag, max(self._worst, lag)

    def comment(self) -> bytes:
        """What ends an event stream."""
        self.mark("ended")
        figures: dict[str, float] = self._spans() | self._counts() | {"chunks": self._chunks}
        if self._lags:
            figures |= {"lag_mean": _ms(self._lag / self._lags / 1e9), "lag_max": _ms(self._worst / 1e9)}
        return b": timings " + orjson.dumps(figures) + b"\n\n"

    def header(self) -> tuple[bytes, bytes]:
        """What goes ahead of a document, whose bytes all leave at once."""
        self.mark("first")
        self.mark("ended")
        spans = [f"{name};dur={value}" for name, value in self._spans().items()]
        counts = [f'{name};desc="{value}"' for name, value in self._counts().items()]
        return b"server-timing", ", ".join([*spans, *counts]).encode()

    def _spans(self) -> dict[str, float]:
        """What is known: a request that failed may have skipped a mark."""
        marks = self._marks
        return {name: _ms(marks[to] - marks[at]) for name, (at, to) in _SPANS.items() if at in marks and to in marks}

    def _counts(self) -> dict[str, int]:
        return {} if self.tokens is None else {"tokens": self.tokens}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


class TimedSink:
    """Between the proxy and a stream: looks at the clock and passes on."""

    def __init__(self, stream: ClientStream, timings: Timings, proxy: GenerationExecutor, rid: int) -> None:
        self._stream, self._timings, self._proxy, self._rid = stream, timings, proxy, rid

    def feed(self, payload: bytes, flags: int) -> None:
        timings = self._timings
        timings.mark("heard")
        if flags & REQUEST_END:
            timings.tokens = self._proxy.tokens_of(self._rid)
        self._stream.feed(payload, flags)
        if payload:
            timings.chunk(self._proxy.stamp)

    def feed_parts(self, head: bytes, piece: bytes, tail: bytes) -> None:
        self.feed(head + piece + tail, 0)

    def fail(self, message: str) -> None:
        self._stream.fail(message)

    def refuse(self, message: str, status: int, retry_after: float) -> None:
        self._stream.refuse(message, status, retry_after)
