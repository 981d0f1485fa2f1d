"""What front ends tell each other: a few numbers of each, in a file that all of them map into their memory.

How many requests a server has open decides whether it takes the next one, and a client sees it in /health and /metrics
whichever front end answers. A message for each request would cost as much as the request's own; a store into shared
memory costs next to nothing, and whoever wants to know adds up. The launcher makes the file, and clears the numbers of
a front end that is gone.

Signed 64-bit integers in the machine's byte order: for each seat one of each of ``FIELDS``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import MutableSequence
from pathlib import Path
from typing import cast

from executor.proxy import GenerationExecutor

#: taken: requests from the end of their body to the end of their response. open_requests, late_rows, refused_frames: as
#: in ``GenerationExecutor``.
FIELDS = ("taken", "open_requests", "late_rows", "refused_frames")

_SIZE = 8 * len(FIELDS)


class Board:
    """One front end's view. seat: which numbers are its own."""

    def __init__(self, cells: MutableSequence[int], seat: int) -> None:
        self._cells, self._own = cells, seat * len(FIELDS)

    @classmethod
    def alone(cls) -> Board:
        """Of the only front end: it needs no file."""
        return cls([0] * len(FIELDS), 0)

    @classmethod
    def create(cls, path: str | Path, seats: int) -> Board:
        """Make the file, for our user alone; OSError if it cannot be made, or is there already."""
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Written, not just made that long: a store into a page that a full disk cannot hold would kill its process.
            os.write(file, bytes(seats * _SIZE))
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

    def total(self, field: str) -> int:
        """Of all front ends."""
        return sum(self._cells[FIELDS.index(field) :: len(FIELDS)])

    def clear(self, seat: int) -> None:
        """Nobody sits there."""
        for cell in range(seat * len(FIELDS), (seat + 1) * len(FIELDS)):
            self._cells[cell] = 0
