"""A response's slot: what gathers in it, how it ends, and who is woken."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END
from serve.chunks import DONE
from serve.limits import ClientLimits
from serve.outlets import HIGH_WATER, Outlets
from serve.streams import PING, ClientStream


def test_bytes_gather_until_they_are_taken() -> None:
    async def main() -> None:
        stream = ClientStream()
        stream.feed(b"a", 0)
        stream.feed(b"b", OUTPUT_END)
        assert await stream.next() == b"ab" and not stream.ended
        stream.feed(b"c", OUTPUT_END | REQUEST_END)
        assert stream.ended and not stream.failed and not stream.whole
        assert await stream.next() == b"c"
        assert await stream.next() == b"" == await stream.next()

    asyncio.run(main())


def test_the_writer_waits_for_news() -> None:
    async def main() -> None:
        stream = ClientStream()
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.feed(b"x", 0)
        assert await asyncio.wait_for(waiting, 5) == b"x"

        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.abandon()
        assert await asyncio.wait_for(waiting, 5) == b"" and stream.abandoned and not stream.ended

    asyncio.run(main())


def test_nothing_is_given_to_a_client_that_left() -> None:
    async def main() -> None:
        stream = ClientStream()
        stream.feed(b"x", 0)
        stream.abandon()
        assert await stream.next() == b""

    asyncio.run(main())


def test_all_is_the_whole_response() -> None:
    async def main() -> None:
        stream = ClientStream()
        everything = asyncio.create_task(stream.all())
        for part in (b"a", b"b", b"c"):
            stream.feed(part, 0)
            await asyncio.sleep(0)
        stream.feed(b"", REQUEST_END)
        assert await asyncio.wait_for(everything, 5) == b"abc"

    asyncio.run(main())


def test_a_document() -> None:
    stream = ClientStream()
    stream.feed(b"{}", REQUEST_END | BODY)
    assert stream.ended and stream.whole and not stream.failed


def error_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


def test_an_error_before_the_first_event_is_a_document() -> None:
    async def main() -> None:
        for refuse in (lambda s: s.fail("gone"), lambda s: s.feed(b"", REQUEST_END | FAILED | BODY)):
            stream = ClientStream()
            refuse(stream)
            assert stream.ended and stream.failed and stream.whole
            assert error_of(await stream.next()) in ("gone", "The request was refused by its worker.")
            assert await stream.next() == b""

    asyncio.run(main())


def test_an_error_after_events_is_an_event() -> None:
    """Also one of a worker that took the stream over and could not open it."""

    async def main() -> None:
        for refuse in (lambda s: s.fail("gone"), lambda s: s.feed(b"", REQUEST_END | FAILED | BODY)):
            stream = ClientStream()
            stream.feed(b"data: 1\n\n", 0)
            refuse(stream)
            assert stream.ended and stream.failed and not stream.whole
            body = await stream.next()
            assert body.startswith(b"data: 1\n\ndata: {") and body.endswith(b"}\n\n" + DONE)
            assert error_of(body.split(b"\n\n")[1].removeprefix(b"data: "))

    asyncio.run(main())


def test_a_workers_own_error_is_passed_on() -> None:
    stream = ClientStream()
    stream.feed(b'{"error": {}}', REQUEST_END | FAILED | BODY)
    assert stream.failed and stream.whole
    assert asyncio.run(stream.next()) == b'{"error": {}}'


def test_an_error_document_behind_events_becomes_an_event() -> None:
    """A worker that takes a request over only to fail it does not know what the client has."""

    async def main() -> None:
        stream = ClientStream()
        stream.feed(b"data: 1\n\n", 0)
        stream.feed(b'{"error":{}}', REQUEST_END | FAILED | BODY)
        assert await stream.next() == b'data: 1\n\ndata: {"error":{}}\n\n' + DONE
        assert stream.ended and stream.failed and not stream.whole

    asyncio.run(main())


# -------------------------------------------------------------------------------- what gathers is bounded


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


class Pipe:
    """A transport that keeps what it gets. descriptor: of its socket, if it has one."""

    def __init__(self, descriptor: int = -1) -> None:
        self.size, self.aborted, self.descriptor = 0, False, descriptor
        self.taken: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.taken.append(data)
        self.size += len(data)

    def get_write_buffer_size(self) -> int:
        return self.size

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == HIGH_WATER

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def fileno(self) -> int:
        return self.descriptor

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_LINGER)

    def abort(self) -> None:
        self.aborted = True


class Bound:
    """A stream whose client may leave 100 bytes."""

    def __init__(self, limit: int = 100, descriptor: int = -1) -> None:
        self.stream, self.pipe, self.dropped = ClientStream(), Pipe(descriptor), list[str]()
        outlets = Outlets(ClientLimits(client_stall_timeout=0, keep_alive_interval=0), self.dropped.append)
        self.outlet = outlets.opened(self.pipe)
        self.stream.bound(self.outlet, limit)

    def feed(self, size: int, flags: int = 0) -> bool:
        """Whether the client is still there afterwards."""
        self.stream.feed(b"x" * size, flags)
        return not self.dropped


@on_a_loop
async def test_what_waits_in_the_slot_counts() -> None:
    bound = Bound()
    assert bound.feed(60) and bound.feed(41) and not bound.feed(1)
    assert bound.dropped == ["bytes"] and not bound.pipe.aborted
    await asyncio.sleep(0.01)
    assert bound.pipe.aborted and not bound.feed(1) and bound.dropped == ["bytes"]


@on_a_loop
async def test_and_what_waits_in_the_transport() -> None:
    bound = Bound()
    bound.pipe.size = 90
    assert bound.feed(10) and bound.feed(1) and not bound.feed(1)


@on_a_loop
async def test_a_full_transport_counts_once_its_writer_is_stopped() -> None:
    """Before that, with a limit above the transport's own mark, nobody looks: this is the path of every token."""
    bound = Bound(limit=100_000)
    bound.pipe.size = 100_001
    assert bound.feed(1) and not bound.feed(1)


