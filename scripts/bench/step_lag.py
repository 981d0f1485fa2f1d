"""What the executor's loop adds to an engine step, beside what the machine adds to any program that keeps its pace.

The executor counts it itself (``tailrace_executor_step_shipping_seconds``): by the wall, from the moment its loop wakes
to the moment at which it waits again, without the engine. Quantiles of a histogram are interpolated in their bucket.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.stack import Stack
from scripts.bench.takers import Takers

METRIC = "tailrace_executor_step_shipping_seconds"
#: The bare loop computes for so long: about what the executor does in a step of 256 streams.
WORK = 0.0001


def buckets(metrics: Mapping[str, float]) -> list[tuple[float, float]]:
    """(bound, observations that were not above it), ascending, of the histogram in an exposition."""
    prefix = f'{METRIC}_bucket{{le="'
    found = [(key.removeprefix(prefix).rstrip('"}'), value) for key, value in metrics.items() if key.startswith(prefix)]
    return sorted((float(bound), value) for bound, value in found)


def between(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What was observed from one exposition to the next."""
    earlier = dict(before)
    return [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]


def quantile(counts: Sequence[tuple[float, float]], share: float) -> float:
    """Seconds below which a share of the observations lies; of those above the last bound that bound, 0 of nothing."""
    total = counts[-1][1] if counts else 0.0
    wanted, lower, below = share * total, 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            inside = (wanted - below) / (count - below)
            return lower if bound == float("inf") else lower + (bound - lower) * inside
        lower, below = bound, count
    return 0.0


def measure(stack: Stack, streams: int, request: bytes, interval: float, seconds: float) -> dict[str, Any]:
    """Times in µs. stack: on an engine that steps every ``interval`` seconds."""
    bare = Path(__file__).with_name("pace.py")
    with Takers("127.0.0.1", stack.port, streams, request) as takers:
        takers.ready()
        with subprocess.Popen(
            [sys.executable, str(bare), str(interval), str(WORK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            before = stack.metrics()
            time.sleep(seconds)
            after = stack.metrics()
            out, _ = child.communicate()
    counts = between(buckets(before), buckets(after))
    steps = counts[-1][1]
    mean = (after[f"{METRIC}_sum"] - before[f"{METRIC}_sum"]) / max(1.0, steps)
    cpu = after["tailrace_executor_shipping_seconds_total"] - before["tailrace_executor_shipping_seconds_total"]
    return {
        "streams": streams, "interval": interval, "steps": steps, "mean": 1e6 * mean,
        "p50": 1e6 * quantile(counts, 0.5), "p99": 1e6 * quantile(counts, 0.99),
        "cpu": 1e6 * cpu / max(1.0, steps), "buckets": counts[:-1], "bare": json.loads(out),
    }  # fmt: skip


def text(found: Mapping[str, Any]) -> str:
    """The result in words."""
    bare = found["bare"]
    return (
        f"{found['streams']} streams, a step every {1e3 * found['interval']:g} ms, {found['steps']:.0f} steps\n"
        f"the executor adds to a step, µs: p50 {found['p50']:.0f}, p99 {found['p99']:.0f}, mean {found['mean']:.0f}; "
        f"CPU of its loop {found['cpu']:.0f}\n"
        f"a bare loop that computes for {bare['work']:.0f} µs at this pace: takes longer by p50 "
        f"{bare['stretched']['p50']:.0f}, p99 {bare['stretched']['p99']:.0f}; wakes late by p50 "
        f"{bare['late']['p50']:.0f}, p99 {bare['late']['p99']:.0f}"
    )
