"""The executor process: one inbound socket, one socket per worker, one loop around ``ExecutorCore``.

Config (see ``executor.child``): ``address`` to bind, ``frontends`` to answer and to tell about our state, ``engine``
(a name of ``executor.engines``) and ``engine_args``, ``incarnation`` (how many executors there were before), and the
limits ``max_queued_tokens`` and ``queue_timeout``. Run as ``python -m executor.process`` by the launcher.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from typing import Any

import zmq

from executor.channel import STEPS_HWM, AddressError, bind_pull, connect_push, drain, try_send
from executor.child import Child, run_child
from executor.core import RETRY, ExecutorCore
from executor.engines import engine_factory
from executor.histogram import STEP_BOUNDS, Histogram
from executor.messages import FrontendLost, Recall, Status, StepRecords, WorkerJoined, WorkerLost
from executor.reporting import INTERVAL, Reporting
from executor.waiting import WaitingRequests
from executor.wire import FrameReader, encode

logger = logging.getLogger("tailrace.executor")


class ExecutorProcess:
    """The sockets around an ``ExecutorCore``."""

    def __init__(self, core: ExecutorCore, config: dict[str, Any]) -> None:
        self._frames = FrameReader(logger)
        self._core = core
        self._incarnation = int(config["incarnation"])
        self._context = zmq.Context()
        self._inbound = bind_pull(self._context, config["address"])
        self._frontends = [connect_push(self._context, address) for address in config["frontends"]]
        #: where it shows that a front end has gone
        self._ends = [socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for socket in self._frontends]
        self._workers: dict[int, zmq.Socket[bytes]] = {}
        #: a frame that its worker's full queue has refused; nothing newer may overtake it
        self._waiting: dict[int, bytes] = {}
        self._reporting = Reporting()
        self._step_shipping = Histogram(STEP_BOUNDS)
        #: what this thread had used when it began: the model's loading
        self._cpu_before = time.thread_time()

    def run(self, child: Child) -> None:
        """The loop: wait, take messages, step, send."""
        poller = zmq.Poller()
        for socket in (self._inbound, *self._ends):
            poller.register(socket, zmq.POLLIN)
        child.register(poller)
        while not child.stopping:
            child.beat()
            events = dict(poller.poll(child.poll_ms(self._timeout_ms())))
            begin = time.perf_counter()
            child.notice(events)
            if self._inbound in events:  # to ask it once more costs 17 µs a step
                self._core.tick(time.monotonic_ns())
                for frame in drain(self._inbound):
                    self._receive(frame)
            self._notice_ends(events)
            self._retry()
            for worker, steps in self._core.step(time.monotonic_ns(), self._waiting):
                self._send(worker, steps)
            self._answer()
            if self._core.collecting is not None:
                self._step_shipping.observe(time.perf_counter() - begin - self._core.collecting)
            # The step is on its way, so nobody waits for what takes longer than a usual step does.
            self._core.tidy()
            self._report()

    def close(self) -> None:
        """Close all sockets; what was sent to a front end may still leave."""
        self._context.destroy(linger=500)

    def _timeout_ms(self) -> int:
        """Milliseconds until something has to be done without being woken, rounded up so that the loop does not
        spin."""
        due = self._core.poll_timeout()
        timeout = INTERVAL if due is None else min(due, INTERVAL)
        if self._waiting:  # an engine that makes a step whenever it is asked would leave the worker behind for good
            timeout = min(timeout or RETRY, RETRY)
        return -int(-1000 * timeout // 1)

    def _receive(self, frame: bytes) -> None:
        message = self._frames.read(frame)
        if message is None:
            return
        if isinstance(message, WorkerJoined) and not self._connect(message):
            return
        self._core.receive(message)
        if isinstance(message, WorkerJoined | WorkerLost):
            self._close_lost()

    def _connect(self, joined: WorkerJoined) -> bool:
        if joined.worker in self._workers:  # another front end has announced it
            return True
        try:
            socket = connect_push(self._context, joined.address, STEPS_HWM, linger_ms=0)
        except (AddressError, zmq.ZMQError) as error:
            self._frames.refuse("worker %d: %s", joined.worker, error)
            return False
        self._workers[joined.worker] = socket
        try_send(socket, encode(Recall(self._incarnation)))  # the first word on a new socket is never refused
        return True

    def _notice_ends(self, events: dict[Any, int]) -> None:
        """Abort what a front end has left behind: it has closed its socket, or is dead."""
        for frontend, monitor in enumerate(self._ends):
            if monitor in events:
                monitor.recv_multipart()
                self._core.receive(FrontendLost(frontend))
                self._close_lost()

    def _close_lost(self) -> None:
        for worker in self._workers.keys() - self._core.workers:
            self._workers.pop(worker).close()
            self._waiting.pop(worker, None)

    def _send(self, worker: int, steps: StepRecords) -> None:
        frame = encode(steps)
        if not try_send(self._workers[worker], frame):
            self._waiting[worker] = frame

    def _retry(self) -> None:
        for worker, frame in list(self._waiting.items()):
            if try_send(self._workers[worker], frame):
                del self._waiting[worker]

    def _answer(self) -> None:
        """Tell front ends what is not taken. One that does not read has 100,000 messages waiting, and is told later."""
        waiting = []
        for frontend, rejected in self._core.answers:
            if frontend >= len(self._frontends):
                logger.error("dropped an answer for front end %d, which there is not", frontend)
            elif not try_send(self._frontends[frontend], encode(rejected)):
                waiting.append((frontend, rejected))
        self._core.answers = waiting

    def _report(self) -> None:
        now = time.monotonic()
        if not self._reporting.due(now):
            return
        counted = self._core.stats()
        own: dict[str, Any] = {
            "refused_frames": self._frames.refused,
            "full_workers": len(self._waiting),
            # CPU time of this thread that was not the engine's: what it costs to ship tokens.
            "shipping_seconds": time.thread_time() - self._cpu_before - self._core.engine_seconds,
            "step_shipping": self._step_shipping.report(),
        }
        if not self._reporting.news(now, (counted, own["refused_frames"], own["full_workers"])):
            return
        frame = encode(Status(counted | own))
        for socket in self._frontends:
            try_send(socket, frame)  # a front end that does not read misses a report, no more


def main(child: Child) -> None:
    """Start the engine, say READY, run."""
    config = child.config
    engine = engine_factory(config["engine"])(**config["engine_args"])
    waiting = WaitingRequests(config["max_queued_tokens"], config["queue_timeout"])
    frontends, incarnation = len(config["frontends"]), config["incarnation"]
    clock, wall = time.thread_time, time.perf_counter
    core = ExecutorCore(engine, waiting, incarnation=incarnation, frontends=frontends, clock=clock, wall=wall)
    try:
        info = core.start(child.wake)
        process = ExecutorProcess(core, config)
        child.ready(dataclasses.asdict(info))
        process.run(child)
        process.close()
    finally:
        core.close()


if __name__ == "__main__":
    sys.exit(run_child(main))
