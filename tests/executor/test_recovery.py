"""An executor dies and another takes over: clients get what they would have got, and nobody else notices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.dispatcher import Dispatcher
from executor.engines.base import StepRow
from executor.engines.replay_engine import ReplayEngine
from executor.history import OutputHistory
from executor.messages import FrontendLost, Histories, Open, Resubmit, StepRecords, WorkerLost
from executor.proxy import MAX_EXECUTORS, GenerationExecutor
from executor.recovery import Recovery
from executor.request import GenerationRequest, SamplingParams
from executor.wire import encode
from tests.executor.test_proxy import HELLO, KINDS, merged
from tests.helpers import CHAT, System, each, request_of, row, spec_of
from tests.recordings.checker import Merged

#: Streams of different lengths, three of them ended by a stop token. Request r's output i takes number r + i.
SCRIPTS = [
    {
        "token_ids": HELLO[: len(HELLO) - cut],
        "finish_reason": "length" if cut else "stop",
        "stop_token_id": None if cut else HELLO[-1],
        "logprobs": [{"logprob": -0.5, "top": [[token, -0.5]]} for token in HELLO[: len(HELLO) - cut]],
    }
    for cut in (0, 3, 1, 5, 0)
]


def endless() -> ReplayEngine:
    """Synthetic streams of ids that the tokenizer has."""
    return ReplayEngine({"vocab_size": 256})


class Scenario:
    """Some requests to a scripted engine that any other can take over from."""

    def __init__(self, kind: str, n: int, interval: int, tokens_per_step: int) -> None:
        arguments = dict(KINDS[kind])
        self.endpoint = arguments.pop("endpoint")
        asked = arguments.get("stream_options", {})
        self.options = {"include_usage": "include_usage" in asked, "continuous": "continuous_usage_stats" in asked}
        self._config = {"scripts": SCRIPTS, "rule": "rid", "tokens_per_step": tokens_per_step}
        self.system = System(self.engine(), workers=2, stream_interval=interval, frontends=2)
        spec = spec_of(self.endpoint, n=n, **arguments)
        self.clients = [self.system.open(request_of(rid, spec, frontend=rid % 2)) for rid in range(3)]

    def engine(self) -> ReplayEngine:
        return ReplayEngine(self._config)

    def finish(self) -> list[Merged]:
        self.system.run()
        results = [merged(client, self.endpoint, **self.options) for client in self.clients]
        for result in results:
            result.chunks = []  # where a chunk ends may differ
        return results

    def disturb(self, events: list[str]) -> None:
        """As in ``test_proxy``; die: the executor is gone; next: there is another one. Each is skipped where it cannot
        happen."""
        system, alive, on_their_way = self.system, True, list[tuple[int, bytes]]()
        for event in events:
            worker = min(system.workers)
            if event in ("turn", "late"):
                system.deliver(on_their_way)
                on_their_way.clear()
            if event == "die" and alive:
                system.kill_executor()
                alive = False
            elif event == "next" and not alive:
                system.new_executor(self.engine())
                alive = True
            elif event == "executor" and alive:
                system.executor()
            elif event == "deaf" and alive:
                system.executor(deaf={1})
            elif event == "hear":
                system.hear()
            elif event == "turn":
                if alive:
                    system.executor()
                system.turn_workers()
            elif event == "keep":
                on_their_way += system.work(worker)
            elif event in ("kill", "lose", "half"):
                if event == "lose":
                    system.work(worker)
                system.add_worker()
                system.kill(worker, unaware={1} if event == "half" else ())
        system.deliver(on_their_way)
        system.hear()
        if not alive:
            system.new_executor(self.engine())


EVENTS = (
    "turn", "turn", "executor", "deaf", "keep", "late", "kill", "half", "hear", "lose", "die", "die", "next", "next",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_executor_costs_its_clients_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors and workers die in any order, with messages on their way: the merged responses are those of an
    undisturbed run, and nothing is left anywhere."""
    monkeypatch.setattr("executor.proxy.MAX_EXECUTORS", 1000)
    monkeypatch.setattr("executor.core.Dispatcher", partial(Dispatcher, 1000))

    @given(
        n=st.integers(1, 3),
        interval=st.sampled_from((1, 1, 3)),
        tokens_per_step=st.sampled_from((1, 1, 4)),
        events=st.lists(st.sampled_from(EVENTS), max_size=40),
    )
    def check(n: int, interval: int, tokens_per_step: int, events: list[str]) -> None:
        undisturbed = Scenario(kind, n, interval, tokens_per_step).finish()
        scenario = Scenario(kind, n, interval, tokens_per_step)
        scenario.disturb(events)
        assert scenario.finish() == undisturbed
        system = scenario.system
        assert sum(proxy.open_requests for proxy in system.proxies) == system.core.dispatcher.open_requests == 0
        assert all(worker.open_requests == 0 for worker in system.workers.values())

    check()


