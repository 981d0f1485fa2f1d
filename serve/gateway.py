"""From a read request to a written response, for every route that generates: what they share besides their formats."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from executor.proxy import GenerationExecutor
from executor.request import GenerationRequest
from serve.admission import Minted
from serve.body import parse
from serve.errors import OverloadedError
from serve.http import Header, check_json, read_body, send_stream, since_arrival, watched
from serve.prompts import Prompts
from serve.streams import ClientStream

Model = TypeVar("Model", bound=Any)

#: Bodies from this size on are parsed in a thread: 1 MB of JSON takes about 10 ms.
_LARGE_BODY = 128 << 10


@dataclass(slots=True)
class ServerState:
    """What changes while a server runs. ``unready``: why nobody is admitted, None when all is well."""

    started: float = field(default_factory=time.time)
    unready: str | None = None


class Gateway:
    """The way in and out. observe: told the seconds from a request's arrival to the first bytes of its stream."""

    def __init__(
        self,
        proxy: GenerationExecutor,
        prompts: Prompts,
        state: ServerState,
        *,
        observe: Callable[[float], object] = lambda seconds: None,
        max_body_bytes: int = 32 << 20,
    ) -> None:
        self._proxy, self._prompts, self._state = proxy, prompts, state
        self._observe, self._limit = observe, max_body_bytes

    def check_ready(self) -> None:
        """OverloadedError (503) while nobody is admitted."""
        if self._state.unready is not None:
            raise OverloadedError(f"The server is {self._state.unready}.", retry_after=5, status=503)

    async def parsed(self, model: type[Model], scope: Scope, receive: Receive) -> Model:
        """The request's body as ``model``; a 4xx for anything else."""
        check_json(scope)
        body = await read_body(receive, self._limit)
        if len(body) < _LARGE_BODY:
            return parse(model, body)
        return await self._prompts.parse(lambda: parse(model, body))

    def mint(self, prefix: str) -> Minted:
        """All that is random or clock-like about a request, once; from here on it is a function of its tokens."""
        return Minted(self._proxy.mint(), prefix + uuid.uuid4().hex, int(time.time()), secrets.randbits(62))

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
        """Submit, write what comes, and abort if the client leaves; returns the status. stream: where bytes gather."""
        waiting = ClientStream() if stream is None else stream
        self.check_ready()  # again: the shutdown may have begun while the prompt was being tokenized
        self._proxy.open(request, waiting)
        try:
            writer = send_stream(send, waiting, headers, lambda: self._first(scope, streams))
            return int(await watched(receive, waiting, writer))
        finally:
            if not waiting.ended:  # the client left, or writing to it failed
                self._proxy.discard(request.rid)

    def _first(self, scope: Scope, streams: bool) -> None:
        if streams:
            self._observe(since_arrival(scope))
