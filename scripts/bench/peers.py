"""Servers to compare with: which are installed, how each is started for the same work, and what its requests need."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_START_TIMEOUT = 300.0
_STOP_TIMEOUT = 30.0
#: What `transformers serve` needs besides itself; the last line says which release it is.
_PROBE = "import fastapi, openai, torch, transformers, uvicorn; print(transformers.__version__)"

#: Kind of server -> flags of ``bench_serving.py`` that make it generate up to the given length.
#: `transformers serve` refuses ignore_eos, but takes a generation config, whose end-of-sequence id may be none at all.
LENGTH_FLAGS = {
    "tailrace": ("--ignore-eos",),
    "vllm": ("--ignore-eos",),
    "transformers": (
        "--no-ignore-eos",
        "--extra-body",
        json.dumps({"generation_config": json.dumps({"eos_token_id": -1})}),
    ),
    "other": ("--no-ignore-eos",),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What a server must be able to hold. device: cpu or cuda."""

    model: Path
    dtype: str
    device: str
    concurrency: int
    length: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that can be started. command: without host and port."""

    kind: str
    version: str
    command: tuple[str, ...]


class PeerError(RuntimeError):
    """A server cannot be used."""


def transformers_serve(python: Path, work: Work, more: Sequence[str] = ()) -> Peer:
    """`transformers serve` of the interpreter's environment, with continuous batching. PeerError if it is not there."""
    probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True)
    program = python.with_name("transformers")
    if probe.returncode or not program.is_file():
        why = probe.stderr.strip().splitlines()[-1:] or [f"there is no {program}"]
        raise PeerError(f'{why[0]}; pip install "transformers[serving]" into an environment and name its --peer_python')
    command = (str(program), "serve", str(work.model), "--continuous-batching", "--dtype", work.dtype,
               "--device", work.device, *_cache(work), *more)  # fmt: skip
    return Peer("transformers", probe.stdout.split()[-1], command)


def _cache(work: Work) -> tuple[str, ...]:
    """Without a GPU it cannot find out how large its cache may be; it gets the page and step of our own engine, and
    pages enough that nobody waits."""
    if work.device != "cpu":
        return ()
    from executor.engines.loading import CPU_BATCH_TOKENS, CPU_PAGE_TOKENS

    pages = (work.concurrency + 1) * (work.length // CPU_PAGE_TOKENS + 2)
    sizes = ("--cb-block-size", CPU_PAGE_TOKENS, "--cb-num-blocks", pages, "--cb-max-batch-tokens", CPU_BATCH_TOKENS)
    return tuple(map(str, sizes))


def vllm_serve(python: Path, work: Work, more: Sequence[str] = ()) -> Peer:
    """`vllm serve`, beside the interpreter or on the path. PeerError if it is not there."""
    beside = python.with_name("vllm")
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise PeerError("not installed")
    version = subprocess.run([program, "--version"], capture_output=True, text=True)
    if version.returncode:
        raise PeerError(f"vllm --version: {version.stderr.strip().splitlines()[-1:]}")
    sizes = ("--max-num-seqs", str(work.concurrency))
    command = (program, "serve", str(work.model), "--dtype", work.dtype, *sizes, *more)
    return Peer("vllm", version.stdout.split()[-1], command)


class Running:
    """A peer as a child, ready to be asked. PeerError if it ends before it is."""

    def __init__(self, peer: Peer, log: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        # A server of another environment shall not find our packages.
        environment.pop("PYTHONPATH", None)
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                [*peer.command, "--host", "127.0.0.1", "--port", str(port)], stdout=file, stderr=file, env=environment
            )
        self._log = log

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._child.pid

    def __enter__(self) -> Running:
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._answers():
            if self._child.poll() is not None or time.monotonic() > deadline:
                self._stop()
                tail = self._log.read_text(errors="replace").splitlines()[-5:]
                raise PeerError("it did not start:\n" + "\n".join(tail))
            time.sleep(0.2)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
