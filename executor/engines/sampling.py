"""Per-request sampling inside transformers' continuous batching, as one logits processor.

The engine hands every batch's scores, one row per output that gets a token, to the processors in its list and then
takes the argmax of what they return. :class:`SamplingProcessor` turns that argmax into anything a request may ask for:
it draws the token itself and writes ``+inf`` at that token of the row, so no argmax can disagree with it.

**Noise.** A token needs one uniform number, not one per vocabulary entry: the token is where that number falls in the
cumulative distribution of what the filters left. The number is a hash of (seed, output index, position in the
sequence), SplitMix64 used as a counter-based generator, so no generator state exists. Hence a seeded output gets the
same tokens whatever else is in the batch and after a preemption, and an output resubmitted with its history as part of
the prompt goes on with the same noise, since position counts prompt and generated ids alike. That holds up to the
model's own rounding: in a batch of another shape the last bits of a logit may differ, which flips a token about once in
a million in float32 and noticeably often in bfloat16.

**Order of the filters**: repetition penalty, then logit bias with frequency and presence penalty, then the ban of
ending ids before ``min_tokens``, temperature, top_k, top_p and min_p. Log-probabilities are of the model's raw scores.

**Pairing.** ``prepare_tensor_args`` gets the requests in the order of the rows and ``__call__`` gets the rows. The
library calls them one after the other, in one thread, for the same batch; that is what makes it right to keep the rows'
outputs in an attribute between the two. It holds only while ``__call__`` runs for every batch: a captured CUDA graph
would replay the kernels of the batch it was captured with, and never this Python, so the engine turns graphs off. The
ids of batch N must also be known when batch N + 1 is prepared (penalties, positions), so asynchronous batching is off
too. Log-probabilities are kept by position: drawing a position twice overwrites, it cannot shift.

**Cost.** A plain greedy output costs a dictionary look-up; a batch of only such outputs returns at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from executor.engines.base import TokenLogprob
from executor.request import SamplingParams

#: Below this a temperature is greedy: dividing by less overflows float32 logits.
GREEDY_TEMPERATURE = 1e-5

#: Candidates looked at before top_p sorts the whole vocabulary; 16 x 49152 on two cores: 4 ms against 50 ms.
NUCLEUS_WIDTH = 512

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NO_ARGS = torch.zeros(0, dtype=torch.int32)


def mix64(value: int) -> int:
    """SplitMix64's output function: a bijection of 64-bit integers whose every input bit changes half the output."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def noise_key(seed: int, index: int) -> int:
    """The stream of noise of output ``index`` under ``seed`` (any integer; taken modulo 2**64)."""
    return mix64((mix64((seed + _GOLDEN) & _MASK) + (index + 1) * _GOLDEN) & _MASK)


def uniform(key: int, position: int) -> float:
    """The number in [0, 1) for one position of a stream; 52 bits, so that times a total it stays below the total."""
    return (mix64((key + position * _GOLDEN) & _MASK) >> 12) * 2.0**-52


