"""text -> text, or the stop that completed: stop strings, and the literal search under them and under marker parsers.

The hard thing is to be exact without delay. Text arrives in pieces of any size, a stop may lie across many of them,
and whatever was sent cannot be taken back. So a piece of text may leave as soon as, and not before, no stop can begin
in it any more: what is held is the longest suffix that is a *proper prefix* of a stop, and nothing else. A fixed
hold-back of ``len(longest stop) - 1`` characters would be simpler and would delay every token of every stream.

Which stop wins? The one that *completes* first, and of several completing at one character the longest. "The leftmost
wins" sounds the same and is not split-invariant: with stops ``abcd`` and ``bc`` the text ``abc`` would have to wait
for a ``d``. Completion order never waits.

The search is the automaton of Aho and Corasick. Its state is a node of the trie of all literals: the longest suffix of
the text that is a prefix of one of them, which is exactly the text to hold. A node has a failure link to its own
longest proper suffix in the trie; a character that does not fit follows the links. Each link shortens what is held and
each character lengthens it by one at most, so the work is at most two moves a character, whatever the near-misses:
``aaaa...`` against ``aaaab`` is linear. At the root nothing is held, and a compiled character class jumps to the next
first character of a literal; most text has none and is returned as it came. And since most text is that of one token,
and tokens repeat, texts without any are remembered: a look into a set instead of a search.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

#: Stop strings a request may have.
MAX_STOPS = 16
#: Characters of all stop strings of a request, up to which what was compiled of them is kept for the next one.
MAX_SHARED = 256
#: Texts that one ``Literals`` remembers, and characters of one.
MAX_CLEAR, MAX_CLEAR_LENGTH = 1024, 16

_ROOT = 0
#: A matcher's state after its match. Not the root, so that the fast path is closed and costs no test of its own.
_DONE = -1


class Literals:
    """Literals compiled for search: one is shared by every scanner of a request or of a parser.

    clear: texts in which no literal begins, as they turned up. One that is not in it may be clear too: see ``absent``.
    """

    __slots__ = ("_children", "_depths", "_ends", "_fails", "clear", "first", "search")

    def __init__(self, literals: Iterable[str]) -> None:
        """Raises ValueError if there is no literal or an empty one."""
        self._children: list[dict[str, int]] = [{}]
        #: By node: the longest literal that ends there, or None.
        self._ends: list[str | None] = [None]
        for literal in literals:
            self._add(literal)
        firsts = sorted(self._children[_ROOT])
        if not firsts:
            raise ValueError("there is no literal to search for")
        self._depths = [0] * len(self._children)
        self._fails = [_ROOT] * len(self._children)
        self._link()
        #: The character every literal begins with, or "" when they differ: `first not in text` rejects a text in a
        #: third of the time of `search`, and "" is in every text, so that one test serves both cases.
        self.first = firsts[0] if len(firsts) == 1 else ""
        self.clear: set[str] = set()
        #: `search(text, start)`: the next place where a literal may begin, or None.
        self.search = re.compile("[" + "".join(map(re.escape, firsts)) + "]").search

    def _add(self, literal: str) -> None:
        if not literal:
            raise ValueError("a literal is empty")
        node = _ROOT
        for char in literal:
            node = self._children[node].setdefault(char, len(self._children))
            if node == len(self._children):
                self._children.append({})
                self._ends.append(None)
        self._ends[node] = literal

    def _link(self) -> None:
        """Set depths, failure links and ends breadth first: a link points to a shallower node, which is ready then."""
        queue = deque([_ROOT])
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._depths[child] = self._depths[node] + 1
                self._fails[child] = _ROOT if node == _ROOT else self._move(self._fails[node], char)
                # A node that ends no literal itself ends the longest of those that are its suffixes.
                self._ends[child] = self._ends[child] or self._ends[self._fails[child]]
                queue.append(child)

    def _move(self, node: int, char: str) -> int:
        while (child := self._children[node].get(char)) is None:
            if node == _ROOT:
                return _ROOT
            node = self._fails[node]
        return child

    def absent(self, text: str) -> bool:
        """Whether no literal begins in a text."""
        if self.first in text and self.search(text) is not None:
            return False
        if len(text) <= MAX_CLEAR_LENGTH and len(self.clear) < MAX_CLEAR:
            self.clear.add(text)
        return True

    def held(self, node: int) -> int:
        """Characters of text that `node` stands for: what must be held back there."""
        return self._depths[node]

    def scan(self, node: int, text: str, start: int) -> tuple[int, int, str | None]:
        """Move from `node` over ``text[start:]`` until a literal completes or the text ends.

        Returns the node reached, the index behind the last character read, and the literal or None.
        """
        children, ends, end = self._children, self._ends, len(text)
        while start < end:
            if node == _ROOT:
                found = self.search(text, start)
                if found is None:
                    return _ROOT, end, None
                start = found.start()
            child = children[node].get(text[start])
            node = self._move(self._fails[node], text[start]) if child is None else child
            start += 1
            if (literal := ends[node]) is not None:
                return node, start, literal
        return node, end, None


class LiteralScanner:
    """Cuts a stream of text at every literal: for markers, where the search goes on behind a match.

    Matches do not overlap; the first to complete wins, and of those the longest.
    """

    __slots__ = ("_held", "_literals", "_node")

    def __init__(self, literals: Literals | Iterable[str]) -> None:
        self._literals = literals if isinstance(literals, Literals) else Literals(literals)
        self._node = _ROOT
        #: Text not given out yet: a proper prefix of a literal.
        self._held = ""

    @property
    def held(self) -> str:
        """What is held back: a proper prefix of a literal, or ""."""
        return self._held

    def feed(self, text: str) -> list[tuple[str, str | None]]:
        """The parts of the text that are decided: ``(text before, literal)`` for each literal that completed, and
        ``(text, None)`` last for what follows them, if there is any."""
        literals = self._literals
        if not self._node and (literals.first not in text or literals.search(text) is None):
            return [(text, None)] if text else []
        parts: list[tuple[str, str | None]] = []
        start, position, text = 0, len(self._held), self._held + text
        node, position, literal = literals.scan(self._node, text, position)
        while literal is not None:
            parts.append((text[start : position - len(literal)], literal))
            start = position
            node, position, literal = literals.scan(_ROOT, text, position)
        self._node = node
        cut = len(text) - literals.held(node)
        self._held = text[cut:]
        if cut > start:
            parts.append((text[start:cut], None))
        return parts

    def flush(self) -> str:
        """What was held and turned out to be text. Final and idempotent."""
        held, self._held, self._node = self._held, "", _ROOT
        return held


class StopStrings:
    """The stop strings of one request, compiled once and shared by its outputs.

    stops: 1 to 16 non-empty strings; ValueError naming ``stop`` otherwise.
    include: the stop itself is part of the text (``include_stop_str_in_output``).
    """

    __slots__ = ("include", "literals", "stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if not 0 < len(stops) <= MAX_STOPS:
            raise ValueError(f"stop: 1 to {MAX_STOPS} strings are allowed, not {len(stops)}")
        if not all(stops):
            raise ValueError("stop: an empty string would end every output at once")
        self.stops = tuple(stops)
        self.include = include
        shared = sum(map(len, stops)) <= MAX_SHARED
        self.literals = _shared_literals(self.stops) if shared else Literals(stops)

    def matcher(self) -> StopMatcher:
        """A matcher for one output."""
        return StopMatcher(self)


@lru_cache(maxsize=32)
def _shared_literals(stops: tuple[str, ...]) -> Literals:
    """The requests of one application have the same stops, and compiling them takes 20 µs."""
    return Literals(stops)


class StopMatcher:
    """Watches one output for its stop strings. Of what it is fed, `feed` returns what may be sent now."""

    __slots__ = ("_absent", "_clear", "_held", "_include", "_literals", "_node", "match_end", "matched")

    def __init__(self, stops: StopStrings) -> None:
        literals = stops.literals
        self._literals = literals
        self._clear, self._absent = literals.clear, literals.absent
        self._include = stops.include
        self._node = _ROOT
        #: Text not sent yet: a proper prefix of a stop.
        self._held = ""
        #: The stop that completed, or None. Everything after it is discarded.
        self.matched: str | None = None
        #: Offset behind that stop in the text of the `feed` call that completed it, in characters: the token whose
        #: text reaches this offset is the one that completed the stop. 0 before a match.
        self.match_end = 0

    @property
    def held(self) -> str:
        """What is held back: a proper prefix of a stop, or ""."""
        return self._held

    def passes(self, text: str) -> bool:
        """Whether `feed` would return this text as it is, and nothing would have changed: the usual case, for whoever
        saves the call."""
        return not self._node and (text in self._clear or self._absent(text))

    def feed(self, text: str) -> str:
        """Take the next text of the output and return what may be sent; "" always after a match."""
        if not self._node and (text in self._clear or self._absent(text)):
            return text
        return self._scan(text) if self._node != _DONE else ""

    def _scan(self, text: str) -> str:
        known = len(self._held)
        text = self._held + text
        node, end, stop = self._literals.scan(self._node, text, known)
        if stop is not None:
            return self._complete(stop, end - known, text[:end])
        self._node = node
        cut = len(text) - self._literals.held(node)
        self._held = text[cut:]
        return text[:cut]

    def _complete(self, stop: str, match_end: int, text: str) -> str:
        self.matched, self.match_end = stop, match_end
        self._held, self._node = "", _DONE
        return text if self._include else text[: -len(stop)]

    def flush(self) -> str:
        """What was held when no stop completed; "" after a match. Final and idempotent."""
        held, self._held = self._held, ""
        if self._node != _DONE:
            self._node = _ROOT
        return held
