"""Results: what is known of one request's outputs so far, and the one meaning of `finished`.

``GenerationResultBase`` holds the core. Whether a result is complete is one private flag, ``_done``; everybody outside
of this package reads it through ``finished``, a property without a setter, so no post-processor and no controller can
end a stream by assignment. Two classes inherit it, and neither stores a second flag:

    GenerationResultBase
    |- DetokenizedGenerationResultBase   what a post-processing worker rebuilds from step records
    `- GenerationResult                  the handle a caller steps: ``anext(handle)``, ``handle.finished``

A ``CompletionOutput`` offers what is new since the last step as ``*_diff`` fields that each step replaces. Nothing is
cut out of a growing string or list, so a step costs the same at the end of a long stream as at its start.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Logprob(NamedTuple):
    """One generated token with its natural-log probability.

    top: (token id, log-probability) of the most likely tokens, best first; empty unless asked for.
    piece: the text this token completed ("" for a token that ends inside a character).
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    piece: str = ""


class TokenBytes(Protocol):
    """What a record lets a post-processor ask of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of a token, possibly part of a character."""

    def token_text(self, token_id: int) -> str:
        """The same as text, U+FFFD for what is no character."""


class ResultError(RuntimeError):
    """A generation failed; the message is the reason. Terminal: the result is finished."""


class AbortedError(ResultError):
    """The generation was aborted before its end."""


class CompletionOutput:
    """One choice of a result: what it has so far, and what the last step added.

    token_ids: all ids so far, ``array('i')``; cut at the token that completed a stop string.
    token_ids_diff, text_diff, logprobs_diff: what the last step added; () / "" / () when it added nothing here.
    pieces_diff: the text that each of those ids completed, where the request asks for it and it is not simply
        ``text_diff`` (several ids, or text that is held back); else (). ``pieces`` joins the two cases.
    finish_reason: None while it grows; then ``stop``, ``length``, ``abort`` or ``error`` (or what a hook named).
    stop_reason: the stop string, or the client's stop token id, that ended it; else None.
    parts: the text so far in pieces, None where it is not kept; read ``text``.
    """

    __slots__ = (
        "index", "token_ids", "token_ids_diff", "text_diff", "logprobs_diff", "pieces_diff",
        "finish_reason", "stop_reason", "parts",
    )  # fmt: skip

    def __init__(self, index: int, keep_text: bool = False) -> None:
        self.index = index
        self.token_ids = array("i")
        self.token_ids_diff: Sequence[int] = ()
        self.text_diff = ""
        self.logprobs_diff: Sequence[Logprob] = ()
        self.pieces_diff: Sequence[str] = ()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.parts: list[str] | None = [] if keep_text else None

    @property
    def text(self) -> str:
        """The whole text so far. A streaming record does not keep it (its state is bounded): RuntimeError there."""
        if self.parts is None:
            raise RuntimeError("this output does not keep its text: read text_diff at each step")
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""

    @property
    def finished(self) -> bool:
        """Whether this choice is complete; the result is when all of its choices are."""
        return self.finish_reason is not None

    @property
    def pieces(self) -> Sequence[str]:
        """The text of each id of the last step; only where the request asks for it."""
        return self.pieces_diff or (self.text_diff,)

    def settle(self) -> None:
        """Forget the last step's news: another output is being advanced."""
        self.token_ids_diff = ()
        self.text_diff = ""
        self.logprobs_diff = ()
        self.pieces_diff = ()


