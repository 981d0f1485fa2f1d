"""What one request, or one worker, costs the streams beside it: the gaps between their chunks, with and without it in
turn within one run, so that a slow machine is slow in both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from typing import Any, cast

from tests.process.client import begin
from tests.process.expected import vocabulary_config
from tests.process.server import Server, replay_arguments, serving, until
from tests.process.test_disconnects import nothing_open
from tests.process.test_streams import chat

STREAMS = 64
#: How much larger the median gap may be beside a bad neighbour.
LIMIT = 1.2
PROMPT_TOKENS = 100_000
#: Seconds that a stream may wait for a large request beside it, more than for none: five steps.
PAUSE = 0.05
#: Seconds of a slowed worker's turn, and those of it in which it runs: ten times too slow.
TURN, RUNS = 0.1, 0.01
#: A worker that is stopped for good is silent after so many seconds, and has been for as many more.
SILENCE = 0.3

Gaps = list[float]


class Listener(asyncio.Protocol):
    """A client that notes when something comes and reads nothing: 64 have to keep up with 6400 chunks a second."""

    def __init__(self, request: bytes, note: Callable[[Listener, float], None]) -> None:
        self._request, self._note = request, note
        self.transport: asyncio.Transport | None = None
        self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self.last:
            self._note(self, now - self.last)
        self.last = now


class Crowd:
    """Listeners to endless streams; the gaps of those that are ``heard``."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.heard: set[Listener] = set()
        self.gaps: Gaps = []
        self._wanted, self._enough = 0, asyncio.Event()

    def _note(self, listener: Listener, gap: float) -> None:
        if listener in self.heard:
            self.gaps.append(gap)
            if len(self.gaps) == self._wanted:
                self._enough.set()

    async def join(self, server: Server) -> None:
        """Connect all, and wait until each has had something."""
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        path, body = chat("endless", stream=True)
        content = json.dumps(body).encode()
        request = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        loop = asyncio.get_running_loop()
        for _ in range(STREAMS):
            made = await loop.create_connection(lambda: Listener(request, self._note), host, int(port))
            self.listeners.append(made[1])
        self.heard = {*self.listeners}
        await asyncio.to_thread(until, lambda: all(one.last for one in self.listeners), "first chunks for all", 30)

    async def gather(self, count: int) -> Gaps:
        """The next gaps, so many."""
        self.gaps, self._wanted = [], count
        self._enough.clear()
        await asyncio.wait_for(self._enough.wait(), 60)
        return self.gaps[:count]

    def leave(self) -> None:
        """All of them."""
        for listener in self.listeners:
            assert listener.transport is not None
            listener.transport.close()


def play(tokenizer: Path, workers: int, test: Callable[[Server, Crowd], Awaitable[None]]) -> None:
    """A server that steps every 10 ms, each token of which is a chunk, and a crowd of listeners."""
    vocabulary = vocabulary_config()
    silent = {"special_token_ids": [*range(90, vocabulary["vocab_size"])]}
    config: dict[str, Any] = {**vocabulary, **silent, "step_interval": 0.01}

    async def whole(server: Server) -> None:
        crowd = Crowd()
        await crowd.join(server)
        await test(server, crowd)
        crowd.leave()
        await asyncio.to_thread(nothing_open, server)

    with serving(*replay_arguments(tokenizer, workers, **config)) as server:
        asyncio.run(whole(server))


def compare(alone: Gaps, beside: Gaps) -> None:
    """The test's claim."""
    medians = statistics.median(beside), statistics.median(alone)
    assert medians[0] < LIMIT * medians[1], f"{1e3 * medians[0]:.2f} ms instead of {1e3 * medians[1]:.2f}"


# ------------------------------------------------------------------------------------------------ a large request


async def ask(server: Server) -> int:
    """Have a large prompt read, and its answer begun; returns its tokens."""
    path, body = chat("p" * PROMPT_TOKENS, stream=True, max_tokens=2, stream_options={"include_usage": True})
    exchange = await begin(server.url, path, body)
    response = await asyncio.wait_for(exchange.rest(), 60)
    usage = json.loads(response.body.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    return int(usage["prompt_tokens"])


def test_a_prompt_of_100_000_tokens_does_not_slow_the_streams_beside_it(tokenizer: Path) -> None:
    """It is read, rendered and tokenized while 64 others stream. A quarter of a second in which that happens is like
    one in which nothing does, and nobody has to wait several steps for it: the median alone would not see one pause."""

    async def test(server: Server, crowd: Crowd) -> None:
        alone: list[Gaps] = []
        beside: list[Gaps] = []
        for _ in range(8):
            alone.append(await crowd.gather(25 * STREAMS))
            asked = asyncio.create_task(ask(server))
            beside.append(await crowd.gather(25 * STREAMS))
            assert await asked == PROMPT_TOKENS
        compare([*chain(*alone)], [*chain(*beside)])
        longest = [statistics.median(map(max, windows)) for windows in (alone, beside)]
        assert longest[1] < longest[0] + PAUSE

    play(tokenizer, 1, test)


# ------------------------------------------------------------------------------------------------ a slow worker


class Slowed:
    """A worker that runs for a tenth of each turn, until ``end``."""

    def __init__(self, pid: int) -> None:
        self._pid, self._loop = pid, asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._run()

    def _run(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        self._timer = self._loop.call_later(RUNS, self._stop)

    def _stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        self._timer = self._loop.call_later(TURN - RUNS, self._run)

    def end(self) -> None:
        """It is as fast as before."""
        assert self._timer is not None
        self._timer.cancel()
        os.kill(self._pid, signal.SIGCONT)


async def of_others(crowd: Crowd, worker: int) -> set[Listener]:
    """The listeners whose streams are on another worker: those that go on while this one is stopped."""
    os.kill(worker, signal.SIGSTOP)
    try:
        since = time.monotonic() + SILENCE

        def divided() -> bool:
            going = sum(one.last > since for one in crowd.listeners)
            return time.monotonic() > since + SILENCE and going == STREAMS // 2

        await asyncio.to_thread(until, divided, "half of the streams on each worker")
        return {one for one in crowd.listeners if one.last > since}
    finally:
        os.kill(worker, signal.SIGCONT)


def test_a_slow_worker_does_not_slow_the_streams_of_the_other(tokenizer: Path) -> None:
    async def test(server: Server, crowd: Crowd) -> None:
        slow = server.workers()[1]
        crowd.heard = await of_others(crowd, slow)
        held = {*crowd.listeners} - crowd.heard
        alone: Gaps = []
        beside: Gaps = []
        for _ in range(3):
            alone += await crowd.gather(60 * STREAMS // 2)
            slowed = Slowed(slow)
            beside += await crowd.gather(100 * STREAMS // 2)
            slowed.end()
        compare(alone, beside)
        crowd.heard = held
        slowed = Slowed(slow)
        waits = sorted(await crowd.gather(10 * len(held)))
        slowed.end()
        assert waits[-len(held)] > TURN / 2, "it was slow: each of its streams waited for it"

    play(tokenizer, 2, test)
