"""Which request a worker is at, told beyond its death: a file of eight bytes that the worker maps into its memory.

A process that is killed cannot say any more what it was doing, and a message per row would say it at a price. A store
into shared memory costs next to nothing (some 20 ns), and the kernel keeps the page whatever becomes of the process.
The pool makes the file before it starts a worker, and reads it after the worker's death.

One signed 64-bit integer in the machine's byte order: the request's id, or NOBODY between two batches.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import MutableSequence
from pathlib import Path
from typing import cast

NOBODY = -1
_SIZE = 8


class Marker:
    """A worker's side of the file. ``cells[0]`` is the id: one store, and it is told."""

    def __init__(self, cells: memoryview[int]) -> None:
        # A list of one does the same in a worker without a file: what the two have in common is a store by index.
        self.cells = cast(MutableSequence[int], cells)

    @classmethod
    def open(cls, path: str | Path) -> Marker:
        """Map the file that ``create`` has made; OSError without one, ValueError if it is too short."""
        file = os.open(path, os.O_RDWR)
        try:
            return cls(memoryview(mmap.mmap(file, _SIZE)).cast("q"))
        finally:
            os.close(file)

    @staticmethod
    def create(path: str | Path) -> None:
        """Make the file, for our user alone; OSError if it cannot be made, or is there already."""
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Written, not just made that long: a store into a page that a full disk cannot hold would kill the worker.
            os.write(file, NOBODY.to_bytes(_SIZE, sys.byteorder, signed=True))
        finally:
            os.close(file)

    @staticmethod
    def read(path: str | Path) -> int:
        """The id that was stored last. NOBODY if the file is missing, cannot be read, or is too short."""
        try:
            cell = Path(path).read_bytes()
        except OSError:
            return NOBODY
        return int.from_bytes(cell[:_SIZE], sys.byteorder, signed=True) if len(cell) >= _SIZE else NOBODY
