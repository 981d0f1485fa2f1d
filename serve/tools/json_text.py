"""JSON as it is generated: where a value ends, and what a string says, from pieces cut anywhere.

Argument text is forwarded as the model wrote it. So nothing here parses: a container is followed by its brackets and
quotes alone (``JsonSpan``), a string is unescaped as it comes (``json_string``). The runs between them are skipped by
compiled patterns; a Python loop per character would cost more than the rest of a worker's step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import orjson

from serve.tools.reader import Reader, Steps

#: Up to a quote or a lone backslash at the end of the piece.
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_STRUCTURE = re.compile(r'["{}\[\]<]')
_PLAIN = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^\s,\]}]*")
_HIGH = re.compile(r"\\u[dD][89abAB]")
_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.)", re.DOTALL)

REPLACEMENT = "\ufffd"


def quoted(text: str) -> str:
    """``text`` as a JSON string."""
    return orjson.dumps(text).decode()


class JsonSpan:
    """Follows one object or array to its end. depth: brackets that are open already.

    Brackets are counted, not matched: what the client gets is the model's text, whatever it is. A ``<`` outside of a
    string is no JSON; it is where a special token follows arguments that were never closed.
    done: the last bracket was closed. broken: the text is no JSON from here on.
    """

    __slots__ = ("broken", "done", "_depth", "_escaped", "_in_string")

    def __init__(self, depth: int = 0) -> None:
        self.done = self.broken = False
        self._depth = depth
        self._in_string = self._escaped = False

    def advance(self, text: str, at: int = 0) -> int:
        """Offset in ``text`` behind what belongs to the value, from ``at`` on."""
        end = len(text)
        while at < end:
            if self._in_string:
                at = self._string(text, at)
                continue
            found = _STRUCTURE.search(text, at)
            if found is None:
                return end
            at = found.end()
            if (char := text[at - 1]) == '"':
                self._in_string = True
            elif char == "<":
                self.broken = True
                return at - 1
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    self.done = True
                    return at
        return end

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]  # it matches anywhere
        if at < len(text):
            self._escaped, self._in_string = text[at] == "\\", text[at] != '"'
            return at + 1
        return at


def json_span(reader: Reader, out: Callable[[str], None], depth: int = 0) -> Steps[bool]:
    """Hand the object or array at the cursor, or its rest behind ``depth`` brackets, to ``out`` as it comes.

    Returns whether it was complete.
    """
    span = JsonSpan(depth)
    ahead = 0  # characters that the lane has followed the span over, not taken yet

    def lane(text: str) -> bool:
        nonlocal ahead
        ahead = span.advance(text)
        if span.done or span.broken:
            return False
        out(text)
        ahead = 0
        return True

    while True:
        count = ahead or span.advance(reader.text, reader.at) - reader.at
        if count:
            out(reader.take(count))
        if span.done or span.broken or reader.ended:
            return span.done
        ahead, reader.lane = 0, None if reader.recording else lane
        yield
        reader.lane = None


def json_string(reader: Reader, out: Callable[[str], None]) -> Steps[bool]:
    """Hand the text of the string, whose opening quote was taken, to ``out``. Whether the closing quote came."""
    while True:
        char = yield from reader.peek()
        if char == "":
            return False
        if char == '"':
            reader.take(1)
            return True
        if char == "\\":
            out((yield from _escape(reader)))
        else:
            out(reader.take(_PLAIN.match(reader.text, reader.at).end() - reader.at))  # type: ignore[union-attr]


def _escape(reader: Reader) -> Steps[str]:
    """The character that an escape at the cursor stands for; the escape itself if it is none."""
    needed = 2
    while True:
        seen = reader.text[reader.at : reader.at + 12]
        if len(seen) > 1:
            needed = 6 if seen[1] == "u" else 2
        if len(seen) >= 6 and _HIGH.match(seen) and "\\u".startswith(seen[6:8]):
            needed = 12  # the other half of a pair may follow
        if len(seen) >= needed or reader.ended:
            break
        yield
    found = _ESCAPE.match(seen)
    raw = reader.take(found.end() if found is not None else 1)
    try:
        text: str = json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return raw
    return REPLACEMENT if "\ud800" <= text <= "\udfff" else text


def json_scalar(reader: Reader) -> Steps[str]:
    """Take a number, true, false, null or whatever else has no white space, comma or closing bracket."""
    return (yield from reader.run(_SCALAR))
