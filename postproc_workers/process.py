"""A post-processing worker process: steps in, emissions and cancels out, one loop.

Config (see ``executor.child``): ``address`` to bind, ``executor`` and ``frontends`` to send to, and what
``WorkerShell`` reads. Run as ``python -m postproc_workers.process`` by the pool.
"""

from __future__ import annotations

import gc
import logging
import sys
from functools import partial

import zmq

from executor.channel import AT_ONCE, EMISSIONS_HWM, STEPS_HWM, bind_pull, connect_push, drain, try_send
from executor.child import Child, run_child
from executor.messages import Cancel, Message
from executor.reporting import INTERVAL
from executor.wire import encode
from postproc_workers.outbound import Outbound
from postproc_workers.shell import WorkerShell
from postproc_workers.worker import WorkerOutput

logger = logging.getLogger("tailrace.worker")


class WorkerProcess:
    """The sockets around a ``WorkerShell``."""

    def __init__(self, shell: WorkerShell, child: Child) -> None:
        self._shell, self._child = shell, child
        config = child.config
        self._context = zmq.Context()
        self._inbound = bind_pull(self._context, str(config["address"]), STEPS_HWM)
        self._executor = connect_push(self._context, str(config["executor"]))
        addresses = config["frontends"]
        assert isinstance(addresses, list)
        self._sockets = [connect_push(self._context, address, EMISSIONS_HWM) for address in addresses]
        self._frontends = [Outbound(partial(try_send, socket)) for socket in self._sockets]
        self._poller = zmq.Poller()
        self._poller.register(self._inbound, zmq.POLLIN)
        child.register(self._poller)
        #: front ends that take nothing at the moment
        self._full: list[int] = []

    def run(self) -> None:
        """The loop: wait, take all that has arrived, handle it in one go, send."""
        child, frontends = self._child, self._frontends
        timeout = child.poll_ms(int(1000 * INTERVAL))
        while not child.stopping:
            child.beat()
            child.notice(dict(self._poller.poll(timeout)))
            if self._full:
                self._retry()
            frames = drain(self._inbound, most=AT_ONCE) if len(self._full) < len(frontends) else []
            if frames or self._shell.holds:
                self._send(self._shell.handle(frames, self._full))
            self._report()
            if self._full or any(frontend.full for frontend in frontends):
                self._watch()

    def close(self) -> None:
        """Close all sockets; what was sent may still leave."""
        self._context.destroy(linger=500)

    def _retry(self) -> None:
        for number in self._full:
            self._frontends[number].retry()
        self._watch()

    def _watch(self) -> None:
        """Be woken by what full front ends take and, while all are full, by no step: they gather in the executor."""
        was, self._full = self._full, [number for number, frontend in enumerate(self._frontends) if frontend.full]
        if was == self._full:
            return
        for number, socket in enumerate(self._sockets):
            self._poller.register(socket, zmq.POLLOUT if number in self._full else 0)
        self._poller.register(self._inbound, zmq.POLLIN if len(self._full) < len(self._frontends) else 0)

    def _report(self) -> None:
        if (report := self._shell.report()) is not None:
            frame = encode(report)
            for frontend in self._frontends:
                frontend.report(frame)

    def _send(self, output: WorkerOutput) -> None:
        # The cancel first: the engine is still spending steps on those outputs.
        if output.cancels:
            self._push(Cancel(self._shell.worker_id, output.cancels))
        for histories in output.histories:
            self._push(histories)
        for number, emissions in output.emissions:
            if number < len(self._frontends):
                self._frontends[number].send(encode(emissions))
            else:
                logger.error("dropped %d rows for front end %d, which there is not", len(emissions.rids), number)
        self._shell.write(output.recordings)

    def _push(self, message: Message) -> None:
        """Send to the executor; behind a full queue wait, and let the steps gather. Nothing may be lost here, nor pile
        up."""
        frame = encode(message)
        while not try_send(self._executor, frame) and not self._child.stopping:
            self._child.beat()
            self._executor.poll(self._child.poll_ms(1000), zmq.POLLOUT)


def main(child: Child) -> None:
    """Load the tokenizer, bind, say READY, run."""
    process = WorkerProcess(WorkerShell(child.config), child)
    # The vocabulary's tables stay for good; without them a collection has little to look at.
    gc.collect()
    gc.freeze()
    child.ready({})
    process.run()
    process.close()


if __name__ == "__main__":
    sys.exit(run_child(main))
