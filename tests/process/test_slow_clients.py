"""Clients that do not read, silence in a stream, and more requests than may be open: nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.process.client import Exchange, begin, fetch
from tests.process.conftest import CONFIG
from tests.process.expected import expected_body, merged
from tests.process.server import Server, replay_arguments, serving, until
from tests.process.test_disconnects import nothing_open
from tests.process.test_streams import chat

PING = b": ping\n\n"
#: Answers that fill every buffer on the way: 1 kB of log-probabilities a token.
STREAM = chat("endless", stream=True, logprobs=True, top_logprobs=20)
DOCUMENT = chat("long", n=4, max_tokens=65, logprobs=True, top_logprobs=20)


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """Those of clients that never read; closed at the end."""
    opened: list[socket.socket] = []
    yield opened
    for sock in opened:
        sock.close()


def stall(server: Server, count: int, path: str, body: dict[str, Any], sockets: list[socket.socket]) -> None:
    """So many clients that send a request and never read."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: stalled\r\nContent-Length: {len(content)}\r\n\r\n"
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + content)
        sockets.append(sock)


def was_reset(sock: socket.socket) -> bool:
    """Whether the connection was cut, and not ended in order behind all that had been sent."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return False


def slow_clients(server: Server, limit: str) -> float:
    return server.metrics()[f"tailrace_slow_clients_total{{limit={limit}}}"]


class Reader:
    """Somebody who reads, and watches the time between two chunks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.gaps: list[float] = []

    async def read(self) -> bytes:
        before = time.monotonic()
        while await self._exchange.read_some():
            now = time.monotonic()
            self.gaps.append(now - before)
            before = now
        self._exchange.close()
        return bytes(self._exchange.body)


async def read_again_and_again(server: Server, tokenizer: Path, done: asyncio.Event) -> list[float]:
    """Streams, one after another, each of which has to be complete; returns the gaps between their chunks."""
    path, body = chat("slow", stream=True)
    expected, gaps = merged(expected_body(CONFIG, tokenizer, path, body)), []
    while not done.is_set():
        reader = Reader(await begin(server.url, path, body))
        assert merged(await reader.read()) == expected
        gaps += reader.gaps
    return gaps


@contextmanager
def limited(tokenizer: Path, workers: int, *flags: str, **config: Any) -> Iterator[Server]:
    with serving(*replay_arguments(tokenizer, workers, **{**CONFIG, **config}), *flags) as server:
        yield server


BYTES = ("--client_buffer_bytes", "30000", "--client_stall_timeout", "60")
SECONDS = ("--client_buffer_bytes", "100000000", "--client_stall_timeout", "1")


@pytest.mark.parametrize(
    ("workers", "flags", "limit"), [(1, BYTES, "bytes"), (0, SECONDS, "seconds")], ids=["bytes", "seconds"]
)
def test_clients_that_never_read(
    tokenizer: Path, sockets: list[socket.socket], workers: int, flags: tuple[str, ...], limit: str
) -> None:
    """They are disconnected, their requests end everywhere, and who reads gets all of his stream meanwhile."""
    with limited(tokenizer, workers, *flags, step_interval=0.04) as server:

        async def play() -> list[float]:
            done = asyncio.Event()
            reading = asyncio.create_task(read_again_and_again(server, tokenizer, done))
            await asyncio.to_thread(stall, server, 100, *STREAM, sockets)
            await asyncio.to_thread(until, lambda: slow_clients(server, limit) == 100, "100 disconnects", 90)
            done.set()
            return await reading

        gaps = asyncio.run(play())
        assert max(gaps) < 10  # the machine may be busy with other things; what it is otherwise is a benchmark's affair
        nothing_open(server)
        assert all(was_reset(sock) for sock in sockets)
        assert sum(slow_clients(server, each) for each in ("bytes", "seconds")) == 100
        assert server.log.count(f"request 'stalled': its client is too slow ({limit})") == 100
        if limit == "seconds":
            documents_that_nobody_reads(server, sockets)


def documents_that_nobody_reads(server: Server, sockets: list[socket.socket]) -> None:
    """The same with whole bodies: no backlog, whatever their size, but not to be kept for ever either."""
    size = len(asyncio.run(fetch(server.url, *DOCUMENT)).body)
    assert size > 250_000  # more than the kernel and the transport take
    before = len(sockets)
    stall(server, 10, *DOCUMENT, sockets)
    until(lambda: slow_clients(server, "seconds") == 110, "10 more disconnects", 60)
    nothing_open(server)
    assert all(was_reset(sock) for sock in sockets[before:])


@pytest.fixture(scope="module")
def slow_server(tokenizer: Path) -> Iterator[Server]:
    """One request at a time, a step every half second, and a comment twice between them."""
    with limited(tokenizer, 1, "--max_requests", "1", "--keep_alive_interval", "0.2", step_interval=0.5) as server:
        yield server


def test_one_request_too_many(slow_server: Server) -> None:
    path, body = chat("excited", stream=True)

    async def play() -> None:
        exchange = await begin(slow_server.url, *chat("endless", stream=True))
        await asyncio.wait_for(exchange.read_events(1), 30)
        refused = await fetch(slow_server.url, path, body)
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        async with openai.AsyncOpenAI(base_url=f"{slow_server.url}/v1", api_key="-", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], model="replay")
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(input="Hi", model="replay", stream=True)
        exchange.close()

    asyncio.run(play())
    nothing_open(slow_server)
    assert slow_server.metrics()["tailrace_refused_requests_total{reason=requests}"] == 3
    assert asyncio.run(fetch(slow_server.url, path, body)).status == 200


def test_silence_is_filled_with_comments(slow_server: Server, tokenizer: Path) -> None:
    path, body = chat("excited", stream=True)
    nothing_open(slow_server)
    got = asyncio.run(fetch(slow_server.url, path, body)).body
    events = got.split(b"\n\n")
    assert events[0].startswith(b"data: ") and got.endswith(b"data: [DONE]\n\n")
    assert got.count(PING) >= 4 and events.count(b": ping") == got.count(PING)  # each stands alone
    config = {**CONFIG, "step_interval": 0.5}
    assert merged(got.replace(PING, b"")) == merged(expected_body(config, tokenizer, path, body))


def test_openais_client_does_not_see_them(slow_server: Server) -> None:
    async def play() -> None:
        async with openai.AsyncOpenAI(base_url=f"{slow_server.url}/v1", api_key="-", max_retries=0) as client:
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": "excited"}], model="replay", stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == "Hello world! theHello"
            await asyncio.to_thread(nothing_open, slow_server)
            events = await client.responses.create(input="excited", model="replay", stream=True)
            *_, last = [event async for event in events]
            assert last.type == "response.completed" and last.response.output_text == text
            assert (await client.responses.retrieve(last.response.id)).output_text == text

    asyncio.run(play())
