"""The contract between the launcher and a child process, both sides of it.

    parent -> child   stdin: one line of JSON, the child's config. The pipe stays open: end of file means that the
                      parent is gone, and the child ends itself.
    child -> parent   stdout: one line of JSON once it can work, ``{"ready": {...}}``, or ``{"failed": "reason"}``.
                      Then an empty line, a *beat*, from every turn of its loop, but no more often than each
                      BEAT_INTERVAL: a child that does not turn hangs, whatever the system thinks of its process. Last
                      ``{"failed": "reason"}`` if an exception ends it. Nothing of this may hold the child up: what a
                      parent that stands still has no room for is dropped.
    both              stderr is shared: log lines. Whatever else a child prints (a library, a user's hook) goes there
                      too: it must not be taken for an answer, nor fill a pipe that the parent has stopped reading.

A child lives in a session of its own, so that ctrl-C reaches the parent alone, whose is the order of the shutdown. It
ends its loop on SIGTERM, and is killed by the kernel should the parent die while the child hangs. Before it can work it
holds nothing, and is ended by SIGKILL: a model that is being loaded notices nothing else.

Exit codes: 0 asked to end, 1 failed, 2 bad config.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq

from executor.supervision import Pulse

logger = logging.getLogger("tailrace.child")

BEAT_INTERVAL = 1.0
"""Seconds between two beats of a child whose config names no other ``beat_interval``."""

_BEAT = b"\n"
_MAX_REASON = 4000
"""Characters of an exception that a parent is told; the child's log has the rest."""

_PR_SET_PDEATHSIG = 1
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


class ChildError(RuntimeError):
    """A child process did not come up; the message says which and why."""


def beat_interval(hang_timeout: float) -> float:
    """Seconds between beats, for the config of a child that hangs after ``hang_timeout`` s of silence; 0: never."""
    return min(BEAT_INTERVAL, Pulse(hang_timeout).interval) if hang_timeout else BEAT_INTERVAL


