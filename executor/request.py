"""What a caller asks of the executor: prompts as token ids, how to sample, and an opaque post-processing spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A temperature below this is greedy: dividing float32 logits by less overflows, and the outcome would be the most
#: likely token anyway.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are drawn.

    Values are checked where a request enters (``serve/admission.py`` for HTTP); an engine refuses, with
    :class:`executor.engines.base.UnsupportedError`, what it cannot honour.

    max_tokens: tokens to generate per output at most, >= 1.
    temperature: >= 0; 0 means greedy.
    top_p, min_p: probability mass in (0, 1] and [0, 1]; 1 and 0 are off.
    top_k: keep the k most likely tokens; 0 is off.
    seed: equal seeds give equal tokens for one engine and machine; None draws one when the request is admitted.
    stop_token_ids: ids that end an output besides the model's end-of-sequence ids.
    ignore_eos: the model's own end-of-sequence ids do not end an output (``stop_token_ids`` still do).
    min_tokens: no end-of-sequence or stop token before that many tokens.
    logit_bias: id -> value added to the logit, natural-log units.
    logprobs: None is off, 0 the sampled token's only, k > 0 also the k most likely ones.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults: what an engine must be able to honour, and what travels."""
        return {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) != _SAMPLING_DEFAULTS[name]}


_SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_SAMPLING_DEFAULTS = {name: getattr(SamplingParams(), name) for name in _SAMPLING_FIELDS}


@dataclass(frozen=True, slots=True)
class PostprocParams:
    """Which post-processor a stream gets, by name, and its arguments as plain data (no callable crosses a socket)."""

    post_processor: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostprocWorkerConfig:
    """How post-processing is set up; the same for every worker, and plain data so that it can be handed to a process.

    num_postprocess_workers: worker processes; 0 runs the same worker in the front end's process.
    tokenizer: a ``tokenizer.json`` file, or a directory that transformers loads; "" when streams are text only.
    post_processors: dotted name, ``package.module:TABLE``, of the table of post-processors by name.
    post_processor_hook: dotted name of a hook class, or None.
    vocab_size: ids the model may emit; 0 takes the tokenizer's own size.
    """

    num_postprocess_workers: int = 0
    tokenizer: str = ""
    post_processors: str = "postproc_workers.deltas:POST_PROCESSORS"
    post_processor_hook: str | None = None
    vocab_size: int = 0

    @property
    def enabled(self) -> bool:
        """Whether post-processing runs in processes of its own."""
        return self.num_postprocess_workers > 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One admitted request. It has ``len(prompts) * n`` outputs; output ``p * n + j`` is the j-th for prompt p.

    rid: our integer id, minted at admission, never reused and never the client's.
    prompts: token ids of each prompt.
    spec: everything that never changes about the stream, the bytes of a ``StreamSpec``; the executor never decodes
    them.
    frontend: index of the front end that waits for the emissions.
    """

    rid: int
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    spec: bytes
    n: int = 1
    frontend: int = 0

    @property
    def num_outputs(self) -> int:
        """Outputs over all prompts."""
        return len(self.prompts) * self.n
