"""Per-request sampling inside transformers' continuous batching, as one logits processor.

The engine hands every batch's scores, one row per output that gets a token, to the processors in its list and then
takes the argmax of what they return. :class:`SamplingProcessor` turns that argmax into anything a request may ask for:
it draws the token itself and writes ``+inf`` at that token of the row, so no argmax can disagree with it.

How a token is drawn, and why equal seeds give equal tokens in any company, is in drawing.py.

**Order of the filters**: repetition penalty, then logit bias with frequency and presence penalty, then the ban of
ending ids before ``min_tokens``, temperature, top_k, top_p and min_p. Log-probabilities are of the model's raw scores.

**Pairing.** ``prepare_tensor_args`` gets the requests in the order of the rows and ``__call__`` gets the rows. The
library calls them one after the other, in one thread, for the same batch; that is what makes it right to keep the rows'
outputs in an attribute between the two. It holds only while ``__call__`` runs for every batch: a captured CUDA graph
would replay the kernels of the batch it was captured with, and never this Python, so the engine turns graphs off. The
ids of batch N must also be known when batch N + 1 is prepared (penalties, positions), so asynchronous batching is off
too. Log-probabilities are kept by position: drawing a position twice overwrites, it cannot shift.

**Cost.** A plain greedy output costs a dictionary look-up; a batch of only such outputs returns at once. On a CPU a
sampled row of 49152 takes 0.2 to 0.4 ms of one core, where the model takes 10 ms for it in a batch of 16.
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
from executor.engines.drawing import filtered, invert, noise_key, uniform
from executor.request import GREEDY_BELOW, SamplingParams

#: Scores worked on at a time on a CPU. Temporaries of megabytes go back to the system every time, and the page faults
#: of getting them anew cost up to twice the arithmetic.
CPU_ELEMENTS = 1 << 18

_NO_ARGS = torch.zeros(0, dtype=torch.int32)


@dataclass(slots=True)
class OutputSampling:
    """How one output is sampled, and what that needs to remember between steps."""

    params: SamplingParams
    #: length of the client's prompt; ids after it are generated, here or by whoever had the output before, though the
    #: library may count them to what it calls the prompt
    prompt_len: int
    #: ids that end the output
    ending: tuple[int, ...]
    #: see :func:`noise_key`
    key: int
    #: whether every step needs the processor; plain greedy outputs do not
    special: bool
    greedy: bool
    filtered: bool
    #: position among the generated ids -> what to report; the engine pops what it reports
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    #: ids of the sequence that the penalties already know
    folded: int = 0
    generated: set[int] = field(default_factory=set)
    #: [vocab] added to the logits: bias, frequency and presence penalty
    additive: Tensor | None = None
    #: [vocab] the repetition penalty at the ids of the sequence, 1 elsewhere
    seen: Tensor | None = None

    @classmethod
    def of(cls, params: SamplingParams, index: int, prompt_len: int, ending: tuple[int, ...]) -> OutputSampling:
        """State for output ``index``. Without a seed one is drawn, and the output cannot be reproduced."""
        seed = random.getrandbits(64) if params.seed is None else params.seed
        greedy = params.temperature < GREEDY_BELOW
        special = not greedy or params.logprobs is not None or _has_edits(params)
        filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        return cls(params, prompt_len, ending, noise_key(seed, index), special, greedy, filtered)

    def edit(self, row: Tensor, initial: Sequence[int], generated: Sequence[int]) -> None:
        """Apply penalties, bias and bans in place. row: [vocab] scores; initial + generated: the sequence so far."""
        if _has_edits(self.params):
            self._fold(row, initial, generated)
            if self.seen is not None:
                _repeat(row, self.seen, self.params.repetition_penalty)
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
            self.seen[fresh] = self.params.repetition_penalty
        first_generated = max(0, self.prompt_len - self.folded)
        self.folded += len(fresh)
        if self.additive is not None:
            self._penalize(self.additive, fresh[first_generated:])

    def _allocate(self, row: Tensor) -> None:
        if self.params.repetition_penalty != 1.0:
            self.seen = torch.ones_like(row)
        if self.params.logit_bias or self.params.presence_penalty or self.params.frequency_penalty:
            self.additive = torch.zeros_like(row)
            for token, bias in self.params.logit_bias.items():
                self.additive[token] = bias

    def _penalize(self, additive: Tensor, tokens: Iterable[int]) -> None:
        for token in tokens:
            once = 0.0 if token in self.generated else self.params.presence_penalty
            self.generated.add(token)
            additive[token] -= self.params.frequency_penalty + once


def _repeat(row: Tensor, factors: Tensor, penalty: float) -> None:
    """Divide positive scores by their factors and multiply negative ones, in place.

    What is wanted is always the lower of the two results, or the higher for a penalty below 1: that saves two masks.
    """
    choose = torch.minimum if penalty > 1.0 else torch.maximum
    choose(row * factors, row / factors, out=row)


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
        if self._rows and scores.device.type == "cpu":
            self._choose_on_cpu(scores)
        elif self._rows:
            self._choose(scores, self._rows)
        return scores

    def _choose_on_cpu(self, scores: Tensor) -> None:
        """A few rows at a time, in one thread: see :data:`CPU_ELEMENTS`.

        Operations this small are over sooner than threads meet, once other processes want the cores as well: 16 rows
        took 9 ms with one thread and 20 to 300 ms with two, on a busy machine of two cores.
        """
        step = max(1, CPU_ELEMENTS // scores.shape[-1])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for first in range(0, len(self._rows), step):
                self._choose(scores, self._rows[first : first + step])
        finally:
            torch.set_num_threads(threads)

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
    kinds: dict[Any, list[int]] = {_greedy: [], _sampled: [], _filtered: []}
    for n, row in enumerate(rows):
        kinds[_greedy if row.output.greedy else _filtered if row.output.filtered else _sampled].append(n)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for pick, members in kinds.items():
        if members:
            part = scores if len(members) == len(rows) else scores[members]
            tokens[members] = pick(part, [rows[n] for n in members])
    return tokens


def _greedy(scores: Tensor, rows: Sequence[_Row]) -> Tensor:
    return scores.argmax(-1)


def _sampled(scores: Tensor, rows: Sequence[_Row]) -> Tensor:
    temperature = _column([row.output.params.temperature for row in rows], scores)
    return invert((scores / temperature).softmax(-1), _noise(rows, scores))


def _filtered(scores: Tensor, rows: Sequence[_Row]) -> Tensor:
    params = [row.output.params for row in rows]
    scaled = scores / _column([p.temperature for p in params], scores)
    filters = torch.cat([_column([p.top_k, p.top_p, p.min_p], scores).T for p in params])
    return filtered(scaled, filters, _noise(rows, scores))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)


def _noise(rows: Sequence[_Row], like: Tensor) -> Tensor:
    noise = [uniform(row.output.key, row.position) for row in rows]
    return torch.tensor(noise, dtype=torch.float64, device=like.device).unsqueeze(-1)


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
