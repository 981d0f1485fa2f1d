"""A child process and its parent: config, READY, beats, the end. The children here are real and do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil
import pytest
import uvloop

from executor.child import BEAT_INTERVAL, ChildError, ChildProcess, beat_interval, end_in_words

T = TypeVar("T")
MODULE = "tests.executor.child_main"


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def started(**config: Any) -> ChildProcess:
    return await ChildProcess.spawn("child", MODULE, config)


def test_a_child_is_ready_and_ends_when_asked() -> None:
    async def main() -> None:
        child = await started(echo=[1, "é"])
        info = await child.ready()
        assert info["echo"] == [1, "é"] and info["name"] == "child" and info["pid"] == child.pid
        assert child.returncode is None
        assert await child.stop() == 0 == child.returncode
        assert await child.stop() == 0 and await child.wait() == 0
        child.kill()

    run(main())


@pytest.mark.parametrize(
    ("config", "reason", "code"),
    [
        ({"raise": "no model"}, "no model", 1),
        ({"raise": "x" * 100_000}, "xxx", 1),
        ({"exit": 3}, "it ended with exit code 3", 3),
        ({"say": "hello"}, "did not start", 0),
    ],
)
def test_a_child_that_does_not_come_up(config: dict[str, Any], reason: str, code: int) -> None:
    async def main() -> None:
        child = await started(**config)
        with pytest.raises(ChildError, match=reason):
            await child.ready()
        assert child.returncode == code

    run(main())


def test_ctrl_c_is_the_parents_business() -> None:
    """Both signals in one go: the first must not end the child, the second ends it in order."""

    async def main() -> None:
        child = await started()
        await child.ready()
        child._process.send_signal(signal.SIGINT)
        assert await child.stop() == 0

    run(main())


def test_a_child_that_hangs_is_killed() -> None:
    async def main() -> None:
        child = await started(hang=True)
        await child.ready()
        assert await child.stop(timeout=0.05) == -signal.SIGKILL

    run(main())


def test_a_child_ends_with_its_parent() -> None:
    """The pipe of its stdin closes."""

    async def main() -> None:
        child = await started()
        await child.ready()
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert await child.wait() == 0

    run(main())


@pytest.mark.parametrize(
    "line",
    [b"", b"{}\n", b"nonsense\n", b"[1]\n", b"null\n", b'{"name": 5}\n', b'{"name": "x", "log_level": "loud"}\n'],
)
def test_a_bad_config_is_a_usage_error(line: bytes) -> None:
    done = subprocess.run([sys.executable, "-m", MODULE], input=line, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2 and b"config" in done.stderr


# ---------------------------------------------------------------------------------------------------- beats and ends


def test_a_child_beats_while_its_loop_turns() -> None:
    """Also one that has nothing to do, until it ends."""

    async def main() -> None:
        child = await started(beat_interval=0.01)
        await child.ready()
        assert [await child.beat() for _ in range(3)] == [True] * 3
        await child.stop()
        while await child.beat():
            pass
        assert child.end == "exit code 0"

    run(main())


def test_a_loop_that_turns_fast_beats_no_more_often(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def main() -> None:
        child = await started(beat_interval=1000.0, flood=100, tell={1: str(fifo)})
        await child.ready()
        fifo.read_text()
        await child.stop()
        assert await child.beat() and not await child.beat()

    run(main())


def test_a_parent_that_does_not_read_holds_no_child_up(tmp_path: Path) -> None:
    """More beats than any pipe has room for; they are dropped, and the child still ends when it is asked to."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def main() -> None:
        child = await started(beat_interval=0, flood=100_000, tell={1: str(fifo)})
        await child.ready()
        assert fifo.read_text() == "turned"  # the event loop stands still
        assert await child.stop() == 0

    run(main())


def test_a_child_that_fails_in_its_loop_says_why() -> None:
    async def main() -> None:
        child = await started(beat_interval=0.01)
        await child.ready()
        os.kill(child.pid, signal.SIGUSR2)
        assert await child.wait() == 1
        while await child.beat():
            pass
        assert child.end == "exit code 1 (RuntimeError: asked to fail)"

    run(main())


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal 9 (SIGKILL)"), (-11, "signal 11 (SIGSEGV)")]
    + [(-signal.SIGRTMIN - 1, f"signal {signal.SIGRTMIN + 1}")],
)
def test_an_end_in_words(code: int, words: str) -> None:
    assert end_in_words(code) == words


@pytest.mark.parametrize(("hang_timeout", "interval"), [(0, BEAT_INTERVAL), (100, BEAT_INTERVAL), (1, 0.1)])
def test_beats_are_as_frequent_as_a_hang_must_be_found(hang_timeout: float, interval: float) -> None:
    assert beat_interval(hang_timeout) == interval


# ---------------------------------------------------------------------------------------------------- spawning


def children() -> set[int]:
    """Process ids of children of ours that run."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
    return found


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=lambda module: module.__name__)
def test_a_spawn_that_is_cancelled_leaves_no_process(loop: ModuleType) -> None:
    """Whatever step it is at; the config is larger than a pipe, so that the last step is to wait for the child."""

    async def main() -> None:
        for steps in range(8):
            spawning = asyncio.create_task(started(echo="x" * 10_000_000))
            for _ in range(steps):
                await asyncio.sleep(0)
            spawning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await spawning

    before = children()
    loop.run(main())
    assert children() == before


def test_a_process_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here for its environment, which is too large; want of memory or processes is told in the same way."""
    monkeypatch.setenv("TOO_LARGE", "x" * (1 << 20))

    async def main() -> None:
        with pytest.raises(ChildError, match="child did not start: .*Argument list too long"):
            await started()

    run(main())
