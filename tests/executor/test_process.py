"""The executor's process with real sockets: who is told what, and what becomes of the requests of a front end that is
gone."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor.child import ChildProcess
from executor.proxy import GenerationExecutor
from executor.request import SamplingParams
from postproc_workers.deltas import deltas_request


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="ex-") as made:
        yield Path(made)


async def until(holds: Callable[[], bool]) -> None:
    """Reports come once a second."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true within 10 s")


def test_requests_of_a_front_end_that_is_gone_are_aborted(directory: Path) -> None:
    addresses = [f"ipc://{directory}/frontend-{number}" for number in range(2)]
    config = {
        "address": f"ipc://{directory}/executor", "frontends": addresses, "incarnation": 0, "engine": "replay",
        "engine_args": {"config": {"step_interval": 0.05}}, "max_queued_tokens": 100, "queue_timeout": 0.0,
    }  # fmt: skip

    async def main() -> None:
        frontends = [GenerationExecutor(number) for number in range(2)]
        for frontend, address in zip(frontends, addresses):
            frontend.listen(address)
        child = await ChildProcess.spawn("executor", "executor.process", config)
        await child.ready()
        for frontend in frontends:
            frontend.executor_joined(str(config["address"]))
            rid = frontend.mint()
            frontend.submit(
                deltas_request(rid, [[1, 2]], SamplingParams(max_tokens=100_000), frontend=frontend.frontend)
            )
        leaving, staying = frontends
        await until(lambda: staying.status.get("open") == 2)
        await until(lambda: staying.status["steps"] > 10)
        # Each step is in the histogram of what the loop adds to one; a report may go out before its own step is in it.
        total, *counts = staying.status["step_shipping"]
        assert staying.status["steps"] - sum(counts) in (0, 1) and 0 < total < 10
        leaving.close()
        await until(lambda: staying.status["open"] == staying.status["engine_running"] == 1)
        assert await child.stop() == 0
        staying.close()

    asyncio.run(main())
