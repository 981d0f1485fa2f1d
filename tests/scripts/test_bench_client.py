"""The benchmark's client against a real server that says exactly what, when and cut where."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.client import Client, Target
from scripts.bench.events import EventReader
from scripts.bench.outcome import Outcome
from scripts.bench.run import Plan, Run, run
from tests.certificates import Authority
from tests.scripts.scripted_server import (
    DONE,
    HEAD,
    LAST,
    Answerer,
    Clock,
    Request,
    ScriptedServer,
    answering,
    chat,
    delta,
    document,
    event,
    framed,
    serving,
    stream,
    usage,
)

PATH = "/v1/chat/completions"
HELLO = stream(chat("Hello", " world", "!"))


def asked(answer: Answerer, timeout: float = 20.0, times: int = 1) -> tuple[list[Outcome], ScriptedServer]:
    """Outcomes of requests sent one after another, and the server that answered them."""

    async def ask(server: ScriptedServer) -> list[Outcome]:
        client = Client(Target.of(server.url), timeout)
        outcomes = [await client.stream(PATH, b'{"stream":true}') for _ in range(times)]
        client.close()
        return outcomes

    return served(answer, ask)


def served(answer: Answerer, work: Callable[[ScriptedServer], Awaitable[Any]]) -> tuple[Any, ScriptedServer]:
    async def whole() -> tuple[Any, ScriptedServer]:
        async with serving(answer) as server:
            return await work(server), server

    return asyncio.run(whole())


def error_of(answer: bytes, timeout: float = 20.0) -> str:
    """Why the only request failed."""
    (outcome,), _ = asked(answering(answer), timeout)
    assert outcome.finished and not outcome.completed
    assert outcome.end >= outcome.start
    return outcome.error


# ------------------------------------------------------------------------------------------------ events


BODY = b": ping\n\ndata: one\n\nevent: x\ndata:two\ndata: lines\nid: 7\n\ndata: three\n\ndata: [DONE]\n\n"
DATA = [b"one", b"two\nlines", b"three", b"[DONE]"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_events_are_the_same_wherever_the_body_is_cut(end: bytes, size: int) -> None:
    body, reader = BODY.replace(b"\n", end), EventReader()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    assert [*sum((reader.feed(piece) for piece in pieces), []), *reader.close()] == DATA


def test_an_event_whose_empty_line_did_not_come_is_read_at_the_end() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one\n\ndata: [DONE]\n") == [b"one"]
    assert reader.close() == [b"[DONE]"]
    assert reader.close() == []


# ------------------------------------------------------------------------------------------------ times


def paced(clock: Clock, steps: Sequence[tuple[float, bytes]]) -> Answerer:
    """Each piece that many seconds after the one before, once the client has looked at its clock for that."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for seconds, body in steps:
            clock.now += seconds
            clock.read.clear()
            writer.write(framed(body))
            await clock.read.wait()
        writer.write(LAST)

    return answer


def timed(steps: Sequence[tuple[float, bytes]]) -> Outcome:
    async def whole() -> Outcome:
        clock = Clock()
        async with serving(paced(clock, steps)) as server:
            return await Client(Target.of(server.url), clock=clock).stream(PATH, b"{}", queued=3.0)

    return asyncio.run(whole())


def test_times_are_those_of_the_chunks() -> None:
    role, *texts, last, counts, done = chat("a", "b", "c")
    outcome = timed(
        [(0.25, role), (0.5, texts[0]), (0.125, texts[1]), (1.0, texts[2]), (0.5, last), (8, counts + done)]
    )
    assert outcome.completed and outcome.text == "abc"
    assert outcome.ttft == 0.75, "the chunk that only says who speaks is no token"
    assert outcome.itls == [0.125, 1.0]
    assert outcome.latency == 2.375, "up to the finish reason; counts come later"
    assert (outcome.input_tokens, outcome.output_tokens, outcome.queued) == (7, 3, 3.0)
    assert outcome.tpot() == (2.375 - 0.75) / 2


def test_chunks_that_came_together_have_one_time() -> None:
    role, a, b, c, *rest = chat("a", "b", "c")
    outcome = timed([(1.0, role + a + b), (2.0, c + b"".join(rest))])
    assert outcome.itls == [0.0, 2.0]
    assert outcome.latency == 3.0


