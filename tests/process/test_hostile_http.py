"""Hostile bytes on the port of a real server: no answer is a 5xx, no process ends, and the next client is served.

What each single fault gets is tested on the HTTP server alone (``tests/serve/test_http_server.py``); here it is about
what all of them together do to the processes behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.client import fetch
from tests.process.conftest import CONFIG
from tests.process.expected import CHAT
from tests.process.server import Server, replay_arguments, serving
from tests.process.test_streams import chat

GOOD = b'{"messages": [{"role": "user", "content": "hard"}], "max_tokens": 3}'


def request(*headers: bytes, path: bytes = CHAT.encode(), method: bytes = b"POST", body: bytes = GOOD) -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(chunks)


#: Each is sent on a connection of its own, which the client then leaves: at once, half closed, or with a reset.
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "NUL": b"\x00" * 10_000,
    "noise": bytes(range(256)) * 50,
    "a TLS greeting": bytes.fromhex("1603010200010001fc0303") + b"\x00" * 500,
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "a half request line": b"POST /v1/chat/com",
    "a half head": b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-",
    "a half body": request()[:-10],
    "no body": request(body=b"").replace(b"Content-Length: 0", b"Content-Length: 1000"),
    "a length that is too short": request().replace(b"Content-Length: 68", b"Content-Length: 5"),
    "a length that is too long": request().replace(b"Content-Length: 68", b"Content-Length: 99999999"),
    "a length beyond all bounds": request().replace(b"Content-Length: 68", b"Content-Length: 9" + b"9" * 30),
    "a length that is none": request().replace(b"Content-Length: 68", b"Content-Length: 0x44"),
    "lengths": request(b"Content-Length: 7"),
    "a length and chunks": request(b"Transfer-Encoding: chunked"),
    "odd encodings": request(b"Transfer-Encoding: gzip, chunked"),
    "a huge chunk": chunked(b"ffffffffffffffff\r\n", GOOD),
    "a chunk beyond all bounds": chunked(b"f" * 40, b"\r\n", GOOD),
    "a negative chunk": chunked(b"-1\r\n", GOOD),
    "chunks of one byte": chunked(*(b"1\r\n%c\r\n" % byte for byte in GOOD), b"0\r\n\r\n"),
    "an endless chunk extension": chunked(b"1;", b"x" * 300_000),
    "an endless trailer": chunked(b"0\r\nX: ", b"x" * 300_000),
    "an endless header": b"GET / HTTP/1.1\r\nX: " + b"x" * 300_000,
    "an endless path": b"GET /" + b"x" * 300_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 60_000,
    "invalid UTF-8 in the path": request(path=b"/v1/\xff\xfe\xc3\x28"),
    "escaped bytes in the path": request(path=b"/v1/%ff%fe%c3%28%00%0a%0d"),
    "surrogates in the path": request(path=b"/v1/%ed%a0%80"),
    "a path out of here": request(path=b"/v1/../../../../etc/passwd", method=b"GET"),
    "half an escape": request(path=b"/v1/%f%"),
    "a path of slashes": request(path=b"//////x", method=b"GET"),
    "no path": request(path=b"*", method=b"OPTIONS"),
    "somebody else's URL": request(path=b"http://evil.example/v1/models", method=b"GET"),
    "CONNECT": b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TRACE": request(method=b"TRACE"),
    "an unknown method": request(method=b"BREW"),
    "a long query": request(path=CHAT.encode() + b"?" + b"a=%00&" * 9000),
    "NUL in a header": request(b"X-Request-Id: a\x00b"),
    "bytes in a header": request(b"X-Request-Id: \xff\xfe\x80", b"Authorization: \xff", b"Host: \xff"),
    "an empty header": request(b": x"),
    "no headers": b"GET /live HTTP/1.1\r\n\r\n",
    "HTTP/0.9": b"GET /live\r\n\r\n",
    "HTTP/9.9": b"GET /live HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "an upgrade": request(b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13"),
    "an upgrade to HTTP/2": request(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: ____"),
    "expect": request(b"Expect: 100-continue")[: -len(GOOD)],
    "expect the impossible": request(b"Expect: the-impossible"),
    "pipelined": request() * 5,
    "too much pipelined": request(path=b"/live", method=b"GET", body=b"") * 3000,
    "noise behind a request": request() + b"\x00\x01\x02" * 100,
    "two types": request(b"Content-Type: application/json", b"Content-Type: text/plain"),
    "a strange type": request(b"Content-Type: \xff;charset=\x80json"),
    "a compressed body": request(b"Content-Encoding: gzip"),
    "a deep body": request(body=b'{"a":' * 100_000),
    "a body of NUL": request(body=b"\x00" * 100_000),
    "a body of noise": request(body=bytes(range(256)) * 100),
    "a number without end": request(body=b'{"max_tokens": ' + b"9" * 100_000 + b"}"),
    "a byte order mark": request(body=b"\xef\xbb\xbf" + GOOD),
    "UTF-16": request(body=GOOD.decode().encode("utf-16")),
}

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


async def send(url: str, data: bytes, leave: str) -> list[int]:
    """The statuses that come back. leave: ``wait`` for an answer or an end, ``close`` our half first, or ``reset``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    received = b""
    with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
        writer.write(data)
        if leave == "reset":
            writer.transport.abort()
            return []
        await writer.drain()
        if leave == "close":
            writer.write_eof()
        # A server may go on waiting for a request that is not whole; how long is not asked here.
        while part := await asyncio.wait_for(reader.read(1 << 16), 0.2 if leave == "wait" else 10):
            received += part
    writer.close()
    return [int(status) for status in STATUS.findall(received)]


