"""Requests that wait for their first token: how many may, how long, and what they are told."""

from __future__ import annotations

from executor.core import ExecutorCore
from executor.engines.base import StepRow
from executor.messages import Abort, Rejected, Release, WorkerJoined
from executor.request import GenerationRequest, SamplingParams
from executor.rids import Rids
from executor.waiting import WaitingRequests
from tests.helpers import CHAT, ScriptedEngine, System, request_of, spec_of

SECOND = 1_000_000_000


def request(rid: int, *sizes: int, frontend: int = 0) -> GenerationRequest:
    return GenerationRequest(rid, [[1] * size for size in sizes], SamplingParams(), b"", 1, frontend)


def test_tokens_that_wait_are_bounded() -> None:
    waiting = WaitingRequests(max_tokens=10)
    assert waiting.admit(request(1, 4, 2), 0) and waiting.admit(request(2, 4), 0)
    assert not waiting.admit(request(3, 1), 0)
    assert (len(waiting), waiting.tokens, waiting.refused) == (2, 10, {"queue": 1, "timeout": 0})
    waiting.leave(1)
    waiting.leave(1)
    assert waiting.admit(request(3, 6), 0) and waiting.tokens == 10


def test_an_empty_queue_takes_any_prompt() -> None:
    waiting = WaitingRequests(max_tokens=10)
    assert waiting.admit(request(1, 11), 0)
    assert not waiting.admit(request(2, 1), 0)
    waiting.leave(1)
    assert waiting.admit(request(2, 12), 0)


def test_who_waits_too_long_leaves() -> None:
    waiting = WaitingRequests(timeout=2.0)
    for rid in range(3):
        waiting.admit(request(rid, 5), rid * SECOND)
    assert waiting.expired(2 * SECOND - 1) == []
    assert waiting.expired(3 * SECOND) == [0, 1]
    assert (len(waiting), waiting.tokens, waiting.refused["timeout"]) == (1, 5, 2)


def test_a_column_leaves_once() -> None:
    waiting, rids = WaitingRequests(), Rids((1, 3))
    for rid in (1, 2, 3):
        waiting.admit(request(rid, 5), 0)
    waiting.leave_all(rids)
    assert (len(waiting), waiting.tokens) == (1, 5)
    waiting.leave_all(rids)
    waiting.leave_all(Rids((1, 2, 3)))
    assert (len(waiting), waiting.tokens) == (0, 0)


def test_without_a_timeout_nobody_leaves() -> None:
    waiting = WaitingRequests()
    waiting.admit(request(1, 5), 0)
    assert waiting.expired(10**18) == []


# ------------------------------------------------------------------------------------------------------ in the executor


def core_of(waiting: WaitingRequests) -> tuple[ExecutorCore, ScriptedEngine]:
    engine = ScriptedEngine()
    core = ExecutorCore(engine, waiting)
    core.receive(WorkerJoined(0, "inproc://worker-0"))
    return core, engine


def test_a_request_for_which_there_is_no_room_is_not_taken() -> None:
    core, engine = core_of(WaitingRequests(max_tokens=3))
    core.receive(request(1, 3))
    core.receive(request(2, 1, frontend=1))
    assert core.answers == [(1, Rejected(2, "queue"))] and engine.added == [(1, 0)]
    assert core.dispatcher.open_requests == 1 and core.stats()["refused_queue"] == 1
    core.receive(Release(2))
    engine.give(StepRow(1, 0, [5]))
    core.step(0)
    core.receive(request(3, 3))
    assert engine.added == [(1, 0), (3, 0)] and core.stats()["waiting_tokens"] == 3


def test_a_request_that_waited_too_long_stops_and_is_told_once() -> None:
    core, engine = core_of(WaitingRequests(timeout=1.0))
    core.receive(request(1, 3, 3))
    core.step(SECOND // 2)
    core.step(SECOND)
    core.step(2 * SECOND)
    assert core.answers == [(0, Rejected(1, "timeout"))] and engine.cancelled == [(1, 0), (1, 1)]
    assert core.dispatcher.open_requests == 1  # its worker is told once the front end has heard
    core.receive(Release(1))
    ends = [(row[0], row[1], row[3].reason) for _, steps in core.step(3 * SECOND) for row in steps.rows() if row[3]]
    assert ends == [(1, 0, "abort"), (1, 1, "abort")] and core.dispatcher.open_requests == 0


def test_who_is_over_does_not_wait() -> None:
    core, _ = core_of(WaitingRequests(timeout=1.0))
    for rid in (1, 2):
        core.receive(request(rid, 3))
    core.receive(Abort(1))
    core.receive(Release(2))
    core.step(5 * SECOND)
    assert core.answers == [] and core.stats()["waiting"] == 0


def test_the_client_hears_of_it_before_any_byte() -> None:
    system = System()
    system.core.waiting = WaitingRequests(max_tokens=3)
    clients = [system.open(request_of(rid, spec_of(CHAT))) for rid in range(2)]
    system.turn()
    system.turn()
    assert (clients[0].status, clients[1].status) == (200, 429) and "wait" in str(clients[1].error)
    assert system.proxy.open_requests == 1 and system.workers[0].open_requests == 1