@pytest.mark.parametrize(
    "chunk",
    [
        delta(content="x"),
        delta(reasoning_content="x"),
        delta(reasoning="x"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        event(choices=[{"index": 0, "text": "x", "finish_reason": None}]),
    ],
)
def test_a_chunk_is_what_carries_output(chunk: bytes) -> None:
    outcome = timed([(1.0, chunk), (1.0, delta("stop") + DONE)])
    assert outcome.completed
    assert (outcome.ttft, outcome.latency, len(outcome.chunks)) == (1.0, 2.0, 1)


def test_an_answer_without_output_has_its_end_for_its_first_token() -> None:
    outcome = timed([(1.0, delta(role="assistant")), (1.0, delta("stop")), (5.0, usage(7, 0) + DONE)])
    assert outcome.completed
    assert (outcome.ttft, outcome.latency, outcome.tpot(), outcome.itls) == (2.0, 2.0, None, [])


# ------------------------------------------------------------------------------------------------ HTTP


@pytest.mark.parametrize("size", [1, 3, 64, 10_000])
def test_an_answer_is_the_same_however_its_bytes_come(size: int) -> None:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(HELLO), size):
            writer.write(HELLO[start : start + size])
            await asyncio.sleep(0)

    (outcome,), _ = asked(answer)
    assert outcome.completed and outcome.text == "Hello world!"
    assert (outcome.input_tokens, outcome.output_tokens, len(outcome.chunks)) == (7, 3, 3)


EVENTS = b"".join(chat("Hello", " world", "!"))


@pytest.mark.parametrize(
    "answer",
    [
        HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(EVENTS)) + EVENTS,
        b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO,
        HELLO.replace(b"\r\n0\r\n\r\n", b"\r\n0\r\nX-Trailer: 1\r\n\r\n"),
    ],
)
def test_bodies_of_each_kind(answer: bytes) -> None:
    (outcome, again), server = asked(answering(answer), times=2)
    assert outcome.text == again.text == "Hello world!"
    assert server.connections == 1


def test_a_body_that_ends_with_its_connection() -> None:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + EVENTS)
        writer.close()

    (outcome, again), server = asked(answer, times=2)
    assert outcome.text == again.text == "Hello world!"
    assert server.connections == 2


def test_a_connection_is_used_again_unless_the_server_closes_it() -> None:
    _, kept = asked(answering(HELLO), times=3)
    _, closed = asked(answering(HELLO.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)), times=3)
    assert (kept.connections, closed.connections) == (1, 3)


def test_a_refusal_keeps_its_connection_too() -> None:
    outcomes, server = asked(answering(document({"detail": "full"}, "503 Service Unavailable")), times=2)
    assert [outcome.error for outcome in outcomes] == ["HTTP 503 Service Unavailable: full"] * 2
    assert server.connections == 1


def test_a_request_is_sent_again_when_its_kept_connection_was_closed_under_it() -> None:
    outcomes, server = asked(answering(HELLO, b"", HELLO), times=2)
    assert [outcome.text for outcome in outcomes] == ["Hello world!"] * 2
    assert len(server.requests) == 3 and server.connections == 2


def test_a_request_is_not_sent_again_on_a_new_connection() -> None:
    (outcome,), server = asked(answering(b""))
    assert outcome.error == "connection closed before the end of the answer"
    assert len(server.requests) == 1


def test_headers_of_ours_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    async def ask(server: ScriptedServer) -> None:
        await Client(Target.of(server.url)).stream(PATH, b'{"a":1}')
        await Client(Target.of(server.url, [("authorization", "none"), ("X-More", "1")])).document("/v1/models")

    _, server = served(answering(HELLO, document({})), ask)
    first, second = server.requests
    assert (first.method, first.path, first.body) == ("POST", PATH, {"a": 1})
    assert first.headers["authorization"] == "Bearer secret"
    assert first.headers["host"] == server.url.removeprefix("http://")
    assert (second.method, second.headers["authorization"], second.headers["x-more"]) == ("GET", "none", "1")


@pytest.mark.parametrize(("insecure", "trusted"), [(False, True), (True, False), (False, False)])
def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, insecure: bool, trusted: bool) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))

    async def whole() -> Outcome:
        async with serving(answering(HELLO), context) as server:
            client = Client(Target.of(server.url, insecure=insecure))
            outcome = await client.stream(PATH, b"{}")
            client.close()
            return outcome

    outcome = asyncio.run(whole())
    if insecure or trusted:
        assert outcome.text == "Hello world!"
    else:
        assert outcome.error.startswith("cannot connect: ") and "certificate verify failed" in outcome.error


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (document({"error": {"message": "many", "code": 429}}, "429 Too Many"), "HTTP 429 Too Many: many"),
        (document({"message": "no such model"}, "404 Not Found"), "HTTP 404 Not Found: no such model"),
        (document({"detail": [{"loc": "x"}]}, "422 Unprocessable"), 'HTTP 422 Unprocessable: [{"loc":"x"}]'),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "HTTP 500 Oops"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>", "HTTP 502 Bad Gateway: <html>"),
        (document({"choices": []}), 'no event stream but application/json: {"choices":[]}'),
        (stream([delta(content="x"), event(error={"message": "it is gone"}), DONE]), "error in the stream: it is gone"),
        (stream([delta(content="x")]), "the stream ended without a finish_reason or [DONE]"),
        (stream([b"data: {no\n\n"]), "an event is no JSON"),
        (stream([b"data: [1]\n\n"]), "an event has another form than expected"),
        (stream([event(choices=["x"])]), "an event has another form than expected"),
        (stream([event(choices=[], usage={"x": 1})]), "an event has another form than expected"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP"),
        (HEAD + b"zz\r\n", "no HTTP"),
    ],
)  # fmt: skip
def test_a_failure_says_why(answer: bytes, error: str) -> None:
    assert error_of(answer).startswith(error)


