"""Tasks: what a controller asks a worker for, and what became of it.

Task                  which worker, and how it ended
`- GenerationTask     one generation: prompt, options, result
   `- StreamGenerationTask (streaming.py), AsyncGenerationTask (async_generation.py): in steps
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from executor.result import Logprob
from serve.scaffolding.prompt import Prompt

#: The tag of the worker that generates.
GENERATION = "generation"


class TaskError(RuntimeError):
    """A task has no result; the message is the reason."""


class TaskStatus(Enum):
    """Where a task stands. The last three are ends: a task leaves none of them."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = (TaskStatus.DONE, TaskStatus.FAILED, TaskStatus.CANCELLED)


@dataclass(eq=False, kw_only=True)
class Task:
    """Anything that a worker does. worker_tag: which worker. reason: why it failed or was cancelled."""

    worker_tag: str = GENERATION
    status: TaskStatus = TaskStatus.PENDING
    reason: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will become of it."""
        return self.status in _ENDS

    def end(self, status: TaskStatus, reason: str | None = None) -> None:
        """The first end counts."""
        if not self.ended:
            self.status, self.reason = status, reason

    def check(self) -> None:
        """TaskError with the reason for a task that failed or was cancelled."""
        if self.status in (TaskStatus.FAILED, TaskStatus.CANCELLED):
            raise TaskError(self.reason or self.status.value)


@dataclass(eq=False, kw_only=True)
class GenerationTask(Task):
    """One generation of one text.

    prompt: a text, token ids, or chat messages. options: request fields by their names in the OpenAI API and in this
    server (``max_tokens``, ``temperature``, ``stop``, ...); ``serve/scaffolding/options.py`` lists them. What is absent
    is as in a request to the server. logprobs: None is off, 0 the sampled token's only, k > 0 also the k most likely
    ones. streaming_output_queue: gets one output per step but the last; see ``streaming_generate_helper``.

    Results. request_handle: the handle that its worker steps. end_flag: whether the handle has finished, or none will
    come.
    output_str: the text so far; None while there is none, and never "" in place of an error. output_tokens: its ids, if
    the worker knows them. max_tokens: what it may generate at most, once that is known. details: what a controller has
    to say of its result.
    """

    prompt: Prompt
    options: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    streaming_output_queue: asyncio.Queue[Any] | None = None

    request_handle: Any = None
    end_flag: bool = False
    output_str: str | None = None
    output_tokens: Sequence[int] = ()
    output_logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    max_tokens: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> Any:
        """What is stepped: has ``finished`` and ``__anext__``."""
        return self.request_handle

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 until they are known."""
        return int(getattr(self.request_handle, "prompt_tokens", 0))

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, as they have arrived."""
        return int(getattr(self.request_handle, "completion_tokens", 0))

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, natural log; minus infinity without any."""
        entries = self.output_logprobs
        return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")

    def end(self, status: TaskStatus, reason: str | None = None) -> None:
        """As above. Nothing more will come, also where there was no handle: whoever loops until ``end_flag`` ends."""
        super().end(status, reason)
        self.end_flag = True
        if self.status is TaskStatus.CANCELLED:
            self.finish_reason = "abort"

    def inputs(self) -> dict[str, Any]:
        """What makes another task that asks for the same."""
        return {
            "worker_tag": self.worker_tag,
            "prompt": self.prompt,
            "options": self.options,
            "logprobs": self.logprobs,
        }

    def observe(self, step: Any) -> None:
        """Keep what only the step itself has; ``step`` is what ``anext`` gave."""
        if self.logprobs is not None:
            self.output_logprobs += step.outputs[0].logprobs_diff

    def read(self) -> None:
        """Take over what the handle has. One without outputs, as in a test, leaves the result as it is."""
        self.end_flag = self.source.finished
        outputs = getattr(self.request_handle, "outputs", None)
        if outputs is None:
            return
        output = outputs[0]
        if output.text or output.finish_reason not in (None, "error", "abort"):
            self.output_str = output.text
        self.output_tokens, self.finish_reason = output.token_ids, output.finish_reason

    def adopt(self, other: GenerationTask) -> None:
        """Take another task's result for its own: the one that a controller has chosen."""
        self.request_handle, self.end_flag = other.request_handle, other.end_flag
        self.output_str, self.output_tokens = other.output_str, other.output_tokens
        self.output_logprobs, self.finish_reason = other.output_logprobs, other.finish_reason
        self.max_tokens, self.details = other.max_tokens, {**other.details, **self.details}
        self.status, self.reason = other.status, other.reason


def samples(task: GenerationTask, n: int) -> list[GenerationTask]:
    """n tasks that ask for the same and draw independently. With a seed, the i-th one has the seed plus i; without, its
    worker draws one for each."""
    seed = task.options.get("seed")
    made = [GenerationTask(**task.inputs()) for _ in range(n)]
    if seed is not None:
        for number, sample in enumerate(made):
            sample.options = {**task.options, "seed": seed + number}
    return made
