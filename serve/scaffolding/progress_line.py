"""A ``Progress`` as a line on a terminal that is rewritten in place, or as plain lines elsewhere."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import TextIO

from serve.scaffolding.progress import Progress

#: Seconds between two lines: where one replaces the other, and where they pile up.
REWRITE, APPEND = 0.2, 5.0


class ProgressLine:
    """``async with ProgressLine(progress):`` shows it until the block ends, and the last state then."""

    def __init__(self, progress: Progress, stream: TextIO | None = None) -> None:
        self._progress, self._stream = progress, sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ProgressLine:
        self._task = asyncio.create_task(self._show())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))
        self._write("\n")

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(REWRITE if self._rewrites else APPEND)
            self._write("" if self._rewrites else "\n")

    def _write(self, end: str) -> None:
        # Back to the first column, and clear to the end of the line: the last one may have been longer.
        start = "\r\x1b[K" if self._rewrites else ""
        self._stream.write(f"{start}{self._progress.line()}{end}")
        self._stream.flush()
