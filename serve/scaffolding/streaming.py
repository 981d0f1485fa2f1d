"""Generations in steps: a handle is advanced by ``anext(handle)`` while it is not ``finished``, and by nothing else.

A step is whatever one ``anext`` brings: at least one of the engine's steps, and several when they were joined on their
way. A handle keeps what arrives until somebody asks, so a generation that is not stepped goes on in the executor, and
whoever goes on stepping misses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from serve.scaffolding.task import GenerationTask

if TYPE_CHECKING:  # a worker has handlers, of which some are here
    from serve.scaffolding.worker import Worker


class StepOutput(NamedTuple):
    """What one step added. Not the whole text, whose copies would make long streams quadratic."""

    text: str
    token_ids: Sequence[int]


@dataclass(eq=False, kw_only=True)
class StreamGenerationTask(GenerationTask):
    """A generation that comes back to its controller before its end.

    streaming_step: steps until then; 0 only starts it, None runs to the end. Yield the task again to go on.
    cancel_flag: set by the controller: the next time the generation is aborted, and the task ends cancelled.
    """

    streaming_step: int | None = 1
    cancel_flag: bool = False


async def streaming_generate_helper(
    handle: Any,
    step_budget: int | None,
    queue: asyncio.Queue[Any] | None = None,
    observe: Callable[[Any], None] | None = None,
) -> int:
    """Step a handle until it is finished, or ``step_budget`` steps were made (None: no budget; 0: no step); returns the
    number of steps. The handle can be stepped on from there.

    queue: gets one output for each step but the one that finishes the handle: a StepOutput, or for a handle that has no
    outputs, what ``anext`` gave. It must have no bound, or QueueFull is raised. observe: told each step. Cancelled, it
    leaves every step either taken and queued, or in the handle. Raises what the handle raises.
    """
    steps = 0
    while not handle.finished and steps != step_budget:
        try:
            step = await anext(handle)
        except StopAsyncIteration:  # another one who steps it has taken the last step
            break
        # No await from here on: a step that was taken is told of.
        steps += 1
        if observe is not None:
            observe(step)
        if queue is not None and not handle.finished:
            queue.put_nowait(_output(step))
    return steps


def _output(step: Any) -> Any:
    outputs = getattr(step, "outputs", None)
    return step if outputs is None else StepOutput(outputs[0].text_diff, outputs[0].token_ids_diff)


async def generation_handler(worker: Worker, task: GenerationTask) -> None:
    """From the start to the end, at once."""
    await worker.open(task)
    try:
        await streaming_generate_helper(task.source, None, task.streaming_output_queue, task.observe)
    except asyncio.CancelledError:  # nobody can go on with it
        worker.abort(task)
        raise
    finally:
        task.read()


async def stream_generation_handler(worker: Worker, task: StreamGenerationTask) -> None:
    """Start, go on by ``streaming_step`` steps, or abort. ``end_flag`` is set exactly when the handle has finished."""
    if task.cancel_flag:
        await worker.cancel(task)
        return
    await worker.open(task)
    try:
        await streaming_generate_helper(task.source, task.streaming_step, task.streaming_output_queue, task.observe)
    finally:
        task.read()
