"""Requests that nobody would write: made by schemathesis from the server's own document, and by hand where it is blind.

Whatever comes, the answer is one that the document foresees, no process ends, and nothing stays open.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.openai_protocol import MAX_MESSAGES, MAX_TOOLS
from serve.openapi import OPERATIONS
from tests.process.expected import vocabulary_config
from tests.process.server import Server, make_tokenizer, replay_arguments, serving, until
from tests.process.test_http import raw

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
LONG = os.environ.get("TAILRACE_LONG") == "1"
KEY = "a-key"

#: Streams are short whatever a request asks for, and hold what reasoning and tool parsers look for.
SCRIPTS = [
    {"token_ids": list(text.encode())}
    for text in (
        "Hello.",
        "<think>Hm</think>Hi",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "S😀",
        "<tool_call>{",
        "<think>",
    )
]
#: Other than the other tests' one it makes a prompt of any messages.
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with parsers and a key; at the end it answers, has nothing open, and is the process it was."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    config = tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    arguments = replay_arguments(tokenizer, 1, **vocabulary_config(), scripts=SCRIPTS, max_model_len=1 << 16)
    with serving(*arguments, "--reasoning_parser", "qwen3", "--tool_parser", "hermes", "--api_key", KEY) as server:
        before = [(process.pid, process.create_time()) for process in server.everybody()]
        yield server
        until(lambda: server.health()["open_requests"] == 0, server.everything)
        assert [(process.pid, process.create_time()) for process in server.everybody()] == before
        assert "Traceback" not in server.log, server.log
        assert ask(server, "POST", "/v1/chat/completions", CHAT)[0] == 200


# ------------------------------------------------------------------------------------------------------ schemathesis


def counts(server: Server) -> Mapping[tuple[str, str], float]:
    """(route, status) -> requests answered so."""
    _, body = ask(server, "GET", "/metrics")
    found = {}
    for line in body.decode().splitlines():
        if line.startswith("tailrace_http_requests_total{"):
            labels, _, value = line.partition("{")[2].partition("} ")
            path, status = (label.partition("=")[2].strip('"') for label in labels.split(","))
            found[path, status] = float(value)
    return found


@pytest.mark.timeout(1800 if LONG else 300)
def test_the_servers_own_document(server: Server, tmp_path: Path) -> None:
    """positive_data_acceptance is off: whether admission takes what the document calls valid depends on rules between
    fields that no schema says. ``tests/serve/test_openapi.py`` compares the two field by field."""
    command = [
        str(SCHEMATHESIS), "run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance",
        "--max-examples", "500" if LONG else "20", "--no-color", "--output-sanitize", "false",
    ]  # fmt: skip
    command += ["--continue-on-failure"] if LONG else ["--generation-deterministic"]
    run = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    assert "No issues found" in run.stdout, run.stdout

    answered = counts(server)
    for path in OPERATIONS.keys() - {"/openapi.json"}:  # schemathesis has read that one, and lets it be
        assert answered.get((path, "200"), 0) >= 10, (path, answered)  # it is not only refusals that were looked at
    for path in BODIES:
        assert answered.get((path, "400"), 0) >= 20, (path, answered)
    assert not any(status.startswith("5") for _, status in answered), answered


# ------------------------------------------------------------------------------------------------------ by hand

CHAT = b'{"messages": [{"role": "user", "content": "Hi"}]}'
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/parse/reasoning": {"text": "Hi"},
    "/parse/tool_calls": {"text": "Hi"},
}
PATHS = [path.format(id="resp_1", model="replay") for path in OPERATIONS]


def head(method: str, path: str, *headers: bytes, length: int = 0) -> bytes:
    lines = [method.encode() + b" " + path.encode("latin-1") + b" HTTP/1.1", b"Host: localhost", b"Connection: close"]
    lines += [b"Authorization: Bearer " + KEY.encode(), b"Content-Length: %d" % length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def ask(server: Server, method: str, path: str, body: bytes = b"", *headers: bytes) -> tuple[int, bytes]:
    """Status and body of an answer, which is whole, labelled, and no fault of ours."""
    answer = raw(server, head(method, path, *headers, length=len(body)) + body)
    first, _, rest = answer.partition(b"\r\n\r\n")
    if first.startswith(b"HTTP/1.1 100"):
        first, _, rest = rest.partition(b"\r\n\r\n")
    lines = first.split(b"\r\n")
    status, said = int(lines[0].split(b" ")[1]), dict(line.lower().split(b": ", 1) for line in lines[1:])
    assert 200 <= status < 500, answer
    assert said[b"x-request-id"]
    if method == "HEAD" and b'"invalid_http"' not in rest:  # a request that cannot be read has no method
        assert rest == b""
    elif b"content-length" in said:
        assert len(rest) == int(said[b"content-length"])
    else:
        assert rest.endswith(b"0\r\n\r\n")
    if status >= 400 and method != "HEAD":
        assert set(json.loads(rest)["error"]) == {"message", "type", "param", "code"} and len(rest) < 2000
    return status, rest


#: Values that a JSON library writes for nobody.
ODD_TOKENS = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "-0", "-0.0", "01", "+1", ".5", "1.", "0x10", "1_000",
    "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" * 400, "1" * 20 + "." + "1" * 400,
    "null", "true", "True", "undefined", "", " ", "'a'", '"', '""', '"\\ud800"', '"\\udfff\\ud800"', '"\\ud83d\\ude00"',
    '"\\u0000"', '"\x00"', '"\x1f"', '"\\x41"', '"\ufeff"', '"\u2028"', '"\U0010ffff"', '"<|end|>"', "/* */ 1", "[1,]",
    '{"a":1,}', "[,]", '{"a":1,"a":{}}', '{"":0}', '{1:2}', "[]]", "{", "[[[[1]]]]", '{"t":{"t":{"t":[]}}}',
    '"{{ 1/0 }}"', '"%s%n"', '"../../etc/passwd"', '"<think>"', '"\\"}}]"',
)  # fmt: skip
NAMES = sorted(
    {name for operations in OPERATIONS.values() for o in operations.values() if o.body for name in o.body.model_fields}
)

odd_values = st.recursive(
    st.sampled_from(ODD_TOKENS) | st.integers().map(str) | st.floats().map(repr) | st.text(max_size=8).map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=4), inner), max_size=4).map(
            lambda items: f"{{{','.join(f'{json.dumps(key)}:{value}' for key, value in items)}}}"
        )
    ),
    max_leaves=8,
)


@settings(max_examples=30 * settings().max_examples)
@given(
    st.sampled_from(sorted(BODIES)),
    st.lists(st.tuples(st.sampled_from(NAMES), odd_values), max_size=3),
    st.sampled_from([b"", b"\xef\xbb\xbf", b" \n", b"\x00"]),
    st.booleans(),
)
def test_odd_json(server: Server, path: str, entries: list[tuple[str, str]], before: bytes, first: bool) -> None:
    """Names may stand twice, and values may be no JSON at all."""
    plain = [(name, json.dumps(value)) for name, value in BODIES[path].items()]
    items = [*entries, *plain] if first else [*plain, *entries]
    text = f"{{{','.join(f'{json.dumps(name)}:{value}' for name, value in items)}}}"
    ask(server, "POST", path, before + text.encode("utf-8", "surrogatepass"), b"Content-Type: application/json")


def large() -> dict[str, tuple[str, Any]]:
    """name -> (path, body); bytes, or what JSON makes of it."""
    nested: Any = "x"
    for _ in range(95):
        nested = {"a": [nested]} if len(str(nested)) % 2 else [nested]
    return {
        "many prompts": ("/v1/completions", {"prompt": ["a"] * 100_000}),
        "many prompts of ids": ("/v1/completions", {"prompt": [[1]] * 100_000}),
        "as many prompts as there may be": ("/v1/completions", {"prompt": ["a"] * 2048, "max_tokens": 1}),
        "too many outputs": ("/v1/completions", {"prompt": ["a"] * 2048, "n": 128}),
        "empty prompts": ("/v1/completions", {"prompt": [""] * 2048}),
        "a long prompt": ("/v1/completions", {"prompt": "a" * (1 << 20)}),
        "a long id list": ("/detokenize", {"tokens": [1] * 500_000}),
        "a long text": ("/tokenize", {"prompt": "é" * (1 << 18), "return_token_strs": True}),
        "as many messages as there may be": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}] * MAX_MESSAGES},
        ),
        "as many tools as there may be": (
            "/v1/chat/completions",
            json.loads(CHAT) | {"tools": [{"function": {"name": "f"}}] * MAX_TOOLS},
        ),
        "as many items as there may be": ("/v1/responses", {"input": [{"role": "user", "content": ""}] * MAX_MESSAGES}),
        "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 50_000}),
        "many tools": ("/v1/chat/completions", json.loads(CHAT) | {"tools": [{"function": {"name": "f"}}] * 50_000}),
        "many items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 50_000}),
        "many unknown fields": ("/v1/responses", {"input": "a"} | {f"x{i}": i for i in range(50_000)}),
        "a long unknown field": ("/tokenize", {"prompt": "a", "x" * (1 << 20): 1}),
        "a long request": ("/v1/models", b" " * (8 << 20)),
        "deep": ("/v1/chat/completions", b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "deep objects": ("/v1/responses", b'{"input":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
        "deep metadata": ("/v1/completions", {"prompt": "a", "metadata": {"a": nested}}),
        "deep parameters": (
            "/v1/chat/completions",
            json.loads(CHAT) | {"tools": [{"function": {"name": "f", "parameters": {"a": nested}}}]},
        ),
        "deep arguments": (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 500_000}]},
        ),
        "brackets to parse": ("/parse/tool_calls", {"text": "[" * 100_000, "parser": "pythonic"}),
        "a long name to parse": ("/parse/tool_calls", {"text": "<tool_call>" * 10_000}),
    }


LARGE = large()


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies(server: Server, name: str) -> None:
    path, body = LARGE[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    ask(server, "POST", path, content)
    ask(server, "POST", path, content[: len(content) // 2])


SUFFIXES = (
    "", "/", "//", "?", "?a=b&a=b", "?stream=true", "?" + "a" * 5000, "#a", ";a=b", "%00", "%2f", "%2F..", "%ff", "/..",
    "/%2e%2e/health", "%", "%zz", "\xff", "/" * 2000,
)  # fmt: skip
METHODS = ("HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "GET", "POST", "PROPFIND", "M-SEARCH")


@pytest.mark.parametrize(
    "path", [*PATHS, "/", "//", "*", "/v1", "/v1/", "/v1/models/", "/v1/responses/", "/v1/models/%2F"]
)
def test_odd_paths(server: Server, path: str) -> None:
    for suffix in SUFFIXES:
        for method in METHODS:
            status, _ = ask(server, method, path + suffix)
            assert status < 300 or status in (400, 404, 405)


HEADERS = st.tuples(
    st.sampled_from(
        (
            "Accept", "Accept-Encoding", "Authorization", "Cache-Control", "Connection", "Content-Encoding",
            "Content-Length", "Content-Type", "Cookie", "Expect", "Forwarded", "Host", "HTTP2-Settings", "If-Match",
            "Keep-Alive", "Origin", "Range", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "X-Forwarded-For",
            "X-HTTP-Method-Override", "X-Request-Id", "Access-Control-Request-Method", "a" * 300,
        )
    ),
    st.sampled_from(
        (
            "", " ", "a", "*", "*/*", "0", "-1", "5", "application/json", "application/json; charset=utf-16", "gzip",
            "chunked", "identity", "100-continue", "bytes=0-5", "close", "keep-alive", "upgrade", "websocket", "h2c",
            "null", "Basic a", "Bearer", "Bearer  ", "Bearer a b", "\xff\xfe", "é", "a" * 10_000, "localhost:99999",
            "[::1", "https://a",
        )
    )
    | st.text(st.characters(codec="latin-1", exclude_characters="\r\n\x00"), max_size=12),
)  # fmt: skip


@settings(max_examples=30 * settings().max_examples)
@given(st.sampled_from(["/v1/chat/completions", "/tokenize", "/health"]), st.lists(HEADERS, max_size=4))
def test_odd_headers(server: Server, path: str, headers: list[tuple[str, str]]) -> None:
    lines = [f"{name}: {value}".encode("latin-1") for name, value in headers]
    method, body = ("GET", b"") if path == "/health" else ("POST", CHAT)
    ask(server, method, path, body, *lines)
