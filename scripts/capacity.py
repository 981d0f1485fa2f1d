#!/usr/bin/env python3
"""Cores needed for X tokens per second at Y streams, from costs measured on the machine in question.

    scripts/bench_frontend.py --concurrency 32,256 --workers 1,2 --stream_interval 1,2,8 --modes paced --no_floor \\
        --json > costs.json
    scripts/capacity.py costs.json --tokens_per_second 20000 --streams 512 [--tokens_per_event 1] [--workers N]

The engine's own cores are not in it. The model, and how well it holds: docs/capacity.md.

Exit codes: 0 done; 1 the file does not say enough; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.capacity import HEADROOM, CapacityError, Costs, Load, fit, workers_for


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Checked options. SystemExit with code 2, and a message that names the flag, when they make no sense."""
    parser = argparse.ArgumentParser(prog="capacity.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("costs", type=Path, help="what bench_frontend.py --json printed")
    add("--tokens_per_second", type=_positive, required=True, help="of all streams together")
    add("--streams", type=_positive, required=True, help="open at once")
    add("--tokens_per_event", type=_positive, default=1.0, help="as with --stream_interval (%(default)s)")
    add("--workers", type=int, help=f"post-processing workers (as many as keep each below {HEADROOM:.0%} of a core)")
    options = parser.parse_args(argv)
    if options.tokens_per_event < 1:
        parser.error(f"argument --tokens_per_event: {options.tokens_per_event:g} is not at least 1")
    if options.workers is not None and options.workers < 1:
        parser.error(f"argument --workers: {options.workers} is not at least 1")
    return options


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def read(path: Path) -> list[dict[str, Any]]:
    """The measurements in a file. Raises CapacityError."""
    try:
        lines = list(json.loads(path.read_text(encoding="utf-8"))["costs"])
        complete = all("steps_per_second" in line for line in lines)
    except OSError as error:
        raise CapacityError(str(error)) from None
    except (ValueError, LookupError, TypeError) as error:
        raise CapacityError(f"{path}: not what bench_frontend.py --json prints ({error})") from None
    if not complete:
        raise CapacityError(f"{path}: costs: not of bench_frontend.py")
    return lines


def text(costs: Costs, load: Load, workers: int) -> str:
    """Costs and the answer."""
    cores = costs.cores(load, workers)
    rows = [f"{'CPU µs per':12}{'token':>10}{'frame':>10}{'cores':>10}{'processes':>11}"]
    for kind, used in cores.items():
        count = workers if kind == "worker" else math.ceil(used / HEADROOM) if kind == "front end" else 1
        cost = costs.kinds[kind]
        token = cost.of_token(load.tokens_per_event)
        rows.append(f"{kind:12}{token:10.2f}{cost.frame:10.2f}{used:10.2f}{max(1, count):11}")
    rows.append(f"{'together':32}{sum(cores.values()):10.2f}")
    rows.append(f"memory, MiB {costs.memory_mib(load):.0f}, without what the model needs")
    if cores["executor"] > HEADROOM:
        rows.append("the executor's loop is one thread: this is more than it can ship beside its engine")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse(argv)
    load = Load(options.tokens_per_second, int(options.streams), options.tokens_per_event)
    try:
        costs = fit(read(options.costs))
        workers = options.workers or workers_for(costs, load)
    except CapacityError as error:
        print(f"capacity: {error}", file=sys.stderr)
        return 1
    print(text(costs, load, workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
