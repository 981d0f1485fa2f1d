"""Token id -> what stands for its text in an event: for ids whose text is complete whatever comes before and behind.

A worker that has the finished bytes by id touches one list and one object per token. Before, it was id -> text -> hash
-> bytes, and of a vocabulary of 50,000 entries none of that is in the processor's cache: 1.9 µs a row against 0.9 with
cold caches, 0.74 against 0.34 with warm ones. Filled as ids come up, so that no start waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class PieceTable:
    """strings: id -> text, as in ``detokenizer.py``. escaped: text -> JSON string. size: of the vocabulary.

    pieces: id -> the JSON string without its quotes; None where there is no complete text, or nobody has asked.
    """

    __slots__ = ("pieces", "strings", "_escaped")

    def __init__(self, strings: Sequence[str | None], escaped: Mapping[str, bytes], size: int) -> None:
        self.pieces: list[bytes | None] = [None] * size
        self.strings, self._escaped = strings, escaped

    def fill(self, token: int) -> bytes | None:
        """The piece of an id that is in ``range(size)``. None where its text is not complete, or empty: the event of an
        id without text is none."""
        text = self.strings[token] if token < len(self.strings) else None
        if text:
            self.pieces[token] = self._escaped[text][1:-1]
        return self.pieces[token]

    def join(self, tokens: Sequence[int]) -> bytes | None:
        """The piece of several ids of any value; None unless each has one."""
        pieces = self.pieces
        if not tokens or min(tokens) < 0 or max(tokens) >= len(pieces):
            return None
        found = [pieces[token] or self.fill(token) for token in tokens]
        return None if None in found else b"".join(found)  # type: ignore[arg-type]
