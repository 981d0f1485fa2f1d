"""From recorded timestamps to figures, file, text and picture; and when requests are sent."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.bench import plot, report
from scripts.bench.arrivals import RampUp, offsets, ramp
from scripts.bench.options import METRICS, parse
from scripts.bench.outcome import Outcome
from scripts.bench.results import (
    DETAILS,
    concurrency,
    details,
    is_good,
    requests_per_second,
    results,
    statistics,
    tokens_per_second,
)


def outcome(start: float, chunks: Sequence[float], end: float | None = None, **fields: Any) -> Outcome:
    """A finished request; a token per chunk unless told otherwise."""
    last = end if end is not None else chunks[-1]
    given = {"input_tokens": 10, "output_tokens": len(chunks), "finished": True, **fields}
    return Outcome(start, chunks=array("d", chunks), end=last, **given)


FAST = outcome(0.0, [0.1, 0.2, 0.3], end=0.35, pieces=["a", "b", "c"])
SLOW = outcome(0.2, [1.0, 2.0], output_tokens=5, queued=0.2)
SINGLE = outcome(0.35, [0.5])
FAILED = outcome(0.0, [0.2], end=0.25, error="HTTP 500 Oops", output_tokens=None)
ALL = [FAST, SLOW, SINGLE, FAILED]

# ------------------------------------------------------------------------------------------------ one request


def test_latencies_of_a_request() -> None:
    assert FAST.ttft == pytest.approx(0.1)
    assert FAST.itls == pytest.approx([0.1, 0.1])
    assert FAST.latency == pytest.approx(0.35)
    assert FAST.tpot() == pytest.approx((0.35 - 0.1) / 2)
    assert SLOW.tpot() == pytest.approx(1.0 / 4), "by tokens, not by chunks"
    assert SINGLE.tpot() is None


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 101.0}, [True, False, False]),
        ({"tpot": 126.0}, [True, False, True]),
        ({"e2el": 1800.0}, [True, True, True]),
        ({"ttft": 900.0, "tpot": 126.0}, [True, False, True]),
        ({"e2el": 0.0}, [False, False, False]),
    ],
)
def test_a_request_is_good_within_all_objectives(goodput: dict[str, float], good: list[bool]) -> None:
    assert [is_good(one, goodput) for one in (FAST, SLOW, SINGLE)] == good


# ------------------------------------------------------------------------------------------------ all of them


def test_statistics() -> None:
    figures = statistics("ttft", [0.1, 0.2, 0.6], (50.0, 99.0, 99.9))
    assert figures == {
        "mean_ttft_ms": pytest.approx(300.0),
        "median_ttft_ms": pytest.approx(200.0),
        "std_ttft_ms": pytest.approx(math.sqrt((200**2 + 100**2 + 300**2) / 3)),
        "p50_ttft_ms": pytest.approx(200.0),
        "p99_ttft_ms": pytest.approx(592.0),
        "p99.9_ttft_ms": pytest.approx(599.2),
    }
    assert set(statistics("itl", [], (99.0,)).values()) == {0.0}


def test_figures_of_a_run() -> None:
    figures = results(ALL, 2.5, {"ttft": 200.0}, METRICS, (99.0,))
    assert figures["completed"] == 3 and figures["failed"] == 1
    assert (figures["total_input_tokens"], figures["total_output_tokens"], figures["total_chunks"]) == (30, 9, 6)
    assert figures["request_throughput"] == pytest.approx(3 / 2.5)
    assert figures["output_throughput"] == pytest.approx(9 / 2.5)
    assert figures["total_token_throughput"] == pytest.approx(39 / 2.5)
    assert figures["request_goodput"] == pytest.approx(2 / 2.5)
    assert figures["mean_ttft_ms"] == pytest.approx((100 + 800 + 150) / 3)
    assert figures["mean_tpot_ms"] == pytest.approx((125 + 250) / 2), "a single token has none"
    assert figures["mean_itl_ms"] == pytest.approx((100 + 100 + 1000) / 3)
    assert figures["median_e2el_ms"] == pytest.approx(350)
    assert figures["error_reasons"] == {"HTTP 500 Oops": 1}


def test_only_metrics_that_are_asked_for() -> None:
    figures = results(ALL, 2.5, {}, ("itl",), (25.0, 50.0))
    assert {key for key in figures if key.endswith("_ms")} == {
        f"{word}_itl_ms" for word in ("mean", "median", "std", "p25", "p50")
    }
    assert figures["request_goodput"] is None


def test_the_wait_for_a_turn_is_told_on_demand() -> None:
    asked = parse(["--percentile-metrics", "client_queue_time,e2el_including_client_queue"]).percentile_metrics
    figures = results(ALL, 2.5, {}, asked, ())
    assert figures["mean_client_queue_time_ms"] == pytest.approx(200 / 3)
    assert figures["mean_e2el_including_client_queue_ms"] == pytest.approx((350 + 1800 + 150 + 200) / 3)
    text = report.text(figures_of(ALL, "--percentile-metrics", ",".join(asked)))
    assert "Mean CLIENT QUEUE TIME (ms):" in text and "Queue-inclusive End-to-end Latency" in text
    assert "TTFT" not in text and "mean_client_queue_time_ms" not in figures_of(ALL)


def test_a_run_of_nothing() -> None:
    figures = results([], 0.0, {"ttft": 1.0}, METRICS, (99.0,))
    assert figures["request_throughput"] == figures["request_goodput"] == figures["max_concurrent_requests"] == 0
    assert figures["max_open_requests"] == 0
    assert details([]) == {name: [] for name in DETAILS}


def test_peaks() -> None:
    assert concurrency([FAST, SINGLE]) == [(0.0, 1), (0.35, 0), (0.35, 1), (0.5, 0)], "one ends as the other starts"
    assert results(ALL, 2.5, {}, (), ())["max_open_requests"] == 3
    # SLOW is open until 2.0: in each of three seconds; the failed request does not count.
    assert requests_per_second(ALL) == [3, 1, 1]
    assert results(ALL, 2.5, {}, (), ())["max_concurrent_requests"] == 3
    assert requests_per_second([outcome(0.25, [0.5]), outcome(0.5, [0.75])]) == [2], "both, though one after the other"
    # SLOW's five tokens came in two chunks, in the seconds from 1.0 and from 2.0 on.
    assert tokens_per_second(ALL) == [4.0, 2.5, 2.5]
    assert results(ALL, 2.5, {}, (), ())["max_output_tokens_per_s"] == 4.0


def test_details_are_of_each_request() -> None:
    rows = details(ALL)
    assert tuple(rows) == DETAILS
    assert {len(column) for column in rows.values()} == {4}
    assert rows["output_lens"] == [3, 5, 1, 0]
    assert rows["input_lens"] == [10, 10, 10, 10]
    assert rows["errors"] == ["", "", "", "HTTP 500 Oops"]
    assert rows["generated_texts"][0] == "abc"
    assert rows["queue_times"] == [0.0, 0.2, 0.0, 0.0]
    assert rows["ttfts"] == pytest.approx([0.1, 0.8, 0.15, 0.0])
    assert rows["itls"][0] == pytest.approx([0.1, 0.1]) and rows["itls"][3] == []
    json.dumps(rows)


# ------------------------------------------------------------------------------------------------ arrivals


def gaps(count: int, rate: float, burstiness: float, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.diff([0.0, *offsets(count, rate, burstiness, np.random.RandomState(seed))])


def test_all_at_once() -> None:
    assert offsets(3, math.inf, 1.0, np.random.RandomState(0)) == [0.0] * 3
    assert offsets(0, 5.0, 1.0, np.random.RandomState(0)) == []


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_shape(burstiness: float) -> None:
    drawn = gaps(20_000, 50.0, burstiness)
    assert drawn.mean() == pytest.approx(1 / 50), "exactly, whatever was drawn"
    # A gamma distribution's deviation is its mean / sqrt(shape), its skewness 2 / sqrt(shape).
    assert drawn.std() / drawn.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)
    skewness = (((drawn - drawn.mean()) / drawn.std()) ** 3).mean()
    assert skewness == pytest.approx(2 / math.sqrt(burstiness), rel=0.1)
    assert (drawn >= 0).all()


def test_a_poisson_process_has_as_many_arrivals_in_a_second_as_it_should() -> None:
    at = offsets(20_000, 20.0, 1.0, np.random.RandomState(1))
    counts = np.bincount(np.array(at).astype(int))
    assert counts.var() / counts.mean() == pytest.approx(1.0, rel=0.1)


def test_infinite_burstiness_is_a_beat() -> None:
    assert gaps(10, 4.0, math.inf) == pytest.approx([0.25] * 10)


@pytest.mark.parametrize(
    ("strategy", "expected"), [("linear", [1, 1 / 2.5, 1 / 4, 1 / 5.5, 1 / 7]), ("exponential", [1, 1 / 7**0.25])]
)
def test_gaps_of_a_rate_that_grows(strategy: str, expected: list[float]) -> None:
    at = ramp(5, RampUp(strategy, 1.0, 7.0), math.inf, np.random.RandomState(0))
    grown = np.diff([0.0, *at])
    assert grown[: len(expected)] == pytest.approx(expected) and grown[-1] == pytest.approx(1 / 7)
    assert ramp(1, RampUp(strategy, 2.0, 2.0), math.inf, np.random.RandomState(0)) == [0.5]


def test_a_rate_that_grows_has_gaps_of_the_given_shape() -> None:
    up = RampUp("linear", 10.0, 30.0)
    grown = np.diff([0.0, *ramp(20_000, up, 4.0, np.random.RandomState(0))]) * np.linspace(10, 30, 20_000)
    assert (grown.mean(), grown.std()) == (pytest.approx(1.0, rel=0.02), pytest.approx(0.5, rel=0.03))


def test_the_seed_decides() -> None:
    assert (gaps(100, 4.0, 0.5, seed=1) == gaps(100, 4.0, 0.5, seed=1)).all()
    assert (gaps(100, 4.0, 0.5, seed=1) != gaps(100, 4.0, 0.5, seed=2)).all()


def test_the_same_seed_sends_when_vllm_bench_serve_does() -> None:
    """Its arithmetic: a draw per request from NumPy's global generator, added up, then stretched to count / rate."""
    rng = np.random.RandomState(7)
    at = np.cumsum([rng.gamma(shape=0.5, scale=1.0 / (4.0 * 0.5)) for _ in range(20)])
    assert offsets(20, 4.0, 0.5, np.random.RandomState(7)) == pytest.approx(at * (20 / 4.0 / at[-1]))


