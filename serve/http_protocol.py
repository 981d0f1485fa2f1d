"""What may arrive on a connection: uvicorn's HTTP/1.1, with bounds for clients that are slow, hostile, or only strange.

uvicorn gives the bytes to a parser that accepts a head without end, waits for the rest of it for ever, and closes a
connection under a client that is still sending. Here a connection is always in one of four parts:

    IDLE     between requests    while a response is being made, and uvicorn's ``timeout_keep_alive`` longer
    HEAD     a head is due       ``HEAD_TIMEOUT`` seconds for all of it, ``MAX_HEAD`` bytes; then 408, 431
    BODY     a body is coming    ``BODY_TIMEOUT`` seconds between two reads; then 408
    CLOSING  all has been said   what still arrives is dropped, ``LINGER`` seconds at most

CLOSING is there because a kernel that gets bytes for a closed socket answers with a reset, and a reset destroys an
answer that its client has not read yet. So whoever is refused in the middle of a request (no key, no such route, a head
too large) is told, and then listened to for a moment. An answered request is not read to its end otherwise: nobody can
make the server take megabytes for a 401.

Faults below HTTP are told with the same error object as all others, and at level debug alone: any stranger can cause
them, as often as he likes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from serve.errors import ApiError, BadRequestError
from serve.outlets import KEY, Outlet, Outlets

logger = logging.getLogger("tailrace.serve")

#: Bytes of a request line and its headers; also of all that is neither head nor body: chunk extensions, trailers.
MAX_HEAD = 64 << 10
#: Requests that a client may send ahead of the answer to an earlier one.
MAX_PIPELINED = 32
#: Seconds for a whole head; from the connection on, and from the first byte of it on.
HEAD_TIMEOUT = 30.0
#: Seconds without a byte of a body that is due.
BODY_TIMEOUT = 60.0
#: Seconds in which a client that has been refused may finish sending, and read why.
LINGER = 10.0
#: Seconds between the end of a time and its consequence: after a standstill of this process, time is up before the loop
#: has read what is there.
_GRACE = 0.05

_OFFER = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)


class Part(enum.Enum):
    """What of a request comes next."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    CLOSING = enum.auto()


