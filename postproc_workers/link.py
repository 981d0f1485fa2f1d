"""Post-processing in the front end's own process (``num_postprocess_workers = 0``): the same worker, the same frames
from the executor, no process of its own. To the executor it is a worker like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import zmq

from executor.channel import STEPS_HWM, bind_pull, drain
from executor.messages import Cancel
from executor.proxy import GenerationExecutor
from executor.reporting import INTERVAL
from postproc_workers.shell import WorkerShell


class InProcessLink:
    """Feeds a ``WorkerShell`` on the event loop and hands what it makes straight to the front end's proxy."""

    def __init__(self, config: Mapping[str, Any], proxy: GenerationExecutor) -> None:
        self._shell = WorkerShell(config)
        self._proxy = proxy
        self._address = str(config["address"])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbound: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Bind and announce the worker, on the running event loop."""
        self._inbound = bind_pull(self._context, self._address, STEPS_HWM)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbound.fileno(), self._on_readable)
        self._proxy.worker_joined(self._shell.worker_id, self._address)
        self._report()

    def close(self) -> None:
        """Stop reading; idempotent."""
        if self._inbound is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        asyncio.get_running_loop().remove_reader(self._inbound.fileno())
        self._inbound = None
        self._context.destroy(linger=0)

    def _on_readable(self) -> None:
        if self._inbound is None:
            return
        frames = drain(self._inbound, STEPS_HWM)
        if not frames:
            return
        output = self._shell.handle(frames)
        if output.cancels:
            self._proxy.send(Cancel(self._shell.worker_id, output.cancels))
        for histories in output.histories:
            self._proxy.send(histories)
        for _, emissions in output.emissions:
            self._proxy.receive(emissions)
        self._shell.write(output.recordings)
        # Edge-triggered, as in GenerationExecutor: come back until the socket is empty.
        asyncio.get_running_loop().call_soon(self._on_readable)

    def _report(self) -> None:
        report = self._shell.report()
        if report is not None:
            self._proxy.receive(report)
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._report)
