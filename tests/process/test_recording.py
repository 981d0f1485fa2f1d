"""`serve --record`, `tailrace replay`, `--post_processor_hook`, `--stream_interval`: from command line to bytes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve import cli
from tests.process.client import Response, fetch
from tests.process.conftest import CONFIG
from tests.process.expected import events, expected_body, merged
from tests.process.server import TAILRACE, Server, replay_arguments, serving, until
from tests.process.test_streams import RUNNING, USAGE, chat, completion

SECRET = "hard to forget"

#: Python 3.10 cannot be kept from looking into the current folder first.
SHADOWS = ("executor", "serve", "postproc_workers", "queue", "zmq", "tokenizers") if sys.version_info >= (3, 11) else ()

#: Prints, and so would break a worker whose stdout was its parent's pipe; shouts, and ends a stream that asks for it.
HOOK = """
from postproc_workers.hook import EMIT, Replace, SUPPRESS, Terminate

print("loading", "x" * 100_000)

class Shout:
    def __init__(self):
        self.seen = 0

    def __call__(self, output, text):
        print("y" * 10_000)
        self.seen += 1
        if "answer" in text:
            return Terminate("<cut>", "content_filter")
        if "!" in text:
            raise RuntimeError("no exclamation marks")
        return Replace(text.upper()) if text.isascii() else EMIT
"""


def replayed(file: Path, *flags: str) -> bytes:
    """What `tailrace replay` prints. In this process: the command itself is in the last test."""
    printed = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(printed, write_through=True)) as kept:
        assert cli.main(["replay", str(file), *flags]) == 0
    kept.detach()
    return printed.getvalue()


@pytest.fixture(scope="module")
def recorder(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server that records, and where."""
    folder = tmp_path_factory.mktemp("recordings") / "made" / "by it"
    with serving(*replay_arguments(tokenizer, 2, **CONFIG), "--record", str(folder)) as server:
        yield server, folder


def ask(server: Server, request: tuple[str, dict[str, Any]]) -> Response:
    return asyncio.run(fetch(server.url, *request))


def recording_of(folder: Path, response: Response) -> Path:
    """The file that belongs to a response: it is named after its id."""
    body = response.body.removeprefix(b"data: ").partition(b"\n")[0]
    file = folder / f"{json.loads(body)['id']}.jsonl"
    until(lambda: file.exists() and file.read_bytes().endswith(b"\n"), f"{file}")
    return file