def end_in_words(code: int) -> str:
    """How a process ended, from its exit code, which is negative for a signal: ``signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # one of those without a name
        return f"signal {-code}"


class Child:
    """A child's own view of its life. ``stopping`` turns true when it has to end; ``wake`` interrupts a poll.

    works: whether the parent has been told that it does. beat_interval: seconds, see ``beat``.
    """

    def __init__(self) -> None:
        self.stopping = self.works = False
        self._answers = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.config = _read_config()
        self.beat_interval = float(self.config.get("beat_interval", BEAT_INTERVAL))
        #: none before READY, which is what the parent waits for first
        self._next_beat = float("inf")
        logging.basicConfig(
            stream=sys.stderr,
            level=self.config.get("log_level", "info").upper(),
            format=f"%(levelname)s {self.config.get('name', 'child')}: %(message)s",
        )

    def register(self, poller: zmq.Poller) -> None:
        """Let a poller see wakes and the end of the parent."""
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def notice(self, events: Mapping[Any, int]) -> None:
        """Look at a poll's events for a wake or the end of the parent."""
        if self._wake_read.fileno() in events:
            with contextlib.suppress(BlockingIOError):
                while self._wake_read.recv(4096):
                    pass
        if sys.stdin.fileno() in events:
            self.stopping = True

    def wake(self) -> None:
        """End the current poll; from any thread. A full pipe means that a wake is on its way already."""
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"w")

    def beat(self) -> None:
        """Tell the parent that the loop turns. Call it in every turn: mostly it only looks at the clock."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self.beat_interval
            self._tell(_BEAT)

    def poll_ms(self, timeout_ms: int) -> int:
        """How long a poll may wait that could wait so many milliseconds: less, if it would miss a beat."""
        return min(timeout_ms, max(1, int(1000 * self.beat_interval)))

    def ready(self, info: Mapping[str, Any]) -> None:
        """Tell the parent that this process can work."""
        self.works = True
        self._tell(json.dumps({"ready": dict(info)}).encode() + b"\n")
        os.set_blocking(self._answers, False)
        self._next_beat = 0.0

    def failed(self, reason: str) -> None:
        """Tell the parent why this process cannot work, or ends."""
        self._tell(json.dumps({"failed": reason[:_MAX_REASON]}).encode() + b"\n")

    def _tell(self, line: bytes) -> None:
        # No room: the parent stands still. No pipe: it is gone, which the end of stdin says too.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._answers, line)

    def _on_term(self, signum: int, frame: object) -> None:
        self.stopping = True
        self.wake()


def _read_config() -> dict[str, Any]:
    """The first line of stdin; ValueError unless it is an object with a name."""
    config = json.loads(sys.stdin.readline() or "null")
    if not isinstance(config, dict) or not isinstance(config.get("name"), str):
        raise ValueError("an object with a name is needed")
    return config


def run_child(main: Callable[[Child], None]) -> int:
    """A child process, whole: config, ``main``, exit code."""
    try:
        child = Child()
    except ValueError as error:
        print(f"no config on stdin ({error}): this program is started by `tailrace serve`", file=sys.stderr)
        return 2
    try:
        main(child)
    except Exception as error:  # broad: around a process's loop; the parent decides what follows
        # A ValueError on the way up is a wrong setting, and the parent says which one: its traceback would bury that.
        expected = isinstance(error, ValueError) and not child.works
        logger.log(logging.DEBUG if expected else logging.ERROR, "%s ends", child.config["name"], exc_info=True)
        child.failed(str(error) if expected else f"{type(error).__name__}: {error}")
        return 1
    return 0


class ChildProcess:
    """The parent's view of one child."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._works = False
        #: what an exception that ended it said
        self._complaint = ""

    @classmethod
    async def spawn(
        cls, name: str, module: str, config: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start ``python -m module`` and hand it its config. It imports from where we do, and not from the current
        folder, where a file named like one of our packages may lie (Python 3.10 always looks there first).
        environment: variables besides ours. ChildError if the system has no room for one more process. Cancelled on the
        way, it leaves none."""
        line = json.dumps({"name": name, **config}).encode() + b"\n"
        try:
            child = cls(name, await _create(module, environment or {}))
        except OSError as error:
            raise ChildError(f"{name} did not start: {error}") from error
        await child._configure(line)
        return child

    async def _configure(self, line: bytes) -> None:
        assert self._process.stdin is not None
        written = False
        try:
            # It may be dead already, and uvloop raises RuntimeError for a pipe that it has closed; `ready` finds out
            # and says so.
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(line)
                await self._process.stdin.drain()
            written = True
        finally:
            if not written:  # cancelled
                self.kill()
                await self._process.wait()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.returncode

    @property
    def end(self) -> str:
        """How it ended, in words; what it said of that comes with it."""
        code = self._process.returncode
        assert code is not None
        return f"{end_in_words(code)} ({self._complaint})" if self._complaint else end_in_words(code)

    async def ready(self) -> dict[str, Any]:
        """Wait until the child can work; returns what it says of itself. ChildError if it fails or ends first."""
        assert self._process.stdout is not None
        message = _answer(await self._process.stdout.readline())
        if isinstance(message.get("ready"), dict):
            self._works = True
            return dict(message["ready"])
        code = await self._end(1.0)
        reason = message.get("failed") or f"it ended with {end_in_words(code)}"
        raise ChildError(f"{self.name} did not start: {reason}")

    async def beat(self) -> bool:
        """Wait for the next sign that its loop turns; False once there will be none, since its output has ended."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line == _BEAT:
                return True
            self._complaint = str(_answer(line).get("failed", ""))
        return False

    def tell(self, line: bytes) -> None:
        """Send a line behind its config. It goes out when the child reads; to one that is gone, nowhere."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # as in ``_configure``
            self._process.stdin.write(line)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(self, timeout: float = 5.0) -> int:
        """Ask it to end, then kill it once ``timeout`` seconds have passed; returns the exit code."""
        self.ask_to_end()
        return await self._end(timeout)

    async def _end(self, timeout: float) -> int:
        try:
            return await asyncio.wait_for(self._process.wait(), timeout)
        except asyncio.TimeoutError:  # not the builtin one before Python 3.11
            logger.warning("%s did not end within %.1f s and is killed", self.name, timeout)
            self.kill()
            return await self._process.wait()

    def ask_to_end(self) -> None:
        """Have it end after the turn of its loop that it is in; one that cannot work yet is killed."""
        if not self._works:
            self.kill()
        elif self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def _create(module: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """A new process. The event loops forget one whose creation is cancelled halfway, so here it comes to be first."""
    creating = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            sys.executable, *_SAFE_PATH, "-m", module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                 **environment},
        )
    )  # fmt: skip
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        await asyncio.wait({creating})
        if not creating.cancelled() and creating.exception() is None:
            creating.result().kill()
            await creating.result().wait()
        raise


def _answer(line: bytes) -> dict[str, Any]:
    """A line of a child's output; empty if it is none of ours."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
