"""The shape of a name and then pairs of tags, one for a parameter's name and one for its value.

    <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>

Newlines and blanks between the tags are the template's. Values are literal and typed as in ``xml_parameters.py``,
which does all that follows a parameter's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve.tools.calls import Calls
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps
from serve.tools.schema_types import Types
from serve.tools.xml_parameters import XmlFormat, XmlParser

_NAME = re.compile(r"[\w.:/-]*")
_KEY = re.compile(r"[^<]*")


@dataclass(frozen=True)
class PairFormat(XmlFormat):
    """A row of the table. key_end and value come between a parameter's name and its value."""

    key_end: str = ""
    value: str = ""

    def parser(self, calls: Calls) -> MarkupParser:
        """A parser for one choice."""
        return PairParser(calls, self)


def pair_format(call: str, call_end: str, key: tuple[str, str], value: tuple[str, str]) -> PairFormat:
    """A row from its tags."""
    markers = Markers((call,), (call_end,))
    return PairFormat(markers, call, call_end, key[0], value[1], key_end=key[1], value=value[0])


class PairParser(XmlParser):
    """Parses one choice in a format of this shape."""

    def __init__(self, calls: Calls, format: PairFormat) -> None:
        super().__init__(calls, format)
        self._pairs = format

    def name(self, opener: str) -> Steps[str]:
        yield from self.reader.space()
        name = yield from self.reader.run(_NAME)
        return name if (yield from self.reader.peek()) else ""  # at the end it may be cut off

    def parameter(self) -> Steps[tuple[str, Types | None] | None]:
        reader, pairs = self.reader, self._pairs
        key = (yield from reader.run(_KEY)).strip()
        if (yield from reader.literal((pairs.key_end,))) is None and reader.cut_off((pairs.key_end,)):
            return None
        yield from reader.space()
        if (yield from reader.literal((pairs.value,))) is None:
            reader.cut_off((pairs.value,))
            return None
        return (key, self.types(key)) if key else None
