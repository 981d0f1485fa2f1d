"""Every client gets exactly the bytes that its tokens stand for: with any number of workers, alone or in a crowd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.client import fetch
from tests.process.conftest import CONFIG
from tests.process.expected import CHAT, COMPLETIONS, MODEL, events, expected_body, merged, normalised
from tests.process.server import Server

WORKERS = (0, 1, 2, 4)
STOPS = ["STOP", "END", "aab<"]


def chat(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "model": MODEL, **fields}


def completion(prompt: str | list[str], **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, "model": MODEL, **fields}


USAGE = {"include_usage": True}
RUNNING = {"include_usage": True, "continuous_usage_stats": True}

#: One of each kind; every one is asked for as a stream and as a document.
REQUESTS = {
    "chat": chat("hard"),
    "chat stop": chat("hard", stop=STOPS, n=2),
    "chat keep stop": chat("hard", stop="STOP", include_stop_str_in_output=True),
    "chat logprobs": chat("hard", logprobs=True, top_logprobs=2, n=2, stop=["STOP"]),
    "chat synthetic": chat("tell me", max_tokens=40, n=3),
    "chat short": chat("hard", max_tokens=4),
    "completion": completion("hard"),
    "completion prompts": completion(["hard", "else", "hard"], n=2, max_tokens=20),
    "completion logprobs": completion("hard", logprobs=1, stop=["STOP", "ENDED"], n=2),
    "completion echo": completion(["hard", "els"], echo=True, max_tokens=5),
    "completion specials": completion("words", max_tokens=30, skip_special_tokens=False, stop_token_ids=[7, 9]),
}  # fmt: skip
FORMS = {"stream": {"stream": True}, "usage": {"stream": True, "stream_options": USAGE}, "unary": {}}
CASES = [(name, form) for name in REQUESTS for form in FORMS]


def case(name: str, form: str) -> tuple[str, dict[str, Any]]:
    path, body = REQUESTS[name]
    return path, {**body, **FORMS[form]}


def assert_equal(body: dict[str, Any], got: bytes, expected: bytes) -> None:
    if not body.get("stream"):
        assert normalised(got) == expected
    else:
        assert merged(got) == merged(expected)


@pytest.mark.parametrize("workers", WORKERS)
def test_each_kind_of_request(replay_server: Callable[[int], Server], tokenizer: Path, workers: int) -> None:
    server = replay_server(workers)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(fetch(server.url, *case(*each)) for each in CASES))

    for each, response in zip(CASES, asyncio.run(ask())):
        path, body = case(*each)
        assert response.status == 200 and response.complete, each
        kind = "text/event-stream; charset=utf-8" if body.get("stream") else "application/json"
        assert response.headers["content-type"] == kind
        assert_equal(body, response.body, expected_body(CONFIG, tokenizer, path, body))


@pytest.mark.parametrize("workers", WORKERS)
def test_bytes_of_a_stream_that_is_alone(replay_server: Callable[[int], Server], tokenizer: Path, workers: int) -> None:
    """A busy machine may join two steps into one chunk; when none was, the bytes are those of a replay by tokens."""
    path, body = chat("hard", stream=True, n=2, logprobs=True, top_logprobs=1, stop=["STOP"], stream_options=RUNNING)
    expected = expected_body(CONFIG, tokenizer, path, body)
    for _ in range(20):
        got = normalised(asyncio.run(fetch(replay_server(workers).url, path, body)).body)
        assert merged(got) == merged(expected)
        if got == expected:
            return
    raise AssertionError(f"never the same bytes; the last ones: {got!r}")


@pytest.mark.parametrize("workers", WORKERS)
def test_hundreds_at_once(replay_server: Callable[[int], Server], tokenizer: Path, workers: int) -> None:
    server = replay_server(workers)
    count = 300
    requests = [
        case(*CASES[i % len(CASES)]) if i % 3 == 0 else chat(f"client {i}", stream=i % 3 == 1, max_tokens=16)
        for i in range(count)
    ]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(fetch(server.url, *request) for request in requests))

    known: dict[str, bytes] = {}
    for (path, body), response in zip(requests, asyncio.run(ask())):
        assert response.status == 200 and response.complete
        key = repr((path, body))
        if key not in known:
            known[key] = expected_body(CONFIG, tokenizer, path, body)
        assert_equal(body, response.body, known[key])


def test_an_engine_error_is_an_error_object(replay_server: Callable[[int], Server]) -> None:
    url = replay_server(1).url
    stream = asyncio.run(fetch(url, *chat("broken", stream=True)))
    *_, last = events(stream.body)
    assert stream.status == 200 and last["error"]["message"] == "the engine has had enough"
    unary = asyncio.run(fetch(url, *chat("broken")))
    assert unary.status == 500 and unary.json()["error"]["type"] == "server_error"
    assert unary.json()["error"]["message"] == "the engine has had enough"
