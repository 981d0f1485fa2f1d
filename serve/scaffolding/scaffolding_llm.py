"""The scheduler: many requests at once, each carried out by a controller over the same workers."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping
from types import TracebackType
from typing import Any

from serve.scaffolding.controller import Controller
from serve.scaffolding.driver import Driver
from serve.scaffolding.progress import Progress
from serve.scaffolding.prompt import Prompt
from serve.scaffolding.task import TaskError
from serve.scaffolding.worker import Worker


class ScaffoldingResult:
    """A request on its way. ``await`` it for what its controller's ``generate`` returns, a GenerationTask unless it
    says otherwise; who is cancelled while waiting cancels the request. progress: its own counts and usage.

    Raises what the controller raises: TaskError where there is no result, and when it was cancelled.
    """

    def __init__(self, task: asyncio.Task[Any], progress: Progress) -> None:
        self.progress = progress
        self._task = task

    @property
    def done(self) -> bool:
        """Whether it has ended, in any way."""
        return self._task.done()

    def cancel(self) -> None:
        """End it: its controller is closed, and what it has running is aborted."""
        self._task.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        try:
            if not self._task.done():
                await asyncio.wait((self._task,))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._task.cancelled():
            raise TaskError("the request was cancelled")
        return self._task.result()


async def _until_failure(results: list[ScaffoldingResult]) -> None:
    """Return once all have ended; raise what the first one that fails does."""
    if results:
        await asyncio.wait([result._task for result in results], return_when=asyncio.FIRST_EXCEPTION)
    for result in results:
        if result.done:
            await result


class ScaffoldingLlm:
    """controller: for requests that bring none of their own. workers: by the tag that tasks ask for.

    max_parallel_requests: controllers at work at once, the others wait in order. max_in_flight: tasks at work at once,
    over all requests; a streaming task counts while it is being stepped, and not while its controller thinks, or the
    ones that wait for its next step could wait for each other.

    ``async with`` it, or call ``shutdown``. All of it runs on one event loop.
    """

    def __init__(
        self,
        controller: Controller,
        workers: Mapping[str, Worker],
        *,
        max_parallel_requests: int = 4096,
        max_in_flight: int = 4096,
        progress: Progress | None = None,
    ) -> None:
        for name, value in (("max_parallel_requests", max_parallel_requests), ("max_in_flight", max_in_flight)):
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        self.progress = Progress() if progress is None else progress
        self._controller, self._workers = controller, workers
        self._turns = asyncio.Semaphore(max_parallel_requests)
        self._slots = asyncio.Semaphore(max_in_flight)
        self._requests: set[asyncio.Task[Any]] = set()
        self._settling: set[asyncio.Task[None]] = set()

    def generate_async(
        self, prompt: Prompt, *, controller: Controller | None = None, **inputs: Any
    ) -> ScaffoldingResult:
        """Start a request. inputs: further arguments of the controller's ``generate``, such as ``options``."""
        progress = Progress(self.progress)
        task = asyncio.create_task(self._request(controller or self._controller, prompt, inputs, progress))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return ScaffoldingResult(task, progress)

    async def generate(self, prompts: Iterable[Prompt], **inputs: Any) -> list[Any]:
        """All prompts at once; the results in their order. The first that fails ends the others, and is raised."""
        results = [self.generate_async(prompt, **inputs) for prompt in prompts]
        try:
            await _until_failure(results)
            return [await result for result in results]
        finally:
            for result in results:
                result.cancel()

    async def settled(self) -> None:
        """Return once all that was aborted has been confirmed: then the counts are final."""
        while self._settling:
            await asyncio.wait(list(self._settling))

    async def shutdown(self) -> None:
        """Cancel all requests, and wait until what they had running has ended. The workers stay open."""
        for request in list(self._requests):
            request.cancel()
        if self._requests:
            await asyncio.wait(list(self._requests))
        await self.settled()

    async def __aenter__(self) -> ScaffoldingLlm:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _request(
        self, controller: Controller, prompt: Prompt, inputs: Mapping[str, Any], progress: Progress
    ) -> Any:
        async with self._turns:
            driver = Driver(self._workers, self._slots, progress, self._settling)
            return await driver.run(controller.generate(prompt, **inputs))
