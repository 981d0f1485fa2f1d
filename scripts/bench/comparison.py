"""Several systems that did the same work in rounds: the figures of each, and ratios.

Every ratio is turned so that more than 1 means that the first system is better. Ratios are taken within a round, since
machines drift; what is shown of several rounds is their geometric mean, and the least and largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.bench.outcome import Outcome
from scripts.bench.outside import Reading
from scripts.bench.results import results

#: key -> (heading, whether more of it is better)
MEASURES = {
    "tokens_per_second": ("tokens/s", True),
    **{
        f"{word}_{name}_ms": (f"{name.upper()} {word}, ms", False)
        for name in ("ttft", "tpot")
        for word in ("mean", "median", "p99")
    },
    "cpu_us_per_token": ("CPU µs/token, all", False),
    "outside_us_per_token": ("CPU µs/token, outside the model", False),
    "busy_us_per_token": ("the same without being idle", False),
}
_NAMES, _PERCENTILES = ("ttft", "tpot"), (99.0,)


@dataclass(frozen=True, slots=True)
class Round:
    """One system's work. outcomes: of its requests, tokens filled in. cpu: None if its processes are not seen. idle:
    CPU seconds outside the model per second in which nothing is asked."""

    duration: float
    outcomes: Sequence[Outcome]
    cpu: Reading | None
    idle: float | None

    @property
    def total(self) -> float | None:
        """CPU seconds of all its processes."""
        return None if self.cpu is None else self.cpu.total

    @property
    def outside(self) -> float | None:
        """CPU seconds outside the model."""
        return None if self.cpu is None else self.cpu.outside

    @property
    def busy(self) -> float | None:
        """Without what it would have taken to be there for so long. With few tokens a second that is most of it."""
        return None if self.outside is None or self.idle is None else self.outside - self.idle * self.duration


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """What came of rounds of one system, taken together: ``MEASURES``, requests, failures, tokens. None: not known."""
    outcomes = [outcome for one in rounds for outcome in one.outcomes]
    found = results(outcomes, sum(one.duration for one in rounds), {}, _NAMES, _PERCENTILES)
    tokens = found["total_output_tokens"]
    idle = [one.idle for one in rounds if one.idle is not None]
    return {
        "requests": len(outcomes),
        "failed": found["failed"],
        "error_reasons": found["error_reasons"],
        "tokens": tokens,
        "chunks": found["total_chunks"],
        "tokens_per_second": found["output_throughput"],
        **{key: found[key] for key in MEASURES if key.endswith("_ms")},
        "cpu_us_per_token": _per_token([one.total for one in rounds], tokens),
        "outside_us_per_token": _per_token([one.outside for one in rounds], tokens),
        "busy_us_per_token": _per_token([one.busy for one in rounds], tokens),
        "idle_ms_per_second": 1e3 * sum(idle) / len(idle) if idle else None,
    }


def _per_token(seconds: Iterable[float | None], tokens: int) -> float | None:
    total = 0.0
    for one in seconds:
        if one is None:
            return None
        total += one
    return 1e6 * total / tokens if tokens else None


def ratio(ours: float | None, theirs: float | None, more_is_better: bool) -> float | None:
    """How much better ours is; None where a figure is missing or nothing."""
    if not ours or not theirs or ours < 0 or theirs < 0:
        return None
    return ours / theirs if more_is_better else theirs / ours


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measure -> (geometric mean, least, largest) of the rounds' ratios, None if not known. The figures of each round,
    in the same order."""
    found: dict[str, Any] = {}
    for key, (_, more) in MEASURES.items():
        values = [ratio(mine[key], other[key], more) for mine, other in zip(ours, theirs)]
        known = [value for value in values if value is not None]
        complete = bool(values) and len(known) == len(values)
        mean = math.exp(sum(map(math.log, known)) / len(known)) if complete else 0.0
        found[key] = (mean, min(known), max(known)) if complete else None
    return found


def text(systems: Mapping[str, Mapping[str, Any]], compared: Mapping[str, Mapping[str, Any]]) -> str:
    """A table: a column for each system, then one for each ratio. The first system is ours."""
    heads = [*systems, *(f"ratio to {name}" for name in compared)]
    widths = [max(22, len(head) + 2) for head in heads]
    lines = [" " * 34 + "".join(head.rjust(width) for head, width in zip(heads, widths))]
    for key, (heading, _) in MEASURES.items():
        cells = [_shown(figures[key]) for figures in systems.values()]
        cells += [_spread(found[key]) for found in compared.values()]
        lines.append(f"{heading:34}" + "".join(cell.rjust(width) for cell, width in zip(cells, widths)))
    for key in ("idle_ms_per_second", "requests", "failed", "tokens", "chunks"):
        cells = [_shown(figures[key]) for figures in systems.values()]
        lines.append(f"{key:34}" + "".join(cell.rjust(width) for cell, width in zip(cells, widths)))
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _spread(found: tuple[float, float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f} ({found[1]:.2f}..{found[2]:.2f})"
