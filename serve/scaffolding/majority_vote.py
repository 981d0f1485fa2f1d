"""Majority vote, also known as self-consistency: several generations, and the answer that most of them give.

It ends as soon as the answer is certain: when those still running could not change it, they are cancelled.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from serve.scaffolding.controller import (
    Controller,
    NativeGenerationController,
    ParallelProcess,
    Process,
    each,
    survivors,
)
from serve.scaffolding.task import GenerationTask, TaskStatus, samples
from serve.votes import Extractor, count_votes, elect, is_certain


class MajorityVoteController(Controller):
    """extract(text): the answer in a text, None for none, which is no vote; by default the text without the space
    around it. controller: how each voter's text is made. early_stop: whether it may end before all have voted.

    details of the result: ``answer``, ``votes`` by answer, and ``voters``, how many gave one. The result is the first
    voter's, by its place, that gave that answer; of answers with equal votes, the one whose first voter comes first.
    TaskError when no generation succeeds. When none of them gives an answer, it is the first text, and ``answer`` None.
    """

    def __init__(
        self,
        n: int = 8,
        extract: Extractor = str.strip,
        controller: Controller | None = None,
        early_stop: bool = True,
    ) -> None:
        if n < 1:
            raise ValueError(f"n: must be at least 1, not {n}")
        self.n, self.extract, self.early_stop = n, extract, early_stop
        self.controller = controller or NativeGenerationController()

    def process(self, tasks: Sequence[GenerationTask]) -> Process:
        yield ParallelProcess([self._vote(task) for task in tasks])

    def _vote(self, task: GenerationTask) -> Process:
        voters = samples(task, self.n)
        answers: dict[GenerationTask, Hashable | None] = {}

        def enough() -> bool:
            self._count(voters, answers)
            running = sum(not voter.ended for voter in voters)
            return self.early_stop and is_certain(count_votes(answers.values()), running)

        yield each(self.controller, voters, enough=enough, tolerant=True)
        self._count(voters, answers)
        self._elect(task, survivors(voters), answers)

    def _count(self, voters: list[GenerationTask], answers: dict[GenerationTask, Hashable | None]) -> None:
        """Ask for the answers of those that have become done; each is asked for once."""
        for voter in voters:
            if voter.status is TaskStatus.DONE and voter not in answers:
                answers[voter] = self.extract(voter.output_str or "")

    def _elect(
        self, task: GenerationTask, voters: list[GenerationTask], answers: dict[GenerationTask, Hashable | None]
    ) -> None:
        given = [answers[voter] for voter in voters]
        votes, place = count_votes(given), elect(given)
        task.details = {"answer": given[place], "votes": dict(votes), "voters": sum(votes.values())}
        task.adopt(voters[place])
