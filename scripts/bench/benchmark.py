"""A benchmark from its options to its figures: find the model, make the plan, warm up, run, count."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import orjson

from .arrivals import offsets, ramp
from .client import Client, Target
from .cpu import CpuError, Process, ProcessTable, is_loopback, usage
from .dataset import HuggingFaceTokenizer, Prompt, Tokenizer, prompts
from .options import Options
from .outcome import Outcome
from .report import BUSY_CLIENT, settings
from .results import details, results
from .run import Plan, Progress, Run, run

Say = Callable[[str], None]
_READY_PAUSE = 0.5


class BenchmarkError(RuntimeError):
    """It cannot be carried out."""


@dataclass(frozen=True, slots=True)
class Report:
    """figures: for the text and the file, ``results.DETAILS`` included. outcomes: of the requests that finished.
    interrupted: it was stopped before its end."""

    figures: dict[str, Any]
    outcomes: list[Outcome]
    interrupted: bool


async def benchmark(options: Options, say: Say) -> Report:
    """Carry it out. ctrl-C ends the run, and what has come by then is reported; a second one ends the program.

    Raises BenchmarkError, or DatasetError.
    """
    tokenizer = HuggingFaceTokenizer(options.tokenizer) if options.tokenizer else None
    measured, warmups = prompts(options, tokenizer)
    client = Client(Target.of(options.url, options.headers, options.insecure), options.request_timeout)
    try:
        model = await _model(options, client, say)
        stop = asyncio.Event()
        with _interruptible(stop):
            await _warm_up(options, client, warmups, model, stop, say)
            before = _Cpu.of(options, client.target)
            done = await _measure(options, client, measured, model, stop)
            after = _Cpu.of(options, client.target, before.roots)
        date = datetime.now().strftime("%Y%m%d-%H%M%S")
        figures = settings(options, model, date)
        return _report(options, figures, done, measured, tokenizer, before, after)
    finally:
        client.close()


# ------------------------------------------------------------------------------------------------ before


async def _model(options: Options, client: Client, say: Say) -> str:
    """The model's name: as given, or the first that the server lists."""
    await _ready(options, client, say)
    if given := options.model or options.served_model_name:
        return given
    try:
        name = orjson.loads(await client.document("/v1/models"))["data"][0]["id"]
    except OSError as error:
        raise BenchmarkError(f"{options.url}: {error}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"{options.url}/v1/models lists no model ({error!r}); name it with --model") from None
    say(f"model: {name}")
    return str(name)


async def _ready(options: Options, client: Client, say: Say) -> None:
    deadline = time.monotonic() + options.ready_check_timeout_sec
    while options.ready_check_timeout_sec:
        try:
            await client.document("/v1/models")
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{options.url} is not ready: {error}") from None
            say(f"waiting for {options.url}: {error}")
            await asyncio.sleep(_READY_PAUSE)


@contextmanager
def _interruptible(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _warm_up(
    options: Options, client: Client, warmups: Sequence[Prompt], model: str, stop: asyncio.Event, say: Say
) -> None:
    if not warmups:
        return
    say(f"warming up: {len(warmups)} requests")
    done = await run(_plan(options, warmups, model, [0.0] * len(warmups)), client, stop)
    if failed := [outcome.error for outcome in done.outcomes if outcome is not None and outcome.error]:
        say(f"{len(failed)} of them failed: {failed[0]}")


def _plan(options: Options, asked: Sequence[Prompt], model: str, at: Sequence[float]) -> Plan:
    name = options.served_model_name or model
    bodies = [orjson.dumps(prompt.body(options, name)) for prompt in asked]
    return Plan(options.endpoint, bodies, at, options.max_concurrency)


# ------------------------------------------------------------------------------------------------ the run


async def _measure(
    options: Options, client: Client, measured: Sequence[Prompt], model: str, stop: asyncio.Event
) -> Run:
    rng = np.random.RandomState(options.seed)
    if options.ramp_up is not None:
        at = ramp(len(measured), options.ramp_up, options.burstiness, rng)
    else:
        at = offsets(len(measured), options.request_rate, options.burstiness, rng)
    plan = _plan(options, measured, model, at)
    # The plan is not looked at again by a collection in the middle of the run.
    gc.collect()
    gc.freeze()
    try:
        with _progress(options, len(measured)) as progress:
            return await run(plan, client, stop, progress)
    finally:
        gc.unfreeze()


@contextmanager
def _progress(options: Options, count: int) -> Iterator[Progress]:
    if options.disable_tqdm:
        yield lambda: None
        return
    # Imported here: whoever wants no bar needs no library for it.
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=count, unit="req", smoothing=0.1) as bar:
        yield lambda: bar.update() and None


@dataclass(frozen=True, slots=True)
class _Cpu:
    """CPU time used up to a moment. roots: the server's first processes; none if they are not known, see ``note``."""

    client: float
    roots: frozenset[int]
    processes: dict[int, Process]
    note: str = ""

    @classmethod
    def of(cls, options: Options, target: Target, roots: frozenset[int] | None = None) -> _Cpu:
        table, note = ProcessTable(), ""
        if roots is None:
            roots, note = cls._roots(options, target, table)
        return cls(time.process_time(), roots, table.tree(roots) if roots else {}, note)

    @staticmethod
    def _roots(options: Options, target: Target, table: ProcessTable) -> tuple[frozenset[int], str]:
        if options.server_pid:
            return frozenset({options.server_pid}), ""
        if not is_loopback(target.host):
            return frozenset(), "server CPU: the server is on another machine"
        try:
            return frozenset(table.server(target.port)), ""
        except CpuError as error:
            return frozenset(), f"server CPU: {error}"


# ------------------------------------------------------------------------------------------------ after


def _report(
    options: Options,
    figures: dict[str, Any],
    done: Run,
    measured: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    before: _Cpu,
    after: _Cpu,
) -> Report:
    finished = [(outcome, prompt) for outcome, prompt in zip(done.outcomes, measured) if outcome is not None]
    estimated = sum([_fill_in(outcome, prompt, tokenizer) for outcome, prompt in finished])
    outcomes = [outcome for outcome, _ in finished]
    figures |= results(outcomes, done.duration, options.goodput, options.percentile_metrics, options.metric_percentiles)
    figures["unfinished"] = len(measured) - len(outcomes)
    figures |= _cpu(figures, before, after)
    figures["notes"] = [*_notes(figures, estimated, tokenizer), *([before.note] if before.note else [])]
    return Report(figures | details(outcomes), outcomes, figures["unfinished"] > 0)


def _fill_in(outcome: Outcome, prompt: Prompt, tokenizer: Tokenizer | None) -> bool:
    """Token counts that the server did not give; returns whether the output's is such a one."""
    if outcome.input_tokens is None:
        outcome.input_tokens = prompt.input_tokens
    if outcome.output_tokens is not None or not outcome.completed:
        return False
    outcome.output_tokens = len(tokenizer.encode(outcome.text)) if tokenizer else len(outcome.chunks)
    return True


def _cpu(figures: dict[str, Any], before: _Cpu, after: _Cpu) -> dict[str, Any]:
    tokens = figures["total_output_tokens"]

    def entry(seconds: float) -> dict[str, float | None]:
        return {"cpu_seconds": seconds, "cpu_us_per_output_token": seconds / tokens * 1e6 if tokens else None}

    processes = usage(before.processes, after.processes)
    rows = [{"pid": one.pid, "name": one.name, **entry(one.cpu_seconds)} for one in processes]
    server = entry(sum(one.cpu_seconds for one in processes)) if rows else dict.fromkeys(entry(0.0))
    client = entry(after.client - before.client)
    return {
        "server_processes": rows or None,
        **{f"server_{key}": value for key, value in server.items()},
        **{f"client_{key}": value for key, value in client.items()},
    }


def _notes(figures: dict[str, Any], estimated: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    if estimated:
        how = "counted with --tokenizer" if tokenizer else "taken to be its chunks; --tokenizer counts them"
        yield f"{estimated} answers came without usage: their output tokens are {how}"
    if figures["duration"] and figures["client_cpu_seconds"] / figures["duration"] > BUSY_CLIENT:
        yield "this client used most of a core: it may be what limits the figures. Run several, with less load each"
