"""A run's figures as text, and as a file of the form that ``vllm bench serve`` writes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .options import Options

WIDTH, _LABEL = 66, 48
#: Share of a core from which on the client may be what limits the run.
BUSY_CLIENT = 0.8
_MAX_REASONS = 10
_HEADINGS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
             "itl": "Inter-chunk Latency", "e2el": "End-to-end Latency",
             "client_queue_time": "Client-side Queueing",
             "e2el_including_client_queue": "Queue-inclusive End-to-end Latency"}  # fmt: skip

# Label, key, and whether it is a whole number.
_TOTALS = (
    ("Successful requests", "completed", True),
    ("Failed requests", "failed", True),
    ("Unfinished requests", "unfinished", True),
    ("Maximum request concurrency", "max_concurrency", True),
    ("Request rate configured (RPS)", "request_rate", False),
    ("Benchmark duration (s)", "duration", False),
    ("Total input tokens", "total_input_tokens", True),
    ("Total generated tokens", "total_output_tokens", True),
    ("Total chunks", "total_chunks", True),
    ("Request throughput (req/s)", "request_throughput", False),
    ("Request goodput (req/s)", "request_goodput", False),
    ("Output token throughput (tok/s)", "output_throughput", False),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s", False),
    ("Peak concurrent requests (within a second)", "max_concurrent_requests", True),
    ("Peak open requests (at once)", "max_open_requests", True),
    ("Total token throughput (tok/s)", "total_token_throughput", False),
)
_OPTIONAL = {"unfinished", "request_goodput", "max_concurrency", "request_rate"}


def text(figures: Mapping[str, Any]) -> str:
    """The report."""
    return "\n".join([*_lines(figures), "=" * WIDTH])


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    yield " Serving Benchmark Result ".center(WIDTH, "=")
    for label, key, whole in _TOTALS:
        if key not in _OPTIONAL or figures.get(key) not in (None, 0, "inf"):
            yield _line(f"{label}:", f"{figures[key]}" if whole else f"{figures[key]:.2f}")
    for name, heading in _HEADINGS.items() if figures["completed"] else ():
        yield from _latencies(figures, name, heading)
    yield from _cpu(figures)
    yield from _failures(figures["error_reasons"])
    yield from figures["notes"]


def _line(label: str, value: str) -> str:
    return f"{label:<{_LABEL}} {value}"


def _latencies(figures: Mapping[str, Any], name: str, heading: str) -> Iterator[str]:
    keys = [key for key in figures if re.fullmatch(rf"(mean|median|std|p[\d.e+-]+)_{name}_ms", key)]
    if keys:
        yield heading.center(WIDTH, "-")
    for key in keys:
        word = key.partition("_")[0]
        yield _line(f"{word.capitalize()} {name.upper().replace('_', ' ')} (ms):", f"{figures[key]:.2f}")


def _cpu(figures: Mapping[str, Any]) -> Iterator[str]:
    yield "CPU".center(WIDTH, "-")
    rows = [(f"{row['name']} [{row['pid']}]", row) for row in figures["server_processes"] or []]
    if rows:
        rows.append(("Server", _row(figures, "server")))
    rows.append(("This client", _row(figures, "client")))
    width = _LABEL - 8
    yield f"{'':<{width}} {'s':>8} {'us/token':>8} {'cores':>7}"
    for name, row in rows:
        cores = row["cpu_seconds"] / figures["duration"] if figures["duration"] else 0.0
        micros = row["cpu_us_per_output_token"]
        shown = "-" if micros is None else f"{micros:.2f}"
        yield f"{name[:width]:<{width}} {row['cpu_seconds']:>8.2f} {shown:>8} {cores:>7.2f}"


def _row(figures: Mapping[str, Any], who: str) -> dict[str, Any]:
    return {key: figures[f"{who}_{key}"] for key in ("cpu_seconds", "cpu_us_per_output_token")}


def _failures(reasons: Mapping[str, int]) -> Iterator[str]:
    if reasons:
        yield "Failures".center(WIDTH, "-")
    for reason, count in [*reasons.items()][:_MAX_REASONS]:
        yield f"{count} x {reason}"
    if len(reasons) > _MAX_REASONS:
        yield f"... and {len(reasons) - _MAX_REASONS} other reasons"


# ------------------------------------------------------------------------------------------------ the file


def settings(options: Options, model: str, date: str) -> dict[str, Any]:
    """What the figures are of: the first keys of the file. date: YYYYMMDD-HHMMSS."""
    return {
        "date": date,
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": None if options.tokenizer is None else str(options.tokenizer),
        "num_prompts": options.num_prompts,
        **dict(options.metadata),
        "request_rate": _plain(options.request_rate),
        "burstiness": _plain(options.burstiness),
        "max_concurrency": options.max_concurrency,
        **({f"ramp_up_{key}": value for key, value in asdict(options.ramp_up).items()} if options.ramp_up else {}),
    }


def _plain(number: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(number) else number


def file_of(options: Options, model: str, date: str) -> Path:
    """Where the result goes."""
    limit = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    up = options.ramp_up
    rate = f"ramp-up-{up.strategy}-{up.start_rps:g}qps-{up.end_rps:g}" if up else options.request_rate
    name = f"{options.label or options.backend}-{rate}qps{limit}-{os.path.basename(model)}-{date}.json"
    return options.result_dir / (options.result_filename or name)


def save(figures: Mapping[str, Any], file: Path, append: bool = False) -> None:
    """Write the file, and its directory if there is none. append: as one more line of what is there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a" if append else "w", encoding="utf-8") as out:
        out.write(("\n" if out.tell() else "") + json.dumps(figures))
