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
from postproc_workers.marker import Marker
from postproc_workers.pool import WorkerPool


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="pool-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


class Watched:
    """A pool, and what it has told: ("joined", id), ("lost", id), ("hopeless", reason)."""

    def __init__(self, directory: Path, size: int, *, hang_timeout: float = 10.0, **postproc: Any) -> None:
        self.told: list[tuple[str, Any]] = []
        #: of each lost worker
        self.culprits: list[int] = []
        self.at_news: Callable[[], object] = lambda: None
        self._news = asyncio.Event()
        config = {
            "executor": f"ipc://{directory}/executor",
            "frontends": [f"ipc://{directory}/frontend-0"],
            "postproc": dataclasses.asdict(PostprocWorkerConfig(num_postprocess_workers=size, **postproc)),
        }
        self.pool = WorkerPool(
            size, config, lambda worker: f"ipc://{directory}/worker-{worker}",
            lambda worker, address: self._tell("joined", worker),
            self._lost,
            lambda reason: self._tell("hopeless", reason),
            hang_timeout=hang_timeout,
        )  # fmt: skip

    def _lost(self, worker: int, culprit: int) -> None:
        self.culprits.append(culprit)
        self._tell("lost", worker)

    def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        self.at_news()
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


def files(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


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
        assert watched.pool.paused == 0 and watched.pool.ends == []
        assert files(directory) == ["worker-0", "worker-0.marker", "worker-1", "worker-1.marker"]
        await watched.pool.stop()
        await watched.pool.stop()
        assert files(directory) == []
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
        assert sorted(watched.pool.alive) == [1, 2] and watched.pool.alive[1] == before[1]
        assert watched.pool.restarts == 1 and watched.culprits == [-1]
        assert watched.pool.ends == ["worker-0 ended: signal 9 (SIGKILL)"]
        assert files(directory) == ["worker-1", "worker-1.marker", "worker-2", "worker-2.marker"]
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
        assert watched.pool.alive == {} and files(directory) == []

    run(main)


def test_a_start_that_is_cancelled(directory: Path) -> None:
    """Just when one of its workers can work, and the other cannot yet."""

    async def main() -> None:
        watched = Watched(directory, 2)
        starting = asyncio.create_task(watched.pool.start())
        watched.at_news = starting.cancel
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert watched.pool.alive == {} and files(directory) == []

    run(main)


def test_who_was_handled_by_a_worker_that_died(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watched = Watched(directory, 1)
        await watched.pool.start()
        Marker.open(directory / "worker-0.marker").cells[0] = 4711
        os.kill(watched.pool.alive[0], signal.SIGKILL)
        await watched.until(lambda: watched.count("joined") == 2)
        os.kill(watched.pool.alive[1], signal.SIGKILL)  # which was handling nobody
        await watched.until(lambda: watched.count("lost") == 2)
        assert watched.culprits == [4711, -1] and not (directory / "worker-0.marker").exists()
        await watched.pool.stop()

    run(main)
    assert "worker-0 ended while it handled request 4711: signal 9 (SIGKILL); its requests go on" in caplog.text


def test_a_worker_that_stands_still_is_replaced(directory: Path) -> None:
    async def main() -> None:
        watched = Watched(directory, 1, hang_timeout=1.0)
        await watched.pool.start()
        os.kill(watched.pool.alive[0], signal.SIGSTOP)
        await watched.until(lambda: watched.count("joined") == 2)
        assert watched.pool.ends == ["worker-0 ended: hung for 1 s"] and watched.pool.restarts == 1
        await watched.pool.stop()

    run(main)


def test_a_crash_loop_shows(directory: Path) -> None:
    """While a seat waits, and in how its workers ended."""

    async def main() -> None:
        watched = Watched(directory, 1)
        await watched.pool.start()
        directory.chmod(0o755)  # an address in an open directory is refused
        os.kill(watched.pool.alive[0], signal.SIGKILL)
        await watched.until(lambda: watched.count("lost") == 1)
        assert watched.pool.paused == 1 and watched.pool.alive == {} and files(directory) == []
        while watched.pool.restarts < 2:
            await asyncio.sleep(0)
        (end,) = watched.pool.ends
        assert end.startswith("worker-1 did not start: ") and "0700" in end
        await watched.pool.stop()
        assert watched.pool.paused == 0 and files(directory) == []

    run(main)


def test_a_directory_that_is_gone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone has tidied up: without it there can be no worker, and that is said."""
    monkeypatch.setattr(pool_module, "MAX_FAILED_STARTS", 2)

    async def main() -> None:
        watched = Watched(directory, 1)
        await watched.pool.start()
        shutil.rmtree(directory)
        os.kill(watched.pool.alive[0], signal.SIGKILL)
        await watched.until(lambda: watched.count("hopeless") == 1)
        assert "did not start: [Errno 2]" in watched.told[-1][1] and watched.culprits == [-1]
        await watched.pool.stop()

    run(main)


def test_several_seats_give_up_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_FAILED_STARTS", 1)

    async def main() -> None:
        watched = Watched(directory, 2)
        await watched.pool.start()
        directory.chmod(0o755)
        for pid in watched.pool.alive.values():
            os.kill(pid, signal.SIGKILL)
        await watched.until(lambda: watched.count("hopeless") == 1)
        while not all("did not start" in end for end in watched.pool.ends):
            await asyncio.sleep(0)
        await watched.pool.stop()
        assert watched.count("hopeless") == 1

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
