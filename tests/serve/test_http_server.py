"""The HTTP server on a real socket, with a small application behind it: what it takes from clients that are slow,
hostile or strange, what it says to browsers, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from serve.config import Config
from serve.http_protocol import MAX_HEAD, MAX_PIPELINED, TIMEOUTS, HttpProtocol
from serve.http_server import HttpServer
from serve.outlets import Outlets
from tests.certificates import Authority

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On the loop that servers run on."""
    return uvloop.run(asyncio.wait_for(coroutine, 30))


@dataclass
class Application:
    """Answers with the length of the body and the names of the headers; ``/early`` does not wait for the body, and
    ``/stream`` sends parts as they are released. left: what became of requests, by path."""

    left: list[tuple[str, str]] = field(default_factory=list)
    parts: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        how = await self._answer(scope, receive, send)
        self.left.append((scope["path"], how))
        self.ended.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        size = 0
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return "disconnected"
            size += len(message["body"])
            if not message["more_body"]:
                break
        if scope["path"] == "/stream":
            return await self._stream(send)
        body = b"%d %s" % (size, b",".join(name for name, _ in scope["headers"]))
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return "answered"

    async def _stream(self, send: Send) -> str:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while part := await self.parts.get():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return "answered"


@dataclass
class Running:
    """A server of a test."""

    port: int
    server: HttpServer
    app: Application

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def talk(self, *parts: bytes) -> bytes:
        """What comes back until the server closes; each part is on its way before the next one."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await writer.drain()
        received = await reader.read()
        writer.close()
        return received

    def alive(self) -> bool:
        return bool(self.server.started and not self.server.should_exit)


@contextlib.asynccontextmanager
async def serving(config: Config | None = None) -> AsyncIterator[Running]:
    app = Application()
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, config or Config(), Outlets())
    await server.start(listener)
    try:
        yield Running(listener.getsockname()[1], server, app)
    finally:
        for _ in range(10):
            app.parts.put_nowait(b"")  # no stream that a test has left open keeps the server from ending
        await server.stop(5)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients have less time."""
    for part in TIMEOUTS:
        monkeypatch.setitem(TIMEOUTS, part, 0.05)


def request(path: str = "/", *headers: str, method: str = "POST", body: bytes | None = b"abc") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def status(response: bytes) -> int:
    assert response.startswith(b"HTTP/1.1 "), response[:100]
    return int(response[9:12])


CLOSE = "Connection: close"

# ------------------------------------------------------------------------------------------------ answers come first


@pytest.mark.parametrize("close", [True, False])
def test_an_answer_reaches_a_client_that_is_still_sending(close: bool) -> None:
    """Whether it said that it would close or not, nothing is reset under it. Its body is not kept: it is dropped."""

    async def main() -> None:
        async with serving() as running:
            size = 20 << 20
            head = request("/early", *[CLOSE] * close, f"Content-Length: {size}", body=None)
            response = await running.talk(head, *[bytes(1 << 20)] * 20)
            assert status(response) == 200 and response.endswith(b"content-length")
            assert running.app.left == [("/early", "answered")]

    run(main())


def test_the_end_of_an_answered_request_is_not_waited_for(hurried: None) -> None:
    async def main() -> None:
        async with serving() as running:
            reader, writer = await running.connect()
            writer.write(request("/early", "Content-Length: 1000", body=None))
            assert status(await reader.read()) == 200  # it is told at once that no more will be said
            with pytest.raises(ConnectionError):  # and after a while its bytes are not taken any more
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0)

    run(main())


def test_who_asks_before_sending_is_not_asked_for_the_body() -> None:
    async def main() -> None:
        async with serving() as running:
            head = request("/early", "Expect: 100-continue", "Content-Length: 9", body=None)
            assert b"100 Continue" not in await running.talk(head)

    run(main())


def test_a_connection_serves_many_requests() -> None:
    async def main() -> None:
        async with serving() as running, httpx.AsyncClient(trust_env=False) as client:
            for _ in range(3):
                answer = await client.post(f"http://127.0.0.1:{running.port}/", content=b"abc")
                assert answer.text.startswith("3 ") and "connection" not in answer.headers
            assert len(running.server.server_state.connections) == 1

    run(main())


