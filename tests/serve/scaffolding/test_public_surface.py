"""The package knows of a handle what is public, and the double that drives it has nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.result import CompletionOutput, GenerationResult
from tests.serve.scaffolding.doubles import FakeHandle

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "serve" / "scaffolding").glob("*.py"))

#: Private names of a result and of its outputs.
PRIVATE = {
    name
    for kind in (GenerationResult, CompletionOutput)
    for cls in kind.__mro__
    for name in [*vars(cls), *getattr(cls, "__slots__", ())]
    if name.startswith("_") and not name.startswith("__")
}


def private_reads(source: str) -> Iterator[str]:
    """Private attributes that a source asks of anything but ``self`` or another object of the class it is in, and
    those that only a result has, of whomever they are asked, also as a string."""
    tree = ast.parse(source)
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    methods = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr in PRIVATE - own or node.attr not in own | methods:
                yield f"{ast.unparse(node)} (line {node.lineno})"
        elif isinstance(node, ast.Constant) and node.value in PRIVATE:
            yield f"{node.value!r} (line {node.lineno})"


@pytest.mark.parametrize("path", SOURCES, ids=[path.name for path in SOURCES])
def test_no_private_attribute_of_a_handle_is_read(path: Path) -> None:
    assert list(private_reads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    ["while not handle._done: pass", 'getattr(handle, "_done")', "await handle._steps.get()", "x.handle._error"],
)
def test_such_a_read_is_found(source: str) -> None:
    assert len(list(private_reads(f"async def step(handle):\n    {source}"))) == 1


def test_finished_is_read_where_steps_are_made() -> None:
    """Whoever steps a handle asks ``finished``: in these files, by this name."""
    for name in ("streaming.py", "async_generation.py", "worker.py", "task.py"):
        assert ".finished" in (ROOT / "serve" / "scaffolding" / name).read_text(encoding="utf-8"), name


def test_the_double_has_the_least_that_a_handle_can_have() -> None:
    assert {name for name in dir(FakeHandle(1)) if not name.startswith("_")} == {"finished"}
    assert "_done" in PRIVATE and not any(hasattr(FakeHandle(1), name) for name in PRIVATE)
