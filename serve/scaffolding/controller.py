"""Controllers: methods of generation, written as generators that yield tasks and get them back with their results.

A controller yields a list of tasks, which are done at once, or a ``ParallelProcess``, whose generators run side by
side; it goes on when all of that has ended, or has come back. ``yield from other.process(tasks)`` puts another one in
its place. It holds settings and no state of a request: what belongs to one is local to ``process``, so one controller
serves many requests at once.

When a generator ends, is closed or fails, what it has started and not brought to an end is aborted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from serve.scaffolding.prompt import Prompt
from serve.scaffolding.task import GenerationTask, Task, TaskError, TaskStatus


class ParallelProcess:
    """Generators that run side by side.

    enough: asked whenever one has ended; once it says true the others are closed, and their generations aborted.
    tolerant: a TaskError of one is kept in ``errors``, by its place; otherwise the first ends the others, and is raised
    where the process was yielded. Exceptions of any other kind end the request. results: what the generators returned,
    None for those that did not get there.
    """

    def __init__(
        self,
        generators: Iterable[Process],
        *,
        enough: Callable[[], bool] = lambda: False,
        tolerant: bool = False,
    ) -> None:
        self.generators = list(generators)
        self.enough, self.tolerant = enough, tolerant
        self.results: list[Any] = [None] * len(self.generators)
        self.errors: dict[int, TaskError] = {}


#: What a controller is while it runs.
Process = Generator["Sequence[Task] | ParallelProcess", None, Any]


class Controller:
    """A method. Override ``process``, or ``generate`` for one whose result is no text."""

    def generate(
        self, prompt: Prompt, *, options: Mapping[str, Any] | None = None, logprobs: int | None = None
    ) -> Process:
        """One prompt; returns a GenerationTask with the result."""
        task = GenerationTask(prompt=prompt, options=options or {}, logprobs=logprobs)
        yield from self.process([task])
        return task

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        """Give each task its result. TaskError where there can be none."""
        raise NotImplementedError(f"{type(self).__name__}.process")


class NativeGenerationController(Controller):
    """One generation for each task. options: for tasks that do not have their own. worker_tag: in place of theirs."""

    def __init__(self, options: Mapping[str, Any] | None = None, worker_tag: str | None = None) -> None:
        self.options, self.worker_tag = dict(options or {}), worker_tag

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        for task in tasks:
            task.options, task.worker_tag = {**self.options, **task.options}, self.worker_tag or task.worker_tag
        yield tasks
        for task in tasks:
            task.check()


def each(controller: Controller, tasks: Iterable[GenerationTask], **parallel: Any) -> ParallelProcess:
    """Every task by itself, so that one that fails or takes long is its own affair."""
    return ParallelProcess((controller.process([task]) for task in tasks), **parallel)


def survivors(tasks: Sequence[GenerationTask]) -> list[GenerationTask]:
    """Those that are done. TaskError with the first reason when there are none."""
    done = [task for task in tasks if task.status is TaskStatus.DONE]
    if not done:
        reason = next((task.reason for task in tasks if task.reason), "nothing was generated")
        raise TaskError(f"none of {len(tasks)} generations succeeded: {reason}")
    return done
