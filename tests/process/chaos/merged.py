"""A response -> what must not depend on where its chunks end, nor on what is minted for each request: leaves by name.

A leaf is a text. Streams of chat and completions are read by the recordings' checker, which is strict about their form;
streams of responses here. AssertionError, ValueError, KeyError or TypeError says that a body is not well formed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.process.chaos.templates import RESPONSES, Template
from tests.recordings.checker import Choice, Merged, merge_document, merge_stream, strict_json

Leaves = dict[str, str]

#: What a body that is not well formed raises here.
MALFORMED = (AssertionError, ValueError, LookupError, TypeError)

#: What an idle event stream gets to keep its connection alive; no client reads it.
_COMMENT = re.compile(rb"^:[^\n]*\n\n", re.MULTILINE)

_IDS = ("id", "item_id", "call_id", "response_id")
_TIMES = ("created_at", "completed_at")


def merged(template: Template, status: int, body: bytes) -> Leaves:
    """The leaves of a whole response."""
    leaves = {"status": str(status)}
    if template.path == RESPONSES:
        events = template.streams and status == 200
        return leaves | (_response_events(without_comments(body)) if events else _response_document(body))
    if template.streams and status == 200:
        return leaves | _leaves(merge_stream(without_comments(body), template.path, **template.options))
    return leaves | _leaves(merge_document(body, template.path))


def without_comments(body: bytes) -> bytes:
    """An event stream without its keep-alive comments."""
    return _COMMENT.sub(b"", body) if b"\n:" in body or body.startswith(b":") else body


def error_of(leaves: Mapping[str, str]) -> str:
    """The error object that ended a response, "" without one."""
    found = [text for name, text in leaves.items() if name == "error" or name.endswith(" response.failed")]
    return found[0] if found else ""


# ------------------------------------------------------------------------------------------------------ chat, text


def _leaves(response: Merged) -> Leaves:
    leaves = {"usage": _json(response.usage)}
    if response.error is not None:
        leaves["error"] = _json(response.error)
    for index, choice in response.choices.items():
        leaves |= {f"choice {index} {name}": text for name, text in _of_choice(choice).items()}
    return leaves


def _of_choice(choice: Choice) -> Leaves:
    leaves = {"content": choice.content, "reasoning": choice.reasoning}
    for number, call in enumerate(choice.tool_calls):
        leaves |= {f"call {number} name": call["name"], f"call {number} arguments": call["arguments"]}
    leaves["logprobs"] = "".join(_json(entry) + "\n" for entry in choice.logprobs)
    return leaves | {"finish": _json([choice.finish_reason, choice.stop_reason])}


# ------------------------------------------------------------------------------------------------------ responses


def _response_document(body: bytes) -> Leaves:
    document = strict_json(body)
    assert isinstance(document, dict) and ("error" in document or document["object"] == "response"), "no response"
    if "object" not in document:
        return {"error": _json(document["error"])}
    return {"document": _json(_Canonical().of(document))}


def _response_events(body: bytes) -> Leaves:
    """The events in order, neighbouring deltas joined, without their numbers: those only have to grow."""
    canonical, last = _Canonical(), -1
    joined: list[tuple[dict[str, Any], str | None]] = []
    for event in _named_events(body):
        number = event.pop("sequence_number")
        assert number > last, f"sequence_number {number} behind {last}"
        last, event = number, canonical.of(event)
        delta = event.pop("delta", None)
        before, text = joined[-1] if joined else ({}, None)
        if delta is not None and text is not None and before == event:
            joined[-1] = (event, text + delta)
        else:
            joined.append((event, delta))
    assert joined and joined[-1][0]["type"] in _LAST, f"the last event is {joined[-1:]}"
    return _event_leaves(joined)


_LAST = ("response.completed", "response.incomplete", "response.failed")


def _event_leaves(joined: Sequence[tuple[dict[str, Any], str | None]]) -> Leaves:
    leaves = {}
    for place, (event, delta) in enumerate(joined):
        name = f"{place:03d} {event['type']}"
        leaves[name] = _json(event)
        if delta is not None:
            leaves[f"{name} delta"] = delta
    return leaves


def _named_events(body: bytes) -> list[dict[str, Any]]:
    text = body.decode()
    assert text.endswith("\n\n"), f"no blank line at the end: {text[-60:]!r}"
    events = []
    for block in text[:-2].split("\n\n"):
        name, _, data = block.partition("\n")
        event = strict_json(data.removeprefix("data: "))
        assert name == f"event: {event['type']}", block
        events.append(event)
    return events


class _Canonical:
    """Replaces ids by the order of their first appearance, and times by 0."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def of(self, value: Any) -> Any:
        """The same value, with ids and times that are those of any other run."""
        if isinstance(value, list):
            return [self.of(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {key: self._field(key, each) for key, each in value.items()}

    def _field(self, key: str, value: Any) -> Any:
        if key in _IDS and isinstance(value, str):
            return self._ids.setdefault(value, f"id {len(self._ids)}")
        if key in _TIMES and isinstance(value, (int, float)):
            return 0
        return self.of(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
