"""Keys, pages and TLS as clients meet them, and that nothing of what is secret gets into a log or a child."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve.config import Config
from serve.launcher import serve
from tests.certificates import Authority
from tests.process.client import Response, begin, fetch
from tests.process.conftest import CONFIG
from tests.process.expected import CHAT
from tests.process.server import Server, launch, replay_arguments, serving, until
from tests.process.test_streams import chat, completion

KEYS = ("sk-of-a-flag", "sk-of-another-flag", "sk-of-a-file", "sk-of-the-environment")
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def locked(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys from everywhere, that one page may call."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# the team's\n\n{KEYS[2]}\n")
    file.chmod(0o600)
    flags = ["--api_key", KEYS[0], "--api_key", KEYS[1], "--api_key_file", str(file), "--cors_origin", PAGE]
    arguments = [*replay_arguments(tokenizer, 1, **CONFIG), *flags]
    with serving(*arguments, TAILRACE_API_KEY=KEYS[3]) as server:
        yield server


def client(server: Server, key: str, **arguments: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **arguments)


def say(client: openai.OpenAI) -> str:
    messages: Any = [{"role": "user", "content": "excited"}]
    chunks = client.chat.completions.create(model="replay", messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_every_key_opens(locked: Server, key: str) -> None:
    with client(locked, key) as opened:
        assert say(opened) == "Hello world! theHello"


@pytest.mark.parametrize("key", ["sk-wrong", KEYS[0][:-1], KEYS[0] + "x", "none"], ids=range(4))
def test_other_keys_do_not(locked: Server, key: str) -> None:
    with client(locked, key) as closed, pytest.raises(openai.AuthenticationError) as caught:
        say(closed)
    assert caught.value.status_code == 401 and caught.value.code == "invalid_api_key"
    assert key not in caught.value.message and caught.value.type == "invalid_request_error"


ROUTES = [
    ("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"), ("GET", "/v1/models"), ("GET", "/v1/models/replay"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("POST", "/parse/reasoning"), ("GET", "/metrics"), ("GET", "/version"),
    ("GET", "/nothing"), ("PUT", CHAT), ("HEAD", "/metrics"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_one(locked: Server, method: str, path: str) -> None:
    """Also those that do not exist: whoever has no key need not find out."""
    response = asyncio.run(fetch(locked.url, path, b"{}" if method == "POST" else b"", method))
    assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in response.headers
    if method != "HEAD":
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_probes_need_none(locked: Server) -> None:
    for path in ("/live", "/health"):
        for method in ("GET", "HEAD"):
            assert asyncio.run(fetch(locked.url, path, method=method)).status == 200


def test_a_large_body_is_not_taken_from_somebody_without_a_key(locked: Server) -> None:
    """The answer is there before the body is, and survives that the client goes on sending."""

    async def play() -> Response:
        exchange = await begin(locked.url, CHAT, b"x" * (16 << 20))
        return await exchange.rest()

    response = asyncio.run(asyncio.wait_for(play(), 30))
    assert (response.status, response.complete) == (401, True)


def test_a_page_may_call_with_a_key(locked: Server) -> None:
    """The browser's question needs none: it could not send one."""
    asked = asyncio.run(
        fetch(
            locked.url, CHAT, method="OPTIONS", Origin=PAGE, Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization,content-type,x-stainless-os",
        )
    )  # fmt: skip
    assert asked.status == 200 and asked.headers["access-control-allow-origin"] == PAGE
    path, body = chat("excited", stream=True)
    key, kind = f"Bearer {KEYS[0]}", "application/json"
    answer = asyncio.run(fetch(locked.url, path, body, Origin=PAGE, Authorization=key, Content_Type=kind))
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert answer.body.endswith(b"data: [DONE]\n\n")
    refused = asyncio.run(fetch(locked.url, path, body, Origin=PAGE, Content_Type=kind))
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == PAGE  # a page can read why
    simple = asyncio.run(fetch(locked.url, path, body, Origin=PAGE, Authorization=key, Content_Type="text/plain"))
    assert simple.status == 415


def test_a_page_of_a_server_without_origins(replay_server: Any) -> None:
    """It is told no when it asks, refused when it does not ask, and found out when it pretends to be ours."""
    url = replay_server(1).url
    path, body = chat("excited")
    asked = asyncio.run(fetch(url, path, method="OPTIONS", Origin=PAGE, Access_Control_Request_Method="POST"))
    assert asked.status == 405 and not any(name.startswith("access-control") for name in asked.headers)
    for headers in ({}, {"Content_Type": "text/plain"}, {"Content_Type": "text/plain; x=json"}):
        assert asyncio.run(fetch(url, path, body, Origin=PAGE, **headers)).status == 415
    rebound = asyncio.run(_as("evil.example", url, path, body))
    assert rebound.status == 403 and rebound.json()["error"]["code"] == "host_not_allowed"
    assert asyncio.run(fetch(url, path, body)).status == 200


async def _as(name: str, url: str, path: str, body: dict[str, Any]) -> Response:
    """The request of a page whose name was made to point here."""
    async with httpx.AsyncClient(trust_env=False) as web:
        answer = await web.post(url + path, json=body, headers={"Host": name, "Origin": f"http://{name}"})
    return Response(answer.status_code, answer.headers, answer.content)


def test_children_do_not_have_the_keys(locked: Server) -> None:
    for child in [*locked.children("executor"), *locked.children("worker")]:
        environment = json.dumps(child.environ())
        assert "TAILRACE_API_KEY" not in environment
        assert not any(key in environment for key in KEYS)
        assert not any(key in word for key in KEYS for word in child.cmdline())


