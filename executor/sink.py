"""Who waits for a request's bytes: the contract, and the sink that feeds a handle."""

from __future__ import annotations

from typing import Protocol

from executor.messages import FAILED, REQUEST_END, WireError
from executor.result import AbortedError, GenerationResult, OutputDelta, ResultError
from executor.wire import decode_deltas


class Sink(Protocol):
    """Who waits for a request's bytes. Called on the event loop; must not block."""

    def feed(self, payload: bytes, flags: int) -> None:
        """More bytes; ``flags`` as in ``executor.messages``. Nothing follows REQUEST_END."""

    def feed_parts(self, head: bytes, piece: bytes, tail: bytes) -> None:
        """More bytes, in three parts: the same as ``feed(head + piece + tail, 0)``, which some do with one copy."""

    def fail(self, message: str) -> None:
        """The request cannot go on (the executor is gone); nothing follows."""

    def refuse(self, message: str, status: int, retry_after: float) -> None:
        """The request was not taken, and no byte of it has come; nothing follows. status: 429 or 503, as HTTP has them;
        retry_after: seconds."""


class ResultSink:
    """Feeds a GenerationResult."""

    def __init__(self, result: GenerationResult) -> None:
        self._result = result
        #: whether an output has been aborted; the handle is told at the request's end, behind the tokens of all outputs
        self._aborted = False

    def feed(self, payload: bytes, flags: int) -> None:
        try:
            for step in decode_deltas(payload):
                self._deliver(step)
        except WireError as error:  # an exception here would keep the other requests of the frame from their bytes
            self._result.deliver(ResultError(f"the worker's answer cannot be read: {error}"))
        if flags & FAILED and not payload:
            self._result.deliver(ResultError("the request was refused by its worker"))
        elif flags & REQUEST_END and self._aborted:
            self._result.deliver(AbortedError("the generation was aborted"))
        elif flags & REQUEST_END:
            # Every result ends, also where a post-processor's last step did not say so.
            self._result.deliver(ResultError("the request ended without a result"))

    def feed_parts(self, head: bytes, piece: bytes, tail: bytes) -> None:
        self.feed(head + piece + tail, 0)

    def fail(self, message: str) -> None:
        self._result.deliver(ResultError(message))

    def refuse(self, message: str, status: int, retry_after: float) -> None:
        self._result.deliver(ResultError(message))

    def _deliver(self, step: OutputDelta | str) -> None:
        if isinstance(step, str):
            self._result.deliver(ResultError(step))
        elif step.index >= len(self._result.outputs):
            raise WireError(f"delta: there is no output {step.index}")
        elif step.finish_reason == "abort":
            self._aborted = True
            if step.token_ids or step.text:  # they were generated before the abort, and came in the same row
                self._result.deliver(step._replace(finish_reason=None))
        else:
            self._result.deliver(step)
