"""From the names in a request's spec to the parser of one chat choice, and the finish reason that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.events import EventParser


def chat_parser(args: Mapping[str, Any], index: int) -> EventParser | None:
    """The parser of choice ``index``; None when all text is content."""
    return None


def finish_reason_of(reason: str | None, parser: EventParser | None, tool_choice: Any) -> str | None:
    """The finish reason as the chat endpoint words it."""
    return reason


def detect(chat_template: str, special_tokens: Any) -> tuple[str | None, str | None]:
    """(reasoning parser, tool parser)."""
    return None, None


def check_names(reasoning: str | None, tool: str | None) -> None:
    """Refuse unknown names."""
