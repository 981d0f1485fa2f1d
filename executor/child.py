"""The contract between the launcher and a child process, both sides of it.

    parent -> child   stdin: one line of JSON, the child's config. The pipe stays open: end of file means that the
                      parent is gone, and the child ends itself.
    child -> parent   stdout: one line of JSON once it can work, ``{"ready": {...}}``, or ``{"failed": "reason"}``.
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
from collections.abc import Callable, Mapping
from typing import Any

import zmq

logger = logging.getLogger("tailrace.child")

_PR_SET_PDEATHSIG = 1
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


class ChildError(RuntimeError):
    """A child process did not come up; the message says which and why."""


class Child:
    """A child's own view of its life. ``stopping`` turns true when it has to end; ``wake`` interrupts a poll.

    works: whether the parent has been told that it does.
    """

    def __init__(self) -> None:
        self.stopping = self.works = False
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.config = _read_config()
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

    def ready(self, info: Mapping[str, Any]) -> None:
        """Tell the parent that this process can work."""
        self.works = True
        print(json.dumps({"ready": dict(info)}), file=self._answers, flush=True)

    def failed(self, reason: str) -> None:
        """Tell the parent why this process cannot work."""
        print(json.dumps({"failed": reason}), file=self._answers, flush=True)

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

    @classmethod
    async def spawn(cls, name: str, module: str, config: Mapping[str, Any]) -> ChildProcess:
        """Start ``python -m module`` and hand it its config. It imports from where we do, and not from the current
        folder, where a file named like one of our packages may lie (Python 3.10 always looks there first). ChildError
        if the system has no room for one more process."""
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *_SAFE_PATH, "-m", module,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        except OSError as error:
            raise ChildError(f"{name} did not start: {error}") from error
        assert process.stdin is not None
        # It may be dead already, and uvloop raises RuntimeError for a pipe that it has closed; `ready` finds out and
        # says so.
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(json.dumps({"name": name, **config}).encode() + b"\n")
            await process.stdin.drain()
        return cls(name, process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.returncode

    async def ready(self) -> dict[str, Any]:
        """Wait until the child can work; returns what it says of itself. ChildError if it fails or ends first."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        try:
            message = json.loads(line)
        except ValueError:
            message = {}
        if isinstance(message, dict) and isinstance(message.get("ready"), dict):
            self._works = True
            return dict(message["ready"])
        reason = message.get("failed") if isinstance(message, dict) else None
        code = await self._end(1.0)
        raise ChildError(f"{self.name} did not start: {reason or f'it ended with exit code {code}'}")

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(self, timeout: float = 5.0) -> int:
        """Ask it to end, then kill it once ``timeout`` seconds have passed; returns the exit code."""
        if not self._works:
            self.kill()
        elif self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        return await self._end(timeout)

    async def _end(self, timeout: float) -> int:
        try:
            return await asyncio.wait_for(self._process.wait(), timeout)
        except asyncio.TimeoutError:  # not the builtin one before Python 3.11
            logger.warning("%s did not end within %.1f s and is killed", self.name, timeout)
            self.kill()
            return await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