# ---------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    "parts",
    [
        [request("/", f"X-Long: {'a' * MAX_HEAD}")],
        [request("/" + "a" * MAX_HEAD)],
        [request("/", *(f"X-{i}: 1" for i in range(10_000)))],
        [b"GET / HTTP/1.1\r\nX-Long: ", *[b"a" * 10_000] * 100],
        [b"GET /", *[b"a" * 10_000] * 100],
        [b"GET / HTTP/1.1\r\n", *[b"X: 1\r\n" * 2000] * 100],
    ],
    ids=["header", "target", "headers", "endless header", "endless target", "endless headers"],
)
def test_a_head_that_is_too_large(parts: list[bytes]) -> None:
    async def main() -> None:
        async with serving() as running:
            response = await running.talk(*parts)
            assert status(response) == 431 and b'"code":"headers_too_large"' in response
            assert b"x-request-id: " in response and b"connection: close" in response
            assert running.app.left == []

    run(main())


def test_a_head_that_fits() -> None:
    async def main() -> None:
        async with serving() as running:
            head = request("/", CLOSE, f"X-Long: {'a' * (MAX_HEAD - 100)}")
            assert status(await running.talk(head)) == 200

    run(main())


CHUNKED = request("/", CLOSE, "Transfer-Encoding: chunked", body=None)


@pytest.mark.parametrize(
    "parts",
    [
        [CHUNKED + b"3\r\nabc\r\n0\r\nX-Trailer: ", *[b"a" * 10_000] * 100],
        [CHUNKED + b"3\r\nabc\r\n0\r\n", *[b"X: 1\r\n" * 2000] * 100],
        [CHUNKED + b"3;", *[b"a" * 10_000] * 100],
    ],
    ids=["endless trailer", "endless trailers", "endless extension"],
)
def test_what_surrounds_a_body_is_bounded_too(parts: list[bytes]) -> None:
    async def main() -> None:
        async with serving() as running:
            assert status(await running.talk(*parts)) == 431
            assert running.app.left == [("/", "disconnected")]

    run(main())


def test_trailers_are_no_headers() -> None:
    """A proxy that checks a head has not seen them."""

    async def main() -> None:
        async with serving() as running:
            response = await running.talk(CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
            assert response.endswith(b"3 host,connection,transfer-encoding")

    run(main())


def test_too_many_requests_at_once() -> None:
    async def main() -> None:
        async with serving() as running:
            assert await running.talk(request("/stream", body=b"") * (MAX_PIPELINED + 3)) == b""
            fits = request("/", body=b"") * MAX_PIPELINED + request("/", CLOSE, body=b"")
            assert (await running.talk(fits)).count(b"HTTP/1.1 200") == MAX_PIPELINED + 1

    run(main())


def test_all_requests_of_a_client_that_leaves_are_told() -> None:
    """Also the one that is being answered while another one waits behind it."""

    async def main() -> None:
        async with serving() as running:
            reader, writer = await running.connect()
            writer.write(request("/stream", body=b"") + request("/", body=b""))
            running.app.parts.put_nowait(b"first")
            await reader.readuntil(b"first")
            (connection,) = running.server.server_state.connections
            assert isinstance(connection, HttpProtocol)
            first = connection._open[0]
            writer.close()
            while not first.disconnected:
                await asyncio.sleep(0)
            assert len(connection._open) == 0

    run(main())


# ---------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", None),
        (b"\r\n\r\n", None),
        (b"GET", 408),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", 408),
        (request("/", "Content-Length: 5", body=None), 408),
        (request("/", "Content-Length: 5", body=None) + b"abc", 408),
        (CHUNKED + b"ffffffffffffffff\r\nabc", 408),
    ],
)
def test_clients_that_stop_in_the_middle(hurried: None, data: bytes, code: int | None) -> None:
    """Who has not begun is told nothing: browsers open connections that they may never need."""

    async def main() -> None:
        async with serving() as running:
            response = await running.talk(data) if data else await running.talk()
            assert response == b"" if code is None else status(response) == code
            assert {how for _, how in running.app.left} <= {"disconnected"}

    run(main())


def test_a_head_that_trickles(hurried: None) -> None:
    """Its time is not renewed by more bytes of it."""

    async def main() -> None:
        async with serving() as running:
            reader, writer = await running.connect()
            answer = asyncio.ensure_future(reader.read())
            writer.write(b"GET / HTTP/1.1\r\n")
            while not answer.done():
                writer.write(b"X: 1\r\n")
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0.01)
            assert status(answer.result()) == 408

    run(main())


