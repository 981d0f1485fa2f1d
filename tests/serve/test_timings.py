"""``X-Timings``: who asks, what is told, where it stands in a response, and that nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Scope

from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END, Emissions
from serve import http, timings
from serve.errors import BadRequestError
from serve.prompts import Prompts
from serve.timings import Timings, ask_timings, timings_of
from tests.serve.test_app import CHAT, Client, Served, run

ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
}
DONE = b"data: [DONE]\n\n"


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(http, "time", made)
    monkeypatch.setattr(timings, "time", made)
    return made


def scope(*values: bytes) -> Scope:
    return {"headers": [(b"x-timings", value) for value in values], "state": {"arrived": 1.0}}


# ------------------------------------------------------------------------------------------------------ the header


@pytest.mark.parametrize(("values", "asked"), [((), False), ((b"0",), False), ((b"1",), True), ((b"0", b"1"), True)])
def test_who_asks(values: tuple[bytes, ...], asked: bool) -> None:
    request = scope(*values)
    ask_timings(request)
    assert (timings_of(request) is not None) == asked


@pytest.mark.parametrize("value", [b"", b"2", b"true", b"yes", b"01", b"1 ", b"\xff"])
def test_anything_else_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask_timings(scope(b"1", value))
    assert caught.value.param == "X-Timings" and caught.value.status == 400


@pytest.mark.parametrize("path", ROUTES)
def test_a_refusal_comes_before_anything_is_read(path: str) -> None:
    async def main() -> None:
        served = Served()
        client = await served.call(path, b"no JSON at all", x_timings="please")
        assert client.status == 400 and client.json()["error"]["param"] == "X-Timings"
        assert served.to_executor == []

    run(main())


def test_routes_that_generate_nothing_do_not_look() -> None:
    async def main() -> None:
        for value in ("1", "please"):
            client = await Served().call("/tokenize", {"prompt": "Hi"}, x_timings=value)
            assert client.status == 200 and b"server-timing" not in client.headers

    run(main())


# ------------------------------------------------------------------------------------------------------ a stream


def answer(served: Served, payload: bytes, flags: int = 0, count: int = 1, stamp: int = 0) -> None:
    message = Emissions.build(0, [(served.request.rid, 0, 0, count, flags, payload)])
    message.stamp = stamp
    served.proxy.receive(message)


async def turn() -> None:
    """Everybody who is ready goes on."""
    for _ in range(10):
        await asyncio.sleep(0)


def told(client: Client) -> tuple[bytes, dict[str, Any]]:
    """The body ahead of the comment, and what the comment tells."""
    body, found, comment = client.body.rpartition(b": timings ")
    assert found and comment.endswith(b"\n\n") and comment.count(b"\n") == 2
    return body, json.loads(comment)


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_tells_where_its_time_went(path: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize = Prompts.chat, Prompts.texts

    async def slow_chat(prompts: Prompts, request: Any) -> Any:
        clock.now += 0.25
        return await tokenize[0](prompts, request)

    async def slow_texts(prompts: Prompts, *texts: Any) -> Any:
        clock.now += 0.25
        return await tokenize[1](prompts, *texts)

    monkeypatch.setattr(Prompts, "chat", slow_chat)
    monkeypatch.setattr(Prompts, "texts", slow_texts)

    async def main() -> None:
        served, client = Served(), SlowToSend(json.dumps({**ROUTES[path], "stream": True}).encode(), clock)
        call = asyncio.create_task(served.call(path, client=client, x_timings="1"))
        await served.submitted.wait()
        clock.now += 2
        stamp = clock.monotonic_ns()
        clock.now += 0.5
        answer(served, b"data: 1\n\n", count=2, stamp=stamp)
        await turn()
        clock.now += 3
        answer(served, b"data: 2\n\n", count=6, stamp=clock.monotonic_ns() - 100_000_000)
        await turn()
        answer(served, b"", OUTPUT_END, count=6)
        answer(served, DONE, REQUEST_END, count=7)
        await call
        body, figures = told(client)
        assert body == b"data: 1\n\ndata: 2\n\n" + DONE
        assert figures == {
            "parse": 125.0, "tokenize": 250.0, "queue": 2500.0, "first": 2875.0, "total": 5875.0, "tokens": 7,
            "chunks": 3, "lag_mean": 300.0, "lag_max": 500.0,
        }  # fmt: skip
        assert [message.get("more_body", False) for message in client.sent[-2:]] == [True, False]
        assert client.sent[-2]["body"].startswith(b": timings ") and client.sent[-1]["body"] == b""
        assert b"server-timing" not in client.headers

    run(main())


class SlowToSend(Client):
    """A client whose body takes an eighth of a second."""

    def __init__(self, body: bytes, clock: Clock) -> None:
        super().__init__(body)
        self._clock = clock

    async def receive(self) -> Any:
        message = await super().receive()
        self._clock.now += 0.125
        return message


@pytest.mark.parametrize("headers", [{}, {"x_timings": "0"}])
def test_who_does_not_ask_gets_nothing_of_it(headers: dict[str, str]) -> None:
    async def main() -> None:
        served = Served()
        call = asyncio.create_task(served.call("/v1/chat/completions", {**CHAT, "stream": True}, **headers))
        await served.submitted.wait()
        answer(served, b"data: 1\n\n" + DONE, REQUEST_END, stamp=5)
        assert (await call).body == b"data: 1\n\n" + DONE

    run(main())


def test_a_stream_that_fails_tells_what_it_knows() -> None:
    async def main() -> None:
        served = Served()
        call = asyncio.create_task(served.call("/v1/chat/completions", {**CHAT, "stream": True}, x_timings="1"))
        await served.submitted.wait()
        answer(served, b"data: 1\n\n")
        await turn()
        served.proxy.fail_all("The server ends.")
        body, figures = told(await call)
        assert body.endswith(DONE) and b"The server ends." in body
        assert figures.keys() == {"parse", "tokenize", "queue", "first", "total", "chunks"}

    run(main())


def test_a_client_that_left_is_told_nothing() -> None:
    async def main() -> None:
        served, client = Served(), Client(json.dumps({**CHAT, "stream": True}).encode())
        call = asyncio.create_task(served.call("/v1/chat/completions", client=client, x_timings="1"))
        await served.submitted.wait()
        answer(served, b"data: 1\n\n")
        await client.arrived.wait()
        client.leave()
        await call
        assert client.body == b"data: 1\n\n"

    run(main())


# ------------------------------------------------------------------------------------------------------ a document


@pytest.mark.parametrize("flags", [REQUEST_END | BODY, REQUEST_END | BODY | FAILED])
@pytest.mark.parametrize("path", ROUTES)
def test_a_document_tells_it_in_its_head(path: str, flags: int, clock: Clock) -> None:
    async def main() -> None:
        served = Served()
        call = asyncio.create_task(served.call(path, ROUTES[path], x_timings="1"))
        await served.submitted.wait()
        clock.now += 1.5
        document = b'{"id": "resp_1", "output": []}'
        answer(served, document, flags, count=4, stamp=5)
        client = await call
        assert client.body == document and client.status == (500 if flags & FAILED else 200)
        said = client.headers[b"server-timing"].decode()
        spans = {"parse": 0.0, "tokenize": 0.0, "queue": 1500.0, "first": 1500.0, "total": 1500.0}
        assert said.split(", ") == [*(f"{name};dur={value}" for name, value in spans.items()), 'tokens;desc="4"']

    run(main())


def test_a_mark_is_made_once(clock: Clock) -> None:
    made = Timings(clock.now)
    clock.now += 1
    made.mark("first")
    clock.now += 1
    made.mark("first")
    assert json.loads(made.comment().removeprefix(b": timings ")) == {"first": 1000.0, "total": 2000.0, "chunks": 0}


def test_a_stamp_that_is_ahead_of_us_is_no_lag(clock: Clock) -> None:
    made = Timings(clock.now)
    made.chunk(clock.monotonic_ns() + 10**9)
    assert json.loads(made.comment().removeprefix(b": timings "))["lag_max"] == 0
