"""Sampling against plain references, without a model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.engines.drawing import BLOCK, LIKELY, filtered, invert, noise_key, uniform
from executor.engines.sampling import OutputSampling, SamplingProcessor
from executor.request import SamplingParams

NO_ARGS = torch.zeros(0, dtype=torch.int32)


class Batch:
    """A processor and the outputs of its next batch, one per row."""

    def __init__(self, ending: tuple[int, ...] = ()) -> None:
        self.processor = SamplingProcessor()
        self.ending = ending
        self.requests: list[Any] = []
        self.outputs: list[OutputSampling] = []

    def add(self, prompt: list[int], generated: list[int] | None = None, index: int = 0, **sampling: Any) -> Batch:
        name = str(len(self.requests))
        output = OutputSampling.of(SamplingParams(**sampling), index, len(prompt), self.ending)
        self.processor.outputs[name] = output
        self.outputs.append(output)
        state = SimpleNamespace(request_id=name, initial_tokens=prompt, generated_tokens=list(generated or []))
        self.requests.append(SimpleNamespace(state=state))
        return self

    def draw(self, scores: Tensor) -> list[int]:
        assert self.processor.prepare_tensor_args(self.requests).numel() == 0
        return [int(token) for token in self.processor(scores.clone(), NO_ARGS).argmax(-1)]


def random_scores(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(-1)


# -- noise -------------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_every_argument_matters() -> None:
    values = [uniform(noise_key(seed, index), pos) for seed in range(10) for index in range(10) for pos in range(50)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    for tenth in range(10):
        inside = sum(tenth <= value * 10 < tenth + 1 for value in values)
        assert abs(inside - 500) < 5 * math.sqrt(450)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 3, -(2**70)])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0.0 <= uniform(noise_key(seed, 0), 0) < 1.0
    assert noise_key(seed, 0) == noise_key(seed % 2**64, 0)


# -- the draw ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_invert_finds_the_place_in_the_running_sum(n: int) -> None:
    weights = torch.rand(4, n, generator=torch.Generator().manual_seed(n))
    weights[weights < 0.4] = 0.0
    weights[:, n // 2] = 0.5
    running = weights.double().cumsum(-1)
    for noise in (0.0, 1e-9, 0.25, 0.5, 0.999, 1.0 - 2**-52):
        places = invert(weights, torch.full((4, 1), noise, dtype=torch.float64))
        for row, place in enumerate(places.tolist()):
            assert weights[row, place] > 0.0
            aim = noise * float(running[row, -1])
            assert running[row, place] > aim - 1e-9
            assert place == 0 or running[row, place - 1] <= aim + 1e-9


def test_invert_of_not_a_number_is_still_an_id() -> None:
    places = invert(torch.full((2, BLOCK + 3), math.nan), column([0.3, 0.9]))
    assert all(0 <= place < BLOCK + 3 for place in places.tolist())


def kept(scores: Tensor, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Reference: what each token of one row weighs, by sorting it all."""
    probs = scores.double().softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k:
        order = [token for token in order if probs[token] >= probs[order[min(top_k, len(order)) - 1]]]
    total, mass = sum(probs[token] for token in order), 0.0
    nucleus: list[int] = []
    for token in order:
        if mass < top_p or probs[token] == probs[nucleus[-1]]:
            nucleus.append(token)
        mass += probs[token] / total
    chosen = {token for token in nucleus if probs[token] >= min_p * probs[order[0]]}
    return [prob if token in chosen else 0.0 for token, prob in enumerate(probs)]


