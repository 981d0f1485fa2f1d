"""The shape of Gemma's calls: ``<|tool_call>call:f{k:<|"|>text<|"|>,n:1,l:[<|"|>a<|"|>]}<tool_call|>``.

Keys are bare, strings stand between ``<|"|>`` with nothing escaped, everything else is a word up to the next comma or
bracket.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from postproc_workers.stop_strings import Literals
from serve.tools.calls import Calls, IdStyle, openai_id
from serve.tools.json_text import json_string, quoted
from serve.tools.literal_values import LiteralParser
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps
from serve.tools.schema_types import Types, typed_json

DELIMITER = '<|"|>'

_END = Literals((DELIMITER,))
_NAME = re.compile(r"[\w.:/-]*")
_WORD = {"key": re.compile(r"[^:,{}\[\]<\"]*"), "value": re.compile(r"[^,{}\[\]<\"]*")}
_BARE: Types = frozenset({"null", "boolean", "number"})


@dataclass(frozen=True)
class GemmaFormat:
    """A row of the table. label: what stands before the name."""

    markers: Markers
    label: str = "call:"
    ids: IdStyle = openai_id

    def parser(self, calls: Calls) -> MarkupParser:
        """A parser for one choice."""
        return GemmaParser(calls, self)


class GemmaParser(LiteralParser):
    """Parses one choice in a format of this shape."""

    def __init__(self, calls: Calls, format: GemmaFormat) -> None:
        super().__init__(calls, format.markers)
        self._label = format.label

    def markup(self, opener: str) -> Steps[None]:
        reader = self.reader
        self.begun, self.head = False, ""
        yield from reader.space()
        yield from reader.literal((self._label,))
        self._name = yield from reader.run(_NAME)
        yield from reader.space()
        if not self._name or (yield from reader.peek()) != "{":
            return self.reject()
        yield from self.value()
        if not self.begun:
            if reader.ended and reader.idle:
                self.emit("")  # cut off behind its name
            else:
                self.reject()

    def atom(self, where: str) -> Steps[bool]:
        reader = self.reader
        if (yield from reader.literal((DELIMITER,))) is not None:
            self.emit('"')
            if (yield from reader.until(_END, self._text)) is None:
                return False
            self.emit('"')
            return True
        if (yield from reader.peek()) == '"':
            reader.take(1)
            self.emit('"')
            complete = yield from json_string(reader, self._text)
            if complete:
                self.emit('"')
            return complete
        keyed = where in ("key", "open")
        word = (yield from reader.run(_WORD["key" if keyed else "value"])).strip()
        if (yield from reader.peek()) == "":
            if word:
                self.emit(word)
            return False
        self.emit(quoted(word) if keyed else typed_json(word, _BARE))
        return not keyed or bool(word)

    def _text(self, text: str) -> None:
        self.emit(quoted(text)[1:-1])