def test_the_banner_shows_how_to_call_and_no_key(locked: Server) -> None:
    said = "\n".join(locked.output)
    assert '-H "authorization: Bearer $TAILRACE_API_KEY"' in said
    assert not any(key in said + locked.log for key in KEYS)


# ---------------------------------------------------------------------------------------------------- TLS


def test_https_with_client_certificates(tokenizer: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    flags = [
        "--ssl_certfile",
        str(certificate),
        "--ssl_keyfile",
        str(key),
        "--ssl_ca_certs",
        str(authority.certificate),
    ]
    with launch(*replay_arguments(tokenizer, 0, **CONFIG), *flags) as server:
        server.url = server.wait_for_line(re.compile(r"tailrace serves \S+ at (https://\S+)"))[1]
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with pytest.raises(openai.APIConnectionError):
            say(client(server, "none", http_client=httpx.Client(verify=context, trust_env=False)))
        context.load_cert_chain(*map(str, authority.issue("client")))
        with client(server, "none", http_client=httpx.Client(verify=context, trust_env=False)) as trusted:
            assert say(trusted) == "Hello world! theHello"
        with contextlib.suppress(httpx.HTTPError):  # plain HTTP, to a server that does not speak it
            httpx.get(server.url.replace("https", "http") + "/live", trust_env=False)
        assert server.stop() == 0 and "Traceback" not in server.log


# ---------------------------------------------------------------------------------------------------- refused starts


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"api_key": ("",)}, "--api_key: a key is made of"),
        ({"api_key_file": "/no/such/file"}, "--api_key_file: /no/such/file cannot be read"),
        ({"cors_origin": ("page.example",)}, "--cors_origin: page.example is no origin"),
        ({"ssl_certfile": "/no/such/file"}, "--ssl_certfile: /no/such/file cannot be used"),
        ({"ssl_keyfile": "/no/such/file"}, "--ssl_keyfile needs --ssl_certfile"),
    ],
)
def test_settings_that_cannot_work(flags: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Before a model is looked for: there is none here."""
    assert serve(Config(engine="replay", tokenizer="/no/such/tokenizer", port=0, **flags)) == 1
    assert capfd.readouterr().err.strip().startswith(f"tailrace serve: {said}")


def test_an_empty_variable_is_no_open_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAILRACE_API_KEY", "")
    assert serve(Config(engine="replay", tokenizer="/no/such/tokenizer", port=0)) == 1
    assert "TAILRACE_API_KEY: a key is made of" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------- logs

#: In prompts, keys, headers and bodies; and what the engine says.
SECRET = "s3cr3t-0f-a-client"
SPOKEN = "Hello"


async def whisper(url: str) -> list[int]:
    """Requests of all kinds, each with the secret where a client has its own; returns the statuses."""
    key = {"Authorization": f"Bearer {SECRET}-key", "X_Custom": SECRET}
    user = {"messages": [{"role": "user", "content": SECRET}]}
    tool = {"type": "function", "function": {"name": SECRET}}
    bodies: list[tuple[str, Any]] = [
        chat(SECRET, max_tokens=5), chat(SECRET, stream=True, n=2, max_tokens=5), chat("excited"), chat("broken"),
        chat("broken", stream=True, user=SECRET), completion(["excited", SECRET], max_tokens=3, echo=True),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 5}), ("/tokenize", {"prompt": SECRET}),
        ("/detokenize", {"tokens": [70, 71]}), ("/parse/reasoning", {"text": SECRET, "parser": "qwen3"}),
        # and those that are refused
        (CHAT, {**user, "temperature": SECRET}), (CHAT, {**user, SECRET: 1}), (CHAT, {**user, "tools": [tool]}),
        (CHAT, {**user, "model": SECRET}), (CHAT, {**user, "chat_template_kwargs": {"tokenize": SECRET}}),
        (CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}), (CHAT, {**user, "max_tokens": 10**9}),
        (CHAT, f'{{"messages": "{SECRET}'.encode()), (CHAT, b"\xff" + SECRET.encode()),
        ("/v1/completions", {"prompt": 1}), ("/parse/tool_calls", {"text": SECRET, "parser": SECRET}),
    ]  # fmt: skip
    statuses = [(await fetch(url, path, body, **key)).status for path, body in bodies]
    statuses.append((await fetch(url, CHAT, user, Content_Type=SECRET, **key)).status)
    statuses.append((await fetch(url, CHAT, user, Authorization=f"Bearer {SECRET}")).status)
    leaver = await begin(url, *chat("slow", stream=True, user=SECRET), **key)
    await leaver.read_events(2)
    leaver.reset()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"GET /live HTTP/1.1\r\n{SECRET}\x00: {SECRET}\r\n\r\n".encode())
    statuses.append(int((await reader.read())[9:12]))
    writer.close()
    return statuses


@pytest.mark.parametrize("level", ["info", "debug"])
def test_logs_hold_no_word_of_a_client(tokenizer: Path, level: str) -> None:
    """Neither what was asked, nor what was answered, nor who asked; not even at level debug."""
    arguments = [*replay_arguments(tokenizer, 1, **CONFIG), "--log_level", level]
    with launch(*arguments, TAILRACE_API_KEY=f"{SECRET}-key") as server:
        server.wait_until_ready()
        statuses = asyncio.run(whisper(server.url))
        assert set(statuses) == {200, 400, 401, 404, 415, 500}
        os.kill(server.workers()[0], signal.SIGKILL)  # what is said of its end is looked at too
        until(lambda: server.health().get("worker_restarts") == 1, "another worker")
        assert server.stop() == 0
        said = server.everything()
    assert ("POST" in said) == (level == "debug")
    assert SECRET not in said and SPOKEN not in said