FILTERS = [
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1e-7),
    (1, 1.0, 0.0),
    (20, 1.0, 0.0),
    (LIKELY + 40, 1.0, 0.0),
    (40, 0.7, 0.0),
    (40, 0.7, 0.2),
    (10**6, 0.5, 0.0),
    (0, 1e-9, 0.0),
]


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [50, LIKELY, 3000])
def test_filters_keep_what_sorting_keeps(vocab: int, spread: float) -> None:
    scores = random_scores(len(FILTERS), vocab, spread=spread)
    filters = torch.tensor(FILTERS, dtype=torch.float32)
    for noise in (0.0, 0.2, 0.5, 0.8, 1.0 - 2**-52):
        tokens = filtered(scores.clone(), filters, torch.full((len(FILTERS), 1), noise, dtype=torch.float64))
        for row, token in enumerate(tokens.tolist()):
            weights = kept(scores[row], *FILTERS[row])
            assert weights[token] > 0.0, (FILTERS[row], noise)
            before, total = sum(weights[:token]), sum(weights)
            assert before / total - 1e-4 <= noise <= (before + weights[token]) / total + 1e-4


def test_equals_at_the_cut_are_kept_together() -> None:
    scores = torch.zeros(1, 10)
    scores[0, 3:7] = 2.0
    filters = torch.tensor([[2.0, 1.0, 0.0]])
    drawn = {int(filtered(scores.clone(), filters, column([noise / 40]))) for noise in range(40)}
    assert drawn == {3, 4, 5, 6}


def test_a_row_does_not_depend_on_the_others() -> None:
    """Some of these rows need the whole vocabulary, and they must not change how the others are drawn."""
    scores = random_scores(len(FILTERS), 5000, spread=1.0)
    filters = torch.tensor(FILTERS, dtype=torch.float32)
    noise = column([0.1 + 0.07 * n for n in range(len(FILTERS))])
    together = filtered(scores.clone(), filters, noise).tolist()
    alone = [
        int(filtered(scores[n : n + 1].clone(), filters[n : n + 1], noise[n : n + 1])) for n in range(len(FILTERS))
    ]
    assert together == alone


def test_frequencies_follow_the_probabilities() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    expected = (scores / 0.7).softmax(-1)[0].tolist()
    counts = [0] * 5
    for position in range(4000):
        (token,) = Batch().add([0] * (position + 1), seed=9, temperature=0.7).draw(scores)
        counts[token] += 1
    for count, probability in zip(counts, expected, strict=True):
        assert abs(count - 4000 * probability) < 5 * math.sqrt(4000 * probability) + 1


# -- the processor -----------------------------------------------------------------------------------------------------


def test_greedy_rows_are_left_alone() -> None:
    batch = Batch().add([1], temperature=0.0).add([2], temperature=1e-9)
    scores = random_scores(2, 100)
    batch.processor.prepare_tensor_args(batch.requests)
    result = batch.processor(scores, NO_ARGS)
    assert result is scores and torch.equal(scores, random_scores(2, 100))


def test_rows_of_nobody_are_left_alone() -> None:
    batch = Batch().add([1], seed=1).add([2], seed=1)
    del batch.processor.outputs["0"]
    scores = random_scores(3, 100)  # the last row is padding
    batch.processor.prepare_tensor_args(batch.requests)
    changed = batch.processor(scores.clone(), NO_ARGS)
    assert torch.equal(changed[0], scores[0]) and torch.equal(changed[2], scores[2])
    assert torch.isposinf(changed[1]).sum() == 1


def test_a_seeded_row_is_the_same_in_any_batch() -> None:
    scores = random_scores(6, 700)
    kinds: list[dict[str, Any]] = [
        {"seed": 1},
        {"temperature": 0.0},
        {"seed": 2, "top_p": 0.8},
        {"temperature": 0.0, "logprobs": 3},
        {"seed": 3, "top_k": 5, "repetition_penalty": 1.2},
        {"seed": 4, "logprobs": 0, "presence_penalty": 1.0},
    ]
    together = Batch()
    for n, kind in enumerate(kinds):
        together.add([n, 7], [8, 9], **kind)
    drawn = together.draw(scores)
    for n, kind in enumerate(kinds):
        assert Batch().add([n, 7], [8, 9], **kind).draw(scores[n : n + 1]) == [drawn[n]]


