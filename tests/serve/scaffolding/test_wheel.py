"""What users install has the package in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import serve.scaffolding
from serve.scaffolding import *
print(serve.scaffolding.__file__)
print(streaming_generate_helper.__module__, AsyncGeneration.__module__)
import serve.scaffolding.local
"""


def test_a_wheel_has_it_and_it_can_be_imported_from_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("executor", "postproc_workers", "serve"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("tailrace-*.whl")
    command = [sys.executable, "-I", "-c", PROGRAM, str(wheel)]
    imported = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert imported.returncode == 0, imported.stderr
    where, modules = imported.stdout.splitlines()
    assert where == f"{wheel}/serve/scaffolding/__init__.py"
    assert modules == "serve.scaffolding.streaming serve.scaffolding.async_generation"
