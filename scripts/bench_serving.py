#!/usr/bin/env python3
"""How fast a server answers, and what that costs: any server with OpenAI's completions or chat completions.

Flags, and the keys of the result file, are those that users of `vllm bench serve` know. Time to first token (TTFT),
time per output token (TPOT), gaps between chunks (ITL) and end-to-end latency (E2EL); throughput; goodput; and, when
the server is on this machine, the CPU time of each of its processes per token, beside the client's own. The same seed
asks the same prompts at the same times. ctrl-C reports what has come so far.

    scripts/bench_serving.py --backend openai-chat --base-url http://127.0.0.1:8000 --dataset-name random
        --num-prompts 1000 --max-concurrency 256 [--request-rate 20 --burstiness 0.5] [--goodput ttft:200 tpot:50]
        [--save-result] [--plot out.png]

Exit codes: 0 done; 1 no request was answered, or the server was not found; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import plot, report
from scripts.bench.benchmark import BenchmarkError, Report, benchmark
from scripts.bench.dataset import DatasetError
from scripts.bench.options import Options, parse
from scripts.bench.results import DETAILS


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _run(work: Coroutine[Any, Any, Report]) -> Report:
    """uvloop makes the client cheaper, but is not there on every machine."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _write(options: Options, done: Report) -> None:
    figures = done.figures
    if options.save_result or options.save_detailed or options.append_result:
        kept = {key: value for key, value in figures.items() if options.save_detailed or key not in DETAILS}
        file = report.file_of(options, figures["model_id"], figures["date"])
        report.save(kept, file, options.append_result)
        _say(f"written: {file}")
    if options.plot is not None:
        plot.draw(done.outcomes, figures, options.plot)
        _say(f"drawn: {options.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse(argv)
    try:
        if options.plot is not None:
            plot.require_matplotlib()
        done = _run(benchmark(options, _say))
    except (BenchmarkError, DatasetError, plot.PlotError) as error:
        _say(f"bench_serving: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    print(report.text(done.figures))
    _write(options, done)
    if done.interrupted:
        return 130
    return 0 if done.figures["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