def test_an_output_goes_on_behind_what_its_worker_has() -> None:
    """The worker keeps its stream, and the engine generates only what is missing."""
    system = System(ReplayEngine({"scripts": SCRIPTS, "rule": "rid"}), workers=1)
    client = system.open(request_of(0, spec_of(CHAT)))
    for _ in range(4):
        system.turn()
    before, stream = client.body, next(iter(system.workers[0]._streams.values()))
    system.kill_executor()
    system.turn_workers()
    system.new_executor()
    system.turn()
    assert system.scripted.resumed == {(0, 0): HELLO[:4]}
    system.scripted.give(row(HELLO[4:], "stop", rid=0, stop_token=True))
    assert next(iter(system.workers[0]._streams.values())) is stream
    system.run()
    assert client.body.startswith(before) and merged(client).choices[0].content == "Hello world, the answer is 42."
    assert system.core.stats()["adopted"] == 1 and system.core.stats()["restarted"] == 0
    assert system.workers[0].stats.opened == 1


def test_what_died_with_a_worker_is_generated_again() -> None:
    system = System(ReplayEngine({"scripts": SCRIPTS, "rule": "rid"}), workers=1)
    client = system.open(request_of(0, spec_of(CHAT)))
    for _ in range(4):
        system.turn()
    system.kill_executor()
    system.kill(0)
    system.add_worker()
    system.new_executor()
    system.turn()
    assert system.scripted.added == [(0, 0)] and system.scripted.resumed == {}
    system.scripted.give(row(HELLO, "stop", rid=0, stop_token=True))
    system.run()
    assert merged(client).choices[0].content == "Hello world, the answer is 42."
    assert system.core.stats()["restarted"] == 1


def test_an_end_that_the_client_has_comes_first_on_a_worker_that_has_begun_anew() -> None:
    """Else the last output to end would be one whose end is folded in silence, and what ends the response with it."""
    system = System()
    client = system.open(request_of(7, spec_of(CHAT, n=2)))
    system.turn()
    system.scripted.give(row(HELLO[:2], "length", rid=7), row(HELLO[:1], rid=7, index=1))
    system.turn()
    system.kill_executor()
    system.kill(0)
    system.add_worker()
    system.new_executor()
    for _ in range(3):
        system.turn()
    system.kill_executor()
    system.new_executor()  # it finds a worker that was told of the request, and has no row of it yet
    for _ in range(3):
        system.turn()
    assert (system.core.adopted, system.core.restarted) == (1, 0)
    system.scripted.give(*each(HELLO[:3], "length", rid=7, index=1))
    system.scripted.give(row(HELLO[:2], "length", rid=7))
    system.run()
    assert client.ended and not client.failed and client.body.count(b"[DONE]") == 1
    assert client.body.count(b'"finish_reason":"length"') == 2 and system.proxy.open_requests == 0


