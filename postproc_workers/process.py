"""A post-processing worker process: steps in, emissions and cancels out, one loop.

Config (see ``executor.child``): ``address`` to bind, ``executor`` and ``frontends`` to send to, and what
``WorkerShell`` reads. Run as ``python -m postproc_workers.process`` by the pool.
"""

from __future__ import annotations

import gc
import logging
import sys

import zmq

from executor.channel import AT_ONCE, EMISSIONS_HWM, STEPS_HWM, bind_pull, can_send, connect_push, drain, try_send
from executor.child import Child, run_child
from executor.messages import Cancel, Message
from executor.reporting import INTERVAL
from executor.wire import encode
from postproc_workers.shell import WorkerShell
from postproc_workers.worker import WorkerOutput

logger = logging.getLogger("tailrace.worker")

RETRY = 0.005
"""Seconds after which a front end whose queue was full is looked at again."""


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
        self._frontends = [connect_push(self._context, address, EMISSIONS_HWM) for address in addresses]

    def run(self) -> None:
        """The loop: wait, take all that has arrived, handle it in one go, send."""
        child = self._child
        poller = zmq.Poller()
        poller.register(self._inbound, zmq.POLLIN)
        child.register(poller)
        while not child.stopping:
            child.beat()
            timeout = RETRY if self._shell.holds else INTERVAL
            child.notice(dict(poller.poll(child.poll_ms(int(1000 * timeout)))))
            frames = drain(self._inbound, most=AT_ONCE)
            if frames or self._shell.holds:
                self._send(self._shell.handle(frames, self._blocked()))
            self._report()

    def close(self) -> None:
        """Close all sockets; what was sent may still leave."""
        self._context.destroy(linger=500)

    def _blocked(self) -> list[int]:
        """Front ends whose queue is full."""
        return [number for number, socket in enumerate(self._frontends) if not can_send(socket)]

    def _report(self) -> None:
        if (report := self._shell.report()) is not None:
            frame = encode(report)
            for socket in self._frontends:
                try_send(socket, frame)

    def _send(self, output: WorkerOutput) -> None:
        # The cancel first: the engine is still spending steps on those outputs.
        if output.cancels:
            self._push(self._executor, Cancel(self._shell.worker_id, output.cancels))
        for histories in output.histories:
            self._push(self._executor, histories)
        for frontend, emissions in output.emissions:
            if frontend < len(self._frontends):
                self._push(self._frontends[frontend], emissions)
            else:
                logger.error("dropped %d rows for front end %d, which there is not", len(emissions.rids), frontend)
        self._shell.write(output.recordings)

    def _push(self, socket: zmq.Socket[bytes], message: Message) -> None:
        """Send; behind a full queue wait, and let the steps gather. Nothing may be lost here, nor pile up. It is full
        where one batch makes several messages, or the executor stands still."""
        frame = encode(message)
        while not try_send(socket, frame) and not self._child.stopping:
            self._child.beat()
            socket.poll(self._child.poll_ms(1000), zmq.POLLOUT)


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
