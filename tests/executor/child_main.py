"""A child process for ``test_child.py`` and ``test_seat.py``: it does what its config and signals say."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import zmq

from executor.child import Child, run_child


def main(child: Child) -> None:
    """raise, exit, say: before READY. gate: not ready before somebody has opened and closed that FIFO. hang: neither
    signal nor end of file ends it. flood: so many beats at once. tell: {number of turns: a FIFO to write to then}.

    SIGUSR1: stand still for good. SIGUSR2: fail.
    """
    signal.signal(signal.SIGUSR1, _stand_still)
    signal.signal(signal.SIGUSR2, _fail)
    if "raise" in child.config:
        raise RuntimeError(child.config["raise"])
    if "exit" in child.config:
        os._exit(child.config["exit"])
    if "say" in child.config:
        print(child.config["say"], flush=True)
        return
    if "gate" in child.config:
        Path(child.config["gate"]).read_bytes()
    child.ready({"echo": child.config.get("echo"), "name": child.config["name"], "pid": os.getpid()})
    while child.config.get("hang"):
        signal.pause()
    for _ in range(child.config.get("flood", 0)):
        child.beat()
    _turn(child, {int(turns): Path(fifo) for turns, fifo in child.config.get("tell", {}).items()})


def _turn(child: Child, tell: dict[int, Path]) -> None:
    poller = zmq.Poller()
    child.register(poller)
    turns = 0
    while not child.stopping:
        child.beat()
        turns += 1
        if turns in tell:
            tell[turns].write_text("turned")
        child.notice(dict(poller.poll(child.poll_ms(10_000))))


def _stand_still(signum: int, frame: object) -> None:
    while True:
        signal.pause()


def _fail(signum: int, frame: object) -> None:
    raise RuntimeError("asked to fail")


if __name__ == "__main__":
    sys.exit(run_child(main))