REQUESTS = {
    "chat": chat("hard", stream=True, n=2, stop=["STOP"], logprobs=True, top_logprobs=1, stream_options=RUNNING),
    "completion": completion("hard", stream=True, n=2, stop=["END"], stream_options=USAGE),
    "prompts": completion(["hard", SECRET], stream=True, max_tokens=12, logprobs=1),
    "unary": chat("hard", n=2, stop=["STOP"]),
    "unary completion": completion(["hard", "x"], logprobs=2, max_tokens=9),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_replay_prints_what_the_client_received(recorder: tuple[Server, Path], name: str) -> None:
    server, folder = recorder
    path, body = REQUESTS[name]
    streams = bool(body.get("stream"))
    for _ in range(20):  # a busy machine may have joined two steps: then the merged streams are equal, and we ask again
        response = ask(server, (path, body))
        file = recording_of(folder, response)
        printed = replayed(file, *([] if streams else ["--unary"]))
        if not streams:
            assert printed == response.body + b"\n"
            assert merged(replayed(file, "--split", "random:7"))["choices"].keys() == {0, 1}
            return
        assert merged(printed) == merged(response.body)
        if printed == response.body:
            break
    else:
        raise AssertionError("never the same bytes")
    for split in ("whole", "every:3", "random:1"):
        assert merged(replayed(file, "--split", split)) == merged(response.body)


def test_prompts_are_not_recorded(recorder: tuple[Server, Path]) -> None:
    server, folder = recorder
    messages = [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]
    responses = [
        ask(server, completion(SECRET)),
        ask(server, ("/v1/chat/completions", {"messages": messages, "max_tokens": 4})),
    ]
    for response in responses:
        file = recording_of(folder, response)
        text = file.read_text()
        assert SECRET not in text and json.loads(text)["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
        assert json.loads(replayed(file, "--unary")) == response.json()


def test_a_request_without_a_model_name(recorder: tuple[Server, Path]) -> None:
    server, folder = recorder
    response = ask(server, ("/v1/completions", {"prompt": "hard"}))
    assert json.loads(replayed(recording_of(folder, response), "--unary")) == response.json()


@pytest.fixture(scope="module")
def hooked(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with a hook, prompts in its recordings, and four tokens per event. It runs in a folder whose files have
    the names of packages; none of them may be taken for one."""
    folder = tmp_path_factory.mktemp("hook")
    cwd = tmp_path_factory.mktemp("cwd")
    for name in SHADOWS:
        (cwd / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    (folder / "our_hooks.py").write_text(HOOK)
    flags = [
        "--post-processor-hook",
        "our_hooks:Shout",
        "--stream-interval=4",
        "--record",
        str(folder),
        "--record-prompts",
    ]
    with serving(*replay_arguments(tokenizer, 1, **CONFIG), *flags, cwd=cwd, PYTHONPATH=str(folder)) as server:
        yield server, folder
        begin = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - begin < 5  # idle, so there is nothing to wait for


def test_a_hook_replaces_and_terminates(hooked: tuple[Server, Path], tokenizer: Path) -> None:
    server, folder = hooked
    body = chat("hard", stream=True, n=2)[1]
    response = ask(server, chat("hard", stream=True, n=2))
    got, plain = (
        merged(response.body)["choices"],
        merged(expected_body(CONFIG, tokenizer, "/v1/chat/completions", body))["choices"],
    )
    upper = "".join(c.upper() if c.isascii() else c for c in plain[0]["text"])
    assert got[0]["text"] == upper and got[0]["finish"] == plain[0]["finish"]
    assert got[1]["text"] == "THE<cut>" and got[1]["finish"] == [("content_filter", None)]
    assert "hard" in recording_of(folder, response).read_text()


def test_a_hook_that_raises_fails_its_request_alone(hooked: tuple[Server, Path]) -> None:
    server, _ = hooked
    worker = server.workers()

    async def both() -> list[Response]:
        return await asyncio.gather(*(fetch(server.url, *chat(text, stream=True)) for text in ("slow", "excited")))

    good, bad = (merged(response.body) for response in asyncio.run(both()))
    assert not good["errors"] and good["choices"][0]["finish"] == [("stop", None)]
    (error,) = bad["errors"]
    assert error["type"] == "server_error" and "RuntimeError" in error["message"]
    assert "!" not in bad["choices"][0]["text"]  # closed: what the hook did not pass is not sent
    assert server.workers() == worker


def test_four_tokens_per_event(hooked: tuple[Server, Path]) -> None:
    server, _ = hooked
    response = ask(server, completion("slow", stream=True, max_tokens=41))
    pieces = [event["choices"][0]["text"] for event in events(response.body)]
    assert pieces[0] == "HELLO" and len(pieces) <= 12  # the first token alone, then at least four at a time
    assert "".join(pieces).startswith("HELLO WORLD世STOP THE😀AABSTO A" * 3)


def test_replay_from_the_command_line(tmp_path: Path) -> None:
    """Its errors are one line; `tests/serve/test_cli.py` has them all."""
    (tmp_path / "some.jsonl").write_text(
        '{"name": "a", "endpoint": "/v1/completions", "request": {"prompt": "x"}, "prompt_tokens": 1,'
        ' "outputs": [{"index": 0, "text": "hello", "finish_reason": "stop"}]}'
    )
    for name, code, lines in (("some.jsonl", 0, (1, 0)), ("nowhere.jsonl", 1, (0, 1))):
        command = [TAILRACE, "replay", name, "--unary"]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert (run.returncode, run.stdout.count("\n"), run.stderr.count("\n")) == (code, *lines)
