"""What one request came to, and the latencies that follow from when its chunks came.

A *chunk* is an event that carries output: text, reasoning, or a piece of a tool call. An event that only opens a
message or ends it is none: a server that says "assistant" before it has a token would else have a time to first token
of nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds on the client's clock.

    start: when it was sent; making a connection is included, waiting for ``--max-concurrency`` (``queued``) is not.
    chunks: when each chunk came; those of one read have one time.
    end: when the last event with a choice came; of a failed request, when it failed.
    input_tokens, output_tokens: as the server says; None when it does not.
    error: why it failed; empty when it did not.
    finished: False while it is open.
    """

    start: float
    queued: float = 0.0
    chunks: array[float] = field(default_factory=lambda: array("d"))
    end: float = 0.0
    input_tokens: int | None = None
    output_tokens: int | None = None
    pieces: list[str] = field(default_factory=list)
    error: str = ""
    finished: bool = False

    @property
    def completed(self) -> bool:
        """Whether its whole answer came."""
        return self.finished and not self.error

    @property
    def text(self) -> str:
        """What was generated, without tool calls."""
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        """Time to the first chunk; an answer without output has its end for it."""
        return (self.chunks[0] if self.chunks else self.end) - self.start

    @property
    def latency(self) -> float:
        """Time to the end of the answer (E2EL)."""
        return self.end - self.start

    @property
    def itls(self) -> list[float]:
        """Gaps between chunks."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:])]

    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of less than two."""
        tokens = self.output_tokens or 0
        return (self.latency - self.ttft) / (tokens - 1) if tokens > 1 else None
