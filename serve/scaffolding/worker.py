"""Workers: who does what a task asks for. One per tag; a worker may do many tasks at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from executor.result import AbortedError, ResultError
from serve.errors import ApiError
from serve.scaffolding.async_generation import AsyncGenerationTask, async_generation_handler
from serve.scaffolding.streaming import (
    StreamGenerationTask,
    generation_handler,
    stream_generation_handler,
    streaming_generate_helper,
)
from serve.scaffolding.task import GenerationTask, Task, TaskError, TaskStatus

Handler = Callable[[Any, Any], Awaitable[None]]


class Worker:
    """Runs tasks by a table of handlers, ``handler(worker, task)``, that looks at the task's class and then at those
    that it inherits from. A handler that returns leaves the task done, or running if it is a generation whose handle
    has not finished; what it raises of ResultError, ApiError and TaskError becomes the task's reason.

    One that generates overrides ``submit`` and ``abort_handle``; one that does something else, the table.
    """

    task_handlers: ClassVar[Mapping[type[Task], Handler]] = {
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_generation_handler,
        AsyncGenerationTask: async_generation_handler,
    }

    async def run_task(self, task: Task) -> TaskStatus:
        """Do what the task asks for, until it ends or wants its controller. A task that has ended stays as it is.
        TypeError for one that this worker has no handler for."""
        handler = self._handler(type(task))
        if task.ended:
            return task.status
        task.status = TaskStatus.RUNNING
        try:
            await handler(self, task)
        except AbortedError as error:
            task.end(TaskStatus.CANCELLED, str(error))
        except (ResultError, ApiError, TaskError) as error:
            task.end(TaskStatus.FAILED, str(error))
        if not isinstance(task, GenerationTask) or task.end_flag:
            task.end(TaskStatus.DONE)
        return task.status

    def _handler(self, kind: type[Task]) -> Handler:
        for base in kind.__mro__:
            if base in self.task_handlers:
                return self.task_handlers[base]
        raise TypeError(f"{type(self).__name__} has no handler for a {kind.__name__}")

    # -------------------------------------------------------------------------------- generations

    async def open(self, task: GenerationTask) -> None:
        """Start a generation, unless it has been: ``request_handle`` is there."""
        if task.request_handle is None:
            task.request_handle = await self.submit(task)

    def abort(self, task: GenerationTask) -> None:
        """Ask for the end of a generation; for one that has not begun or is over, nothing happens."""
        if task.request_handle is not None and not task.request_handle.finished:
            self.abort_handle(task.request_handle)

    async def cancel(self, task: GenerationTask, reason: str = "it was cancelled") -> None:
        """Abort, and wait until that is confirmed: the task then has what was generated up to that point. One that
        finished by itself meanwhile is done."""
        if task.request_handle is None:
            task.end(TaskStatus.CANCELLED, reason)
            return
        self.abort(task)
        end: tuple[TaskStatus, str | None] = (TaskStatus.DONE, None)
        try:
            await streaming_generate_helper(task.source, None, None, task.observe)
        except AbortedError:
            end = (TaskStatus.CANCELLED, reason)
        except ResultError as error:
            end = (TaskStatus.FAILED, str(error))
        finally:
            task.read()
        task.end(*end)

    async def close(self) -> None:
        """Give back what the worker holds."""

    async def submit(self, task: GenerationTask) -> Any:
        """Start a generation; returns a handle with ``finished`` and ``__anext__``. Raises ResultError, ApiError or
        TaskError when it is not taken."""
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    def abort_handle(self, handle: Any) -> None:
        """Ask for the end of what ``submit`` has started; the handle then ends with AbortedError."""
        raise NotImplementedError(f"{type(self).__name__} does not generate")
