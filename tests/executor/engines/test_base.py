"""What every engine refuses, to the last id and token that fit."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from executor.engines.base import UnsupportedError, check_history, check_request, ending_ids
from executor.request import SamplingParams


def check(prompt: list[int], **sampling: Any) -> None:
    check_request(prompt, SamplingParams(**sampling), vocab_size=10, max_model_len=5)


def test_what_just_fits() -> None:
    check([0, 9], max_tokens=3, logit_bias={0: 1.0, 9: -1.0})
    check([1], max_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "prompt: no tokens"),
        ([10], {"max_tokens": 1}, r"prompt: a token id is not in range\(10\)"),
        ([-1], {"max_tokens": 1}, r"prompt: a token id is not in range\(10\)"),
        ([1], {"max_tokens": 0}, "max_tokens: 0 is below 1"),
        ([1, 2], {"max_tokens": 4}, "max_tokens: a prompt of 2 tokens and max_tokens 4 exceed the 5 tokens"),
        ([1], {"max_tokens": 1, "logit_bias": {10: 1.0}}, r"logit_bias: a token id is not in range\(10\)"),
        ([1], {"max_tokens": 1, "logit_bias": {-1: 1.0}}, r"logit_bias: a token id is not in range\(10\)"),
    ],
)
def test_what_does_not_fit(prompt: list[int], sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{message}"):
        check(prompt, **sampling)


def test_ending_ids() -> None:
    sampling = {"stop_token_ids": (3, 4)}
    assert ending_ids(SamplingParams(**sampling), [1, 4]) == {1, 3, 4}
    assert ending_ids(SamplingParams(**sampling, ignore_eos=True), [1, 4]) == {3, 4}
    assert ending_ids(SamplingParams(), ()) == frozenset()


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("i", ids)])
def test_what_may_go_on(kind: Callable[[list[int]], Sequence[int]]) -> None:
    ending = frozenset((3,))
    check_history(kind([]), SamplingParams(max_tokens=1), ending)
    check_history(kind([1, 2]), SamplingParams(max_tokens=2), ending)
    check_history(kind([1, 3]), SamplingParams(min_tokens=2), ending)
    check_history(kind([1, 3]), SamplingParams(), frozenset())
    with pytest.raises(UnsupportedError, match=r"^history: 3 tokens, but max_tokens is 2"):
        check_history(kind([1, 2, 1]), SamplingParams(max_tokens=2), ending)
    for min_tokens in (0, 1):
        with pytest.raises(UnsupportedError, match=r"^history: it holds the id that ended the output"):
            check_history(kind([1, 3]), SamplingParams(min_tokens=min_tokens), ending)
