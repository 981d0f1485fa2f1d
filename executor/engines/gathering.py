"""Columns of what an engine is given one by one."""

from __future__ import annotations

from executor.engines.base import Part, StepColumns, StepRow
from executor.rids import Rids


class Gathering:
    """The rows of one or more steps. Where an output comes twice, those before it are a step, and what follows is
    another one. The column of rids is the last one's where they are equal."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        #: rid -> id, of the step that has begun
        self._token_ids: dict[int, int] = {}
        self._rids = Rids()

    def usual(self, rid: int, token: int) -> None:
        """One id of output 0."""
        if rid in self._token_ids:
            self._flush()
        self._token_ids[rid] = token

    def odd(self, row: StepRow) -> None:
        """Any other row."""
        if row.rid in self._token_ids:
            self._flush()
        self._parts.append(row)

    def take(self) -> list[Part]:
        """All that was gathered."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _flush(self) -> None:
        if self._token_ids:
            rids = Rids(self._token_ids)
            if rids != self._rids:
                self._rids = rids
            self._parts.append(StepColumns(self._rids, list(self._token_ids.values())))
            self._token_ids = {}
