"""What /metrics tells: counters of the HTTP side, and the reports of executor and workers as they last came."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from executor.histogram import BOUNDS, STEP_BOUNDS
from executor.proxy import GenerationExecutor
from serve.board import Board
from serve.gateway import ServerState
from serve.scaffolded_chat import METHODS

#: Variable of the environment: the directory in which the front ends of a server keep their counters. prometheus_client
#: looks for it when it is imported.
SHARED = "PROMETHEUS_MULTIPROC_DIR"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

#: name in a worker's report -> (metric, help, counter or gauge)
_WORKER = {
    "batch_rows": ("batch_rows", "Rows in the last batch", False),
    "open": ("open_requests", "Requests with an open output", False),
    "tokens": ("tokens", "Tokens received", True),
    "chunks": ("chunks", "Emission rows made", True),
    "rows": ("rows", "Step rows received", True),
    "coalesced": ("coalesced_rows", "Rows joined to an earlier one that was waiting too", True),
    "late": ("late_tokens", "Tokens for requests or outputs that had ended", True),
    "failed": ("failed_requests", "Requests that ended in an error here", True),
    "busy_seconds": ("busy_seconds", "Time spent handling steps", True),
    "refused_frames": ("refused_frames", "Malformed frames", True),
    "stale": ("stale_steps", "Steps that an executor which died had left behind", True),
}

#: name at a front end -> (metric, help)
_FRONTEND_HISTOGRAMS = {
    "write_lag": (
        "tailrace_write_lag_seconds", "From the worker sending a message to its bytes being handed to the connections"
    ),
    "chunk_lag": (
        "tailrace_chunk_lag_seconds",
        "From the executor shipping the oldest step of a message to its bytes being handed to the connections",
    ),
}  # fmt: skip

#: name in a worker's report -> (metric, help)
_WORKER_HISTOGRAMS = {
    "queue_age": ("tailrace_worker_queue_age_seconds", "Age of each step when the worker took it"),
    "post_processing": ("tailrace_worker_post_processing_seconds", "Time that a batch of steps took"),
}

#: name in the executor's report -> (metric, help, counter or gauge)
_EXECUTOR = {
    "open": ("open_requests", "Requests whose client does not have everything yet", False),
    "parked": ("parked_requests", "Requests that wait for a worker", False),
    "waiting": ("waiting_requests", "Requests that wait for their first token", False),
    "waiting_tokens": ("waiting_tokens", "Prompt tokens of requests that wait for their first token", False),
    "engine_running": ("running_outputs", "Outputs in the engine's batch", False),
    "engine_waiting": ("waiting_outputs", "Outputs that wait for the engine", False),
    "full_workers": ("full_workers", "Workers whose queue is full", False),
    "tokens": ("tokens", "Tokens generated", True),
    "steps": ("steps", "Engine steps collected", True),
    "shipping_seconds": ("shipping_seconds", "CPU time of the loop, without the engine", True),
    "late_rows": ("late_rows", "Rows for outputs that had been ended", True),
    "resumed": ("resumed_requests", "Requests opened again after a worker was lost", True),
    "adopted": ("adopted_requests", "Requests taken over from an executor that died", True),
    "restarted": ("restarted_requests", "Requests generated again from their prompt after one died", True),
    "refused_frames": ("refused_frames", "Malformed frames", True),
}


class Workers(Protocol):
    """What has to be known of the workers' lives: see ``WorkerPool``."""

    @property
    def alive(self) -> Mapping[int, object]:
        """Those that can work, by id."""

    @property
    def restarts(self) -> int:
        """Attempts to start one again."""

    @property
    def paused(self) -> int:
        """Those whose next start waits."""


