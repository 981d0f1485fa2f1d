"""Reasoning between two markers, and the answer around it.

    before ──opening marker──▶ inside ──closing marker──▶ after

Where a stream begins is not the model's affair: a chat template may open the block in the prompt, or open and close it
to switch reasoning off. So the end of the rendered prompt decides (``initial_stage``), and the format's own habit only
where the prompt says nothing. After the block closes, tags are text.

The newlines that templates put around markers belong to neither text. They wait: those behind a marker are dropped,
those before one as well, and as soon as anything else follows they are sent. Nothing else vanishes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from postproc_workers.stop_strings import Literals, LiteralScanner
from serve.events import ContentDelta, Event, ReasoningDelta

#: What begins or ends a turn in rendered prompts, such as ``<|im_end|>``, ``[/INST]``, ``]~b]`` or ``<turn|>``.
_TURN = re.compile(
    r"<[|｜][^<>|｜]{1,64}[|｜]?>|<[^<>|｜\s]{1,64}[|｜]>|\[/?[A-Z_]{2,32}\]|\]~!?b[\[\]]|\[e~\["
    r"|<(?:seed:[be]os|[be]os|/?s|SPECIAL_\d+|(?:start|end)_of_turn)>"
)


class Stage(Enum):
    """Where a stream is."""

    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


@dataclass(frozen=True)
class ReasoningFormat:
    """A row of the table.

    opens, closes: the markers. label: what may stand right behind an opening marker and goes with it. inside: whether
    a stream starts inside when the prompt is known and says nothing; inside_unknown: the same when it is not known.
    ends: markers that end the block and belong to what follows. dropped: markers around the answer. trimmed: white
    space that goes with a marker. keeps_tags: whether all of it, tags included, is content.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    label: str = ""
    inside: bool = False
    inside_unknown: bool = False
    ends: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    trimmed: str = "\n"
    keeps_tags: bool = False

    def parser(self, prompt_tail: str = "") -> ReasoningParser | TaggedContent:
        """A parser for one choice. prompt_tail: the end of the rendered prompt, "" if it is not known."""
        stage = self.initial_stage(prompt_tail)
        if self.keeps_tags:
            return TaggedContent(self, stage)
        behind = prompt_tail[_end_of_last(self.opens, prompt_tail) :]
        return ReasoningParser(self, stage, label_due=stage is Stage.INSIDE and not behind.strip())

    def initial_stage(self, prompt_tail: str) -> Stage:
        """Where a stream starts: the last marker of the prompt decides, unless a turn begins or ends behind it."""
        opened = _end_of_last(self.opens, prompt_tail)
        closed = _end_of_last(self.closes, prompt_tail)
        last = max(opened, closed)
        if last >= 0 and _TURN.search(prompt_tail, last) is None:
            return Stage.INSIDE if opened > closed else Stage.AFTER
        starts_inside = self.inside if prompt_tail else self.inside or self.inside_unknown
        return Stage.INSIDE if starts_inside else Stage.BEFORE

    @cached_property
    def literals(self) -> dict[Stage, Literals | None]:
        """What each stage looks for."""
        return {
            Stage.BEFORE: Literals(self.opens + self.dropped),
            Stage.INSIDE: Literals(self.opens + self.closes + self.ends),
            Stage.AFTER: Literals(self.dropped) if self.dropped else None,
        }


def _end_of_last(markers: tuple[str, ...], text: str) -> int:
    """Offset behind the last of ``markers``; white space at their ends need not be there. -1 if there is none."""
    return max((at + len(marker) for marker in map(str.strip, markers) if (at := text.rfind(marker)) >= 0), default=-1)


