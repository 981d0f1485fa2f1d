"""The shape of nested tags: a call, in it one element per parameter, its value literal text between two tags.

    <tool_call><function=f><parameter=k>v</parameter></function></tool_call>
    <invoke name="f"><parameter name="k">v</parameter></invoke>

The hard thing is a value that contains the format's own tags, as code about tool calls does: there is no escape. So a
closing tag ends a value only if markup follows it (``_ends``), white space aside; otherwise it is part of the value.
Values are typed by the tool's schema (``schema_types.py``) and become JSON as soon as they are: strings as they come,
everything else at its closing tag. Nothing else is decoded: HTML entities and newlines inside stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from postproc_workers.stop_strings import Literals
from serve.tools.calls import Calls, IdStyle, openai_id
from serve.tools.json_text import json_span, quoted
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps
from serve.tools.schema_types import ANY, STRING, Types, may_be_typed, typed_json, types_of

_NAME = re.compile(r"[^\s<>\"']*")
_LABEL = re.compile(r"[\w.-]*")
_KINDS = ('" string="true">', '" string="false">')


@dataclass(frozen=True)
class XmlFormat:
    """A row of the table.

    call, call_end: around a call's body; parameter, value_end: around a value. name_end: what ends a name in an opening
    tag. labels: whether words may stand between the outer tags and the call. newlines: whether the template puts one
    newline on each side of a value. kinds: whether a parameter's tag says ``string="true"`` or ``"false"``.
    json_body: whether a JSON object may stand for all parameters.
    """

    markers: Markers
    call: str
    call_end: str
    parameter: str
    value_end: str
    name_end: str = '">'
    labels: bool = False
    newlines: bool = False
    kinds: bool = False
    json_body: bool = False
    ids: IdStyle = openai_id

    def parser(self, calls: Calls) -> MarkupParser:
        """A parser for one choice."""
        return XmlParser(calls, self)

    @cached_property
    def outer(self) -> tuple[str, ...]:
        """Tags that a call may stand in."""
        return tuple(each for each in self.markers.openers if each != self.call)

    @cached_property
    def after_value(self) -> tuple[str, ...]:
        """What may follow a value."""
        return (self.parameter, self.call_end, *self.markers.closers, *self.markers.openers, self.call)

    @cached_property
    def value_ends(self) -> Literals:
        """What may end a value; where the template puts newlines, also what shows that the closing tag is missing."""
        implied = (f"\n{self.parameter}", f"\n{self.call_end}") if self.newlines else ()
        return Literals((self.value_end, "\n" + self.value_end, *implied) if self.newlines else (self.value_end,))


class Value:
    """One argument's text on its way to JSON: waits while it may be something other than a string."""

    def __init__(self, calls: Calls, types: Types | None) -> None:
        self._calls, self._types = calls, types
        self._held: list[str] = []
        #: The held text without white space around, as far as it matters: "" so far, or what `may_be_typed` asks for.
        self._word = ""
        self._streams = False
        if types == STRING:
            self._stream()

    def add(self, text: str) -> None:
        """More of the value."""
        if self._streams:
            self._calls.arguments(quoted(text)[1:-1])
            return
        self._held.append(text)
        if self._word[:1] in ("{", "["):
            return  # only its end can tell
        if not (self._word[-1:].isspace() and text.isspace()):
            self._word = (self._word + text).lstrip()
        if not may_be_typed(self._word.rstrip(), self._types or ANY):
            self._stream()

    def end(self) -> None:
        """The value is complete."""
        self._calls.arguments('"' if self._streams else typed_json("".join(self._held), self._types))

    def cut_off(self) -> None:
        """The output ends here: what waits is sent as it is. The object around it is open, so it is no JSON."""
        if not self._streams:
            self._calls.arguments("".join(self._held).strip())

    def _stream(self) -> None:
        self._streams = True
        self._calls.arguments(quoted("".join(self._held))[:-1])


