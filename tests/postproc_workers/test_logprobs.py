"""A step's log-probabilities read as the entries that they are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor.result import Logprob
from postproc_workers.logprobs import StepLogprobs

FLOATS = st.floats(allow_nan=False)
TOP = st.lists(st.tuples(st.integers(0, 9), FLOATS), max_size=2).map(tuple)
ENTRIES = st.lists(st.builds(Logprob, st.integers(0, 2**31 - 1), FLOATS, TOP, st.text(max_size=3)), max_size=4)


@given(ENTRIES)
def test_they_are_a_sequence_of_entries(entries: list[Logprob]) -> None:
    step = StepLogprobs.of(entries)
    assert StepLogprobs.of(step) is step
    assert list(step) == entries and len(step) == len(entries) and bool(step) == bool(entries)
    assert [step[place] for place in range(len(entries))] == entries and list(reversed(step)) == entries[::-1]
    assert list(step[1:3]) == entries[1:3]


@given(ENTRIES, ENTRIES)
def test_what_was_held_and_what_is_new_are_joined(held: list[Logprob], new: list[Logprob]) -> None:
    assert list(StepLogprobs.of(held) + new) == held + new
    assert list(StepLogprobs.of(held) + StepLogprobs.of(new)) == held + new
