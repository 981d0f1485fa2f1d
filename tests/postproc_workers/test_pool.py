"""The pool keeps its workers at their number: real processes, without a tokenizer and with nobody to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from executor.child import ChildError
from executor.request import PostprocWorkerConfig
from postproc_workers import pool as pool_module
from postproc_workers.pool import WorkerPool


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="pool-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


class Watched:
    """A pool, and what it has told: ("joined", id), ("lost", id), ("hopeless", reason)."""

    def __init__(self, directory: Path, size: int, **postproc: Any) -> None:
        self.told: list[tuple[str, Any]] = []
        self._news = asyncio.Event()
        config = {
            "executor": f"ipc://{directory}/executor",
            "frontends": [f"ipc://{directory}/frontend-0"],
            "postproc": dataclasses.asdict(PostprocWorkerConfig(num_postprocess_workers=size, **postproc)),
        }
        self.pool = WorkerPool(
            size, config, lambda worker: f"ipc://{directory}/worker-{worker}",
            lambda worker, address: self._tell("joined", worker),
            lambda worker: self._tell("lost", worker),
            lambda reason: self._tell("hopeless", reason),
        )  # fmt: skip

    def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until what was told makes it true."""

        async def wait() -> None:
            while not condition():
                self._news.clear()
                await self._news.wait()

        await asyncio.wait_for(wait(), 60)

    def count(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.told)


def workers() -> list[psutil.Process]:
    """Worker processes of ours, as the system sees them."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "postproc_workers.process" in child.cmdline():
                found.append(child)
    return found


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on an event loop; no child may be left then."""
    try:
        uvloop.run(asyncio.wait_for(main(), 90))
        assert not workers()
    finally:
        for left in workers():
            left.kill()
            left.wait(10)


def test_start_and_stop(directory: Path) -> None:
    async def main() -> None:
        watched = Watched(directory, 2)
        assert watched.pool.alive == {}
        await watched.pool.start()
        assert sorted(watched.pool.alive) == [0, 1] and sorted(watched.told) == [("joined", 0), ("joined", 1)]
        pids = set(watched.pool.alive.values())
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        await watched.pool.stop()
        await watched.pool.stop()
        assert watched.pool.alive == {} and watched.pool.restarts == 0 and watched.count("lost") == 0

    run(main)


def test_a_dead_worker_is_replaced_under_a_new_id(directory: Path) -> None:
    async def main() -> None:
        watched = Watched(directory, 2)
        await watched.pool.start()
        before = watched.pool.alive
        os.kill(before[0], signal.SIGKILL)
        await watched.until(lambda: watched.count("joined") == 3)
        assert watched.told[2:] == [("lost", 0), ("joined", 2)]
        assert (
            sorted(watched.pool.alive) == [1, 2] and watched.pool.alive[1] == before[1] and watched.pool.restarts == 1
        )
        await watched.pool.stop()

    run(main)


def test_a_worker_that_dies_while_it_starts_is_replaced_too(directory: Path) -> None:
    """Killed at once, before it has read its config, and as often as its seat allows."""

    async def main() -> None:
        watched = Watched(directory, 1)
        await watched.pool.start()
        killed = {watched.pool.alive[0]}
        os.kill(watched.pool.alive[0], signal.SIGKILL)
        while len(killed) < 4:
            for child in workers():
                if child.pid not in killed:
                    child.kill()
                    killed.add(child.pid)
            await asyncio.sleep(0)
        await watched.until(lambda: watched.count("joined") == 2)
        assert watched.pool.restarts == 4 and watched.count("hopeless") == 0 and len(watched.pool.alive) == 1
        await watched.pool.stop()

    run(main)


def test_all_of_them_or_none(directory: Path) -> None:
    """One that cannot start ends the others, and says why."""

    async def main() -> None:
        watched = Watched(directory, 2, tokenizer=str(directory / "nothing.json"))
        with pytest.raises(ChildError, match=r"worker-\d did not start: .*nothing.json|No such file"):
            await watched.pool.start()
        assert watched.pool.alive == {}

    run(main)


def test_giving_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_FAILED_STARTS", 2)

    async def main() -> None:
        watched = Watched(directory, 1)
        await watched.pool.start()
        directory.chmod(0o755)  # an address in an open directory is refused
        os.kill(watched.pool.alive[0], signal.SIGKILL)
        await watched.until(lambda: watched.count("hopeless") == 1)
        assert watched.told[1] == ("lost", 0) and "0700" in watched.told[2][1]
        assert watched.pool.restarts == 2 and watched.pool.alive == {}
        await watched.pool.stop()

    run(main)


def test_stopping_while_a_replacement_starts(directory: Path) -> None:
    async def main() -> None:
        watched = Watched(directory, 1)
        await watched.pool.start()
        os.kill(watched.pool.alive[0], signal.SIGKILL)
        await watched.until(lambda: watched.count("lost") == 1)
        while watched.pool.restarts == 0:
            await asyncio.sleep(0)
        await watched.pool.stop()
        assert watched.count("joined") == 1

    run(main)
