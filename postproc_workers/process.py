"""A post-processing worker process: steps in, emissions and cancels out, one loop.

Config (see ``executor.child``): ``address`` to bind, ``executor`` and ``frontends`` to send to, and what
``WorkerShell`` reads. Run as ``python -m postproc_workers.process`` by the pool.
"""

from __future__ import annotations

import gc
import logging
import sys

import zmq

from executor.channel import STEPS_HWM, bind_pull, connect_push, drain, try_send
from executor.child import Child, run_child
from executor.messages import Cancel
from executor.wire import encode
from postproc_workers.shell import STATS_INTERVAL, WorkerShell
from postproc_workers.worker import WorkerOutput

logger = logging.getLogger("tailrace.worker")


class WorkerProcess:
    """The sockets around a ``WorkerShell``."""

    def __init__(self, shell: WorkerShell, config: dict[str, object]) -> None:
        self._shell = shell
        self._context = zmq.Context()
        self._inbound = bind_pull(self._context, str(config["address"]), STEPS_HWM)
        self._executor = connect_push(self._context, str(config["executor"]))
        addresses = config["frontends"]
        assert isinstance(addresses, list)
        self._frontends = [connect_push(self._context, address) for address in addresses]

    def run(self, child: Child) -> None:
        """The loop: wait, take all that has arrived, handle it in one go, send."""
        poller = zmq.Poller()
        poller.register(self._inbound, zmq.POLLIN)
        child.register(poller)
        while not child.stopping:
            child.notice(dict(poller.poll(int(1000 * STATS_INTERVAL))))
            if frames := list(drain(self._inbound)):
                self._send(self._shell.handle(frames))
            if (report := self._shell.report()) is not None:
                try_send(self._frontends[0], encode(report))

    def close(self) -> None:
        """Close all sockets; what was sent may still leave."""
        self._context.destroy(linger=500)

    def _send(self, output: WorkerOutput) -> None:
        # The cancel first: the engine is still spending steps on those outputs.
        if output.cancels:
            self._executor.send(encode(Cancel(self._shell.worker_id, output.cancels)))
        for frontend, emissions in (*output.emissions.items(), *output.overflow):
            if frontend < len(self._frontends):
                self._frontends[frontend].send(encode(emissions))
            else:
                logger.error("dropped %d rows for front end %d, which there is not", len(emissions.rids), frontend)
        self._shell.write(output.recordings)


def main(child: Child) -> None:
    """Load the tokenizer, bind, say READY, run."""
    process = WorkerProcess(WorkerShell(child.config), child.config)
    # The vocabulary's tables stay for good; without them a collection has little to look at.
    gc.collect()
    gc.freeze()
    child.ready({})
    process.run(child)
    process.close()


if __name__ == "__main__":
    sys.exit(run_child(main))
