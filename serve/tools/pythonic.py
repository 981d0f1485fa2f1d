"""The shape of Python calls: ``[f(a=1, b="x"), g()]``, bare or in tags, or one call a line.

Two things are hard. Text that merely looks like it, such as ``[1] Smith (2020)`` or ``[f(x)](url)``, must come back as
it was: a call begins with a name, a bracket, and a keyword argument whose value begins like a literal. And models do
not escape: ``run(cmd='sed -n '1,5p' x')`` is frequent. So a quote ends a string only if what follows may follow a
string there; otherwise it is part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve.events import ContentDelta, ToolCallDelta
from serve.tools.calls import Calls, IdStyle, openai_id
from serve.tools.json_text import REPLACEMENT, quoted
from serve.tools.literal_values import LiteralParser
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")
_WORD = re.compile(r"[\w.+-]*")
_SKIPPED = re.compile(r"[^()'\"]+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"',
    "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_DIGITS = re.compile(r"[0-9a-fA-F]+")
_INTEGER = re.compile(r"[+-]?\d+(?:_\d+)*")
_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_BASED = re.compile(r"[+-]?0[xXoObB][0-9a-fA-F]+")

#: What may follow a value, by where it stands.
_AFTER = {"": ",)", "list": ",])}", "key": ":", "open": ":,}", "value": ",}"}


@dataclass(frozen=True)
class PythonicFormat:
    """A row of the table. lines: whether calls may stand one a line without a list around them."""

    markers: Markers
    lines: bool = False
    ids: IdStyle = openai_id

    def parser(self, calls: Calls) -> MarkupParser:
        """A parser for one choice."""
        return PythonicParser(calls, self)


class PythonicParser(LiteralParser):
    """Parses one choice in a format of this shape."""

    opening = "[({"
    sets = True

    def __init__(self, calls: Calls, format: PythonicFormat) -> None:
        super().__init__(calls, format.markers)
        self._lines = format.lines

    # ------------------------------------------------------------------ calls

    def markup(self, opener: str) -> Steps[None]:
        reader, bare = self.reader, opener == "["
        if not bare:
            yield from reader.space()
        in_list = bare or (yield from reader.literal(("[",))) is not None
        if not in_list and not self._lines:
            return self.reject()
        name = yield from self._call_name()
        if bare and not (self.blank or self.calls.declared(name)):
            name = ""
        begun = False
        while True:
            if not name:
                return self.reject()
            complete = yield from self._call(name)
            if not complete and not (yield from self._recover(in_list, bare)):
                return
            begun = begun or self.begun
            reader.record()
            if (yield from self._last(in_list, begun)):
                return
            name = yield from self._call_name()

    def _call_name(self) -> Steps[str]:
        reader = self.reader
        yield from reader.space()
        name = yield from reader.run(_NAME)
        return name if _starts_name(name) and (yield from reader.literal(("(",))) is not None else ""

    def _call(self, name: str) -> Steps[bool]:
        """The arguments of a call, whose bracket was taken. Whether its closing bracket came."""
        reader = self.reader
        self._name, self.begun, self.head = name, False, ""
        while True:
            yield from reader.space()
            if (yield from reader.literal((")",))) is not None:
                self.emit("{}" if not self.begun else "}")
                return True
            key = yield from reader.run(_KEY)
            yield from reader.space()
            if not _starts_name(key) or (yield from reader.literal(("=",))) is None:
                return False
            self.head = f"{', ' if self.begun else '{'}{quoted(key)}: "
            if not (yield from self.value()):
                return False
            yield from reader.space()
            if (yield from reader.peek()) not in (",", ")"):
                return False
            yield from reader.literal((",",))

    def _recover(self, in_list: bool, bare: bool) -> Steps[bool]:
        """Behind a call that did not end well. Whether to look for another: one that never began hides no others."""
        if self.begun:
            return False
        if self.reader.ended and self.reader.idle and (not bare or self._name in self.calls.tools):
            self.emit("")  # cut off behind its name
            return False
        self.reject()
        return (in_list or self._lines) and (yield from self._skip_call())

    def _skip_call(self) -> Steps[bool]:
        """Content up to the bracket that closes a call which is none. False if there is no such bracket."""
        reader, depth = self.reader, 1
        while depth:
            self.text((yield from reader.run(_SKIPPED)))
            char = yield from reader.peek()
            if char == "":
                return False
            self.text(reader.take(1))
            if char in _PLAIN:
                self.text((yield from reader.run(_PLAIN[char])))
                self.text((yield from reader.literal((char,))) or "")
            depth += {"(": 1, ")": -1}.get(char, 0)
        return True

    def _last(self, in_list: bool, begun: bool) -> Steps[bool]:
        """What separates calls, or ends them. Recording goes on where a further call may follow.

        begun: whether a call of this list has begun; without one its end is content.
        """
        reader = self.reader
        yield from reader.space()
        comma = (yield from reader.literal((",",))) is not None
        yield from reader.space()
        char = yield from reader.peek()
        if in_list and char == "]":
            reader.take(1)
        if begun and (char == "" or char == ("]" if in_list else "<")):
            reader.recorded()
            return True
        if comma and in_list or self._lines and _starts_name(char):
            return False
        self.reject()
        return True

    # ------------------------------------------------------------------ strings and words

    def atom(self, where: str) -> Steps[bool]:
        reader = self.reader
        word = yield from reader.run(_WORD)
        char = yield from reader.peek()
        if char in _PLAIN and word in ("", "r", "R", "u", "U"):
            return (yield from self._string(where, raw=word in ("r", "R")))
        if char == "":
            if word:
                self.emit(word)
            return False
        follows = yield from reader.at_offset((yield from reader.after_space(0)))
        text = _json_word(word)
        if text is None and self.begun and word:
            text = quoted(word)
        if text is None or not self.begun and follows not in _AFTER[where]:
            return False
        self.emit(text)
        return True

    def _string(self, where: str, *, raw: bool) -> Steps[bool]:
        reader = self.reader
        quote = reader.take(1)
        triple = False
        if (yield from reader.peek()) == quote and (yield from reader.at_offset(1)) == quote:
            triple = bool(reader.take(2))
        self.emit('"')
        while (char := (yield from reader.peek())) != "":
            if char == quote:
                if (yield from self._closes(quote, where, triple)):
                    reader.take(3 if triple else 1)
                    self.emit('"')
                    return True
                text = reader.take(1)
            elif char == "\\":
                text = yield from self._escape(raw)
            else:
                text = reader.take(_PLAIN[quote].match(reader.text, reader.at).end() - reader.at)  # type: ignore[union-attr]
            self.emit(quoted(text)[1:-1])
        return False

    def _closes(self, quote: str, where: str, triple: bool) -> Steps[bool]:
        """Whether the quote at the cursor ends the string."""
        reader = self.reader
        if triple:
            return (yield from reader.at_offset(1)) == quote and (yield from reader.at_offset(2)) == quote
        offset = yield from reader.after_space(1)
        char = yield from reader.at_offset(offset)
        if char == "":
            return True
        if char not in _AFTER[where]:
            return False
        if where != "":
            return True
        following = yield from reader.at_offset((yield from reader.after_space(offset + 1)))
        if char == ",":
            return following in ("", ")") or _starts_name(following)
        return following in ("", ",", "]", "<") or self._lines and _starts_name(following)

    def _escape(self, raw: bool) -> Steps[str]:
        reader = self.reader
        kind = yield from reader.at_offset(1)
        if raw or kind not in _ESCAPES and kind not in _HEX:
            return reader.take(2 if kind else 1)
        if kind in _ESCAPES:
            reader.take(2)
            return _ESCAPES[kind]
        return (yield from self._code(_HEX[kind]))

    def _code(self, digits: int) -> Steps[str]:
        """An escape by code, ``\\u00e9``, with its other half if it is one of a pair; as it stands if it is none."""
        reader, size = self.reader, digits + 2
        yield from reader.at_offset(size - 1)
        code = _code_of(reader.text[reader.at : reader.at + size], digits)
        if code is None:
            return reader.take(1)
        if 0xD800 <= code < 0xDC00 and (yield from reader.at_offset(size)) == "\\":
            yield from reader.at_offset(2 * size - 1)
            low = _code_of(reader.text[reader.at + size : reader.at + 2 * size], digits)
            if low is not None and 0xDC00 <= low < 0xE000:
                reader.take(2 * size)
                return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
        reader.take(size)
        return REPLACEMENT if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)


def literal_json(word: str) -> str | None:
    """A whole Python literal as JSON text; None if it is none."""
    before, calls = '{"x": ', Calls()
    parser = PythonicParser(calls, PythonicFormat(Markers(("[",))))
    events = (*parser.feed(f"[f(x={word})]"), *parser.flush())
    found = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    plain = not any(isinstance(event, ContentDelta) for event in events)
    return (
        found[len(before) : -1]
        if plain and found.startswith(before) and found.endswith("}") and calls.count == 1
        else None
    )


def _starts_name(text: str) -> bool:
    return text[:1].isidentifier()


def _code_of(escape: str, digits: int) -> int | None:
    text = escape[2:]
    return int(text, 16) if escape[:1] == "\\" and len(text) == digits and _DIGITS.fullmatch(text) else None


def _json_word(word: str) -> str | None:
    """The JSON text of a number or a constant."""
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(word):
        digits = word.lstrip("+-").replace("_", "").lstrip("0") or "0"
        return "-" + digits if word.startswith("-") and digits != "0" else digits
    if _FLOAT.fullmatch(word):
        number = float(word)
        return None if number in (float("inf"), float("-inf")) else _float_text(word, number)
    return str(int(word, 0)) if _BASED.fullmatch(word) and _is_based(word) else None


def _float_text(word: str, number: float) -> str:
    """As it is written where JSON allows it: ``0.10`` is not ``0.1`` to everybody."""
    return word if re.fullmatch(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", word) else repr(number)


def _is_based(word: str) -> bool:
    try:
        return len(word) < 64 and bool(int(word, 0) or True)
    except ValueError:
        return False
