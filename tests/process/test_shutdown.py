"""How a server starts, fails to start, and ends: exit codes, what clients are told, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.process.client import Response, fetch, rest_of
from tests.process.conftest import CONFIG
from tests.process.expected import events
from tests.process.server import Server, launch, replay_arguments, until
from tests.process.test_crashes import ENDLESS, REQUESTS, assert_undisturbed, begin_all, in_the_middle
from tests.process.test_streams import chat


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_lets_open_streams_finish(tokenizer: Path, workers: int) -> None:
    """Also where a worker dies on the way."""
    with launch(*replay_arguments(tokenizer, workers, **CONFIG)) as server:
        server.wait_until_ready()

        async def play() -> list[Response]:
            exchanges = await begin_all(server, REQUESTS)
            await in_the_middle(exchanges, REQUESTS)
            victims = server.workers()[:1]
            server.send(signal.SIGTERM)
            await refused(server)
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            return await rest_of(exchanges)

        assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
        finished = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - finished < 5
        server.assert_clean()
        assert server.log.count("\n") == (workers > 0) and "open requests may finish" in server.output[-1]


async def refused(server: Server) -> None:
    """A draining server says so, and admits nobody."""
    await asyncio.to_thread(until, lambda: server.health()["status"] == "draining", "draining")
    assert (await fetch(server.url, "/health", method="GET")).status == 503
    assert (await fetch(server.url, "/live", method="GET")).status == 200
    late = await fetch(server.url, *chat("hard", stream=True))
    assert late.status == 503 and int(late.headers["retry-after"]) >= 1
    assert "draining" in late.json()["error"]["message"] and late.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("how", ["second signal", "deadline"])
def test_streams_that_do_not_finish_are_ended(tokenizer: Path, how: str) -> None:
    flags = [] if how == "second signal" else ["--shutdown-timeout", "0.5"]
    with launch(*replay_arguments(tokenizer, 1, **CONFIG), *flags) as server:
        server.wait_until_ready()

        async def play() -> list[Response]:
            exchanges = await begin_all(server, ENDLESS)
            await in_the_middle(exchanges, ENDLESS)
            server.send(signal.SIGINT)
            if how == "second signal":
                await asyncio.to_thread(until, lambda: server.health()["status"] == "draining", "draining")
                server.send(signal.SIGTERM)
            return await rest_of(exchanges)

        responses = asyncio.run(play())
        assert server.wait(8) == 0
        server.assert_clean()
        assert not server.log
        for (_, body), response in zip(ENDLESS, responses):
            assert response.complete
            error = events(response.body)[-1]["error"] if body.get("stream") else response.json()["error"]
            assert error["message"] == "the server is shutting down"


def running(server: Server) -> None:
    """Until the interpreter is past its own start, in our imports."""
    until(lambda: psutil.Process(server.pid).memory_info().rss > 40 << 20, "imports")


@pytest.mark.parametrize(("moment", "whom"), [("imports", "group"), ("engine", "launcher"), ("workers", "group")])
def test_ctrl_c_during_the_start(tokenizer: Path, moment: str, whom: str) -> None:
    """A terminal sends SIGINT to the whole foreground group; nobody is to answer it with a traceback."""
    with launch(*replay_arguments(tokenizer, 2, **CONFIG)) as server:
        if moment == "imports":
            running(server)
        else:
            server.wait_for_line("starting the replay engine" if moment == "engine" else "post-processing workers")
        if whom == "group":
            os.killpg(server.pid, signal.SIGINT)
        else:
            server.send(signal.SIGINT)
        assert server.wait() == 0
        server.assert_clean()
        assert server.log == ""
