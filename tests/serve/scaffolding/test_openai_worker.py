"""The worker over a URL, against a real server of this project on the replay engine."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.scaffolding import (
    GENERATION,
    EarlyStopController,
    GenerationTask,
    MajorityVoteController,
    NativeGenerationController,
    OpenAIWorker,
    ScaffoldingLlm,
    StreamGenerationTask,
    TaskError,
    TaskStatus,
)
from tests.process.expected import script, vocabulary_config
from tests.process.server import Server, replay_arguments, serving, until
from tests.serve.scaffolding.doubles import run

SCRIPTS = [
    script("hello", "Hello", " world", "!", logprobs=True),
    script("broken", "Hello", finish_reason="error", message="the engine has had enough"),
]


@pytest.fixture(scope="module")
def server(tokenizer: Path) -> Iterator[Server]:
    config = {**vocabulary_config(), "rule": "prompt", "scripts": SCRIPTS, "step_interval": 0.002}
    with serving(*replay_arguments(tokenizer, 1, **config)) as running:
        yield running


def asked(server: Server, main: Any) -> Any:
    """``main(worker)`` on an event loop."""

    async def go() -> Any:
        worker = OpenAIWorker(f"{server.url}/v1", max_retries=0)
        try:
            return await main(worker)
        finally:
            await worker.close()

    return run(go())


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), [{"role": "user", "content": "hello"}]])
def test_text_ids_and_messages(server: Server, prompt: Any) -> None:
    async def main(worker: OpenAIWorker) -> None:
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker})
        task = await llm.generate_async(prompt, options={"max_tokens": 50, "ignore_eos": True}, logprobs=0)
        assert (task.output_str, task.finish_reason, task.end_flag) == ("Hello world!", "stop", True)
        assert [(entry.piece, entry.logprob) for entry in task.output_logprobs] == [
            ("Hello", -0.5), (" world", -1.5), ("!", -2.5),
        ]  # fmt: skip
        assert llm.progress.usage() == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

    asked(server, main)


def test_in_steps(server: Server) -> None:
    async def main(worker: OpenAIWorker) -> None:
        task = StreamGenerationTask(prompt="hello", streaming_step=1)
        seen = []
        while not task.end_flag:
            await worker.run_task(task)
            seen.append(task.output_str)
        assert seen[0] == "Hello" and seen[-1] == "Hello world!" and task.status is TaskStatus.DONE

    asked(server, main)


def test_an_aborted_one_ends_on_the_server(server: Server) -> None:
    async def main(worker: OpenAIWorker) -> Any:
        llm = ScaffoldingLlm(EarlyStopController(lambda text: len(text) > 9), {GENERATION: worker})
        task = await llm.generate_async("anything", options={"max_tokens": 100_000})
        assert task.details["stopped"] and task.output_str is not None and len(task.output_str) > 9
        result = llm.generate_async("x", controller=MajorityVoteController(4), options={"max_tokens": 100_000})
        while not result.progress.completion_tokens:
            await llm.settled()
            await worker.run_task(GenerationTask(prompt="hello"))
        result.cancel()
        await llm.shutdown()
        return llm.progress

    progress = asked(server, main)
    assert progress.cancelled == 5 and progress.tokens_spared > 400_000
    until(lambda: server.total("tailrace_executor_open_requests") == 0, "the end of what was aborted")


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("hello", {"temperature": -1}, "temperature"),
        ("hello", {"max_token": 5}, "options.max_token: there is no such option"),
        ("broken", {}, "the engine has had enough"),
        ("hello", {"model": "another"}, "does not exist"),
    ],
)
def test_errors_are_the_tasks_reason(server: Server, prompt: str, options: dict[str, Any], words: str) -> None:
    async def main(worker: OpenAIWorker) -> None:
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker})
        with pytest.raises(TaskError, match=words):
            await llm.generate_async(prompt, options=options)
        assert llm.progress.failed == 1

    asked(server, main)


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main() -> None:
        for model in (None, "m"):
            worker = OpenAIWorker(f"http://127.0.0.1:{port}/v1", model=model, max_retries=0)
            task = GenerationTask(prompt="p")
            assert await worker.run_task(task) is TaskStatus.FAILED
            assert str(port) in (task.reason or "") and task.output_str is None
            await worker.close()

    run(main())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"Hel",'
         b'"finish_reason":null,"logprobs":null}]}\n\n', "peer closed|Connection error"),
        (b"data: [DONE]\n\n", "without a finish reason"),
        (b"data: {\n\n", "127.0.0.1"),
        (b'data: {"choices": [5], "usage": null}\n\n', "AttributeError"),
    ],
)  # fmt: skip
def test_a_stream_that_breaks_off_fails_with_what_had_come(sent: bytes, words: str) -> None:
    """``sent``: a chunked body's only piece; the end of the body never comes unless it says DONE."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(sent), sent))
        if b"DONE" in sent:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            worker = OpenAIWorker(f"http://127.0.0.1:{port}/v1", model="m", max_retries=0)
            task = GenerationTask(prompt="p")
            assert await worker.run_task(task) is TaskStatus.FAILED
            assert re.search(words, task.reason or ""), task.reason
            assert task.output_str == ("Hel" if b"Hel" in sent else None)
            await worker.close()

    run(main())


def test_one_that_is_aborted_before_its_first_turn_ends() -> None:
    async def main() -> None:
        worker, task = OpenAIWorker("http://127.0.0.1:1/v1", model="m"), GenerationTask(prompt="p")
        await worker.open(task)
        await worker.cancel(task, "enough")
        assert (task.status, task.reason, task.end_flag) == (TaskStatus.CANCELLED, "enough", True)
        await worker.close()

    run(main())


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(RuntimeError, match=r"pip install 'tailrace\[openai\]'"):
        OpenAIWorker("http://127.0.0.1:1/v1")
