"""Every example runs, as a user starts it: on the replay engine, with what it has to say of its method."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.server import make_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"

#: What an example prints on its canned answers, and how its last line of progress ends.
SAID = {
    "best_of_n": ("chosen: ", "4 done"),
    "majority_vote": ("answer: 7, as in: ", "tokens"),
    "self_refine": ("passed after 2 rounds\nAir scatters blue light more than red.", "2 done"),
    "early_stop": ("8 x no, 8 x yes", "16 cancelled"),
    "tree_search": ("score ", "tokens"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EXAMPLES / f"{name}.py", *flags], capture_output=True, text=True, timeout=60)


def test_all_examples_are_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"session"} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name: str, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")  # its first line asks for python3
    helped = run(name, "--help")
    assert helped.returncode == 0 and f"scripts/examples/{name}.py" in helped.stdout, helped.stderr
    done = run(name, "--engine", "replay", "--tokenizer", str(tokenizer), "--max_tokens", "500")
    assert done.returncode == 0, done.stderr
    text, progress = SAID[name]
    assert text in done.stdout and progress in done.stderr.splitlines()[-1], done.stdout + done.stderr


def test_the_document_s_program_runs(tokenizer: Path) -> None:
    """As it stands there, but for the model."""
    program = (EXAMPLES.parents[1] / "docs" / "scaffolding.md").read_text(encoding="utf-8").split("```python\n")[1]
    program = program.partition("```")[0].replace("Config()", f'Config(engine="replay", tokenizer={str(tokenizer)!r})')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "'completion_tokens': " in done.stdout, done.stderr
