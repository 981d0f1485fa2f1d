"""The HTTP server: uvicorn, with a life that the launcher decides and a protocol that forgives what clients do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.config import Config

_OFFER = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol for clients that offer to go on in another one: Java's offers HTTP/2 with its first request.

    The parser stops behind a head with such an offer, and the body of the request would be lost. Nothing is ever
    upgraded here, so the offer goes before the parser sees it; a head that comes in pieces keeps it, and fails as
    before.
    """

    def data_received(self, data: bytes) -> None:
        """More bytes from the client."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and b"pgrade" in data:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"", head) + end + rest
        super().data_received(data)


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the launcher decides the order of the shutdown.

    ended: set once it serves nobody any more.
    """

    def __init__(self, app: ASGIApp, config: Config) -> None:
        super().__init__(_uvicorn_config(app, config))
        self.ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve in the background; returns once requests are answered. OSError if that fails."""
        self._task = asyncio.create_task(self.serve([listener]))
        while not self.started:
            if self._task.done():
                raise OSError(f"HTTP did not start: {self._task.exception()}")
            await asyncio.sleep(0.01)

    async def stop(self, timeout: float) -> None:
        """Close all connections; what still runs after ``timeout`` seconds is cancelled."""
        self.should_exit = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        try:
            yield
        finally:
            self.ended.set()


def _uvicorn_config(app: ASGIApp, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_config=None, lifespan="off", access_log=False, http=HttpProtocol, ws="none",
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
