"""A chat answer that is chosen from several generations: majority vote and best of N over HTTP.

The generations are the outputs of one request, as its choices would be. So admission, aborts, drains, recovery and
recordings have nothing to know of it, the seeds of the generations are those of choices, and what a client gets is a
function of the request and the tokens: all generations run to their end, since which of them would be cut short
depends on their pace. What is new is here: each is folded as in a document, and when all have ended one of them is the
answer, written by the code of every other chat response.

Until then a stream has comments that tell how far they are. They are no part of what it is a function of: a worker that
takes a request over may tell some of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from executor.result import CompletionOutput, DetokenizedGenerationResultBase
from serve.events import Folded
from serve.harmony_adapter import HarmonyPostprocArgs, chat_harmony_unary_post_processor, is_harmony
from serve.postprocess_handlers import ChatPostprocArgs, chat_answer, chat_choice, chat_unary_post_processor
from serve.votes import EXTRACTORS, Extractor, count_votes, elect

Record = DetokenizedGenerationResultBase

#: Tokens of each generation, on the average, between two comments: a few a second for a usual model.
TOKENS_PER_COMMENT = 32


class Chooser(Protocol):
    """A method."""

    def observe(self, output: CompletionOutput) -> None:
        """A step of a generation."""

    def choose(self, generations: Sequence[Folded]) -> tuple[int, str]:
        """The place of the one that is the answer, and why, in words."""


class MajorityVote:
    """The first generation that gives the answer which most give. One with tool calls gives these too."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._extract: Extractor = EXTRACTORS[args["extract"] or "text"]

    def observe(self, output: CompletionOutput) -> None:
        """The text is all that counts."""

    def choose(self, generations: Sequence[Folded]) -> tuple[int, str]:
        answers = [self._answer(folded) for folded in generations]
        place = elect(answers)
        return place, f"{count_votes(answers)[answers[place]]} votes"

    def _answer(self, folded: Folded) -> Hashable | None:
        answer = self._extract("".join(folded.content))
        calls = tuple((call.name, "".join(call.arguments)) for call in folded.tool_calls)
        return (answer, calls) if calls else answer


class BestOfN:
    """The generation whose tokens have the highest mean log-probability; of equals the first."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        #: per generation: the sum of its log-probabilities, and how many
        self._sums: dict[int, tuple[float, int]] = {}

    def observe(self, output: CompletionOutput) -> None:
        total, count = self._sums.get(output.index, (0.0, 0))
        for entry in output.logprobs_diff:
            total, count = total + entry.logprob, count + 1
        self._sums[output.index] = total, count

    def choose(self, generations: Sequence[Folded]) -> tuple[int, str]:
        means = [self._mean(place) for place in range(len(generations))]
        best = max(means)
        return means.index(best), f"mean log-probability {best:.4f}"

    def _mean(self, place: int) -> float:
        total, count = self._sums.get(place, (0.0, 0))
        return total / count if count else float("-inf")


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Chooser]] = {"majority_vote": MajorityVote, "best_of_n": BestOfN}


class ScaffoldedArgs(ChatPostprocArgs):
    """Arguments and state of one response that is chosen."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args)
        asked = args["scaffolding"]
        self.prompt_uses = self.choices
        self.streaming = bool(args["streaming"])
        self._chooser = METHODS[asked["method"]](asked)
        #: generations that have ended, and tokens of all
        self._ended = self._tokens = 0
        #: tokens from which on the next comment is due
        self._due = 0

    def observe(self, output: CompletionOutput) -> None:
        """The record's last step."""
        self._chooser.observe(output)
        self._tokens += len(output.token_ids_diff)
        self._ended += output.finish_reason is not None

    def fold(self, record: Record) -> bytes:
        """Fold the record's last step; the answer, once the record is finished."""
        return chat_unary_post_processor(record, self)

    def progress(self, ended: bool) -> bytes:
        """A comment if it is time for one: at first, whenever a generation ends, and after so many tokens."""
        if not self.streaming or not (ended or self._tokens >= self._due):
            return b""
        self.started = True
        self._due = self._tokens + TOKENS_PER_COMMENT * self.choices
        return self._comment()

    def folded_answer(self, record: Record) -> bytes:
        """The answer, as the rest of the stream or as a document."""
        place, why = self._chooser.choose([choice.folded for choice in self.by_choice])
        output = record.outputs[place]
        if not self.streaming:
            return self.document(record, [chat_choice(self, output) | {"index": 0}])
        return self._comment(f"; chose generation {place}: {why}") + chat_answer(record, self, output)

    def _comment(self, more: str = "") -> bytes:
        counts = f"{self._ended} of {self.choices} generations, {self._tokens} tokens"
        return f": scaffolding {counts}{more}\n\n".encode()


class HarmonyScaffoldedArgs(ScaffoldedArgs, HarmonyPostprocArgs):
    """The same for harmony models."""

    def fold(self, record: Record) -> bytes:
        """As above."""
        return chat_harmony_unary_post_processor(record, self)


def scaffolded_args(args: Mapping[str, Any]) -> ScaffoldedArgs:
    """The args of a spec, for the format of its model."""
    return HarmonyScaffoldedArgs(args) if is_harmony(args) else ScaffoldedArgs(args)


def scaffolding_post_processor(record: Record, args: ScaffoldedArgs) -> bytes:
    """What the last step adds to the response: progress, if it streams, and the answer once the record is finished."""
    output = record.updated
    args.observe(output)
    return args.fold(record) or args.progress(output.finish_reason is not None)