def test_a_shape_so_small_that_nothing_but_zeros_is_drawn() -> None:
    assert offsets(3, 4.0, 1e-9, np.random.RandomState(0))[-1] in (0.0, pytest.approx(0.75))


# ------------------------------------------------------------------------------------------------ the report

CPU: dict[str, Any] = {
    "server_processes": [{"pid": 7, "name": "server", "cpu_seconds": 0.5, "cpu_us_per_output_token": 50.0}],
    "server_cpu_seconds": 0.5,
    "server_cpu_us_per_output_token": 50.0,
    "client_cpu_seconds": 0.1,
    "client_cpu_us_per_output_token": 10.0,
    "unfinished": 2,
    "notes": ["a note"],
}
NO_SERVER = {"server_processes": None, "server_cpu_seconds": None, "server_cpu_us_per_output_token": None}


def figures_of(outcomes: Sequence[Outcome], *flags: str, **more: Any) -> dict[str, Any]:
    options = parse(flags)
    found = results(outcomes, 2.5, options.goodput, options.percentile_metrics, options.metric_percentiles)
    return report.settings(options, "org/model", "20260101-000000") | found | CPU | more


def test_the_text_says_what_the_figures_are() -> None:
    flags = ("--goodput", "ttft:200", "--max-concurrency", "3", "--metric-percentiles", "90,99.9")
    text = report.text(figures_of(ALL, *flags))
    lines = {line.partition(":")[0]: line.split()[-1] for line in text.splitlines()}
    assert lines["Successful requests"] == "3" and lines["Failed requests"] == "1"
    assert lines["Unfinished requests"] == "2"
    assert lines["Request goodput (req/s)"] == "0.80"
    assert lines["Output token throughput (tok/s)"] == "3.60"
    assert lines["Mean TTFT (ms)"] == "350.00"
    assert {"P90 ITL (ms)", "P99.9 ITL (ms)"} <= {*lines}
    assert "Request rate configured (RPS)" not in lines, "it is not limited"


