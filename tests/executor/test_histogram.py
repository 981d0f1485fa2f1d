"""Buckets of durations, and their way through a report of plain numbers."""

from __future__ import annotations

from executor.histogram import STEP_BOUNDS, Histogram, reported


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((0.1, 0.2))
    for seconds in (0.1, 0.15, 0.2, 0.3, 9.0):
        histogram.observe(seconds)
    assert histogram.report("x") == {"x_le_0.1": 1, "x_le_0.2": 3, "x_le_+Inf": 5, "x_sum": 9.75}


def test_it_is_found_again_among_other_numbers() -> None:
    histogram = Histogram(STEP_BOUNDS)
    histogram.observe(0.00012)
    found = reported("step", {"tokens": 7, "steps": 3, **histogram.report("step")})
    assert found is not None
    buckets, total = found
    assert [float(bound) for bound, _ in buckets] == [*STEP_BOUNDS, float("inf")]
    assert [count for _, count in buckets] == [0, 0, 0, *[1] * 10]
    assert total == 0.00012


def test_a_report_without_it() -> None:
    assert reported("step", {"tokens": 7, "step_sum": 1.0}) is None
