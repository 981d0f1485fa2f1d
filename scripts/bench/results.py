"""Figures of a run, from what its requests came to. The keys are those of ``vllm bench serve``'s result file.

The same outcomes give the same figures: no clock and no chance here. Seconds in, milliseconds out, where a key says
``_ms``. What differs from the tool that the keys come from, besides what ``outcome`` says about chunks: the peak of
output tokens counts tokens, not chunks. ``max_concurrent_requests`` is that tool's: the requests that had any part in
the busiest second, up to twice ``--max-concurrency`` and more where answers are short. ``max_open_requests`` is how
many were open at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .outcome import Outcome

#: Keys with an entry per request; they are written only on demand.
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts",
           "errors")  # fmt: skip


def results(
    outcomes: Sequence[Outcome],
    duration: float,
    goodput: Mapping[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """All figures.

    outcomes: finished ones, with ``input_tokens`` and ``output_tokens`` filled in.
    goodput: objective -> milliseconds. metrics: of ``options.METRICS`` and ``QUEUE_METRICS``. percentiles: 0 to 100.
    """
    done = [outcome for outcome in outcomes if outcome.completed]
    figures = _counts(outcomes, done, duration) | _peaks(outcomes)
    good = sum(is_good(outcome, goodput) for outcome in done)
    figures["request_goodput"] = _rate(good, duration) if goodput else None
    samples = {"ttft": [outcome.ttft for outcome in done],
               "tpot": [tpot for outcome in done if (tpot := outcome.tpot()) is not None],
               "itl": [*chain.from_iterable(outcome.itls for outcome in done)],
               "e2el": [outcome.latency for outcome in done],
               "client_queue_time": [outcome.queued for outcome in done],
               "e2el_including_client_queue": [outcome.queued + outcome.latency for outcome in done]}  # fmt: skip
    for name in metrics:
        figures |= statistics(name, samples[name], percentiles)
    return figures


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What each request came to, in the order of the prompts. Times in seconds."""
    columns = zip(*map(_details, outcomes)) if outcomes else ([] for _ in DETAILS)
    return {name: [*column] for name, column in zip(DETAILS, columns)}


def _details(outcome: Outcome) -> tuple[Any, ...]:
    output = (outcome.output_tokens or 0) if outcome.completed else 0
    times = (outcome.ttft, outcome.itls, outcome.latency) if outcome.completed else (0.0, [], 0.0)
    return (outcome.input_tokens or 0, output, outcome.start, *times, outcome.queued, outcome.text, outcome.error)


def is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a completed request kept to all objectives; an answer of less than two tokens has a TPOT of 0."""
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot() or 0.0, "e2el": outcome.latency}
    return all(values[name] * 1000 <= limit for name, limit in goodput.items())


def statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """``mean_NAME_ms``, ``median_``, ``std_`` (of the population) and percentiles; zeros of nothing."""
    values = np.asarray(seconds if len(seconds) else [0.0]) * 1000
    figures = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    figures |= {f"p{percentile:g}_{name}_ms": np.percentile(values, percentile) for percentile in percentiles}
    return {key: float(value) for key, value in figures.items()}


def _counts(outcomes: Sequence[Outcome], done: Sequence[Outcome], duration: float) -> dict[str, Any]:
    read = sum(outcome.input_tokens or 0 for outcome in done)
    written = sum(outcome.output_tokens or 0 for outcome in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "total_chunks": sum(len(outcome.chunks) for outcome in done),
        "request_throughput": _rate(len(done), duration),
        "output_throughput": _rate(written, duration),
        "total_token_throughput": _rate(read + written, duration),
        "error_reasons": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
    }


def _rate(count: float, duration: float) -> float:
    return count / duration if duration else 0.0


# ------------------------------------------------------------------------------------------------ peaks


def _peaks(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    timeline = tokens_per_second(outcomes)
    peak = max((count for _, count in concurrency(outcomes)), default=0)
    return {
        "max_output_tokens_per_s": max(timeline, default=0.0),
        "max_concurrent_requests": max(requests_per_second(outcomes), default=0),
        "max_open_requests": peak,
    }


def concurrency(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(time, requests open from then on), ascending. One that ends when another starts is not open with it."""
    changes = [(outcome.start, 1) for outcome in outcomes] + [(outcome.end, -1) for outcome in outcomes]
    steps, count = [], 0
    for time, change in sorted(changes):
        count += change
        steps.append((time, count))
    return steps


def requests_per_second(outcomes: Sequence[Outcome]) -> list[int]:
    """Completed requests that were open at some time in each second since the first of them."""
    done = [outcome for outcome in outcomes if outcome.completed]
    if not done:
        return []
    start = min(outcome.start for outcome in done)
    counts = [0] * (int(max(outcome.end for outcome in done) - start) + 1)
    for outcome in done:
        for second in range(int(outcome.start - start), int(outcome.end - start) + 1):
            counts[second] += 1
    return counts


def tokens_per_second(outcomes: Sequence[Outcome]) -> list[float]:
    """Output tokens in each second since the first request; a request's tokens are spread over its chunks evenly."""
    written = [outcome for outcome in outcomes if outcome.completed and outcome.chunks]
    if not written:
        return []
    start = min(outcome.start for outcome in outcomes)
    seconds = np.zeros(int(max(outcome.chunks[-1] for outcome in written) - start) + 1)
    for outcome in written:
        share = (outcome.output_tokens or 0) / len(outcome.chunks)
        np.add.at(seconds, (np.asarray(outcome.chunks) - start).astype(int), share)
    return [float(value) for value in seconds]
