"""An HTTP client with its hands on the socket: hundreds of streams at once, read step by step, left in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: For any one answer; a test that waits for something shorter says so itself.
TIMEOUT = 60.0


@dataclass(slots=True)
class Response:
    """A whole response; header names are lower case. complete: False when the connection ended before its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool = True

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(slots=True)
class Exchange:
    """One request on a connection of its own, whose response is read as the test wants."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    _length: int | None = None

    async def read_head(self) -> None:
        """Status and headers; does nothing the second time."""
        if self.status:
            return
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(head[0].split(" ", 2)[1])
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
        }
        self._length = int(self.headers["content-length"]) if "content-length" in self.headers else None

    async def read_some(self) -> bool:
        """The next piece of the body; False at its end."""
        await self.read_head()
        if self.complete:
            return False
        if self._length is not None:
            self.body += await self.reader.readexactly(self._length)
            self.complete = True
            return False
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        self.body += (await self.reader.readexactly(size + 2))[:-2]
        self.complete = size == 0
        return not self.complete

    async def read_events(self, count: int) -> None:
        """Until the body has so many events."""
        while self.body.count(b"\n\n") < count and await self.read_some():
            pass

    async def rest(self) -> Response:
        """To the end; the connection is closed then."""
        try:
            while await self.read_some():
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.close()
        return Response(self.status, self.headers, bytes(self.body), self.complete)

    def close(self) -> None:
        """Leave, whatever is still to come."""
        self.writer.close()

    def reset(self) -> None:
        """Leave as a machine that crashed."""
        self.writer.transport.abort()


async def begin(
    url: str, path: str, body: Mapping[str, Any] | bytes | None = None, method: str = "POST", **headers: str
) -> Exchange:
    """Send a request, and return before the response."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content)
    await writer.drain()
    return Exchange(reader, writer)


async def fetch(
    url: str, path: str, body: Mapping[str, Any] | bytes | None = None, method: str = "POST", **headers: str
) -> Response:
    """A request and its whole response."""
    return await asyncio.wait_for(_fetch(url, path, body, method, headers), TIMEOUT)


async def _fetch(
    url: str, path: str, body: Mapping[str, Any] | bytes | None, method: str, headers: Mapping[str, str]
) -> Response:
    return await (await begin(url, path, body, method, **headers)).rest()


async def rest_of(exchanges: list[Exchange]) -> list[Response]:
    """The ends of several responses, read at the same time."""
    return await asyncio.wait_for(asyncio.gather(*(exchange.rest() for exchange in exchanges)), TIMEOUT)
