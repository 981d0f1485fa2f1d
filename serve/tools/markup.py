"""Text with calls in it: what all formats share. Where a call may begin, what is content, what belongs to the markup.

    text ──opener──▶ the format's grammar ──▶ call begun: ``accept``   its raw text is gone, arguments stream
                                          └─▶ no call:    ``reject``   all that was read comes back as content

White space beside a call is the template's: between two calls, before a call that nothing precedes, after the last
one. It waits until it is known what follows. White space beside text stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from postproc_workers.stop_strings import Literals
from serve.events import ContentDelta, Event
from serve.tools.calls import Calls
from serve.tools.reader import Reader, Steps


@dataclass(frozen=True)
class Markers:
    """The literals that a format's grammar hangs on.

    openers: a call may begin here. inner: a further call may, once one was read between openers and closers.
    closers: end what an opener began, the outermost last; before a call they are text. dropped: never part of content.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @cached_property
    def outside(self) -> Literals:
        """What text is searched for before a call."""
        return Literals(self.openers + self.dropped)

    @cached_property
    def inside(self) -> Literals:
        """What text is searched for after a call, until the outermost closer."""
        return Literals(self.openers + self.inner + self.closers + self.dropped)


def literals_of(row: Any) -> Iterator[str]:
    """Every literal that a row of the table holds, in it or in its markers."""
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Markers):
            yield from literals_of(value)
        elif isinstance(value, str | tuple):
            yield from filter(None, (value,) if isinstance(value, str) else value)


class MarkupParser:
    """Raw text of one choice -> content and calls. A shape of format is a subclass with its own ``markup``.

    blank: no content so far.
    """

    def __init__(self, calls: Calls, markers: Markers) -> None:
        self.calls, self.markers, self.reader = calls, markers, Reader()
        self.blank = True
        self._enter(inside=False)
        #: White space that may belong to the markup; None where text has begun.
        self._gap: list[str] | None = []
        self._after_call = False
        self._in_text = False
        self._steps: Steps[None] | None = self._run()
        #: Whether text without a marker's first character may pass as it is.
        self._plain = False

    def feed(self, text: str) -> Sequence[Event]:
        """Events that ``text`` completes."""
        if self._plain and (self._first not in text or self._search(text) is None):
            return (ContentDelta(text),)  # the fast lane: most deltas of most streams
        if (lane := self.reader.lane) is not None and text and lane(text):
            self._plain = self._in_text and self._gap is None
            return self.calls.take()
        self.reader.push(text)
        self._resume()
        self._plain = self._in_text and self._gap is None and self.reader.idle
        return self.calls.take()

    def flush(self) -> Sequence[Event]:
        """What was held, as events; final and idempotent."""
        self.reader.ended, self._plain = True, False
        if self._in_text and self._inside and self._gap is not None:
            self.reader.cut_off(self.markers.closers)  # part of the last call's markup, not of an answer
        self._resume()
        return self.calls.take()

    def markup(self, opener: str) -> Steps[None]:
        """Read on behind ``opener``; ``accept`` once a call has begun, ``reject`` otherwise."""
        raise NotImplementedError

    def accept(self) -> None:
        """What was recorded is a call's markup; white space around it is no content."""
        self.reader.recorded()
        self._gap, self._after_call = [], True
        self._enter(inside=bool(self.markers.closers or self.markers.inner))

    def reject(self) -> None:
        """What was recorded is content."""
        self.text(self.reader.recorded())

    def text(self, text: str) -> None:
        """Content, or white space that may turn out not to be."""
        if self._gap is not None:
            if not text or text.isspace():
                self._gap.append(text)
                return
            self._release()
        self.calls.content(text)
        self.blank = False

    def _release(self) -> None:
        if self._gap is not None:
            self.calls.content("".join(self._gap))
        self._gap, self._after_call = None, False

    def _run(self) -> Steps[None]:
        while True:
            self._in_text = True
            literal = yield from self.reader.until(self._literals, self.text, record=True)
            self._in_text = False
            if literal is None:
                break
            if literal in self.markers.dropped:
                self.reader.recorded()
            elif self._inside and literal in self.markers.closers:
                self.accept()
                self._enter(inside=literal != self.markers.closers[-1])
            else:
                yield from self.markup(literal)
        if not self._after_call:
            self._release()

    def _enter(self, inside: bool) -> None:
        self._inside = inside
        self._literals = self.markers.inside if inside else self.markers.outside
        self._first, self._search = self._literals.first, self._literals.search

    def _resume(self) -> None:
        if self._steps is not None:
            next(self._steps, None)
            if self.reader.ended:
                self._steps = None
