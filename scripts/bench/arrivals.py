"""When requests are sent.

The gaps between requests come from a gamma distribution with the given mean and shape (*burstiness*); shape 1 is the
exponential distribution, so that arrivals are a Poisson process. They are scaled to last exactly count / rate seconds,
as ``vllm bench serve`` does: a sum of random gaps is off by 1/sqrt(count), which would go straight into every
throughput that one compares between seeds. The generator is that program's too, NumPy's old one, so that the same seed
sends at the same times from here and from there: near a server's limit, other times are another result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

RAMPS = ("linear", "exponential")


@dataclass(frozen=True, slots=True)
class RampUp:
    """A growing rate: one of RAMPS, from ``start_rps`` to ``end_rps`` requests per second, both above 0."""

    strategy: str
    start_rps: float
    end_rps: float


def offsets(count: int, rate: float, burstiness: float, rng: np.random.RandomState) -> list[float]:
    """Seconds from the start of the run to each of ``count`` requests, ascending.

    rate: requests per second; ``inf``: all at 0.
    burstiness: shape > 0; ``inf``: equal gaps.
    """
    if math.isinf(rate) or not count:
        return [0.0] * count
    at = np.cumsum(_gaps(count, burstiness, rng))
    # A tiny shape may draw nothing but zeros.
    scale = count / rate / at[-1] if at[-1] > 0 else 0.0
    return [float(value) for value in at * scale]


def ramp(count: int, up: RampUp, burstiness: float, rng: np.random.RandomState) -> list[float]:
    """The same for a rate that grows from the first request to the last. Not scaled: there is no one rate to meet."""
    progress = np.arange(count) / max(count - 1, 1)
    linear = up.start_rps + (up.end_rps - up.start_rps) * progress
    rates = linear if up.strategy == "linear" else up.start_rps * (up.end_rps / up.start_rps) ** progress
    return [float(value) for value in np.cumsum(_gaps(count, burstiness, rng) / rates)]


def _gaps(count: int, burstiness: float, rng: np.random.RandomState) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Gaps of mean 1."""
    return np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, 1.0 / burstiness, count)
