#!/usr/bin/env python3
"""CPU time per token from the executor to the socket, all processes outside the engine, beside its floor.

A real server streams chat completions of the replay engine to N clients that take whatever comes. Two paces:

* ``paced``: a step every ``--interval`` seconds, which the machine keeps up with: one event per token.
* ``saturated``: the engine makes tokens as fast as they are taken away, and the server coalesces.

The floor is one process that writes events of the same size to as many connections from one ticker over uvloop's
transports, at the same pace, one at a time and eight at once (``scripts/bench/floor.py``). It is timed before and
after; machines drift, so compare ratios and not microseconds of different runs.

    scripts/bench_frontend.py [--concurrency 256 | --sweep] [--workers N] [--seconds S] [--interval S] [--json]
                              [--plot out.png]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.stack import Stack
from scripts.bench.takers import Takers, http_request

ROOT = Path(__file__).resolve().parent.parent
SWEEP = (1, 16, 64, 256, 1024, 4096)
#: Events in one write of the coalesced floor.
COALESCED = 8


@dataclass(frozen=True)
class Cost:
    """One measurement. Times are CPU µs per token; tokens_per_event tells how much was coalesced."""

    concurrency: int
    mode: str
    tokens_per_second: float
    tokens_per_event: float
    bytes_per_event: float
    front_end: float
    worker: float
    shipping: float
    engine: float
    kib_per_stream: float

    @property
    def total(self) -> float:
        """All processes outside the engine."""
        return self.front_end + self.worker + self.shipping


def measure(options: argparse.Namespace, concurrency: int, mode: str) -> Cost:
    """Streams to so many clients, in the middle of their lives."""
    engine = {"step_interval": options.interval if mode == "paced" else 0.0, "batch_size": max(concurrency, 256)}
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": 900_000, "ignore_eos": True,
    }  # fmt: skip
    with Stack(options.tokenizer, engine, "--num_postprocess_workers", str(options.workers)) as stack:
        idle = stack.memory()
        with Takers("127.0.0.1", stack.port, concurrency, http_request("/v1/chat/completions", body)) as takers:
            takers.ready()
            before, cpu, taken, begin = stack.fresh_metrics(), stack.cpu(), takers.taken(), time.monotonic()
            time.sleep(options.seconds)
            after, cpu_after, taken_after = stack.fresh_metrics(), stack.cpu(), takers.taken()
            elapsed = time.monotonic() - begin
            memory = stack.memory() - idle
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    tokens = grown["tailrace_executor_tokens_total"]
    per_token = {kind: 1e6 * (cpu_after[kind] - cpu[kind]) / tokens for kind in cpu}
    shipping = 1e6 * grown["tailrace_executor_shipping_seconds_total"] / tokens
    events = max(1, taken_after[1] - taken[1])
    return Cost(
        concurrency, mode, tokens / elapsed, tokens / events, (taken_after[0] - taken[0]) / events,
        per_token["front end"], per_token["worker"], shipping, per_token["executor"] - shipping,
        memory / concurrency / 1024,
    )  # fmt: skip


def floor(options: argparse.Namespace, concurrency: int, size: int, per_write: int) -> float:
    """CPU µs per event of the ticker. Both floors tick at the same pace: without a pause its writes would be joined to
    far larger ones."""
    arguments = map(str, (concurrency, size, per_write, options.interval, min(options.seconds, 5.0)))
    script = ROOT / "scripts" / "bench" / "floor.py"
    with subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with Takers("127.0.0.1", port, concurrency, b"GET / HTTP/1.1\r\n\r\n"):
            said = json.loads(child.stdout.readline())
    return float(said["us_per_event"])


def compare(options: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    """Both paces and both floors; the floors before and after."""
    size = options.event_bytes
    floors = [[floor(options, concurrency, size, per_write) for per_write in (1, COALESCED)]]
    costs = [measure(options, concurrency, mode) for mode in ("paced", "saturated")]
    floors.append([floor(options, concurrency, size, per_write) for per_write in (1, COALESCED)])
    lines = []
    for number, cost in enumerate(costs):
        least = sum(pair[number] for pair in floors) / 2
        lines.append(
            asdict(cost) | {"total": cost.total, "floor": least, "floors": [pair[number] for pair in floors],
                            "ratio": cost.total / least}
        )  # fmt: skip
    return {"concurrency": concurrency, "event_bytes": size, "costs": lines}


def text(result: dict[str, Any]) -> str:
    """A table."""
    rows = [f"{result['concurrency']} streams; CPU µs per token"]
    rows.append("mode        front end  worker  shipping  total   floor  ratio   tokens/s  tokens/event  KiB/stream")
    for line in result["costs"]:
        rows.append(
            f"{line['mode']:10} {line['front_end']:10.2f} {line['worker']:7.2f} {line['shipping']:9.2f} "
            f"{line['total']:6.2f} {line['floor']:7.2f} {line['ratio']:6.2f} {line['tokens_per_second']:10.0f} "
            f"{line['tokens_per_event']:13.2f} {line['kib_per_stream']:11.1f}"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--concurrency", type=int, default=256, help="streams at once (%(default)s)")
    add("--sweep", action="store_true", help=f"all of {', '.join(map(str, SWEEP))}")
    add("--workers", type=int, default=1, help="post-processing workers (%(default)s)")
    add("--seconds", type=float, default=8.0, help="of each measurement (%(default)s)")
    add("--interval", type=float, default=0.02, help="seconds between two steps when paced (%(default)s)")
    add("--event_bytes", type=int, default=240, help="of the floor's events (%(default)s)")
    add("--tokenizer", type=Path, help="a tokenizer's directory or file (the embedded model's)")
    add("--json", action="store_true", help="one JSON object")
    add("--plot", type=Path, help="draw cost against concurrency (needs matplotlib)")
    options = parser.parse_args()
    options.tokenizer = options.tokenizer or embedded_tokenizer()
    results = []
    for concurrency in SWEEP if options.sweep else (options.concurrency,):
        results.append(compare(options, concurrency))
        if not options.json:
            print(text(results[-1]), flush=True)
    if options.json:
        print(json.dumps(results if options.sweep else results[0]))
    if options.plot:
        plot(results, options.plot)
    return 0


def embedded_tokenizer() -> Path:
    """The embedded model's directory, converted if need be."""
    from executor.models import resolve_model

    return resolve_model(None, progress=lambda text: print(text, file=sys.stderr)).directory


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Cost and floor against concurrency, both paces."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for number, mode in enumerate(("paced", "saturated")):
        lines = [result["costs"][number] for result in results]
        streams = [line["concurrency"] for line in lines]
        (drawn,) = axes.plot(streams, [line["total"] for line in lines], marker="o", label=mode)
        axes.plot(streams, [line["floor"] for line in lines], "--", color=drawn.get_color(), label=f"{mode}: floor")
    axes.set(xscale="log", xlabel="streams", ylabel="CPU µs per token", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
