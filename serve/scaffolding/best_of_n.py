"""Best of N: several generations for one prompt, and the one that scores best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve.scaffolding.controller import Controller, NativeGenerationController, Process, each, survivors
from serve.scaffolding.task import GenerationTask, samples


class BestOfNController(Controller):
    """reward(task): how good a result is; None: the mean log-probability of its tokens. controller: how each candidate
    is made.

    details of the result: ``scores``, by candidate (None for one that failed), and ``chosen``, its place. Of equals the
    first is taken. TaskError when all candidates fail.
    """

    def __init__(
        self,
        n: int = 4,
        reward: Callable[[GenerationTask], float] | None = None,
        controller: Controller | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"n: must be at least 1, not {n}")
        self.n, self.reward = n, reward
        self.controller = controller or NativeGenerationController()

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        candidates = [samples(task, self.n) for task in tasks]
        if self.reward is None:
            for candidate in (candidate for made in candidates for candidate in made):
                candidate.logprobs = candidate.logprobs or 0
        yield each(self.controller, (candidate for made in candidates for candidate in made), tolerant=True)
        for task, made in zip(tasks, candidates):
            self._choose(task, made)

    def _choose(self, task: GenerationTask, made: list[GenerationTask]) -> None:
        reward = self.reward or _mean_logprob
        scores = {candidate: reward(candidate) for candidate in survivors(made)}
        best = max(scores, key=lambda candidate: scores[candidate])
        task.details = {"scores": [scores.get(candidate) for candidate in made], "chosen": made.index(best)}
        task.adopt(best)


def _mean_logprob(task: GenerationTask) -> float:
    return task.mean_logprob
