"""What a step adds to a chat choice, and the fold of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executor.result import CompletionOutput
from serve.events import ContentDelta, Event, Folded, ReasoningDelta, ToolCall, ToolCallDelta, choice_events


def output(text: str, finish: str | None = None) -> CompletionOutput:
    made = CompletionOutput(0)
    made.text_diff, made.finish_reason = text, finish
    return made


class Upper:
    """A parser that holds one character back."""

    counting = True
    reasoning_tokens = 0

    def observe_pieces(self, pieces: Sequence[str]) -> None:
        self.observed += pieces

    def __init__(self) -> None:
        self.held = ""
        self.fed: list[str] = []
        self.observed: list[str] = []

    def feed(self, text: str) -> Iterable[Event]:
        self.fed.append(text)
        text, self.held = self.held + text[:-1], text[-1]
        return [ContentDelta(text.upper())] if text else []

    def flush(self) -> Iterable[Event]:
        held, self.held = self.held, ""
        return [ReasoningDelta(held)] if held else []


def test_without_a_parser_text_is_content() -> None:
    assert choice_events(output("a"), None) == [ContentDelta("a")]
    assert choice_events(output(""), None) == []
    assert choice_events(output("a", "stop"), None) == [ContentDelta("a")]


def test_a_parser_is_fed_text_and_flushed_at_the_end() -> None:
    parser = Upper()
    assert choice_events(output("ab"), parser) == [ContentDelta("A")]
    assert choice_events(output(""), parser) == [] and parser.fed == ["ab"]
    assert choice_events(output("c", "stop"), parser) == [ContentDelta("B"), ReasoningDelta("c")]
    assert choice_events(output("", "stop"), parser) == []


def test_events_fold_by_kind() -> None:
    folded = Folded()
    for event in (
        ReasoningDelta("r1"), ContentDelta("c1"), ToolCallDelta(0, "{", "id0", "f"), ToolCallDelta(0, "}"),
        ContentDelta("c2"),
        ToolCallDelta(1, "", "id1", "g"), ReasoningDelta("r2"),
    ):  # fmt: skip
        folded.add(event)
    assert (folded.content, folded.reasoning) == (["c1", "c2"], ["r1", "r2"])
    assert folded.tool_calls == [ToolCall("id0", "f", ["{", "}"]), ToolCall("id1", "g", [""])]
    again = Folded()
    for event in folded.events():
        again.add(event)
    assert again == Folded(["c1c2"], ["r1r2"], [ToolCall("id0", "f", ["{}"]), ToolCall("id1", "g", [""])])
    assert len(folded.events()) == 4 and Folded().events() == []


def test_a_call_as_a_message_has_it() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    assert ToolCall("id0", "f", ['{"a"', ": 1}"]).as_json() == {"id": "id0", "type": "function", "function": function}
    assert ToolCall("id0", "f").as_json()["function"]["arguments"] == ""
