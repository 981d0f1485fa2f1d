"""rid -> the connection that waits for it: one slot per request in which bytes gather until the connection takes them.

The slot of a client that keeps up is empty: once its response has begun, events go from ``feed`` into the transport
(``attach``). Only a client that does not keep up has them gather here; it finds more in its slot, not a longer queue of
chunks, and delays nobody else. What gathers is bounded: before more goes into the slot of an event stream, what waits
already (here, on its way into the transport, and in the transport) is held against ``client_buffer_bytes``, and a
client beyond it is disconnected. So the bound is that limit and one payload: a payload that is larger than the limit is
no backlog by itself, and neither is a unary body.

**Comments.** A stream that has begun and is silent gets ``: ping`` and a blank line (HTML standard, 9.2.6: a line that
starts with a colon is ignored), so that no proxy on the way takes it for dead. They go into an empty slot, hence
between events, since payloads are whole events; and they are not part of what the stream is a function of. A stream
that has not begun gets none: with the first byte the status is gone, and a request that fails in the queue has to be
able to say so with it.
"""

from __future__ import annotations

import asyncio

from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END
from serve.chunks import DONE
from serve.errors import EngineError, OverloadedError, stream_error
from serve.outlets import HIGH_WATER, Outlet

PING = b": ping\n\n"

#: What stands before a chunk of that many bytes (RFC 9112, 7.1).
_MANY = 4096
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(_MANY)]