def test_what_nobody_wants_any_more_ends_on_its_worker() -> None:
    """The client left while there was no executor."""
    system = System(endless(), workers=1)
    system.open(request_of(0, spec_of(CHAT)))
    system.turn()
    system.kill_executor()
    system.proxy.discard(0)
    assert system.proxy.open_requests == 0 and system.workers[0].open_requests == 1
    system.new_executor()
    system.turn()
    system.turn()
    assert system.workers[0].open_requests == 0 and system.core.dispatcher.open_requests == 0
    assert system.scripted.added == []


def test_an_abort_in_the_meantime_is_not_forgotten() -> None:
    system = System(endless(), workers=1)
    client = system.open(request_of(0, spec_of(CHAT)))
    system.turn()
    system.kill_executor()
    system.proxy.abort(0)
    system.new_executor(endless())
    system.run()
    assert client.ended and merged(client).choices[0].finish_reason == "abort"
    assert system.proxy.open_requests == system.core.dispatcher.open_requests == 0


def test_a_request_that_came_in_the_meantime_is_served() -> None:
    system = System(ReplayEngine({"scripts": SCRIPTS, "rule": "rid"}), workers=1)
    system.kill_executor()
    client = system.open(request_of(0, spec_of(CHAT)))
    assert system.to_executor == [[]]
    system.new_executor(ReplayEngine({"scripts": SCRIPTS, "rule": "rid"}))
    system.run()
    assert merged(client).choices[0].content == "Hello world, the answer is 42."


def test_a_request_under_which_executors_die_one_after_the_other_fails() -> None:
    system = System(endless(), workers=1)
    client = system.open(request_of(0, spec_of(CHAT, stream=False)))
    for _ in range(MAX_EXECUTORS - 1):
        system.turn()
        system.kill_executor()
        assert not client.ended
        system.new_executor(endless())
    system.turn()
    system.kill_executor()
    assert client.error == "the executor died repeatedly during this request"
    assert system.proxy.open_requests == 0


def test_a_client_that_gets_on_has_no_such_request() -> None:
    system = System(endless(), workers=1)
    client = system.open(request_of(0, spec_of(CHAT)))
    for _ in range(10):
        system.turn()
        system.turn()
        system.kill_executor()
        system.new_executor(endless())
    assert not client.ended


def test_steps_of_a_dead_executor_are_dropped_and_counted() -> None:
    system = System(ReplayEngine({"scripts": SCRIPTS, "rule": "rid"}), workers=1)
    client = system.open(request_of(0, spec_of(CHAT)))
    system.turn()
    system.executor()
    system.executor()
    system.kill_executor()
    system.new_executor(ReplayEngine({"scripts": SCRIPTS, "rule": "rid"}))
    system.run()
    assert system.workers[0].stats.stale == 2
    assert merged(client).choices[0].content == "Hello world, the answer is 42."


# ------------------------------------------------------------------------------------------------------ who has spoken


def known(rid: int, outputs: int = 1, frontend: int = 0, epoch: int = 0) -> Resubmit:
    request = GenerationRequest(rid, [[1]], SamplingParams(), b"", outputs, frontend)
    return Resubmit(request, [(0, False)] * outputs, epoch)


def answer(worker: int, *rids: int, last: bool = True, rows: Any = ()) -> Histories:
    return Histories(worker, StepRecords.build(rows, [Open(rid, 0, 0, b"") for rid in rids]), last)


def test_it_is_complete_once_everybody_has_spoken() -> None:
    recovery = Recovery(2)
    recovery.worker_joined(0)
    recovery.worker_joined(1)
    recovery.synced(1)
    recovery.histories(answer(0, 5, last=False))
    recovery.histories(answer(0, 6))
    recovery.synced(0)
    assert not recovery.complete and set(recovery.held) == {5, 6}
    recovery.worker_lost(WorkerLost(1, {}))
    assert recovery.complete


def test_a_worker_that_has_answered_is_not_waited_for_again() -> None:
    recovery = Recovery(2)
    recovery.worker_joined(0, frontend=0)
    recovery.histories(answer(0))
    recovery.worker_joined(0, frontend=1)
    recovery.synced(0)
    recovery.synced(1)
    assert recovery.complete


