"""One line that is rewritten on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import io

from serve.scaffolding import GenerationTask, Progress, ProgressLine, TaskStatus
from tests.serve.scaffolding.doubles import run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    """All that is written while one generation is cancelled, which had leave for 10 tokens."""

    async def main() -> None:
        progress, task = Progress(), GenerationTask(prompt="p", max_tokens=10)
        async with ProgressLine(progress, stream):
            progress.begin(task)
            progress.begin(task)
            task.end(TaskStatus.CANCELLED, "enough")
            progress.end(task)
            progress.end(task)

    run(main())
    return stream.getvalue()


LINE = "1 generations: 0 running, 0 done, 1 cancelled (10 tokens spared); 0 tokens\n"


def test_elsewhere_lines_follow_each_other() -> None:
    assert shown(io.StringIO()) == LINE


def test_on_a_terminal_it_is_rewritten_in_place() -> None:
    assert shown(Terminal()) == "\r\x1b[K" + LINE
