"""The HTTP server: uvicorn, with a life that the launcher decides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from serve.config import Config
from serve.http_protocol import HttpProtocol
from serve.outlets import Outlets
from serve.tls import tls_options

logger = logging.getLogger("tailrace.serve")

#: Seconds that a connection may be idle between requests. Longer than clients and proxies keep theirs (5 to 60 s): who
#: closes first must not be we, or a request that is on its way finds nobody.
KEEP_ALIVE_TIMEOUT = 75

#: Seconds between two looks at the clock for the date header, which shows seconds.
_DATE_INTERVAL = 1.0

#: Connections that are accepted in one turn of the event loop. uvloop accepts one per listening socket and turn, and
#: under load a turn is as long as it takes to write to everybody: a thousand clients that come together would wait for
#: a thousand of them.
_ACCEPTS = 16


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the launcher decides the order of the shutdown.

    outlets: told of every connection. ended: set once it serves nobody any more.
    """

    def __init__(self, app: ASGIApp, config: Config, outlets: Outlets) -> None:
        super().__init__(_uvicorn_config(_with_cors(app, config.cors_origin), config, outlets))
        self._outlets = outlets
        self.ended = asyncio.Event()
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve in the background; returns once requests are answered. OSError if that fails."""
        if self.config.is_ssl:
            asyncio.get_running_loop().set_exception_handler(_note_exception)
        self._outlets.prepare(listener)
        self._task = asyncio.create_task(self.serve([listener, *(listener.dup() for _ in range(_ACCEPTS - 1))]))
        while not self.started:
            if self._task.done():
                raise OSError(f"HTTP did not start: {self._task.exception()}")
            await asyncio.sleep(0.01)

    async def stop(self, timeout: float) -> None:
        """Close all connections; what still runs after ``timeout`` seconds is cancelled."""
        self.should_exit = True
        self._leaving.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def main_loop(self) -> None:
        """uvicorn's turns ten times a second, to see whether it should exit. Each wake of an idle process costs 0.1 ms
        of CPU, and nothing but the date in the headers changes without being told."""
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), _DATE_INTERVAL)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        try:
            yield
        finally:
            self.ended.set()


def _uvicorn_config(app: ASGIApp, config: Config, outlets: Outlets) -> uvicorn.Config:
    protocol: Any = functools.partial(HttpProtocol, outlets=outlets)
    return uvicorn.Config(
        app, log_config=None, lifespan="off", access_log=False, http=protocol, ws="none",
        server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_TIMEOUT, timeout_graceful_shutdown=1,
        **tls_options(config),
    )  # fmt: skip


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Answer what browsers ask before they let a page of these origins call us; without any there is no layer, and no
    page is let. Headers are mirrored: OpenAI's client for browsers sends a dozen of its own. Cookies play no part."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.lower() for origin in origins],  # as browsers write them
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["X-Request-Id", "Retry-After", "Server-Timing"],
    )


def _note_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A handshake that fails is a stranger's fault, not ours: no error in the log, let alone a traceback."""
    if isinstance(error := context.get("exception"), ssl.SSLError):
        logger.debug("TLS: %s", error)
    else:
        loop.default_exception_handler(context)
