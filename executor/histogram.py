"""How long something took, counted by size: for what happens so often that it must cost next to nothing.

An observation is a search among a dozen numbers. Nobody is asked to look while it runs: whoever reports says now and
then what has been counted so far (``report``), and /metrics shows that as a Prometheus histogram.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

#: Seconds: the largest of each bucket but the last, which has the rest. From a tenth of a millisecond to ten seconds.
BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: The same for what the executor's loop adds to an engine step, which has to be far less than a step.
STEP_BOUNDS = (2e-5, 5e-5, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)


class Histogram:
    """Counts since start. counts: observations by bucket, not cumulated. total: seconds of all together."""

    __slots__ = ("counts", "total", "_bounds")

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one. A clock that somebody else has read may be ahead of ours: less than nothing is nothing."""
        seconds = max(seconds, 0.0)
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def report(self) -> list[float]:
        """``total``, then ``counts``."""
        return [self.total, *self.counts]


def is_report(value: Any) -> bool:
    """Whether a value that came over a wire is what ``report`` gives."""
    if not isinstance(value, list) or len(value) - 2 not in (len(BOUNDS), len(STEP_BOUNDS)):
        return False
    total, *counts = value
    return type(total) is float and 0 <= total < math.inf and all(type(n) is int and n >= 0 for n in counts)
