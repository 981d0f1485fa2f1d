"""The ASGI side of a request and of a response, without a framework between a chunk and the socket."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from serve.errors import ApiError, BadRequestError, PayloadTooLargeError
from serve.streams import ClientStream
from serve.timings import Timings

JSON = (b"content-type", b"application/json")
EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the chunks otherwise
)

#: Bytes of a body that are handed to the server at once; it takes more only while the client keeps up.
_PIECE = 64 << 10

Header = tuple[bytes, bytes]


class ClientGone(Exception):
    """The client left before its request had been read."""


def note_arrival(scope: Scope) -> None:
    """Note in the scope that its request is here; its body, prompt and tokens are yet to come."""
    scope.setdefault("state", {})["arrived"] = time.monotonic()


def since_arrival(scope: Scope) -> float:
    """Seconds since ``note_arrival``."""
    return float(time.monotonic() - scope["state"]["arrived"])


def request_id(scope: Scope) -> bytes:
    """The client's ``X-Request-Id``, else a new one. It labels a response and is never our key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= 256:
            return bytes(value)
    return secrets.token_hex(16).encode()


async def read_body(receive: Receive, limit: int) -> bytes:
    """The request's body. PayloadTooLargeError beyond ``limit`` bytes, once all of it has come and gone: who answers a
    client that is still sending, and closes, resets the connection under the answer."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
        if not message.get("more_body", False):
            break
    if size > limit:
        raise PayloadTooLargeError(f"The body is larger than {limit} bytes.")
    return b"".join(parts)


async def send_body(send: Send, status: int, body: bytes, headers: Iterable[Header] = (JSON,)) -> None:
    """A whole response. A long body goes out in pieces: otherwise it would all lie in the transport at once, and its
    request would count as answered while the client takes its time."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    last = max(0, len(body) - 1) // _PIECE * _PIECE
    for at in range(0, last, _PIECE):
        await send({"type": "http.response.body", "body": body[at : at + _PIECE], "more_body": True})
    await send({"type": "http.response.body", "body": body[last:]})


def json_body(value: Any) -> bytes:
    """A value as JSON. Text that is not valid Unicode, such as half a pair from a model, gets question marks."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


async def send_json(send: Send, value: Any, headers: Iterable[Header], status: int = 200) -> int:
    """A whole response from a small value; returns the status. Large ones are made in a thread, by ``json_body``."""
    await send_body(send, status, json_body(value), [JSON, *headers])
    return status


async def send_error(send: Send, error: ApiError, headers: Iterable[Header] = ()) -> None:
    """An error object with its status."""
    own = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    await send_body(send, error.status, error.body(), [JSON, *own, *headers])


async def send_stream(
    send: Send,
    stream: ClientStream,
    headers: Iterable[Header],
    first_sent: Callable[[], None],
    timings: Timings | None = None,
) -> int:
    """The events of a stream as they come; returns the status. The 200 waits for the first bytes: a request that fails
    before them gets an HTTP error instead of a stream that turns into one. OverloadedError when the request is refused.

    timings: told behind the last event, or ahead of a document; the client has asked for them.
    """
    first = await stream.next()
    if stream.abandoned:
        return 499
    if stream.refusal is not None:
        raise stream.refusal
    if stream.whole:
        status = 500 if stream.failed else 200
        told = () if timings is None else (timings.header(),)
        await send_body(send, status, first, [JSON, *told, *headers])
        return 499 if stream.abandoned else status
    await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS, *headers]})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    first_sent()
    stream.attach()
    try:
        while part := await stream.next():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    finally:
        stream.detach()
    if timings is not None and not stream.abandoned:
        await send({"type": "http.response.body", "body": timings.comment(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
    return 499 if stream.abandoned else 200


async def until_gone(receive: Receive, stream: ClientStream) -> None:
    """Wait for the client to leave, then wake the writer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.abandon()


async def watched(receive: Receive, stream: ClientStream, response: Awaitable[Any]) -> Any:
    """Await ``response`` while watching for the client to leave, in streams and unary requests alike."""
    watcher = asyncio.create_task(until_gone(receive, stream))
    try:
        return await response
    finally:
        watcher.cancel()


def check_json(scope: Scope) -> None:
    """Refuse a body that says it is something else than plain JSON; nothing said is taken for JSON."""
    for name, value in scope["headers"]:
        said = value.decode("latin-1").strip()[:80]
        if name == b"content-type" and said and "json" not in said.partition(";")[0].lower():
            raise BadRequestError(f"The content type must be application/json, not {said}.", status=415)
        if name == b"content-encoding" and said.lower() not in ("", "identity"):
            raise BadRequestError(f"The content encoding {said} is not supported; send the body as it is.", status=415)
