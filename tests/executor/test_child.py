"""A child process and its parent: config, READY, the end. The children here are real and do nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from executor.child import ChildError, ChildProcess

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
    [({"raise": "no model"}, "no model", 1), ({"exit": 3}, "exit code 3", 3), ({"say": "hello"}, "did not start", 0)],
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
