"""A seat and its children, which are real: replaced when they die or hang, given up, ended whatever they are doing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from executor.child import ChildError, ChildProcess, beat_interval
from executor.seat import Seat
from executor.supervision import State

MODULE = "tests.executor.child_main"
HANG_TIMEOUT = 0.5


class Watched:
    """A seat, and what it has told: ("ready" | "lost", child's name, what it says | reason), ("hopeless", reason).

    configs: of the first child, the second, and so on; the last one is also that of all others.
    """

    def __init__(self, *configs: dict[str, Any], **settings: Any) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.spawned = 0
        self._configs = configs or ({},)
        self._news = asyncio.Event()
        settings.setdefault("hang_timeout", 0.0)
        self._beat_interval = beat_interval(settings["hang_timeout"])
        self.seat = Seat(
            "seat",
            settings.pop("spawn", self.spawn),
            on_ready=lambda child, info: self.tell("ready", child.name, info["echo"]),
            on_lost=lambda child, reason: self.tell("lost", child.name, reason),
            on_hopeless=lambda reason: self.tell("hopeless", reason),
            **settings,
        )

    async def spawn(self) -> ChildProcess:
        config = self._configs[min(self.spawned, len(self._configs) - 1)]
        self.spawned += 1
        return await ChildProcess.spawn(
            f"child-{self.spawned}", MODULE, {"beat_interval": self._beat_interval, **config}
        )

    def tell(self, *news: Any) -> None:
        self.told.append(news)
        self._news.set()

    async def until(self, *news: Any) -> None:
        """Until something that begins so was told."""
        while not any(told[: len(news)] == news for told in self.told):
            self._news.clear()
            await self._news.wait()

    @property
    def pid(self) -> int:
        assert self.seat.child is not None
        return self.seat.child.pid


def children() -> list[psutil.Process]:
    """Children of ours that run."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if MODULE in child.cmdline():
                found.append(child)
    return found


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on an event loop; no child may be left then."""
    try:
        uvloop.run(asyncio.wait_for(main(), 60))
        assert children() == []
    finally:
        for left in children():
            left.kill()
            left.wait(10)


@pytest.fixture
def fifos(tmp_path: Path) -> Iterator[Path]:
    return (fifo for fifo in (tmp_path / str(number) for number in itertools.count()) if os.mkfifo(fifo) is None)


# ---------------------------------------------------------------------------------------------------- start and stop


def test_a_child_comes_and_goes() -> None:
    async def main() -> None:
        watched = Watched({"echo": "hello"})
        seat = watched.seat
        assert seat.state is State.NEW and seat.child is None and seat.last_end is None
        await seat.start()
        assert watched.told == [("ready", "child-1", "hello")] and seat.state is State.WORKING
        assert psutil.pid_exists(watched.pid)
        await seat.stop()
        await seat.stop()
        assert seat.state is State.ENDED and seat.child is None and seat.restarts == 0
        assert seat.last_end == "child-1 ended: exit code 0" and len(watched.told) == 1

    run(main)


def test_a_seat_that_is_stopped_before_its_start() -> None:
    async def main() -> None:
        watched = Watched()
        await watched.seat.stop()
        assert watched.seat.state is State.ENDED and watched.spawned == 0

    run(main)


def test_the_first_start_is_not_tried_again() -> None:
    async def main() -> None:
        watched = Watched({"raise": "no model"}, {})
        with pytest.raises(ChildError, match="child-1 did not start: .*no model"):
            await watched.seat.start()
        assert watched.seat.state is State.ENDED and watched.spawned == 1 and watched.told == []
        assert watched.seat.last_end is not None and "no model" in watched.seat.last_end
        await watched.seat.stop()

    run(main)


@pytest.mark.parametrize("error", [ChildError("seat did not start: no room"), OSError("no room")], ids=repr)
def test_a_child_that_cannot_be_spawned(error: Exception) -> None:
    async def refuse() -> ChildProcess:
        raise error

    async def main() -> None:
        watched = Watched(spawn=refuse)
        with pytest.raises(ChildError, match="seat did not start: no room"):
            await watched.seat.start()
        await watched.seat.stop()

    run(main)


def test_a_child_that_does_not_end_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watched = Watched({"hang": True})
        await watched.seat.start()
        await watched.seat.stop(timeout=0.1)
        assert watched.seat.last_end == "child-1 ended: signal 9 (SIGKILL)" and len(watched.told) == 1

    run(main)
    assert "seat did not end within 0.1 s and is killed" in caplog.text


def test_a_stop_that_is_cancelled_kills() -> None:
    async def main() -> None:
        watched = Watched({"hang": True})
        await watched.seat.start()
        stopping = asyncio.create_task(watched.seat.stop(1000.0))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        await watched.seat.stop(1000.0)
        assert watched.seat.last_end == "child-1 ended: signal 9 (SIGKILL)"

    run(main)


# ---------------------------------------------------------------------------------------------------- stop on the way


def test_stopping_while_a_child_is_spawned() -> None:
    """Also before its task has had a turn."""

    async def never() -> ChildProcess:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        for turns in (0, 1):
            entered.clear()
            watched = Watched(spawn=never)
            starting = asyncio.create_task(watched.seat.start())
            await (entered.wait() if turns else asyncio.sleep(0))
            await watched.seat.stop()
            with pytest.raises(ChildError, match="seat was stopped while it started"):
                await starting
            assert watched.seat.state is State.ENDED

    entered = asyncio.Event()
    run(main)


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_stopping_while_a_child_starts(fifos: Iterator[Path], how: str) -> None:
    """It is killed: what it is loading would not notice anything else."""

    async def main() -> None:
        gate = next(fifos)
        watched = Watched({"gate": str(gate)})
        starting = asyncio.create_task(watched.seat.start())
        file = await asyncio.to_thread(gate.open, "wb")  # opens once the child has opened it too
        assert watched.seat.state is State.STARTING and watched.seat.child is None
        if how == "stop":
            await watched.seat.stop()
        else:
            starting.cancel()
        with pytest.raises(ChildError if how == "stop" else asyncio.CancelledError):
            await starting
        assert watched.seat.state is State.ENDED and children() == []
        await asyncio.to_thread(file.close)

    run(main)


@pytest.mark.parametrize("turns", range(6))
def test_stopping_at_any_turn_of_a_replacement(turns: int) -> None:
    async def main() -> None:
        watched = Watched()
        await watched.seat.start()
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until("lost")
        while watched.seat.restarts == 0:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await watched.seat.stop()
        assert watched.seat.state is State.ENDED and [kind for kind, *_ in watched.told] == ["ready", "lost"]

    run(main)


def test_stopping_in_a_pause() -> None:
    async def main() -> None:
        watched = Watched()
        await watched.seat.start()
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until("lost")
        assert watched.seat.state is State.PAUSED
        await watched.seat.stop()
        assert watched.seat.state is State.ENDED and watched.spawned == 1

    run(main)


# ---------------------------------------------------------------------------------------------------- replacements


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "signal 9 (SIGKILL)"),
        (signal.SIGSEGV, "signal 11 (SIGSEGV)"),
        (signal.SIGTERM, "exit code 0"),  # nobody had asked it to
        (signal.SIGUSR2, "exit code 1 (RuntimeError: asked to fail)"),
    ],
)
def test_a_child_that_dies_is_replaced(number: signal.Signals, reason: str) -> None:
    async def main() -> None:
        watched = Watched()
        await watched.seat.start()
        os.kill(watched.pid, number)
        await watched.until("ready", "child-2")
        assert watched.told[1:] == [("lost", "child-1", reason), ("ready", "child-2", None)]
        assert watched.seat.last_end == f"child-1 ended: {reason}" and watched.seat.restarts == 1
        await watched.seat.stop()

    run(main)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGSTOP])
def test_a_child_that_hangs_is_killed_and_replaced(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watched = Watched(hang_timeout=HANG_TIMEOUT)
        await watched.seat.start()
        os.kill(watched.pid, number)
        await watched.until("lost", "child-1", "hung for 0.5 s")
        await watched.until("ready", "child-2")
        assert watched.seat.last_end == "child-1 ended: hung for 0.5 s"
        await watched.seat.stop()

    run(main)
    assert "child-1 hangs: its loop has not turned for 0.5 s; it is killed" in caplog.text


def test_nobody_hangs_for_a_parent_that_stood_still(fifos: Iterator[Path]) -> None:
    """It stands still for longer than the timeout, as under SIGSTOP; then it waits as long again, and looks."""
    first, second = next(fifos), next(fifos)
    turns = int(1.5 * 2 * HANG_TIMEOUT / 0.05)

    async def main() -> None:
        config = {"beat_interval": 0.05, "tell": {turns: str(first), 2 * turns: str(second)}}
        watched = Watched(config, hang_timeout=2 * HANG_TIMEOUT)
        await watched.seat.start()
        first.read_text()  # so long no turn of the event loop
        await asyncio.to_thread(second.read_text)
        assert len(watched.told) == 1 and watched.seat.restarts == 0
        await watched.seat.stop()

    run(main)


def test_starts_that_fail_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        watched = Watched({}, {"raise": "no model"}, {"exit": 7}, {})
        await watched.seat.start()
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until("ready", "child-4")
        assert [kind for kind, *_ in watched.told] == ["ready", "lost", "ready"] and watched.seat.restarts == 3
        await watched.seat.stop()

    run(main)
    attempts = [record.message for record in caplog.records if record.message.startswith("attempt")]
    assert attempts == [
        "attempt 1: child-2 did not start: RuntimeError: no model",
        "attempt 2: child-3 did not start: it ended with exit code 7",
    ]


# ---------------------------------------------------------------------------------------------------- giving up


def test_giving_up_after_starts_that_failed() -> None:
    async def main() -> None:
        watched = Watched({}, {"exit": 7}, max_failed_starts=2)
        await watched.seat.start()
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until("hopeless")
        assert watched.told[2:] == [("hopeless", "child-3 did not start: it ended with exit code 7")]
        assert watched.seat.state is State.HOPELESS and watched.seat.restarts == 2
        await watched.seat.stop()

    run(main)


def test_not_giving_up_while_others_do_the_work() -> None:
    async def main() -> None:
        watched = Watched({}, {"exit": 7}, max_failed_starts=1, others_alive=lambda: watched.spawned < 4)
        await watched.seat.start()
        os.kill(watched.pid, signal.SIGKILL)
        await watched.until("hopeless")
        assert watched.spawned == 4
        await watched.seat.stop()

    run(main)


def test_giving_up_after_lives_that_were_short() -> None:
    async def main() -> None:
        watched = Watched(max_short_lives=2)
        await watched.seat.start()
        for name in ("child-1", "child-2"):
            await watched.until("ready", name)
            os.kill(watched.pid, signal.SIGKILL)
            await watched.until("lost", name)
        reason = "child-2 ended: signal 9 (SIGKILL), 2 times in a row within 10 s of its start"
        assert watched.told[-1] == ("hopeless", reason)
        await watched.seat.stop()

    run(main)


@pytest.mark.parametrize("fails", ["on_ready", "on_lost"])
def test_a_callback_that_fails_is_told_and_leaves_no_process(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        told: list[str] = []
        calls: dict[str, Callable[..., None]] = {"on_ready": lambda *_: None, "on_lost": lambda *_: None}

        def fail(*args: object) -> None:
            raise LookupError("a fault of ours")

        seat = Seat("seat", Watched().spawn, on_hopeless=told.append, **{**calls, fails: fail})
        if fails == "on_ready":
            with pytest.raises(LookupError):
                await seat.start()
        else:
            await seat.start()
            assert seat.child is not None
            process = psutil.Process(seat.child.pid)
            process.kill()
            while not told:
                await asyncio.sleep(0)
        assert told == ["seat is watched no more: LookupError('a fault of ours')"]
        await seat.stop()

    run(main)
    assert "a fault of ours" in caplog.text
