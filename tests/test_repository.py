"""Promises that the repository makes about itself: its style, its commands, its documents, what it installs."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.cli import main

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("executor", "postproc_workers", "serve")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = 600

#: How often a file catches exceptions of any kind: around one request's post-processing, and around a process's loop.
BROAD_HANDLERS = {"postproc_workers/worker.py": 1, "executor/child.py": 1}

#: What must not be found in any file. In pieces, so that this file does not find itself.
FORBIDDEN = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "py" + "pi.org", "python" + "hosted.org", "--index" + "-url"]

by_path = pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])


def own_files() -> Iterator[Path]:
    """Files of the project; not what tools and set-up leave beside them."""
    folders = (*PACKAGES, ".ci", "docs", "scripts", "tests")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    yield from (path for path in [*sorted(ROOT.iterdir()), *inside] if path.is_file())


# ---------------------------------------------------------------------------------------------------- sources


@by_path
def test_a_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@by_path
def test_a_file_is_not_too_long(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES


def broad_handlers(source: str) -> int:
    """Places of a source that catch exceptions of any kind, or suppress them."""
    handlers = [node.type for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    suppressed = [arg for call in calls if ast.unparse(call.func).endswith("suppress") for arg in call.args]
    return sum(caught is None or _is_broad(caught) for caught in [*handlers, *suppressed])


def _is_broad(caught: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id in ("Exception", "BaseException") for node in ast.walk(caught))


def test_exceptions_of_any_kind_are_caught_where_that_is_agreed_and_nowhere_else() -> None:
    found = {str(path.relative_to(ROOT)): broad_handlers(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: count for path, count in found.items() if count} == BROAD_HANDLERS


@pytest.mark.parametrize(
    ("clause", "count"),
    [
        ("except:", 1),
        ("except Exception:", 1),
        ("except (ValueError, BaseException) as error:", 1),
        ("except ValueError:", 0),
    ],
)
def test_a_broad_handler_is_recognised(clause: str, count: int) -> None:
    assert broad_handlers(f"try:\n    work()\n{clause}\n    pass") == count
    assert broad_handlers("with contextlib.suppress(Exception):\n    work()") == 1


def test_nothing_is_left_undone_and_no_registry_is_named() -> None:
    found = []
    for path in own_files():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [
            f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN if re.search(rf"\b{re.escape(word)}\b", text)
        ]
    assert found == []


# ---------------------------------------------------------------------------------------------------- documents


def section(title: str) -> str:
    """A section of the README."""
    return (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n## {title}")[2].partition("\n## ")[0]


def first_cells(title: str) -> list[str]:
    """The first cells of a README section's table, without its head."""
    rows = [line.split("|")[1].strip() for line in section(title).splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_readme_begins_with_two_commands_that_run() -> None:
    first_block = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]
    commands = [line.split()[0] for line in first_block.splitlines()[1:] if line]
    assert commands == ["scripts/serve", "scripts/test"]


@pytest.mark.parametrize("name", ["scripts/serve", "scripts/test", "scripts/check", "scripts/lint", ".ci/run"])
def test_a_command_is_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


def test_the_readme_names_every_flag_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"--\w+", capsys.readouterr().out)) - {"--help"}
    assert {cell.strip("`") for cell in first_cells("Flags")} - {"MODEL"} == flags


def test_the_readme_names_every_metric_and_no_other() -> None:
    source = (ROOT / "serve" / "metrics.py").read_text(encoding="utf-8")
    named = set(re.findall(r"tailrace_\w+", " ".join(first_cells("Metrics"))))
    groups = re.findall(r"^(_EXECUTOR|_WORKER) = \{(.*?)^\}", source, re.MULTILINE | re.DOTALL)
    rows = [(group, *row) for group, body in groups for row in re.findall(r'\("(\w+)", "[^"]+", (True|False)\)', body)]
    reported = {f"tailrace{group.lower()}_{name}" for group, name, _ in rows}
    own = set(re.findall(r'"(tailrace_\w+)"', source))
    assert {name.removesuffix("_total") for name in named} == reported | own
    counters = {f"tailrace{group.lower()}_{name}_total" for group, name, counts in rows if counts == "True"}
    assert counters <= named


PATH = re.compile(r"(?<![\w/.])((?:executor|postproc_workers|serve|scripts|tests|docs|\.ci)/[\w./]*\w)")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_what_a_document_points_to_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    missing += [name for name in LINK.findall(text) if not (path.parent / name).exists()]
    assert missing == []


# ---------------------------------------------------------------------------------------------------- what is installed


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_every_folder_of_sources_is_a_package_that_gets_installed() -> None:
    """`packages = find:` passes over a folder without __init__.py, and what is no Python file is not installed."""
    folders = {path.parent for path in SOURCES}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    assert setup_cfg()["options.packages.find"]["include"].split() == [f"{package}*" for package in PACKAGES]
    others = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    assert [path for path in others if path.suffix not in (".py", ".pyc")] == []


def test_the_installed_distribution_is_this_one() -> None:
    metadata = setup_cfg()["metadata"]
    distribution = importlib.metadata.distribution("tailrace")
    assert distribution.version == metadata["version"]
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## [")[1].startswith(metadata["version"])
    scripts = {entry.name: entry.value for entry in distribution.entry_points if entry.group == "console_scripts"}
    assert scripts == {"tailrace": "serve.cli:main"}


def test_every_requirement_is_pinned() -> None:
    config = setup_cfg()
    wanted = config["options"]["install_requires"].split() + config["options.extras_require"]["test"].split()
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_normal(line.partition("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    assert {_normal(re.split("[><=]", name)[0]) for name in wanted} - pinned == set()
    assert [line for line in lines if "+" in line.partition("#")[0] or "://" in line] == []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