@on_a_loop
async def test_and_what_its_writer_has_in_hand() -> None:
    """uvicorn's ``send`` holds it while the transport is full."""
    bound = Bound()
    assert bound.feed(60)
    assert len(await bound.stream.next()) == 60
    assert bound.feed(41) and not bound.feed(1)


@on_a_loop
async def test_what_has_been_taken_does_not() -> None:
    bound = Bound()
    for _ in range(50):
        assert bound.feed(100)
        assert len(await bound.stream.next()) == 100
    waiting = asyncio.create_task(bound.stream.next())
    await asyncio.sleep(0)
    assert bound.feed(100) and bound.feed(0) and not waiting.done()
    assert len(await waiting) == 100


@on_a_loop
async def test_one_payload_is_no_backlog() -> None:
    """A response's last event may hold all of it."""
    bound = Bound()
    assert bound.feed(100_000)
    assert not bound.feed(1)


@on_a_loop
async def test_nor_is_a_document() -> None:
    bound = Bound()
    bound.pipe.size = 1000  # of the answer to an earlier request
    assert bound.feed(100_000, REQUEST_END | BODY) and bound.stream.ended and bound.stream.whole


@on_a_loop
async def test_nothing_is_kept_for_a_client_that_was_disconnected() -> None:
    """And its stream does not end: it might read after all, and take half an answer for a whole one."""
    bound = Bound()
    bound.feed(200)
    bound.feed(1)
    bound.feed(1_000_000)
    bound.feed(5, REQUEST_END)
    writer = asyncio.create_task(bound.stream.next())
    await asyncio.sleep(0)
    assert not writer.done() and not bound.stream.ended
    bound.stream.abandon()  # the connection is gone
    assert await writer == b""


# -------------------------------------------------------------------------------- straight into the transport


def attached(limit: int = 1 << 20, descriptor: int = -1) -> Bound:
    bound = Bound(limit, descriptor)
    bound.stream.feed(b"data: 1\n\n", 0)
    return bound


@on_a_loop
async def test_events_go_straight_to_a_client_that_keeps_up() -> None:
    bound = attached()
    stream, pipe = bound.stream, bound.pipe
    stream.attach()
    stream.feed(b"data: 2\n\n", 0)
    assert pipe.taken == []  # the first is still to be sent
    assert await stream.next() == b"data: 1\n\ndata: 2\n\n"
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.feed(b"data: 3\n\n", 0)
    stream.feed(b"", OUTPUT_END)
    stream.feed(b"data: 4\n\n" * 3, OUTPUT_END)
    assert pipe.taken == [b"9\r\ndata: 3\n\n\r\n", b"1b\r\n" + b"data: 4\n\n" * 3 + b"\r\n"]
    assert bound.outlet.written == 18 + 9 + 27 and not waiting.done()
    stream.feed(b"data: [DONE]\n\n", REQUEST_END | OUTPUT_END)
    assert await waiting == b"data: [DONE]\n\n" and stream.ended


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection: ours, and the client's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(30)
    yield ours, theirs
    ours.close()
    theirs.close()


