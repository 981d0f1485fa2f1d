"""The output items of a response: what the events of a choice add up to, in the Responses API's words.

    ReasoningDelta -> an item of type reasoning, ContentDelta -> message, ToolCallDelta -> function_call

An item is open until an event of another kind, or of another call, comes. There is one fold: a stream writes what it
changes, a unary body what it has become. Field names follow OpenAI's API reference (the response object).
"""

from __future__ import annotations

from typing import Any, Literal

from serve.events import ContentDelta, Event, ReasoningDelta

Kind = Literal["reasoning", "message", "function_call"]
Status = Literal["in_progress", "completed", "incomplete"]

_PREFIX: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class OutputItem:
    """One item while it grows.

    index: its place in ``output``. call: index of the call among the choice's calls, -1 for other kinds.
    parts: its text, or its arguments.
    """

    __slots__ = ("call", "call_id", "id", "index", "kind", "name", "parts", "status")

    def __init__(self, kind: Kind, index: int, response_id: str, event: Event | None = None) -> None:
        self.kind, self.index = kind, index
        # Derived, so that a replayed or resumed stream names its items the same.
        self.id = f"{_PREFIX[kind]}_{response_id.removeprefix('resp_')}_{index}"
        self.parts: list[str] = []
        self.status: Status = "in_progress"
        self.call, self.call_id, self.name = -1, "", ""
        if event is not None and not isinstance(event, ContentDelta | ReasoningDelta):
            self.call, self.call_id, self.name = event.index, event.id or "", event.name or ""

    @property
    def text(self) -> str:
        """All of it so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""

    def takes(self, event: Event) -> bool:
        """Whether ``event`` goes on with this item."""
        return kind_of(event) == self.kind and (self.kind != "function_call" or event.index == self.call)

    def part(self) -> dict[str, Any]:
        """The content part of a message or of reasoning."""
        return self._part(self.text)

    def empty_part(self) -> dict[str, Any]:
        """The same as it was when it was added."""
        return self._part("")

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_json(self) -> dict[str, Any]:
        """The item as it is now; without its content while it is in progress, as it was when it was added."""
        head: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        new = self.status == "in_progress"
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": "" if new else self.text}
        content = [] if new else [self.part()]
        if self.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}


def kind_of(event: Event) -> Kind:
    """The kind of item that an event belongs to."""
    if isinstance(event, ContentDelta):
        return "message"
    return "reasoning" if isinstance(event, ReasoningDelta) else "function_call"
