"""A cohort: ids go where the rows of a column go, and what brings nothing new stays the same object."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from executor.batch import Batch
from executor.cohort import Cohort, Lane
from executor.ledger import Ledger
from executor.rids import Rids


def lanes_of(workers: Mapping[int, int], batches: Sequence[Batch]) -> dict[int, Lane]:
    """Lanes for rid -> worker."""
    return {rid: (batches[worker], array("i")) for rid, worker in workers.items()}


def rows(batch: Batch) -> list[tuple[int, list[int]]]:
    return [(rid, list(ids)) for rid, _, ids, _, _ in batch.take(0, 0).rows()]


def test_ids_go_to_their_workers_and_histories() -> None:
    batches, ledger = [Batch(), Batch(), Batch()], Ledger()
    lanes = lanes_of({5: 0, 6: 1, 7: 0, 8: 2}, batches)
    cohort = Cohort(Rids((5, 6, 7, 8)), lanes)
    for step in (10, 20):
        cohort.give([step, step + 1, step + 2, step + 3], ledger)
    cohort.validate(lanes)
    assert cohort.odd == {}
    assert rows(batches[0]) == [(5, [10, 20]), (7, [12, 22])]
    assert rows(batches[1]) == [(6, [11, 21])] and rows(batches[2]) == [(8, [13, 23])]
    ledger.settle()
    assert {rid: list(history) for rid, (_, history) in lanes.items()} == {
        5: [10, 20], 6: [11, 21], 7: [12, 22], 8: [13, 23],
    }  # fmt: skip


def test_those_without_a_lane_are_odd() -> None:
    batch, ledger = Batch(), Ledger()
    lanes = lanes_of({6: 0, 8: 0}, [batch])
    cohort = Cohort(Rids((5, 6, 7, 8)), lanes)
    assert cohort.odd == {5: 0, 7: 2}
    cohort.give([1, 2, 3, 4], ledger)
    cohort.validate(lanes)
    assert rows(batch) == [(6, [2]), (8, [4])]
    ledger.settle()
    assert [list(history) for _, history in lanes.values()] == [[2], [4]]
    alone = Cohort(Rids((5, 7)), lanes)
    alone.give([1, 2], ledger)
    assert alone.odd == {5: 0, 7: 1} and not batch


def test_one_worker_gets_the_columns_themselves() -> None:
    batch, rids, token_ids = Batch(), Rids((5, 6)), [1, 2]
    Cohort(rids, lanes_of({5: 0, 6: 0}, [batch])).give(token_ids, Ledger())
    steps = batch.take(0, 0)
    assert steps.rids is rids and steps.tokens is token_ids and not batch


def test_columns_are_left_alone_by_what_joins_them() -> None:
    batch, rids, ledger = Batch(), Rids((5, 6)), Ledger()
    cohort, first, second = Cohort(rids, lanes_of({5: 0, 6: 0}, [batch])), [1, 2], [3, 4]
    cohort.give(first, ledger)
    cohort.give(second, ledger)
    assert rows(batch) == [(5, [1, 3]), (6, [2, 4])]
    assert (rids, first, second) == ((5, 6), [1, 2], [3, 4])


def test_a_workers_column_stays_the_same_object() -> None:
    batches = [Batch(), Batch()]
    lanes = lanes_of({5: 0, 6: 1, 7: 0, 8: 1}, batches)
    first = Cohort(Rids((5, 6, 7, 8)), lanes)
    first.lapse()
    assert first.rids is None
    second = Cohort(Rids((5, 6, 7)), lanes, first)
    assert second.columns[batches[0]] is first.columns[batches[0]]
    assert second.columns[batches[1]] == (6,) and first.columns[batches[1]] == (6, 8)
    third = Cohort(Rids((5, 7)), lanes, second)
    assert third.columns == {batches[0]: (5, 7)} and third.columns[batches[0]] is first.columns[batches[0]]
