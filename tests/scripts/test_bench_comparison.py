"""Figures of systems that did the same work, and ratios between them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from scripts.bench.comparison import MEASURES, Round, figures, ratio, ratios, text
from scripts.bench.outcome import Outcome
from scripts.bench.outside import Reading


def outcome(start: float, chunks: list[float], tokens: int, error: str = "") -> Outcome:
    """Of a request whose answer ended with its last chunk."""
    return Outcome(start, 0.0, array("d", chunks), chunks[-1], 5, tokens, [], error, True)


ANSWERS = (outcome(0.0, [0.1, 0.3], 5), outcome(1.0, [1.3, 1.7], 5))


def test_rounds_are_taken_together() -> None:
    """10 tokens in a second, then 20 in 2 s, not the mean of two rates."""
    rounds = [
        Round(1.0, ANSWERS, Reading(0.5, 0.00125), 0.00025),
        Round(2.0, [*ANSWERS, *ANSWERS], Reading(1.0, 0.00175), 0.00025),
    ]
    found = figures(rounds)
    assert found["tokens_per_second"] == 10.0
    assert (found["requests"], found["failed"], found["tokens"], found["chunks"]) == (6, 0, 30, 12)
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["median_tpot_ms"] == pytest.approx(75)
    assert found["cpu_us_per_token"] == pytest.approx(50_000)
    assert found["outside_us_per_token"] == pytest.approx(100)
    assert found["busy_us_per_token"] == pytest.approx((3000 - 3 * 250) / 30)
    assert found["idle_ms_per_second"] == 0.25


def test_cpu_that_is_not_seen_is_not_known() -> None:
    found = figures([Round(1.0, ANSWERS, Reading(1.0, None), None), Round(1.0, ANSWERS, None, None)])
    keys = ("cpu_us_per_token", "outside_us_per_token", "busy_us_per_token", "idle_ms_per_second")
    assert [found[key] for key in keys] == [None] * 4


def test_failures_are_counted_and_their_tokens_are_not() -> None:
    found = figures([Round(1.0, [ANSWERS[0], outcome(0.0, [0.1], 99, "HTTP 500")], None, None)])
    assert (found["failed"], found["tokens"], found["error_reasons"]) == (1, 5, {"HTTP 500": 1})


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "expected"),
    [
        (200.0, 100.0, True, 2.0),
        (10.0, 50.0, False, 5.0),
        (50.0, 10.0, False, 0.2),
        (None, 10.0, False, None),
        (10.0, None, True, None),
        (0.0, 10.0, False, None),
        (-1.0, 10.0, False, None),
    ],
)
def test_more_than_one_is_better(ours: float | None, theirs: float | None, more: bool, expected: float | None) -> None:
    assert ratio(ours, theirs, more) == expected


def line(**values: float | None) -> dict[str, Any]:
    return {**dict.fromkeys(MEASURES, 1.0), **values}


def test_ratios_are_of_rounds() -> None:
    """In the second round the machine was ten times slower for both: that is no spread."""
    ours = [line(tokens_per_second=100.0), line(tokens_per_second=10.0, mean_ttft_ms=2.0)]
    theirs = [line(tokens_per_second=50.0), line(tokens_per_second=5.0, mean_ttft_ms=8.0)]
    found = ratios(ours, theirs)
    assert found["tokens_per_second"] == pytest.approx((2.0, 2.0, 2.0))
    assert found["mean_ttft_ms"] == pytest.approx((2.0, 1.0, 4.0))


def test_a_ratio_that_a_round_lacks_is_not_known() -> None:
    found = ratios([line(), line()], [line(), line(outside_us_per_token=None)])
    assert found["outside_us_per_token"] is None and found["cpu_us_per_token"] == (1.0, 1.0, 1.0)


def test_a_table_names_every_measure_once() -> None:
    extra = {"idle_ms_per_second": None, "requests": 4, "failed": 0, "tokens": 9, "chunks": 9}
    shown = text({"ours": line() | extra, "peer": line() | extra}, {"peer": ratios([line()], [line()])})
    for heading, _ in MEASURES.values():
        assert sum(row.startswith(f"{heading}  ") for row in shown.splitlines()) == 1
    assert "ratio to peer" in shown and "1.00 (1.00..1.00)" in shown
