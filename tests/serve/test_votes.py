"""Which answer most texts give, and how it is read from a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest

from serve.votes import EXTRACTORS, count_votes, elect, is_certain


@pytest.mark.parametrize(
    ("answers", "place"),
    [
        (["4", "5", "5"], 1),
        (["4", "5", "5", "4"], 0),
        ([None, "5", "4", "5"], 1),
        ([None, None], 0),
        ([None, "", "", "5"], 1),
        ([("a", 1), ("b", 1), ("b", 1)], 1),
    ],
)
def test_the_first_voter_of_the_answer_with_the_most_votes(answers: list[Hashable | None], place: int) -> None:
    assert elect(answers) == place
    assert count_votes(answers).total() == len([answer for answer in answers if answer is not None])


@pytest.mark.parametrize(
    ("votes", "running", "certain"),
    [
        ({}, 3, False),
        ({"a": 2}, 1, True),
        ({"a": 2}, 2, False),
        ({"a": 3, "b": 1}, 1, True),
        ({"a": 2, "b": 2}, 0, False),
    ],
)
def test_certainty(votes: dict[str, int], running: int, certain: bool) -> None:
    assert is_certain(Counter(votes), running) is certain


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("text", " 7 apples\n", "7 apples"),
        ("text", "", ""),
        ("last_line", "So:\n\n 7 apples \n \n", "7 apples"),
        ("last_line", " \n", None),
        ("last_number", "3 + 4 = 7.", "7"),
        ("last_number", "It costs $1,234,567.50, no less", "1234567.50"),
        ("last_number", "1,2,3", "3"),
        ("last_number", "1234,567", "567"),
        ("last_number", "minus three is -3", "-3"),
        ("last_number", "10-3", "3"),
        ("last_number", "the 7th of H2O", "7"),
        ("last_number", "none at all", None),
    ],
)
def test_answers_in_texts(name: str, text: str, answer: str | None) -> None:
    assert EXTRACTORS[name](text) == answer
