#!/usr/bin/env python3
"""What scaffolding costs over driving result handles directly: CPU per step, and time in all.

A real executor process on the replay engine and real worker processes generate N times at once. The front end's process
drives them in turns, in the same run:

* ``direct``: ``async for`` over each handle of ``GenerationExecutor.submit``, and nothing else;
* ``native``: a GenerationTask each, by ``ScaffoldingLlm`` and ``NativeGenerationController``;
* ``queued``: the same, each with a queue that gets one output per step;
* ``stream``: a StreamGenerationTask each, that comes back to its controller every ``--streaming_step`` steps;
* ``async``: an AsyncGenerationTask each, likewise, with every step an asyncio task.

Two paces: a step every ``--interval`` seconds, where every step of the engine is a step of its handle; and as fast as
they are taken away, where a handle's steps hold several tokens each. Figures are medians over the rounds; a step is one
``anext`` that brought something. What a mode costs is the CPU time of this process above ``direct``'s, per step.

    scripts/bench_scaffolding.py [--generations 1000] [--tokens 100] [--rounds 5] [--workers 1] [--interval 0.05]
                                 [--streaming_step 4] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from executor.models import resolve_model
from executor.request import SamplingParams
from postproc_workers.deltas import deltas_request
from serve.config import Config
from serve.scaffolding import (
    GENERATION,
    AsyncGenerationTask,
    Controller,
    GenerationTask,
    NativeGenerationController,
    Process,
    ScaffoldingLlm,
    StreamGenerationTask,
)
from serve.scaffolding.local import LocalExecutor

PROMPT = list(range(100, 120))


@dataclass(frozen=True)
class Round:
    """One mode, once. Seconds; cpu is this process's."""

    wall: float
    cpu: float
    steps: int
    tokens: int


class Stepped(Controller):
    """Generations that come back every so many steps. kind: of the tasks."""

    def __init__(self, kind: type[StreamGenerationTask], streaming_step: int) -> None:
        self._kind, self._step = kind, streaming_step

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        for task in tasks:
            stream = self._kind(**task.inputs(), streaming_step=self._step)
            while not stream.ended:
                yield [stream]
            stream.check()
            task.adopt(stream)


class Queued(Controller):
    """One generation with a queue."""

    def generate(self, prompt: Any, **inputs: Any) -> Process:
        task = GenerationTask(prompt=prompt, streaming_output_queue=asyncio.Queue(), **inputs)
        yield [task]
        task.check()
        return task


async def direct(local: LocalExecutor, options: argparse.Namespace) -> tuple[int, int]:
    """(steps, tokens) of all handles."""
    executor, sampling = local.executor, SamplingParams(max_tokens=options.tokens, ignore_eos=True)

    async def drive() -> tuple[int, int]:
        handle = executor.submit(deltas_request(executor.mint(), [PROMPT], sampling))
        steps = 0
        async for _ in handle:
            steps += 1
        return steps, handle.completion_tokens

    counts = await asyncio.gather(*(drive() for _ in range(options.generations)))
    return sum(steps for steps, _ in counts), sum(tokens for _, tokens in counts)


def scaffolded(controller: Controller) -> Callable[[LocalExecutor, argparse.Namespace], Awaitable[tuple[int, int]]]:
    """The same by the scheduler. Steps are not counted here, which would cost: they are as many as ``direct`` has."""

    async def drive(local: LocalExecutor, options: argparse.Namespace) -> tuple[int, int]:
        request = {"max_tokens": options.tokens, "ignore_eos": True}
        llm = ScaffoldingLlm(controller, {GENERATION: local.worker()})
        tasks = await llm.generate([PROMPT] * options.generations, options=request)
        return 0, sum(task.completion_tokens for task in tasks)

    return drive


async def timed(drive: Callable[..., Awaitable[tuple[int, int]]], *arguments: Any) -> Round:
    """Run it once."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    steps, tokens = await drive(*arguments)
    return Round(time.perf_counter() - wall, time.process_time() - cpu, steps, tokens)


async def measure(options: argparse.Namespace, interval: float) -> dict[str, list[Round]]:
    """All modes in turns; the first turn warms up and is thrown away."""
    modes = {
        "direct": direct,
        "native": scaffolded(NativeGenerationController()),
        "queued": scaffolded(Queued()),
        "stream": scaffolded(Stepped(StreamGenerationTask, options.streaming_step)),
        "async": scaffolded(Stepped(AsyncGenerationTask, options.streaming_step)),
    }
    config = Config(
        engine="replay", tokenizer=str(options.tokenizer), num_postprocess_workers=options.workers,
        engine_config={"batch_size": options.generations, "step_interval": interval}, log_level="warning",
    )  # fmt: skip
    rounds: dict[str, list[Round]] = {name: [] for name in modes}
    async with LocalExecutor(config) as local:
        for turn in range(options.rounds + 1):
            for name, drive in modes.items():
                taken = await timed(drive, local, options)
                if taken.tokens != options.generations * options.tokens:
                    raise RuntimeError(f"{name}: {taken.tokens} tokens arrived")
                if turn:
                    rounds[name].append(taken)
    return rounds


def summary(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians, and the ratios of each turn's rounds to its ``direct`` one."""
    base = rounds["direct"]
    steps = median(taken.steps for taken in base)
    result: dict[str, Any] = {"steps": steps, "tokens": base[0].tokens, "modes": {}}
    for name, taken in rounds.items():
        result["modes"][name] = {
            "wall": median(each.wall for each in taken),
            "cpu": median(each.cpu for each in taken),
            "us_per_step": 1e6 * median(each.cpu - floor.cpu for each, floor in zip(taken, base)) / steps,
            "wall_ratio": median(each.wall / floor.wall for each, floor in zip(taken, base)),
        }
    return result


def text(pace: str, result: dict[str, Any]) -> str:
    """A table."""
    rows = [f"{pace}: {result['tokens']} tokens in {result['steps']:.0f} steps"]
    rows.append("mode     wall s   CPU s   added µs/step   wall ratio")
    for name, line in result["modes"].items():
        rows.append(
            f"{name:7} {line['wall']:7.2f} {line['cpu']:7.2f} {line['us_per_step']:15.2f} {line['wall_ratio']:12.2f}"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--generations", type=int, default=1000, help="in flight at once (%(default)s)")
    add("--tokens", type=int, default=100, help="of each (%(default)s)")
    add("--rounds", type=int, default=5, help="of each mode (%(default)s)")
    add("--workers", type=int, default=1, help="post-processing workers (%(default)s)")
    add("--interval", type=float, default=0.05, help="seconds between two steps when paced (%(default)s)")
    add("--streaming_step", type=int, default=4, help="steps between two looks of a controller (%(default)s)")
    add("--tokenizer", type=Path, help="a tokenizer's directory or file (the embedded model's)")
    add("--json", action="store_true", help="one JSON object, with every round")
    options = parser.parse_args()
    if options.tokenizer is None:
        options.tokenizer = resolve_model(None, progress=lambda words: print(words, file=sys.stderr)).directory
    results = {}
    for pace, interval in (("paced", options.interval), ("saturated", 0.0)):
        rounds = asyncio.run(measure(options, interval))
        results[pace] = summary(rounds) | {
            "rounds": {name: [asdict(r) for r in taken] for name, taken in rounds.items()}
        }
        if not options.json:
            print(text(pace, results[pace]), flush=True)
    if options.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
