"""The Engine protocol: all the executor asks of whatever generates tokens. A further engine is one more file here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from executor.request import SamplingParams


class UnsupportedError(ValueError):
    """The engine cannot honour a field of a request; the message names the field."""


class EngineDeadError(RuntimeError):
    """The engine broke and makes no more tokens, for anybody; the message says why. Another can resume its outputs."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it has started; admission reads it, and it crosses the wire as a map.

    name: for logs and /version, e.g. ``transformers``.
    vocab_size: ids are in ``range(vocab_size)``.
    max_model_len: prompt and generated tokens of one output together.
    supported: names of the SamplingParams fields it honours; others at non-default values are refused at admission.
    eos_token_ids: ids that end an output unless ``ignore_eos``.
    """

    name: str
    vocab_size: int
    max_model_len: int
    supported: tuple[str, ...]
    eos_token_ids: tuple[int, ...] = ()


class TokenLogprob(NamedTuple):
    """The sampled token's log-probability (natural log) and the most likely alternatives, best first."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


class StepRow(NamedTuple):
    """What one engine step made for one output.

    token_ids: 0 or more new ids; empty only when the row brings a finish.
    finish_reason: None, ``stop``, ``length``, ``abort`` or ``error``.
    stop_token: with ``stop``, whether the last id is the end-of-sequence or stop token that ended the output.
    message: with ``error``, the reason, for the client.
    logprobs: one per id when the request asked for them.
    """

    rid: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs of a row
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_token: bool = False
    message: str = ""
    logprobs: Sequence[TokenLogprob] | None = None


def check_request(prompt_ids: Sequence[int], sampling: SamplingParams, *, vocab_size: int, max_model_len: int) -> None:
    """Raise UnsupportedError unless an output fits a model of ``vocab_size`` ids and ``max_model_len`` tokens.

    An id that the model has no row for can end an engine, and with it every other request.
    """
    if not prompt_ids:
        raise UnsupportedError("prompt: no tokens")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise UnsupportedError(f"prompt: a token id is not in range({vocab_size})")
    if sampling.max_tokens < 1:
        raise UnsupportedError(f"max_tokens: {sampling.max_tokens} is below 1")
    if len(prompt_ids) + sampling.max_tokens > max_model_len:
        raise UnsupportedError(
            f"max_tokens: a prompt of {len(prompt_ids)} tokens and max_tokens {sampling.max_tokens} exceed the "
            f"{max_model_len} tokens this model holds"
        )
    if any(not 0 <= token < vocab_size for token in sampling.logit_bias):
        raise UnsupportedError(f"logit_bias: a token id is not in range({vocab_size})")


class Engine(Protocol):
    """A source of tokens. All methods but ``wake`` are called from one thread, the executor's loop; none blocks."""

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        """Load and start. ``wake()`` may be called from any thread whenever ``collect()`` has something to give."""

    def add(self, rid: int, index: int, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Queue one output. Raises UnsupportedError (nothing is queued then)."""

    def cancel(self, rid: int, index: int) -> None:
        """Stop generating an output. No row of it has to follow; unknown outputs are ignored."""

    def collect(self) -> list[StepRow]:
        """All rows made since the last call, in order; [] when there is nothing. Raises EngineDeadError."""

    def poll_timeout(self) -> float | None:
        """Seconds until ``collect()`` should be called even without a wake; None: only a wake matters."""

    def stats(self) -> dict[str, Any]:
        """Numbers for /metrics: running, waiting (outputs), and what else the engine can tell cheaply."""

    def close(self) -> None:
        """Stop and free everything; idempotent."""
