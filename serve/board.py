"""What front ends tell each other: a few numbers of each, in a file that all of them map into their memory.

How many requests a server has open decides whether it takes the next one, and a client sees it in /health and /metrics
whichever front end answers. A message for each request would cost as much as the request's own; a store into shared
memory costs next to nothing, and whoever wants to know adds up. The launcher makes the file, and clears the numbers of
a front end that is gone.

Signed 64-bit integers in the machine's byte order: for each seat one of each of ``FIELDS``, then a report of each of
``HISTOGRAMS``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import MutableSequence
from pathlib import Path
from typing import cast

from executor.histogram import BOUNDS
from executor.proxy import GenerationExecutor

#: taken: requests from the end of their body to the end of their response. open_requests, late_rows, refused_frames: as
#: in ``GenerationExecutor``.
FIELDS = ("taken", "open_requests", "late_rows", "refused_frames")
#: Histograms of ``GenerationExecutor``; the total is in nanoseconds.
HISTOGRAMS = ("write_lag", "chunk_lag")

_BUCKETS = len(BOUNDS) + 2
_WIDTH = len(FIELDS) + _BUCKETS * len(HISTOGRAMS)


class Board:
    """One front end's view. seat: which numbers are its own."""

    def __init__(self, cells: MutableSequence[int], seat: int) -> None:
        self._cells, self._own = cells, seat * _WIDTH

    @classmethod
    def alone(cls) -> Board:
        """Of the only front end: it needs no file."""
        return cls([0] * _WIDTH, 0)

    @classmethod
    def create(cls, path: str | Path, seats: int) -> Board:
        """Make the file, for our user alone; OSError if it cannot be made, or is there already."""
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Written, not just made that long: a store into a page that a full disk cannot hold would kill its process.
            os.write(file, bytes(8 * seats * _WIDTH))
        finally:
            os.close(file)
        return cls.open(path, 0)

    @classmethod
    def open(cls, path: str | Path, seat: int) -> Board:
        """Map the file that ``create`` has made; OSError without one."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(cast(MutableSequence[int], memoryview(mmap.mmap(file, 0)).cast("q")), seat)
        finally:
            os.close(file)

    def tell(self, field: str, value: int) -> None:
        """Our own number, as of now."""
        self._cells[self._own + FIELDS.index(field)] = value

    def follow(self, proxy: GenerationExecutor) -> None:
        """The numbers that it knows, as of now."""
        for field in FIELDS[1:]:
            self.tell(field, getattr(proxy, field))
        for place, name in enumerate(HISTOGRAMS):
            total, *counts = getattr(proxy, name).report()
            start = self._own + len(FIELDS) + place * _BUCKETS
            for cell, value in enumerate((int(1e9 * total), *counts), start):
                self._cells[cell] = int(value)

    def total(self, field: str) -> int:
        """Of all front ends."""
        return sum(self._cells[FIELDS.index(field) :: _WIDTH])

    def histograms(self, name: str) -> list[list[float]]:
        """A report of each front end: see ``executor.histogram``."""
        first = len(FIELDS) + HISTOGRAMS.index(name) * _BUCKETS
        reports = []
        for start in range(first, len(self._cells), _WIDTH):
            total, *counts = self._cells[start : start + _BUCKETS]
            reports.append([total / 1e9, *counts])
        return reports

    def clear(self, seat: int) -> None:
        """Nobody sits there."""
        for cell in range(seat * _WIDTH, (seat + 1) * _WIDTH):
            self._cells[cell] = 0