async def streaming(ours: socket.socket) -> Bound:
    """Its first event has been sent, and nothing waits."""
    bound = attached(descriptor=ours.fileno())
    bound.stream.attach()
    await bound.stream.next()
    writer = asyncio.create_task(bound.stream.next())
    await asyncio.sleep(0)
    writer.cancel()
    return bound


def test_what_the_transport_holds_goes_first(pair: tuple[socket.socket, socket.socket]) -> None:
    """Past the transport only while it is empty, whoever has put something there."""

    async def main() -> None:
        bound = await streaming(pair[0])
        stream, pipe = bound.stream, bound.pipe
        bound.outlet.put(b"first")
        stream.feed(b"data: 2\n\n", 0)
        assert pipe.taken == [b"first", b"9\r\ndata: 2\n\n\r\n"]
        pipe.size = 0
        stream.feed(b"data: 3\n\n", 0)
        stream.feed(b"data: 4\n\n", 0)
        assert len(pipe.taken) == 2
        assert pair[1].recv(1000) == b"9\r\ndata: 3\n\n\r\n9\r\ndata: 4\n\n\r\n"
        bound.outlet.put(b"more")
        stream.feed(b"data: 5\n\n", 0)
        assert pipe.taken[2:] == [b"more", b"9\r\ndata: 5\n\n\r\n"]
        assert bound.outlet.written == 9 * 5

    asyncio.run(main())


def test_parts_are_one_event(pair: tuple[socket.socket, socket.socket]) -> None:
    """Wherever it goes: into the socket, or the slot."""

    async def main() -> None:
        bound = await streaming(pair[0])
        bound.stream.feed_parts(b"data: <", b"x" * 5000, b">\n\n")
        bound.stream.feed_parts(b"data: <", b"", b">\n\n")
        assert pair[1].recv(9000) == b"1392\r\ndata: <" + b"x" * 5000 + b">\n\n\r\na\r\ndata: <>\n\n\r\n"
        bound.outlet.paused()
        bound.stream.feed_parts(b"data: <", b"y", b">\n\n")
        assert await bound.stream.next() == b"data: <y>\n\n" and bound.outlet.written == 9 + 5010 + 10

    asyncio.run(main())