class ServerMetrics:
    """The registry of one front end. With several, the counters of all of them are in files (see ``SHARED``), and each
    tells the same."""

    def __init__(
        self,
        proxy: GenerationExecutor,
        pool: Workers | None,
        state: ServerState | None = None,
        board: Board | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tailrace_http_requests", "HTTP requests answered", ("path", "status"), registry=self._registry
        )
        self.first_chunk = Histogram(
            "tailrace_first_chunk_seconds",
            "Arrival to first bytes of a stream",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.duration = Histogram(
            "tailrace_request_seconds", "Arrival to last bytes of a response", buckets=_SECONDS, registry=self._registry
        )
        self.disconnects = Counter(
            "tailrace_disconnects", "Clients that left before the end of their response", registry=self._registry
        )
        self.slow_clients = Counter(
            "tailrace_slow_clients",
            "Clients that were disconnected since they took too little",
            ("limit",),
            registry=self._registry,
        )
        self.refused = Counter(
            "tailrace_refused_requests",
            "Requests refused before their first byte",
            ("reason",),
            registry=self._registry,
        )
        self.scaffolding = Counter(
            "tailrace_scaffolding_requests",
            "Chat requests whose answer is chosen from several generations",
            ("method",),
            registry=self._registry,
        )
        for method in METHODS:
            self.scaffolding.labels(method)
        for limit in ("bytes", "seconds"):  # series that exist from the start can be rated from the first event on
            self.slow_clients.labels(limit)
        for reason in ("requests", "queue", "timeout", "unready"):
            self.refused.labels(reason)
        board = Board.alone() if board is None else board
        self._collectors = _Reports(proxy, pool, state or ServerState(), board), _Histograms(proxy, board)

    def render(self) -> bytes:
        """The exposition text (Prometheus text format 0.0.4)."""
        shown = CollectorRegistry(auto_describe=False)
        if SHARED in os.environ:
            MultiProcessCollector(shown)
        else:
            shown.register(self._registry)
        for collector in self._collectors:
            shown.register(collector)
        return generate_latest(shown)


class _Reports(Collector):
    """Turns the last reports into metrics when somebody asks."""

    def __init__(self, proxy: GenerationExecutor, pool: Workers | None, state: ServerState, board: Board) -> None:
        self._proxy, self._pool, self._state, self._board = proxy, pool, state, board

    def collect(self) -> Iterator[Metric]:
        proxy, board = self._proxy, self._board
        board.follow(proxy)
        count = board.total("open_requests")
        yield GaugeMetricFamily("tailrace_open_requests", "Requests without their last bytes", count)
        late, refused = board.total("late_rows"), board.total("refused_frames")
        yield CounterMetricFamily("tailrace_late_emissions", "Emission rows that came too late", late)
        yield CounterMetricFamily("tailrace_refused_frames", "Malformed frames", refused)
        if self._pool is not None:
            yield GaugeMetricFamily("tailrace_workers", "Workers that can work", len(self._pool.alive))
            yield CounterMetricFamily("tailrace_worker_restarts", "Workers started again", self._pool.restarts)
            yield GaugeMetricFamily("tailrace_paused_workers", "Workers whose next start waits", self._pool.paused)
        restarts = self._state.executor_restarts
        yield CounterMetricFamily("tailrace_executor_restarts", "Executors started again", restarts)
        for key, (name, text, counts) in _EXECUTOR.items():
            if key in proxy.status:
                yield _family(f"tailrace_executor_{name}", text, counts, {(): proxy.status[key]}, ())
        if (step_shipping := proxy.status.get("step_shipping")) is not None:
            text = "What the executor's loop adds to an engine step, by the wall"
            yield _histogram("tailrace_executor_step_shipping_seconds", text, {(): step_shipping}, (), STEP_BOUNDS)
        for key, (name, text, counts) in _WORKER.items():
            values: dict[tuple[str, ...], float] = {
                (str(worker),): stats[key]
                for worker, stats in proxy.worker_stats.items()
                if not isinstance(stats.get(key, []), list)
            }
            yield _family(f"tailrace_worker_{name}", text, counts, values, ("worker",))


class _Histograms(Collector):
    """What has been counted by size: by the front ends, and by the workers as of their last reports."""

    def __init__(self, proxy: GenerationExecutor, board: Board) -> None:
        self._proxy, self._board = proxy, board

    def collect(self) -> Iterator[Metric]:
        proxy, board = self._proxy, self._board
        board.follow(proxy)
        reports: dict[tuple[str, ...], Sequence[float]]
        for key, (name, text) in _FRONTEND_HISTOGRAMS.items():
            yield _histogram(
                name, text, {(str(seat),): r for seat, r in enumerate(board.histograms(key))}, ("frontend",)
            )
        for key, (name, text) in _WORKER_HISTOGRAMS.items():
            reports = {
                (str(worker),): stats[key]
                for worker, stats in proxy.worker_stats.items()
                if isinstance(stats.get(key), list)
            }
            yield _histogram(name, text, reports, ("worker",))


def _family(
    name: str, text: str, counts: bool, values: dict[tuple[str, ...], float], labels: tuple[str, ...]
) -> Metric:
    family = (CounterMetricFamily if counts else GaugeMetricFamily)(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(
    name: str,
    text: str,
    reports: Mapping[tuple[str, ...], Sequence[float]],
    labels: tuple[str, ...],
    bounds: Sequence[float] = BOUNDS,
) -> Metric:
    """reports: as ``executor.histogram`` makes them, by the labels' values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    upper = [*map(floatToGoString, bounds), "+Inf"]
    for key, (total, *counts) in reports.items():
        family.add_metric(key, list(zip(upper, accumulate(counts))), total)
    return family
