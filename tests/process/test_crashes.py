"""Processes die in the middle of streams: what the clients get, and the end where no executor can be had."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.client import Exchange, Response, begin, fetch, rest_of
from tests.process.conftest import CONFIG
from tests.process.expected import CHAT, events, expected_body, merged, normalised
from tests.process.server import Server, launch, replay_arguments, until
from tests.process.test_streams import RUNNING, USAGE, chat, completion

#: Open while their worker dies; streams and documents, choices, stops, logprobs.
REQUESTS = [
    chat("slow", stream=True),
    chat("slow", stream=True, n=2, stop=["STOP", "END"], stream_options=USAGE),
    chat("slow", stream=True, n=2, logprobs=True, top_logprobs=2, stream_options=RUNNING),
    chat("slow", stream=True, stop=["STOP"], include_stop_str_in_output=True),
    completion(["slow", "another"], stream=True, n=2, logprobs=1, max_tokens=120, stop="ENDED"),
    completion("slow", stream=True, echo=True, max_tokens=110),
    chat("slow"),
    chat("slow", n=2, stop=["STOP", "END"], logprobs=True, top_logprobs=1),
    chat("slow", scaffolding={"method": "majority_vote", "n": 3, "extract": "last_line"}),
    completion("slow", logprobs=1, n=2, max_tokens=115),
    chat("quite another one", stream=True, max_tokens=100, n=4),
]


async def begin_all(server: Server, requests: list[tuple[str, dict[str, Any]]]) -> list[Exchange]:
    return [await begin(server.url, path, body) for path, body in requests]


async def in_the_middle(exchanges: list[Exchange], requests: list[tuple[str, dict[str, Any]]], count: int = 12) -> None:
    """Until every stream has brought some events; unary requests, which began with them, are on their way then too."""
    streams = [exchange for exchange, (_, body) in zip(exchanges, requests) if body.get("stream")]
    await asyncio.wait_for(asyncio.gather(*(stream.read_events(count) for stream in streams)), 30)


def undisturbed(tokenizer: Path, path: str, body: dict[str, Any]) -> bytes:
    return expected_body(CONFIG, tokenizer, path, body)


def assert_undisturbed(tokenizer: Path, requests: list[tuple[str, dict[str, Any]]], responses: list[Response]) -> None:
    for (path, body), response in zip(requests, responses):
        assert response.status == 200 and response.complete, response
        expected = undisturbed(tokenizer, path, body)
        if body.get("stream"):
            assert merged(response.body) == merged(expected), body
        else:
            assert normalised(response.body) == expected, body


def replaced(server: Server, workers: int, restarts: int) -> None:
    """Until the pool is whole again, with that many restarts in all."""
    wanted = {"status": "ok", "workers": workers, "worker_restarts": restarts, "paused_workers": 0, "open_requests": 0}
    until(
        lambda: server.health().items() >= wanted.items(), lambda: f"{wanted}, but {server.health()}\n{server.log}", 30
    )


def resumed(server: Server) -> float:
    """Requests that had to be opened again so far."""
    return server.total("tailrace_executor_resumed_requests_total")


@pytest.mark.parametrize(("workers", "killed"), [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_clients_of_killed_workers_notice_nothing(
    replay_server: Callable[[int], Server], tokenizer: Path, workers: int, killed: int
) -> None:
    server = replay_server(workers)
    restarts, before, again = server.health()["worker_restarts"], server.workers(), resumed(server)
    victims = before[-killed:]

    async def play() -> list[Response]:
        exchanges = await begin_all(server, REQUESTS)
        await in_the_middle(exchanges, REQUESTS)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return await rest_of(exchanges)

    assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
    replaced(server, workers, restarts + len(victims))
    until(lambda: resumed(server) > again, "resumed requests in the metrics")
    assert len(server.workers()) == workers and not set(victims) & set(server.workers())
    assert asyncio.run(fetch(server.url, *chat("hard"))).status == 200


def test_a_worker_that_dies_again_and_again(replay_server: Callable[[int], Server], tokenizer: Path) -> None:
    """Also when the request's new worker dies before it has sent anything: nothing twice, nothing missing."""
    server = replay_server(2)
    restarts = server.health()["worker_restarts"]
    killed: set[int] = set()

    async def play() -> list[Response]:
        exchanges = await begin_all(server, REQUESTS)
        await in_the_middle(exchanges, REQUESTS, 6)
        for _ in range(4):
            alive = await asyncio.to_thread(
                until, lambda: [p for p in server.workers() if p not in killed], "a worker", 20.0
            )
            os.kill(alive[0], signal.SIGKILL)
            killed.add(alive[0])
        return await rest_of(exchanges)

    assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
    replaced(server, 2, restarts + len(killed))


