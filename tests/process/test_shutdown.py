"""How a server starts, fails to start, and ends: exit codes, what its clients are told, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.process.client import Response, fetch, rest_of
from tests.process.conftest import CONFIG
from tests.process.expected import events
from tests.process.server import Server, launch, replay_arguments, serving, until
from tests.process.test_crashes import ENDLESS, REQUESTS, assert_undisturbed, begin_all, in_the_middle
from tests.process.test_streams import chat


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_lets_open_streams_finish(tokenizer: Path, workers: int) -> None:
    with launch(*replay_arguments(tokenizer, workers, **CONFIG)) as server:
        server.wait_until_ready()

        async def play() -> list[Response]:
            exchanges = await begin_all(server, REQUESTS)
            await in_the_middle(exchanges, REQUESTS)
            server.send(signal.SIGTERM)
            await refused(server)
            return await rest_of(exchanges)

        assert_undisturbed(tokenizer, REQUESTS, asyncio.run(play()))
        finished = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - finished < 5
        server.assert_clean()
        assert not server.log and "open requests may finish" in server.output[-1]


async def refused(server: Server) -> None:
    """A draining server says so, and admits nobody."""
    await asyncio.to_thread(until, lambda: server.health()["status"] == "draining", "draining")
    assert (await fetch(server.url, "/health", method="GET")).status == 503
    assert (await fetch(server.url, "/live", method="GET")).status == 200
    late = await fetch(server.url, *chat("hard", stream=True))
    assert late.status == 503 and int(late.headers["retry-after"]) >= 1
    assert "draining" in late.json()["error"]["message"] and late.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("how", ["second signal", "deadline"])
def test_streams_that_do_not_finish_are_ended(tokenizer: Path, how: str) -> None:
    flags = [] if how == "second signal" else ["--shutdown-timeout", "0.5"]
    with launch(*replay_arguments(tokenizer, 1, **CONFIG), *flags) as server:
        server.wait_until_ready()

        async def play() -> list[Response]:
            exchanges = await begin_all(server, ENDLESS)
            await in_the_middle(exchanges, ENDLESS)
            server.send(signal.SIGINT)
            if how == "second signal":
                await asyncio.to_thread(until, lambda: server.health()["status"] == "draining", "draining")
                server.send(signal.SIGTERM)
            return await rest_of(exchanges)

        responses = asyncio.run(play())
        assert server.wait(8) == 0
        server.assert_clean()
        assert not server.log
        for (_, body), response in zip(ENDLESS, responses):
            assert response.complete
            error = events(response.body)[-1]["error"] if body.get("stream") else response.json()["error"]
            assert error["message"] == "the server is shutting down"


def running(server: Server) -> None:
    """Until the interpreter is past its own start, in our imports."""
    until(lambda: psutil.Process(server.pid).memory_info().rss > 40 << 20, "imports")


@pytest.mark.parametrize(
    ("moment", "whom"), [("imports", "group"), ("engine", "launcher"), ("engine", "group"), ("workers", "group")]
)
def test_ctrl_c_during_the_start(tokenizer: Path, moment: str, whom: str) -> None:
    """A terminal sends SIGINT to the whole foreground group; nobody is to answer it with a traceback."""
    with launch(*replay_arguments(tokenizer, 2, **CONFIG)) as server:
        if moment == "imports":
            running(server)
        else:
            server.wait_for_line("starting the replay engine" if moment == "engine" else "post-processing workers")
        if whom == "group":
            os.killpg(server.pid, signal.SIGINT)
        else:
            server.send(signal.SIGINT)
        assert server.wait() == 0
        server.assert_clean()
        assert server.log == ""


def test_a_taken_port(tokenizer: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launch(*replay_arguments(tokenizer, 1), "--port", str(port)) as server:
            assert server.wait() == 1
            server.assert_clean()
            assert server.log.startswith(f"tailrace serve: cannot listen on 127.0.0.1:{port}: Address already in use")
            assert server.log.count("\n") == 1 and server.output == []


def test_a_worker_that_cannot_start(tokenizer: Path, tmp_path: Path) -> None:
    """The hook loads in the front end, which looks first, but not in a worker."""
    (tmp_path / "picky_hook.py").write_text(
        "import sys\nif 'postproc_workers.shell' in sys.modules and 'serve.launcher' not in sys.modules:\n"
        "    raise ValueError('no licence for workers')\nclass Hook: pass\n"
    )
    arguments = [*replay_arguments(tokenizer, 2), "--post_processor_hook", "picky_hook:Hook"]
    with launch(*arguments, PYTHONPATH=str(tmp_path)) as server:
        assert server.wait() == 1
        server.assert_clean()
        assert "did not start: no licence for workers" in server.log
        assert "Traceback" not in server.log and "executor" not in server.log


def test_files_in_the_current_folder_shadow_nothing(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("executor", "serve", "postproc_workers", "queue", "zmq", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    with serving(*replay_arguments(tokenizer, 1), cwd=tmp_path) as server:
        assert asyncio.run(fetch(server.url, *chat("hi", max_tokens=3))).status == 200
        begin = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - begin < 5  # idle, so there is nothing to wait for
        assert server.log == ""
