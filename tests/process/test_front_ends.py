"""Several front ends: clients cannot tell which one has them, and lose their connection only if that one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.client import Exchange, Response, begin, fetch, rest_of
from tests.process.conftest import CONFIG
from tests.process.server import Server, launch, replay_arguments, serving, until
from tests.process.test_crashes import (
    ENDLESS,
    REQUESTS,
    assert_undisturbed,
    begin_all,
    in_the_middle,
    next_executor,
    replaced,
)
from tests.process.test_streams import chat

#: Connections that surely reach both of two front ends: all on one happens once in 2**19 times.
ENOUGH = 20
LIMIT = 50


@pytest.fixture(scope="module", params=[0, 2], ids=["no workers", "two workers"])
def server(request: pytest.FixtureRequest, tokenizer: Path) -> Iterator[Server]:
    arguments = replay_arguments(tokenizer, request.param, **CONFIG)
    with serving(*arguments, "--num_serve_frontends", "2", "--max_requests", str(LIMIT)) as running:
        yield running


def front_ends(server: Server) -> list[int]:
    return [child.pid for child in server.children("front end")]


def whole(server: Server) -> bool:
    """Whether both front ends serve."""
    return len([pid for pid in front_ends(server) if psutil.Process(pid).net_connections("tcp")]) == 2


def owners(server: Server) -> dict[int, int]:
    """A client's port -> the process id of the front end that has its connection."""
    found = {}
    for pid in front_ends(server):
        connections = psutil.Process(pid).net_connections("tcp")
        found.update({connection.raddr.port: pid for connection in connections if connection.raddr})
    return found


async def begin_known(server: Server, requests: list[tuple[str, dict[str, Any]]]) -> tuple[list[Exchange], list[int]]:
    """The requests, begun, and the front end that has each."""
    exchanges, theirs = [], []
    for path, body in requests:
        exchange = await begin(server.url, path, body)
        exchanges.append(exchange)
        port = exchange.writer.get_extra_info("sockname")[1]
        theirs.append(until(lambda port=port: owners(server).get(port), "that the connection is taken"))
    return exchanges, theirs


async def everywhere(server: Server, path: str) -> list[Response]:
    """Many answers to a GET, surely from both front ends."""
    return [await fetch(server.url, path, method="GET") for _ in range(ENOUGH)]


def test_who_else_dies_is_noticed_by_nobody(server: Server, tokenizer: Path) -> None:
    """The executor, and a worker where there are any, in the middle of streams of both front ends."""
    workers, restarts = server.workers(), server.health().get("worker_restarts", 0)
    requests = REQUESTS * 2

    async def play() -> list[Response]:
        exchanges, theirs = await begin_known(server, requests)
        assert set(theirs) == set(front_ends(server))
        await in_the_middle(exchanges, requests)
        if workers:
            os.kill(workers[0], signal.SIGKILL)
        executor = server.executor()
        os.kill(executor, signal.SIGKILL)
        await asyncio.to_thread(next_executor, server, executor)
        return await rest_of(exchanges)

    assert_undisturbed(tokenizer, requests, asyncio.run(play()))
    if workers:
        replaced(server, 2, restarts + 1)
    until(lambda: server.total("tailrace_executor_open_requests") == 0, "nothing left in the executor")


def test_a_front_end_takes_only_its_own_clients_along(server: Server, tokenizer: Path) -> None:
    requests = REQUESTS * 2

    async def play() -> tuple[list[bool], list[Response]]:
        exchanges, theirs = await begin_known(server, requests)
        await in_the_middle(exchanges, requests)
        os.kill(theirs[-1], signal.SIGKILL)
        return [pid == theirs[-1] for pid in theirs], await rest_of(exchanges)

    before = server.total("tailrace_first_chunk_seconds_count")
    lost, responses = asyncio.run(play())
    assert True in lost and False in lost and not responses[-1].complete
    kept = [number for number, response in enumerate(responses) if response.complete]  # the first ones may be over
    assert all(number in kept for number, gone in enumerate(lost) if not gone)
    assert_undisturbed(tokenizer, [requests[n] for n in kept], [responses[n] for n in kept])
    until(lambda: server.total("tailrace_executor_open_requests") == 0, "the end of what nobody waits for")
    until(lambda: whole(server), "another front end", 20)
    assert server.total("tailrace_first_chunk_seconds_count") > before  # its counts are not lost
    again = [chat("hard", stream=True)] * ENOUGH
    assert_undisturbed(tokenizer, again, asyncio.run(_all(server, again)))


async def _all(server: Server, requests: list[tuple[str, dict[str, Any]]]) -> list[Response]:
    return await rest_of(await begin_all(server, requests))


def test_whoever_answers_says_the_same(server: Server) -> None:
    asyncio.run(_all(server, [chat("hard", stream=True)] * ENOUGH))
    until(lambda: server.total("tailrace_open_requests") == 0, "nothing open")

    def answers() -> set[tuple[str, ...]]:
        texts = [answer.body.decode() for answer in asyncio.run(everywhere(server, "/metrics"))]
        names = ("tailrace_first_chunk_seconds_count", "tailrace_executor_tokens_total", "tailrace_open_requests")
        return {tuple(line for line in text.splitlines() if line.startswith(names)) for text in texts}

    until(lambda: len(answers()) == 1, "the same metrics everywhere")  # reports come once a second
    ((first_chunks, *others),) = answers()
    assert float(first_chunks.rsplit(" ", 1)[1]) >= ENOUGH and len(others) == 2
    for path in ("/health", "/v1/models"):
        assert len({answer.body for answer in asyncio.run(everywhere(server, path))}) == 1


