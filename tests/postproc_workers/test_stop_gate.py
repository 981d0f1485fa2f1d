"""Stop strings behind a gate: what is inside a reasoning block is not looked at, whatever the cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postproc_workers.replay import replay
from postproc_workers.spec import SpecError, StreamSpec
from postproc_workers.stop_gate import GatedMatcher, StopGate, read_gate
from postproc_workers.stop_strings import StopStrings

OPENS, CLOSES = ("<think>", "[T]"), ("</think>", "[/T]")
STOPS = ["STOP", "<t", "k>", "x"]
FRAGMENTS = [
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "[T]",
    "[/T]",
    "[",
    " ",
    "\n",
    "STOP",
    "ST",
    "OP",
    "x",
    "a",
    "é",
    "<t",
]


def oracle(text: str, stops: list[str], inside: bool) -> tuple[str, str | None, int]:
    """(what is sent, the stop, where it counts as completed), from the definition."""
    at, decided = 0, 0
    if not inside:
        blank = len(text) - len(text.lstrip())
        marker = next((marker for marker in OPENS if text.startswith(marker, blank)), None)
        if marker is not None:
            inside, at = True, blank + len(marker)
        else:
            partial = (i for i in range(blank, len(text)) if not any(m.startswith(text[blank : i + 1]) for m in OPENS))
            decided = next(partial, len(text)) + 1
            if decided > len(text):
                return text, None, 0
    if inside:
        ends = [text.find(marker, at) + len(marker) for marker in CLOSES if marker in text[at:]]
        at = min(ends, default=len(text))
    hits = [(text.find(stop, at) + len(stop), -len(stop), stop) for stop in stops if text.find(stop, at) >= 0]
    if not hits:
        return text, None, 0
    end, _, stop = min(hits)
    return text[: end - len(stop)], stop, max(end, decided)


def run(parts: list[str], stops: list[str], inside: bool) -> tuple[str, str | None, int]:
    matcher = GatedMatcher(StopStrings(stops).matcher(), StopGate(OPENS, CLOSES, inside))
    sent, at = "", 0
    for part in parts:
        sent += matcher.feed(part)
        if matcher.matched is not None:
            return sent + matcher.flush() + matcher.feed("more"), matcher.matched, at + matcher.match_end
        at += len(part)
    return sent + matcher.flush() + matcher.flush(), None, 0


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    st.lists(st.sampled_from(STOPS), min_size=1, unique=True),
    st.booleans(),
    st.data(),
)
def test_every_cut_agrees_with_the_definition(
    fragments: list[str], stops: list[str], inside: bool, data: st.DataObject
) -> None:
    text = "".join(fragments)
    wanted = oracle(text, stops, inside)
    assert run([text], stops, inside) == wanted
    assert run(list(text), stops, inside) == wanted
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert run(parts, stops, inside) == wanted


def test_the_block_passes_without_delay() -> None:
    matcher = GatedMatcher(StopStrings(["STOP"]).matcher(), StopGate(OPENS, CLOSES))
    assert matcher.feed(" <thi") == "" and matcher.held == " <thi"
    assert matcher.feed("nk>a ST") == " <think>a ST" and matcher.held == ""
    assert matcher.feed("OP </thi") == "OP </thi"
    assert matcher.feed("nk>b ST") == "nk>b " and matcher.held == "ST"
    assert matcher.feed("OP c") == "" and (matcher.matched, matcher.match_end) == ("STOP", 2)


def merged(body: bytes) -> tuple[str, str, Any, Any]:
    """(reasoning, content, finish reason, stop reason) of a chat stream."""
    reasoning = content = ""
    finish = stop = None
    for line in body.decode().split("\n\n"):
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            reasoning += choice["delta"].get("reasoning_content") or ""
            content += choice["delta"].get("content") or ""
            finish, stop = choice["finish_reason"], choice.get("stop_reason")
    return reasoning, content, finish, stop


@pytest.mark.parametrize("split", ["whole", "each", "every:2", "every:7", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("stop_in_reasoning", "wanted"),
    [(False, ("a STOP b", "c ", "stop", "STOP")), (True, ("a ", "", "stop", "STOP"))],
)
def test_a_stop_inside_reasoning(split: str, stop_in_reasoning: bool, wanted: tuple[str, ...]) -> None:
    recording = {
        "name": "gate",
        "endpoint": "/v1/chat/completions",
        "request": {
            "model": "m",
            "messages": [{"role": "user", "content": "Go."}],
            "stop": ["STOP"],
            "stop_in_reasoning": stop_in_reasoning,
        },
        "server": {"reasoning_parser": "qwen3"},
        "prompt": "<|im_start|>assistant\n",
        "outputs": [{"index": 0, "text": "<think>a STOP b</think>c STOP d", "finish_reason": "stop"}],
    }
    assert merged(replay(recording, split=split)) == wanted


@pytest.mark.parametrize("gate", [[], [1, ["a"], ["b"]], [True, "a", ["b"]], [True, [""], ["b"]], [True, [], ["b"]]])
def test_a_gate_that_is_none(gate: list[Any]) -> None:
    with pytest.raises(ValueError, match="stop_gate"):
        read_gate(gate)
    spec = StreamSpec("chat_stream", {}, 1, True, 3, stop_gate=tuple(gate))
    with pytest.raises(SpecError, match="stop_gate"):
        StreamSpec.decode(spec.encode())
