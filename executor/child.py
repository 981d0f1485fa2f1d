"""The contract between the launcher and a child process, both sides of it.

    parent -> child   stdin: one line of JSON, the child's config. The pipe stays open: end of file means that the parent is
                      gone, and the child ends itself.
    child -> parent   stdout: one line of JSON once it can work, ``{"ready": {...}}``, or ``{"failed": "reason"}``.
    both              stderr is shared: log lines.

A child ignores SIGINT (ctrl-C reaches the whole foreground group, but the order of the shutdown is the parent's), ends
its loop on SIGTERM, and is killed by the kernel should the parent die while the child hangs.

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


class ChildError(RuntimeError):
    """A child process did not come up; the message says which and why."""


class Child:
    """A child's own view of its life. ``stopping`` turns true when it has to end; ``wake`` interrupts a poll."""

    def __init__(self) -> None:
        self.stopping = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self.config: dict[str, Any] = json.loads(sys.stdin.readline() or "{}")
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
        print(json.dumps({"ready": dict(info)}), flush=True)

    def failed(self, reason: str) -> None:
        """Tell the parent why this process cannot work."""
        print(json.dumps({"failed": reason}), flush=True)

    def _on_term(self, signum: int, frame: object) -> None:
        self.stopping = True
        self.wake()


def run_child(main: Callable[[Child], None]) -> int:
    """A child process, whole: config, ``main``, exit code."""
    child = Child()
    if "name" not in child.config:
        logger.error("no config on stdin: this program is started by `tailrace serve`")
        return 2
    try:
        main(child)
    except Exception as error:  # the other of the two broad ones: around a process's loop; the parent decides what follows
        logger.exception("%s ends", child.config["name"])
        child.failed(f"{type(error).__name__}: {error}")
        return 1
    return 0


class ChildProcess:
    """The parent's view of one child."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def spawn(cls, name: str, module: str, config: Mapping[str, Any]) -> ChildProcess:
        """Start ``python -m module`` and hand it its config."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps({"name": name, **config}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once; `ready` finds out and says so
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
            return message["ready"]
        reason = message.get("failed") if isinstance(message, dict) else None
        code = await self.stop(1.0)
        raise ChildError(f"{self.name} did not start: {reason or f'it ended with exit code {code}'}")

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self._process.wait()

    async def stop(self, timeout: float = 5.0) -> int:
        """Ask it to end, then kill it once ``timeout`` seconds have passed; returns the exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
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
