"""What this machine does to a program that has something to do at a pace, and nothing to do with a server.

    python pace.py INTERVAL WORK

Every ``INTERVAL`` seconds it computes for about ``WORK`` seconds, calibrated at its start, until stdin ends; then one
line of JSON in µs: percentiles of how late it woke (``late``), and of how much longer than the calibrated time the
computing took by the wall (``stretched``): what sleeping and being interrupted cost anybody here. The wall, because
that is what a step waits for.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Sequence

_TRIALS, _SPINS = 300, 1000


def compute(spins: int) -> float:
    """Seconds by the wall for so much work."""
    begin = time.perf_counter()
    for _ in range(spins):
        pass
    return time.perf_counter() - begin


def calibrated(work: float) -> tuple[int, float]:
    """(spins that take about ``work`` seconds when nothing interrupts, what they take)."""
    per_spin = min(compute(_SPINS) for _ in range(_TRIALS)) / _SPINS
    spins = max(1, int(work / per_spin))
    return spins, min(compute(spins) for _ in range(_TRIALS))


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99, µs."""
    ordered = sorted(seconds) or [0.0]
    return {f"p{percent}": 1e6 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 99)}


def main() -> int:
    """Keep the pace until stdin ends."""
    interval, work = float(sys.argv[1]), float(sys.argv[2])
    spins, least = calibrated(work)
    late, stretched = [], []
    due = time.perf_counter()
    while True:
        due = max(due + interval, time.perf_counter())
        if select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
            break
        late.append(max(0.0, time.perf_counter() - due))
        stretched.append(compute(spins) - least)
    print(json.dumps({"work": 1e6 * least, "late": percentiles(late), "stretched": percentiles(stretched)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