@dataclass(slots=True)
class OutputSampling:
    """How one output is sampled, and what that needs to remember between steps."""

    params: SamplingParams
    #: length of the prompt; ids after it are generated
    prompt_len: int
    #: ids that end the output
    ending: tuple[int, ...]
    #: see :func:`noise_key`
    key: int
    #: whether every step needs the processor; plain greedy outputs do not
    special: bool
    greedy: bool
    #: position among the generated ids -> what to report; the engine pops what it reports
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    #: ids of the sequence that the penalties already know
    folded: int = 0
    generated: set[int] = field(default_factory=set)
    #: [vocab] added to the logits: bias, frequency and presence penalty
    additive: Tensor | None = None
    #: [vocab] bool, ids that the repetition penalty applies to
    seen: Tensor | None = None

    @classmethod
    def of(cls, params: SamplingParams, index: int, prompt_len: int, ending: tuple[int, ...]) -> OutputSampling:
        """State for output ``index``. Without a seed one is drawn, and the output cannot be reproduced."""
        seed = random.getrandbits(64) if params.seed is None else params.seed
        greedy = params.temperature < GREEDY_TEMPERATURE
        special = not greedy or params.logprobs is not None or _has_edits(params)
        return cls(params, prompt_len, ending, noise_key(seed, index), special, greedy)

    def edit(self, row: Tensor, initial: Sequence[int], generated: Sequence[int]) -> None:
        """Apply penalties, bias and bans in place. row: [vocab] scores; initial + generated: the sequence so far."""
        if _has_edits(self.params):
            self._fold(row, initial, generated)
            if self.seen is not None:
                penalty = self.params.repetition_penalty
                row.copy_(torch.where(self.seen, torch.where(row > 0, row / penalty, row * penalty), row))
            if self.additive is not None:
                row += self.additive
        if self.ending and len(initial) + len(generated) - self.prompt_len < self.params.min_tokens:
            row[list(self.ending)] = -torch.inf

    def _fold(self, row: Tensor, initial: Sequence[int], generated: Sequence[int]) -> None:
        """Bring bias and penalties up to date. Only new ids are looked at, so a stream costs linear time."""
        if self.additive is None and self.seen is None:
            self._allocate(row)
        fresh = [*initial[self.folded :], *generated[max(0, self.folded - len(initial)) :]]
        if self.seen is not None and fresh:
            self.seen[fresh] = True
        first_generated = max(0, self.prompt_len - self.folded)
        self.folded += len(fresh)
        if self.additive is not None:
            self._penalize(self.additive, fresh[first_generated:])

    def _allocate(self, row: Tensor) -> None:
        if self.params.repetition_penalty != 1.0:
            self.seen = torch.zeros_like(row, dtype=torch.bool)
        if self.params.logit_bias or self.params.presence_penalty or self.params.frequency_penalty:
            self.additive = torch.zeros_like(row)
            for token, bias in self.params.logit_bias.items():
                self.additive[token] = bias

    def _penalize(self, additive: Tensor, tokens: Iterable[int]) -> None:
        for token in tokens:
            once = 0.0 if token in self.generated else self.params.presence_penalty
            self.generated.add(token)
            additive[token] -= self.params.frequency_penalty + once


def _has_edits(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty or params.logit_bias
    )


class _Row(NamedTuple):
    """A row of the batch that the processor works on. position: ids in the sequence before the one to draw."""

    number: int
    output: OutputSampling
    initial: Sequence[int]
    generated: Sequence[int]
    position: int


class SamplingProcessor(ContinuousBatchingLogitsProcessor):
    """The one processor of the engine; see the module's docstring for how rows find their outputs."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        #: library request id -> its sampling. The engine's thread adds and removes, the generation thread reads:
        #: single dictionary operations, and an id that is gone is sampled greedily and its output dropped.
        self.outputs: dict[str, OutputSampling] = {}
        self._rows: list[_Row] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Part of the library's interface; this processor keeps nothing in the argument tensor."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> Tensor:
        """Note the rows of the coming batch that are more than a greedy pick."""
        self._rows = []
        for number, request in enumerate(requests_with_new_token):
            state = request.state
            output = self.outputs.get(state.request_id)
            if output is None:
                continue
            position = len(state.initial_tokens) + len(state.generated_tokens)
            if output.special or position - output.prompt_len < output.params.min_tokens:
                self._rows.append(_Row(number, output, state.initial_tokens, state.generated_tokens, position))
        return _NO_ARGS

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """scores: [rows, vocab] float32, changed in place and returned."""
        if self._rows:
            self._choose(scores, self._rows)
        return scores

    def _choose(self, scores: Tensor, rows: list[_Row]) -> None:
        numbers = torch.tensor([row.number for row in rows], device=scores.device)
        raw = scores.index_select(0, numbers)
        wants_logprobs = [n for n, row in enumerate(rows) if row.output.params.logprobs is not None]
        edited = raw.clone() if wants_logprobs else raw
        for scored, row in zip(edited, rows, strict=True):
            row.output.edit(scored, row.initial, row.generated)
        tokens = draw(edited, rows)
        scores[numbers, tokens] = torch.inf
        if wants_logprobs:
            _report(raw[wants_logprobs], tokens[wants_logprobs], [rows[n] for n in wants_logprobs])


def draw(scores: Tensor, rows: Sequence[_Row]) -> Tensor:
    """One token id per row. scores: [rows, vocab] after penalties. Returns int64 [rows]."""
    tokens = scores.argmax(-1)
    sampled = [n for n, row in enumerate(rows) if not row.output.greedy]
    if not sampled:
        return tokens
    params = [rows[n].output.params for n in sampled]
    noise = [uniform(rows[n].output.key, rows[n].position) for n in sampled]
    part = scores if len(sampled) == len(rows) else scores[sampled]
    tokens[sampled] = invert(probabilities(part, params), noise)
    return tokens


def probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each row draws from, unnormalized: 0 for what top_k, top_p and min_p filter out. Shapes [rows, vocab].

    Tokens as likely as the last one kept are kept too: a cut between equals would depend on the order of a sort.
    """

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=scores.device).unsqueeze(-1)

    vocab = scores.shape[-1]
    scaled = scores / column(p.temperature for p in params)
    top_k = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if any(top_k):
        scaled = scaled.masked_fill_(scaled < _kth_largest(scaled, top_k), -torch.inf)
    probs = scaled.softmax(-1)
    cut = torch.zeros_like(probs[:, :1])
    if any(p.top_p < 1.0 for p in params):
        width = max(top_k) if all(top_k) else min(vocab, NUCLEUS_WIDTH)
        cut = _nucleus_cut(probs, column(p.top_p for p in params), width)
    if any(p.min_p > 0.0 for p in params):
        cut = torch.maximum(cut, column(p.min_p for p in params) * probs.amax(-1, keepdim=True))
    return probs.masked_fill_(probs < cut, 0.0)


