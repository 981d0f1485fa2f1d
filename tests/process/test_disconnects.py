"""Clients that leave early cost nothing afterwards: no generation, no state, no descriptor, in any process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.process.client import Exchange, begin, fetch
from tests.process.server import OPEN, Server, until
from tests.process.test_crashes import ENDLESS, begin_all, in_the_middle
from tests.process.test_streams import chat, completion


def opened(server: Server) -> dict[str, float]:
    """The gauges that are not 0; -1 for one that is missing."""
    values = server.metrics()
    sums = {name: sum(v for key, v in values.items() if key.partition("{")[0] == name) for name in OPEN}
    return {name: value for name, value in sums.items() if value or not any(key.startswith(name) for key in values)}


def nothing_open(server: Server) -> None:
    """Until every process has reported that it holds nothing."""
    until(lambda: not opened(server), lambda: f"nothing open, but {opened(server)}")


@pytest.mark.parametrize(("workers", "leave"), [(0, Exchange.close), (2, Exchange.close), (2, Exchange.reset)])
def test_generation_ends_when_the_client_leaves(
    replay_server: Callable[[int], Server], workers: int, leave: Callable[[Exchange], None]
) -> None:
    server = replay_server(workers)
    nothing_open(server)
    before = server.metrics()["tailrace_disconnects_total"]

    async def play() -> None:
        exchanges = await begin_all(server, ENDLESS)
        await in_the_middle(exchanges, ENDLESS)
        await asyncio.to_thread(
            until, lambda: opened(server).get("tailrace_executor_running_outputs", 0) == 8, "all at work"
        )
        for exchange in exchanges:
            leave(exchange)

    asyncio.run(play())
    nothing_open(server)
    until(lambda: server.metrics()["tailrace_disconnects_total"] == before + len(ENDLESS), "all disconnects counted")
    generated = server.total("tailrace_executor_tokens_total")
    assert asyncio.run(fetch(server.url, *chat("hard", max_tokens=5))).status == 200
    until(lambda: server.total("tailrace_executor_tokens_total") >= generated + 5, "the next report")
    assert server.total("tailrace_executor_tokens_total") == generated + 5


def test_leaving_before_the_body_is_sent(replay_server: Callable[[int], Server]) -> None:
    server = replay_server(0)
    before = server.metrics()["tailrace_disconnects_total"]

    async def play() -> None:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()

    asyncio.run(play())
    until(lambda: server.metrics()["tailrace_disconnects_total"] == before + 1, "the disconnect counted")


def descriptors(server: Server) -> dict[int, int]:
    """Process id -> open descriptors."""
    return {process.pid: process.num_fds() for process in server.everybody()}


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_of_thousands_of_requests(replay_server: Callable[[int], Server], workers: int) -> None:
    server = replay_server(workers)
    count = 2000 if workers else 500
    kinds: list[tuple[tuple[str, dict[str, Any]], bool]] = [
        (chat("hard", stream=True), False),
        (completion("short", max_tokens=3, n=2), False),
        (chat("other", stream=True), True),
        (completion(["hard", "x"], logprobs=1, stop="STOP", max_tokens=8), False),
        (chat("endless"), True),
        (chat("hard", max_tokens=-1), False),
        (chat("broken", stream=True), False),
    ]  # fmt: skip
    statuses: dict[int, int] = {}

    async def one(number: int, gate: asyncio.Semaphore) -> None:
        (path, body), leaves = kinds[number % len(kinds)]
        async with gate:
            if not leaves:
                status = (await fetch(server.url, path, body)).status
                statuses[status] = statuses.get(status, 0) + 1
                return
            exchange = await begin(server.url, path, body)
            if body.get("stream"):
                await exchange.read_events(2)
            exchange.reset()

    async def play(number: int) -> None:
        gate = asyncio.Semaphore(100)
        await asyncio.gather(*(one(n, gate) for n in range(number)))

    asyncio.run(play(50))
    nothing_open(server)
    health = until(lambda: (h := server.health())["open_requests"] == 0 and h, "nothing open")
    before = descriptors(server)
    statuses.clear()
    asyncio.run(play(count))
    nothing_open(server)
    until(lambda: descriptors(server) == before, lambda: f"{before} descriptors again, but {descriptors(server)}")
    assert server.health() == health
    assert set(statuses) == {200, 400}
    assert "Traceback" not in server.log
