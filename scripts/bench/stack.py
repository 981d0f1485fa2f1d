"""A whole server on the replay engine, and what its processes use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.bench.cpu import Process, ProcessTable

ROOT = Path(__file__).resolve().parents[2]
#: what a process runs -> what it is
_KINDS = {"executor.process": "executor", "postproc_workers.process": "worker"}


class Stack:
    """``tailrace serve`` as a child, ready to be asked."""

    def __init__(self, tokenizer: Path, engine: Mapping[str, Any], *flags: str) -> None:
        command = [
            sys.executable, "-m", "serve.cli", "serve", "--engine", "replay", "--tokenizer", str(tokenizer),
            "--engine_config", json.dumps(dict(engine)), "--port", "0", "--log_level", "warning",
            "--max_requests", "100000", "--max_queued_tokens", "100000000", *flags,
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        self.port = self._wait_until_ready()

    def _wait_until_ready(self) -> int:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if found := re.search(r"http://[\d.]+:(\d+)", line):
                return int(found[1])
        raise RuntimeError(f"the server did not start: exit code {self._child.wait()}")

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics, summed over their labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        values: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def fresh_metrics(self) -> dict[str, float]:
        """Metrics as of now: the executor reports once a second, so wait for its next report."""
        before = self.metrics()
        while True:
            now = self.metrics()
            if now.get("tailrace_executor_steps_total") != before.get("tailrace_executor_steps_total"):
                return now
            time.sleep(0.02)

    def processes(self) -> dict[str, list[Process]]:
        """The processes by what they are: front end, executor, worker."""
        found: dict[str, list[Process]] = {"front end": [], "executor": [], "worker": []}
        for process in ProcessTable().tree([self._child.pid]).values():
            found[_KINDS.get(process.name, "front end")].append(process)
        return found

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by kind of process."""
        return {kind: sum(process.cpu_seconds for process in found) for kind, found in self.processes().items()}

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


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0