def _kth_largest(scores: Tensor, top_k: Sequence[int]) -> Tensor:
    """The top_k-th largest score of each row, -inf where top_k is 0. Returns [rows, 1]."""
    kth = torch.tensor(top_k, device=scores.device).unsqueeze(-1)
    largest = scores.topk(max(top_k), dim=-1).values
    return largest.gather(1, (kth - 1).clamp_(min=0)).masked_fill_(kth == 0, -torch.inf)


def _nucleus_cut(probs: Tensor, top_p: Tensor, width: int) -> Tensor:
    """The smallest probability of each row's nucleus, the fewest tokens whose mass reaches top_p; 0 where it is 1.

    Looks at the ``width`` most likely tokens, and at all of them when some row's nucleus is wider.
    """
    off = top_p >= 1.0
    likely = probs.topk(width, dim=-1).values
    mass = likely.cumsum(-1)
    if width < probs.shape[-1] and bool(((mass[:, -1:] < top_p) & ~off).any()):
        likely = probs.sort(dim=-1, descending=True).values
        mass = likely.cumsum(-1)
    kept = (mass - likely < top_p).sum(-1, keepdim=True).clamp_(min=1)
    return likely.gather(1, kept - 1).masked_fill_(off, 0.0)


def invert(probs: Tensor, noise: Sequence[float]) -> Tensor:
    """The token where each row's uniform number falls. probs: [rows, vocab], not necessarily normalized.

    The sum runs in id order and in float64: in the order of a sort, near-equal tokens would trade places.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    aim = torch.tensor(noise, dtype=torch.float64, device=probs.device).unsqueeze(-1) * cumulative[:, -1:]
    # A row of NaN (an overflowing model) finds no place: the clamp keeps it an id, so that only its own text suffers.
    return torch.searchsorted(cumulative, aim, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)


def _report(raw: Tensor, tokens: Tensor, rows: Sequence[_Row]) -> None:
    """Store each row's log-probabilities. raw: [rows, vocab] the model's scores; tokens: [rows] what was drawn."""
    normalizer = raw.logsumexp(-1, keepdim=True)
    chosen = (raw.gather(1, tokens.unsqueeze(-1)) - normalizer).squeeze(-1).tolist()
    most = min(max(row.output.params.logprobs or 0 for row in rows), raw.shape[-1])
    best = raw.topk(most, dim=-1)
    values, ids = (best.values - normalizer).tolist(), best.indices.tolist()
    for n, row in enumerate(rows):
        count = row.output.params.logprobs or 0
        top = tuple(zip(ids[n][:count], values[n][:count], strict=True))
        row.output.logprobs[row.position - row.output.prompt_len] = TokenLogprob(chosen[n], top)
