"""The workers' lives: spawn, watch, replace.

What happens when a worker dies: its watcher tells ``on_lost`` (the front end says from where its requests go on, the
executor opens them on the other workers: ``executor/dispatcher.py``), then starts another one under a new id. A worker
that dies soon after its start is replaced after a growing pause. When one cannot start several times in a row and no
other one lives, ``on_hopeless`` says so: a server whose workers cannot start must end rather than respawn for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from executor.child import ChildError, ChildProcess

logger = logging.getLogger("tailrace.pool")

SETTLED = 10.0
"""Seconds after which a worker counts as having worked: its successor starts without a pause."""

MAX_PAUSE = 10.0
MAX_FAILED_STARTS = 5


class WorkerPool:
    """N worker processes, kept at N.

    config: what every worker's config has in common (``postproc_workers.process``). address: worker id -> its address.
    on_joined(worker, address), on_lost(worker): called on the event loop. on_hopeless(reason): no worker will come.
    """

    def __init__(
        self,
        size: int,
        config: Mapping[str, Any],
        address: Callable[[int], str],
        on_joined: Callable[[int, str], None],
        on_lost: Callable[[int], None],
        on_hopeless: Callable[[str], None],
    ) -> None:
        self.size = size
        #: attempts to start a worker again, failed ones included: a crash loop shows in their number
        self.restarts = 0
        self._config = config
        self._address = address
        self._on_joined, self._on_lost, self._on_hopeless = on_joined, on_lost, on_hopeless
        self._ids = itertools.count()
        #: worker id -> its process, while it runs
        self._children: dict[int, ChildProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def alive(self) -> dict[int, int]:
        """Worker id -> process id, of those that can work."""
        return {worker: child.pid for worker, child in self._children.items()}

    async def start(self) -> None:
        """Start all workers; returns when they can work. ChildError with the reason if one cannot start."""
        results = await asyncio.gather(*(self._spawn() for _ in range(self.size)), return_exceptions=True)
        for failure in results:
            if isinstance(failure, BaseException):
                await self.stop()
                raise failure
        for worker in list(self._children):
            self._watchers.append(asyncio.create_task(self._watch(worker)))

    async def stop(self, timeout: float = 5.0) -> None:
        """End all workers; idempotent."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(child.stop(timeout) for child in self._children.values()))
        self._children.clear()

    async def _spawn(self) -> int:
        worker = next(self._ids)
        address = self._address(worker)
        config = {**self._config, "worker": worker, "address": address}
        child = await ChildProcess.spawn(f"worker-{worker}", "postproc_workers.process", config)
        works = False
        try:
            await child.ready()
            works = True
        finally:
            if not works:  # also when the server ends while this one starts
                child.kill()
        self._children[worker] = child
        self._on_joined(worker, address)
        return worker

    async def _watch(self, worker: int) -> None:
        """Follow one seat of the pool from worker to worker."""
        pause = 0.0
        while not self._stopping:
            begin = time.monotonic()
            code = await self._children[worker].wait()
            del self._children[worker]
            logger.error("worker-%d ended with exit code %d; its requests go on elsewhere", worker, code)
            self._on_lost(worker)
            settled = time.monotonic() - begin > SETTLED
            pause = 0.0 if settled else min(max(2 * pause, 0.05), MAX_PAUSE)
            replacement = await self._replace(pause)
            if replacement is None:
                return
            worker = replacement

    async def _replace(self, pause: float) -> int | None:
        """A new worker; None once it cannot be had and no other one is left to do the work."""
        attempt = 0
        while True:
            await asyncio.sleep(pause)
            attempt += 1
            self.restarts += 1
            try:
                return await self._spawn()
            except ChildError as error:
                logger.error("attempt %d: %s", attempt, error)
                pause = min(max(2 * pause, 0.1), MAX_PAUSE)
                if attempt >= MAX_FAILED_STARTS and not self._children:
                    self._on_hopeless(str(error))
                    return None