def test_the_text_says_who_used_the_cpu_and_what_failed() -> None:
    text = report.text(figures_of(ALL))
    assert text.index("server [7]") < text.index("This client") < text.index("1 x HTTP 500 Oops") < text.index("a note")


def test_the_text_of_a_run_that_failed() -> None:
    reasons = [outcome(0.0, [], end=1.0, error=f"reason {number}") for number in range(12)]
    text = report.text(figures_of(reasons, client_cpu_us_per_output_token=None, **NO_SERVER))
    assert "TTFT" not in text
    assert "... and 2 other reasons" in text


def test_the_name_of_the_file() -> None:
    def name(*flags: str) -> str:
        return str(report.file_of(parse(flags), "org/model", "20260101-000000"))

    assert name() == "openai-infqps-model-20260101-000000.json"
    assert name("--label", "mine", "--request-rate", "2", "--max-concurrency", "8", "--result-dir", "d") == (
        "d/mine-2.0qps-concurrency8-model-20260101-000000.json"
    )
    assert name("--result-filename", "x.json") == "x.json"
    ramp_up = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9.5")
    assert name(*ramp_up) == "openai-ramp-up-linear-1qps-9.5qps-model-20260101-000000.json"


def test_the_file_is_json_without_infinities(tmp_path: Path) -> None:
    flags = ("--metadata", "version=1", "tp=2", "--burstiness", "inf")
    report.save(figures_of(ALL, *flags), tmp_path / "new" / "x.json")
    saved = json.loads((tmp_path / "new" / "x.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (saved["request_rate"], saved["burstiness"], saved["version"], saved["tp"]) == ("inf", "inf", "1", "2")


def test_a_result_is_added_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for number in range(3):
        report.save({"n": number}, file, append=number > 0)
    assert [json.loads(line)["n"] for line in file.read_text().split("\n")] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ the picture


@pytest.mark.parametrize("outcomes", [ALL, [FAILED], []])
def test_a_picture(tmp_path: Path, outcomes: list[Outcome]) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(outcomes, figures_of(outcomes), tmp_path / "new" / "out.png")
    assert (tmp_path / "new" / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plot.PlotError, match="--plot needs matplotlib"):
        plot.require_matplotlib()
