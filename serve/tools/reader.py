"""A cursor over text that arrives in pieces: what a format's grammar reads through.

The hard thing is to write a grammar once and have it not notice where the text was cut. So a grammar is a generator: it
asks the reader for what comes next, and when the answer is not there yet it yields, to be resumed with more text or
with ``ended`` set. What a method returns depends on the text alone, never on the pieces it came in. That is split
invariance, and it has only this file to be proved in.

A grammar that is not yet sure that it reads a call records what it takes (``record``): if it was none, all of that is
content (``recorded``). Nothing is copied twice: taken text goes to a list, and what stays unread between two pieces is
at most a proper prefix of a literal, so the cost is linear whatever the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from postproc_workers.stop_strings import Literals

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A grammar's method: yields for more text, returns a ``T``."""

_SPACE = re.compile(r"\s*")

#: Blanks that ``after_space`` looks past. A bound keeps what stays unread short; no format indents deeper than this.
MAX_BLANKS = 64
#: Longest run that is looked at without taking it: a name.
MAX_AHEAD = 128


class Reader:
    """Text of one choice, read once from front to back.

    at: offset in ``text`` of the next character. ended: no more text will come.
    lane: while a grammar waits in the middle of a long text, a shortcut that takes a whole piece of it without the
    grammar being resumed, or takes nothing and returns False.
    """

    __slots__ = ("at", "ended", "lane", "text", "_kept")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.lane: Callable[[str], bool] | None = None
        self._kept: list[str] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is unread."""
        return self.at == len(self.text)

    def push(self, text: str) -> None:
        """Append ``text`` to what is unread."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    @property
    def recording(self) -> bool:
        """Whether what is taken is recorded."""
        return self._kept is not None

    def record(self) -> None:
        """Start to record what is taken."""
        self._kept = []

    def recorded(self) -> str:
        """What was taken since ``record``; recording ends."""
        kept, self._kept = self._kept, None
        return "".join(kept) if kept else ""

    def take(self, count: int) -> str:
        """The next ``count`` characters, which must be there."""
        piece = self.text[self.at : self.at + count]
        self.at += count
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """The next character, not taken; "" at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the longest run that ``pattern`` (a repeated character class) matches here."""
        pieces = []
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None and found.end() > self.at:
                pieces.append(self.take(found.end() - self.at))
            if self.at < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def space(self) -> Steps[str]:
        """Take white space."""
        return (yield from self.run(_SPACE))

    def literal(self, literals: tuple[str, ...], *, take: bool = True) -> Steps[str | None]:
        """The longest of ``literals`` that comes next, taken unless ``take`` is false; None if none does."""
        longest = max(map(len, literals), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.ended or not any(len(each) > len(rest) and each.startswith(rest) for each in literals):
                break
            yield
        found = max((each for each in literals if rest.startswith(each)), key=len, default=None)
        if found is not None and take:
            self.take(len(found))
        return found

    def cut_off(self, literals: tuple[str, ...]) -> bool:
        """Whether the text ended inside of one of ``literals``; takes that beginning. An end right here counts too."""
        rest = self.text[self.at :]
        found = self.ended and any(len(each) > len(rest) and each.startswith(rest) for each in literals)
        if found:
            self.take(len(rest))
        return found

    def back(self, text: str) -> None:
        """Put back ``text``, which was taken last and not recorded."""
        start = self.at - len(text)
        if start < 0 or not self.text.startswith(text, start):
            self.text, start = text + self.text[self.at :], 0
        self.at = start

    def ahead(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The run that ``pattern`` matches here, not taken; of a long one only the beginning."""
        while True:
            found = pattern.match(self.text, self.at)
            end = found.end() if found is not None else self.at
            if end < len(self.text) or self.ended or end - self.at > MAX_AHEAD:
                return self.text[self.at : min(end, self.at + MAX_AHEAD)]
            yield

    def after_space(self, offset: int) -> Steps[int]:
        """Where, counted from the cursor, the next visible character at or behind ``offset`` is; nothing is taken.

        Looks past MAX_BLANKS blanks at most, then answers with the place it got to.
        """
        limit = offset + MAX_BLANKS
        while True:
            if self.at + offset == len(self.text):
                if self.ended:
                    return offset
                yield
            elif self.text[self.at + offset].isspace() and offset < limit:
                offset += 1
            else:
                return offset

    def at_offset(self, offset: int) -> Steps[str]:
        """The character ``offset`` behind the cursor, not taken; "" behind the end."""
        while self.at + offset >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at + offset]

    def until(self, literals: Literals, out: Callable[[str], None], *, record: bool = False) -> Steps[str | None]:
        """Hand text to ``out`` up to the first literal that completes; takes and returns it. None at the end.

        Only a proper prefix of a literal waits. record: start to record with the literal.
        """
        node = known = 0

        def lane(text: str) -> bool:
            if literals.first in text and literals.search(text) is not None:
                return False
            out(text)
            return True

        while True:
            node, position, literal = literals.scan(node, self.text, self.at + known)
            known = literals.held(node) if literal is None else len(literal)
            decided = position - known - self.at if literal is not None or not self.ended else position - self.at
            if decided > 0:
                out(self.take(decided))
            if literal is not None:
                if record:
                    self.record()
                self.take(len(literal))
            if literal is not None or self.ended:
                return literal
            self.lane = lane if not known and not self.recording else None
            yield
            self.lane = None
