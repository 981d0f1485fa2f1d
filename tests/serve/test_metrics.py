"""/metrics: what is counted here, and the reports of executor and workers as they last came."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from executor.histogram import STEP_BOUNDS, STEP_SHIPPING, Histogram
from executor.messages import Emissions, Status
from executor.proxy import GenerationExecutor
from postproc_workers.pool import WorkerPool
from serve.metrics import ServerMetrics

REPORT = {
    "queue_age_seconds": 0.25, "batch_rows": 3, "open": 2, "tokens": 100, "chunks": 50, "rows": 90, "coalesced": 10,
    "late": 4, "failed": 1, "busy_seconds": 1.5, "refused_frames": 0, "something new": 5,
}  # fmt: skip


def pool(size: int) -> WorkerPool:
    return WorkerPool(size, {}, str, lambda worker, address: None, lambda worker: None, lambda reason: None)


def rendered(proxy: GenerationExecutor, workers: WorkerPool | None = None) -> dict[str, Any]:
    """``name{labels}`` -> value, as a Prometheus parser reads it."""
    values = {}
    for family in text_string_to_metric_families(ServerMetrics(proxy, workers).render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            values[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return values


def report(worker: int, stats: dict[str, Any]) -> Emissions:
    return Emissions(worker, (), (), (), (), (), (), b"", stats)


def test_before_anybody_has_reported() -> None:
    values = rendered(GenerationExecutor())
    assert values["tailrace_open_requests"] == 0
    reported = [name for name in values if name.startswith(("tailrace_executor", "tailrace_worker"))]
    assert reported == ["tailrace_executor_restarts_total"]


def test_each_worker_has_its_series() -> None:
    proxy = GenerationExecutor()
    proxy.receive(report(0, REPORT))
    proxy.receive(report(3, {**REPORT, "tokens": 7}))
    values = rendered(proxy)
    assert values["tailrace_worker_queue_age_seconds{worker=0}"] == 0.25
    assert values["tailrace_worker_batch_rows{worker=0}"] == 3
    assert values["tailrace_worker_tokens_total{worker=0}"] == 100
    assert values["tailrace_worker_tokens_total{worker=3}"] == 7
    assert values["tailrace_worker_coalesced_rows_total{worker=3}"] == 10
    assert values["tailrace_worker_late_tokens_total{worker=3}"] == 4
    assert values["tailrace_worker_busy_seconds_total{worker=0}"] == 1.5
    assert len([name for name in values if name.endswith("{worker=0}")]) == len(REPORT) - 1


def test_a_lost_worker_takes_its_series_along() -> None:
    proxy = GenerationExecutor()
    proxy.connect_in_process(lambda message: None)
    proxy.receive(report(0, REPORT))
    proxy.worker_lost(0)
    proxy.receive(report(0, REPORT))
    assert not [name for name in rendered(proxy) if "worker=0" in name]


def test_the_executors_report() -> None:
    proxy = GenerationExecutor()
    proxy.receive(Status({"open": 4, "parked": 1, "engine_running": 8, "tokens": 12, "resumed": 2, "new": 1}))
    values = rendered(proxy)
    assert values["tailrace_executor_open_requests"] == 4 and values["tailrace_executor_running_outputs"] == 8
    assert values["tailrace_executor_tokens_total"] == 12 and values["tailrace_executor_resumed_requests_total"] == 2


def test_what_the_executor_adds_to_a_step() -> None:
    proxy = GenerationExecutor()
    histogram = Histogram(STEP_BOUNDS)
    for seconds in (0.00012, 0.0004, 7.0):
        histogram.observe(seconds)
    proxy.receive(Status({"tokens": 12, **histogram.report(STEP_SHIPPING)}))
    values, name = rendered(proxy), "tailrace_executor_step_shipping_seconds"
    assert values[f"{name}_bucket{{le=0.0001}}"] == 0 and values[f"{name}_bucket{{le=0.0005}}"] == 2
    assert values[f"{name}_bucket{{le=+Inf}}"] == values[f"{name}_count"] == 3
    assert values[f"{name}_sum"] == 7.00052


def test_the_pool() -> None:
    values = rendered(GenerationExecutor(), pool(2))
    assert values["tailrace_workers"] == 0 and values["tailrace_worker_restarts_total"] == 0


def test_own_counters() -> None:
    metrics = ServerMetrics(GenerationExecutor(), None)
    metrics.requests.labels("/a", "200").inc()
    metrics.duration.observe(0.3)
    metrics.first_chunk.observe(0.02)
    metrics.disconnects.inc()
    metrics.slow_clients.labels("bytes").inc()
    metrics.refused.labels("queue").inc(2)
    text = metrics.render().decode()
    assert 'tailrace_http_requests_total{path="/a",status="200"} 1.0' in text
    assert "tailrace_disconnects_total 1.0" in text and 'tailrace_request_seconds_bucket{le="0.5"} 1.0' in text
    assert 'tailrace_slow_clients_total{limit="bytes"} 1.0' in text
    assert 'tailrace_slow_clients_total{limit="seconds"} 0.0' in text  # there from the start
    for reason, count in {"requests": 0, "queue": 2, "timeout": 0, "unready": 0}.items():
        assert f'tailrace_refused_requests_total{{reason="{reason}"}} {count}.0' in text
    assert 'tailrace_first_chunk_seconds_bucket{le="0.025"} 1.0' in text


def test_registries_are_apart() -> None:
    """Two servers in one process, as tests have them."""
    ServerMetrics(GenerationExecutor(), None)
    ServerMetrics(GenerationExecutor(), None)
