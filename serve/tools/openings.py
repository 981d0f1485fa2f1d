"""``tool_choice`` required and named: output that is a call without any markup.

Whoever asks for a certain function may get its arguments alone, and whoever requires a call a bare object or list of
calls: that is what guided decoding makes of such requests. A model that was not guided answers in its own format. The
first characters tell; until they have, they wait (``Opening``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve.events import Event, EventParser
from serve.tools.calls import Calls
from serve.tools.json_text import JsonSpan


class Opening:
    """Picks the parser of a choice by how its text begins.

    choose: gets the text so far without white space; returns a parser, or None to wait. ``final`` is set at the end,
    when it may not wait.
    """

    def __init__(self, choose: Callable[[str, bool], EventParser | None]) -> None:
        self._choose = choose
        self._pieces: list[str] = []
        self._seen = ""
        self._chosen: EventParser | None = None

    def feed(self, text: str) -> Sequence[Event]:
        """Events that ``text`` completes."""
        if self._chosen is None:
            self._pieces.append(text)
            self._seen += "".join(text.split())
            return self._decide(final=False)
        return list(self._chosen.feed(text))

    def flush(self) -> Sequence[Event]:
        """What was held, as events; final and idempotent."""
        events = list(self._decide(final=True)) if self._chosen is None else []
        return events + list(self._chosen.flush()) if self._chosen is not None else events

    def _decide(self, *, final: bool) -> Sequence[Event]:
        self._chosen = self._choose(self._seen, final) if self._seen or final else None
        if self._chosen is None:
            return ()
        text, self._pieces = "".join(self._pieces), []
        return list(self._chosen.feed(text)) if text else ()


def required_opening(objects: EventParser, own: EventParser) -> Opening:
    """Bare objects go to ``objects``, everything else to the model's own format."""

    def choose(seen: str, final: bool) -> EventParser | None:
        if seen == "[" and not final:
            return None
        return objects if seen.startswith(("{", "[{")) else own

    return Opening(choose)


def named_opening(name: str, calls: Calls, objects: EventParser, own: EventParser) -> Opening:
    """An object is the arguments of ``name``, unless it names that function itself."""
    call = '{"name":"' + name + '"'

    def choose(seen: str, final: bool) -> EventParser | None:
        if call.startswith(seen) and not final:
            return None
        if seen.startswith((call, "[{")):
            return objects
        if seen == "[" and not final:
            return None
        return Arguments(name, calls, own) if seen.startswith("{") else own

    return Opening(choose)


class Arguments:
    """A JSON object that is the arguments of a known function; what follows it goes to the model's own format."""

    def __init__(self, name: str, calls: Calls, own: EventParser) -> None:
        self._name, self._calls, self._own = name, calls, own
        self._span = JsonSpan()
        self._started = False

    def feed(self, text: str) -> Sequence[Event]:
        """Events that ``text`` completes."""
        if not self._started:
            text = text.lstrip()
            self._started = True
            self._calls.start(self._name)
        rest = text
        if not self._span.done and not self._span.broken:
            end = self._span.advance(text)
            self._calls.arguments(text[:end])
            rest = text[end:]
        return self._calls.take() + (list(self._own.feed(rest)) if rest else [])

    def flush(self) -> Sequence[Event]:
        """What was held, as events; final and idempotent."""
        return list(self._own.flush())
