"""The numbers that front ends share."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from executor.proxy import GenerationExecutor
from serve.board import FIELDS, Board


def test_everybody_sees_the_sum(tmp_path: Path) -> None:
    file = tmp_path / "board"
    launcher = Board.create(file, 3)
    boards = [Board.open(file, seat) for seat in range(3)]
    for seat, board in enumerate(boards):
        board.tell("taken", 10**seat)
        board.tell("late_rows", 2)
    assert {board.total("taken") for board in (launcher, *boards)} == {111}
    boards[1].tell("taken", 50)
    assert launcher.total("taken") == 151 and launcher.total("late_rows") == 6
    launcher.clear(1)
    assert boards[0].total("taken") == 101 and boards[0].total("late_rows") == 4
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_one_alone_needs_no_file() -> None:
    board = Board.alone()
    board.tell("open_requests", 7)
    assert [board.total(field) for field in FIELDS] == [0, 7, 0, 0]


def test_it_follows_a_proxy() -> None:
    board, proxy = Board.alone(), GenerationExecutor()
    proxy.late_rows = 4
    board.follow(proxy)
    assert [board.total(field) for field in FIELDS] == [0, 0, 4, 0]


def test_what_it_does_not_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not in"):
        Board.alone().tell("something", 1)
    with pytest.raises(FileNotFoundError):
        Board.open(tmp_path / "nothing", 0)


def test_histograms_of_each(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", 2)
    boards = [Board.open(tmp_path / "board", seat) for seat in range(2)]
    proxy = GenerationExecutor()
    proxy.chunk_lag.observe(0.3)
    boards[1].follow(proxy)
    assert boards[0].histograms("write_lag") == [proxy.write_lag.report()] * 2
    empty, one = boards[0].histograms("chunk_lag")
    assert sum(empty) == 0 and one == proxy.chunk_lag.report()
