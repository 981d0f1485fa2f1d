"""From a read request to a written response, for every route that generates: what they share besides their formats.

Everybody is refused here who is refused before the first byte: while the server is not ready, while as many requests
are open as may be, and when the executor does not take one.

A request is open from the end of its body to the end of its response. So a burst cannot all be tokenized at once, and
clients that send their bodies byte by byte keep nobody out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from executor.proxy import GenerationExecutor
from executor.request import GenerationRequest
from executor.result import ResultError
from executor.sink import Sink
from serve.admission import Minted
from serve.board import Board
from serve.body import parse
from serve.errors import OverloadedError
from serve.http import Header, check_json, read_body, send_stream, since_arrival, watched
from serve.limits import ClientLimits
from serve.outlets import Outlets, outlet_of
from serve.prompts import Prompts
from serve.streams import ClientStream
from serve.timings import TimedSink, ask_timings, timings_of

Model = TypeVar("Model", bound=Any)

#: Bodies from this size on are parsed in a thread: 1 MB of JSON takes about 10 ms.
_LARGE_BODY = 128 << 10


#: Seconds after which a refused client may try again: a request of many ends soon, a restart or a drain takes longer.
_SOON, _LATER = 1.0, 5.0


@dataclass(slots=True)
class ServerState:
    """What changes while a server runs. restarting: what is being restarted; ending: why the server ends;
    executor_restarts: how often there had to be a new one."""

    started: float = field(default_factory=time.time)
    executor_restarts: int = 0
    draining: bool = False
    restarting: str | None = None
    ending: str | None = None

    @property
    def unready(self) -> str | None:
        """Why nobody is admitted, the most final reason first; None when all is well."""
        if self.ending is not None:
            return f"ending: {self.ending}"
        return "draining" if self.draining else self.restarting


class Gateway:
    """The way in and out.

    observe: told the seconds from a request's arrival to the first bytes of its stream. refused: told the reason, for
    each request that is refused: ``requests``, ``queue``, ``timeout``, ``unready``. outlets: where its clients are.
    board: where other front ends tell how many they have.
    """

    def __init__(
        self,
        proxy: GenerationExecutor,
        prompts: Prompts,
        state: ServerState,
        limits: ClientLimits | None = None,
        *,
        observe: Callable[[float], object] = lambda seconds: None,
        refused: Callable[[str], object] = lambda reason: None,
        outlets: Outlets | None = None,
        board: Board | None = None,
    ) -> None:
        self._proxy, self._prompts, self._state = proxy, prompts, state
        self._limits = ClientLimits() if limits is None else limits
        self._observe, self._refused = observe, refused
        self._outlets = Outlets(self._limits) if outlets is None else outlets
        self._board = Board.alone() if board is None else board
        #: requests whose body has been read, by the identity of their scope
        self._open: set[int] = set()

    def check_ready(self) -> None:
        """OverloadedError (503) while nobody is admitted."""
        if self._state.unready is not None:
            self._refused("unready")
            raise OverloadedError(f"The server is {self._state.unready}.", retry_after=_LATER, status=503)

    def begin(self, scope: Scope) -> None:
        """A request that wants something generated is here. OverloadedError (503) while nobody is admitted,
        BadRequestError for a header that asks for something else than timings."""
        self.check_ready()
        ask_timings(scope)

    def leave(self, scope: Scope) -> None:
        """A request is over, however it ended; for any request."""
        self._open.discard(id(scope))
        self._tell()

    @property
    def open_requests(self) -> int:
        """Of all front ends: requests in their hands, or in the executor, where one that a client has left lives on
        until its end is confirmed."""
        self._tell()
        return self._board.total("taken")

    def _tell(self) -> None:
        self._board.tell("taken", max(len(self._open), self._proxy.open_requests))

    def _enter(self, scope: Scope) -> None:
        """Count a request in. OverloadedError (429) when as many are open as may be."""
        if self.open_requests >= self._limits.max_requests:
            self._refused("requests")
            message = f"The server has {self._limits.max_requests} requests open, which is its limit."
            raise OverloadedError(message, retry_after=_SOON)
        self._open.add(id(scope))
        self._tell()

    async def parsed(self, model: type[Model], scope: Scope, receive: Receive) -> Model:
        """The request's body as ``model``; a 4xx for anything else. Its request is open from here on."""
        check_json(scope)
        body = await read_body(receive, self._limits.max_body_bytes)
        self._enter(scope)
        large = len(body) >= _LARGE_BODY
        request = await self._prompts.parse(lambda: parse(model, body)) if large else parse(model, body)
        _mark(scope, "parsed")
        return request

    def mint(self, prefix: str) -> Minted:
        """All that is random or clock-like about a request, once; from here on it is a function of its tokens."""
        return Minted(self._proxy.mint(), prefix + secrets.token_hex(16), int(time.time()), secrets.randbits(62))

    async def answer(
        self,
        request: GenerationRequest,
        streams: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: list[Header],
        stream: ClientStream | None = None,
    ) -> int:
        """Submit, write what comes, and abort if the client leaves; returns the status. stream: where bytes gather.
        OverloadedError when the request is refused."""
        waiting = ClientStream() if stream is None else stream
        self._bound(waiting, scope, headers)
        self.check_ready()  # again: the shutdown may have begun while the prompt was being tokenized
        self._submit(request, waiting, scope)
        self._outlets.add(waiting)
        try:
            writer = send_stream(send, waiting, headers, lambda: self._first(scope, streams), timings_of(scope))
            return int(await watched(receive, waiting, writer))
        finally:
            self._outlets.discard(waiting)
            if waiting.refusal is not None:
                self._refused("queue" if waiting.refusal.status == 429 else "timeout")
            elif not waiting.ended:  # the client left, or writing to it failed
                self._proxy.discard(request.rid)

    def _bound(self, stream: ClientStream, scope: Scope, headers: list[Header]) -> None:
        outlet = outlet_of(scope)
        stream.bound(outlet, self._limits.client_buffer_bytes)
        if outlet is not None:
            outlet.label = dict(headers).get(b"x-request-id", b"")

    def _submit(self, request: GenerationRequest, stream: ClientStream, scope: Scope) -> None:
        sink: Sink = stream
        if (timings := timings_of(scope)) is not None:
            timings.mark("submitted")
            sink = TimedSink(stream, timings, self._proxy, request.rid)
        try:
            self._proxy.open(request, sink)
        except ResultError as error:  # its queue is full: it hangs
            self._refused("queue")
            raise OverloadedError(f"The request was refused: {error}.", retry_after=_LATER, status=503) from error

    def _first(self, scope: Scope, streams: bool) -> None:
        _mark(scope, "first")
        if streams:
            self._observe(since_arrival(scope))


def _mark(scope: Scope, name: str) -> None:
    if (timings := timings_of(scope)) is not None:
        timings.mark(name)
