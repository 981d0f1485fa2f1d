"""An HTTP answer, read as its bytes come: a whole document, or a stream of events that goes into an outcome.

httptools does HTTP and its chunked framing: it took a fifth of the time of a reader in Python. Events are parsed as
they come, one clock for all that came in one read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import orjson

from .events import EventReader
from .outcome import Outcome

#: Of what a server says about an error.
_MAX_REASON = 300


class Answer:
    """A whole answer. ``done`` is resolved with None when it has come; ``error`` says why it has not.

    begun: some of it has come. complete: all of it. keep_alive: its connection may be used again.
    """

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.error = ""
        self.status = 0
        self.complete = False
        self.begun = self.keep_alive = False
        self._parts: list[bytes] = []
        self._body: list[bytes] = []
        self._reason = b""
        self._type = b""
        self._sized = False
        self._parser = httptools.HttpResponseParser(self)

    # -------------------------------------------------------------------------------- for the connection

    def receive(self, data: bytes) -> None:
        """Bytes of the answer."""
        self.begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"no HTTP: {error}")
            return
        if self._parts:
            parts, self._parts = self._parts, []
            self.take(parts[0] if len(parts) == 1 else b"".join(parts))
        if self.complete:
            self.close()

    def lost(self, error: Exception | None) -> None:
        """The connection is gone. An answer of unknown length ends so."""
        if self.status and not self._sized and error is None:
            self.close()
        else:
            self.fail(f"connection lost: {error}" if error else "connection closed before the end of the answer")

    def fail(self, error: str) -> None:
        """It will not come; the first reason stays."""
        if not self.done.done():
            self.error = error
            self.done.set_result(None)

    # -------------------------------------------------------------------------------- for httptools

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._type = value.lower()
        self._sized |= name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # "100 Continue" and its like go before the answer
            self._reason, self._type, self._sized, self.status = b"", b"", False, 0
        else:
            # Asked here, because the parser forgets with the message's end.
            self.complete, self.keep_alive = True, bool(self._parser.should_keep_alive())

    # -------------------------------------------------------------------------------- what becomes of the body

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self._body)

    def take(self, body: bytes) -> None:
        """A piece of the body."""
        self._body.append(body)

    def close(self) -> None:
        """The body has come."""
        if self.status != 200:
            self.fail(self._refusal())
        elif not self.done.done():
            self.done.set_result(None)

    def _refusal(self) -> str:
        words = f"HTTP {self.status} {self._reason.decode('latin-1')}".rstrip()
        return f"{words}: {_message(self.body)}"[:_MAX_REASON] if self.body else words


class StreamAnswer(Answer):
    """A stream of chat or completion chunks, noted in an outcome."""

    def __init__(self, done: asyncio.Future[None], outcome: Outcome, clock: Callable[[], float]) -> None:
        super().__init__(done)
        self._outcome, self._clock = outcome, clock
        self._events = EventReader()
        self._streams = self._ended = False

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._streams = self.status == 200 and self._type.startswith(b"text/event-stream")

    def take(self, body: bytes) -> None:
        if self._streams:
            self._read(self._events.feed(body))
        else:
            super().take(body)

    def close(self) -> None:
        if self._streams:
            self._read(self._events.close())
            if not self._ended:
                self.fail("the stream ended without a finish_reason or [DONE]")
        elif self.status == 200:
            self.fail(f"no event stream but {self._type.decode('latin-1')}: {_message(self.body)}"[:_MAX_REASON])
        super().close()

    def _read(self, events: list[bytes]) -> None:
        now = self._clock()
        try:
            for data in events:
                if data == b"[DONE]":
                    self._ended = True
                else:
                    self._note(now, orjson.loads(data))
        except orjson.JSONDecodeError as error:
            self.fail(f"an event is no JSON: {error}")
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            self.fail(f"an event has another form than expected: {error!r} in {data[:_MAX_REASON]!r}")

    def _note(self, now: float, event: dict[str, Any]) -> None:
        outcome = self._outcome
        if choices := event.get("choices"):
            outcome.end = now
            choice = choices[0]
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content") or _thought(delta)
            if text:
                outcome.chunks.append(now)
                outcome.pieces.append(text)
            elif delta and delta.get("tool_calls"):
                outcome.chunks.append(now)
            if choice.get("finish_reason"):
                self._ended = True
        elif "error" in event:
            self.fail(f"error in the stream: {_message(orjson.dumps(event))}"[:_MAX_REASON])
        if usage := event.get("usage"):
            outcome.input_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]


def _thought(delta: dict[str, Any]) -> str | None:
    return delta.get("reasoning_content") or delta.get("reasoning")


def _message(body: bytes) -> str:
    """What an error document says: the message of OpenAI's error object or of FastAPI's, or all of it."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace").strip()
    for key in ("error", "message", "detail"):
        if isinstance(document, dict) and document.get(key):
            document = document[key]
    return document if isinstance(document, str) else orjson.dumps(document).decode()
