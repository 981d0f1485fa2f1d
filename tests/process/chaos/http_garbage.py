"""Nonsense for every HTTP route: the answer is a 4xx, or the connection ends; never a 5xx but the documented 503."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from tests.process.chaos.stage import Stage
from tests.process.chaos.templates import CHAT, COMPLETIONS, RESPONSES

ROUTES = (
    CHAT, COMPLETIONS, RESPONSES, f"{RESPONSES}/resp_none", "/v1/models", "/v1/models/x", "/parse/reasoning",
    "/parse/tool_calls", "/tokenize", "/detokenize", "/health", "/live", "/version", "/metrics", "/", "/no/such/route",
    "/%00%ff", "/" + "a" * 5000,
)  # fmt: skip
METHODS = ("POST", "POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW")

#: A server may take its time to find out that nothing more comes; we do not wait for that.
_PATIENCE = 3.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


class HttpGarbage:
    """Sends one piece after the other; ``number`` names its chain of choices."""

    def __init__(self, stage: Stage, number: int, interval: float = 0.3) -> None:
        self._stage, self._interval = stage, interval
        self._random = Random(f"{stage.options.seed} http garbage {number}")

    async def run(self) -> None:
        """Send until the disturbance is over."""
        while await self._stage.pause(self._random.uniform(0, 2 * self._interval)):
            data = self._random.choice(_KINDS)(self._random)
            self._stage.tally.garbage_requests += 1
            try:
                answer = await self._send(data)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if isinstance(error, ConnectionRefusedError):
                    self._stage.findings.failed(f"nobody listens any more: {error}")
                continue  # reset in the middle of what nobody reads: an answer too
            self._check(data, answer)

    async def _send(self, data: bytes) -> bytes:
        host, _, port = self._stage.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = b""
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                answer = await asyncio.wait_for(_exchange(reader, writer, data), _PATIENCE)
        finally:
            writer.transport.abort()
        return answer

    def _check(self, data: bytes, answer: bytes) -> None:
        for status in map(int, _STATUS.findall(answer[:200])):
            documented = status == 503 and (b"retry-after:" in answer.lower() or b" /health " in data[:20])
            if status >= 500 and not documented:
                self._stage.findings.failed(f"nonsense was answered with {status}", sent=data[:5000], answer=answer)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    await writer.drain()
    return await reader.read(4000)


# ------------------------------------------------------------------------------------------------------ kinds


def _request(random: Random, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"{random.choice(METHODS)} {random.choice(ROUTES)} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        *headers,
    ]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _bytes(random: Random, most: int = 3000) -> bytes:
    return random.randbytes(random.randrange(1, most))


def _not_http(random: Random) -> bytes:
    hellos = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"\r\n" * 50,
    )
    return random.choice((*hellos, _bytes(random), b"POST " + _bytes(random) + b"\r\n\r\n"))


def _random_body(random: Random) -> bytes:
    return _request(random, _bytes(random, 20000))


def _wrong_json(random: Random) -> bytes:
    body = json.dumps(_body(random)).encode()
    place = random.randrange(len(body))
    cut = random.choice((body[:place], body[:place] + _bytes(random, 8) + body[place:], b"NaN", b'"\\ud800"'))
    return _request(random, cut, "Content-Type: application/json")


def _wrong_types(random: Random) -> bytes:
    body = _body(random)
    for name in random.sample(sorted(body), random.randrange(1, len(body))):
        body[name] = random.choice(_VALUES)(random)
    return _request(random, json.dumps(body).encode(), "Content-Type: application/json")


def _deep_json(random: Random) -> bytes:
    depth = random.randrange(100, 100_000)
    return _request(random, b'{"messages":' + random.choice((b"[", b'{"a":')) * depth)


def _large_body(random: Random) -> bytes:
    return _request(random, b'{"prompt": "' + b"x" * random.randrange(1 << 20, 3 << 20) + b'"}')


def _huge_headers(random: Random) -> bytes:
    size = random.choice((9000, 70_000, 300_000))
    many = [f"X-Header-{number}: {'y' * 100}" for number in range(size // 110)]
    return _request(random, b"{}", *random.choice((["X-Long: " + "x" * size], many)))


def _wrong_headers(random: Random) -> bytes:
    wrong = (
        "Content-Length: -1", "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked", "no colon here",
        "Content-Type: multipart/form-data", "Content-Encoding: gzip", "Authorization: " + "\xff" * 50, ": empty",
        "X-Request-Id: " + "\xe4" * 100, "Expect: 100-continue", "Upgrade: websocket",
        "Transfer-Encoding: gzip, chunked",
    )  # fmt: skip
    return _request(random, json.dumps(_body(random)).encode(), random.choice(wrong))


def _wrong_chunks(random: Random) -> bytes:
    head = f"POST {random.choice(ROUTES)} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + random.choice(
        (b"zz\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffffff\r\n", b"5\r\nhello0\r\n\r\n", _bytes(random))
    )


def _too_short(random: Random) -> bytes:
    return _request(random, b'{"prompt": "x', length=random.randrange(100, 5000))


def _body(random: Random) -> dict[str, Any]:
    return {
        "model": "replay", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 5,
        "n": 1, "stream": True, "stop": ["x"], "logprobs": 1, "temperature": 1.0, "tools": [], "stream_options": {},
        "tokens": [1, 2], "text": "x", "reasoning_parser": "qwen3", "logit_bias": {}, "stop_token_ids": [5],
    }  # fmt: skip


_VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda random: None,
    lambda random: random.choice((-1, 0, 2**31, 2**63, 2**64, 10**400, -(10**30))),
    lambda random: random.choice((0.5, -1e308, 1e308, True, False)),
    lambda random: random.choice(("", "x", "\x00", "\u2028" * 50, "😀" * 300)),
    lambda random: [[[]]] * random.randrange(5),
    lambda random: [{"role": random.choice(("user", "tool", "nobody", 7)), "content": random.choice((None, 5, [{}]))}],
    lambda random: {"type": "function", "function": {"name": 5}},
    lambda random: ["STOP"] * random.randrange(1000),
    lambda random: {str(key): key for key in range(random.randrange(2000))},
)

_KINDS: tuple[Callable[[Random], bytes], ...] = (
    _not_http, _random_body, _wrong_json, _wrong_types, _wrong_types, _deep_json, _large_body, _huge_headers,
    _wrong_headers, _wrong_chunks, _too_short,
)  # fmt: skip
