"""Cores for a load: costs that made measurements are found again in them, and the command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.capacity import HEADROOM, KINDS, CapacityError, Cost, Costs, Load, fit, workers_for
from scripts.capacity import main

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "capacity.py"
TRUE = {
    "front end": Cost({1: 9.0, 8: 2.0}, 40.0),
    "worker": Cost({1: 2.0, 8: 5.0}, 0.0),
    "executor": Cost({1: 0.5, 8: 0.5}, 90.0, once=True),
}
COSTS = Costs(TRUE, 200.0, 50.0)
POINTS = [(n, w, q) for n in (16, 64, 256) for w in (1, 2) for q in (1, 8)]


def line(streams: int, workers: int, stream_interval: int, **more: Any) -> dict[str, Any]:
    """A measurement of a system that costs exactly this, at 50 steps a second."""
    load = Load(50.0 * streams, streams, stream_interval)
    cores = COSTS.cores(load, workers)
    return {
        "mode": "paced", "frontends": 1, "concurrency": streams, "workers": workers, "steps_per_second": 50.0,
        "tokens_per_second": load.tokens_per_second, "stream_interval": stream_interval, "idle_mib": 200.0,
        "kib_per_stream": 50.0, **{key: 1e6 * cores[kind] / load.tokens_per_second for kind, key in KINDS.items()},
    } | more  # fmt: skip


def test_costs_are_found_again() -> None:
    found = fit([line(*point) for point in POINTS])
    for kind, cost in TRUE.items():
        assert found.kinds[kind].token == pytest.approx(cost.token)
        assert found.kinds[kind].frame == pytest.approx(cost.frame, abs=1e-6)
    assert (found.idle_mib, found.kib_per_stream) == (200.0, 50.0)


def test_other_measurements_do_not_count() -> None:
    """A saturated server joins messages, and nobody knows how many there were."""
    wild = {"front_end": 1e4, "worker": 1e4, "shipping": 1e4}
    others = [line(16, 1, 9, mode="saturated", **wild), line(16, 1, 1, frontends=2, **wild), line(16, 0, 1, **wild)]
    found = fit([*(line(*point) for point in POINTS), *others])
    assert found.kinds["front end"].token == pytest.approx(TRUE["front end"].token)


def test_no_cost_is_negative() -> None:
    """Noise would have it that messages earn something."""
    lines = [line(*point) for point in POINTS]
    for one in lines:
        one["worker"] *= 0.5 if one["concurrency"] == 16 else 1.0
    found = fit(lines).kinds["worker"]
    assert found.frame == 0.0 and min(found.token.values()) > 0.0


@pytest.mark.parametrize(
    "points",
    [[], [(16, 1, 1)], [(16, 1, 1), (16, 1, 1), (16, 1, 1)], [(16, 1, 1), (16, 1, 8)]],
)
def test_measurements_that_are_too_few_or_alike(points: list[tuple[int, int, int]]) -> None:
    with pytest.raises(CapacityError, match="several --concurrency"):
        fit([line(*point) for point in points])


def test_cores_of_a_load() -> None:
    cores = COSTS.cores(Load(10_000, 100), workers=3)
    assert cores["front end"] == pytest.approx((9 * 10_000 + 40 * 300) / 1e6)
    assert cores["worker"] == pytest.approx(0.02)
    assert cores["executor"] == pytest.approx((0.5 * 10_000 + 90 * 100) / 1e6), "a step is one turn of its loop"
    assert COSTS.memory_mib(Load(1, 1024)) == 250.0


@pytest.mark.parametrize(("tokens_per_event", "cost"), [(1, 9.0), (8, 2.0), (16 / 9, 5.5), (100, 2.0)])
def test_coalescing_between_measured_ones_is_linear_in_events(tokens_per_event: float, cost: float) -> None:
    assert TRUE["front end"].of_token(tokens_per_event) == pytest.approx(cost)


def test_workers_are_added_until_none_is_too_busy() -> None:
    load = Load(1_000_000, 1000)
    workers = workers_for(COSTS, load)
    assert workers == 3
    assert COSTS.cores(load, 3)["worker"] / 3 <= HEADROOM < COSTS.cores(load, 2)["worker"] / 2


def test_a_load_that_workers_do_not_share() -> None:
    """One stream: each of its tokens is a message to every worker."""
    costly = Costs({**TRUE, "worker": Cost({1: 1.0}, 100_000.0)}, 1.0, 1.0)
    with pytest.raises(CapacityError, match="tokens_per_second: not even 64 workers"):
        workers_for(costly, Load(10, 1))


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "costs.json").write_text(json.dumps({"cores": 2, "costs": [line(*point) for point in POINTS]}))
    return tmp_path / "costs.json"


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--tokens_per_second", "10000", "--streams", "100", "--workers", "3"]) == 0
    rows = {row.partition("  ")[0].strip(): row.split()[-4:] for row in capsys.readouterr().out.splitlines()}
    assert rows["front end"] == ["9.00", "40.00", "0.10", "1"]
    assert rows["worker"] == ["2.00", "0.00", "0.02", "3"]
    assert rows["executor"] == ["0.50", "90.00", "0.01", "1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not what bench_frontend.py --json prints"),
        ("[]", "not what bench_frontend.py --json prints"),
        ('{"costs": [{"mode": "paced"}]}', "costs: not of bench_frontend.py"),
        ('{"costs": []}', "several --concurrency"),
    ],
)
def test_a_file_that_does_not_do(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    assert main([str(path), "--tokens_per_second", "1", "--streams", "1"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--streams", "0"], "--streams: 0 is not more than 0"),
        (["--tokens_per_event", "0.5"], "--tokens_per_event: 0.5 is not at least 1"),
        (["--workers", "0"], "--workers: 0 is not at least 1"),
    ],
)
def test_wrong_flags(file: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(file), "--tokens_per_second", "1", "--streams", "1", *flags])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_it_is_a_command_as_the_others_are() -> None:
    assert os.access(SCRIPT, os.X_OK)
