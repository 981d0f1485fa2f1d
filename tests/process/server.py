"""A real `tailrace serve` for a test: start it on a free port, look into it, end it, see that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import pre_tokenizers

from tests.recordings.build_tokenizers import byte_level

#: The command as users have it.
TAILRACE = Path(sys.executable).with_name("tailrace")

#: Rendered, a conversation is its messages' texts one after another.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

START_TIMEOUT = 110.0
STOP_TIMEOUT = 20.0
_LISTENS = re.compile(r"tailrace serves \S+ at (http://\S+)")
_ROLES = {
    "executor.process": "executor",
    "postproc_workers.process": "worker",
    "serve.frontend_process": "front end",
}

#: Gauges of what is open, in the front end, the executor, its engine and the workers.
OPEN = (
    "tailrace_open_requests",
    "tailrace_executor_open_requests",
    "tailrace_executor_parked_requests",
    "tailrace_executor_running_outputs",
    "tailrace_executor_waiting_outputs",
    "tailrace_worker_open_requests",
)


class DeadlineError(AssertionError):
    """Something did not happen in time."""


def until(condition: Callable[[], Any], what: str | Callable[[], object], timeout: float = 10.0) -> Any:
    """Poll until ``condition()`` is true and return its value; DeadlineError says ``what`` has not come."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise DeadlineError(f"not within {timeout} s: {what() if callable(what) else what}")
        pause.wait(0.02)
    return value


def make_tokenizer(directory: Path) -> Path:
    """The recordings' byte-level tokenizer with a chat template, as a directory that transformers loads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


class Server:
    """A server process. ``url`` is known once it serves.

    directory: private to it; TMPDIR lies in it, so that all it makes there can be found, and its log.
    """

    def __init__(self, arguments: list[str], environment: Mapping[str, str], cwd: Path | None = None) -> None:
        # Not pytest's tmp_path: a socket's path has 107 bytes at most.
        self.directory = Path(tempfile.mkdtemp(prefix="tr-"))
        self.log_file = self.directory / "log"
        self.url = ""
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        # One for all look-ups, since making it costs 20 ms; no connection of it stays open, for the tests count those.
        self._http = httpx.Client(verify=False, trust_env=False, headers={"Connection": "close"})
        (self.directory / "tmp").mkdir()
        self._tmp = str(self.directory / "tmp")
        command = [str(TAILRACE), "serve", "--port", "0", *arguments]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": self._tmp, **environment}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=cwd or self.directory, text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))
            self._lines.put(line)
        self._lines.put(None)

    # -------------------------------------------------------------------------------- its start

    def wait_for_line(self, pattern: str | re.Pattern[str], timeout: float = START_TIMEOUT) -> re.Match[str]:
        """The next line of its output that matches; AssertionError with its log when it ends first."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DeadlineError(f"no line {pattern!r} within {timeout} s\n{self.everything()}") from None
            if line is None:
                raise AssertionError(f"it ended with {self.process.wait()}\n{self.everything()}")
            if match := re.search(pattern, line):
                return match

    def wait_until_ready(self) -> Server:
        """Until its banner gives its address, and its HTTP side answers."""
        self.url = self.wait_for_line(_LISTENS)[1]
        assert self.health()["status"] == "ok"
        return self

    # -------------------------------------------------------------------------------- a look into it

    @property
    def log(self) -> str:
        """All that it and its children wrote to stderr."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def everything(self) -> str:
        """Output and log, for a failing assertion."""
        return "\n".join([*self.output, "--- stderr", self.log])

    @property
    def pid(self) -> int:
        """Of launcher and front end."""
        return self.process.pid

    def children(self, role: str) -> list[psutil.Process]:
        """Its processes of a role, ``executor``, ``worker`` or ``front end``, the oldest first."""
        found = []
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                module = next((word for word in child.cmdline() if word in _ROLES), "")
                if _ROLES.get(module) == role and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return sorted(found, key=lambda child: (child.create_time(), child.pid))

    def executor(self) -> int:
        """Process id of the executor."""
        (child,) = self.children("executor")
        return child.pid

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        return [child.pid for child in self.children("worker")]

    def everybody(self) -> list[psutil.Process]:
        """Every process that was started with our TMPDIR, whoever is its parent by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("TMPDIR") == self._tmp and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def run_directory(self) -> Path:
        """Where its sockets are."""
        (directory,) = Path(self._tmp).glob("tailrace-*")
        return directory

    def health(self) -> dict[str, Any]:
        """The answer of /health, whatever its status."""
        answer: dict[str, Any] = self._http.get(f"{self.url}/health").json()
        return answer

    def metrics(self) -> dict[str, float]:
        """/metrics as ``name{label=value}`` -> value."""
        values = {}
        for family in text_string_to_metric_families(self._http.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return values

    def total(self, name: str) -> float:
        """A metric summed over its labels; -1 if it is not there yet."""
        found = [value for key, value in self.metrics().items() if key.partition("{")[0] == name]
        return sum(found) if found else -1.0

    # -------------------------------------------------------------------------------- its end

    def send(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float = STOP_TIMEOUT) -> int:
        """Wait for its end; returns the exit code. AssertionError if it or a child outlives the deadline."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"it did not end within {timeout} s\n{self.everything()}") from None
        self._reader.join(timeout)
        until(lambda: not self.everybody(), "the end of all its processes", 5.0)
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and see that nothing is left: no process, no socket, no directory."""
        if self.process.poll() is None:
            self.send(number)
        code = self.wait()
        self.assert_clean()
        return code

    def assert_clean(self) -> None:
        """Nothing of it is left in its TMPDIR, and no process."""
        assert not self.everybody(), self.everything()
        left = [name for name in os.listdir(self._tmp) if not name.startswith("torchinductor_")]  # torch's own cache
        assert left == [], self.everything()

    def destroy(self) -> None:
        """End whatever is still there; for the end of a test that failed."""
        for process in self.everybody():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._reader.join(5.0)
        self._http.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def launch(*arguments: str, cwd: Path | None = None, **environment: str) -> Iterator[Server]:
    """A server from its first instruction on, for tests of its start; it is destroyed at the end."""
    server = Server(list(arguments), environment, cwd)
    try:
        yield server
    finally:
        server.destroy()


@contextlib.contextmanager
def serving(*arguments: str, cwd: Path | None = None, **environment: str) -> Iterator[Server]:
    """A server that serves; at the end it is stopped, and has to leave nothing behind."""
    with launch(*arguments, cwd=cwd, **environment) as server:
        yield server.wait_until_ready()
        assert server.stop() == 0, server.everything()


def replay_arguments(tokenizer: Path, workers: int, **engine_config: Any) -> list[str]:
    """The flags of a server on the replay engine."""
    return [
        "--engine", "replay", "--engine_config", json.dumps(engine_config), "--tokenizer", str(tokenizer),
        "--num_postprocess_workers", str(workers), "--reasoning_parser", "none", "--tool_parser", "none",
    ]  # fmt: skip
