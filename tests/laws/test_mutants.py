"""Known mutants: each must turn the tests red that are there for it. A guard that no test holds is gone with the next
change.

A mutant is one replacement in a copy of the packages. The copy gets the tests that are named, and runs them in a
process of its own; all processes run at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
READ_ONLY = "tests/executor/test_result.py::test_finished_is_read_only"
CHAT = "tests/serve/test_postprocess_handlers.py::test_chat_usage_and_done_wait_for_the_record_to_finish"
COMPLETION = "tests/serve/test_postprocess_handlers.py::test_completion_usage_and_done_wait_for_the_record_to_finish"
DOCUMENT = "tests/serve/test_postprocess_handlers.py::test_a_document_waits_for_the_record_to_finish"

_PROPERTY = '''        """Whether every output is complete and nothing more will come. Read-only: there is no setter."""
        return self._done
'''
_SETTER = """
    @finished.setter
    def finished(self, value: bool) -> None:
        self._done = value
"""
_GUARD = """    if not record.finished:
        return b""
    usage = b""
"""


@dataclass(frozen=True)
class Mutant:
    """red, green: tests that must fail, and that must not."""

    file: str
    old: str
    new: str
    red: tuple[str, ...]
    green: tuple[str, ...] = ()


MUTANTS = {
    "no mutant": Mutant("executor/result.py", "", "", (), (READ_ONLY, CHAT, COMPLETION, DOCUMENT)),
    "a setter on finished": Mutant("executor/result.py", _PROPERTY, _PROPERTY + _SETTER, (READ_ONLY,), (CHAT,)),
    "the usage guard forced open": Mutant(
        "serve/postprocess_handlers.py", _GUARD, '    usage = b""\n', (CHAT, COMPLETION), (READ_ONLY, DOCUMENT)
    ),
    "the usage guard of chat forced open": Mutant(
        "serve/postprocess_handlers.py", _GUARD, _GUARD.replace("record.finished",
        'record.finished and args.field != "delta"'), (CHAT,), (COMPLETION,)
    ),
    "the usage guard of completions forced open": Mutant(
        "serve/postprocess_handlers.py", _GUARD, _GUARD.replace("record.finished",
        'record.finished and args.field != "text"'), (COMPLETION,), (CHAT,)
    ),
}  # fmt: skip


def mutated(mutant: Mutant, folder: Path) -> Path:
    """A copy of the packages and of the tests that are needed, with the replacement made."""
    ignore = shutil.ignore_patterns("__pycache__", "*.jsonl", "transformers_engine.py")
    for package in ("executor", "postproc_workers", "serve"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    tests = [
        "__init__.py",
        "helpers.py",
        "recordings/__init__.py",
        "recordings/build_tokenizers.py",
        "recordings/checker.py",
    ]
    tests += [
        "executor/__init__.py",
        "executor/test_result.py",
        "serve/__init__.py",
        "serve/test_postprocess_handlers.py",
    ]
    for name in tests:
        (folder / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    (folder / "pytest.ini").write_text("[pytest]\n")
    file = folder / mutant.file
    source = file.read_text(encoding="utf-8")
    assert not mutant.old or source.count(mutant.old) == 1, (
        f"{mutant.file} has changed: tell this test where the guard is now"
    )
    file.write_text(source.replace(mutant.old, mutant.new) if mutant.old else source, encoding="utf-8")
    return folder


def started(mutant: Mutant, folder: Path) -> subprocess.Popen[str]:
    """The named tests, running in the copy; without plugins, which take longer to load than the tests to run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *mutant.red,
        *mutant.green,
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_each_mutant_turns_its_tests_red(tmp_path: Path) -> None:
    running = {
        name: started(mutant, mutated(mutant, tmp_path / name.replace(" ", "_"))) for name, mutant in MUTANTS.items()
    }
    said = {name: process.communicate(timeout=100)[0] for name, process in running.items()}
    for name, mutant in MUTANTS.items():
        lines = said[name].splitlines()
        for test in mutant.red:
            assert any(line.startswith(f"FAILED {test}") for line in lines), (
                f"{name}: {test} did not fail\n{said[name]}"
            )
        for test in mutant.green:
            failed = any(line.startswith(f"FAILED {test}") for line in lines)
            passed = any(line.startswith(f"PASSED {test}") for line in lines)
            assert passed and not failed, f"{name}: {test} did not pass\n{said[name]}"
