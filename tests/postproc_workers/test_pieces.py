"""Ids to the JSON of their texts."""

from __future__ import annotations

import json

import pytest

from postproc_workers.pieces import PieceTable
from serve.chunks import ESCAPED

#: A quote, a character in two halves, an id without text, one that nobody has.
STRINGS = ['a"b', "é", None, "", "\n"]
SIZE = 7


@pytest.fixture
def table() -> PieceTable:
    return PieceTable(STRINGS, ESCAPED, SIZE)


def test_an_id_is_filled_in_when_it_comes_up(table: PieceTable) -> None:
    assert table.pieces == [None] * SIZE
    assert [table.fill(token) for token in range(SIZE)] == [rb"a\"b", "é".encode(), None, None, rb"\n", None, None]
    assert table.pieces[0] == rb"a\"b" and table.pieces[2:4] == [None, None]


@pytest.mark.parametrize("tokens", [[0], [1, 0, 4], [4, 4, 4, 1]])
def test_several_are_the_json_of_their_text(table: PieceTable, tokens: list[int]) -> None:
    joined = table.join(tokens)
    assert joined is not None
    assert json.loads(b'"' + joined + b'"') == "".join(STRINGS[token] or "" for token in tokens)


@pytest.mark.parametrize("tokens", [[], [2], [0, 2], [0, 3], [-1], [0, SIZE], [5], [2**31 - 1]])
def test_what_is_no_complete_text(table: PieceTable, tokens: list[int]) -> None:
    assert table.join(tokens) is None
