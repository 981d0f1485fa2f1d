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

ROOT = Path(__file__).resolve().parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")


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

    def processes(self) -> dict[str, list[int]]:
        """Process ids by what they are: front end, executor, worker."""
        found: dict[str, list[int]] = {"front end": [self._child.pid], "executor": [], "worker": []}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                command = folder.joinpath("cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self._child.pid:
                kind = "executor" if b"executor.process" in command else "worker"
                found[kind].append(int(folder.name))
        return found

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by kind of process."""
        return {kind: sum(map(cpu_seconds, pids)) for kind, pids in self.processes().items()}

    def memory(self) -> int:
        """Proportional set size of all processes, bytes: shared pages are counted once."""
        return sum(_pss(pid) for pids in self.processes().values() for pid in pids)

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(2):  # at once: nobody waits for these streams
            self._child.send_signal(signal.SIGTERM)
        self._child.wait(60)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0
