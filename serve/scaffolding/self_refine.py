"""Self-refinement: generate, check, say what is wrong, generate again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve.scaffolding.controller import Controller, NativeGenerationController, ParallelProcess, Process
from serve.scaffolding.prompt import Prompt, with_feedback
from serve.scaffolding.task import GenerationTask


class SelfRefineController(Controller):
    """check(text): None when it passes, else what is wrong with it, in words for the model. max_rounds: generations at
    most, the first included. refine(prompt, answer, feedback): the next round's prompt, made from the last one's.

    details of the result: ``rounds``, and ``passed``: False when the last round's answer failed its check, and is the
    result all the same. TaskError when a generation fails.
    """

    def __init__(
        self,
        check: Callable[[str], str | None],
        max_rounds: int = 3,
        refine: Callable[[Prompt, str, str], Prompt] = with_feedback,
        controller: Controller | None = None,
    ) -> None:
        if max_rounds < 1:
            raise ValueError(f"max_rounds: must be at least 1, not {max_rounds}")
        self.check, self.max_rounds, self.refine = check, max_rounds, refine
        self.controller = controller or NativeGenerationController()

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        yield ParallelProcess([self._refined(task) for task in tasks])

    def _refined(self, task: GenerationTask) -> Process:
        attempt = GenerationTask(**task.inputs())
        for rounds in range(1, self.max_rounds + 1):
            yield from self.controller.process([attempt])
            text = attempt.output_str or ""
            feedback = self.check(text)
            if feedback is None or rounds == self.max_rounds:
                break
            attempt = GenerationTask(**task.inputs() | {"prompt": self.refine(attempt.prompt, text, feedback)})
        task.details = {"rounds": rounds, "passed": feedback is None}
        task.adopt(attempt)
