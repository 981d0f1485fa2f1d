"""Law: a request that is over has no state anywhere, however it ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from executor.engines.replay_engine import ReplayEngine
from executor.request import SamplingParams
from postproc_workers.hook import EMIT, Terminate
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from tests.helpers import CHAT, COMPLETIONS, System, request_of, spec_of

OURS = ("executor.", "postproc_workers.", "serve.", "tests.")


def reachable(*roots: object) -> int:
    """How many objects can be reached from these through our own objects and containers, numbers in containers among
    them. What is shared by all requests and does not grow with them (the vocabulary, the engine's tables, the ids of
    dead workers) is left out."""
    seen: set[int] = set()
    numbers = 0
    todo = list(roots)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, (Vocabulary, str, bytes, int, float, type)):
            numbers += isinstance(found, (int, float))
            continue
        seen.add(id(found))
        todo.extend(_parts(found))
    return len(seen) + numbers


def _parts(found: object) -> Iterator[Any]:
    if isinstance(found, dict):
        yield from itertools.chain(found, found.values())
    elif isinstance(found, (list, tuple, set, frozenset)) or type(found).__name__ == "deque":
        yield from found  # type: ignore[misc]
    elif type(found).__module__.startswith(OURS):
        names = {*getattr(found, "__dict__", ())}
        names |= {name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())}
        yield from (getattr(found, name, None) for name in names - {"_vocabulary", "_packed", "_made_up", "_lost"})


class Hook:
    """Ends every seventh request by itself, and lets every eleventh fail."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self._number = next(self.numbers)

    def __call__(self, output: Any, text: str) -> Any:
        if self._number % 11 == 0:
            raise ValueError("a hook that fails")
        return Terminate("", "hooked") if self._number % 7 == 0 else EMIT


SPECS = [
    spec_of(CHAT),
    spec_of(CHAT, n=2, stop=["ab", "7"], stream_options={"include_usage": True}),
    spec_of(CHAT, stream=False, logprobs=True, top_logprobs=1),
    spec_of(COMPLETIONS, n=2, logprobs=1),
    spec_of(COMPLETIONS, stream=False, stop=["e"]),
]


def play(system: System, first: int, count: int) -> None:
    """Requests that end in every way: complete, by a stop, by a hook, by its failure, aborted at once or later, left by
    their client."""
    for start in range(first, first + count, 50):
        rids = range(start, start + 50)
        for rid in rids:
            system.open(request_of(rid, SPECS[rid % len(SPECS)], max_tokens(SPECS[rid % len(SPECS)], rid)))
            if rid % 13 == 0:
                system.proxy.abort(rid)
        for _ in range(3):
            system.turn()
        for rid in rids:
            if rid % 5 == 0:
                system.proxy.discard(rid)
            elif rid % 17 == 0:
                system.proxy.abort(rid)
        system.run()


def max_tokens(spec: StreamSpec, rid: int) -> SamplingParams:
    return SamplingParams(max_tokens=1 + rid % 9, logprobs=spec.logprobs)


@pytest.mark.parametrize("deaths", [False, True], ids=["undisturbed", "workers and executors die"])
def test_ten_thousand_requests_leave_nothing(deaths: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "tailrace")
    system = System(ReplayEngine({"vocab_size": 256}), workers=2, hook=Hook)
    play(system, 0, 500)
    before = reachable(system.proxy, system.core, system.workers, system.inboxes)
    rounds = 19 if deaths else 1
    for number in range(rounds):
        if deaths:
            system.kill_executor()
            if number % 3 == 0:
                system.add_worker()
                system.kill(min(system.workers))
            system.new_executor(ReplayEngine({"vocab_size": 256}))
        play(system, 500 * (number + 1), 9500 // rounds)
    system.core.dispatcher.validate()
    assert system.proxy.open_requests == system.core.dispatcher.open_requests == len(system.core.waiting) == 0
    assert all(worker.open_requests == 0 for worker in system.workers.values())
    assert reachable(system.proxy, system.core, system.workers, system.inboxes) == before
