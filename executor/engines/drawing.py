"""Drawing a token from a row of scores: the noise, what the filters leave, and where the noise falls in it.

A token needs one uniform number, not one per vocabulary entry: the token is where that number falls in the cumulative
distribution of what the filters left. The number is a hash of (seed, output index, position in the sequence),
SplitMix64 used as a counter-based generator, so no generator state exists. Hence a seeded output gets the same tokens
whatever else is in the batch and after a preemption, and one that another engine takes up goes on with the same noise,
since position counts prompt and generated ids alike. That holds up to the model's own rounding: in a batch of another
shape the last bits of a logit may differ, and so they may when a history is read at once that was made id by id. It
flips a token about once in a million in float32 and noticeably often in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: How many likely tokens the filters look at first, and by how much that grows where it does not do. Sorting 16 rows of
#: 49152 takes a core 77 ms, finding the likeliest 64 of each 2 ms.
LIKELY = 128
WIDEN = 16

#: Numbers summed at a time when a token is drawn.
BLOCK = 256

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


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


def filtered(scores: Tensor, filters: Tensor, noise: Tensor, width: int = LIKELY) -> Tensor:
    """Draw from what top_k, top_p and min_p leave: top_k first, top_p of the mass it leaves, min_p of the best token.

    Only the ``width`` likeliest tokens are looked at. A row whose last such token is not yet cut off is drawn again
    from more: so a row's result depends on nothing but the row. Tokens as likely as the last one kept are kept as well,
    since which of them comes first is up to the sort.

    scores: [rows, vocab], divided by the temperature; filters: [rows, 3], top_k (0 is off), top_p, min_p; noise:
    [rows, 1] uniform numbers. Returns [rows].
    """
    vocab = scores.shape[-1]
    best = scores.topk(width, dim=-1) if width < vocab else scores.sort(dim=-1, descending=True)
    cut = _cut(scores, best.values, filters)
    if width >= vocab:
        return invert((scores - best.values[:, :1]).exp_().masked_fill_(scores < cut, 0.0), noise)
    weights = (best.values - best.values[:, :1]).exp_().masked_fill_(best.values < cut, 0.0)
    ids, order = best.indices.sort(dim=-1)
    tokens = ids.gather(1, invert(weights.gather(1, order), noise).unsqueeze(-1)).squeeze(-1)
    wider = (best.values[:, -1:] >= cut).squeeze(-1).nonzero().squeeze(-1)
    if len(wider):
        tokens[wider] = filtered(scores[wider], filters[wider], noise[wider], width * WIDEN)
    return tokens


def _cut(scores: Tensor, best: Tensor, filters: Tensor) -> Tensor:
    """The lowest score that each row keeps, as far as ``best``, its likeliest tokens in order, tells. [rows, 1]."""
    top_k, top_p, min_p = filters.unsqueeze(-1).unbind(1)
    place = (top_k.long() - 1).clamp_(min=0, max=best.shape[-1] - 1)
    limited = top_k > 0
    cut = best.gather(1, place).masked_fill_(~limited, -torch.inf)
    total = torch.where(limited, best.masked_fill(best < cut, -torch.inf).logsumexp(-1, keepdim=True), torch.inf)
    if not bool(limited.all()):
        total = torch.where(limited, total, scores.logsumexp(-1, keepdim=True))
    probs = (best - total).exp_()
    kept = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = best.gather(1, kept - 1).masked_fill_(top_p >= 1.0, -torch.inf)
    cut = torch.maximum(torch.maximum(cut, nucleus), best[:, :1] + min_p.log())
    # With more than ``best`` to keep, the mass that top_p is a share of is not known yet: cut nothing, look further.
    seen = best.shape[-1]
    return cut.masked_fill_(top_k > seen, -torch.inf) if seen < scores.shape[-1] else cut


def invert(weights: Tensor, noise: Tensor) -> Tensor:
    """The place where each row's uniform number falls. weights: [rows, n] >= 0 of any sum; noise: [rows, 1].

    In two stages, a block and a place in it: summing 256 numbers at a time is exact enough in float32, where a running
    sum of a whole vocabulary is not, and in float64 takes ten times as long.
    """
    n = weights.shape[-1]
    width = min(BLOCK, n)
    whole = n - n % width
    sums = weights[:, :whole].unflatten(1, (-1, width)).sum(-1, dtype=torch.float64)
    if whole < n:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)
    cumulative = sums.cumsum(-1)
    aim = noise * cumulative[:, -1:]
    # A row of NaN (an overflowing model) finds no place: the clamps keep it an id, so that only its own text suffers.
    block = torch.searchsorted(cumulative, aim, right=True).clamp_(max=sums.shape[-1] - 1)
    aim = (aim - cumulative.gather(1, block) + sums.gather(1, block)).clamp_(min=0.0)
    places = block * width + torch.arange(width, device=weights.device)
    inside = weights.gather(1, places.clamp(max=n - 1)).masked_fill_(places >= n, 0.0)
    within = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), aim, right=True)
    last = inside.shape[-1] - 1 - (inside.flip(-1) > 0).to(torch.uint8).argmax(-1, keepdim=True)
    return (block * width + torch.minimum(within, last)).clamp_(max=n - 1).squeeze(-1)
