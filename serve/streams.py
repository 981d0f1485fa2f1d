"""rid -> the connection that waits for it: one slot per request in which bytes gather until the connection takes them.

A client that reads slowly finds more in its slot, not a longer queue of chunks, and delays nobody else.
"""

from __future__ import annotations

import asyncio

from executor.messages import BODY, FAILED, REQUEST_END
from serve.chunks import DONE
from serve.errors import EngineError, stream_error


class ClientStream:
    """The bytes of one response between the proxy, which feeds it, and the connection, which takes (``next``).

    ended: no bytes come any more once the slot is empty. failed: the request ended in an error. whole: the bytes are a
    JSON document and not an event stream: a unary body, or an error found before the first event.
    """

    __slots__ = ("ended", "failed", "whole", "abandoned", "_begun", "_parts", "_news")

    def __init__(self) -> None:
        self.ended = self.failed = self.whole = self.abandoned = False
        #: events are on their way to the client, so an error has to be one too
        self._begun = False
        self._parts: list[bytes] = []
        self._news = asyncio.Event()

    def feed(self, payload: bytes, flags: int) -> None:
        """More bytes from a worker; flags as in ``executor.messages``."""
        if flags & FAILED and not payload:
            self.fail("The request was refused by its worker.")
            return
        if flags:
            self.whole = bool(flags & BODY)
            self.failed = bool(flags & FAILED)
            self.ended = bool(flags & REQUEST_END)
        if self.whole and self._begun:
            # A worker that took over only to say that the request fails does not know what its client has.
            self.whole, payload = False, b"data: " + payload + b"\n\n" + DONE
        self._begun = self._begun or not self.whole
        self._parts.append(payload)
        self._news.set()

    def fail(self, message: str) -> None:
        """End with an error that no worker has worded: an event once there have been events, else a document."""
        error = EngineError(message)
        event = stream_error(error.message, error.type, error.code) + DONE
        self._parts.append(event if self._begun else error.body())
        self.whole = not self._begun
        self.failed = self.ended = True
        self._news.set()

    def abandon(self) -> None:
        """The client is gone: wake whoever waits in ``next``."""
        self.abandoned = True
        self._news.set()

    async def next(self) -> bytes:
        """All bytes that have gathered, b"" when the response is over or its client gone."""
        while not self._parts and not self.ended and not self.abandoned:
            self._news.clear()
            await self._news.wait()
        if self.abandoned:
            return b""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def all(self) -> bytes:
        """The whole response, once it has ended."""
        parts = []
        while part := await self.next():
            parts.append(part)
        return b"".join(parts)
