"""Tree search: beams of partial answers, of which the best are continued a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve.scaffolding.controller import Controller, NativeGenerationController, ParallelProcess, Process, each
from serve.scaffolding.prompt import continued, whole
from serve.scaffolding.task import GenerationTask, TaskError, TaskStatus, samples


@dataclass(eq=False)
class Beam:
    """A partial answer. complete: the model ended it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    score: float = 0.0
    complete: bool = False


class TreeSearchController(Controller):
    """score(text): how good a partial answer is. beams: those that are kept at each level; width: continuations of
    each; step_tokens: tokens of a continuation; depth: levels at most.

    A continuation starts from the text of its beam: messages need a server that knows ``continue_final_message``, as
    this one does; a prompt of ids is continued by ids, which not every server tells. details of the result: ``score``,
    ``levels``, and ``complete``, whether the model ended it. TaskError when no continuation of a level succeeds.
    """

    def __init__(
        self, score: Callable[[str], float], beams: int = 2, width: int = 3, step_tokens: int = 16, depth: int = 6
    ) -> None:
        for name, value in (("beams", beams), ("width", width), ("step_tokens", step_tokens), ("depth", depth)):
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        self.score, self.beams, self.width = score, beams, width
        self.step_tokens, self.depth = step_tokens, depth

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        yield ParallelProcess([self._search(task) for task in tasks])

    def _search(self, task: GenerationTask) -> Process:
        kept, level = [Beam()], 0
        while level < self.depth and not all(beam.complete for beam in kept):
            grown = {step: beam for beam in kept if not beam.complete for step in self._steps(task, beam, level)}
            yield each(NativeGenerationController(), grown, tolerant=True)
            beams = [self._grow(beam, step) for step, beam in grown.items() if step.status is TaskStatus.DONE]
            if not beams:
                raise TaskError(f"no continuation succeeded: {next(iter(grown)).reason}")
            kept = sorted([*(beam for beam in kept if beam.complete), *beams], key=lambda b: -b.score)[: self.beams]
            level += 1
        _result(task, kept[0], level)

    def _steps(self, task: GenerationTask, beam: Beam, level: int) -> list[GenerationTask]:
        """The continuations of a beam; with a seed, each level draws with others."""
        prompt, needed = continued(task.prompt, beam.text, beam.token_ids) if level else (task.prompt, {})
        options: Mapping[str, Any] = {**task.options, **needed, "max_tokens": self.step_tokens}
        if "seed" in task.options:
            options = {**options, "seed": task.options["seed"] + level * self.width}
        return samples(GenerationTask(**task.inputs() | {"prompt": prompt, "options": options}), self.width)

    def _grow(self, beam: Beam, step: GenerationTask) -> Beam:
        text = beam.text + (step.output_str or "")
        complete = step.finish_reason != "length"
        text = text if complete else whole(text)
        return Beam(text, [*beam.token_ids, *step.output_tokens], self.score(text), complete)


def _result(task: GenerationTask, best: Beam, levels: int) -> None:
    task.output_str, task.output_tokens = best.text, best.token_ids
    task.finish_reason = "stop" if best.complete else "length"
    task.end(TaskStatus.DONE)
    task.details = {"score": best.score, "levels": levels, "complete": best.complete}
