"""The ``ai`` package for JavaScript with its OpenAI-compatible provider: ``js/weather.mjs`` talks, this file checks.

``scripts/install test`` puts the packages of ``js/package-lock.json`` into ``.venv/js``. The program is copied to them:
node looks for a module's packages beside the module.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scenario import (
    AFTERTHOUGHT,
    ARGUMENTS,
    BREAK,
    BROKEN,
    FINAL,
    OTHER_ARGUMENTS,
    PREAMBLE,
    QUESTION,
    REASONING,
    TWO,
    WEATHER,
    argument_text,
)
from tests.process.server import Server

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PACKAGES = ROOT / ".venv" / "js"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="node is not installed"),
    pytest.mark.skipif(not (PACKAGES / "node_modules").is_dir(), reason="scripts/install test ran without npm"),
]


def talk(server: Server, question: str, program: str = "weather.mjs") -> Any:
    """What the program understood."""
    copy = shutil.copy(HERE / "js" / program, PACKAGES / program)
    command = [NODE or "node", copy, f"{server.url}/v1", question, json.dumps(WEATHER)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def without_ids(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps without what is minted for each request."""
    return [step | {"calls": [{**call, "id": ""} for call in step["calls"]]} for step in steps]


def check_steps(steps: list[dict[str, Any]], *arguments: dict[str, Any]) -> None:
    first, second = steps
    assert (first["reasoning"], first["text"].strip(), first["finish"]) == (REASONING, PREAMBLE, "tool-calls")
    assert [(call["name"], call["input"]) for call in first["calls"]] == [("get_weather", each) for each in arguments]
    assert first["results"] == [WEATHER[each["city"]] for each in arguments]
    assert len({call["id"] for call in first["calls"]}) == len(arguments)
    assert (second["reasoning"], second["text"], second["finish"]) == (AFTERTHOUGHT, FINAL, "stop")
    for step in steps:
        usage = step["usage"]
        assert 0 < usage["reasoningTokens"] < usage["outputTokens"] < usage["totalTokens"]


def test_a_tool_in_two_steps(server: Server) -> None:
    said = talk(server, QUESTION)
    for way in ("stream", "whole"):
        check_steps(said[way]["steps"], ARGUMENTS)
        assert said[way]["calls"] == [ARGUMENTS]
    assert without_ids(said["stream"]["steps"]) == without_ids(said["whole"]["steps"])
    assert said["stream"]["errors"] == [] and said["whole"]["text"] == FINAL


def test_two_calls_in_one_step(qwen: Server) -> None:
    said = talk(qwen, TWO)
    for way in ("stream", "whole"):
        check_steps(said[way]["steps"], ARGUMENTS, OTHER_ARGUMENTS)


def test_the_parts_of_a_stream(server: Server) -> None:
    """Each part is opened, filled and closed, in this order; a call's input arrives as text before the call."""
    parts = talk(server, QUESTION)["stream"]["parts"]
    first = parts[: next(place for place, part in enumerate(parts) if part["type"] == "finish-step")]
    opened = [part["type"] for part in first if part["type"].endswith("-start") or part["type"] == "tool-call"]
    assert opened == ["reasoning-start", "text-start", "tool-input-start", "tool-call"]
    for kind, text in (("reasoning", REASONING), ("text", PREAMBLE), ("tool-input", argument_text(ARGUMENTS))):
        pieces = [part for part in first if part["type"] == f"{kind}-delta"]
        assert "".join(piece["text"] for piece in pieces).strip() == text
        assert {piece["id"] for piece in pieces} == {part["id"] for part in first if part["type"] == f"{kind}-end"}


def test_an_engine_that_fails(server: Server) -> None:
    (error,) = talk(server, BREAK, "failure.mjs")["errors"]
    assert BROKEN in error
