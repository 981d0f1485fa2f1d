"""A response's slot: what gathers in it, how it ends, and who is woken."""

from __future__ import annotations

import asyncio
import json

from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END
from serve.chunks import DONE
from serve.streams import ClientStream


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
