"""The embedded model end to end, through the `openai` client and curl, with 0, 1 and 2 workers: the same answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.process.client import begin, fetch
from tests.process.expected import CHAT, COMPLETIONS, events, merged, normalised
from tests.process.server import Server, serving, until

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"temperature": 0, "max_tokens": 8}

#: What the first number of workers answered, by test; all others have to answer the same.
ANSWERS: dict[str, Any] = {}


@pytest.fixture(scope="module", params=[0, 1, 2])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The embedded model with a number of workers."""
    flags = ["--num_postprocess_workers", str(request.param), "--max_model_len", "512", "--max_num_seqs", "8"]
    with serving(*flags) as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    """The served model's name."""
    (card,) = client.models.list().data
    return card.id


def same(name: str, answer: Any) -> None:
    """The answer does not depend on the number of workers."""
    assert ANSWERS.setdefault(name, answer) == answer


def without_names(response: Any) -> dict[str, Any]:
    """A response of the client without what is minted for each request."""
    return {key: value for key, value in response.model_dump().items() if key not in ("id", "created", "_request_id")}


def test_chat(client: openai.OpenAI, model: str) -> None:
    unary = client.chat.completions.create(model=model, messages=QUESTION, **GREEDY)
    text, (choice,) = unary.choices[0].message.content, unary.choices
    assert text and choice.finish_reason in ("stop", "length") and unary.usage.completion_tokens <= 8
    same("chat", without_names(unary))

    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(model=model, messages=QUESTION, stream=True, stream_options=options, **GREEDY)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage == unary.usage
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    assert len(chunks) > 4


def test_completion(client: openai.OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    unary = client.completions.create(model=model, prompt=prompt, **GREEDY)
    assert "Paris" in unary.choices[0].text and unary.usage.prompt_tokens == 5
    same("completion", without_names(unary))
    chunks = list(client.completions.create(model=model, prompt=prompt, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == unary.choices[0].text
    echoed = client.completions.create(model=model, prompt=prompt, echo=True, **GREEDY)
    assert echoed.choices[0].text == prompt + unary.choices[0].text


def test_choices_logprobs_stops_and_seeds(client: openai.OpenAI, model: str) -> None:
    drawn = {"temperature": 1.0, "max_tokens": 6, "seed": 7}
    first = client.chat.completions.create(model=model, messages=QUESTION, n=2, logprobs=True, top_logprobs=2, **drawn)
    again = client.chat.completions.create(model=model, messages=QUESTION, n=2, logprobs=True, top_logprobs=2, **drawn)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and texts[0] != texts[1]
    for choice in first.choices:
        entries = choice.logprobs.content
        assert len(entries) <= 6 and all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
        assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(choice.message.content)
    same("drawn", texts)

    whole = client.completions.create(model=model, prompt="One, two, three,", temperature=0, max_tokens=10).choices[0]
    stop = whole.text[6:9]
    cut = client.completions.create(
        model=model, prompt="One, two, three,", temperature=0, max_tokens=10, stop=[stop, "zzz"]
    )
    (choice,) = cut.choices
    assert choice.text == whole.text[: whole.text.index(stop)] and choice.finish_reason == "stop"
    same("stop", without_names(cut))


def test_bytes_of_streams(server: Server) -> None:
    """One at a time; where no step was joined to another, to the byte."""
    bodies = {
        CHAT: {
            "messages": QUESTION,
            "stream": True,
            "logprobs": True,
            "stream_options": {"include_usage": True},
            **GREEDY,
        },
        COMPLETIONS: {"prompt": ["Once upon a time", "def main():"], "stream": True, "n": 1, "stop": ["zzz"], **GREEDY},
    }
    for path, body in bodies.items():
        for _ in range(10):
            got = normalised(asyncio.run(fetch(server.url, path, body)).body)
            same(f"merged {path}", merged(got))
            if ANSWERS.setdefault(f"bytes {path}", got) == got:
                break
        else:
            raise AssertionError(f"{path}: never the same bytes")


def test_the_asynchronous_client(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"What is {number} plus 1?"}]
        stream = await client.chat.completions.create(model="", messages=messages, stream=True, **GREEDY)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def play() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(4)))

    answers = asyncio.run(play())
    assert all(answers) and len(set(answers)) > 1


def test_errors_reach_the_client_as_its_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        client.chat.completions.create(model="gpt-17", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model=model, messages=QUESTION, max_tokens=-1)
    assert caught.value.param == "max_tokens" and caught.value.request_id
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model=model, prompt="word " * 600)
    assert caught.value.code == "context_length_exceeded"


def test_curl_from_the_banner(server: Server) -> None:
    """The line that is printed at the start, but for the length of the answer."""
    (line,) = (line.strip() for line in server.output if "curl -N" in line)
    command, body, _ = re.split(r"'(\{.*\})'", line)
    short = json.dumps({**json.loads(body), "max_tokens": 5})
    run = subprocess.run(["bash", "-c", f"{command}'{short}'"], capture_output=True, timeout=60)
    assert run.returncode == 0 and len(events(run.stdout)) > 3


def test_leaving_stops_the_model(server: Server) -> None:
    async def play() -> None:
        exchange = await begin(server.url, CHAT, {"messages": QUESTION, "stream": True, "ignore_eos": True})
        await exchange.read_events(3)
        exchange.close()

    asyncio.run(play())
    until(lambda: server.health()["open_requests"] == 0, "the request's end")
    until(lambda: server.metrics().get("tailrace_executor_running_outputs") == 0, "an idle engine")


def test_a_killed_worker(server: Server) -> None:
    if not server.workers():
        pytest.skip("post-processing runs in the front end")
    body = {"messages": QUESTION, "stream": True, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    whole = merged(asyncio.run(fetch(server.url, CHAT, body)).body)

    async def play() -> bytes:
        exchange = await begin(server.url, CHAT, body)
        await exchange.read_events(4)
        for pid in server.workers():
            os.kill(pid, signal.SIGKILL)
        return (await exchange.rest()).body

    assert merged(asyncio.run(play())) == whole
    until(lambda: server.health()["worker_restarts"] >= 1 and server.health()["status"] == "ok", "a replacement", 30)


def test_a_killed_executor(server: Server) -> None:
    """The model is loaded again, and goes on behind what it had said: greedy, and drawn with a seed."""
    if len(server.workers()) != 1:
        pytest.skip("a start of the model is enough for one number of workers")
    asked = {"messages": QUESTION, "stream": True, "max_tokens": 24, "ignore_eos": True}
    bodies = [
        {**asked, "temperature": 0, "stream_options": {"include_usage": True}},
        {**asked, "temperature": 1.0, "seed": 11, "n": 2, "presence_penalty": 0.5},
    ]
    whole = [merged(asyncio.run(fetch(server.url, CHAT, body)).body) for body in bodies]

    async def play() -> list[bytes]:
        exchanges = [await begin(server.url, CHAT, body) for body in bodies]
        await asyncio.gather(*(exchange.read_events(5) for exchange in exchanges))
        os.kill(server.executor(), signal.SIGKILL)
        return [(await exchange.rest()).body for exchange in exchanges]

    assert [merged(body) for body in asyncio.run(play())] == whole
    assert server.health()["executor_restarts"] == 1 and server.health()["open_requests"] == 0
