"""The command: what it refuses, and ours on the replay engine beside a server that runs already."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.comparison import MEASURES
from scripts.bench.peers import LENGTH_FLAGS, Peer, PeerError, Running, Work, transformers_serve
from scripts.bench_compare import parse
from tests.process.server import make_tokenizer, replay_arguments, serving
from tests.scripts import scripted_server as scripted

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_compare.py"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What is taken for a model's directory, with a tokenizer and without weights."""
    place = make_tokenizer(tmp_path / "model")
    (place / "config.json").write_text("{}")
    return place


#: A step per millisecond, of printable characters alone: each is a chunk.
ENGINE = {"vocab_size": 400, "special_token_ids": [*range(90, 400)], "step_interval": 0.001}


def command(model: Path, url: str, *more: str) -> list[str]:
    replay = f"--engine replay --tokenizer {model} --engine_config '{json.dumps(ENGINE)}' --num_postprocess_workers 1"
    size = (
        "--num_prompts",
        "3",
        "--input_tokens",
        "6",
        "--max_tokens",
        "4",
        "--concurrency",
        "2",
        "--rounds",
        "2",
        "--idle_seconds",
        "0.1",
    )
    return [sys.executable, str(SCRIPT), "--model", str(model), "--device", "cpu", "--peer_url", url, "--server_args",
            replay, *size, *more]  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds: 0 is not at least 1"),
        (["--concurrency", "x"], "--concurrency"),
        (["--peer_url", "127.0.0.1:8000"], "--peer_url: '127.0.0.1:8000' is not http://HOST:PORT"),
        (["--peer_kind", "vllm"], "--peer_kind: only with --peer_url"),
        (["--peer_python", "/nowhere/python"], "--peer_python: there is no file /nowhere/python"),
        (["--model", "/nowhere"], "--model: there is no /nowhere/config.json"),
    ],
)
def test_a_wrong_command_line_names_the_flag(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_installed_says_what_is_missing(tmp_path: Path) -> None:
    """An environment without anything: an interpreter that looks into no folder of packages."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(PeerError, match=r"No module named 'fastapi'; pip install .transformers\[serving\]"):
        transformers_serve(python, Work(tmp_path, "float32", "cpu", 2, 10))


def test_a_peer_that_ends_at_once_says_why(tmp_path: Path) -> None:
    peer = Peer("other", "1", (sys.executable, "-c", "raise SystemExit('no such model')"))
    with pytest.raises(PeerError, match="it did not start:\nno such model"), Running(peer, tmp_path / "log"):
        raise AssertionError("it ran")


def test_a_peer_ends_with_its_context(tmp_path: Path) -> None:
    program = (
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()"
    )
    with Running(Peer("other", "1", (sys.executable, "-c", program)), tmp_path / "log") as running:
        assert Path(f"/proc/{running.pid}").exists()
    assert not Path(f"/proc/{running.pid}").exists()


# ------------------------------------------------------------------------------------------------ the whole of it


def carried_out(model: Path, answer: scripted.Answerer, *more: str) -> tuple[int | None, str, str, list[Any]]:
    """(exit code, stdout, stderr, bodies that the peer was asked), the peer being a scripted server in this process."""

    async def whole() -> tuple[int | None, str, str, list[Any]]:
        async with scripted.serving(answer) as server:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command(model, server.url, *more), stdout=pipe, stderr=pipe)
            out, err = await asyncio.wait_for(process.communicate(), 100)
            bodies = [request.body for request in server.requests if request.body]
            return process.returncode, out.decode(), err.decode(), bodies

    return asyncio.run(whole())


async def good(request: scripted.Request, writer: asyncio.StreamWriter) -> None:
    models = scripted.document({"data": [{"id": "the-model"}]})
    writer.write(models if request.method == "GET" else scripted.stream(scripted.chat("a", "b", "c")))


def test_beside_a_server_of_unknown_kind(model: Path) -> None:
    code, out, err, bodies = carried_out(model, good, "--json", "--peer_kind", "other")
    assert code == 0, err
    done = json.loads(out)
    mine, peer = done["systems"].values()
    assert (mine["tokens"], mine["requests"]) == (2 * 3 * 4, 6), "up to the given length"
    assert (peer["tokens"], peer["requests"]) == (2 * 3 * 3, 6), "as many as came"
    assert mine["outside_us_per_token"] > 0 and peer["outside_us_per_token"] is None
    (compared,) = done["ratios"].values()
    assert {*compared} == {*MEASURES} and compared["outside_us_per_token"] is None
    assert compared["tokens_per_second"] is not None
    assert not any("ignore_eos" in body for body in bodies)
    # Per round 2 to warm up, then the same 3 prompts again, at temperature 0.
    asked = [body["messages"] for body in bodies]
    assert len(asked) == 10 and sorted(map(str, asked[2:5])) == sorted(map(str, asked[7:10]))
    assert {body["temperature"] for body in bodies} == {0.0}


def test_requests_that_fail_are_told(model: Path) -> None:
    async def refusing(request: scripted.Request, writer: asyncio.StreamWriter) -> None:
        busy = scripted.document({"message": "busy"}, "503 Busy")
        await good(request, writer) if request.method == "GET" else writer.write(busy)

    code, out, _, _ = carried_out(model, refusing, "--peer_kind", "other", "--rounds", "1")
    assert code == 1
    assert "3 x HTTP 503 Busy: busy" in out


def test_ctrl_c_ends_all_of_it(model: Path) -> None:
    """In the middle of the peer's first answers, of two rounds."""

    async def whole() -> tuple[int | None, str]:
        async def answer(request: scripted.Request, writer: asyncio.StreamWriter) -> None:
            if request.method == "POST":
                writer.write(scripted.HEAD + scripted.framed(scripted.delta(content="x")))
                process.send_signal(signal.SIGINT)
                await request.hung_up()
            else:
                await good(request, writer)

        async with scripted.serving(answer) as server:
            one = command(model, server.url, "--peer_kind", "other", "--concurrency", "1")
            process = await asyncio.create_subprocess_exec(*one, stdout=asyncio.subprocess.PIPE)
            out, _ = await asyncio.wait_for(process.communicate(), 100)
            return process.returncode, out.decode()

    assert asyncio.run(whole()) == (130, "")


def test_nobody_at_the_peers_address(model: Path) -> None:
    done = subprocess.run(command(model, "http://127.0.0.1:1"), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "bench_compare: http://127.0.0.1:1: " in done.stderr


def test_beside_another_of_ours(model: Path) -> None:
    """Its kind is seen by its processes, and its CPU outside the engine is told."""
    with serving(*replay_arguments(model, 1, **ENGINE)) as server:
        done = subprocess.run(command(model, server.url, "--rounds", "1"), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("CPU µs/token, outside the model"))
    ours, theirs = row.split()[-4:-2]
    assert float(ours) > 0 and float(theirs) > 0
    assert "CPU outside the model: ours: front end, workers, the executor's shipping" in done.stdout


def test_what_transformers_serve_is_asked() -> None:
    """It refuses ignore_eos, and takes a generation config as text."""
    *_, body = LENGTH_FLAGS["transformers"]
    assert json.loads(json.loads(body)["generation_config"]) == {"eos_token_id": -1}


def test_it_is_a_command() -> None:
    assert os.access(SCRIPT, os.X_OK)