def test_a_front_end_that_is_gone_is_not_waited_for() -> None:
    recovery = Recovery(2)
    recovery.resubmit(known(1, frontend=0))
    recovery.resubmit(known(2, frontend=1))
    recovery.forget_frontend(1)
    recovery.synced(0)
    assert recovery.complete and set(recovery.wanted) == {1}


def test_what_a_worker_said_before_it_died_is_true() -> None:
    recovery = Recovery(1)
    recovery.worker_joined(0)
    recovery.resubmit(known(1, outputs=2))
    recovery.histories(answer(0, 1, rows=[StepRow(1, 1, [7, 8]), StepRow(1, 1, [9], "stop", True)]))
    recovery.worker_lost(WorkerLost(0, {1: [(1, False), (2, False)], 99: [(0, False)]}))
    held = recovery.held[1]
    assert held.worker == 0 and list(recovery.orphans()) == []
    first, second = held.histories(2)
    assert first == OutputHistory() and list(second.tokens) == [7, 8, 9] and second.closed
    assert recovery.wanted[1].delivered == [(1, False), (2, False)]


def test_a_worker_that_nobody_asked_is_not_heard() -> None:
    recovery = Recovery(1)
    recovery.histories(answer(3, 5))
    assert recovery.held == {}


def test_orphans_are_what_workers_have_and_nobody_wants() -> None:
    recovery = Recovery(1)
    recovery.worker_joined(0)
    recovery.resubmit(known(1))
    recovery.histories(answer(0, 1, 2))
    assert [rid for rid, _ in recovery.orphans()] == [2]


def test_what_a_dead_worker_told_the_next_executor_waits_for_its_front_end() -> None:
    """The worker has answered, and dies; one front end knows, and the other one's client still gets its last words."""
    system = System(endless(), workers=2, frontends=2)
    client = system.open(request_of(1, spec_of(CHAT), SamplingParams(max_tokens=6, ignore_eos=True), frontend=1))
    system.turn()
    system.executor()
    last_words = system.work(0)
    assert last_words
    system.kill_executor()
    system.new_executor(endless())
    system.executor()
    system.work(0)
    system.kill(0, unaware={1})
    for _ in range(3):
        system.turn()
    assert system.core.dispatcher.open_requests == 1 and system.workers[1].open_requests == 0
    system.deliver(last_words)
    system.hear()
    system.run()
    undisturbed = System(endless())
    whole = undisturbed.open(request_of(1, spec_of(CHAT), SamplingParams(max_tokens=6, ignore_eos=True)))
    undisturbed.run()
    assert merged(client).choices == merged(whole).choices


def test_a_front_end_that_comes_before_the_news_of_its_predecessors_end() -> None:
    system = System(endless(), workers=1)
    system.open(request_of(1, spec_of(CHAT)))
    system.turn()
    successor = GenerationExecutor()
    system.proxies[0] = system.proxy = successor
    successor.connect_in_process(lambda message: system.to_executor[0].append(encode(message)))
    successor.worker_joined(0, "inproc://worker-0")
    successor.executor_joined()
    system.turn()
    assert system.core.dispatcher.open_requests == system.workers[0].open_requests == 0
    client = system.open(request_of(2, spec_of(CHAT), SamplingParams(max_tokens=3)))
    system.executor()
    system.core.receive(FrontendLost(0))  # the one before
    system.run()
    assert client.ended and not client.failed
    system.open(request_of(3, spec_of(CHAT)))
    system.turn()
    system.core.receive(FrontendLost(0))
    assert system.core.dispatcher.open_requests == 0


def test_a_dead_front_end_leaves_nothing() -> None:
    system = System(endless(), workers=1)
    system.open(request_of(0, spec_of(CHAT)))
    system.turn()
    system.core.receive(FrontendLost(1))
    assert system.core.dispatcher.open_requests == 1
    system.core.receive(FrontendLost(0))
    system.turn()
    assert system.core.dispatcher.open_requests == system.workers[0].open_requests == 0
    assert system.core.poll_timeout() is None
