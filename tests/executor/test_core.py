"""The executor without sockets: what each message does to the engine and to the workers."""

from __future__ import annotations

import pytest

from executor.core import RETRY, ExecutorCore
from executor.engines.base import StepRow
from executor.engines.replay_engine import ReplayEngine
from executor.messages import (
    Abort,
    Cancel,
    Message,
    Rejected,
    Release,
    Status,
    StepRecords,
    WireError,
    WorkerJoined,
    WorkerLost,
)
from executor.request import GenerationRequest, SamplingParams
from executor.waiting import WaitingRequests
from executor.wire import decode, encode
from tests.executor.test_wire import SAMPLES
from tests.helpers import ScriptedEngine

JOINED = WorkerJoined(0, "inproc://worker-0")


def request(rid: int, prompts: int = 1, n: int = 1, **sampling: int) -> GenerationRequest:
    return GenerationRequest(rid, [[p + 1] for p in range(prompts)], SamplingParams(**sampling), b"spec", n)


def core_with(engine: ScriptedEngine, *messages: Message) -> ExecutorCore:
    core = ExecutorCore(engine)
    for message in messages:
        core.receive(message)
    core.dispatcher.validate()
    return core


def rows(core: ExecutorCore) -> list[tuple[int, int, list[int], str | None]]:
    """What a step sends, as (rid, index, ids, finish reason)."""
    made = [row for _, steps in core.step(0) for row in steps.rows()]
    core.dispatcher.validate()
    return [(rid, index, list(ids), finish and finish.reason) for rid, index, ids, finish, _ in made]


def test_a_request_becomes_outputs_and_rows() -> None:
    engine = ScriptedEngine()
    core = core_with(engine, JOINED, request(7, prompts=2, n=2))
    assert engine.added == [(7, 0), (7, 1), (7, 2), (7, 3)]
    engine.give(StepRow(7, 0, [5]), StepRow(7, 3, [6, 8], "length"))
    assert rows(core) == [(7, 0, [5], None), (7, 3, [6, 8], "length")]
    assert core.stats()["tokens"] == 3 and core.stats()["steps"] == 1 and core.stats()["open"] == 1


def test_what_the_engine_takes_by_the_wall() -> None:
    """Told of a step that made something; a turn of the loop without rows is no step."""
    times = iter((10.0, 10.25, 11.0, 12.0))
    engine = ScriptedEngine()
    core = ExecutorCore(engine, wall=lambda: next(times))
    for message in (JOINED, request(7)):
        core.receive(message)
    assert core.collecting is None
    engine.give(StepRow(7, 0, [5]))
    rows(core)
    assert core.collecting == 0.25
    rows(core)
    assert core.collecting is None


def test_prompts_go_with_their_outputs() -> None:
    class Remembering(ScriptedEngine):
        prompts: list[tuple[int, list[int]]] = []

        def add(self, rid: int, index: int, prompt_ids: object, sampling: SamplingParams, history: object = ()) -> None:
            self.prompts.append((index, list(prompt_ids)))  # type: ignore[call-overload]

    engine = Remembering()
    core_with(engine, JOINED, request(7, prompts=2, n=2))
    assert engine.prompts == [(0, [1]), (1, [1]), (2, [2]), (3, [2])]


def test_an_abort_ends_the_outputs_that_are_open_once() -> None:
    engine = ScriptedEngine()
    core = core_with(engine, JOINED, request(1, n=3))
    engine.give(StepRow(1, 1, [5], "stop"))
    rows(core)
    core.receive(Abort(1))
    core.receive(Abort(1))
    core.receive(Abort(99))
    assert rows(core) == [(1, 0, [], "abort"), (1, 2, [], "abort")]
    assert engine.cancelled == [(1, 0), (1, 2)]
    assert core.dispatcher.open_requests == 1  # until the front end has everything
    core.receive(Release(1))
    assert core.dispatcher.open_requests == 0 and len(engine.cancelled) == 2


def test_rows_behind_an_end_are_counted_and_dropped() -> None:
    engine = ScriptedEngine()
    core = core_with(engine, JOINED, request(1))
    core.receive(Cancel(0, [(1, 0), (1, 0), (1, 5), (99, 0), (99, -1)]))
    assert engine.cancelled == [(1, 0)]
    engine.give(StepRow(1, 0, [5]), StepRow(42, 0, [5]))
    assert rows(core) == [] and core.stats()["late_rows"] == 2


def test_a_cancel_of_the_whole_request() -> None:
    engine = ScriptedEngine()
    core = core_with(engine, JOINED, request(1, n=2), Cancel(0, [(1, -1)]))
    assert engine.cancelled == [(1, 0), (1, 1)] and core.dispatcher.open_requests == 1


