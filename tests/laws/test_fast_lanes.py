"""The fast lanes of the worker do what the general path does: the same emissions, and the same history afterwards."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import CHAT, Bench, each, spec_of
from tests.laws.cases import NAMES, Case, cases, steps


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def general(bench: Bench) -> Bench:
    """The same with the lanes closed."""
    for stream in bench.worker._streams.values():
        for stage in stream.stages:
            stage.plain = stage.fast = stage.gathers = False
    return bench


def history(bench: Bench) -> list[Any]:
    """What a new executor would hear."""
    return [row._replace(token_ids=list(row.token_ids)) for s in bench.worker._streams.values() for row in s.history()]


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_the_lanes_do_what_the_general_path_does(name: str, data: st.DataObject) -> None:
    case: Case = data.draw(cases(name))
    backlogs = data.draw(steps(case))
    delivered = data.draw(st.just(()) | st.tuples(*[st.tuples(st.integers(0, 3), st.just(False))] * len(case.outputs)))
    fast, slow = case.bench(delivered=delivered), general(case.bench(delivered=delivered))
    for backlog in backlogs:
        fast.backlog(backlog)
        slow.backlog(backlog)
        assert (fast.rows, fast.cancels, history(fast)) == (slow.rows, slow.cancels, history(slow))


@given(st.integers(2, 9), st.lists(st.integers(0, 255), min_size=1, max_size=40), st.integers(0, 12))
def test_ids_that_gather_are_read_in_time(interval: int, ids: list[int], delivered: int) -> None:
    """Chunks as the general path makes them, with bad bytes, bad ids and a resume in the middle of a chunk."""
    spec = spec_of(CHAT, stream_interval=interval)
    told = [(min(delivered, len(ids)), False)]
    fast, slow = (Bench(spec, delivered=told) for _ in range(2))
    assert all(stage.gathers for stream in fast.worker._streams.values() for stage in stream.stages)
    general(slow)
    for row in each([*ids, 10**6], None):
        fast.give(row)
        slow.give(row)
        assert (fast.rows, fast.cancels, history(fast)) == (slow.rows, slow.cancels, history(slow))
    assert fast.ended