class ReasoningParser:
    """Raw text of one choice -> reasoning and content, never both in one delta.

    stage: where the stream is. span: offsets, in characters of the raw text, behind the opening and before the closing
    marker; its end is None while the block is open, and the whole is None while there is none.
    """

    def __init__(self, format: ReasoningFormat, stage: Stage, *, label_due: bool = False) -> None:
        self._format, self._trimmed, self.stage = format, format.trimmed, stage
        self.span: tuple[int, int | None] | None = (0, None) if stage is Stage.INSIDE else None
        self._events: list[Event] = []
        #: Characters of the raw text before what the scanner holds.
        self._at = 0
        #: White space that goes if a marker follows.
        self._held: list[str] = []
        #: Whether white space is dropped: directly behind a marker, be it one in the prompt.
        self._lead = stage is Stage.INSIDE
        #: Whether an opening marker would be the first thing inside.
        self._may_open = stage is Stage.INSIDE
        #: What is left of a label that may come next.
        self._label = format.label if label_due else ""
        #: Whether nothing waits: then text without a marker passes as it is.
        self._plain = False
        self._enter(stage)

    @property
    def passes(self) -> bool:
        """Whether from now on all text is content as it is."""
        return self._scanner is None and not self._lead

    def feed(self, text: str) -> Sequence[Event]:
        """Events that ``text`` completes."""
        plain = self._plain and text[-1:] not in self._trimmed
        if plain and (self._literals.first not in text or self._literals.search(text) is None):
            self._at += len(text)
            return (self._kind(text),)  # the fast lane: most deltas
        while text:
            text = self._scan(text)
        self._plain = self._scanner is not None and not (self._lead or self._held or self._label or self._scanner.held)
        return self._take()

    def flush(self) -> Sequence[Event]:
        """What was held, as events; final and idempotent."""
        self._plain = False
        if self._scanner is not None and (held := self._scanner.flush()):
            self._text(held)
        self._emit("".join(self._held))
        self._held = []
        if self.span is not None and self.span[1] is None:
            self.span = (self.span[0], self._at)
        return self._take()

    def _scan(self, text: str) -> str:
        """Read up to the first marker that changes the stage; returns what lies behind it."""
        if self._scanner is None:
            self._text(text)
            return ""
        parts = self._scanner.feed(text)
        for number, (before, literal) in enumerate(parts):
            if before:
                self._text(before)
            if literal is not None and self._marker(literal):
                rest = "".join(text + (marker or "") for text, marker in parts[number + 1 :]) + self._scanner.flush()
                rest = literal + rest if literal in self._format.ends else rest
                self._enter(self.stage)
                return rest
        return ""

    def _marker(self, literal: str) -> bool:
        """Handle a marker. Whether the stage changed: then ``self.stage`` is the new one."""
        format, stage = self._format, self.stage
        if self._label:  # it did not come whole
            text, self._label, self._held = "".join(self._held), "", []
            self._deliver(text)
        if stage is Stage.INSIDE and literal in format.opens:
            if not self._may_open:
                self._text(literal)
                return False
            self.span = (self._at + len(literal), None)
        elif stage is Stage.INSIDE:
            self.span = (self.span[0] if self.span else 0, self._at)
            self.stage = Stage.AFTER
            if literal in format.ends:
                self._held = []
                return True
        elif literal in format.opens and stage is Stage.BEFORE:
            self.span = (self._at + len(literal), None)
            self.stage = Stage.INSIDE
        else:
            self.stage = Stage.AFTER
        self._at += len(literal)
        self._held, self._lead, self._may_open = [], True, False
        self._label = format.label if self.stage is Stage.INSIDE else ""
        return self.stage is not stage

    def _text(self, text: str) -> None:
        """Text of this stage."""
        self._at += len(text)
        self._deliver(self._unlabelled(text) if self._label else text)

    def _deliver(self, text: str) -> None:
        """Emit text without what may go with a marker."""
        if self._lead:
            text = text.lstrip(self._trimmed)
            if not text:
                return
            self._lead = False
        kept = text.rstrip(self._trimmed) if self._scanner is not None else text
        if kept:
            self._may_open = False
            self._release()
            self._emit(kept)
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])

    def _unlabelled(self, text: str) -> str:
        """``text`` without the label; what may be its beginning waits in front of what is held."""
        text = "".join(self._held) + text
        self._held = []
        if text != self._label and self._label.startswith(text):
            self._held = [text]
            return ""
        label, self._label = self._label, ""
        return text.removeprefix(label)

    def _release(self) -> None:
        if self._held:
            self._emit("".join(self._held))
            self._held = []

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(self._kind(text))

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._kind: type[ContentDelta] | type[ReasoningDelta] = (
            ReasoningDelta if stage is Stage.INSIDE else ContentDelta
        )
        literals = self._format.literals[stage]
        self._scanner = LiteralScanner(literals) if literals is not None else None
        if literals is not None:
            self._literals = literals

    def _take(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return joined(events) if len(events) > 1 else events


def joined(events: Sequence[Event]) -> list[Event]:
    """Neighbouring deltas of one text as one delta."""
    result: list[Event] = []
    pieces: list[str] = []
    for number, event in enumerate(events):
        if not isinstance(event, ContentDelta | ReasoningDelta):
            result.append(event)
            continue
        pieces.append(event.text)
        following = events[number + 1] if number + 1 < len(events) else None
        if type(following) is not type(event):
            result.append(type(event)("".join(pieces)))
            pieces = []
    return result


class TaggedContent:
    """All text is content, tags included; a block that the prompt opened gets its opening tag back.

    stage and span are always those of content.
    """

    stage = Stage.AFTER
    span: tuple[int, int | None] | None = None

    def __init__(self, format: ReasoningFormat, stage: Stage) -> None:
        self._tag = format.opens[0]
        #: Text that may be the model's own opening tag; None once that is decided.
        self._seen: str | None = "" if stage is Stage.INSIDE else None

    @property
    def passes(self) -> bool:
        """Whether from now on all text is content as it is."""
        return self._seen is None

    def feed(self, text: str) -> Sequence[Event]:
        """Events that ``text`` completes."""
        if self._seen is None:
            return [ContentDelta(text)] if text else []
        self._seen += text
        return [] if self._tag.startswith(self._seen) and self._seen != self._tag else self._decide()

    def flush(self) -> Sequence[Event]:
        """What was held, as events; final and idempotent."""
        return self._decide() if self._seen else []

    def _decide(self) -> Sequence[Event]:
        seen, self._seen = self._seen or "", None
        return [ContentDelta(seen if seen.startswith(self._tag) else self._tag + seen)]
