"""/metrics: what is counted here, and the reports of executor and workers as they last came."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from executor.histogram import STEP_BOUNDS, Histogram
from executor.messages import Emissions, Status
from executor.proxy import GenerationExecutor
from postproc_workers.pool import WorkerPool
from serve.metrics import ServerMetrics

REPORT = {
    "batch_rows": 3, "open": 2, "tokens": 100, "chunks": 50, "rows": 90, "coalesced": 10,
    "late": 4, "failed": 1, "busy_seconds": 1.5, "refused_frames": 0, "something new": 5,
}  # fmt: skip
#: One observation in the first bucket, two in the last but one, three beyond.
COUNTED = [55.5, 1, *[0] * 14, 2, 3]


def pool(size: int) -> WorkerPool:
    return WorkerPool(size, {}, str, lambda worker, address: None, lambda worker: None, lambda reason: None)


def rendered(proxy: GenerationExecutor, workers: WorkerPool | None = None) -> dict[str, Any]:
    """``name{labels}`` -> value, as a Prometheus parser reads it."""
    values = {}
    for family in text_string_to_metric_families(ServerMetrics(proxy, workers).render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
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
    assert values["tailrace_worker_batch_rows{worker=0}"] == 3
    assert values["tailrace_worker_tokens_total{worker=0}"] == 100
    assert values["tailrace_worker_tokens_total{worker=3}"] == 7
    assert values["tailrace_worker_coalesced_rows_total{worker=3}"] == 10
    assert values["tailrace_worker_late_tokens_total{worker=3}"] == 4
    assert values["tailrace_worker_busy_seconds_total{worker=0}"] == 1.5
    assert len([name for name in values if name.endswith("{worker=0}")]) == len(REPORT) - 1


def test_each_worker_has_its_histograms() -> None:
    proxy = GenerationExecutor()
    proxy.receive(report(0, {"queue_age": COUNTED, "post_processing": COUNTED}))
    proxy.receive(report(3, {"queue_age": [0.0, *[0] * 17]}))
    values = rendered(proxy)
    for name in ("queue_age", "post_processing"):
        buckets = {
            key.partition("le=")[2].partition(",")[0]: value
            for key, value in values.items()
            if key.startswith(f"tailrace_worker_{name}_seconds_bucket") and key.endswith("worker=0}")
        }
        assert len(buckets) == 17 and list(buckets.values()) == sorted(buckets.values())
        assert (buckets["0.0001"], buckets["5.0"], buckets["10.0"], buckets["+Inf"]) == (1, 1, 3, 6)
        assert values[f"tailrace_worker_{name}_seconds_count{{worker=0}}"] == 6
        assert values[f"tailrace_worker_{name}_seconds_sum{{worker=0}}"] == 55.5
    assert values["tailrace_worker_queue_age_seconds_count{worker=3}"] == 0
    assert "tailrace_worker_post_processing_seconds_count{worker=3}" not in values


def test_a_report_with_its_kinds_mixed_up_costs_its_series_alone() -> None:
    proxy = GenerationExecutor()
    proxy.receive(report(0, {"queue_age": 5, "tokens": COUNTED, "rows": 7}))
    values = rendered(proxy)
    assert values["tailrace_worker_rows_total{worker=0}"] == 7
    assert not [name for name in values if "queue_age" in name or "worker_tokens" in name]


def test_the_lag_of_chunks() -> None:
    proxy = GenerationExecutor()
    proxy.write_lag.observe(0.0002)
    proxy.chunk_lag.observe(0.3)
    proxy.chunk_lag.observe(20)
    values = rendered(proxy)

    def of(name: str, histogram: str) -> float:
        return float(values[f"tailrace_{histogram}_seconds_{name}"])

    assert of("bucket{frontend=0,le=0.0001}", "write_lag") == 0
    assert of("bucket{frontend=0,le=0.00025}", "write_lag") == of("count{frontend=0}", "write_lag") == 1
    assert of("bucket{frontend=0,le=10.0}", "chunk_lag") == 1
    assert of("count{frontend=0}", "chunk_lag") == 2 and of("sum{frontend=0}", "chunk_lag") == 20.3


def test_a_lost_worker_takes_its_series_along() -> None:
    proxy = GenerationExecutor()
    proxy.connect_in_process(lambda message: None)
    proxy.receive(report(0, REPORT | {"queue_age": COUNTED}))
    proxy.worker_lost(0)
    proxy.receive(report(0, REPORT | {"queue_age": COUNTED}))
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
    proxy.receive(Status({"tokens": 12, "step_shipping": histogram.report()}))
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
