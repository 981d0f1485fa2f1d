"""The result of a run, for a person and for a program, and whether all is as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.process.chaos.leaks import MAX_GROWTH
from tests.process.chaos.options import Options
from tests.process.chaos.round import Round

#: Failures that are shown; all of them are counted.
_SHOWN = 12

_LABELS = {
    "seconds": "seconds of disturbance",
    "clients": "clients at once",
    "requests": "requests",
    "completed": "answers read to the end",
    "streams": "  of them streams",
    "worker_kills": "workers killed",
    "executor_kills": "executors killed",
    "stops": "workers or executors stopped",
    "hangs_replaced": "  of them hung and replaced",
    "disconnects": "clients that left",
    "stalls": "clients that never read",
    "stalls_cut": "  of them disconnected",
    "garbage_requests": "nonsense over HTTP",
    "garbage_frames": "nonsense over sockets",
    "floods": "floods",
    "refused_429": "answers 429",
    "refused_503": "answers 503",
    "resumed": "requests resumed",
    "outage": "s without worker or executor",
    "longest_delay": "longest delay in a stream, s",
    "lost_bytes": "lost bytes",
    "repeated_bytes": "repeated bytes",
    "changed_bytes": "changed bytes",
    "differing": "answers that differ",
    "failures": "failures",
    "leaked_requests": "leaked requests",
    "leaked_descriptors": "leaked descriptors",
    "leaked_files": "leaked files",
    "leaked_processes": "leaked processes",
    "memory_growth": "memory growth, MiB",
    "tracebacks": "tracebacks in the log",
}

#: What has to be 0.
_ZERO = (
    "lost_bytes", "repeated_bytes", "changed_bytes", "differing", "failures", "leaked_requests", "leaked_descriptors",
    "leaked_files", "leaked_processes", "tracebacks",
)  # fmt: skip


def summary(options: Options, rounds: Sequence[Round]) -> dict[str, Any]:
    """All figures; ``wrong`` says in words what is not as it should be."""
    tallies = [each.tally for each in rounds]
    names = ("requests", "completed", "streams", "worker_kills", "executor_kills", "stops", "hangs_replaced",
             "disconnects", "stalls", "stalls_cut", "garbage_requests", "garbage_frames", "floods",
             "resumed")  # fmt: skip
    figures: dict[str, Any] = {"seed": options.seed, "formats": [each.kind for each in rounds]}
    figures |= {"seconds": round(sum(each.seconds for each in rounds), 1), "clients": options.clients}
    figures |= {name: sum(getattr(tally, name) for tally in tallies) for name in names}
    figures |= {f"refused_{status}": sum(tally.refused[status] for tally in tallies) for status in (429, 503)}
    figures |= {f"{name}_bytes": sum(getattr(t, name) for t in tallies) for name in ("lost", "repeated", "changed")}
    figures["differing"] = sum(tally.differing for tally in tallies)
    figures["failures"] = sum(len(tally.failures) for tally in tallies)
    figures["longest_delay"] = round(max(tally.longest_delay for tally in tallies), 2)
    figures["outage"] = round(sum(tally.outage for tally in tallies), 1)
    for name in ("requests", "descriptors", "files", "processes"):
        figures[f"leaked_{name}"] = sum(getattr(each.leaks, name) for each in rounds)
    figures["memory_growth"] = round(max(each.leaks.growth for each in rounds) / 2**20, 1)
    figures["tracebacks"] = sum(each.tracebacks for each in rounds)
    figures["exit_codes"] = [each.exit_code for each in rounds]
    figures["failure_texts"] = [text for tally in tallies for text in tally.failures]
    figures["leak_texts"] = [text for each in rounds for text in each.leaks.what]
    figures["wrong"] = _wrong(figures)
    return figures


def _wrong(figures: dict[str, Any]) -> list[str]:
    wrong = [f"{_LABELS[name].strip()}: {figures[name]}" for name in _ZERO if figures[name]]
    if figures["memory_growth"] * 2**20 > MAX_GROWTH:
        wrong.append(f"the launcher grew by {figures['memory_growth']} MiB")
    wrong += [f"exit code {code}" for code in figures["exit_codes"] if code != 0]
    if figures["floods"] and not figures["refused_429"]:
        wrong.append("no request of a flood was refused")
    if not figures["completed"]:
        wrong.append("no answer was read to its end")
    return wrong


def text(figures: dict[str, Any]) -> str:
    """The figures for a person."""
    lines = [f"{label:<28} {figures[name]:>10}" for name, label in _LABELS.items()]
    for name in ("failure_texts", "leak_texts"):
        shown = figures[name][:_SHOWN]
        lines += [f"  {each[:300]}" for each in shown]
        lines += [f"  ... and {len(figures[name]) - _SHOWN} more"] if len(figures[name]) > _SHOWN else []
    lines.append("all as it should be" if not figures["wrong"] else "WRONG: " + "; ".join(figures["wrong"]))
    return "\n".join(lines)
