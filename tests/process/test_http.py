"""What HTTP clients do wrong, and what they are told: the right status and the OpenAI error object, never a 5xx."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.client import Response, fetch
from tests.process.expected import CHAT, COMPLETIONS, vocabulary_config
from tests.process.server import Server, until
from tests.process.test_streams import chat

USER = {"role": "user", "content": "Hi"}
LIMIT = 32 << 20


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], "max_tokens": 2, **fields}).encode()


JSON = {"Content_Type": "application/json"}
#: (path, body, headers, status, param, code, a part of the message)
WRONG: dict[str, tuple[str, bytes, dict[str, str], int, str | None, str | None, str]] = {
    "malformed": (CHAT, b'{"messages": [', JSON, 400, None, "invalid_json", "not valid JSON"),
    "empty": (CHAT, b"", JSON, 400, None, "invalid_json", "not valid JSON"),
    "no object": (CHAT, b"[1, 2]", JSON, 400, None, "invalid_json", "must be a JSON object"),
    "not utf-8": (CHAT, b'{"messages": "\xff\xfe"}', JSON, 400, None, "invalid_json", "not valid JSON"),
    "lone surrogate": (CHAT, b'{"messages": "\\ud800"}', JSON, 400, None, "invalid_json", "not valid JSON"),
    "nan": (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', JSON, 400, None, "invalid_json", "not valid JSON"),
    "too deep": (CHAT, b"[" * 100_000, JSON, 400, None, "invalid_json", "JSON"),
    "form": (CHAT, b"prompt=a", {"Content_Type": "application/x-www-form-urlencoded"}, 415, None, None, "content type"),
    "gzip": (CHAT, b"\x1f\x8b", {**JSON, "Content_Encoding": "gzip"}, 415, None, None, "content encoding"),
    "unknown model": (CHAT, body(model="gpt-17"), JSON, 404, "model", "model_not_found", "`gpt-17` does not exist"),
    "unknown field": (CHAT, body(temprature=1), JSON, 400, "temprature", "unknown_parameter", "not a known field"),
    "unsupported": (
        CHAT,
        body(response_format={"type": "json_object"}),
        JSON,
        400,
        "response_format",
        "unsupported_parameter",
        "not supported",
    ),
    "no messages": (CHAT, b"{}", JSON, 400, "messages", "missing_required_parameter", "required"),
    "empty messages": (CHAT, b'{"messages": []}', JSON, 400, "messages", "invalid_value", "must not be empty"),
    "empty prompt": (COMPLETIONS, b'{"prompt": ""}', JSON, 400, "prompt", "invalid_value", "has no tokens"),
    "id too high": (COMPLETIONS, b'{"prompt": [5, 99999]}', JSON, 400, "prompt", "invalid_value", "99999"),
    "negative max_tokens": (CHAT, body(max_tokens=-1), JSON, 400, "max_tokens", "invalid_value", "-1"),
    "zero max_tokens": (CHAT, body(max_tokens=0), JSON, 400, "max_tokens", "invalid_value", "0"),
    "huge max_tokens": (
        CHAT,
        body(max_tokens=2**20),
        JSON,
        400,
        "max_tokens",
        "context_length_exceeded",
        "maximum context length",
    ),
    "number too large": (CHAT, body(max_tokens=10**30), JSON, 400, "max_tokens", "invalid_value", "max_tokens"),
    "too many choices": (CHAT, body(n=129), JSON, 400, "n", "invalid_value", "at most 128"),
    "temperature": (CHAT, body(temperature=3), JSON, 400, "temperature", "invalid_value", "2"),
    "no tool parser": (
        CHAT,
        body(tools=[{"type": "function", "function": {"name": "f"}}]),
        JSON,
        400,
        "tools",
        "unsupported_parameter",
        "tool",
    ),
    "image": (
        CHAT,
        body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        JSON,
        400,
        "messages.0.content.0",
        "invalid_value",
        "text only",
    ),
    "template variable": (
        CHAT,
        body(chat_template_kwargs={"tokenize": True}),
        JSON,
        400,
        "chat_template_kwargs.tokenize",
        None,
        "not allowed",
    ),
    "long prompt": (
        COMPLETIONS,
        json.dumps({"prompt": [5] * 2**20}).encode(),
        JSON,
        400,
        "prompt",
        "context_length_exceeded",
        "reduce the length",
    ),
    "too large": (CHAT, b" " * (LIMIT + 1), JSON, 413, None, "payload_too_large", str(LIMIT)),
    "tokenize nothing": ("/tokenize", b"{}", JSON, 400, "prompt", "invalid_value", "required"),
    "tokenize model": ("/tokenize", b'{"prompt": "a", "model": "b"}', JSON, 404, "model", "model_not_found", "b"),
    "detokenize id": ("/detokenize", b'{"tokens": [99999]}', JSON, 400, "tokens", "invalid_value", "99999"),
    "detokenize negative": ("/detokenize", b'{"tokens": [-1]}', JSON, 400, "tokens", "invalid_value", "0 to"),
    "no such route": ("/v1/embeddings", b"{}", JSON, 404, None, "not_found", "/v1/embeddings"),
    "trailing slash": (CHAT + "/", body(), JSON, 404, None, "not_found", CHAT),
    "strange route": ("/%00%ff/%0a", b"", {}, 404, None, "not_found", "There is no"),
}


def assert_error(response: Response, status: int, param: str | None, code: str | None, message: str) -> None:
    assert response.status == status and response.complete, response
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and message in error["message"], error
    assert (error["param"], error["code"]) == (param, code) and len(error["message"]) < 600


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(replay_server: Callable[[int], Server], name: str) -> None:
    path, content, headers, *expected = WRONG[name]
    response = asyncio.run(fetch(replay_server(1).url, path, content, X_Request_Id=f"my {name}", **headers))
    assert response.headers["x-request-id"] == f"my {name}"
    assert_error(response, *expected)


METHODS = [
    ("GET", CHAT, "POST"),
    ("DELETE", "/v1/models", "GET"),
    ("PUT", "/tokenize", "POST"),
    ("POST", "/health", "GET"),
    ("OPTIONS", COMPLETIONS, "POST"),
]


@pytest.mark.parametrize(("method", "path", "allowed"), METHODS)
def test_wrong_method(replay_server: Callable[[int], Server], method: str, path: str, allowed: str) -> None:
    response = asyncio.run(fetch(replay_server(1).url, path, b"{}", method))
    assert_error(response, 405, None, "method_not_allowed", f"{path} takes {allowed}, not {method}")
    assert response.headers["allow"] == allowed


# -------------------------------------------------------------------------------- below HTTP, and strange HTTP


def raw(server: Server, data: bytes) -> bytes:
    """What comes back for bytes on the socket, until the server closes."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def request(*headers: bytes, method: bytes = b"POST", path: bytes = CHAT.encode(), content: bytes = body()) -> bytes:
    head = [method + b" " + path + b" HTTP/1.1", b"Host: 127.0.0.1", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + content


CLOSE = b"Connection: close"
RAW = {
    "garbage": (b"\x00\x01\x02\xff\r\n\r\n", 400),
    "a TLS greeting": (bytes.fromhex("16030100a5010000a10303") + b"x" * 100, 400),
    "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabcde", 400),
    "a negative length": (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -3\r\n\r\nabc", 400),
    "a bad chunk": (b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "a control character": (request(CLOSE, b"X-Request-Id: a\x01b"), 400),
    "a proxy request": (b"CONNECT example.com:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
    "a long header": (request(CLOSE, b"X-Long: " + b"a" * 60_000), 200),
    "a header that is too long": (request(CLOSE, b"X-Long: " + b"a" * 1_000_000), 431),
    "many headers": (request(CLOSE, *(b"X-%d: 1" % i for i in range(5000))), 200),
    "a long request id": (request(CLOSE, b"X-Request-Id: " + b"a" * 5000), 200),
    "a query": (request(CLOSE, path=CHAT.encode() + b"?api-version=1"), 200),
    "expect": (request(CLOSE, b"Expect: 100-continue"), 100),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "an absolute URL": (b"GET http://127.0.0.1/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", 200),
    "a web socket": (
        b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        200,
    ),
    # Java's client offers HTTP/2 with its first request.
    "an offer of HTTP/2": (
        request(b"Connection: Upgrade, HTTP2-Settings, close", b"Upgrade: h2c", b"HTTP2-Settings: AAM"),
        200,
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_on_the_socket(replay_server: Callable[[int], Server], name: str) -> None:
    server = replay_server(1)
    data, status = RAW[name]
    received = raw(server, data)
    assert received.startswith(b"HTTP/1.1 %d " % status), received[:300]
    if status == 200 and data.startswith(b"POST"):
        assert b'"object":"chat.completion"' in received and b'"completion_tokens":2' in received
    assert asyncio.run(fetch(server.url, "/health", method="GET")).status == 200


def test_head_has_no_body(replay_server: Callable[[int], Server]) -> None:
    for path, status in {"/health": 200, "/v1/models": 200, CHAT: 405}.items():
        received = raw(replay_server(1), request(CLOSE, method=b"HEAD", path=path.encode(), content=b""))
        head, _, rest = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status) and rest == b""


def test_a_connection_serves_many_requests(replay_server: Callable[[int], Server]) -> None:
    """Kept alive, and pipelined."""
    received = raw(replay_server(1), request() * 3 + request(b"X-Request-Id: last", CLOSE))
    assert received.count(b"HTTP/1.1 200 OK") == 4 and received.count(b'"object":"chat.completion"') == 4
    assert b"x-request-id: last" in received


# -------------------------------------------------------------------------------- the other routes


def test_models(replay_server: Callable[[int], Server]) -> None:
    url = replay_server(1).url
    (card,) = asyncio.run(fetch(url, "/v1/models", method="GET")).json()["data"]
    assert card["id"] == "replay" and card["object"] == "model" and card["max_model_len"] == 2**20
    assert (Path(card["root"]) / "tokenizer.json").is_file()
    assert asyncio.run(fetch(url, "/v1/models/replay", method="GET")).json() == card
    assert_error(asyncio.run(fetch(url, "/v1/models/gpt-17", method="GET")), 404, "model", "model_not_found", "gpt-17")


def test_version_and_live(replay_server: Callable[[int], Server]) -> None:
    url = replay_server(1).url
    assert asyncio.run(fetch(url, "/version", method="GET")).json()["version"]
    assert asyncio.run(fetch(url, "/live", method="GET")).json() == {"status": "live"}


@pytest.mark.parametrize("text", ["Hello, 世界 😀!", "", "\x00\n\t  ", "<|end|> is special"])
def test_tokenize_and_back(replay_server: Callable[[int], Server], text: str) -> None:
    url = replay_server(1).url
    answer = asyncio.run(fetch(url, "/tokenize", {"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == 2**20
    assert asyncio.run(fetch(url, "/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": text}
    messages = {"messages": [{"role": "user", "content": text or "x"}]}
    assert asyncio.run(fetch(url, "/tokenize", messages)).json()["tokens"] == (answer["tokens"] or [ord("x")])


def test_metrics(replay_server: Callable[[int], Server]) -> None:
    """The series of each worker, in a text that a Prometheus parser reads."""
    server = replay_server(2)
    assert asyncio.run(fetch(server.url, *chat("hard", stream=True))).status == 200
    until(lambda: server.total("tailrace_worker_tokens_total") > 0, "the workers' reports")
    asyncio.run(fetch(server.url, "/v1/models/some-name", method="GET"))
    asyncio.run(fetch(server.url, "/some/path", method="GET"))
    values = server.metrics()
    names = (
        "queue_age_seconds_count",
        "post_processing_seconds_sum",
        "batch_rows",
        "tokens_total",
        "chunks_total",
        "coalesced_rows_total",
        "late_tokens_total",
        "busy_seconds_total",
    )
    workers = [key.partition("{")[2] for key in values if key.startswith("tailrace_worker_busy_seconds_total{")]
    assert len(workers) == 2 and all(
        f"tailrace_worker_{name}{{{worker}" in values for name in names for worker in workers
    )
    assert server.total("tailrace_worker_queue_age_seconds_count") > 0
    assert server.total("tailrace_worker_post_processing_seconds_count") > 0
    kinds = [f"{name}_lag_seconds_{kind}" for name in ("write", "chunk") for kind in ("sum", "count")]
    lags = [values[f"tailrace_{kind}{{frontend=0}}"] for kind in kinds]
    assert 0 < lags[0] <= lags[2] and 0 < lags[1] == lags[3]  # what the worker has sent was shipped before
    assert values["tailrace_workers"] == 2
    assert "tailrace_http_requests_total{path=/v1/models/{model},status=404}" in values
    assert "tailrace_http_requests_total{path=other,status=404}" in values
    assert not any("some" in key for key in values)
    assert values["tailrace_first_chunk_seconds_count"] >= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_response_tells_its_own_timings(replay_server: Callable[[int], Server], workers: int) -> None:
    url, (path, asked) = replay_server(workers).url, chat("hard", max_tokens=6)
    streamed = asyncio.run(fetch(url, path, {**asked, "stream": True}, x_timings="1"))
    events, _, comment = streamed.body.partition(b": timings ")
    assert streamed.complete and events.endswith(b"data: [DONE]\n\n") and comment.endswith(b"}\n\n")
    figures = json.loads(comment)
    assert 0 < figures["parse"] < figures["first"] <= figures["total"] and figures["tokens"] == 6
    assert figures["parse"] + figures["tokenize"] + figures["queue"] <= figures["first"] + 0.01
    assert 0 < figures["lag_mean"] <= figures["lag_max"] and 1 <= figures["chunks"] <= 7
    whole = asyncio.run(fetch(url, path, asked, x_timings="1"))
    names = [entry.partition(";")[0] for entry in whole.headers["server-timing"].split(", ")]
    assert names == ["parse", "tokenize", "queue", "first", "total", "tokens"]
    refused = asyncio.run(fetch(url, path, asked, x_timings="on"))
    assert refused.status == 400 and refused.json()["error"]["param"] == "X-Timings"


def test_vocabulary_is_the_tokenizers(replay_server: Callable[[int], Server]) -> None:
    highest = vocabulary_config()["vocab_size"] - 1
    answer = asyncio.run(fetch(replay_server(1).url, "/detokenize", {"tokens": [highest]}))
    assert answer.status == 200 and answer.json()["prompt"]
