"""What options come to, kept: thousands of generations share a few of them, and in a burst of those their admission
would hold back the first ones' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import orjson

from executor.request import SamplingParams
from serve.admission import Minted, ServerFacts, admit_completion, sampling_params
from serve.errors import BadRequestError
from serve.openai_protocol import CompletionRequest
from serve.scaffolding.options import completion_request
from serve.scaffolding.task import GenerationTask

#: Plans that are kept; beyond, all are forgotten: whoever has so many options shares none.
_MAX_PLANS = 256


class _Plan(NamedTuple):
    """sampling: what the request comes to with a prompt that leaves room for ``max_tokens``; None when it says nothing
    of ``max_tokens``, so that the prompt's length counts. draws: each generation has a seed of its own."""

    request: CompletionRequest
    sampling: SamplingParams | None
    draws: bool


class CompletionPlans:
    """The plans of one server."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts
        self._plans: dict[bytes, _Plan] = {}

    def admit(
        self, task: GenerationTask, ids: Sequence[int], minted: Minted
    ) -> tuple[CompletionRequest, SamplingParams]:
        """The request that a task is, and how its tokens are drawn. ids: its prompt. ApiError for what this server
        cannot do, in the words of its HTTP side."""
        plan = self._plan(task)
        sampling = plan.sampling
        if sampling is not None and self._fits(ids, sampling.max_tokens):
            return plan.request, replace(sampling, seed=minted.seed) if plan.draws else sampling
        prompts = [list(ids)]
        admitted = admit_completion(plan.request, prompts=prompts, prompt_texts=[""], facts=self._facts, minted=minted)
        return plan.request, admitted.sampling

    def _fits(self, ids: Sequence[int], max_tokens: int) -> bool:
        facts = self._facts
        fits = bool(ids) and len(ids) + max_tokens <= facts.max_model_len
        return fits and min(ids) >= 0 and max(ids) < facts.vocab_size

    def _plan(self, task: GenerationTask) -> _Plan:
        try:
            key = orjson.dumps((task.options, task.logprobs), option=orjson.OPT_NON_STR_KEYS)
        except orjson.JSONEncodeError as error:
            raise BadRequestError(f"options: {error}.", param="options") from error
        if (plan := self._plans.get(key)) is None:
            plan = self._make(task)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _make(self, task: GenerationTask) -> _Plan:
        request = completion_request(task)
        draws = request.seed is None and "seed" in self._facts.supported
        if request.token_limit is None or request.token_limit >= self._facts.max_model_len:
            return _Plan(request, None, draws)
        # The model's name and what else does not depend on a prompt is checked here, with one that fits.
        nothing = Minted(0, "", 0, 0)
        admit_completion(request, prompts=[[0]], prompt_texts=[""], facts=self._facts, minted=nothing)
        return _Plan(request, sampling_params(request, self._facts, 1, nothing), draws)
