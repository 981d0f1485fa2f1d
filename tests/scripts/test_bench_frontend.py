"""What bench_frontend measures, from samples of a test's own making, and the command on a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import pace, step_lag
from scripts.bench.costs import Cost, Sample, Setting, cost, curves, text
from scripts.bench.cpu import Process
from scripts.bench.drain import Clients
from scripts.bench.stack import kind_of, stage_of
from scripts.bench_frontend import SWEEP, parse, settings
from tests.process.server import make_tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_frontend.py"
INFINITY = float("inf")


# ------------------------------------------------------------------------------------------------ flags


def test_every_combination_is_measured() -> None:
    options = parse(["--concurrency", "16,64", "--workers", "1,2", "--num_serve_frontends", "1,3"])
    found = [(one.concurrency, one.workers, one.frontends) for one in settings(options)]
    assert found[:3] == [(16, 1, 1), (64, 1, 1), (16, 1, 3)]
    assert len({*found}) == len(found) == 8


def test_what_was_there_before() -> None:
    assert [one.concurrency for one in settings(parse([]))] == [256]
    assert tuple(one.concurrency for one in settings(parse(["--sweep"]))) == SWEEP
    assert (parse([]).interval, parse(["--step_lag"]).interval) == (0.02, 0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "16,0"], "--concurrency: 0 is not at least 1"),
        (["--workers", "1,x"], "--workers: invalid list of numbers value: '1,x'"),
        (["--num_serve_frontends", "0"], "--num_serve_frontends: 0 is not at least 1"),
        (["--modes", "paced,fast"], "--modes: no such mode: fast"),
        (["--sweep", "--concurrency", "1"], "--sweep: not with --concurrency"),
        (["--step_lag", "--plot", "x.png"], "--plot: not with --step_lag"),
    ],
)
def test_a_wrong_command_line_names_the_flag(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_server_is_told_only_what_is_not_its_default() -> None:
    assert Setting(16).flags() == ["--num_postprocess_workers", "1"]
    several = Setting(16, workers=2, frontends=3, stream_interval=8).flags()
    assert several == ["--num_postprocess_workers", "2", "--num_serve_frontends", "3", "--stream_interval", "8"]


# ------------------------------------------------------------------------------------------------ processes and stages


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("serve.cli", "front end"),
        ("serve.frontend_process", "front end"),
        ("postproc_workers.process", "worker"),
        ("executor.process", "executor"),
    ],
)
def test_kinds_of_processes(name: str, kind: str) -> None:
    assert kind_of(Process(7, 1, 1, 1, 0.0, name)) == kind


@pytest.mark.parametrize(
    ("thread", "name", "stage"),
    [(7, "python", "main"), (8, "ZMQbg/IO/0", "zeromq"), (9, "ZMQbg/Reaper", "zeromq"), (10, "python", "other")],
)
def test_stages(thread: int, name: str, stage: str) -> None:
    assert stage_of(7, thread, name) == stage


# ------------------------------------------------------------------------------------------------ costs


def sample(time: float, tokens: float, seconds: float, events: int) -> Sample:
    """A server all of whose processes and stages have used so many seconds."""
    kinds = ("front end", "worker", "executor")
    metrics = {
        "tailrace_executor_tokens_total": tokens, "tailrace_executor_steps_total": tokens / 10,
        "tailrace_executor_shipping_seconds_total": seconds / 4,
        "tailrace_chunk_lag_seconds_count": tokens, "tailrace_chunk_lag_seconds_sum": tokens / 100,
    }  # fmt: skip
    stages = {kind: {"main": seconds * 0.75, "zeromq": seconds * 0.25, "other": 0.0} for kind in kinds}
    return Sample(metrics, dict.fromkeys(kinds, seconds), stages, (240 * events, events), time)


def measured(**setting: Any) -> Cost:
    begin, end = sample(10.0, 1000, 1.0, 500), sample(12.0, 3000, 1.02, 1500)
    return cost(Setting(16, **setting), begin, end, 100 << 20, 16 << 14)


def test_what_grew_per_token() -> None:
    found = measured()
    assert (found.tokens_per_second, found.steps_per_second) == (1000, 100)
    assert (found.tokens_per_event, found.bytes_per_event) == (2.0, 240.0)
    assert (found.front_end, found.worker) == (pytest.approx(10), pytest.approx(10))
    assert (found.shipping, found.engine) == (pytest.approx(2.5), pytest.approx(7.5))
    assert found.total == pytest.approx(22.5)
    assert found.stages["worker"] == {"main": pytest.approx(7.5), "zeromq": pytest.approx(2.5), "other": 0.0}
    assert found.chunk_lag_ms == pytest.approx(10)
    assert (found.idle_mib, found.kib_per_stream) == (100, 16)


def test_a_line_of_json_has_setting_and_costs() -> None:
    line = measured(workers=2, frontends=3, mode="saturated").line()
    assert (line["concurrency"], line["workers"], line["frontends"], line["mode"]) == (16, 2, 3, "saturated")
    assert line["total"] == pytest.approx(22.5)
    json.dumps(line)


def test_curves_are_by_server_and_ascend() -> None:
    lines = [Setting(streams, workers) for workers in (1, 2) for streams in (64, 16)]
    found = curves([{**measured().line(), "concurrency": one.concurrency, "workers": one.workers} for one in lines])
    assert [[line["concurrency"] for line in points] for points in found.values()] == [[16, 64], [16, 64]]


def test_a_table_without_floors() -> None:
    shown = text([measured().line()])
    assert "paced" in shown and "front end: main 7.50 zeromq 2.50" in shown


# ------------------------------------------------------------------------------------------------ step lag


def test_quantiles_are_interpolated() -> None:
    counts = [(1.0, 0.0), (2.0, 50.0), (4.0, 100.0), (INFINITY, 100.0)]
    assert step_lag.quantile(counts, 0.5) == 2.0
    assert step_lag.quantile(counts, 0.25) == 1.5
    assert step_lag.quantile(counts, 0.99) == pytest.approx(3.96)


def test_above_the_last_bound_the_bound_is_told() -> None:
    assert step_lag.quantile([(1.0, 10.0), (INFINITY, 100.0)], 0.99) == 1.0
    assert step_lag.quantile([(1.0, 0.0), (INFINITY, 0.0)], 0.99) == 0.0
    assert step_lag.quantile([], 0.5) == 0.0


def test_buckets_of_an_exposition() -> None:
    name = step_lag.METRIC
    before = {f'{name}_bucket{{le="0.1"}}': 3.0, f'{name}_bucket{{le="+Inf"}}': 4.0, f"{name}_bucket": 7.0}
    after = {f'{name}_bucket{{le="0.1"}}': 5.0, f'{name}_bucket{{le="+Inf"}}': 9.0, f"{name}_sum": 1.0}
    found = step_lag.between(step_lag.buckets(before), step_lag.buckets(after))
    assert found == [(0.1, 2.0), (INFINITY, 5.0)]


def test_percentiles_of_the_bare_loop() -> None:
    assert pace.percentiles([n / 1e6 for n in range(200)]) == {"p50": pytest.approx(100), "p99": pytest.approx(198)}
    assert pace.percentiles([]) == {"p50": 0.0, "p99": 0.0}


# ------------------------------------------------------------------------------------------------ a real server


def carried_out(tmp_path: Path, *more: str) -> Any:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    command = [sys.executable, str(SCRIPT), "--tokenizer", str(tokenizer), "--seconds", "1", "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_costs_of_a_server(tmp_path: Path) -> None:
    found = carried_out(tmp_path, "--concurrency", "8", "--no_floor", "--modes", "paced", "--interval", "0.01")
    (line,) = found["costs"]
    assert (line["concurrency"], line["mode"], found["cores"]) == (8, "paced", os.cpu_count())
    assert line["tokens_per_second"] <= 8 * 100 * 1.2
    # A step that the loop was late for comes with the next one, and they count as one.
    assert line["tokens_per_second"] > 7.9 * line["steps_per_second"] > 0
    assert line["total"] == pytest.approx(line["front_end"] + line["worker"] + line["shipping"])
    assert line["stages"]["front end"]["main"] > 0 and line["stages"]["worker"]["zeromq"] > 0
    assert "floor" not in line


def test_step_lag_of_a_server(tmp_path: Path) -> None:
    (found,) = carried_out(tmp_path, "--step_lag", "--concurrency", "8")
    assert found["steps"] > 10
    assert 0 < found["p50"] <= found["p99"]
    assert found["buckets"][-1][1] <= found["steps"]
    assert found["bare"]["late"]["p99"] >= found["bare"]["late"]["p50"] >= 0


# ------------------------------------------------------------------------------------------------ the clients


def test_clients_count_what_they_take() -> None:
    """Also of those who are there while others still connect; the end of one is not the end of the others."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        clients, served = Clients(), []
        for number in range(3):
            clients.connect(host, port, b"GET / HTTP/1.1\r\n\r\n")
            served.append(listener.accept()[0])
            assert served[-1].recv(100) == b"GET / HTTP/1.1\r\n\r\n"
            served[0].sendall(b"data: 1\n\n")
            assert not clients.take(10) and (clients.events, clients.begun) == (number + 1, 1)
        served[0].close()
        for one in served[1:]:
            one.sendall(b"data: 2\n\ndata: 3\n\n")
        while clients.begun < 3:
            assert not clients.take(10)
        assert (clients.bytes, clients.events) == (7 * 9, 7)
        ours, theirs = socket.socketpair()
        clients.watch(ours.fileno())
        theirs.send(b"\n")
        while not clients.take(10):
            pass
        for left in (*served, ours, theirs):
            left.close()
