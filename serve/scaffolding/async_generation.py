"""Generation in the background: started at once, looked at when its controller likes, gone on with or cancelled.

An ``AsyncGeneration`` stands in for the handle that it steps. At most one ``anext`` is on its way at any time, as an
asyncio task of its own, and it outlives whoever waits for it: to cancel that one, or the task itself, loses no output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve.scaffolding.streaming import StreamGenerationTask, streaming_generate_helper

if TYPE_CHECKING:
    from serve.scaffolding.worker import Worker

#: Steps that one look takes at most.
_AT_ONCE = 256


class AsyncGeneration:
    """Steps a handle in the background. ``async for`` or ``anext`` takes its steps in order."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._next: asyncio.Task[Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether the handle has finished and its last step was taken."""
        return self._next is None and bool(self._handle.finished)

    def start(self) -> asyncio.Task[Any] | None:
        """The step on its way, started if there is none; None at the end. Cancelling it loses nothing: the handle keeps
        what had not been taken, and the next ``start`` goes on."""
        if self._next is not None and self._next.cancelled():
            self._next = None
        if self._next is None and not self._handle.finished:
            self._next = asyncio.create_task(anext(self._handle))
        return self._next

    def __aiter__(self) -> AsyncGeneration:
        return self

    async def __anext__(self) -> Any:
        """The next step. Cancelled, it leaves the step on its way. Raises the handle's errors."""
        while (step := self.start()) is not None:
            if not step.done():
                await _end_of(step)
            if not step.cancelled():
                return self._take(step)
        return await anext(self._handle)  # at the end a handle says by itself how it ended

    def _take(self, step: asyncio.Task[Any]) -> Any:
        if self._next is step:
            self._next = None
        return step.result()

    async def ready(self) -> bool:
        """Whether a step can be taken without waiting."""
        step = self.start()
        if step is None:
            return False
        if not step.done():
            await asyncio.sleep(0)  # one turn of the loop, in which a step that has arrived is taken from the handle
        return step.done() and not step.cancelled()

    def cancel(self) -> None:
        """Step no more in the background. What was not taken is still there for the next ``anext``."""
        if self._next is not None:
            self._next.cancel()


async def _look(generation: AsyncGeneration, queue: asyncio.Queue[Any] | None, observe: Callable[[Any], None]) -> None:
    """Take what has arrived, up to a bound: steps that come as fast as they are taken must not hold the controller."""
    for _ in range(_AT_ONCE):
        if not await generation.ready():
            break
        await streaming_generate_helper(generation, 1, queue, observe)


async def _end_of(step: asyncio.Task[Any]) -> None:
    """Wait for a task, and leave it alone when the waiter is cancelled. ``asyncio.wait`` does the same, in 6 instead of
    3 µs, and this is done for every step."""
    ended = asyncio.get_running_loop().create_future()

    def wake(step: asyncio.Task[Any]) -> None:
        if not ended.done():
            ended.set_result(None)

    step.add_done_callback(wake)
    await ended


@dataclass(eq=False, kw_only=True)
class AsyncGenerationTask(StreamGenerationTask):
    """A generation that goes on in the background while its controller does something else.

    streaming_step: what the controller waits for when it yields the task: so many further steps, None for the end, 0
    for nothing: then it gets what has arrived, up to 256 steps of it.
    """

    streaming_step: int | None = 0
    generation: AsyncGeneration | None = None

    @property
    def source(self) -> AsyncGeneration:
        """The generation in the background, made when it is first asked for."""
        if self.generation is None:
            self.generation = AsyncGeneration(self.request_handle)
        return self.generation


async def async_generation_handler(worker: Worker, task: AsyncGenerationTask) -> None:
    """Start, look at what there is, wait for more, or abort."""
    if task.cancel_flag:
        await worker.cancel(task)
        return
    await worker.open(task)
    generation, queue = task.source, task.streaming_output_queue
    try:
        if task.streaming_step == 0:
            await _look(generation, queue, task.observe)
        else:
            await streaming_generate_helper(generation, task.streaming_step, queue, task.observe)
            generation.start()
    finally:
        task.read()
