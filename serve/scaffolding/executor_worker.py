"""A worker over the executor of this process: generations as handles of ``GenerationExecutor.submit``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from executor.proxy import GenerationExecutor
from executor.request import SamplingParams
from executor.result import GenerationResult, ResultError
from postproc_workers.deltas import deltas_request
from serve.admission import AnyRequest, Minted, ServerFacts, admit_chat
from serve.scaffolding.completion_plans import CompletionPlans
from serve.scaffolding.options import chat_request, is_chat
from serve.scaffolding.task import GenerationTask
from serve.scaffolding.worker import Worker

if TYPE_CHECKING:  # transformers takes 2 s to import, and who has Prompts has it already
    from serve.prompts import Prompts


class ExecutorWorker(Worker):
    """executor, prompts, facts: those of a front end, or of ``serve/scaffolding/local.py``. Prompts and options are
    admitted as the server admits a request's, so they are refused for the same reasons in the same words. failure():
    why there will be no executor any more, so that nothing waits for one; None while there is, or one is restarting.

    A chat's result is the model's own text: reasoning and tool calls are not parsed.
    """

    def __init__(
        self,
        executor: GenerationExecutor,
        prompts: Prompts,
        facts: ServerFacts,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._executor, self._prompts, self._facts, self._failure = executor, prompts, facts, failure
        self._plans = CompletionPlans(facts)

    async def submit(self, task: GenerationTask) -> GenerationResult:
        """Tokenize, admit and submit. ApiError for what cannot be honoured, ResultError when nothing is taken."""
        self._check()
        asked, ids, sampling = await (self._chat(task) if is_chat(task) else self._completion(task))
        task.max_tokens = sampling.max_tokens
        self._check()  # again: it may have ended while the prompt was being tokenized
        return self._executor.submit(
            deltas_request(
                self._executor.mint(),
                [ids],
                sampling,
                stop=asked.stop,
                skip_special_tokens=asked.skip_special_tokens,
                frontend=self._executor.frontend,
            )
        )

    def abort_handle(self, handle: GenerationResult) -> None:
        """Abort it in the executor."""
        self._executor.abort(handle.rid)

    def _check(self) -> None:
        if (reason := self._failure()) is not None:
            raise ResultError(reason)

    async def _chat(self, task: GenerationTask) -> tuple[AnyRequest, Sequence[int], SamplingParams]:
        asked = chat_request(task)
        prompt, ids = await self._prompts.chat(asked)
        admitted = admit_chat(asked, prompt=prompt, prompt_ids=ids, facts=self._facts, minted=_mint())
        return asked, ids, admitted.sampling

    async def _completion(self, task: GenerationTask) -> tuple[AnyRequest, Sequence[int], SamplingParams]:
        # Ids need no thread.
        ids: Any = (await self._prompts.texts([task.prompt]))[0] if isinstance(task.prompt, str) else task.prompt
        asked, sampling = self._plans.admit(task, ids, _mint())
        return asked, ids, sampling


def _mint() -> Minted:
    """What a request needs that is random: a seed."""
    return Minted(0, "", 0, secrets.randbits(62))
