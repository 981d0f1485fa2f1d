"""Handles and workers for the tests of scaffolding: the least that a result is, and who hands it out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from executor.result import AbortedError, GenerationResult, Logprob, OutputDelta, ResultError
from serve.scaffolding.task import GenerationTask
from serve.scaffolding.worker import Worker

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On an event loop, with a deadline that only a hang reaches."""
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def turn() -> None:
    """One turn of the loop; no time passes."""
    await asyncio.sleep(0)


class FakeHandle:
    """``finished`` and ``__anext__``, and nothing else that is public. Its steps are 1, 2, ... up to ``steps``; each
    takes ``turns`` turns of the loop to come. error: raised in place of the last one, and from then on."""

    def __init__(self, steps: int, turns: int = 0, error: ResultError | None = None) -> None:
        self.__steps, self.__turns, self.__error = steps, turns, error
        self.__taken = 0

    @property
    def finished(self) -> bool:
        return self.__taken == self.__steps

    async def __anext__(self) -> int:
        if self.finished:
            if self.__error is not None:
                raise self.__error
            raise StopAsyncIteration
        for _ in range(self.__turns):
            await turn()
        self.__taken += 1
        if self.finished and self.__error is not None:
            raise self.__error
        return self.__taken


class FakeWorker(Worker):
    """Hands out the handles that it is given, in order; aborting one is noted, and ends a GenerationResult."""

    def __init__(self, *handles: Any) -> None:
        self.handles = list(handles)
        self.submitted: list[GenerationTask] = []
        self.aborted: list[Any] = []

    async def submit(self, task: GenerationTask) -> Any:
        self.submitted.append(task)
        return self.handles.pop(0)

    def abort_handle(self, handle: Any) -> None:
        self.aborted.append(handle)
        if isinstance(handle, GenerationResult):
            handle.deliver(AbortedError("the generation was aborted"))


def result(*texts: str, finish: str | None = "stop") -> GenerationResult:
    """A real handle with steps in its queue: one per text, the last of which finishes it."""
    handle = GenerationResult(1, prompt_tokens=3)
    for number, text in enumerate(texts):
        handle.deliver(delta(text, finish if number == len(texts) - 1 else None))
    return handle


def delta(text: str, finish: str | None = None) -> OutputDelta:
    """A step of one token per character."""
    return OutputDelta(0, [ord(char) for char in text], text, (), finish)


class WritingWorker(Worker):
    """Generates what ``write(task, n)`` says for the n-th task: a text, a character per step, or an exception for its
    handle to end with. finish: the reason of every end. gate: while it is clear, no generation moves. peak: the most
    that were under way at once."""

    def __init__(self, write: Callable[[GenerationTask, int], str | ResultError], finish: str = "stop") -> None:
        self.tasks: list[GenerationTask] = []
        self.aborted = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.peak = 0
        self._write, self._finish = write, finish
        self._writing: dict[GenerationResult, asyncio.Task[None]] = {}

    async def submit(self, task: GenerationTask) -> GenerationResult:
        written = self._write(task, len(self.tasks))
        self.tasks.append(task)
        task.max_tokens = task.options.get("max_tokens", 100)
        handle = GenerationResult(len(self.tasks), prompt_tokens=2)
        self._writing[handle] = asyncio.create_task(self._deliver(handle, written, task.logprobs))
        self.running += 1
        self.peak = max(self.peak, self.running)
        return handle

    async def _deliver(self, handle: GenerationResult, written: str | ResultError, logprobs: int | None) -> None:
        for place, char in enumerate(written if isinstance(written, str) else ""):
            await self.gate.wait()
            await turn()
            # "a" is a likely character, "z" is not.
            entries = () if logprobs is None else (Logprob(ord(char), 96.0 - ord(char)),)
            last = place == len(str(written)) - 1
            handle.deliver(OutputDelta(0, [ord(char)], char, entries, self._finish if last else None))
        if isinstance(written, ResultError):
            handle.deliver(written)
        self.running -= 1

    def abort_handle(self, handle: GenerationResult) -> None:
        writing = self._writing.pop(handle, None)
        if writing is not None and writing.cancel():
            self.running -= 1
            self.aborted += 1
            handle.deliver(AbortedError("the generation was aborted"))
