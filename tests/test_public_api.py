"""The public names and signatures of the three packages against `public_api.txt`, so that they change only on purpose.

A name is public unless it begins with an underscore. The text is made from the source and not from live objects: it
needs no import, and it is the same under every Python that the project supports. After a change that is meant,
``scripts/test --update-api`` writes the file anew; its diff belongs into the same commit.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = Path(__file__).with_name("public_api.txt")
PACKAGES = ("executor", "postproc_workers", "serve")
INDENT = "    "

#: Methods that a caller uses under another spelling: Class(...), object(...), async for, await, with, len, in, [].
SPECIAL = frozenset(
    ["__init__", "__call__", "__iter__", "__next__", "__aiter__", "__anext__", "__await__", "__enter__", "__exit__"]
    + ["__aenter__", "__aexit__", "__len__", "__contains__", "__getitem__"]
)


def public_api(root: Path = ROOT) -> list[str]:
    """The description, line by line; a module without public names is left out."""
    lines = []
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if body := list(describe(ast.parse(path.read_text(encoding="utf-8")).body)):
            lines += [*([""] if lines else []), name, *(INDENT + line for line in body)]
    return lines


def describe(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The public names that the statements of a module or class bind, in the order of the source."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _function(node)
        elif isinstance(node, ast.ClassDef):
            yield from _class(node)
        elif isinstance(node, ast.AnnAssign) and _is_public(node.target):
            yield ast.unparse(node).replace("lambda :", "lambda:")  # Python 3.10 writes the space
        elif isinstance(node, ast.Assign):
            yield from (ast.unparse(target) for target in node.targets if _is_public(target))
        elif isinstance(node, ast.If):
            yield from describe([*node.body, *node.orelse])


def _is_public(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and not node.id.startswith("_") and node.id != "logger"


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if node.name.startswith("_") and node.name not in SPECIAL:
        return
    yield from ("@" + ast.unparse(decorator) for decorator in node.decorator_list)
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    yield f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"


def _class(node: ast.ClassDef) -> Iterator[str]:
    if node.name.startswith("_"):
        return
    yield from ("@" + ast.unparse(decorator) for decorator in node.decorator_list)
    bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
    yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    yield from (INDENT + line for line in [*describe(node.body), *_attributes(node)])


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """``self.name`` for each public attribute that ``__init__`` sets."""
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    stores = [each for each in ast.walk(init) if isinstance(each, ast.Attribute)] if init is not None else []
    names = [each.attr for each in stores if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"]
    yield from (f"self.{name}" for name in sorted(set(names)) if not name.startswith("_"))


def test_public_names_and_signatures_are_as_agreed() -> None:
    actual = public_api()
    if os.environ.get("TAILRACE_UPDATE_API"):
        REFERENCE.write_text("\n".join(actual) + "\n", encoding="utf-8")
    agreed = REFERENCE.read_text(encoding="utf-8").splitlines()
    diff = list(
        difflib.unified_diff(agreed, actual, "agreed (tests/public_api.txt)", "in the source", n=6, lineterm="")
    )
    if diff:
        pytest.fail(
            "\n".join(["The public API differs. If on purpose: scripts/test --update-api", *diff]), pytrace=False
        )


SOURCE = """
LIMIT = 3
_hidden = 4
@dataclass(frozen=True)
class Point(Base):
    x: int
    y: int = 0
    _z: int = 1
    def __init__(self, at: int) -> None:
        self.at, self._private = at, 1
    def __repr__(self) -> str: ...
    @property
    def norm(self) -> float: ...
    def _private(self) -> None: ...
async def load(path: Path | None = None, *, deep: bool = True, **rest: object) -> tuple[int, ...]: ...
def _helper() -> None: ...
class _Hidden: ...
"""

DESCRIBED = """
LIMIT
@dataclass(frozen=True)
class Point(Base)
    x: int
    y: int = 0
    def __init__(self, at: int) -> None
    @property
    def norm(self) -> float
    self.at
async def load(path: Path | None=None, *, deep: bool=True, **rest: object) -> tuple[int, ...]
"""


def test_a_description_has_all_that_a_caller_can_rely_on_and_nothing_private() -> None:
    assert list(describe(ast.parse(SOURCE).body)) == DESCRIBED.strip().splitlines()