def test_a_connection_that_was_answered_and_goes_on_in_the_middle(hurried: None) -> None:
    async def main() -> None:
        async with serving() as running:
            response = await running.talk(request() + b"GET / HT")
            assert status(response) == 200 and b"HTTP/1.1 408" in response

    run(main())


def test_a_slow_answer_is_nobodys_fault(hurried: None) -> None:
    """A client that waits for one, and has begun to send its next request meanwhile, is not hurried."""

    async def main() -> None:
        async with serving() as running:
            loop = asyncio.get_running_loop()
            reader, writer = await running.connect()
            writer.write(request("/stream", body=b"") + b"GET / HTTP/1.1\r\n")
            for i, part in enumerate((b"one", b"two", b"")):
                loop.call_later(0.2 * i, running.app.parts.put_nowait, part)
            await reader.readuntil(b"two")
            await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"Host: x\r\nConnection: close\r\n\r\n")
            assert status(await reader.read()) == 200

    run(main())


def test_idle_connections_are_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.http_server.KEEP_ALIVE_TIMEOUT", 0.05)

    async def main() -> None:
        async with serving() as running:
            assert status(await running.talk(request())) == 200  # and closed at last, or `talk` would not end

    run(main())


# ---------------------------------------------------------------------------------------------------- nonsense

