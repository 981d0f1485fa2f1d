"""A new executor finds out what its predecessor had: which requests are open, and what they have generated. Pure.

    front end -> executor   joined (each worker), resubmit (each open request), synced
    executor  -> worker     recall
    worker    -> executor   histories

A worker keeps its streams when the executor dies, and every id that has gone into them, so it is asked. A request goes
on from there once everybody has spoken: before that, nobody can say who has it. The first executor of a server does the
same, and hears of nothing.

What is nowhere (the worker died too, or had not been told yet) is generated again from the prompt: tokens are a
function of prompt, sampling and position, and the worker that gets it folds in silence what the client has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from executor.engines.base import StepRow
from executor.history import OutputHistory
from executor.messages import Finish, Histories, Resubmit, WorkerLost


@dataclass(slots=True)
class Held:
    """What a worker has of a request. It may be gone meanwhile; what it said is true all the same."""

    worker: int
    epoch: int
    outputs: dict[int, OutputHistory] = field(default_factory=dict)

    def histories(self, count: int) -> list[OutputHistory]:
        """One per output of a request of ``count`` outputs."""
        return [self.outputs.get(index) or OutputHistory() for index in range(count)]


class Recovery:
    """Gathers what is said, until everybody has. frontends: how many of them have to speak."""

    def __init__(self, frontends: int) -> None:
        #: open requests, as their front ends know them
        self.wanted: dict[int, Resubmit] = {}
        #: what the workers have, by rid
        self.held: dict[int, Held] = {}
        self._all = range(frontends)
        #: those that have not spoken
        self._frontends = set(self._all)
        #: workers that have not spoken -> front ends that expect them to
        self._workers: dict[int, set[int]] = {}
        #: workers that have spoken: each is asked once, whoever announces it when
        self._answered: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether all front ends, and all workers that they named, have spoken."""
        return not self._frontends and not self._workers

    def worker_joined(self, worker: int, frontend: int = 0) -> None:
        """A worker will be asked. A front end that there is not would never take that back."""
        if frontend in self._all and worker not in self._answered:
            self._workers.setdefault(worker, set()).add(frontend)

    def worker_lost(self, lost: WorkerLost) -> None:
        """A worker will not answer any more; what clients have may have grown since the front end spoke. As long as
        another one has not said so, its clients may still be getting what that worker has made."""
        self._expect_no_more(lost.worker, lost.frontend)
        for rid, delivered in lost.delivered.items():
            known = self.wanted.get(rid)
            if known is not None and len(delivered) == len(known.delivered):
                self.wanted[rid] = Resubmit(known.request, delivered, known.epoch)

    def resubmit(self, message: Resubmit) -> None:
        """A request is open."""
        self.wanted[message.request.rid] = message

    def release(self, rid: int) -> None:
        """A request is over after all: its last bytes were on their way."""
        self.wanted.pop(rid, None)

    def forget_frontend(self, frontend: int) -> None:
        """A front end is gone: it will not speak, and its requests are nobody's."""
        self._frontends.discard(frontend)
        for worker in list(self._workers):
            self._expect_no_more(worker, frontend)
        self.wanted = {rid: known for rid, known in self.wanted.items() if known.request.frontend != frontend}

    def synced(self, frontend: int) -> None:
        """A front end has said all."""
        self._frontends.discard(frontend)

    def histories(self, message: Histories) -> None:
        """A worker says what it has. Nothing is taken from one that nobody waits for: it has answered, or is gone."""
        if message.worker not in self._workers:
            return
        for opened in message.steps.opens:
            self.held[opened.rid] = Held(message.worker, opened.epoch)
        for rid, index, ids, finish, logprobs in message.steps.rows():
            held = self.held.get(rid)
            if held is not None and held.worker == message.worker:
                end = finish or Finish("")
                row = StepRow(rid, index, ids, end.reason or None, end.stop_token, end.message, logprobs)
                held.outputs.setdefault(index, OutputHistory()).add(row)
        if message.last:
            del self._workers[message.worker]
            self._answered.add(message.worker)

    def orphans(self) -> Iterable[tuple[int, Held]]:
        """What workers have that nobody wants."""
        return [(rid, held) for rid, held in self.held.items() if rid not in self.wanted]

    def _expect_no_more(self, worker: int, frontend: int) -> None:
        expecting = self._workers.get(worker, set())
        expecting.discard(frontend)
        if not expecting:
            self._workers.pop(worker, None)
