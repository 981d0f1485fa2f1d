"""Ways for bytes to become code are not in the sources, and whoever adds one has to change this file.

Besides ``pickle`` and its relatives, which an import contract forbids (``test_contracts.py``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    file for package in ("executor", "postproc_workers", "serve") for file in (ROOT / package).rglob("*.py")
)

#: Calls that turn text or bytes into code or objects, or hand text to a shell.
DANGEROUS = frozenset(
    ["eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execl", "os.execv", "os.execvp"]
    + ["subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"]
    + ["yaml.load", "yaml.full_load", "yaml.unsafe_load", "numpy.load", "np.load", "numpy.fromfile", "joblib.load"]
    + ["jinja2.Template", "jinja2.Environment", "ssl._create_unverified_context"]
)
MODULES = frozenset(["pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib", "yaml", "code", "codeop"])

#: Arguments that switch a protection off, with the value that does.
SWITCHES = {"shell": True, "trust_remote_code": True, "weights_only": False, "verify": False, "allow_pickle": True}

#: (file, what is found): the only places.
ALLOWED: set[tuple[str, str]] = set()


def findings(source: str) -> Iterator[str]:
    """What is dangerous in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"import {node.module}"
        elif isinstance(node, ast.Call):
            yield from _of_a_call(node)


def _of_a_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func).removeprefix("builtins.")
    if name in DANGEROUS:
        yield name
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load" and "weights_only" not in arguments:
        yield "torch.load without weights_only"
    for switch, value in SWITCHES.items():
        given = arguments.get(switch)
        # What is not a constant may be anything.
        if given is not None and not (isinstance(given, ast.Constant) and given.value is not value):
            yield f"{switch}={ast.unparse(given)}"


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_nothing_here_runs_what_it_is_given(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = {(name, finding) for finding in findings(path.read_text(encoding="utf-8"))}
    assert found - ALLOWED == set()


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import yaml", "eval(text)", "builtins.exec(text)",
        "os.system(x)", "subprocess.run(x, shell=True)", "subprocess.run(x, shell=flag)", "torch.load(path)",
        "torch.load(path, weights_only=False)", "yaml.load(x)", "np.load(x, allow_pickle=True)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)", "httpx.get(x, verify=False)",
        "compile(x, name, mode)",
        "asyncio.create_subprocess_shell(x)", "jinja2.Template(x)",
    ],
)  # fmt: skip
def test_it_would_be_found(line: str) -> None:
    assert list(findings(line))


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "re.compile(x)", "subprocess.run(x)", "torch.load(x, weights_only=True)",
     "run(x, shell=False)", "f(trust_remote_code=False)", "import json"],
)  # fmt: skip
def test_what_only_looks_like_it(line: str) -> None:
    assert not list(findings(line))
