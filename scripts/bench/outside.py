"""CPU time of a server, and how much of it was the model's: what is left is the cost of serving.

Where the line runs, by kind of server. It is drawn in the peer's favour: whatever shares a thread with the model counts
as model.

tailrace
    The model's is the executor's process without what its loop says it spent on shipping
    (``tailrace_executor_shipping_seconds_total``). Outside: front ends, workers, that shipping.
transformers
    ``transformers serve`` is one process, whose main thread runs the event loop: HTTP, chat template, tokenizing, ids
    into text, JSON. All other threads are taken to be the model: the generation thread of its continuous batching,
    with its scheduler and its hand-over of the tokens, torch's threads, and pools. The kernel's names do not tell
    threads apart here (before Python 3.14 a thread has the name of its maker), but the main thread's id is the
    process's.
vllm
    The processes that call themselves ``VLLM::EngineCore`` and ``VLLM::Worker``, with scheduler and serialization.
other
    Not known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from scripts.bench import exposition
from scripts.bench.cpu import Process, ProcessTable

KINDS = ("tailrace", "transformers", "vllm", "other")
_EXECUTOR = "executor.process"
_MODEL_TITLES = ("VLLM::EngineCore", "VLLM::Worker")


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds of a server up to a moment. outside: what is not the model's; None if that is not known."""

    total: float
    outside: float | None

    def since(self, before: Reading) -> Reading:
        """What was used from one reading to this one."""
        outside = None if self.outside is None or before.outside is None else self.outside - before.outside
        return Reading(self.total - before.total, outside)


class Meter:
    """Reads one server. url: of its HTTP side. roots: its first processes. Raises ValueError for an unknown kind."""

    def __init__(self, kind: str, url: str, roots: Iterable[int], table: ProcessTable | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
        self.kind = kind
        self._url, self._roots = url, tuple(roots)
        self._table = table or ProcessTable()

    def begin(self) -> Reading:
        """Before the work. Asking for a report costs the server something, so that comes before its time is read."""
        shipping = self._shipping()
        return self._read(lambda: shipping)

    def end(self) -> Reading:
        """After it, for the same reason the other way round."""
        return self._read(self._shipping)

    def _read(self, shipping: Callable[[], float]) -> Reading:
        processes = self._table.tree(self._roots).values()
        used = {process.pid: self._table.exact(process) for process in processes}
        outside = self._outside(processes, used)
        return Reading(sum(used.values()), None if outside is None else outside + shipping())

    def _shipping(self) -> float:
        return exposition.fresh(self._url)[exposition.SHIPPING] if self.kind == "tailrace" else 0.0

    def _outside(self, processes: Collection[Process], used: Mapping[int, float]) -> float | None:
        """Without shipping, which is for ours alone to say."""
        if self.kind == "transformers":
            return sum(self._main(p.pid) if p.pid in self._roots else used[p.pid] for p in processes)
        titles = {"tailrace": (_EXECUTOR,), "vllm": _MODEL_TITLES}.get(self.kind, ())
        model = {process.pid for process in processes if process.name.startswith(titles)}
        return sum(seconds for pid, seconds in used.items() if pid not in model) if model else None

    def _main(self, pid: int) -> float:
        main = self._table.threads(pid).get(pid)
        return main.cpu_seconds if main is not None else 0.0


def kind_of(processes: Iterable[Process]) -> str:
    """What kind of server these processes are, by their names."""
    names = [process.name for process in processes]
    if _EXECUTOR in names:
        return "tailrace"
    if any(name.startswith("VLLM::") or name == "vllm" for name in names):
        return "vllm"
    return "transformers" if "transformers" in names else "other"
