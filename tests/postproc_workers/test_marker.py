"""Which request a worker is at: told by a file, also after the process that wrote it was killed."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from postproc_workers.marker import NOBODY, Marker


def test_nobody_at_first(tmp_path: Path) -> None:
    Marker.create(tmp_path / "marker")
    assert Marker.read(tmp_path / "marker") == NOBODY == Marker.open(tmp_path / "marker").cells[0]


@pytest.mark.parametrize("rid", [0, 1, 2**63 - 1, NOBODY, -(2**63)])
def test_what_is_stored_is_read(tmp_path: Path, rid: int) -> None:
    """Without any call behind the store, and though nobody holds more than the cells."""
    Marker.create(tmp_path / "marker")
    cells = Marker.open(tmp_path / "marker").cells
    assert len(cells) == 1
    cells[0] = rid
    assert Marker.read(tmp_path / "marker") == rid


def test_it_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    Marker.create(tmp_path / "marker")
    program = (
        "import os, sys; from postproc_workers.marker import Marker\n"
        "Marker.open(sys.argv[1]).cells[0] = 4711; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "marker"], timeout=60, check=False)
    assert done.returncode == -9 and Marker.read(tmp_path / "marker") == 4711


def test_it_is_for_our_user_alone_and_made_once(tmp_path: Path) -> None:
    Marker.create(tmp_path / "marker")
    assert stat.S_IMODE((tmp_path / "marker").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Marker.create(tmp_path / "marker")
    with pytest.raises(FileNotFoundError):
        Marker.create(tmp_path / "nothing" / "marker")


@pytest.mark.parametrize("content", [None, b"", b"1234567"])
def test_a_file_that_is_missing_or_too_short(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "marker").write_bytes(content)
    assert Marker.read(tmp_path / "marker") == NOBODY
    with pytest.raises(FileNotFoundError if content is None else ValueError):
        Marker.open(tmp_path / "marker")


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    assert Marker.read(tmp_path) == NOBODY