#: Seconds that a part may take; an idle connection is uvicorn's affair.
TIMEOUTS = {Part.HEAD: HEAD_TIMEOUT, Part.BODY: BODY_TIMEOUT, Part.CLOSING: LINGER}


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    It also forgives clients that offer to go on in another protocol: Java's offers HTTP/2 with its first request. The
    parser stops behind a head with such an offer, and the body would be lost. Nothing is ever upgraded here, so the
    offer goes before the parser sees it, unless it comes in pieces.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        outlets: Outlets | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._outlets = outlets
        self._outlet: Outlet | None = None
        self._part = Part.HEAD
        #: bytes since the last byte of a body, or since the head began
        self._loose = 0
        #: whether a byte of the head that is due has come
        self._begun = False
        #: requests whose response is not complete
        self._open: list[RequestResponseCycle] = []
        self._fault: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timed: Part | None = None
        #: what a response is written with
        self.put: Callable[[bytes], None]
        self._gentle: _GentleTransport

    # -------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        if self._outlets is not None:
            self._outlet = self._outlets.opened(transport)
        self.put = transport.write if self._outlet is None else self._outlet.put
        self._gentle = _GentleTransport(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone. Every open request is told; uvicorn would tell the last one of several."""
        self._set_timer(None)
        self._forget_requests()
        if self._outlets is not None and self._outlet is not None:
            self._outlets.closed(self._outlet, exc)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        if self._outlet is not None:
            self._outlet.paused()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has taken enough for a response to be written on."""
        if self._outlet is not None:
            self._outlet.resumed()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """More bytes."""
        self._unset_keepalive_if_required()
        if self._part is Part.CLOSING:
            return
        if self._part is Part.IDLE:
            self._part, self._loose = Part.HEAD, 0
        if self._part is Part.HEAD and b"pgrade" in data:
            data = _without_offers(data)
        self._loose += len(data)
        if not self._parsed(data):
            return
        if self._loose > MAX_HEAD and self._part is not Part.IDLE:
            self._refuse(_head_too_large())
        else:
            self._watch()

    def _parsed(self, data: bytes) -> bool:
        """Feed the parser; False when that ended the connection."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # an offer that came in pieces; the parser will take nothing more
            self.cycle.keep_alive = False
        except httptools.HttpParserError as error:
            self._refuse(self._fault or _not_http(error))
        return not self.is_closing()

    # -------------------------------------------------------------------------------- what the parser finds

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if self._outlet is not None:
            self.scope["state"][KEY] = self._outlet
        self._part, self._loose, self._begun, self._timed = Part.HEAD, 0, True, None

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. A trailer comes here too: it is dropped, for nobody has checked it as one of the head."""
        if self._part is Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of a head: the request goes to the application."""
        if self.is_closing():
            raise ConnectionAbortedError  # the parser has more of what we no longer want
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD:
            self._fault = _head_too_large()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._fault = BadRequestError(f"More than {MAX_PIPELINED} requests wait for an answer.")
        if self._fault is not None:
            raise self._fault
        super().on_headers_complete()
        self._part = Part.BODY
        self.cycle.transport = self._gentle  # type: ignore[assignment]
        self._open.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Bytes of the body."""
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        super().on_message_complete()
        self._begun = False
        if self._part is not Part.CLOSING:
            self._part = Part.IDLE

    # -------------------------------------------------------------------------------- what is said to the client

    def on_response_complete(self) -> None:
        """An answer is whole; if it came before the end of its request, the rest of that is dropped."""
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        if self._awaits_rest():
            self._linger()
        if self._part is not Part.CLOSING:
            super().on_response_complete()

    def is_closing(self) -> bool:
        """Whether nothing more can be said."""
        return self._part is Part.CLOSING or self.transport.is_closing()

    def close_gently(self) -> None:
        """Close after an answer."""
        self._open = [cycle for cycle in self._open if not cycle.response_complete]
        if self._awaits_rest():
            self._linger()
        elif self._part is not Part.CLOSING:
            self.transport.close()

    def _awaits_rest(self) -> bool:
        """Whether a body is coming whose request has its answer."""
        return self._part is Part.BODY and not self._open

    def _refuse(self, error: ApiError) -> None:
        """Say what is wrong and close. Bytes in the middle of another answer would not be understood: only close."""
        if self.is_closing():
            return
        logger.debug("%s was refused: %d %s", self.client, error.status, error.message)
        if not self._open or (self._part is Part.BODY and not self._answering()):
            self.transport.write(_response(error, self.server_state.default_headers))
            self._linger()
        else:
            self._close()

    def _close(self) -> None:
        """Nothing follows, also of an answer that has begun."""
        if self._outlet is not None:
            self._outlet.closing()
        self.transport.close()

    def _answering(self) -> bool:
        return len(self._open) > 1 or self._open[0].response_started

    def _linger(self) -> None:
        """Nothing more is said; what still comes is dropped until the client closes or the time is up."""
        self._part = Part.CLOSING
        if self._outlet is not None:
            self._outlet.closing()
        self.pipeline.clear()
        self._forget_requests()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not under TLS, where the client sees the end by the content's length
            self.transport.write_eof()
        self._watch()

    def _forget_requests(self) -> None:
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open.clear()

    # -------------------------------------------------------------------------------- time

    def _watch(self) -> None:
        """Time what the client owes. A head has one deadline, however it trickles in, and so has the end; a body has a
        new one with every read."""
        if self._part is not self._timed or self._part is Part.BODY:
            self._timed = self._part
            self._set_timer(TIMEOUTS.get(self._part))

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = self.loop.call_later(_GRACE, self._expired)

    def _expired(self) -> None:
        if self._part is Part.CLOSING:
            self.transport.abort()
        elif self.flow.read_paused or (self._part is Part.HEAD and self._open):
            self._timed = None  # it is we who do not read, or still owe an answer
            self._watch()
        elif self._part is Part.HEAD and not self._begun:
            self.transport.close()
        else:
            self._refuse(BadRequestError("The request did not arrive in time.", status=408, code="request_timeout"))


class _GentleTransport:
    """What a response is written to: the connection's transport, but for the end."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: HttpProtocol) -> None:
        self.close = protocol.close_gently
        self.is_closing = protocol.is_closing
        self.write = protocol.put


def _without_offers(data: bytes) -> bytes:
    head, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"", head) + end + rest


def _not_http(error: httptools.HttpParserError) -> ApiError:
    ours = isinstance(error, httptools.HttpParserCallbackError)  # the parser took what uvicorn could not read
    said = "The request's target is not a path." if ours else f"This is not HTTP/1.1: {error}."
    return BadRequestError(said, code="invalid_http")


def _head_too_large() -> ApiError:
    message = f"Request line and headers are larger than {MAX_HEAD} bytes."
    return BadRequestError(message, status=431, code="headers_too_large")


def _response(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A whole HTTP response; like every other one it has an id, which no log needs to hold."""
    body = error.body()
    own = [(b"content-type", b"application/json"), (b"x-request-id", secrets.token_hex(16).encode())]
    own += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    lines = [b"%s: %s\r\n" % pair for pair in [*headers, *own]]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])