NONSENSE: dict[str, tuple[bytes, int]] = {
    "garbage": (b"\x00\x01\x02\xff\r\n\r\n", 400),
    "a TLS greeting": (bytes.fromhex("16030100a5010000a10303"), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no path": (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "NUL in the target": (b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "bytes in the target": (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "NUL in a header": (b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n", 400),
    "a header without a name": (b"GET / HTTP/1.1\r\n: a\r\n\r\n", 400),
    "a space before the colon": (b"GET / HTTP/1.1\r\nX : a\r\n\r\n", 400),
    "a folded header": (b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n", 400),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde", 400),
    "length and chunks": (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a negative length": (b"POST / HTTP/1.1\r\nContent-Length: -3\r\n\r\nabc", 400),
    "a long length": (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", 400),
    "no number": (CHUNKED + b"zz\r\n", 400),
    "a chunk beyond all bounds": (CHUNKED + b"fffffffffffffffff\r\n", 400),
    "a chunk that is longer": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error object, and nothing in the log that anybody would be woken for."""
    data, code = NONSENSE[name]

    async def main() -> None:
        async with serving() as running:
            response = await running.talk(data)
            assert status(response) == code and b'"type":"invalid_request_error"' in response
            assert status(await running.talk(request("/", CLOSE))) == 200

    with caplog.at_level(logging.INFO):
        run(main())
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_nonsense_behind_a_request_that_is_being_answered() -> None:
    """It is not told in the middle of the answer."""

    async def main() -> None:
        async with serving() as running:
            reader, writer = await running.connect()
            writer.write(request("/stream", body=b""))
            running.app.parts.put_nowait(b"first")
            await reader.readuntil(b"first\r\n")
            writer.write(b"\x00\x01\x02\r\n\r\n")
            assert await reader.read() == b""

    run(main())


def test_an_offer_of_another_protocol_is_dropped() -> None:
    """Java's client offers HTTP/2 with its first request. A body that looks like an offer is left alone, wherever the
    bytes are cut; an offer that is cut itself may cost its request the body, but nobody waits."""
    offer = b"Upgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\n" + offer
    body = b'{"a":\r\nUpgrade: h2c\r\n1}'
    data = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    async def main() -> None:
        async with serving() as running:
            for cut in range(len(data)):
                response = await running.talk(data[:cut], data[cut:])
                assert status(response) == 200
                whole = response.endswith(b"%d host,connection,content-length" % len(body))
                assert whole or head.index(offer) - 2 < cut < len(head)

    run(main())


# ---------------------------------------------------------------------------------------------------- browsers

ORIGIN = {"Origin": "https://page.example"}
PREFLIGHT = {
    **ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}  # fmt: skip


async def ask(running: Running, method: str, path: str = "/", **arguments: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, f"http://127.0.0.1:{running.port}{path}", **arguments)


@pytest.mark.parametrize("origins", [("https://page.example",), ("https://PAGE.example", "https://b.example"), ("*",)])
def test_a_page_that_may_call(origins: tuple[str, ...]) -> None:
    async def main() -> None:
        async with serving(Config(cors_origin=origins)) as running:
            preflight = await ask(running, "OPTIONS", headers=PREFLIGHT)
            assert preflight.status_code == 200
            assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
            assert "POST" in preflight.headers["access-control-allow-methods"]
            answer = await ask(running, "POST", headers=ORIGIN, content=b"abc")
            for response in (preflight, answer):
                assert response.headers["access-control-allow-origin"] in ("*", "https://page.example")
                assert "access-control-allow-credentials" not in response.headers
            assert answer.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After, Server-Timing"
            assert running.app.left == [("/", "answered")]

    run(main())


def test_a_page_that_may_not_call() -> None:
    async def main() -> None:
        async with serving(Config(cors_origin=("https://other.example",))) as running:
            preflight = await ask(running, "OPTIONS", headers=PREFLIGHT)
            assert preflight.status_code == 400 and "access-control-allow-origin" not in preflight.headers
            assert "access-control-allow-origin" not in (await ask(running, "POST", headers=ORIGIN)).headers

    run(main())


def test_without_origins_there_is_no_layer() -> None:
    async def main() -> None:
        async with serving() as running:
            loaded: Any = running.server.config.loaded_app
            assert running.app in (loaded, getattr(loaded, "app", None))
            for method in ("OPTIONS", "POST"):
                headers = (await ask(running, method, headers=PREFLIGHT)).headers
                assert not any(name.startswith("access-control") for name in headers)

    run(main())


def test_streams_for_a_page_are_not_held_back() -> None:
    async def main() -> None:
        async with serving(Config(cors_origin=("*",))) as running:
            reader, writer = await running.connect()
            writer.write(request("/stream", "Origin: https://page.example", body=b""))
            for part in (b"one", b"two"):
                running.app.parts.put_nowait(part)
                await reader.readuntil(part)
            writer.close()

    run(main())


# ---------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def secured(authority: Authority, **flags: str) -> Config:
    certificate, key = authority.issue("server")
    return Config(ssl_certfile=str(certificate), ssl_keyfile=str(key), **flags)  # type: ignore[arg-type]


def trusting(authority: Authority, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if client is not None:
        context.load_cert_chain(*map(str, authority.issue(client)))
    return context


async def get(running: Running, context: ssl.SSLContext) -> str:
    async with httpx.AsyncClient(trust_env=False, verify=context) as client:
        return (await client.post(f"https://localhost:{running.port}/", content=b"abc")).text


def test_https(authority: Authority) -> None:
    async def main() -> None:
        async with serving(secured(authority)) as running:
            assert (await get(running, trusting(authority))).startswith("3 ")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await get(running, ssl.create_default_context())
            context = trusting(authority)
            reader, writer = await asyncio.open_connection("localhost", running.port, ssl=context)
            writer.write(request("/", f"X-Long: {'a' * MAX_HEAD}"))
            assert status(await reader.readuntil(b"}}")) == 431
            writer.close()

    run(main())


def test_clients_need_a_certificate(authority: Authority, tmp_path: Path) -> None:
    async def main() -> None:
        config = secured(authority, ssl_ca_certs=str(authority.certificate))
        async with serving(config) as running:
            assert (await get(running, trusting(authority, "client"))).startswith("3 ")
            stranger = trusting(authority)
            stranger.load_cert_chain(*map(str, Authority(tmp_path).issue("stranger")))
            for context in (trusting(authority), stranger):
                with pytest.raises(httpx.HTTPError):
                    await get(running, context)
            assert running.app.left == [("/", "answered")]

    run(main())


def test_strangers_to_tls(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """Plain HTTP and garbage end with their connection, and are no errors of ours."""

    async def main() -> None:
        async with serving(secured(authority)) as running:
            for data in (request(), b"\x00\xff" * 100, b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"):
                with contextlib.suppress(ConnectionError):
                    assert b"HTTP" not in await running.talk(data)
            assert (await get(running, trusting(authority))).startswith("3 ")

    with caplog.at_level(logging.INFO):
        run(main())
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_other_faults_of_the_loop_are_still_reported(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving(secured(authority)):
            asyncio.get_running_loop().call_exception_handler({"message": "something else broke"})

    run(main())
    assert "something else broke" in caplog.text


def test_many_connections_are_accepted_in_one_turn_of_the_loop() -> None:
    async def main() -> None:
        async with serving() as running:
            clients = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(8)]
            for _ in range(2):  # one turn sees them, the next one their protocols
                await asyncio.sleep(0)
            assert len(running.server.server_state.connections) == len(clients)
            for client in clients:
                client.close()

    run(main())
