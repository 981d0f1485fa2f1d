"""The command as a whole: against a scripted server, and against a real one on the replay engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.benchmark import BenchmarkError, Report, benchmark
from scripts.bench.options import parse
from scripts.bench.results import DETAILS
from tests.process.server import Server, make_tokenizer, replay_arguments, serving
from tests.scripts import scripted_server as scripted

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_serving.py"

#: What users of the file read.
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "max_open_requests",
    *(f"{word}_{name}_ms" for word in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
OF_EACH = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def carried_out(answer: scripted.Answerer, *flags: str) -> tuple[Report, scripted.ScriptedServer, list[str]]:
    """A benchmark of a scripted server, and what it said."""

    async def whole() -> tuple[Report, scripted.ScriptedServer, list[str]]:
        said: list[str] = []
        async with scripted.serving(answer) as server:
            usual = ("--base-url", server.url, "--disable-tqdm", "--input-len", "5", "--num-prompts", "4")
            return await benchmark(parse([*usual, *flags]), said.append), server, said

    return asyncio.run(whole())


async def good(request: scripted.Request, writer: asyncio.StreamWriter) -> None:
    """A server that lists a model and answers."""
    models = scripted.document({"data": [{"id": "the-model"}]})
    writer.write(models if request.method == "GET" else scripted.stream(scripted.chat("a", "b", "c")))


def test_the_first_model_of_the_server_is_asked() -> None:
    done, server, said = carried_out(good)
    assert done.figures["model_id"] == "the-model" and said == ["model: the-model"]
    assert {request.body["model"] for request in server.requests[1:]} == {"the-model"}
    assert (done.figures["completed"], done.figures["total_output_tokens"]) == (4, 12)


def test_a_named_model_is_not_looked_for() -> None:
    _, server, _ = carried_out(good, "--model", "mine")
    assert {request.body["model"] for request in server.requests} == {"mine"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (scripted.document({"data": []}), "lists no model"),
        (scripted.document([]), "lists no model"),
        (scripted.document({}, "404 Not Found"), "HTTP 404"),
    ],
)
def test_no_model_is_found(answer: bytes, error: str) -> None:
    with pytest.raises(BenchmarkError, match=error):
        carried_out(scripted.answering(answer))


def test_requests_may_call_the_model_by_another_name() -> None:
    done, server, _ = carried_out(good, "--model", "org/model", "--served-model-name", "short")
    assert {request.body["model"] for request in server.requests} == {"short"}
    assert done.figures["model_id"] == "org/model"
    assert carried_out(good, "--served-model-name", "short")[0].figures["model_id"] == "short"


def test_a_rate_that_grows() -> None:
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "500", "--ramp-up-end-rps", "1000")
    done, _, _ = carried_out(good, "--model", "m", *ramp)
    assert done.figures["completed"] == 4 and done.figures["request_rate"] == "inf"
    told = [done.figures[f"ramp_up_{key}"] for key in ("strategy", "start_rps", "end_rps")]
    assert told == ["linear", 500.0, 1000.0]


def test_it_waits_for_a_server_that_is_not_ready() -> None:
    async def answer(request: scripted.Request, writer: asyncio.StreamWriter) -> None:
        busy.append(request)
        writer.write(scripted.document({}, "503 Starting")) if len(busy) < 2 else await good(request, writer)

    busy: list[scripted.Request] = []
    done, _, said = carried_out(answer, "--ready-check-timeout-sec", "30")
    assert done.figures["completed"] == 4
    assert "HTTP 503 Starting" in said[0]


def test_warm_up_does_not_count() -> None:
    done, server, said = carried_out(good, "--num-warmups", "3", "--model", "m")
    assert len(server.requests) == 7 and done.figures["completed"] == 4
    assert said == ["warming up: 3 requests"]


def test_the_same_seed_asks_the_same() -> None:
    asked = [[request.body for request in carried_out(good, "--model", "m")[1].requests] for _ in range(2)]
    assert asked[0] == asked[1]


def test_an_answer_without_usage_is_counted_by_chunks() -> None:
    events = [event for event in scripted.chat("a", "b") if b'"usage"' not in event]
    done, _, _ = carried_out(scripted.answering(scripted.stream(events)), "--model", "m")
    assert done.figures["total_output_tokens"] == 8 and done.figures["total_input_tokens"] == 20
    assert done.figures["notes"][0].startswith("4 answers came without usage")


def test_an_answer_without_usage_is_counted_by_the_tokenizer(tmp_path: Path) -> None:
    events = [event for event in scripted.chat("abc", "d") if b'"usage"' not in event]
    answer, place = scripted.answering(scripted.stream(events)), make_tokenizer(tmp_path / "tokenizer")
    done, _, _ = carried_out(answer, "--model", "m", "--tokenizer", str(place))
    assert done.figures["total_output_tokens"] == 16
    assert done.figures["notes"][0].endswith("counted with --tokenizer")


def test_failures_do_not_count_but_are_told() -> None:
    refused = scripted.document({"message": "busy"}, "503 Busy")
    answer = scripted.answering(scripted.stream(scripted.chat("a")), refused)
    done, _, _ = carried_out(answer, "--model", "m", "--max-concurrency", "1")
    assert (done.figures["completed"], done.figures["failed"]) == (1, 3)
    assert done.figures["error_reasons"] == {"HTTP 503 Busy: busy": 3}
    assert done.figures["errors"] == ["", *["HTTP 503 Busy: busy"] * 3]


# ------------------------------------------------------------------------------------------------ a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that makes a token per 10 ms, of printable characters alone: each is a chunk."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    size = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    config = {"vocab_size": size, "special_token_ids": [*range(90, size)], "step_interval": 0.01}
    with serving(*replay_arguments(tokenizer, 1, **config)) as server:
        yield server


def command(server: Server, *flags: str) -> list[str]:
    lengths = ("--random-input-len", "8", "--random-output-len", "20")
    return [sys.executable, str(SCRIPT), "--backend", "openai-chat", "--base-url", server.url, *lengths, *flags]


def results_of(server: Server, directory: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The saved file, and the text."""
    more = ("--save-result", "--result-dir", str(directory), "--result-filename", "x.json", *flags)
    done = subprocess.run(command(server, *more), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((directory / "x.json").read_text()), done.stdout


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_a_server_on_the_replay_engine(server: Server, tmp_path: Path, backend: str) -> None:
    flags = ("--backend", backend, "--num-prompts", "24", "--max-concurrency", "8", "--goodput", "e2el:60000")
    figures, text = results_of(server, tmp_path, *flags)
    assert {*figures} >= KEYS and not {*figures} & {*DETAILS}
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (24, 0, 480)
    assert figures["max_open_requests"] == 8 <= figures["max_concurrent_requests"] <= 24
    assert figures["request_goodput"] == figures["request_throughput"]
    # Never faster than the engine: three answers one after another are 60 steps. A single one may be, for an engine
    # that was late makes up for it. How much slower is for the machine to say.
    assert figures["duration"] > 0.59
    assert figures["mean_e2el_ms"] == pytest.approx(figures["mean_ttft_ms"] + 19 * figures["mean_tpot_ms"])
    assert "Total generated tokens:" in text


def test_cpu_time_of_the_servers_processes(server: Server, tmp_path: Path) -> None:
    figures, text = results_of(server, tmp_path, "--num-prompts", "4")
    assert {row["pid"] for row in figures["server_processes"]} == {server.pid, server.executor(), *server.workers()}
    total = sum(row["cpu_seconds"] for row in figures["server_processes"])
    assert figures["server_cpu_seconds"] == pytest.approx(total)
    assert figures["client_cpu_us_per_output_token"] == pytest.approx(figures["client_cpu_seconds"] / 80 * 1e6)
    assert "executor.process" in text and "This client" in text


def test_what_each_request_came_to(server: Server, tmp_path: Path) -> None:
    figures, _ = results_of(server, tmp_path, "--num-prompts", "3", "--save-detailed")
    assert {*figures} >= OF_EACH
    assert figures["output_lens"] == [20, 20, 20] and figures["errors"] == ["", "", ""]
    assert [len(gaps) for gaps in figures["itls"]] == [19, 19, 19]


def test_all_requests_are_refused(server: Server) -> None:
    flags = ("--num-prompts", "2", "--extra-body", '{"nonsense": 1}')
    done = subprocess.run(command(server, *flags), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "2 x HTTP 400 Bad Request" in done.stdout and "nonsense" in done.stdout


def test_nobody_listens() -> None:
    flags = [sys.executable, str(SCRIPT), "--port", "1", "--num-prompts", "1"]
    done = subprocess.run(flags, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("bench_serving: http://127.0.0.1:1: GET /v1/models: cannot connect")


def test_ctrl_c_reports_what_has_come(tmp_path: Path) -> None:
    """Two short answers come, two long ones begin: then somebody has had enough."""
    rows = [{"prompt": "short", "output_tokens": 2}] * 2 + [{"prompt": "long", "output_tokens": 90}] * 2
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)))
    custom = ("--dataset-name", "custom", "--dataset-path", str(tmp_path / "rows"), "--disable-shuffle")

    async def whole() -> tuple[int | None, str]:
        begun: list[scripted.Request] = []

        async def answer(request: scripted.Request, writer: asyncio.StreamWriter) -> None:
            if request.body["max_tokens"] == 2:
                await good(request, writer)
                return
            begun.append(request)
            writer.write(scripted.HEAD + scripted.framed(scripted.delta(content="x")))
            if len(begun) == 2:
                process.send_signal(signal.SIGINT)
            await request.hung_up()

        async with scripted.serving(answer) as server:
            flags = ("--base-url", server.url, "--model", "m", "--num-prompts", "4", "--max-concurrency", "2", *custom)
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(SCRIPT), *flags, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            out, _ = await asyncio.wait_for(process.communicate(), 100)
            return process.returncode, out.decode()

    code, out = asyncio.run(whole())
    lines = {line.split(":")[0]: line.split()[-1] for line in out.splitlines() if ":" in line}
    assert (lines["Successful requests"], lines["Unfinished requests"]) == ("2", "2")
    assert code == 130


def test_it_is_a_command() -> None:
    assert os.access(SCRIPT, os.X_OK)
