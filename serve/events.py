"""What one step adds to a chat choice, whatever the format of the model's output: a few kinds of events.

Both forms of a response are made of them: a stream writes each as an event of its own, a unary body folds them. There
is one parser per format and it makes these; ``choice_events`` is where the text of a step becomes events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from executor.result import CompletionOutput


class ContentDelta(NamedTuple):
    """More of the visible answer."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of the model's reasoning."""

    text: str


class ToolCallDelta(NamedTuple):
    """More of a tool call. The first delta of an index has id and name; later ones only raw argument text."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    arguments: str
    id: str | None = None
    name: str | None = None


Event = ContentDelta | ReasoningDelta | ToolCallDelta


class EventParser(Protocol):
    """Raw text of one choice -> events. It holds back only a proper prefix of something that it looks for."""

    def feed(self, text: str) -> Iterable[Event]:
        """Events that ``text`` completes."""

    def flush(self) -> Iterable[Event]:
        """What was held, as events; final and idempotent."""


class ChoiceParser(EventParser, Protocol):
    """The parser of a whole choice. counting: whether it wants to know the text of each token, to count those inside
    the reasoning; ``reasoning_tokens``: how many there were so far."""

    counting: bool

    @property
    def reasoning_tokens(self) -> int:
        """Tokens with text inside the reasoning so far."""

    def observe_pieces(self, pieces: Sequence[str]) -> None:
        """The text of each token of the step whose text is fed next."""


def choice_events(output: CompletionOutput, parser: ChoiceParser | None) -> list[Event]:
    """The events of the output's last step; without a parser all text is content."""
    text = output.text_diff
    if parser is None:
        return [ContentDelta(text)] if text else []
    if parser.counting and (count := len(output.token_ids_diff)):
        parser.observe_pieces(output.pieces[:count])  # what a flush adds has no id of its own
    events = list(parser.feed(text)) if text else []
    if output.finish_reason is not None:
        events += parser.flush()
    return events


@dataclass(slots=True)
class ToolCall:
    """A folded tool call."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The call as a chat message has it, in plain data (OpenAI's API reference)."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Folded:
    """The fold of a choice's events: what a unary response says of it."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Fold one more event."""
        if isinstance(event, ContentDelta):
            self.content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        else:
            if event.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(event.id or "", event.name or ""))
            self.tool_calls[event.index].arguments.append(event.arguments)

    def events(self) -> list[Event]:
        """The fold as events again, as few as it takes: merged they say the same."""
        events: list[Event] = []
        if self.reasoning:
            events.append(ReasoningDelta("".join(self.reasoning)))
        if self.content:
            events.append(ContentDelta("".join(self.content)))
        for index, call in enumerate(self.tool_calls):
            events.append(ToolCallDelta(index, "".join(call.arguments), call.id, call.name))
        return events
