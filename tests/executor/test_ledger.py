"""The ledger: whatever waits, a history that is asked for has every id in order."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow
from executor.history import OutputHistory
from executor.ledger import MAX_IDS, Ledger


@given(st.lists(st.tuples(st.sampled_from(("a", "ab", "bca", "c")), st.integers(0, 3)), max_size=20), st.integers(1, 9))
def test_histories_get_all_ids_in_order(entries: list[tuple[str, int]], bound: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor.ledger.MAX_IDS", bound)
        ledger = Ledger()
        outputs = {name: OutputHistory(ledger) for name in "abc"}
        columns = {names: tuple(outputs[name].settled for name in names) for names, _ in entries}
        expected: dict[str, list[int]] = {name: [] for name in outputs}
        for number, (names, kind) in enumerate(entries):
            ids = list(range(10 * number, 10 * number + len(names)))
            if kind:
                ledger.enter(columns[names], ids)
            else:  # a row, of any number of ids
                outputs[names[0]].add(StepRow(1, 0, ids))
            for name, token in zip(names if kind else names[0] * len(ids), ids):
                expected[name].append(token)
        assert {name: list(output.tokens) for name, output in outputs.items()} == expected


def test_what_waits_is_bounded() -> None:
    ledger, histories = Ledger(), (array("i"), array("i"))
    for token in range(MAX_IDS // 2 - 1):
        ledger.enter(histories, [token, token])
    assert not histories[0]
    ledger.extend(histories[0], [1, 2])
    assert len(histories[0]) == MAX_IDS // 2 + 1 and len(histories[1]) == MAX_IDS // 2 - 1
    ledger.extend(histories[1], range(5))
    assert len(histories[1]) == MAX_IDS // 2 + 4, "nothing waits: it goes in at once"