def test_what_the_kernel_does_not_take_waits_in_the_transport(pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> None:
        bound = await streaming(pair[0])
        stream, pipe = bound.stream, bound.pipe
        event = b"data: " + b"x" * 9990 + b"\n\n"
        fed = 0
        while not pipe.taken:
            stream.feed(event, 0)
            fed += 1
        stream.feed(event, 0)  # behind the rest of the one before
        taken, size = b"", (fed + 1) * len(b"%x\r\n%b\r\n" % (len(event), event))
        while len(taken) + pipe.size < size:
            taken += pair[1].recv(1 << 20)
        assert taken + b"".join(pipe.taken) == b"%x\r\n%b\r\n" % (len(event), event) * (fed + 1)

    asyncio.run(main())


def test_a_socket_that_is_broken_is_the_transports_affair(pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> None:
        bound = await streaming(pair[0])
        pair[1].close()
        bound.stream.feed(b"data: 2\n\n", 0)
        assert bound.pipe.taken == [b"9\r\ndata: 2\n\n\r\n"]

    asyncio.run(main())


def test_the_kernels_verdict_is_heard(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a socket is told to the first who asks: the transport would only see that the connection is gone."""

    def write(descriptor: int, data: bytes) -> int:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    async def main() -> None:
        bound = await streaming(pair[0])
        monkeypatch.setattr(os, "write", write)
        bound.stream.feed(b"data: 2\n\n", 0)
        monkeypatch.undo()
        assert bound.dropped == ["seconds"] and not bound.outlet.clear and not bound.pipe.taken
        for _ in range(3):  # turns of the loop
            await asyncio.sleep(0)
        assert bound.pipe.aborted

    asyncio.run(main())


@on_a_loop
async def test_what_waits_goes_first() -> None:
    """While the client does not keep up events gather, and nothing overtakes them."""
    bound = attached()
    stream, pipe, outlet = bound.stream, bound.pipe, bound.outlet
    stream.attach()
    await stream.next()
    writer = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    outlet.paused()
    stream.feed(b"data: 2\n\n", 0)
    assert await writer == b"data: 2\n\n"  # in the hands of uvicorn, which waits
    outlet.resumed()
    stream.feed(b"data: 3\n\n", 0)
    assert pipe.taken == []
    assert await stream.next() == b"data: 3\n\n"
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.feed(b"data: 4\n\n", 0)
    assert len(pipe.taken) == 1
    waiting.cancel()


@pytest.mark.parametrize("how", ["gone", "dropped", "closing", "detached", "abandoned"])
def test_nothing_is_written_where_nobody_is(how: str) -> None:
    asyncio.run(leave(how))


async def leave(how: str) -> None:
    bound = attached()
    stream, outlet = bound.stream, bound.outlet
    stream.attach()
    await stream.next()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    {
        "gone": outlet.gone,
        "dropped": lambda: outlet.drop("seconds"),
        "closing": outlet.closing,
        "detached": stream.detach,
        "abandoned": stream.abandon,
    }[how]()
    if how in ("gone", "dropped"):
        outlet.resumed()  # the last word of a transport that is being emptied
    stream.feed(b"data: 2\n\n", 0)
    assert bound.pipe.taken == []
    waiting.cancel()


@on_a_loop
async def test_a_limit_below_the_transports_own_is_looked_at() -> None:
    bound = attached(limit=100)
    bound.stream.attach()
    await bound.stream.next()
    bound.stream.feed(b"data: 2\n\n", 0)
    assert bound.pipe.taken == []


# -------------------------------------------------------------------------------- refusals


def test_a_refusal_before_the_first_byte() -> None:
    async def main() -> None:
        stream = ClientStream()
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.refuse("Later.", 429, 1.5)
        assert await waiting == b"" and stream.ended and stream.failed and stream.refusal is not None
        assert (stream.refusal.status, stream.refusal.message) == (429, "Later.")
        assert stream.refusal.headers() == {"Retry-After": "2"}

    asyncio.run(main())


def test_a_refusal_behind_events_is_a_failure() -> None:
    stream = ClientStream()
    stream.feed(b"data: 1\n\n", 0)
    stream.refuse("Later.", 503, 1.0)
    body = asyncio.run(stream.next())
    assert stream.refusal is None and stream.ended and body.endswith(DONE)
    assert error_of(body.split(b"\n\n")[1].removeprefix(b"data: ")) == "Later."


# -------------------------------------------------------------------------------- signs of life


async def taken(stream: ClientStream) -> bytes:
    """What the writer gets, b"" if it has to wait. What it got before has been sent."""
    task = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        return b""
    return task.result()


async def after(stream: ClientStream, *times: float) -> bytes:
    """What there is to take after these ticks."""
    for time in times:
        stream.tick(time, 15.0)
    return await taken(stream)


async def begun() -> ClientStream:
    """A stream whose first event has been sent at 0."""
    stream = ClientStream()
    stream.feed(b"data: 1\n\n", 0)
    assert await after(stream, 0) == b"data: 1\n\n" and await taken(stream) == b""
    return stream


@on_a_loop
async def test_a_silent_stream_gets_comments() -> None:
    stream = await begun()
    assert await after(stream, 1, 14.9) == b""
    assert await after(stream, 15) == PING == b": ping\n\n"
    assert await after(stream, 16) == await after(stream, 29.9) == b""
    assert await after(stream, 30) == PING


@on_a_loop
async def test_news_puts_them_off_and_they_never_cut_an_event() -> None:
    stream = await begun()
    stream.feed(b"data: 2\n\n", 0)
    assert await after(stream, 14, 16) == b"data: 2\n\n"
    assert await after(stream, 28) == b""
    assert await after(stream, 29) == PING


@on_a_loop
async def test_no_comment_before_the_first_event() -> None:
    """The status is still open, and the request may yet be refused with it."""
    stream = ClientStream()
    assert await after(stream, 0, 100, 1000) == b""
    stream.refuse("Later.", 503, 1.0)
    assert await after(stream, 2000) == b"" and stream.refusal is not None


@on_a_loop
async def test_none_while_bytes_wait_for_the_client() -> None:
    bound = Bound()
    bound.feed(10)
    assert await after(bound.stream, 0) == b"x" * 10
    bound.stream.tick(100, 15.0)  # its writer is not back yet
    assert await taken(bound.stream) == b""
    bound.pipe.size = 5
    assert await after(bound.stream, 200) == b""
    bound.pipe.size = 0
    assert await after(bound.stream, 215) == PING


@on_a_loop
async def test_none_behind_the_last_event_nor_for_a_client_that_left() -> None:
    stream, left = await begun(), await begun()
    stream.feed(DONE, REQUEST_END)
    left.abandon()
    assert await after(stream, 1) == DONE
    assert await after(stream, 100) == await after(left, 100) == b""
