"""A whole server of ours, and what its processes use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.bench import exposition
from scripts.bench.cpu import Process, ProcessTable

ROOT = Path(__file__).resolve().parents[2]
#: What a process runs -> what it is. A launcher whose front ends are processes of their own is counted with them.
_KINDS = {
    "executor.process": "executor",
    "postproc_workers.process": "worker",
    "serve.frontend_process": "front end",
    "serve.cli": "front end",
}
KINDS = ("front end", "worker", "executor")
STAGES = ("main", "zeromq", "other")


def kind_of(process: Process) -> str:
    """Front end, worker or executor, by what the process runs."""
    return _KINDS.get(process.name, "front end")


def stage_of(pid: int, thread: int, name: str) -> str:
    """main, zeromq (its I/O threads, which ZeroMQ names) or other (threads of libraries and of pools)."""
    if thread == pid:
        return "main"
    return "zeromq" if name.startswith("ZMQbg") else "other"


class Stack:
    """``tailrace serve`` as a child, ready to be asked. RuntimeError if it ends before it is."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "serve.cli", "serve", "--port", "0", "--log_level", "warning", *arguments]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        self.port = self._wait_until_ready()
        self.url = f"http://127.0.0.1:{self.port}"

    @classmethod
    def replay(cls, tokenizer: Path, engine: Mapping[str, Any], *flags: str) -> Stack:
        """On the replay engine, whose config this is, without a bound that a benchmark would meet."""
        config = ("--engine", "replay", "--tokenizer", str(tokenizer), "--engine_config", json.dumps(dict(engine)))
        return cls(*config, "--max_requests", "100000", "--max_queued_tokens", "100000000", *flags)

    def _wait_until_ready(self) -> int:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if found := re.search(r"http://[\d.]+:(\d+)", line):
                return int(found[1])
        raise RuntimeError(f"the server did not start: exit code {self._child.wait()}")

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._child.pid

    def metrics(self) -> dict[str, float]:
        """See ``exposition.fresh``."""
        return exposition.fresh(self.url)

    def processes(self) -> dict[str, list[Process]]:
        """The processes by kind."""
        found: dict[str, list[Process]] = {kind: [] for kind in KINDS}
        for process in ProcessTable().tree([self.pid]).values():
            found[kind_of(process)].append(process)
        return found

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by kind of process."""
        exact = ProcessTable().exact
        return {kind: sum(map(exact, found)) for kind, found in self.processes().items()}

    def stages(self) -> dict[str, dict[str, float]]:
        """CPU seconds so far of the threads there are, by kind of process and kind of thread."""
        table = ProcessTable()
        return {kind: _stages(table, [process.pid for process in found]) for kind, found in self.processes().items()}

    def memory(self) -> int:
        """Proportional set size of all processes, bytes: shared pages are counted once."""
        return sum(_pss(process.pid) for found in self.processes().values() for process in found)

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(2):  # at once: nobody waits for these streams
            self._child.send_signal(signal.SIGTERM)
        self._child.wait(60)


def _stages(table: ProcessTable, pids: Sequence[int]) -> dict[str, float]:
    used = dict.fromkeys(STAGES, 0.0)
    for pid in pids:
        for thread in table.threads(pid).values():
            used[stage_of(pid, thread.id, thread.name)] += thread.cpu_seconds
    return used


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0
