#!/usr/bin/env python3
"""Hurts a real server in every way we know, with a crowd of clients, and says what they noticed. They must not notice.

A server on the replay engine gets hundreds of mixed clients: chat, completions, responses, reasoning and tool calls,
streams and documents, several choices, stop strings, log-probabilities. Meanwhile workers and executor are killed or
stopped, clients leave, read slowly or not at all, nonsense comes to every route and every socket, and floods go beyond
the server's limits. Each answer is compared with the one that the same server gave before it was disturbed; where a
chunk ends may differ, nothing else. At the end nothing may be left: no open request, descriptor, file, process.

One round is played for each format (Qwen3 with hermes calls; harmony), on a server of its own. Progress goes to stderr.
Exit code 0: all is as it should be. 1: it is not. 2: wrong usage.

The seed decides who is hurt when, what the model says and what each client asks for, one after the other. It does not
decide the timing: which bytes were on their way when a process died differs from run to run, so a failure may need
several runs to come again.

    scripts/chaos.py --seconds 120 --seed 1 [--clients 200] [--workers 3] [--out DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.process.chaos.options import FORMATS, Options
from tests.process.chaos.report import summary, text
from tests.process.chaos.round import Round, play
from tests.process.chaos.tally import Findings


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _options() -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add, default = parser.add_argument, Options()
    add("--seconds", type=_seconds, default=default.seconds, help="of disturbance, over all formats (%(default)s)")
    add("--seed", type=int, default=default.seed, help="decides all but the timing (%(default)s)")
    add("--clients", type=_positive, default=default.clients, help="at once (%(default)s)")
    add("--workers", type=_positive, default=default.workers, help="post-processing workers (%(default)s)")
    for name, what in (("worker_kill", "killed worker"), ("worker_stop", "stopped worker"),
                       ("executor_kill", "killed executor"), ("flood", "flood")):  # fmt: skip
        value = getattr(default, f"{name}_interval")
        add(f"--{name}_interval", type=_seconds, default=value, help=f"seconds from one {what} to the next; 0: never "
            "(%(default)s)")  # fmt: skip
    add("--longest", type=_seconds, default=default.longest, help="seconds of the longest stream (%(default)s)")
    add("--format", action="append", choices=FORMATS, help="may be given several times (all)")
    add("--out", type=Path, help="where failures are written (a new folder, if there are any)")
    add("--json", action="store_true", help="one JSON object instead of the table")
    given = vars(parser.parse_args())
    formats, as_json = given.pop("format") or FORMATS, given.pop("json")
    return Options(**given, formats=tuple(formats)), as_json


async def _run(options: Options) -> tuple[list[Round], list[Findings]]:
    rounds, found = [], []
    for kind in options.formats:
        out = options.out / kind if options.out is not None else None
        found.append(Findings(out))
        rounds.append(await play(options, found[-1], kind, options.seconds / len(options.formats), _say))
    return rounds, found


def main() -> int:
    """Play and report."""
    options, as_json = _options()
    try:
        rounds, found = uvloop.run(_run(options))
    except AssertionError as error:
        _say(f"chaos: the server cannot be disturbed: {error}")
        return 1
    figures = summary(options, rounds)
    print(json.dumps(figures, ensure_ascii=False) if as_json else text(figures))
    for findings in found:
        if findings.folder is not None and findings.folder.exists():
            _say(f"failures are in {findings.folder}")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
