"""What a token costs between executor and socket: two samples of a running server, and what grew between them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench.exposition import SHIPPING
from scripts.bench.stack import STAGES, Stack
from scripts.bench.takers import Takers

MODES = ("paced", "saturated")
#: Events in one write of the floor.
PER_WRITE = {"paced": 1, "saturated": 8}
_FLOOR = Path(__file__).with_name("floor.py")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: streams, a server, and a pace."""

    concurrency: int
    workers: int = 1
    frontends: int = 1
    stream_interval: int = 1
    mode: str = "paced"

    def flags(self) -> list[str]:
        """Of the server. What is the default is not named: not every version has the flag."""
        found = ["--num_postprocess_workers", str(self.workers)]
        if self.frontends != 1:
            found += ["--num_serve_frontends", str(self.frontends)]
        if self.stream_interval != 1:
            found += ["--stream_interval", str(self.stream_interval)]
        return found


@dataclass(frozen=True, slots=True)
class Sample:
    """A server at one moment: metrics, CPU seconds by kind of process and by stage, (bytes, events) taken, clock."""

    metrics: Mapping[str, float]
    cpu: Mapping[str, float]
    stages: Mapping[str, Mapping[str, float]]
    taken: tuple[int, int]
    time: float

    @classmethod
    def of(cls, stack: Stack, takers: Takers) -> Sample:
        """As of now: the executor's report comes first, since it is waited for."""
        metrics = stack.metrics()
        return cls(metrics, stack.cpu(), stack.stages(), takers.taken(), time.monotonic())


@dataclass(frozen=True, slots=True)
class Cost:
    """One measurement. Times are CPU µs per token; tokens_per_event tells how much was coalesced.

    front_end, worker: all processes of the kind. shipping: the executor's without its engine. engine: the rest of it.
    stages: kind of process -> stage -> CPU µs per token of the threads that live.
    chunk_lag_ms: mean time from the shipping of a step, the oldest of those that are joined, to the writing of chunks.
    idle_mib: memory of all processes without a stream; kib_per_stream: what a stream adds.
    """

    setting: Setting
    tokens_per_second: float
    steps_per_second: float
    tokens_per_event: float
    bytes_per_event: float
    front_end: float
    worker: float
    shipping: float
    engine: float
    stages: Mapping[str, Mapping[str, float]]
    chunk_lag_ms: float
    idle_mib: float
    kib_per_stream: float

    @property
    def total(self) -> float:
        """All processes outside the engine."""
        return self.front_end + self.worker + self.shipping

    def line(self) -> dict[str, Any]:
        """As JSON has it."""
        fields = asdict(self)
        setting: dict[str, Any] = fields.pop("setting")
        return setting | fields | {"total": self.total}


def cost(setting: Setting, before: Sample, after: Sample, idle: int, memory: int) -> Cost:
    """What grew between two samples. idle: bytes before the first stream; memory: bytes that came with the streams."""
    elapsed = after.time - before.time
    grown = {name: after.metrics[name] - before.metrics.get(name, 0.0) for name in after.metrics}
    tokens, steps = grown["tailrace_executor_tokens_total"], grown["tailrace_executor_steps_total"]
    used = {kind: 1e6 * (after.cpu[kind] - before.cpu[kind]) / tokens for kind in before.cpu}
    stages = {
        kind: {stage: 1e6 * (after.stages[kind][stage] - before.stages[kind][stage]) / tokens for stage in STAGES}
        for kind in before.stages
    }
    shipping = 1e6 * grown[SHIPPING] / tokens
    events = max(1, after.taken[1] - before.taken[1])
    lag = 1e3 * grown["tailrace_chunk_lag_seconds_sum"] / max(1.0, grown["tailrace_chunk_lag_seconds_count"])
    size = (after.taken[0] - before.taken[0]) / events
    return Cost(
        setting, tokens / elapsed, steps / elapsed, tokens / events, size, used["front end"], used["worker"], shipping,
        used["executor"] - shipping, stages, lag, idle / 2**20, memory / setting.concurrency / 1024,
    )  # fmt: skip


def floor(concurrency: int, size: int, per_write: int, interval: float, seconds: float) -> float:
    """CPU µs per event of the ticker. It ticks at the same pace in every mode: without a pause its writes would be
    joined to far larger ones."""
    arguments = map(str, (concurrency, size, per_write, interval, seconds))
    with subprocess.Popen([sys.executable, str(_FLOOR), *arguments], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with Takers("127.0.0.1", port, concurrency, b"GET / HTTP/1.1\r\n\r\n"):
            said = json.loads(child.stdout.readline())
    return float(said["us_per_event"])


# ------------------------------------------------------------------------------------------------ told


def text(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table of one server's costs, and their stages."""
    first = lines[0]
    rows = [
        f"{first['concurrency']} streams, {first['workers']} workers, {first['frontends']} front ends, "
        f"{first['stream_interval']} tokens per event; CPU µs per token",
        "mode        front end  worker  shipping  total   floor  ratio   tokens/s  tokens/event  lag ms  KiB/stream",
    ]
    for line in lines:
        floor, ratio = (f"{line[key]:.2f}" if key in line else "-" for key in ("floor", "ratio"))
        rows.append(
            f"{line['mode']:10} {line['front_end']:10.2f} {line['worker']:7.2f} {line['shipping']:9.2f} "
            f"{line['total']:6.2f} {floor:>7} {ratio:>6} {line['tokens_per_second']:10.0f} "
            f"{line['tokens_per_event']:13.2f} {line['chunk_lag_ms']:7.1f} {line['kib_per_stream']:11.1f}"
        )
        rows.append(f"{'':10} {_stages(line['stages'])}")
    return "\n".join(rows)


def _stages(stages: Mapping[str, Mapping[str, float]]) -> str:
    """The executor's main thread has the engine in it: its part of shipping is in the table."""
    told = (
        f"{kind}: " + " ".join(f"{stage} {value:.2f}" for stage, value in used.items() if value >= 0.005)
        for kind, used in stages.items()
    )
    return "; ".join(told)


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Lines by all but their concurrency, ascending in that."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: int(line["concurrency"])):
        name = "{mode}, {workers} workers, {frontends} front ends, 1/{stream_interval}".format(**line)
        found.setdefault(name, []).append(line)
    return found
