"""What a worker gets with the next message: whatever was joined on the way, each output has its ids in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from executor import batch as batches
from executor.batch import Batch
from executor.engines.base import StepRow
from executor.messages import Open, StepRecords
from executor.rids import Rids

SAME = Rids((7, 8, 9))


def told(*steps: StepRecords) -> dict[tuple[int, int], list[int]]:
    """The ids of each output."""
    found: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        for rid, index, ids, _, _ in step.rows():
            found.setdefault((rid, index), []).extend(ids)
    return found


def test_one_step_is_handed_on_as_it_came() -> None:
    batch, ids = Batch(), [1, 2, 3]
    batch.extend(SAME, ids)
    step = batch.take(5, 2)
    assert step.rids is SAME and step.tokens is ids and step.single and (step.stamp, step.incarnation) == (5, 2)
    assert not batch


def test_steps_of_the_same_rows_become_rows_of_several_ids() -> None:
    batch = Batch()
    for number in range(3):
        batch.extend(SAME, [number, 10 + number, 20 + number])
    step = batch.take(0, 0)
    assert step.rids is SAME and list(step.counts) == [3, 3, 3] and not batch
    assert told(step) == {(7, 0): [0, 1, 2], (8, 0): [10, 11, 12], (9, 0): [20, 21, 22]}


def test_what_is_odd_comes_behind_them() -> None:
    batch = Batch()
    for number in range(2):
        batch.extend(SAME, [number, 10 + number, 20 + number])
    batch.add(StepRow(8, 0, [12, 13], "stop", True))
    batch.extend(Rids((7, 9)), [2, 22])
    step = batch.take(0, 0)
    assert told(step) == {(7, 0): [0, 1, 2], (8, 0): [10, 11, 12, 13], (9, 0): [20, 21, 22]}
    assert [(step.rids[row], finish.stop_token) for row, finish in step.finishes.items()] == [(8, True)]


def test_more_steps_than_a_message_holds_are_several(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_HISTORY", 7)
    batch = Batch()
    batch.opens.append(Open(7, 0, 0, b""))
    for number in range(5):
        batch.extend(SAME, [number, 10 + number, 20 + number])
    steps = []
    while batch:
        steps.append(batch.take(0, 0))
        assert bool(batch) == bool(batch.history), "what is left would wait for the engine"
    assert [step.counts[0] for step in steps] == [2, 2, 1] and [len(step.opens) for step in steps] == [1, 0, 0]
    assert told(*steps) == {(rid, 0): [10 * at + n for n in range(5)] for at, rid in enumerate(SAME)}


def test_what_is_odd_makes_no_message_larger(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_HISTORY", 7)
    batch, steps = Batch(), []
    for number in range(5):
        batch.extend(SAME, [number, 10 + number, 20 + number])
    batch.add(StepRow(8, 0, [15], "stop"))
    while batch:
        steps.append(batch.take(0, 0))
        assert bool(batch) == bool(batch.history) and len(steps[-1].tokens) <= 7 + 5
    assert told(*steps) == {(7, 0): [*range(5)], (8, 0): [*range(10, 16)], (9, 0): [*range(20, 25)]}


PART = st.one_of(
    st.just("same"), st.just("same"), st.just("others"), st.just("row"), st.just("long row"), st.just("take")
)


@given(st.lists(PART, max_size=12))
def test_ids_stay_in_order(parts: list[str]) -> None:
    batch, steps, next_id = Batch(), [], 0
    expected: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        if part == "take":
            steps += [batch.take(0, 0)] if batch else []
            continue
        rids = {"same": SAME, "others": Rids((9, 7)), "row": Rids((8,)), "long row": Rids((8,))}[part]
        made = [[next_id + at] for at in range(len(rids))] if part != "long row" else [[next_id, next_id + 1]]
        next_id += 3
        if part in ("same", "others"):
            batch.extend(rids, [ids[0] for ids in made])
        else:
            batch.add(StepRow(8, 0, made[0]))
        for rid, ids in zip(rids, made):
            expected.setdefault((rid, 0), []).extend(ids)
    while batch:
        steps.append(batch.take(0, 0))
    assert told(*steps) == expected
