#!/usr/bin/env python3
"""CPU time per token from the executor to the socket, all processes outside the engine, beside its floor.

A real server streams chat completions of the replay engine to N clients that take whatever comes. Two paces:

* ``paced``: a step every ``--interval`` seconds, which the machine keeps up with: one event per token.
* ``saturated``: the engine makes tokens as fast as they are taken away, and the server coalesces.

The floor is one process that writes events of the same size to as many connections from one ticker over uvloop's
transports, at the same pace, one at a time and eight at once (``scripts/bench/floor.py``). It is timed before and
after; machines drift, so compare ratios and not microseconds of different runs.

``--concurrency``, ``--workers``, ``--num_serve_frontends`` and ``--stream_interval`` take lists; every combination is
measured. Costs are told by kind of process and by stage, which is as far as the kernel tells threads apart: main
(Python: its event loop), zeromq (its I/O threads), other. ``scripts/capacity.py`` turns the JSON into cores.

``--step_lag`` measures something else: what the executor's loop adds to an engine step (``scripts/bench/step_lag.py``).

    scripts/bench_frontend.py [--concurrency 64,256 | --sweep] [--workers 1,2] [--num_serve_frontends 1,2]
                              [--stream_interval 1,8] [--modes paced,saturated] [--seconds S] [--interval S]
                              [--no_floor] [--json] [--plot out.png]
    scripts/bench_frontend.py --step_lag [--concurrency 256] [--interval 0.01] [--seconds S] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import costs, step_lag
from scripts.bench.costs import MODES, Cost, Setting
from scripts.bench.stack import Stack
from scripts.bench.takers import Takers, http_request

SWEEP = (1, 16, 64, 256, 1024, 4096)
#: Different ids in what is streamed.
IDS = 8192
REQUEST: dict[str, object] = {
    "messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": 900_000, "ignore_eos": True,
}  # fmt: skip


def measure(options: argparse.Namespace, setting: Setting) -> Cost:
    """Streams to so many clients, in the middle of their lives."""
    paced, streams = setting.mode == "paced", setting.concurrency
    engine = {"step_interval": options.interval if paced else 0.0, "batch_size": max(streams, 256)}
    engine |= options.ids
    with Stack.replay(options.tokenizer, engine, *setting.flags()) as stack:
        idle = stack.memory()
        request = http_request("/v1/chat/completions", REQUEST)
        with Takers("127.0.0.1", stack.port, streams, request) as takers:
            takers.ready()
            before = costs.Sample.of(stack, takers)
            time.sleep(options.seconds)
            after = costs.Sample.of(stack, takers)
            memory = stack.memory() - idle
    return costs.cost(setting, before, after, idle, memory)


def compare(options: argparse.Namespace, setting: Setting) -> list[dict[str, Any]]:
    """The chosen paces of one server, and their floors before and after."""
    floors = [_floors(options, setting.concurrency)]
    made = [measure(options, replace(setting, mode=mode)) for mode in options.modes]
    floors.append(_floors(options, setting.concurrency))
    lines = []
    for cost in made:
        pair = [found[cost.setting.mode] for found in floors if found]
        line = cost.line()
        if pair:
            least = sum(pair) / len(pair)
            line |= {"floor": least, "floors": pair, "ratio": cost.total / least, "event_bytes": options.event_bytes}
        lines.append(line)
    return lines


def _floors(options: argparse.Namespace, concurrency: int) -> dict[str, float]:
    if options.no_floor:
        return {}
    seconds = min(options.seconds, 5.0)
    return {
        mode: costs.floor(concurrency, options.event_bytes, costs.PER_WRITE[mode], options.interval, seconds)
        for mode in options.modes
    }


# ------------------------------------------------------------------------------------------------ the command


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(argv)
    options.tokenizer = options.tokenizer or embedded_tokenizer()
    options.ids = ids_of_text(options.tokenizer)
    if options.step_lag:
        return lag(options)
    lines: list[dict[str, Any]] = []
    for setting in settings(options):
        made = compare(options, setting)
        lines += made
        if not options.json:
            print(costs.text(made), flush=True)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "interval": options.interval, "costs": lines}))
    if options.plot:
        plot(lines, options.plot)
    return 0


def settings(options: argparse.Namespace) -> list[Setting]:
    """Every combination; the streams vary first, so that a curve's points are measured one after the other."""
    servers = itertools.product(options.workers, options.num_serve_frontends, options.stream_interval)
    return [Setting(streams, *server) for server in servers for streams in options.concurrency]


