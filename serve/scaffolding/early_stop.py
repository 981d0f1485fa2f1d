"""Early stop: a generation is cancelled as soon as its partial text says all that is wanted of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve.scaffolding.controller import Controller, ParallelProcess, Process
from serve.scaffolding.streaming import StreamGenerationTask
from serve.scaffolding.task import GenerationTask, TaskStatus


class EarlyStopController(Controller):
    """decided(text): whether the text so far is enough; asked every ``streaming_step`` steps.

    The result is the text at which it was decided, with the finish reason ``stop``; what was in flight then is counted
    and thrown away. details of the result: ``stopped``, whether it was cut, and ``tokens_spared``, what it had leave to
    generate and did not. TaskError when the generation fails.
    """

    def __init__(self, decided: Callable[[str], bool], streaming_step: int = 4) -> None:
        if streaming_step < 1:
            raise ValueError(f"streaming_step: must be at least 1, not {streaming_step}")
        self.decided, self.streaming_step = decided, streaming_step

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        yield ParallelProcess([self._watched(task) for task in tasks])

    def _watched(self, task: GenerationTask) -> Process:
        stream = StreamGenerationTask(**task.inputs(), streaming_step=self.streaming_step)
        while not stream.ended:
            yield [stream]
            if not stream.ended and self.decided(stream.output_str or ""):
                yield from self._cut(task, stream)
                return
        stream.check()
        task.details = {"stopped": False, "tokens_spared": 0}
        task.adopt(stream)

    def _cut(self, task: GenerationTask, stream: StreamGenerationTask) -> Process:
        text, tokens = stream.output_str, list(stream.output_tokens)
        stream.cancel_flag = True
        yield [stream]
        spared = max(0, stream.max_tokens - stream.completion_tokens) if stream.max_tokens is not None else 0
        task.details = {"stopped": True, "tokens_spared": spared}
        task.adopt(stream)
        task.output_str, task.output_tokens, task.finish_reason = text, tokens, "stop"
        # What it was asked for is there, however its stream ended.
        task.status, task.reason = TaskStatus.DONE, None
