#!/usr/bin/env python3
"""The same work on this server and on others, and ratios: which is faster, and what serving costs beside the model.

Every system gets the same model files, dtype and prompts on the same machine: streamed chat completions of a fixed
length at temperature 0, so many at once, in rounds (ours, peer, ours, peer), one system at a time. Peers: `transformers
serve` with continuous batching and `vllm serve`, if they are installed, or whatever runs at `--peer_url`. Nothing is
installed here; the environment of a peer is named with `--peer_python`.

    scripts/bench_compare.py [--peer_python PEER_VENV/bin/python] [--peer_url http://127.0.0.1:9000]
        [--model DIRECTORY] [--num_prompts 64] [--max_tokens 64] [--concurrency 32] [--rounds 2] [--json]

CPU time outside the model is all of a server's processes without what generates: of ours without the engine's share of
the executor, of `transformers serve` the main thread alone (event loop: HTTP, template, tokenizer, text, JSON), while
all its other threads count as model, of `vllm serve` without its engine's processes. `scripts/bench/outside.py` says
more. A ratio of more than 1 means that ours is better.

Exit codes: 0 done; 1 no peer, a server that failed, or requests that did; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import outside
from scripts.bench.benchmark import BenchmarkError, Report, benchmark
from scripts.bench.comparison import Round, figures, ratios, text
from scripts.bench.cpu import CpuError, ProcessTable, is_loopback
from scripts.bench.dataset import DatasetError
from scripts.bench.options import parse as serving_options
from scripts.bench.outside import Meter
from scripts.bench.peers import LENGTH_FLAGS, Peer, PeerError, Running, Work, transformers_serve, vllm_serve
from scripts.bench.stack import Stack

#: Tokens of each answer before the rounds: what a first request costs is nobody's cost per token.
WARM_UP_TOKENS = 8
_METHOD = (
    "CPU outside the model: ours: front end, workers, the executor's shipping; transformers serve: its main thread "
    "(all other threads count as model); vllm serve: all processes but the engine's. Without being idle: less what "
    "the same took in seconds without a request. Ratios above 1: ours is better."
)


@dataclass(frozen=True, slots=True)
class Address:
    """A server that runs. roots: its first processes, none if they are not seen."""

    url: str
    roots: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class System:
    """One of those that are compared. start: a context in which it runs."""

    name: str
    start: Callable[[], AbstractContextManager[Address]]


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ what is compared


def ours(options: argparse.Namespace) -> System:
    """This server, on the model or as ``--server_args`` say."""
    limits = ("--device", options.device, "--dtype", options.dtype)
    arguments = [str(options.model), *limits, *options.server_args]

    @contextmanager
    def start() -> Iterator[Address]:
        with Stack(*arguments) as stack:
            yield Address(stack.url, (stack.pid,), "tailrace")

    return System("tailrace", start)


def peers(options: argparse.Namespace) -> list[System]:
    """Those that are there; what is missing, and why, is said."""
    if options.peer_url:
        return [_running(options)]
    length = options.input_tokens + options.max_tokens + _TEMPLATE_TOKENS
    work = Work(options.model, options.dtype, options.device, options.concurrency, length)
    found = []
    for name, make in (("transformers", transformers_serve), ("vllm", vllm_serve)):
        if options.peer in ("all", name):
            try:
                found.append(_started(make(options.peer_python, work, options.peer_args)))
            except PeerError as error:
                _say(f"{name} serve: {error}")
    return found


#: Allowance for what a chat template adds to a prompt.
_TEMPLATE_TOKENS = 64


def _started(peer: Peer) -> System:
    @contextmanager
    def start() -> Iterator[Address]:
        with tempfile.TemporaryDirectory(prefix="bench-") as place, Running(peer, Path(place) / "log") as running:
            yield Address(running.url, (running.pid,), peer.kind)

    return System(f"{peer.kind} serve {peer.version}", start)


def _running(options: argparse.Namespace) -> System:
    """The server at ``--peer_url``, whose processes are seen if it is on this machine and ours to see."""
    parts = urlsplit(options.peer_url)

    @contextmanager
    def start() -> Iterator[Address]:
        roots: tuple[int, ...] = ()
        kind = options.peer_kind
        if is_loopback(parts.hostname or ""):
            table = ProcessTable()
            try:
                roots = tuple(table.server(parts.port or 80))
            except CpuError as error:
                _say(f"{options.peer_url}: {error}")
            if kind == "auto":
                kind = outside.kind_of(table.tree(roots).values())
        yield Address(options.peer_url, roots, "other" if kind == "auto" else kind)

    return System(options.peer_url, start)


# ------------------------------------------------------------------------------------------------ the work


def work(options: argparse.Namespace, at: Address, prompts: int, tokens: int, seed: int) -> Report:
    """Ask for it, all of it. Raises BenchmarkError, or DatasetError."""
    flags = ["--backend", "openai-chat", "--base-url", at.url, "--tokenizer", str(options.tokenizer), "--disable-tqdm",
             "--num-prompts", str(prompts), "--max-concurrency", str(options.concurrency), "--temperature", "0",
             "--random-input-len", str(options.input_tokens), "--random-output-len", str(tokens), "--seed", str(seed),
             "--request-timeout", str(options.timeout), *LENGTH_FLAGS[at.kind]]  # fmt: skip
    if at.kind == "transformers" and not options.peer_url:
        flags += ["--model", str(options.model)]
    # It counts CPU time itself, by process; ours is by thread too, so we count around it.
    done = asyncio.run(benchmark(serving_options(flags), lambda words: None))
    if done.interrupted:  # it takes the first ctrl-C for the end of its run, and we for the end of all
        raise KeyboardInterrupt
    return done


def one_round(options: argparse.Namespace, system: System) -> Round:
    """Start a system, warm it up, have it work, end it."""
    with system.start() as at:
        _say(f"{system.name}: {at.url}")
        work(options, at, options.concurrency, WARM_UP_TOKENS, options.seed + 1)
        meter = Meter(at.kind, at.url, at.roots) if at.roots else None
        idle = _idle(meter, options.idle_seconds) if meter else None
        before = meter.begin() if meter else None
        done = work(options, at, options.num_prompts, options.max_tokens, options.seed)
        cpu = meter.end().since(before) if meter and before else None
    failures = [f"{count} x {why}" for why, count in done.figures["error_reasons"].items()]
    _say("; ".join([f"{system.name}: {done.figures['output_throughput']:.1f} tokens/s", *failures]))
    return Round(done.figures["duration"], done.outcomes, cpu, idle)


def _idle(meter: Meter, seconds: float) -> float | None:
    """CPU seconds a second outside the model of a server that is asked nothing."""
    before, begin = meter.begin(), time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - begin
    outside = meter.end().since(before).outside
    return None if outside is None else outside / elapsed


def compare(options: argparse.Namespace, systems: Sequence[System]) -> dict[str, Any]:
    """All rounds; the first system is ours. JSON's data."""
    rounds: dict[str, list[Round]] = {system.name: [] for system in systems}
    for _ in range(options.rounds):
        for system in systems:
            rounds[system.name].append(one_round(options, system))
    each = {name: [figures([one]) for one in made] for name, made in rounds.items()}
    first, *others = each
    return {
        "method": _METHOD,
        "work": {
            key: getattr(options, key)
            for key in (
                "num_prompts",
                "input_tokens",
                "max_tokens",
                "concurrency",
                "rounds",
                "seed",
                "dtype",
                "device",
                "threads",
            )
        },  # fmt: skip
        "systems": {name: figures(made) for name, made in rounds.items()},
        "rounds": each,
        "ratios": {name: ratios(each[first], each[name]) for name in others},
    }


