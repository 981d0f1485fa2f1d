"""The import contracts of setup.cfg hold, and they bite: each is broken on purpose in a copy of the sources."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("executor", "postproc_workers", "serve")
#: A module whose docstring says `Pure.`, `Pure:` or `; pure.` promises what the contract `pure` checks.
CLAIM = re.compile(r"(?:^|[.;,] )pure[.:]", re.IGNORECASE | re.MULTILINE)

#: (file, line that breaks a contract, contract)
BREACHES = [
    ("executor/request.py", "import serve.chunks", "serve uses postproc_workers uses executor"),
    ("executor/engines/base.py", "import postproc_workers.spec", "serve uses postproc_workers uses executor"),
    ("postproc_workers/worker.py", "import serve.errors", "serve uses postproc_workers uses executor"),
    ("executor/dispatcher.py", "import random", "Pure files know no socket, clock, thread or chance"),
    ("postproc_workers/stop_strings.py", "import threading", "Pure files know no socket, clock, thread or chance"),
    ("postproc_workers/hook.py", "import executor.channel", "Pure files know no socket, clock, thread or chance"),
    ("serve/admission.py", "import time", "Pure files know no socket, clock, thread or chance"),
    (
        "serve/postprocess_handlers.py",
        "from asyncio import Event",
        "Pure files know no socket, clock, thread or chance",
    ),
    ("serve/streams.py", "import msgpack", "The wire and the spec alone know MessagePack"),
    ("serve/app.py", "import zmq", "Sockets are opened in the shells alone"),
    ("executor/wire.py", "import pickle", "Nothing that crosses a process is pickled"),
    ("postproc_workers/spec.py", "import pydantic", "HTTP and request bodies end in serve"),
    ("postproc_workers/shell.py", "import torch", "Workers and the front end do without torch"),
]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache"], cwd=root, capture_output=True, text=True, timeout=100)


def broken(report: str) -> list[str]:
    """Names of the contracts that a report calls broken."""
    return re.findall(r"^(.+) BROKEN\b", report, re.MULTILINE)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and their contracts, to be changed at will."""
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("file", "line", "contract"), BREACHES, ids=[f"{file}:{line}" for file, line, _ in BREACHES])
def test_a_breach_is_found(copy: Path, file: str, line: str, contract: str) -> None:
    with (copy / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert any(name.startswith(contract) for name in broken(result.stdout)), result.stdout


def test_what_calls_itself_pure_is_under_contract() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["importlinter:contract:pure"]["source_modules"].split())
    claimed = set()
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        head = path.read_text(encoding="utf-8")[:2000]
        if CLAIM.search(head.partition('"""')[2].partition('"""')[0]):
            claimed.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert claimed - listed == set()
