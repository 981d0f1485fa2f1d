"""A client that costs little, so that what is measured is the server.

Connections are asyncio protocols that hand each read to the answer they are for: no stream, no task and no wake-up per
chunk. They are kept and used again, the last one first. On a connection that was kept, the server may hang up at the
moment of our next request: if not a byte of the answer has come, it is sent again on a new one, once.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from .answer import Answer, StreamAnswer
from .outcome import Outcome

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """A server. tls: None for plain HTTP. headers: sent with every request."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, headers: Iterable[tuple[str, str]] = (), insecure: bool = False) -> Target:
        """From ``http://HOST:PORT`` or ``https://...``; headers may replace our own, whatever their case."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        own = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "User-Agent": "bench_serving"}
        if key := os.environ.get("OPENAI_API_KEY"):
            own["Authorization"] = f"Bearer {key}"
        given = dict(headers)
        kept = {name: value for name, value in own.items() if name.lower() not in {name.lower() for name in given}}
        tls = _tls(insecure) if secure else None
        return cls(parts.hostname or "", parts.port or (443 if secure else 80), tls, tuple((kept | given).items()))

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A request's bytes."""
        own = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))] if body else []
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in [*self.headers, *own])]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Connection(asyncio.Protocol):
    """One connection, and the answer that it is for."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None

    @property
    def open(self) -> bool:
        """Whether a request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, answer: Answer) -> None:
        """Send a request; what comes back goes to ``answer``."""
        assert self._transport is not None
        self._answer = answer
        self._transport.write(request)

    def release(self) -> None:
        """Its answer has come."""
        self._answer = None

    def abort(self) -> None:
        """Hang up."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    # -------------------------------------------------------------------------------- for asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.receive(data)
        else:
            self.abort()  # nobody has asked

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is not None:
            self._answer.lost(exc)


class Client:
    """Sends requests to one server.

    timeout: seconds for a whole answer; 0: for ever.
    """

    def __init__(self, target: Target, timeout: float = 0.0, clock: Clock = perf_counter) -> None:
        self.target, self.clock = target, clock
        self._timeout = timeout
        self._idle: list[Connection] = []

    async def stream(self, path: str, body: bytes, queued: float = 0.0) -> Outcome:
        """Post a body and read the stream that answers it. Whatever happens to it is in the outcome.

        queued: seconds that the request waited for its turn; only noted.
        """
        loop = asyncio.get_running_loop()
        outcome = Outcome(self.clock(), queued)
        request = self.target.request("POST", path, body)

        def make() -> Answer:
            return StreamAnswer(loop.create_future(), outcome, self.clock)

        outcome.error = await self._within(self._send(request, make))
        outcome.finished = True
        if outcome.error or not outcome.end:
            outcome.end = self.clock()
        return outcome

    async def document(self, path: str) -> bytes:
        """Get a document. Raises OSError with the reason when that fails."""
        loop = asyncio.get_running_loop()
        answers: list[Answer] = []

        def make() -> Answer:
            answers.append(Answer(loop.create_future()))
            return answers[-1]

        if error := await self._within(self._send(self.target.request("GET", path), make)):
            raise OSError(f"GET {path}: {error}")
        return answers[-1].body

    def close(self) -> None:
        """Hang up on all that is idle."""
        while self._idle:
            self._idle.pop().abort()

    # -------------------------------------------------------------------------------- one request

    async def _within(self, sending: Coroutine[Any, Any, Answer]) -> str:
        """The answer's error, or that it took too long; empty when it has come."""
        if not self._timeout:
            return (await sending).error
        try:
            return (await asyncio.wait_for(sending, self._timeout)).error
        except asyncio.TimeoutError:
            return f"no whole answer within {self._timeout:g} s"

    async def _send(self, request: bytes, make: Callable[[], Answer]) -> Answer:
        answer = make()
        if (kept := self._kept()) is not None:
            await self._attempt(kept, request, answer)
            if answer.begun or not answer.error:
                return answer
            answer = make()
        try:
            fresh = await self._connect()
        except OSError as error:
            answer.fail(f"cannot connect: {error}")
        else:
            await self._attempt(fresh, request, answer)
        return answer

    async def _attempt(self, connection: Connection, request: bytes, answer: Answer) -> None:
        try:
            connection.send(request, answer)
            await answer.done
        finally:  # also when it is cancelled: the server shall notice
            if answer.keep_alive:
                connection.release()
                self._idle.append(connection)
            else:
                connection.abort()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop, target = asyncio.get_running_loop(), self.target
        _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls)
        return connection