@dataclass(frozen=True)
class Seen:
    """A server as it was before: its processes, and how long its log was. Others have used it, and hurt it."""

    pids: list[int]
    log: int

    @classmethod
    def of(cls, server: Server) -> Seen:
        return cls([process.pid for process in server.everybody()], len(server.log))


def assert_well(server: Server, before: Seen) -> None:
    assert [process.pid for process in server.everybody()] == before.pids
    assert asyncio.run(fetch(server.url, *chat("hard", stream=True))).body.endswith(b"data: [DONE]\n\n")
    assert not [word for word in ("Traceback", "ERROR") if word in server.log[before.log :]]


@pytest.mark.parametrize("leave", ["wait", "close", "reset"])
def test_hostile_bytes(replay_server: Callable[[int], Server], leave: str) -> None:
    """All at once: those of one client are not to hurt those of another."""
    server = replay_server(1)
    before = Seen.of(server)

    async def play() -> dict[str, list[int]]:
        answers = await asyncio.gather(*(send(server.url, data, leave) for data in HOSTILE.values()))
        return dict(zip(HOSTILE, answers))

    for name, statuses in asyncio.run(play()).items():
        assert all(100 <= status < 500 for status in statuses), (name, statuses)
    assert_well(server, before)


def broken(seed: int) -> bytes:
    """A request with bytes changed, lost, doubled or moved."""
    chance = random.Random(seed)
    data = bytearray(chance.choice([request(), chunked(b"44\r\n", GOOD, b"\r\n0\r\n\r\n"), request() + request()]))
    for _ in range(chance.randint(1, 6)):
        at, size = chance.randrange(len(data)), chance.randint(1, 8)
        piece = data[at : at + size]
        kind = chance.randrange(4)
        if kind == 0:
            data[at : at + size] = chance.randbytes(size)
        elif kind == 1 and len(data) > 50:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = piece * chance.randint(1, 3)
        else:
            data[at:at] = chance.choice([b"\r\n", b"\x00", b"\r\n\r\n", b"chunked", b"Content-Length: 3\r\n"])
    return bytes(data)


def test_broken_requests(replay_server: Callable[[int], Server]) -> None:
    server = replay_server(1)
    before = Seen.of(server)

    async def play(seeds: range) -> list[tuple[int, list[int]]]:
        return [*zip(seeds, await asyncio.gather(*(send(server.url, broken(seed), "close") for seed in seeds)))]

    for start in range(0, 600, 100):
        for seed, statuses in asyncio.run(play(range(start, start + 100))):
            assert all(100 <= status < 500 for status in statuses), (seed, broken(seed), statuses)
    assert_well(server, before)


@pytest.fixture
def poor_server(tokenizer: Path) -> Iterator[Server]:
    """A server that may open 120 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, hard))
    try:
        with serving(*replay_arguments(tokenizer, 1, **CONFIG)) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_descriptors(poor_server: Server) -> None:
    """Those beyond are turned away; those inside do not notice, and when they have left there is room again."""

    async def play() -> None:
        stream = asyncio.ensure_future(fetch(poor_server.url, *chat("slow", stream=True)))
        connections = [
            await asyncio.open_connection("127.0.0.1", int(poor_server.url.rpartition(":")[2])) for _ in range(300)
        ]
        assert (await stream).body.endswith(b"data: [DONE]\n\n")
        for _, writer in connections:
            writer.close()

    asyncio.run(play())
    assert asyncio.run(fetch(poor_server.url, *chat("hard"))).status == 200