# ------------------------------------------------------------------------------------------------ the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_compare.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, help="directory in Hugging Face layout (the embedded model's)")
    add("--tokenizer", type=Path, help="directory or tokenizer.json that prompts are made with (the model's)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of every system (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(a GPU if there is one)")
    add("--threads", type=_positive, help="of a model on a CPU, OMP_NUM_THREADS of every system (by the library)")
    add("--num_prompts", type=_positive, default=64, help="requests of a round (%(default)s)")
    add("--input_tokens", type=_positive, default=64, help="of a prompt, before the template (%(default)s)")
    add("--max_tokens", type=_positive, default=64, help="of an answer (%(default)s)")
    add("--concurrency", type=_positive, default=32, help="requests open at once (%(default)s)")
    add("--rounds", type=_positive, default=2, help="of each system, in turn (%(default)s)")
    add("--idle_seconds", type=float, default=5.0, help="without a request before each round: what a server "
        "needs to be there is told apart from what work costs (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="decides the prompts (%(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for an answer (%(default)s)")
    add("--peer", choices=("all", "transformers", "vllm"), default="all", help="which to look for (%(default)s)")
    add("--peer_python", type=Path, default=Path(sys.executable), help="interpreter of a peer's environment (this one)")
    add("--peer_args", type=shlex.split, default=[], help="more flags of the peer, one string")
    add("--peer_url", help="a server that runs already, instead: http://HOST:PORT")
    add("--peer_kind", choices=("auto", *outside.KINDS), default="auto", help="what runs there (by its processes)")
    add("--server_args", type=shlex.split, default=[], help="more flags of `tailrace serve`, one string")
    add("--json", action="store_true", help="one JSON object")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Checked options. SystemExit with code 2, and a message that names the flag, when they make no sense."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.peer_url and urlsplit(options.peer_url).scheme != "http":
        parser.error(f"argument --peer_url: {options.peer_url!r} is not http://HOST:PORT")
    if options.peer_kind != "auto" and not options.peer_url:
        parser.error("argument --peer_kind: only with --peer_url")
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"argument --model: there is no {options.model / 'config.json'}")
    if not options.peer_url and not options.peer_python.is_file():
        parser.error(f"argument --peer_python: there is no file {options.peer_python}")
    return options


def _resolve(options: argparse.Namespace) -> None:
    """The model's files and the device, for all systems the same."""
    from executor.models import resolve_model

    options.model = options.model or resolve_model(None, progress=_say).directory
    options.tokenizer = options.tokenizer or options.model
    if options.device == "auto":
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse(argv)
    # A server of another environment does not notice our end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    _resolve(options)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    others = peers(options)
    if not others:
        _say("bench_compare: there is no peer to compare with")
        return 1
    try:
        done = compare(options, [ours(options), *others])
    except (BenchmarkError, DatasetError, RuntimeError, OSError) as error:
        _say(f"bench_compare: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(done) if options.json else report(done))
    return 1 if any(found["failed"] for found in done["systems"].values()) else 0


def report(done: dict[str, Any]) -> str:
    """The result in words."""
    work = ", ".join(f"{key} {value}" for key, value in done["work"].items())
    reasons = [f"{name}: {count} x {why}" for name, found in done["systems"].items()
               for why, count in found["error_reasons"].items()]  # fmt: skip
    return "\n".join([work, text(done["systems"], done["ratios"]), *reasons, done["method"]])


if __name__ == "__main__":
    sys.exit(main())