class XmlParser(MarkupParser):
    """Parses one choice in a format of this shape."""

    def __init__(self, calls: Calls, format: XmlFormat) -> None:
        super().__init__(calls, format.markers)
        self._format = format
        self._name = ""
        #: Parameters of the call so far; None while it is not certain that it is a call.
        self._given: set[str] | None = None

    def markup(self, opener: str) -> Steps[None]:
        self._given = None
        self._name = yield from self.name(opener)
        if self._name:
            yield from self._body()
        if self._given is None:
            self.reject()

    # ------------------------------------------------------------------ what a format of other tags overrides

    def name(self, opener: str) -> Steps[str]:
        """Read the call's opening tag, outer tags included; "" if it is none."""
        reader, format = self.reader, self._format
        literal: str | None = opener
        while literal != format.call:
            yield from reader.space()
            if format.labels:
                yield from reader.run(_LABEL)
                yield from reader.space()
            literal = yield from reader.literal((*format.outer, format.call))
            if literal is None:
                return ""
        name = yield from reader.run(_NAME)
        return name if (yield from reader.literal((format.name_end,))) is not None else ""

    def parameter(self) -> Steps[tuple[str, Types | None] | None]:
        """Read the rest of a parameter's opening tag: its name and types. None if it is none."""
        reader, format = self.reader, self._format
        key = yield from reader.run(_NAME)
        ends = (*_KINDS, format.name_end) if format.kinds else (format.name_end,)
        end = yield from reader.literal(ends)
        if not key or end is None:
            reader.cut_off(ends)
            return None
        types = self.types(key)
        return key, STRING if types is None and end == _KINDS[0] else types

    # ------------------------------------------------------------------ the body of a call

    def _body(self) -> Steps[None]:
        reader, format = self.reader, self._format
        yield from reader.space()
        if format.json_body and (yield from reader.peek()) == "{":
            return (yield from self._json_body())
        while True:
            yield from reader.space()
            literal = yield from reader.literal(format.after_value, take=False)
            if literal == format.parameter:
                reader.take(len(literal))
                if not (yield from self._parameter()):
                    return
            elif literal is None:
                if reader.cut_off(format.after_value):
                    self._begin()
                return
            else:
                return self._end(literal)

    def _parameter(self) -> Steps[bool]:
        """One parameter. False if the call is broken here."""
        found = yield from self.parameter()
        if found is None:
            if self.reader.idle and self.reader.ended:
                self._begin()  # cut off
            return False
        key, types = found
        given = self._begin()
        self.calls.arguments(f"{', ' if given else '{'}{quoted(key)}: ")
        given.add(key)
        yield from self._value(Value(self.calls, types))
        return True

    def _value(self, value: Value) -> Steps[None]:
        reader, format = self.reader, self._format
        if format.newlines:
            yield from reader.literal(("\n",))
        while True:
            end = yield from reader.until(format.value_ends, value.add)
            if end is None:
                return value.cut_off()
            blanks = "" if end.endswith(format.parameter) else (yield from reader.space())
            if (yield from self._ends(end)):
                return value.end()
            value.add(end)
            reader.back(blanks)  # its last newline may belong to the next closing tag

    def _ends(self, end: str) -> Steps[bool]:
        """Whether ``end`` ends a value, by what comes next. An opening tag in its place is put back."""
        reader, format = self.reader, self._format
        if end.endswith(format.parameter):
            key = yield from reader.ahead(_NAME)
            known = self._given is not None and key not in self._given and self.types(key) is not None
            if known:
                reader.back(format.parameter)
            return known
        if end.endswith(format.value_end):
            following = yield from reader.literal(format.after_value, take=False)
            return following is not None or reader.cut_off(format.after_value)
        following = yield from reader.literal(format.markers.closers, take=False)
        ended = following is not None or reader.cut_off(format.markers.closers)
        if ended:
            reader.back(format.call_end)
        return ended

    def _json_body(self) -> Steps[None]:
        head = self.reader.take(1) + (yield from self.reader.space())
        if (yield from self.reader.peek()) not in ('"', "}", ""):
            return
        self._begin()
        self.calls.arguments(head)
        yield from json_span(self.reader, self.calls.arguments, depth=1)
        yield from self.reader.space()
        if (yield from self.reader.literal((self._format.call_end,))) is None:
            self.reader.cut_off((self._format.call_end,))

    def _begin(self) -> set[str]:
        if self._given is None:
            self._given = set()
            self.accept()
            self.calls.start(self._name)
        return self._given

    def _end(self, literal: str) -> None:
        """The call is complete; an outer tag in place of its own closing tag is left to be read."""
        given = self._begin()
        self.calls.arguments("}" if given else "{}")
        if literal == self._format.call_end and literal not in self.markers.closers:
            self.reader.take(len(literal))

    def types(self, key: str) -> Types | None:
        """The declared types of a parameter of this call."""
        return types_of(self.calls.tools.get(self._name, {}), key)
