"""When requests are sent.

The gaps between requests come from a gamma distribution with the given mean and shape (*burstiness*); shape 1 is the
exponential distribution, so that arrivals are a Poisson process. They are scaled to last exactly count / rate seconds,
as ``vllm bench serve`` does: a sum of random gaps is off by 1/sqrt(count), which would go straight into every
throughput that one compares between seeds.
"""

from __future__ import annotations

import math

import numpy as np


def offsets(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds from the start of the run to each of ``count`` requests, ascending.

    rate: requests per second; ``inf``: all at 0.
    burstiness: shape > 0; ``inf``: equal gaps.
    """
    if math.isinf(rate) or not count:
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, 1.0 / burstiness, count)
    at = np.cumsum(gaps)
    # A tiny shape may draw nothing but zeros.
    scale = count / rate / at[-1] if at[-1] > 0 else 0.0
    return [float(value) for value in at * scale]
