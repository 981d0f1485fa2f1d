"""A child process for ``test_child.py``: it does what its config says."""

from __future__ import annotations

import os
import signal
import sys

import zmq

from executor.child import Child, run_child


def main(child: Child) -> None:
    """raise, exit, say: before READY; hang: neither signal nor end of file ends it."""
    if "raise" in child.config:
        raise RuntimeError(child.config["raise"])
    if "exit" in child.config:
        os._exit(child.config["exit"])
    if "say" in child.config:
        print(child.config["say"], flush=True)
        return
    child.ready({"echo": child.config.get("echo"), "name": child.config["name"], "pid": os.getpid()})
    while child.config.get("hang"):
        signal.pause()
    poller = zmq.Poller()
    child.register(poller)
    while not child.stopping:
        child.notice(dict(poller.poll()))


if __name__ == "__main__":
    sys.exit(run_child(main))
