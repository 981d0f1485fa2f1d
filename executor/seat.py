"""A seat: one child process at a time, watched, ended and replaced.

The states and their order stand in ``executor.supervision``; here is what carries them out on an event loop. Each child
has one task, ``_live``, which waits for what happens to it and feeds that to the table; ticks that look for a hanging
child, and the lines that it writes, have tasks that live within. So what is told of a child comes from a task that
ends with it, and cannot be taken for news of its successor.

No process is left behind: ``stop`` returns when the child is gone, whatever it was doing, and ``_live`` kills its
child on every way out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from executor.child import ChildError, ChildProcess
from executor.supervision import SETTLED, Action, Event, Pulse, State, Supervised

logger = logging.getLogger("tailrace.seat")

_LAST_WORDS = 0.2
"""Seconds that a dead child's output is read on: it may have said why it ended, and only a process that it has started
itself can hold the pipe open."""


class Seat:
    """One child process, and those that replace it.

    name: for messages about the seat; each child brings its own. spawn(): start a child; ChildError or OSError if that
    cannot be. Called on the event loop: on_ready(child, what it says of itself); on_lost(child, reason), for each child
    that was ready and has ended without being asked to; on_hopeless(reason), once, when nobody will come any more.

    others_alive(): whether the work goes on without this seat; then it is not given up for failed starts.
    hang_timeout: seconds without a beat after which a child is killed; 0: never. Its config needs the matching
    ``beat_interval`` (see ``executor.child``). max_failed_starts, max_short_lives: see ``Supervised``.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[ChildProcess]],
        *,
        on_ready: Callable[[ChildProcess, dict[str, Any]], None],
        on_lost: Callable[[ChildProcess, str], None],
        on_hopeless: Callable[[str], None],
        others_alive: Callable[[], bool] = lambda: False,
        hang_timeout: float = 10.0,
        max_failed_starts: int = 5,
        max_short_lives: int = 0,
    ) -> None:
        self.name = name
        #: how the last child ended, or why it could not start
        self.last_end: str | None = None
        self._spawn = spawn
        self._on_ready, self._on_lost, self._on_hopeless = on_ready, on_lost, on_hopeless
        self._others_alive = others_alive
        self._hang_timeout = hang_timeout
        self._supervised = Supervised(max_failed_starts, max_short_lives)
        self._child: ChildProcess | None = None
        #: what the child says of itself, and how it ended in short
        self._info: dict[str, Any] = {}
        self._reason = ""
        self._life: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: the outcome of the first start
        self._started: asyncio.Future[None] | None = None
        self._actions: dict[Action, Callable[[], None]] = {
            Action.SPAWN: self._do_spawn,
            Action.ANNOUNCE: self._do_announce,
            Action.MOURN: self._do_mourn,
            Action.KILL: self._do_kill,
            Action.ASK_TO_END: self._do_ask_to_end,
            Action.PAUSE: self._do_pause,
            Action.GIVE_UP: self._do_give_up,
        }

    @property
    def state(self) -> State:
        """Where the seat stands."""
        return self._supervised.state

    @property
    def child(self) -> ChildProcess | None:
        """The child that works; None while there is none."""
        return self._child if self.state is State.WORKING else None

    @property
    def restarts(self) -> int:
        """Attempts to start a child again, failed ones included."""
        return self._supervised.restarts

    async def start(self) -> None:
        """Start the first child; returns when it can work. ChildError with the reason if it cannot: the first start is
        not tried again. Cancelled, it leaves no process."""
        self._started = asyncio.get_running_loop().create_future()
        self._feed(Event.START)
        try:
            await self._started
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def stop(self, timeout: float = 5.0) -> None:
        """End the child, by force once ``timeout`` seconds have passed, and replace it no more; idempotent."""
        self._feed(Event.STOP)
        if self._timer is not None:
            self._timer.cancel()
        if self._life is None:
            return
        try:
            await asyncio.wait({self._life}, timeout=timeout)
        finally:  # also when the caller has lost patience
            if not self._life.done():
                logger.warning("%s did not end within %.1f s and is killed", self.name, timeout)
                self._feed(Event.OVERDUE)
        await asyncio.wait({self._life})

    # -------------------------------------------------------------------------------- events

    def _feed(self, event: Event, now: float | None = None) -> None:
        if now is None:
            now = asyncio.get_running_loop().time()
        for action in self._supervised.handle(event, now, self._others_alive()):
            self._actions[action]()
        if self._started is not None and not self._started.done():
            if self.state is State.WORKING:
                self._started.set_result(None)
            elif self.state is State.ENDED:
                self._started.set_exception(ChildError(self.last_end or f"{self.name} was stopped"))

    async def _live(self) -> None:
        """One child, from its spawn to its end."""
        child: ChildProcess | None = None
        try:
            self._child = child = await self._spawn()
            self._info = await child.ready()
        except (ChildError, OSError) as error:
            self._fail(str(error) if isinstance(error, ChildError) else f"{self.name} did not start: {error}")
        else:
            self._feed(Event.READY)
            await self._watch(child)
        finally:
            if child is not None:
                child.kill()
                await child.wait()

    def _fail(self, reason: str) -> None:
        self.last_end = self._reason = reason
        if self.state is State.RESTARTING:
            logger.error("attempt %d: %s", self._supervised.failures + 1, reason)
        self._feed(Event.FAILED)

    def _after_life(self, life: asyncio.Task[None]) -> None:
        """The task of a child is over, and so is the child."""
        if life.cancelled():
            if self.state is State.STOPPING:  # it was being spawned
                self._fail(f"{self.name} was stopped while it started")
        elif (error := life.exception()) is not None:
            # A callback has failed. Nobody watches this seat any more: better no server than one that nobody mends.
            if self._started is not None and not self._started.done():
                self._started.set_exception(error)
            self._on_hopeless(f"{self.name} is watched no more: {error!r}")
            raise error

    async def _watch(self, child: ChildProcess) -> None:
        """From READY to the end."""
        pulse = Pulse(self._hang_timeout)
        with _tasks(self._listen(child, pulse), self._tick(child, pulse)) as (listening, _):
            await child.wait()
            await asyncio.wait({listening}, timeout=_LAST_WORDS)
        hung = self.state is State.KILLED
        self._reason = f"hung for {self._hang_timeout:g} s" if hung else child.end
        self.last_end = f"{child.name} ended: {self._reason}"
        self._feed(Event.EXITED)

    async def _listen(self, child: ChildProcess, pulse: Pulse) -> None:
        while await child.beat():
            pulse.beat()

    async def _tick(self, child: ChildProcess, pulse: Pulse) -> None:
        if not self._hang_timeout:
            return
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(pulse.interval)
            now = loop.time()
            if pulse.tick(now - last):
                break
            last = now
        if self.state is State.WORKING:
            logger.error("%s hangs: its loop has not turned for %g s; it is killed", child.name, self._hang_timeout)
        self._feed(Event.HUNG, now - self._hang_timeout)

    # -------------------------------------------------------------------------------- actions

    def _do_spawn(self) -> None:
        self._child = None
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._life.add_done_callback(self._after_life)

    def _do_announce(self) -> None:
        assert self._child is not None
        self._on_ready(self._child, self._info)

    def _do_mourn(self) -> None:
        assert self._child is not None
        self._on_lost(self._child, self._reason)

    def _do_kill(self) -> None:
        if self._child is not None:
            self._child.kill()
        elif self._life is not None:  # it is being spawned; that leaves no process when it is cancelled
            self._life.cancel()

    def _do_ask_to_end(self) -> None:
        assert self._child is not None
        self._child.ask_to_end()

    def _do_pause(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._supervised.pause, self._feed, Event.PAUSE_OVER)

    def _do_give_up(self) -> None:
        lives = self._supervised.short_lives
        failed = self._supervised.failures > 0
        self._on_hopeless(
            self._reason if failed else f"{self.last_end}, {lives} times in a row within {SETTLED:g} s of its start"
        )


@contextmanager
def _tasks(*coroutines: Coroutine[Any, Any, None]) -> Iterator[list[asyncio.Task[None]]]:
    """Tasks that end with the block."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(_surface)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


def _surface(task: asyncio.Task[None]) -> None:
    """Nobody awaits the task: what it raises is for the event loop to report."""
    if not task.cancelled():
        task.result()