@pytest.mark.parametrize("n", [1, 3])
def test_what_the_engine_does_not_honour_ends_the_request(n: int) -> None:
    class RefusesTheSecond(ScriptedEngine):
        def add(self, rid: int, index: int, prompt_ids: object, sampling: SamplingParams, history: object = ()) -> None:
            self._refuse = frozenset({"top_k"} if index == n - 1 else ())
            super().add(rid, index, [1], sampling)

    engine = RefusesTheSecond()
    core = core_with(engine, JOINED, request(1, n=n, top_k=5), request(2, n=n))
    messages = [steps for _, steps in core.step(0)]
    ends = [(row[0], row[1], row[3]) for row in messages[0].rows()]
    assert [(rid, index) for rid, index, _ in ends] == [(1, i) for i in range(n)]
    assert all(
        finish is not None and (finish.reason, finish.message) == ("error", "top_k: not honoured")
        for _, _, finish in ends
    )
    assert engine.cancelled == [(1, i) for i in range(n)]
    assert engine.added == [(1, i) for i in range(n - 1)] + [(2, i) for i in range(n)]


def test_what_comes_before_the_first_step_has_waited_for_nothing() -> None:
    """The clock began with the machine, long before this executor."""
    uptime = 10_000_000_000_000
    core = ExecutorCore(ScriptedEngine(), WaitingRequests(timeout=600.0))
    core.tick(uptime)
    core.receive(JOINED)
    core.receive(request(1))
    core.step(uptime + 599_000_000_000)
    assert core.answers == []
    core.step(uptime + 600_000_000_000)
    assert [rejected for _, rejected in core.answers] == [Rejected(1, "timeout")]


def test_a_rid_that_is_open_already_is_dropped() -> None:
    engine = ScriptedEngine()
    core = core_with(engine, JOINED, request(1), request(1))
    assert engine.added == [(1, 0)]
    assert [len(steps.opens) for _, steps in core.step(0)] == [1]


def test_messages_for_others_are_dropped() -> None:
    core = core_with(ScriptedEngine(), Status({}), StepRecords([], [], [], []))
    assert core.step(0) == []


def test_an_engine_is_stopped_and_asked_when_it_wants() -> None:
    engine = ScriptedEngine()
    core = core_with(engine)
    assert core.start(lambda: None).name == "scripted" and core.poll_timeout() is None
    engine.give()
    assert core.poll_timeout() == 0.0 and core.step(0) == [] and core.stats()["steps"] == 0
    core.close()
    assert engine.closed == 1


def test_busy_workers_do_not_hold_up_the_engine() -> None:
    engine = ScriptedEngine()
    core = core_with(engine, JOINED, WorkerJoined(1, "inproc://worker-1"), request(1), request(2))
    engine.give(StepRow(1, 0, [5]), StepRow(2, 0, [6]))
    engine.give(StepRow(1, 0, [7]), StepRow(2, 0, [8]))
    assert [worker for worker, _ in core.step(0, {0})] == [1]
    assert {worker: list(steps.tokens) for worker, steps in core.step(0)} == {0: [5, 7], 1: [8]}


def test_no_message_that_can_be_decoded_breaks_the_executor() -> None:
    core = ExecutorCore(ReplayEngine())
    for name in SAMPLES:
        frame = encode(SAMPLES[name])
        for place in range(len(frame)):
            for flip in (0x01, 0x10, 0x80, 0xFF):
                try:
                    message = decode(frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :])
                except WireError:
                    continue
                core.receive(message)
                for _, steps in core.step(0):
                    encode(steps)
                core.dispatcher.validate()


def test_a_history_that_does_not_fit_one_message_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.batch.MAX_HISTORY", 1)
    engine = ScriptedEngine()
    core = core_with(engine, request(1), request(2))
    engine.give(StepRow(1, 0, [5]), StepRow(2, 0, [6, 7]))
    assert core.poll_timeout() == 0.0 and rows(core) == []
    core.receive(JOINED)
    assert core.poll_timeout() == RETRY and rows(core) == [(1, 0, [5], None)]
    assert core.poll_timeout() == RETRY and rows(core) == [(2, 0, [6, 7], None)]
    assert core.poll_timeout() is None


def test_a_lost_worker_that_never_was() -> None:
    core = core_with(ScriptedEngine(), WorkerLost(3, {}), request(1), WorkerLost(3, {1: [(0, False)]}))
    assert core.stats()["parked"] == 1 and core.stats()["resumed"] == 0