class ClientStream:
    """The bytes of one response between the proxy, which feeds it, and the connection, which takes (``next``).

    ended: no bytes come any more once the slot is empty. failed: the request ended in an error. whole: the bytes are a
    JSON document and not an event stream: a unary body, or an error found before the first event. refusal: the request
    was not taken, and this is to be its answer. abandoned: nobody takes anything any more.
    """

    __slots__ = (
        "ended", "failed", "whole", "abandoned", "refusal", "_begun", "_parts", "_held", "_leaving", "_news", "_outlet",
        "_limit", "_tight", "_fed", "_quiet_since", "_direct", "_written",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ended = self.failed = self.whole = self.abandoned = False
        self.refusal: OverloadedError | None = None
        #: events are on their way to the client, so an error has to be one too
        self._begun = False
        self._parts: list[bytes] = []
        #: bytes that the transport does not have yet, and those of them that the writer has
        self._held = self._leaving = 0
        self._news = asyncio.Event()
        self._outlet: Outlet | None = None
        #: bytes that may wait; whether that is less than the transport takes before it stops the writer, so that the
        #: slot may be empty and the limit passed
        self._limit, self._tight = 0, False
        #: whether there has been news since the last tick, and since when there has been none
        self._fed, self._quiet_since = False, 0.0
        #: where events go without a stop, once they may; what it had written at the last tick
        self._direct: Outlet | None = None
        self._written = 0

    def bound(self, outlet: Outlet | None, limit: int) -> None:
        """Disconnect the client at ``outlet`` once more than ``limit`` bytes of events wait for it."""
        self._outlet, self._limit, self._tight = outlet, limit, limit < HIGH_WATER

    def attach(self) -> None:
        """The response has begun, in HTTP/1.1 chunks: from here on its events may go straight to the transport."""
        if not self._tight:
            self._direct = self._outlet

    def detach(self) -> None:
        """It is over, or its connection is another's."""
        self._direct = None

    def feed(self, payload: bytes, flags: int) -> None:
        """More bytes from a worker; flags as in ``executor.messages``."""
        direct = self._direct
        # What is held, here or by the writer, has to go first; and what ends the response ends it over there too.
        if direct is not None and direct.clear and not self._held and flags <= OUTPUT_END:
            if payload:  # an empty chunk would be the last one
                size = len(payload)
                direct.send((_CHUNK_HEADS[size] if size < _MANY else b"%x\r\n" % size) + payload + b"\r\n", size)
            return
        if (self._held or self._tight) and self._begun and self._backlog() > self._limit:
            self._drop()
            return
        if flags:
            if flags & FAILED and not payload:
                self.fail("The request was refused by its worker.")
                return
            self.whole, self.failed = bool(flags & BODY), bool(flags & FAILED)
            self.ended = bool(flags & REQUEST_END)
            if self.whole and self._begun:
                # A worker that took over only to say that the request fails does not know what its client has.
                self.whole, payload = False, b"data: " + payload + b"\n\n" + DONE
        if not self.whole:
            self._begun = True
        self._put(payload)

    def feed_parts(self, head: bytes, piece: bytes, tail: bytes) -> None:
        """``feed(head + piece + tail, 0)``, the parts copied once."""
        direct = self._direct
        if direct is not None and direct.clear and not self._held:
            size = len(head) + len(piece) + len(tail)
            begin = _CHUNK_HEADS[size] if size < _MANY else b"%x\r\n" % size
            direct.send(b"".join((begin, head, piece, tail, b"\r\n")), size)
        else:
            self.feed(head + piece + tail, 0)

    def fail(self, message: str) -> None:
        """End with an error that no worker has worded: an event once there have been events, else a document."""
        error = EngineError(message)
        event = stream_error(error.message, error.type, error.code) + DONE
        self.whole = not self._begun
        self.failed = self.ended = True
        self._put(event if self._begun else error.body())

    def refuse(self, message: str, status: int, retry_after: float) -> None:
        """End before the first byte: the executor did not take the request."""
        if self._begun:
            self.fail(message)
            return
        self.refusal = OverloadedError(message, retry_after=retry_after, status=status)
        self.failed = self.ended = True
        self._news.set()

    def abandon(self) -> None:
        """The client is gone: wake whoever waits in ``next``."""
        self.abandoned = True
        self._direct = None
        self._parts.clear()
        self._held = self._leaving = 0
        self._news.set()

    def tick(self, now: float, interval: float) -> None:
        """The time, in seconds. A comment when there has been no news for ``interval``, unless bytes wait."""
        written = 0 if self._outlet is None else self._outlet.written
        if self._fed or written != self._written:
            self._fed, self._written, self._quiet_since = False, written, now
        elif self._begun and not self.ended and not self._held and now - self._quiet_since >= interval:
            self._quiet_since = now
            if self._outlet is None or not self._outlet.waiting():
                self._put(PING)
                self._fed = False
                if self._outlet is not None:
                    self._written = written + len(PING)  # no news of ours, once it is written

    def _put(self, payload: bytes) -> None:
        if self.abandoned:
            return
        self._parts.append(payload)
        self._held += len(payload)
        self._fed = True
        self._news.set()

    def _backlog(self) -> int:
        return 0 if self._outlet is None else self._held + self._outlet.waiting()

    def _drop(self) -> None:
        """Keep nothing from here on. The writer stays where it is until the connection is cut: with the end of the
        stream, a client that reads after all would take half an answer for a whole one."""
        assert self._outlet is not None
        self._outlet.drop("bytes")
        self._direct = None
        self._parts.clear()
        self._held = self._leaving = 0
        self._limit, self._tight = -1, True

    async def next(self) -> bytes:
        """All bytes that have gathered, b"" when the response is over or its client gone. To be called again once they
        have been sent: from then on they are the transport's."""
        if leaving := self._leaving:
            self._held -= leaving
            self._leaving = 0
            if self._outlet is not None:
                self._outlet.written += leaving
        while not self._parts and not self.ended and not self.abandoned:
            self._news.clear()
            await self._news.wait()
        if self.abandoned:
            return b""
        parts, self._parts = self._parts, []
        self._leaving = self._held
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def all(self) -> bytes:
        """The whole response, once it has ended."""
        parts = []
        while part := await self.next():
            parts.append(part)
        return b"".join(parts)
