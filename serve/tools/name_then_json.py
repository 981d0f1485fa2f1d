"""The shape of a name in a header of special tokens, and JSON arguments behind it.

    <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>     [TOOL_CALLS]f[ARGS]{...}

The header is short and has an end of its own, so the call begins as soon as its arguments look like an object. Their
text streams as it is generated; special tokens inside of strings are text of the strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve.tools.calls import Calls, IdStyle, openai_id
from serve.tools.json_objects import JsonFormat, JsonParser
from serve.tools.json_text import json_span
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps

_HEADER = re.compile(r"[^\s<\[{`]*")


@dataclass(frozen=True)
class NamedFormat:
    """A row of the table.

    separators: one of them ends the header; "" makes it optional. sections: openers that only wrap calls. label: what
    may stand before the name. header: groups ``name`` and, if the model counts its calls, ``index``. id_mark: what
    stands before an id of the model's own. tail: what may follow the arguments. objects: whether JSON objects with
    names may come instead.
    """

    markers: Markers
    separators: tuple[str, ...]
    sections: tuple[str, ...] = ()
    label: str = ""
    header: re.Pattern[str] = re.compile(r"(?P<name>[\w.:/-]+)")
    id_mark: str = ""
    tail: str = ""
    objects: bool = False
    ids: IdStyle = openai_id

    def parser(self, calls: Calls) -> MarkupParser:
        """A parser for one choice."""
        return NamedParser(calls, self)


@dataclass
class _Header:
    """name is "" if it was no header. complete: its end was seen, so the name is whole."""

    name: str = ""
    native_id: str | None = None
    complete: bool = False


class NamedParser(JsonParser):
    """Parses one choice in a format of this shape."""

    def __init__(self, calls: Calls, format: NamedFormat) -> None:
        super().__init__(calls, JsonFormat(format.markers))
        self._format = format
        self._call_openers = tuple(each for each in format.markers.openers if each not in format.sections)

    def markup(self, opener: str) -> Steps[None]:
        reader, format = self.reader, self._format
        yield from reader.space()
        if opener in format.sections and (yield from reader.literal(self._call_openers)) is None:
            return self.reject()
        if format.objects and (yield from reader.peek()) in ("{", "["):
            return (yield from super().markup(opener))
        header = yield from self._header()
        if not header.name or not (yield from self._arguments_of(header)):
            self.reject()

    def _header(self) -> Steps[_Header]:
        reader, format = self.reader, self._format
        yield from reader.space()
        if format.label:
            yield from reader.literal((format.label,))
        found = format.header.fullmatch((yield from reader.run(_HEADER)))
        header = self._read(found) if found is not None else _Header()
        if format.id_mark and (yield from reader.literal((format.id_mark,))) is not None:
            header.native_id = (yield from reader.run(_HEADER)) or None
        yield from reader.space()
        separators = tuple(filter(None, format.separators))
        separator = yield from reader.literal(separators)
        begun = separator is None and not reader.idle and reader.cut_off(separators)
        header.complete = separator is not None or begun
        if not header.complete and "" not in format.separators:
            return _Header()
        yield from reader.space()
        return header

    def _read(self, found: re.Match[str]) -> _Header:
        groups = found.groupdict()
        index, tools = groups.get("index"), self.calls.tools
        # Some models leave the name out and only count; with one tool that is enough.
        name = groups.get("name") or (next(iter(tools)) if index and len(tools) == 1 else "")
        return _Header(name, f"functions.{name}:{index}" if index else None)

    def _arguments_of(self, header: _Header) -> Steps[bool]:
        reader, format = self.reader, self._format
        if (yield from reader.literal(format.markers.closers, take=False)) is not None:
            return self._begin_named(header, "{}")
        char = yield from reader.peek()
        if char == "" and header.complete:
            return self._begin_named(header, "")  # cut off behind the header
        if char != "{":
            return False
        head = reader.take(1) + (yield from reader.space())
        if (yield from reader.peek()) not in ('"', "}", ""):
            return False
        self._begin_named(header, head)
        yield from json_span(reader, self.calls.arguments, depth=1)
        if format.tail:
            yield from reader.space()
            if (yield from reader.literal((format.tail,))) is None:
                reader.cut_off((format.tail,))
        return True

    def _begin_named(self, header: _Header, arguments: str) -> bool:
        self.accept()
        self.calls.start(header.name, header.native_id)
        self.calls.arguments(arguments)
        return True
