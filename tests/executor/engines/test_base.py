"""What every engine refuses, to the last id and token that fit."""

from __future__ import annotations

from typing import Any

import pytest

from executor.engines.base import UnsupportedError, check_request
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
