"""What /metrics tells: counters of the HTTP side, and the reports of executor and workers as they last came."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.histogram import STEP_SHIPPING, reported
from executor.proxy import GenerationExecutor
from postproc_workers.pool import WorkerPool
from serve.gateway import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

#: name in a worker's report -> (metric, help, counter or gauge)
_WORKER = {
    "queue_age_seconds": ("queue_age_seconds", "Age of the oldest step when it was taken, last batch", False),
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


class ServerMetrics:
    """The registry of one front end."""

    def __init__(self, proxy: GenerationExecutor, pool: WorkerPool | None, state: ServerState | None = None) -> None:
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
        for limit in ("bytes", "seconds"):  # series that exist from the start can be rated from the first event on
            self.slow_clients.labels(limit)
        for reason in ("requests", "queue", "timeout", "unready"):
            self.refused.labels(reason)
        self._registry.register(_Reports(proxy, pool, ServerState() if state is None else state))

    def render(self) -> bytes:
        """The exposition text (Prometheus text format 0.0.4)."""
        return generate_latest(self._registry)


class _Reports(Collector):
    """Turns the last reports into metrics when somebody asks."""

    def __init__(self, proxy: GenerationExecutor, pool: WorkerPool | None, state: ServerState) -> None:
        self._proxy, self._pool, self._state = proxy, pool, state

    def collect(self) -> Iterator[Metric]:
        proxy = self._proxy
        yield GaugeMetricFamily("tailrace_open_requests", "Requests without their last bytes", proxy.open_requests)
        yield CounterMetricFamily("tailrace_late_emissions", "Emission rows that came too late", proxy.late_rows)
        yield CounterMetricFamily("tailrace_refused_frames", "Malformed frames", proxy.refused_frames)
        if self._pool is not None:
            yield GaugeMetricFamily("tailrace_workers", "Workers that can work", len(self._pool.alive))
            yield CounterMetricFamily("tailrace_worker_restarts", "Workers started again", self._pool.restarts)
            yield GaugeMetricFamily("tailrace_paused_workers", "Workers whose next start waits", self._pool.paused)
        restarts = self._state.executor_restarts
        yield CounterMetricFamily("tailrace_executor_restarts", "Executors started again", restarts)
        for key, (name, text, counts) in _EXECUTOR.items():
            if key in proxy.status:
                yield _family(f"tailrace_executor_{name}", text, counts, {(): proxy.status[key]}, ())
        if (step_shipping := reported(STEP_SHIPPING, proxy.status)) is not None:
            text = "What the executor's loop adds to an engine step, by the wall"
            family = HistogramMetricFamily("tailrace_executor_step_shipping_seconds", text)
            family.add_metric((), *step_shipping)
            yield family
        for key, (name, text, counts) in _WORKER.items():
            values: dict[tuple[str, ...], float] = {
                (str(worker),): stats[key] for worker, stats in proxy.worker_stats.items() if key in stats
            }
            yield _family(f"tailrace_worker_{name}", text, counts, values, ("worker",))


def _family(
    name: str, text: str, counts: bool, values: dict[tuple[str, ...], float], labels: tuple[str, ...]
) -> Metric:
    family = (CounterMetricFamily if counts else GaugeMetricFamily)(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
