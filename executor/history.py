"""What one output of an open request has generated: kept until its client has everything, so that a worker, or the
executor, may die at any time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from executor.engines.base import StepRow, TokenLogprob
from executor.ledger import Ledger
from executor.messages import MAX_COUNT


@dataclass(slots=True)
class OutputHistory:
    """What one output has generated.

    closed: no row of it is wanted any more: the engine ended it, or a worker did (stop string, hook, failure).
    last: the engine's finishing row, without its ids; it is sent again behind the history.
    ledger: what enters ids. settled: those of them that it has entered; ``tokens`` are all.
    """

    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)
    settled: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] | None = None
    closed: bool = False
    last: StepRow | None = None

    @property
    def tokens(self) -> array[int]:
        """All ids."""
        self.ledger.settle()
        return self.settled

    def add(self, row: StepRow) -> None:
        """Take a row of the engine."""
        self.ledger.extend(self.settled, row.token_ids)
        if row.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(row.logprobs)
        if row.finish_reason is not None:
            self.closed, self.last = True, row

    def rows(self, rid: int, index: int) -> list[StepRow]:
        """The history as rows of a size that the wire can count, the finish on the last."""
        rows = history_rows(rid, index, self.tokens, self.logprobs)
        if self.closed:
            last = rows.pop() if rows else StepRow(rid, index, ())
            # What a worker ended has no finish of the engine. The next worker ends it at the same token, unless it has
            # a hook that goes by the cut into steps: then this finish ends it, since nothing else would.
            finish = self.last or StepRow(rid, index, (), "stop")
            rows.append(
                last._replace(finish_reason=finish.finish_reason, stop_token=finish.stop_token, message=finish.message)
            )
        return rows


def history_rows(
    rid: int, index: int, tokens: array[int], logprobs: Sequence[TokenLogprob] | None = None
) -> list[StepRow]:
    """Ids, and an entry for each of them, as rows of at most ``MAX_COUNT`` ids. Entries that some ids lack would stand
    beside the wrong ones, and make no message: then there are none."""
    rows = []
    if logprobs is not None and len(logprobs) < len(tokens):
        logprobs = None
    for start in range(0, len(tokens), MAX_COUNT):
        part = slice(start, start + MAX_COUNT)
        rows.append(
            StepRow(rid, index, tokens[part].tolist(), logprobs=logprobs[part] if logprobs is not None else None)
        )
    return rows