class GenerationResultBase:
    """What every view of a result shares.

    rid: the request's integer id.
    outputs: its choices, by index.
    prompt_tokens: tokens of all its prompts, for usage.
    updated: the output that the last step advanced.
    """

    __slots__ = ("rid", "outputs", "prompt_tokens", "updated", "_done", "_open")

    def __init__(self, rid: int, num_outputs: int = 1, prompt_tokens: int = 0, keep_text: bool = False) -> None:
        if num_outputs < 1:
            raise ValueError(f"num_outputs must be at least 1, not {num_outputs}")
        self.rid = rid
        self.outputs = [CompletionOutput(i, keep_text) for i in range(num_outputs)]
        self.prompt_tokens = prompt_tokens
        self.updated = self.outputs[0]
        self._done = False
        self._open = num_outputs

    @property
    def finished(self) -> bool:
        """Whether every output is complete and nothing more will come. Read-only: there is no setter."""
        return self._done

    @property
    def completion_tokens(self) -> int:
        """Generated tokens over all outputs, so far."""
        return sum(len(output.token_ids) for output in self.outputs)

    def advance(self, index: int, token_ids: Sequence[int], text: str, logprobs: Sequence[Logprob] = ()) -> None:
        """Apply one step's news of one output. IndexError for an output that does not exist."""
        output = self.outputs[index]
        if output is not self.updated:
            self.updated.settle()
            self.updated = output
        output.token_ids_diff = token_ids
        output.text_diff = text
        output.logprobs_diff = logprobs
        if len(token_ids) == 1:  # the usual step; array.extend goes through an iterator and costs twice as much
            output.token_ids.append(token_ids[0])
        else:
            output.token_ids.extend(token_ids)
        if output.parts is not None and text:
            output.parts.append(text)

    def finish_output(self, index: int, finish_reason: str, stop_reason: str | int | None = None) -> None:
        """Complete one output; the last one completes the result. Completing twice changes nothing."""
        output = self.outputs[index]
        if output.finish_reason is not None:
            return
        output.finish_reason, output.stop_reason = finish_reason, stop_reason
        self._open -= 1
        self._done = self._open == 0

    def fail(self) -> None:
        """End the result at once: what is still open ends with ``error``."""
        for output in self.outputs:
            if output.finish_reason is None:
                output.finish_reason = "error"
        self._open, self._done = 0, True


class DetokenizedGenerationResultBase(GenerationResultBase):
    """What a worker rebuilds of a request, one step at a time, and hands to its post-processor with the step's args.

    vocabulary: raw bytes and text of single tokens, for logprobs.
    """

    __slots__ = ("vocabulary",)

    def __init__(
        self,
        rid: int,
        num_outputs: int = 1,
        prompt_tokens: int = 0,
        keep_text: bool = False,
        vocabulary: TokenBytes | None = None,
    ) -> None:
        super().__init__(rid, num_outputs, prompt_tokens, keep_text)
        self.vocabulary = vocabulary


class OutputDelta(NamedTuple):
    """One step of one output as it reaches a handle (the payload of the ``deltas`` post-processor)."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[Logprob] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class GenerationResult(GenerationResultBase):
    """The handle of a submitted request: ``async for`` or ``anext(handle)`` steps it, ``finished`` says when it is
    over.

    A step that has arrived but was not asked for yet is queued, so cancelling a pending ``anext`` loses no output.
    """

    __slots__ = ("_steps", "_arrived", "_error", "_abort")

    def __init__(
        self,
        rid: int,
        num_outputs: int = 1,
        prompt_tokens: int = 0,
        abort: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(rid, num_outputs, prompt_tokens, keep_text=True)
        self._steps: deque[OutputDelta | ResultError] = deque()
        self._arrived = asyncio.Event()
        self._error: ResultError | None = None
        self._abort = abort

    def deliver(self, step: OutputDelta | ResultError) -> None:
        """Queue a step, or a terminal error, for the next ``anext``. Called on the event loop's thread."""
        self._steps.append(step)
        self._arrived.set()

    def abort(self) -> None:
        """Ask for the generation to stop; the handle then ends with AbortedError."""
        if self._abort is not None and not self._done:
            self._abort(self.rid)

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        self._raise_if_over()
        while not self._steps:
            self._arrived.clear()
            await self._arrived.wait()
            self._raise_if_over()  # another caller may have taken the last step meanwhile
        # No await from here on: a cancelled caller either has taken the step or has left it in the queue.
        self._take(self._steps.popleft())
        if self._error is not None:
            raise self._error
        return self

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._done:
            raise StopAsyncIteration

    async def aresult(self) -> GenerationResult:
        """Step to the end; returns the finished handle. Raises the terminal error if there is one."""
        async for _ in self:
            pass
        return self

    def _take(self, step: OutputDelta | ResultError) -> None:
        if isinstance(step, ResultError):
            self.fail()
            self._error = step
            return
        self.advance(step.index, step.token_ids, step.text, step.logprobs)
        if step.finish_reason is not None:
            self.finish_output(step.index, step.finish_reason, step.stop_reason)
