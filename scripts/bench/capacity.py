"""Cores and memory for a load, from measured costs. docs/capacity.md says it in words.

A kind of process uses ``token(q) * tokens/s + frame * frames/s`` CPU: what each token costs it when q of them come in
one event, and what each message between processes costs, whatever is in it. A frame is a step's news for one worker:
there are steps per second times workers. Costs are fitted to ``bench_frontend.py --json``. Its measurements have
to differ in streams (tokens per frame); those of each ``--stream_interval`` give a token's cost at that q.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Kind of process -> its key in a measurement, CPU µs per token.
KINDS = {"front end": "front_end", "worker": "worker", "executor": "shipping"}
#: Share of a core that one process should use at most, so that it can make up for a pause.
HEADROOM = 0.7


class CapacityError(ValueError):
    """The measurements do not say enough."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server. tokens_per_event: how much is coalesced, 1 is the least."""

    tokens_per_second: float
    streams: int
    tokens_per_event: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a kind of process, CPU µs. token: of a token, by tokens per event; frame: of a message. once: it pays that per
    step, however many workers there are."""

    token: Mapping[float, float]
    frame: float
    once: bool = False

    def of_token(self, tokens_per_event: float) -> float:
        """Between two measured coalescings linear in events per token; beyond them the nearest."""
        events = sorted((1 / q, cost) for q, cost in self.token.items())
        return float(np.interp(1 / tokens_per_event, [x for x, _ in events], [cost for _, cost in events]))

    def cores(self, load: Load, workers: int) -> float:
        """Every stream gets a token in every step, and every worker a frame."""
        frames = load.tokens_per_second / load.streams * (1 if self.once else workers)
        return (self.of_token(load.tokens_per_event) * load.tokens_per_second + self.frame * frames) / 1e6


@dataclass(frozen=True, slots=True)
class Costs:
    """kinds: kind of process -> its cost. Memory: of all processes without a stream, and what each stream adds."""

    kinds: Mapping[str, Cost]
    idle_mib: float
    kib_per_stream: float

    def cores(self, load: Load, workers: int) -> dict[str, float]:
        """Cores by kind of process; all workers together."""
        return {kind: cost.cores(load, workers) for kind, cost in self.kinds.items()}

    def memory_mib(self, load: Load) -> float:
        """All processes, without the engine's model."""
        return self.idle_mib + self.kib_per_stream * load.streams / 1024


def fit(lines: Sequence[Mapping[str, Any]]) -> Costs:
    """Costs that explain the paced measurements best. Raises CapacityError if they are too few or too alike."""
    paced = [line for line in lines if line["mode"] == "paced" and line["frontends"] == 1 and line["workers"] >= 1]
    coalescings = sorted({line["stream_interval"] for line in paced})
    kinds = {}
    for kind, key in KINDS.items():
        once = kind == "executor"
        # Per token: a column for each coalescing, and frames.
        terms = [[*(line["stream_interval"] == q for q in coalescings), _frames(line, once)] for line in paced]
        *tokens, frame = _least_squares(np.array(terms, float), np.array([line[key] for line in paced]))
        kinds[kind] = Cost(dict(zip(coalescings, tokens)), frame, once)
    memory = [float(np.median([line[key] for line in paced])) for key in ("idle_mib", "kib_per_stream")]
    return Costs(kinds, *memory)


def _frames(line: Mapping[str, Any], once: bool) -> float:
    """Per token."""
    return float(line["steps_per_second"] * (1 if once else line["workers"]) / line["tokens_per_second"])


def _least_squares(terms: np.ndarray[Any, Any], measured: np.ndarray[Any, Any]) -> list[float]:
    """Coefficients of which none is negative, with the least sum of squared relative errors: the best of the solutions
    that leave some out, which are few. Raises CapacityError if they are not determined."""
    if not terms.size or np.linalg.matrix_rank(terms, tol=1e-3) < terms.shape[1]:
        raise CapacityError("costs: paced measurements are needed with several --concurrency")
    weighted, ones = terms / measured[:, None], np.ones(len(measured))
    best, least = np.zeros(terms.shape[1]), math.inf
    for used in itertools.product((False, True), repeat=terms.shape[1]):
        chosen = np.flatnonzero(used)
        solution, *_ = np.linalg.lstsq(weighted[:, chosen], ones, rcond=None)
        error = float(np.sum((weighted[:, chosen] @ solution - ones) ** 2))
        if (solution >= 0).all() and error < least:
            best, least = np.zeros(terms.shape[1]), error
            best[chosen] = solution
    return [float(value) for value in best]


def workers_for(costs: Costs, load: Load, most: int = 64) -> int:
    """The fewest workers none of which is busy beyond ``HEADROOM``. More of them get more frames, so there may be no
    such number: CapacityError."""
    for workers in range(1, most + 1):
        if costs.cores(load, workers)["worker"] / workers <= HEADROOM:
            return workers
    raise CapacityError(f"tokens_per_second: not even {most} workers keep up with {load.tokens_per_second:g}")
