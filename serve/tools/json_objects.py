"""The shape of JSON objects that say name and arguments, alone or in a list, in tags, behind a marker or bare.

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>      [TOOL_CALLS] [{"name": ...}, {"name": ...}]

Keys come in any order. The name decides: arguments that come before it wait, those that come behind it stream as they
are generated. A call counts as one when its name is known and its arguments have begun like an object; until then all
can still come back as content. Bare JSON must look like nothing but a call: an answer in JSON is an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from serve.tools.calls import Calls, IdStyle, openai_id
from serve.tools.json_text import json_scalar, json_span, json_string, quoted
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps

NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
#: What else a bare object may hold and still be a call.
EXTRA_KEYS = frozenset({"type", "id", "index", "tool_call_id", "function"})

FENCE = "```"

_NAME = re.compile(r"[\w.:/-]{1,128}")
_WORD = re.compile(r"\w*")
_BRACES = re.compile(r"}*")
_BETWEEN = re.compile(r"[\s,;]*")
_COMMAS = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class JsonFormat:
    """A row of the table. bare: brackets, "{", "[" or both, that may begin a call without any marker."""

    markers: Markers
    bare: str = ""
    ids: IdStyle = openai_id

    def parser(self, calls: Calls) -> MarkupParser:
        """A parser for one choice."""
        return JsonParser(calls, self)


def json_format(*openers: str, closers: tuple[str, ...] = (), bare: str = "", **more: IdStyle) -> JsonFormat:
    """A row from its markers."""
    return JsonFormat(Markers(openers + tuple(bare), closers), bare, **more)


@dataclass
class _Call:
    """What is known of a call so far. held: its arguments, while there is no name."""

    strict: bool
    name: str = ""
    begun: bool = False
    has_arguments: bool = False
    held: list[str] = field(default_factory=list)


class JsonParser(MarkupParser):
    """Parses one choice in a format of this shape."""

    def __init__(self, calls: Calls, format: JsonFormat) -> None:
        super().__init__(calls, format.markers)
        self._bare = format.bare

    def markup(self, opener: str) -> Steps[None]:
        bare = yield from self._is_bare(opener)
        fenced = not bare and (yield from self._fence(opener))
        char = opener if bare else (yield from self._bracket())
        in_list = char == "["
        if in_list:
            char = yield from self._bracket()
        strict = bare or opener == FENCE
        if char != "{" or not (yield from self.object(strict=strict)):
            return self.reject()
        yield from self._more(in_list, strict)
        if fenced:
            yield from self.reader.space()
            if (yield from self.reader.literal((FENCE,))) is None:
                self.reader.cut_off((FENCE,))

    def object(self, *, strict: bool) -> Steps[bool]:
        """The members of an object whose brace was taken. Whether they make a call."""
        call = _Call(strict)
        complete = yield from self._members(call, nested=False)
        if call.begun:
            return True
        if not call.name or call.has_arguments and complete:
            return False
        if complete and not strict:
            return self._begin(call, "{}")
        cut_off = self.reader.ended and self.reader.idle
        return cut_off and (not strict or call.name in self.calls.tools) and self._begin(call, "".join(call.held))

    def _is_bare(self, opener: str) -> Steps[bool]:
        """Whether a bracket stands alone: it completes before a marker that begins with one does."""
        tails = tuple(each[1:] for each in self.markers.openers if len(each) > 1 and each[0] == opener)
        return opener in self._bare and (not tails or (yield from self.reader.literal(tails)) is None)

    def _fence(self, opener: str) -> Steps[bool]:
        """Whether a code fence was opened, here or by ``opener``; its language is taken too."""
        yield from self.reader.space()
        fenced = opener == FENCE or (yield from self.reader.literal((FENCE,))) is not None
        if fenced:
            yield from self.reader.run(_WORD)
        return fenced

    def _bracket(self) -> Steps[str]:
        yield from self.reader.space()
        char = yield from self.reader.peek()
        return self.reader.take(1) if char in ("{", "[") else char

    def _more(self, in_list: bool, strict: bool) -> Steps[None]:
        """What follows an object: surplus braces, another object, the end of the list."""
        reader = self.reader
        while True:
            yield from reader.run(_BRACES)
            reader.record()
            yield from reader.run(_BETWEEN)
            char = yield from reader.peek()
            if in_list and char == "]":
                reader.take(1)
            if char in ("", "]") and (in_list or char == ""):
                reader.recorded()
                return
            if char != "{":
                return self.reject()
            reader.take(1)
            if not (yield from self.object(strict=strict)):
                return self.reject()

    # ------------------------------------------------------------------ members

    def _members(self, call: _Call, *, nested: bool) -> Steps[bool]:
        reader = self.reader
        while True:
            yield from reader.run(_COMMAS)
            char = yield from reader.peek()
            if char == "}":
                reader.take(1)
                return True
            key = (yield from self._string()) if char == '"' else None
            if key is None:
                return False
            yield from reader.space()
            if (yield from reader.peek()) != ":":
                return False
            reader.take(1)
            yield from reader.space()
            if not (yield from self._member(call, key, nested)):
                return False

    def _member(self, call: _Call, key: str, nested: bool) -> Steps[bool]:
        char = yield from self.reader.peek()
        if key in ARGUMENT_KEYS and not call.has_arguments:
            return (yield from self._arguments(call, char))
        if char == '"' and (key in NAME_KEYS or key == "function") and not call.begun:
            return (yield from self._name(call))
        if char == "{" and key == "function" and not nested:
            self.reader.take(1)
            return (yield from self._members(call, nested=True))
        if call.strict and not call.begun and key not in EXTRA_KEYS:
            return False
        return (yield from self._skip(char))

    def _name(self, call: _Call) -> Steps[bool]:
        name = yield from self._string()
        call.name = name or ""
        return bool(name) and (not call.has_arguments or self._begin(call, "".join(call.held)))

    def _arguments(self, call: _Call, char: str) -> Steps[bool]:
        reader = self.reader
        call.has_arguments = True
        if char == '"':
            return (yield from self._quoted_arguments(call))
        if char != "{":
            return (yield from self._null_arguments(call))
        head = reader.take(1) + (yield from reader.space())
        if (yield from reader.peek()) not in ('"', "}", "") or not self._add(call, head):
            return False
        return (yield from json_span(reader, self._sink(call), depth=1))

    def _null_arguments(self, call: _Call) -> Steps[bool]:
        reader = self.reader
        if (yield from reader.literal(("null",))) is not None:
            return self._add(call, "{}")
        rest = reader.text[reader.at :]
        if reader.cut_off(("null",)):
            call.held.append(rest)
        return False

    def _quoted_arguments(self, call: _Call) -> Steps[bool]:
        """Arguments as a string: if it holds an object, that object's text, else the string as it is."""
        text = _Unquoted(lambda: self._sink(call) if self._add(call, "") else None)
        self.reader.take(1)
        complete = yield from json_string(self.reader, text.add)
        if text.sink is not None:
            return complete
        if text.refused or call.strict:
            return False
        if not complete:
            call.held.append(_requoted(text.all())[:-1])
        return complete and self._add(call, _requoted(text.all()))

    # ------------------------------------------------------------------ parts

    def _begin(self, call: _Call, arguments: str = "") -> bool:
        """The call is one, unless it is bare and does not look the part."""
        if call.strict and not (_NAME.fullmatch(call.name) and (self.blank or self.calls.declared(call.name))):
            return False
        call.begun = True
        self.accept()
        self.calls.start(call.name)
        self.calls.arguments(arguments)
        return True

    def _add(self, call: _Call, arguments: str) -> bool:
        """First argument text: begins the call if its name is known, else waits. False if it is no call."""
        if call.name:
            return self._begin(call, arguments)
        call.held.append(arguments)
        return True

    def _sink(self, call: _Call) -> Callable[[str], None]:
        return self.calls.arguments if call.begun else call.held.append

    def _string(self) -> Steps[str | None]:
        pieces: list[str] = []
        self.reader.take(1)
        return "".join(pieces) if (yield from json_string(self.reader, pieces.append)) else None

    def _skip(self, char: str) -> Steps[bool]:
        if char == '"':
            return (yield from self._string()) is not None
        if char in ("{", "["):
            return (yield from json_span(self.reader, _ignore))
        return bool((yield from json_scalar(self.reader)))


class _Unquoted:
    """The text of a string: it goes on to a sink if it begins like an object, and is kept otherwise."""

    def __init__(self, open_sink: Callable[[], Callable[[str], None] | None]) -> None:
        self._open_sink = open_sink
        self._kept: list[str] = []
        self._decided = self.refused = False
        self.sink: Callable[[str], None] | None = None

    def add(self, piece: str) -> None:
        if self.sink is not None:
            self.sink(piece)
            return
        self._kept.append(piece)
        if not self._decided and not piece.isspace():
            self._decided = True
            if piece.lstrip().startswith("{"):
                self._open()

    def _open(self) -> None:
        self.sink = self._open_sink()
        self.refused = self.sink is None
        if self.sink is not None:
            self.sink(self.all())

    def all(self) -> str:
        return "".join(self._kept)


def _requoted(text: str) -> str:
    return quoted(text) if text.strip() else "{}"


def _ignore(text: str) -> None:
    """A value that is no part of the call."""
