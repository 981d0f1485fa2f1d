"""What a front end does about what it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.messages import GenerationRequest, Message, Resubmit, Synced, WorkerJoined, WorkerLost
from executor.proxy import GenerationExecutor
from executor.request import SamplingParams
from serve.gateway import ServerState
from serve.roster import Follower, RemotePool, Roster
from tests.helpers import Client

FULL = Roster(
    executor=3, workers={1: "ipc://a", 12: "ipc://b"}, culprits={0: 77}, restarting="restarting its executor",
    ending=None, executor_restarts=2, worker_restarts=5, paused_workers=1, hurry=True,
)  # fmt: skip


def test_a_line_says_it_all() -> None:
    line = FULL.encode()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert Roster.decode(line) == FULL and Roster.decode(Roster().encode()) == Roster()


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"workers": {}}', '{"workers": {}, "culprits": {}, "other": 1}'])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Roster.decode(line)


class Setting:
    """A front end whose messages to the executor are kept."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.proxy, self.state, self.pool = GenerationExecutor(4), ServerState(), RemotePool()
        self.proxy.connect_in_process(self.sent.append)
        self.follower = Follower(self.proxy, self.state, self.pool, "ipc:///tmp/nobody")
        self.proxy.executor_lost()  # as it is before it has been told of any

    def follow(self, roster: Roster) -> list[Message]:
        """What it sends because of a roster."""
        before = len(self.sent)
        self.follower.follow(roster)
        return self.sent[before:]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    # Without sockets: whoever joins is there.
    joined = GenerationExecutor.executor_joined
    monkeypatch.setattr(GenerationExecutor, "executor_joined", lambda self, address: joined(self))
    return Setting()


def test_it_does_what_has_changed_and_no_more(setting: Setting) -> None:
    a, b = "ipc://a", "ipc://b"
    assert setting.follow(Roster(workers={1: a})) == []  # no executor to tell
    assert setting.follow(Roster(1, {1: a})) == [WorkerJoined(1, a, 4), Synced(4)]
    assert setting.follow(Roster(1, {1: a})) == []
    assert setting.follow(Roster(1, {1: a, 2: b})) == [WorkerJoined(2, b, 4)]
    assert setting.follow(Roster(1, {3: a}, {1: 99})) == [
        WorkerLost(1, {}, 99, 4), WorkerLost(2, {}, -1, 4), WorkerJoined(3, a, 4),
    ]  # fmt: skip
    assert setting.follow(replace(FULL, executor=1, workers={3: a})) == []
    state, pool = setting.state, setting.pool
    assert (state.unready, state.executor_restarts) == ("restarting its executor", 2)
    assert (list(pool.alive), pool.restarts, pool.paused) == ([3], 5, 1)


def test_a_missed_executor_is_noticed(setting: Setting) -> None:
    """It died and another one came, between two rosters."""
    request = GenerationRequest(5, [[1]], SamplingParams(), b"spec")
    setting.follow(Roster(1))
    setting.proxy.open(request, Client())
    (resubmitted, synced) = setting.follow(Roster(2))
    assert isinstance(resubmitted, Resubmit) and resubmitted.request.frontend == 4 and synced == Synced(4)


def test_the_end_is_told_to_all(setting: Setting) -> None:
    client = Client()
    setting.follow(Roster(1))
    setting.proxy.open(GenerationRequest(5, [[1]], SamplingParams(), b"spec"), client)
    setting.follow(Roster(1, ending="the executor is gone"))
    assert (client.ended, client.error) == (True, "the executor is gone")
    assert setting.state.unready == "ending: the executor is gone"