def test_a_long_reason_is_cut() -> None:
    assert len(error_of(document({"message": "x" * 5000}, "400 Bad Request"))) == 300


def test_a_connection_that_is_lost_in_the_middle() -> None:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + framed(delta(content="x")))
        writer.close()

    (outcome,), server = asked(answer)
    assert outcome.error == "connection closed before the end of the answer"
    assert len(outcome.chunks) == 1 and len(server.requests) == 1


def test_nobody_listens() -> None:
    async def ask() -> tuple[Outcome, str]:
        async with serving(answering(b"")) as server:
            url = server.url
        client = Client(Target.of(url))
        with pytest.raises(OSError, match="GET /v1/models: cannot connect") as caught:
            await client.document("/v1/models")
        return await client.stream(PATH, b"{}"), str(caught.value)

    outcome, _ = asyncio.run(ask())
    assert outcome.error.startswith("cannot connect: ") and outcome.finished


def test_an_answer_that_takes_too_long_is_given_up_and_the_server_sees_it() -> None:
    async def whole() -> Outcome:
        left = asyncio.Event()

        async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + framed(delta(content="x")))
            await request.hung_up()
            left.set()

        async with serving(answer) as server:
            outcome = await Client(Target.of(server.url), timeout=0.1).stream(PATH, b"{}")
            await asyncio.wait_for(left.wait(), 20)
            return outcome

    outcome = asyncio.run(whole())
    assert outcome.error == "no whole answer within 0.1 s"
    assert len(outcome.chunks) == 1


# ------------------------------------------------------------------------------------------------ many of them


def plan(count: int, limit: int | None = None, offset: float = 0.0) -> Plan:
    bodies = [b'{"number":%d}' % number for number in range(count)]
    return Plan(PATH, bodies, [offset * number for number in range(count)], limit)


def test_so_many_at_once_and_outcomes_in_order() -> None:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        # Others come meanwhile, if they may.
        for _ in range(20):
            await asyncio.sleep(0)
        writer.write(stream(chat(str(request.body["number"]))))

    async def work(server: ScriptedServer) -> tuple[Run, int]:
        finished: list[None] = []
        client = Client(Target.of(server.url))
        done = await run(plan(12, limit=3), client, asyncio.Event(), lambda: finished.append(None))
        client.close()
        return done, len(finished)

    (done, finished), server = served(answer, work)
    assert [outcome.text for outcome in done.outcomes] == [str(number) for number in range(12)]
    assert (finished, server.peak, server.connections) == (12, 3, 3)
    assert all(outcome.queued >= 0 for outcome in done.outcomes)
    assert done.outcomes[0].queued < done.outcomes[11].queued
    assert done.duration >= max(outcome.latency for outcome in done.outcomes)


def test_requests_are_sent_when_they_are_due() -> None:
    async def work(server: ScriptedServer) -> Run:
        return await run(plan(3, offset=0.05), Client(Target.of(server.url)), asyncio.Event())

    done, _ = served(answering(HELLO), work)
    first, *later = [outcome.start for outcome in done.outcomes]
    assert all(start - first >= 0.04 * number for number, start in enumerate(later, 1))


def test_what_is_open_when_the_run_is_stopped_has_no_outcome() -> None:
    async def whole() -> Run:
        stop, hung = asyncio.Event(), []

        async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
            if request.body["number"] < 2:
                writer.write(HELLO)
                return
            hung.append(writer)
            writer.write(HEAD + framed(delta(content="x")))
            if len(hung) == 2:
                stop.set()
            await request.hung_up()

        async with serving(answer) as server:
            return await asyncio.wait_for(run(plan(6, limit=2), Client(Target.of(server.url)), stop), 20)

    done = asyncio.run(whole())
    assert [outcome.text if outcome else None for outcome in done.outcomes] == ["Hello world!"] * 2 + [None] * 4