def test_a_response_is_found_by_all(server: Server) -> None:
    async def play() -> None:
        first = (await fetch(server.url, "/v1/responses", {"input": "hard", "max_output_tokens": 20})).json()
        where = f"/v1/responses/{first['id']}"
        assert {answer.json()["id"] for answer in await everywhere(server, where)} == {first["id"]}
        body = {"input": "more", "previous_response_id": first["id"], "max_output_tokens": 16}
        for _ in range(ENOUGH):
            assert (await fetch(server.url, "/v1/responses", body)).status == 200
        assert (await fetch(server.url, where, method="DELETE")).status == 200
        assert {answer.status for answer in await everywhere(server, where)} == {404}

    asyncio.run(play())


def test_a_front_end_that_stands_still_holds_up_nobody_else(tokenizer: Path) -> None:
    """It is found and replaced; meanwhile the workers keep what is for it."""
    arguments = replay_arguments(tokenizer, 1, **CONFIG)
    with serving(*arguments, "--num_serve_frontends", "2", "--hang_timeout", "1") as server:

        async def play() -> None:
            exchanges, theirs = await begin_known(server, [ENDLESS[0]] * ENOUGH)
            await in_the_middle(exchanges, [ENDLESS[0]] * ENOUGH)
            os.kill(theirs[0], signal.SIGSTOP)
            other = next(exchange for exchange, pid in zip(exchanges, theirs) if pid != theirs[0])
            for _ in range(400):
                await asyncio.wait_for(other.read_some(), 1.0)
            assert theirs[0] not in front_ends(server)
            for exchange in exchanges:
                exchange.close()

        asyncio.run(play())
        assert "hangs: its loop has not turned for 1 s" in server.log
        until(lambda: whole(server), "another front end", 20)
        until(lambda: server.total("tailrace_executor_open_requests") == 0, "nothing left in the executor", 20)


def test_one_limit_for_all(server: Server) -> None:
    async def play() -> set[int]:
        streams = await begin_all(server, [ENDLESS[0]] * LIMIT)
        await in_the_middle(streams, [ENDLESS[0]] * LIMIT, 2)
        statuses = {(await fetch(server.url, *chat("hard"))).status for _ in range(ENOUGH)}
        for stream in streams:
            stream.close()
        return statuses

    assert asyncio.run(play()) == {429}
    until(lambda: server.health()["open_requests"] == 0, "nothing open")
    assert asyncio.run(fetch(server.url, *chat("hard"))).status == 200


def test_streams_finish_before_the_end(tokenizer: Path) -> None:
    with serving(*replay_arguments(tokenizer, 2, **CONFIG), "--num_serve_frontends", "2") as server:

        async def play() -> list[Response]:
            exchanges = await begin_all(server, REQUESTS)
            await in_the_middle(exchanges, REQUESTS, 3)
            server.send(signal.SIGTERM)
            return await rest_of(exchanges)

        assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
        assert server.wait() == 0
        assert any(line.startswith("ending: ") for line in server.output)


def test_a_second_signal_ends_at_once(tokenizer: Path) -> None:
    with launch(*replay_arguments(tokenizer, 1, **CONFIG), "--num_serve_frontends", "2") as server:
        server.wait_until_ready()

        async def play() -> list[Response]:
            exchanges = await begin_all(server, [ENDLESS[0]] * 6)
            await in_the_middle(exchanges, [ENDLESS[0]] * 6, 2)
            server.send(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for_line, "ending: ")
            server.send(signal.SIGTERM)
            return await rest_of(exchanges)

        for response in asyncio.run(play()):
            assert response.complete and b"the server is shutting down" in response.body
        assert server.wait() == 0
        server.assert_clean()


def test_without_an_executor_all_are_told(tokenizer: Path) -> None:
    arguments = replay_arguments(tokenizer, 1, **CONFIG, fail_after_steps=20)
    with launch(*arguments, "--num_serve_frontends", "2") as server:
        server.wait_until_ready()
        for response in asyncio.run(_all(server, [ENDLESS[0]] * 6)):
            assert response.complete and b"the executor cannot be restarted" in response.body
        assert server.wait(20) == 1
        server.assert_clean()


def test_nobody_outlives_a_killed_launcher(tokenizer: Path) -> None:
    with launch(*replay_arguments(tokenizer, 1, **CONFIG), "--num_serve_frontends", "2") as server:
        server.wait_until_ready()
        assert len(server.everybody()) == 5

        async def play() -> Response:
            exchange = await begin(server.url, *ENDLESS[0])
            await exchange.read_events(3)
            server.send(signal.SIGKILL)
            return await exchange.rest()

        asyncio.run(play())
        assert server.wait(10) == -signal.SIGKILL  # which waits for the others too


def test_an_address_is_not_shared_with_another_server(tokenizer: Path) -> None:
    arguments = [*replay_arguments(tokenizer, 0, **CONFIG), "--num_serve_frontends", "2"]
    with serving(*arguments) as server:
        port = server.url.rsplit(":", 1)[1]
        with launch(*arguments, "--port", port) as second:
            assert second.wait() == 1
            assert f"cannot listen on 127.0.0.1:{port}" in second.log