def test_noise_goes_by_seed_index_and_place_in_the_sequence() -> None:
    scores = torch.zeros(1, 5000)

    def token(prompt: int, generated: int, index: int = 0, seed: int | None = 5) -> int:
        return Batch().add([0] * prompt, [0] * generated, index, seed=seed).draw(scores)[0]

    assert token(4, 3) == token(7, 0) == token(4, 3)
    assert len({token(4, 3), token(4, 4), token(4, 3, index=1), token(4, 3, seed=6)}) == 4
    assert len({token(4, 3, seed=None) for _ in range(5)}) > 1


def test_penalties_and_bias() -> None:
    scores = torch.tensor([[3.0, -2.0, 1.0, 0.5, 0.0]])
    output = OutputSampling.of(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={4: 7.0}),
        index=0,
        prompt_len=2,
        ending=(),
    )
    row = scores[0].clone()
    output.edit(row, [0, 1], [2, 2, 3])
    assert row.tolist() == [1.5, -4.0, 0.5 - 0.5 - 2 * 0.25, 0.25 - 0.5 - 0.25, 7.0]


def test_penalty_below_one_raises() -> None:
    output = OutputSampling.of(SamplingParams(repetition_penalty=0.5), 0, 2, ())
    row = torch.tensor([3.0, -2.0, 1.0])
    output.edit(row, [0, 1], [])
    assert row.tolist() == [6.0, -1.0, 1.0]


@pytest.mark.parametrize("preempted", [False, True])
def test_penalties_step_by_step_are_penalties_at_once(preempted: bool) -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    prompt, generated = [3, 4, 3], [5, 5, 6, 3, 5]
    stepwise, scores = OutputSampling.of(params, 0, 3, ()), random_scores(1, 12)[0]
    for n in range(len(generated) + 1):
        row = scores.clone()
        if preempted and n > 2:  # the library moves generated ids into what it calls the prompt
            stepwise.edit(row, prompt + generated[:2], generated[2:n])
        else:
            stepwise.edit(row, prompt, generated[:n])
        at_once = scores.clone()
        OutputSampling.of(params, 0, 3, ()).edit(at_once, prompt, generated[:n])
        assert torch.allclose(row, at_once)


def test_ending_ids_are_banned_before_min_tokens() -> None:
    scores = torch.tensor([[1.0, 9.0, 5.0, 8.0]])
    drawn = [Batch(ending=(1, 3)).add([0], [0] * n, temperature=0.0, min_tokens=2).draw(scores) for n in range(4)]
    assert drawn == [[2], [2], [1], [1]]


def test_logprobs_are_of_the_raw_scores_and_of_the_token_drawn() -> None:
    scores = random_scores(3, 300)
    batch = Batch()
    batch.add([1], [4], temperature=0.0, logprobs=4, logit_bias={17: 1000.0})
    batch.add([1, 2], seed=3, temperature=2.0)
    batch.add([1, 2, 3], seed=3, temperature=2.0, logprobs=0)
    tokens = batch.draw(scores)
    expected = scores.double().log_softmax(-1)
    (first,), (third,) = batch.outputs[0].logprobs.items(), batch.outputs[2].logprobs.items()
    assert tokens[0] == 17 and not batch.outputs[1].logprobs
    assert first[0] == 1 and third[0] == 0
    assert first[1].logprob == pytest.approx(float(expected[0, 17]), abs=1e-5)
    best = expected[0].topk(4)
    assert [token for token, _ in first[1].top] == best.indices.tolist()
    assert [value for _, value in first[1].top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert third[1].logprob == pytest.approx(float(expected[2, tokens[2]]), abs=1e-5)
    assert third[1].top == ()


def test_more_logprobs_than_ids() -> None:
    batch = Batch().add([1], temperature=0.0, logprobs=20)
    batch.draw(random_scores(1, 6))
    assert len(batch.outputs[0].logprobs[0].top) == 6


def test_argument_tensor_is_part_of_the_interface_only() -> None:
    argument = torch.ones(4, dtype=torch.int32)
    SamplingProcessor().fill_defaults(argument)
    assert argument.tolist() == [0, 0, 0, 0]