def lag(options: argparse.Namespace) -> int:
    """``--step_lag``: a server for each combination."""
    request, results = http_request("/v1/chat/completions", REQUEST), []
    for setting in settings(options):
        streams = setting.concurrency
        engine = {"step_interval": options.interval, "batch_size": max(streams, 256)}
        engine |= options.ids
        with Stack.replay(options.tokenizer, engine, *setting.flags()) as stack:
            results.append(step_lag.measure(stack, streams, request, options.interval, options.seconds))
        if not options.json:
            print(step_lag.text(results[-1]), flush=True)
    if options.json:
        print(json.dumps(results))
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Checked options. SystemExit with code 2, and a message that names the flag, when they make no sense."""
    parser = argparse.ArgumentParser(prog="bench_frontend.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--concurrency", type=_numbers(1), help="streams at once (256)")
    add("--sweep", action="store_true", help=f"--concurrency {','.join(map(str, SWEEP))}")
    add("--workers", type=_numbers(0), default=(1,), help="post-processing workers (1)")
    add("--num_serve_frontends", type=_numbers(1), default=(1,), help="front end processes (1)")
    add("--stream_interval", type=_numbers(1), default=(1,), help="tokens per event (1)")
    add("--modes", type=_modes, default=MODES, help=f"of {','.join(MODES)} (all)")
    add("--seconds", type=float, default=8.0, help="of each measurement (%(default)s)")
    add("--interval", type=float, help="seconds between two steps when paced (0.02; with --step_lag 0.01)")
    add("--event_bytes", type=int, default=240, help="of the floor's events (%(default)s)")
    add("--no_floor", action="store_true", help="do not measure the floors")
    add("--tokenizer", type=Path, help="a tokenizer's directory or file (the embedded model's)")
    add("--step_lag", action="store_true", help="what the executor adds to an engine step, instead")
    add("--json", action="store_true", help="one JSON value")
    add("--plot", type=Path, help="draw cost against concurrency (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.sweep and options.concurrency:
        parser.error("argument --sweep: not with --concurrency")
    if options.step_lag and options.plot:
        parser.error("argument --plot: not with --step_lag")
    options.concurrency = SWEEP if options.sweep else options.concurrency or (256,)
    options.interval = options.interval or (0.01 if options.step_lag else 0.02)
    return options


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    def parsed(text: str) -> tuple[int, ...]:
        values = tuple(int(word) for word in text.split(","))
        if min(values) < least:
            raise argparse.ArgumentTypeError(f"{min(values)} is not at least {least}")
        return values

    parsed.__name__ = "list of numbers"  # what argparse calls a value that is none
    return parsed


def _modes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := {*names} - {*MODES}:
        raise argparse.ArgumentTypeError(f"no such mode: {', '.join(sorted(unknown))}")
    return names


def embedded_tokenizer() -> Path:
    """The embedded model's directory, converted if need be."""
    from executor.models import resolve_model

    return resolve_model(None, progress=lambda text: print(text, file=sys.stderr)).directory


def ids_of_text(tokenizer: Path) -> dict[str, Any]:
    """What streams are made of, for the engine's config: the first ids, each as often as any other, without those that
    have no text of their own (special ones, parts of characters): these make no event.

    A hundred thousand tokens of English have five thousand different ids. Drawn from a whole vocabulary, ids come up
    that no text has, and each for the first time: that would be measured instead.
    """
    from postproc_workers.vocabulary import Vocabulary

    texts = Vocabulary.load(str(tokenizer)).detokenizer(skip_special_tokens=True).strings
    return {"synthetic_ids": IDS, "special_token_ids": [id for id, text in enumerate(texts[:IDS]) if not text]}


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Cost and floor against concurrency, a curve for every combination of the rest."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, points in costs.curves(lines).items():
        streams = [line["concurrency"] for line in points]
        (drawn,) = axes.plot(streams, [line["total"] for line in points], marker="o", label=name)
        if all("floor" in line for line in points):
            axes.plot(streams, [line["floor"] for line in points], "--", color=drawn.get_color(), alpha=0.6)
    axes.set(xscale="log", xlabel="streams", ylabel="CPU µs per token (dashed: floor)", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
