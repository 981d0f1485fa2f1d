"""Stop strings that leave a reasoning block alone: they are looked for in what the client is shown as the answer.

The worker looks for stops in raw text, before any parser. A gate in front of the matcher knows the block's markers and
lets text inside the block pass unread:

    BEFORE ──opening marker──▶ INSIDE ──closing marker──▶ AFTER
       └────anything else────────────────────────────────▶ AFTER

The hard thing is BEFORE. What may still become the opening marker must not be looked at, so it waits, and it is read
once it has turned out to be something else. A stop found in it counts as completed by the character that decided: the
tokens before that one may have been accounted for already, and which token ends an output must not depend on the cut
into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from postproc_workers.stop_strings import Literals, StopMatcher


@dataclass(frozen=True, slots=True)
class StopGate:
    """Where reasoning begins and ends. inside: whether the output starts in it. ValueError without markers."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    inside: bool = False

    def __post_init__(self) -> None:
        if not all(self.opens) or not all(self.closes) or not self.opens or not self.closes:
            raise ValueError("stop_gate: opens and closes need a marker each, none of them empty")


class _Stage(Enum):
    BEFORE = "before"
    INSIDE = "inside"
    AFTER = "after"


class GatedMatcher:
    """A ``StopMatcher`` behind a gate; the same interface."""

    __slots__ = ("_closes", "_gate", "_lead", "_matcher", "_node", "_stage", "match_end")

    def __init__(self, matcher: StopMatcher, gate: StopGate) -> None:
        self._matcher, self._gate = matcher, gate
        self._closes = Literals(gate.closes)
        self._stage = _Stage.INSIDE if gate.inside else _Stage.BEFORE
        self._node = 0
        #: text that may yet become the opening marker, white space before it included
        self._lead = ""
        #: see StopMatcher
        self.match_end = 0

    @property
    def matched(self) -> str | None:
        """The stop that completed, or None."""
        return self._matcher.matched

    @property
    def held(self) -> str:
        """What is held back."""
        return self._lead + self._matcher.held

    def feed(self, text: str) -> str:
        """Take the next text of the output and return what may be sent; "" always after a match."""
        sent, start = "", 0
        if self._stage is _Stage.BEFORE:
            sent, start = self._before(text)
        if self._stage is _Stage.INSIDE and start < len(text):
            end = self._inside(text, start)
            sent, start = sent + text[start:end], end
        if self._stage is _Stage.AFTER and start < len(text):
            sent += self._match(text[start:], start)
        return sent

    def flush(self) -> str:
        """What was held when no stop completed; "" after a match. Final and idempotent."""
        lead, self._lead = self._lead, ""
        return lead + self._matcher.flush()

    def _before(self, text: str) -> tuple[str, int]:
        """(what may be sent, characters of ``text`` that are read)."""
        for at, char in enumerate(text):
            self._lead += char
            begun = self._lead.lstrip()
            if begun in self._gate.opens:
                self._stage, lead, self._lead = _Stage.INSIDE, self._lead, ""
                return lead, at + 1
            if not any(marker.startswith(begun) for marker in self._gate.opens):
                self._stage, lead, self._lead = _Stage.AFTER, self._lead, ""
                # Whatever completes in the lead was decided by this character.
                return self._match(lead, at + 1 - len(lead), at + 1), at + 1
        return "", len(text)

    def _inside(self, text: str, start: int) -> int:
        """Where the block ends in ``text``, its closing marker included; the end of the text if it does not."""
        self._node, end, literal = self._closes.scan(self._node, text, start)
        if literal is not None:
            self._stage = _Stage.AFTER
        return end

    def _match(self, text: str, start: int, decided: int = 0) -> str:
        """Look for stops in ``text``, which begins at ``start`` of the text fed."""
        if self._matcher.matched is not None:
            return ""
        sent = self._matcher.feed(text)
        if self._matcher.matched is not None:
            self.match_end = max(start + self._matcher.match_end, decided)
        return sent


def gated(matcher: StopMatcher, gate: StopGate | None) -> StopMatcher | GatedMatcher:
    """The matcher, behind the gate if there is one."""
    return matcher if gate is None else GatedMatcher(matcher, gate)


def read_gate(fields: Sequence[object] | None) -> StopGate | None:
    """A gate from the plain data of a spec, [inside, opens, closes]; ValueError names ``stop_gate``."""
    if fields is None:
        return None
    if len(fields) != 3 or not isinstance(fields[0], bool):
        raise ValueError("stop_gate: [inside, opens, closes] is needed")
    inside, opens, closes = fields
    for markers in (opens, closes):
        if not isinstance(markers, list | tuple) or not all(isinstance(marker, str) for marker in markers):
            raise ValueError("stop_gate: lists of strings are needed")
    return StopGate(tuple(opens), tuple(closes), inside)  # type: ignore[arg-type]
