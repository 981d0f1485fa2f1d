"""The ASGI side of a request and a response, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Scope

from executor.messages import BODY, FAILED, REQUEST_END
from serve.errors import BadRequestError, OverloadedError, PayloadTooLargeError
from serve.http import (
    ClientGone,
    check_json,
    json_body,
    read_body,
    request_id,
    send_body,
    send_error,
    send_json,
    send_stream,
    watched,
)
from serve.streams import ClientStream

Receive = Callable[[], Awaitable[Message]]


def scope(*headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "headers": list(headers)}


def giving(*messages: Message) -> Receive:
    """A client that sends these and then nothing."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


GONE: Message = {"type": "http.disconnect"}


class Sent:
    """What was sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(dict(message))

    @property
    def head(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


# -------------------------------------------------------------------------------- the request


def test_the_request_id_is_the_clients() -> None:
    assert request_id(scope((b"x-request-id", b"mine"))) == b"mine"


@pytest.mark.parametrize("sent", [b"", b"x" * 257])
def test_or_a_new_one(sent: bytes) -> None:
    made = {request_id(scope((b"x-request-id", sent))), request_id(scope())}
    assert len(made) == 2 and all(len(name) == 32 for name in made)


def test_a_body_in_parts() -> None:
    receive = giving(part(b"ab"), part(b""), part(b"c", False))
    assert asyncio.run(read_body(receive, 3)) == b"abc"


def test_a_body_that_is_too_large_is_read_to_its_end() -> None:
    """Else the answer is lost: the connection is reset under a client that is still sending."""
    receive = giving(part(b"ab"), part(b"cd"), part(b"ef", False), GONE)

    async def main() -> None:
        with pytest.raises(PayloadTooLargeError, match="larger than 3 bytes"):
            await read_body(receive, 3)
        assert await receive() == GONE

    asyncio.run(main())


def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientGone):
        asyncio.run(read_body(giving(part(b"ab"), GONE), 100))


@pytest.mark.parametrize("said", [b"application/json", b"application/json; charset=utf-8", b"text/JSON", b"", b"  "])
def test_json(said: bytes) -> None:
    check_json(scope((b"content-type", said), (b"content-encoding", b"identity")))
    check_json(scope())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"content-type", b"text/plain"),
        (b"content-type", b"text/plain; x=json"),
        (b"content-type", b"\xff"),
        (b"content-encoding", b"gzip"),
    ],
)
def test_something_else(name: bytes, value: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_json(scope((name, value)))
    assert caught.value.status == 415


# -------------------------------------------------------------------------------- the response


def test_a_whole_response() -> None:
    sent = Sent()
    asyncio.run(send_body(sent, 201, b"{}", [(b"a", b"b")]))
    assert (
        sent.messages[0]["status"] == 201 and sent.head == {b"a": b"b", b"content-length": b"2"} and sent.body == b"{}"
    )


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 200_000])
def test_a_long_body_goes_out_in_pieces(size: int) -> None:
    """So that the server stops taking more while the client does not."""
    sent, body = Sent(), bytes(range(250)) * (size // 250) + b"x" * (size % 250)
    asyncio.run(send_body(sent, 200, body))
    assert sent.body == body and sent.head[b"content-length"] == b"%d" % size
    pieces = sent.messages[1:]
    assert max(len(message["body"]) for message in pieces) <= 65_536
    assert len(pieces) == max(1, -(-size // 65_536))
    assert [message.get("more_body", False) for message in pieces] == [True] * (len(pieces) - 1) + [False]


@pytest.mark.parametrize(
    ("value", "body"),
    [
        ({"a": "é", "b": None}, '{"a":"é","b":null}'.encode()),
        ({"a": "half \ud83d"}, b'{"a": "half ?"}'),
        ({"a": 1 << 70}, b'{"a": 1180591620717411303424}'),
    ],
)
def test_json_is_utf_8_whatever_the_text(value: Any, body: bytes) -> None:
    sent = Sent()
    assert json_body(value) == body and asyncio.run(send_json(sent, value, [(b"a", b"b")], 201)) == 201
    assert sent.messages[0]["status"] == 201 and sent.body == body
    assert sent.head[b"content-type"] == b"application/json" and sent.head[b"a"] == b"b"


def test_an_error_with_its_headers() -> None:
    sent = Sent()
    asyncio.run(send_error(sent, OverloadedError("Later.", retry_after=1.2), [(b"x", b"y")]))
    assert sent.messages[0]["status"] == 429
    assert (
        sent.head[b"retry-after"] == b"2"
        and sent.head[b"x"] == b"y"
        and sent.head[b"content-type"] == b"application/json"
    )


def streamed(stream: ClientStream) -> tuple[Sent, int, int]:
    """(what was sent, the status, how often the first chunk was reported)"""
    sent, firsts = Sent(), []
    status = asyncio.run(send_stream(sent, stream, [(b"x", b"y")], lambda: firsts.append(1)))
    return sent, status, len(firsts)


def test_events() -> None:
    stream = ClientStream()
    stream.feed(b"data: 1\n\n", 0)
    stream.feed(b"data: [DONE]\n\n", REQUEST_END)
    sent, status, firsts = streamed(stream)
    assert (status, firsts) == (200, 1) and sent.messages[0]["status"] == 200
    assert sent.head[b"content-type"].startswith(b"text/event-stream") and sent.head[b"x"] == b"y"
    assert sent.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert [message.get("more_body", False) for message in sent.messages[1:]] == [True, False]


@pytest.mark.parametrize(("flags", "status"), [(REQUEST_END | BODY, 200), (REQUEST_END | BODY | FAILED, 500)])
def test_a_document(flags: int, status: int) -> None:
    stream = ClientStream()
    stream.feed(b"{}", flags)
    sent, returned, firsts = streamed(stream)
    assert returned == status == sent.messages[0]["status"] and firsts == 0
    assert sent.head[b"content-length"] == b"2" and sent.body == b"{}"


def test_a_client_that_leaves_in_the_middle_of_a_document() -> None:
    stream = ClientStream()
    stream.feed(b"x" * 70_000, REQUEST_END | BODY)
    sent = Sent()

    async def send(message: Message) -> None:
        await sent(message)
        if message.get("more_body"):
            stream.abandon()

    assert asyncio.run(send_stream(send, stream, [], lambda: None)) == 499


def test_a_refusal_is_raised_before_anything_is_sent() -> None:
    stream, sent = ClientStream(), Sent()
    stream.refuse("Later.", 503, 2.0)
    with pytest.raises(OverloadedError, match="Later") as caught:
        asyncio.run(send_stream(sent, stream, [], lambda: None))
    assert caught.value.status == 503 and sent.messages == []


def test_nobody_is_told_of_a_refusal_who_has_left() -> None:
    stream = ClientStream()
    stream.refuse("Later.", 503, 2.0)
    stream.abandon()
    assert streamed(stream)[:2][1] == 499


def test_nothing_is_sent_to_a_client_that_left_before_the_first_bytes() -> None:
    stream = ClientStream()
    stream.abandon()
    sent, status, _ = streamed(stream)
    assert status == 499 and sent.messages == []


def test_a_client_that_leaves_in_the_middle() -> None:
    stream = ClientStream()
    stream.feed(b"data: 1\n\n", 0)
    sent = Sent()
    assert asyncio.run(send_stream(sent, stream, [], stream.abandon)) == 499
    assert sent.body == b"data: 1\n\n" and not sent.messages[-1].get("more_body")


def test_watching_wakes_the_writer() -> None:
    async def main() -> Any:
        stream = ClientStream()
        return await asyncio.wait_for(watched(giving(part(b"", False), GONE), stream, stream.next()), 5)

    assert asyncio.run(main()) == b""


def test_watching_ends_with_the_response() -> None:
    async def main() -> None:
        async def answer() -> int:
            return 200

        assert await watched(giving(), ClientStream(), answer()) == 200
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
