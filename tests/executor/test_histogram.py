"""Histograms of seconds: which bucket an observation is in, and what is taken for a report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.histogram import BOUNDS, STEP_BOUNDS, Histogram, is_report


def test_the_bounds_go_up_from_a_tenth_of_a_millisecond_to_ten_seconds() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS)) and (BOUNDS[0], BOUNDS[-1]) == (0.0001, 10.0)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(-5.0, 0), (0.0, 0), (0.0001, 0), (0.00011, 1), (0.001, 3), (10.0, 15), (10.1, 16), (1e9, 16)],
)
def test_a_bucket_includes_its_bound(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.counts == [int(place == bucket) for place in range(len(BOUNDS) + 1)]
    assert histogram.total == max(seconds, 0)


@given(st.lists(st.floats(0, 100)))
def test_every_observation_is_in_one_bucket(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    total, *counts = histogram.report()
    assert is_report(histogram.report()) and total == pytest.approx(sum(values))
    for number, bound in enumerate(BOUNDS, 1):
        assert sum(counts[:number]) == sum(value <= bound for value in values)
    assert sum(counts) == len(values)


def test_other_bounds() -> None:
    histogram = Histogram((0.1, 0.2))
    for seconds in (0.1, 0.15, 0.2, 0.3, 9.0):
        histogram.observe(seconds)
    assert histogram.report() == [9.75, 1, 2, 2]
    assert is_report(Histogram(STEP_BOUNDS).report())
    assert list(STEP_BOUNDS) == sorted(set(STEP_BOUNDS)) and 0.0002 in STEP_BOUNDS


@pytest.mark.parametrize("value", [None, 1.0, (), {}, "x", [], [0.0], [0.0] * 18, [0.0, *[1] * 16]])
def test_what_is_no_report(value: object) -> None:
    assert not is_report(value)
