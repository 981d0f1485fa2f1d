"""A real HTTP server that answers as a test says, and a clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


@dataclass
class Clock:
    """Seconds, moved by hand. ``read`` is set whenever somebody asks for the time."""

    now: float = 100.0
    read: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self) -> float:
        self.read.set()
        return self.now


@dataclass(frozen=True)
class Request:
    """What came in. headers: lower case names. hung_up: to wait until the client is gone."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    hung_up: Callable[[], Awaitable[bytes]]


Answerer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class ScriptedServer:
    """Requests, in the order in which they came, and on how many connections."""

    answer: Answerer
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    peak: int = 0
    _handlers: dict[asyncio.Task[Any], asyncio.StreamWriter] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = writer
        # A client that hangs up, in the middle of whatever it is.
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                request = await _request(reader)
                self.requests.append(request)
                self.open += 1
                self.peak = max(self.peak, self.open)
                try:
                    await self.answer(request, writer)
                    await writer.drain()
                finally:
                    self.open -= 1
        writer.close()

    async def close(self) -> None:
        """Hang up on everybody."""
        for writer in self._handlers.values():
            writer.transport.abort()
        await asyncio.gather(*self._handlers)


async def _request(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(body) if body else None, reader.read)


@contextlib.asynccontextmanager
async def serving(answer: Answerer, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedServer]:
    """A server on a free port."""
    scripted = ScriptedServer(answer)
    server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()[:2]
    scripted.url = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield scripted
    finally:
        server.close()
        await scripted.close()


# ------------------------------------------------------------------------------------------------ what it writes


def event(**fields: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
    """A chat chunk."""
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


def usage(read: int, written: int) -> bytes:
    """The event after the last chunk."""
    return event(choices=[], usage={"prompt_tokens": read, "completion_tokens": written})


def chat(*texts: str, read: int = 7) -> list[bytes]:
    """The events of a chat answer whose tokens are these."""
    ends = [delta("length"), usage(read, len(texts)), DONE]
    return [delta(role="assistant", content=""), *(delta(content=text) for text in texts), *ends]


def framed(body: bytes) -> bytes:
    """A piece of a body in HTTP's chunked framing."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def stream(events: Iterable[bytes]) -> bytes:
    """A whole streamed answer."""
    return HEAD + b"".join(map(framed, events)) + LAST


def document(body: Any, status: str = "200 OK", **headers: str) -> bytes:
    """A whole JSON answer."""
    data = json.dumps(body).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    return head.encode() + data


def answering(*answers: bytes) -> Answerer:
    """An answer per request; the last one again and again. ``b""`` hangs up."""
    left: Iterator[bytes] = iter(answers)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        data = next(left, answers[-1])
        writer.write(data) if data else writer.close()

    return answer