def test_a_stopped_worker_catches_up(replay_server: Callable[[int], Server], tokenizer: Path) -> None:
    """A worker that stands still costs its clients time only: it takes what has gathered in one go."""
    server = replay_server(1)
    (worker,) = server.workers()

    async def play() -> list[Response]:
        exchanges = await begin_all(server, REQUESTS)
        await in_the_middle(exchanges, REQUESTS)
        os.kill(worker, signal.SIGSTOP)
        generated = server.total("tailrace_executor_tokens_total")
        await asyncio.to_thread(
            until, lambda: server.total("tailrace_executor_tokens_total") > generated + 300, "tokens"
        )
        os.kill(worker, signal.SIGCONT)
        return await rest_of(exchanges)

    assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
    assert server.workers() == [worker]
    until(lambda: server.total("tailrace_worker_coalesced_rows_total") > 100, "joined rows in the metrics")


def test_health_while_the_only_worker_is_gone(replay_server: Callable[[int], Server]) -> None:
    server = replay_server(1)
    restarts = server.health()["worker_restarts"]
    os.kill(server.workers()[0], signal.SIGKILL)
    health = until(lambda: (h := server.health())["workers"] == 0 and h, "a worker less")
    assert health["status"] == "without post-processing workers"
    waiting = asyncio.run(fetch(server.url, *chat("hard")))  # admitted: the next worker takes it
    assert waiting.status == 200
    replaced(server, 1, restarts + 1)
    assert "its requests go on elsewhere" in server.log


def next_executor(server: Server, before: int) -> int:
    """Until there is another executor, and requests are admitted."""
    until(lambda: not psutil.pid_exists(before), "the old executor's end", 10)
    until(lambda: server.health()["status"] == "ok", lambda: f"an executor\n{server.log}", 20)
    executor = server.executor()
    assert executor != before
    return executor


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_clients_of_killed_executors_notice_nothing(
    replay_server: Callable[[int], Server], tokenizer: Path, workers: int
) -> None:
    """Twice, and a worker dies too where there are several: what it had is generated again."""
    server = replay_server(workers)
    before = server.health()["executor_restarts"]

    async def play() -> list[Response]:
        exchanges = await begin_all(server, REQUESTS)
        await in_the_middle(exchanges, REQUESTS)
        executor = server.executor()
        os.kill(executor, signal.SIGKILL)
        executor = await asyncio.to_thread(next_executor, server, executor)
        if workers > 1:
            os.kill(server.workers()[0], signal.SIGKILL)
        os.kill(executor, signal.SIGKILL)
        return await rest_of(exchanges)

    assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
    until(lambda: server.health()["open_requests"] == 0, "no open request")
    assert server.health()["executor_restarts"] == before + 2
    until(lambda: server.total("tailrace_executor_open_requests") == 0, "nothing left in the executor")
    assert asyncio.run(fetch(server.url, *chat("hard"))).status == 200


def test_nobody_is_admitted_without_an_executor(replay_server: Callable[[int], Server]) -> None:
    server = replay_server(1)
    executor = server.executor()
    os.kill(executor, signal.SIGKILL)
    health = until(lambda: (h := server.health())["status"] != "ok" and h, "an executor less")
    assert health["status"] == "restarting its executor"
    refused = asyncio.run(fetch(server.url, *chat("hard")))
    if refused.status != 200:  # else the new one was there by then
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"] == "The server is restarting its executor."
    next_executor(server, executor)


ENDLESS = [
    chat("endless", stream=True),
    chat("endless", stream=True, n=2, logprobs=True, stop=["STOP and END"]),
    completion(["endless", "other"], stream=True, max_tokens=900_000),
    chat("endless", n=2),
    completion("endless", logprobs=1, max_tokens=900_000),
]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_an_executor_every_client_is_told_and_the_server_ends(tokenizer: Path, workers: int) -> None:
    """An engine that fails again as soon as it has begun."""
    with launch(*replay_arguments(tokenizer, workers, **CONFIG, fail_after_steps=20)) as server:
        server.wait_until_ready()

        async def play() -> list[Response]:
            exchanges = await begin_all(server, ENDLESS)
            await in_the_middle(exchanges, ENDLESS)
            return await rest_of(exchanges)

        responses = asyncio.run(play())
        assert server.wait(20) == 1
        server.assert_clean()
        assert "tailrace serve: the executor cannot be restarted: executor ended: exit code 1" in server.log
        assert "the engine was told to fail after 20 steps" in server.log
        for (_, body), response in zip(ENDLESS, responses):
            assert response.complete
            if body.get("stream"):
                error = events(response.body)[-1]["error"]
            else:
                assert response.status == 500 and response.headers["content-type"] == "application/json"
                error = response.json()["error"]
            assert error["type"] == "server_error" and "executor" in error["message"]


def test_nobody_outlives_a_killed_launcher(tokenizer: Path) -> None:
    with launch(*replay_arguments(tokenizer, 2, **CONFIG)) as server:
        server.wait_until_ready()
        assert len(server.everybody()) == 4

        async def play() -> Response:
            exchange = await begin(
                server.url, CHAT, {"messages": [{"role": "user", "content": "endless"}], "stream": True}
            )
            await exchange.read_events(3)
            server.send(signal.SIGKILL)
            return await exchange.rest()

        assert not asyncio.run(play()).complete
        assert server.wait(10) == -signal.SIGKILL  # which waits for the others too
