"""The directory of sockets: private, and removed by the next server if its own could not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from serve.run_directory import RunDirectory


def test_it_is_private_and_goes(tmp_path: Path) -> None:
    made = RunDirectory.make(str(tmp_path))
    assert made.path.parent == tmp_path and stat.S_IMODE(made.path.stat().st_mode) == 0o700
    (made.path / "worker-0").touch()
    made.remove()
    made.remove()
    assert os.listdir(tmp_path) == []


def test_living_servers_keep_theirs(tmp_path: Path) -> None:
    first = RunDirectory.make(str(tmp_path))
    second = RunDirectory.make(str(tmp_path))
    assert first.path.exists()
    second.remove()
    first.remove()


def test_what_a_killed_server_has_left_goes(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom serve.run_directory import RunDirectory\n"
        "made = RunDirectory.make(sys.argv[1])\n(made.path / 'worker-0').touch()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.is_dir()
    made = RunDirectory.make(str(tmp_path))
    assert list(tmp_path.iterdir()) == [made.path]
    made.remove()


def test_what_is_not_ours_or_not_finished_stays(tmp_path: Path) -> None:
    (tmp_path / "tailrace-being-made").mkdir()
    (tmp_path / "tailrace-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "tailrace-link").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    RunDirectory.make(str(tmp_path)).remove()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    with pytest.raises(ValueError, match="set TMPDIR to a shorter one"):
        RunDirectory.make(str(deep))
    assert os.listdir(deep) == []
