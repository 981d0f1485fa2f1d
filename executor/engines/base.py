"""The Engine protocol: all the executor asks of whatever generates tokens. A further engine is one more file here.

**Taking up an output.** The ids of an output outlive its engine, so another engine (or the same one, later) can go on
where it stopped: ``add`` gets them as ``history``. They are generated ids, not part of the prompt: ``max_tokens`` and
``min_tokens`` count them, presence and frequency penalties see them, and the noise of a seed goes by the place in the
whole sequence. What follows is what would have followed, ids, log-probabilities and finish; rows bring only the new.

Only an output that has not ended can be taken up. The row that ends one carries its last id, so whoever kept the ids
may know the end as well; if not, :func:`ending_ids` tells whether the last id is one. A history that holds such an id
is refused: the row would have no id, and a stop token is hidden from a client by cutting it off the row that has it.
A history of ``max_tokens`` ids leaves nothing to generate and nothing to hide: one row without ids, with ``length``.
"""

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


def ending_ids(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """The ids that end an output, once it has ``min_tokens`` without them. eos_token_ids: see ``EngineInfo``."""
    return frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else eos_token_ids)


def check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise UnsupportedError unless all ids of the field ``name`` are in ``range(vocab_size)``.

    An id that the model has no row for can end an engine, and with it every other request.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise UnsupportedError(f"{name}: a token id is not in range({vocab_size})")


def check_request(prompt_ids: Sequence[int], sampling: SamplingParams, *, vocab_size: int, max_model_len: int) -> None:
    """Raise UnsupportedError unless an output fits a model of ``vocab_size`` ids and ``max_model_len`` tokens."""
    if not prompt_ids:
        raise UnsupportedError("prompt: no tokens")
    check_ids("prompt", prompt_ids, vocab_size)
    if sampling.max_tokens < 1:
        raise UnsupportedError(f"max_tokens: {sampling.max_tokens} is below 1")
    if len(prompt_ids) + sampling.max_tokens > max_model_len:
        raise UnsupportedError(
            f"max_tokens: a prompt of {len(prompt_ids)} tokens and max_tokens {sampling.max_tokens} exceed the "
            f"{max_model_len} tokens this model holds"
        )
    check_ids("logit_bias", tuple(sampling.logit_bias), vocab_size)


def check_history(history: Sequence[int], sampling: SamplingParams, ending: frozenset[int]) -> None:
    """Raise UnsupportedError unless an output that has generated ``history`` may go on. ending: :func:`ending_ids`."""
    if len(history) > sampling.max_tokens:
        raise UnsupportedError(f"history: {len(history)} tokens, but max_tokens is {sampling.max_tokens}")
    if ending and not ending.isdisjoint(history[max(0, sampling.min_tokens) :]):
        raise UnsupportedError("history: it holds the id that ended the output")


class Engine(Protocol):
    """A source of tokens. All methods but ``wake`` are called from one thread, the executor's loop; none blocks."""

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        """Load and start. ``wake()`` may be called from any thread whenever ``collect()`` has something to give."""

    def add(
        self, rid: int, index: int, prompt_ids: Sequence[int], sampling: SamplingParams, history: Sequence[int] = ()
    ) -> None:
        """Queue one output; it replaces one of the same name. Raises UnsupportedError (nothing is queued then).

        history: ids that this output, not ended, has generated already; the module's docstring says what follows.
        """

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
