"""Messages and texts -> token ids, off the event loop: a long prompt must not delay anybody's next chunk.

A short one is done at once. It takes half a millisecond there, and half as much again is what a thread costs: two
wakes, and the changes of the lock between them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

import jinja2
from transformers import PreTrainedTokenizerBase

from serve.errors import BadRequestError
from serve.openai_protocol import ChatCompletionRequest, TokenizeRequest

T = TypeVar("T")

#: What a template raises over messages or variables that it cannot render depends on the template.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip

#: What a client may not set through ``chat_template_kwargs``: the arguments of the renderer itself.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


#: Messages, and characters of all, up to which a prompt is short.
_FEW, _SHORT = 8, 2000
#: All that most messages have.
_PLAIN = frozenset({"role", "content"})


class Prompts:
    """A model's tokenizer and chat template, run in threads. Templates come from the model and run in jinja2's sandbox
    (transformers renders them there); what they raise is the client's 400."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, threads: int = 2) -> None:
        self._tokenizer = tokenizer
        # A fast tokenizer's backend keeps no state between calls; others take turns. Only its batch methods let go of
        # the GIL: with ``encode`` 1.6 MB of text stop the event loop for 3 s, with ``encode_batch_fast``, which makes
        # no offsets either, they take 1 s of a thread.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # What a tokenizer.json may preset for training or embedding; transformers turns both off where it encodes.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._turn = Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prompts")

    @property
    def chat_template(self) -> str:
        """The template's text, "" when the model has none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else ""

    @property
    def special_tokens(self) -> list[str]:
        """The texts of the special and added tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return [str(token) for token in added.values()] or list(self._tokenizer.all_special_tokens)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: ChatCompletionRequest | TokenizeRequest) -> tuple[str, list[int]]:
        """(rendered prompt, its ids). BadRequestError for what the template refuses."""
        special = isinstance(request, TokenizeRequest) and request.special_tokens
        return await self._run(lambda: self._chat(request, special), _is_short(request))

    async def texts(self, prompts: list[str] | list[list[int]], special: bool = True) -> list[list[int]]:
        """Ids of each prompt; a prompt of ids stays as it is."""
        short = len(prompts) <= _FEW and sum(map(len, prompts)) <= _SHORT
        return await self._run(lambda: [self._encode(p, special) if isinstance(p, str) else p for p in prompts], short)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return await self._run(lambda: self._decode(token_ids))

    async def strings(self, token_ids: list[int]) -> list[str]:
        """The text of each id on its own."""
        return await self._run(lambda: self._strings(token_ids))

    async def echoes(self, prompts: list[str] | list[list[int]]) -> list[str]:
        """The prompts as text, for ``echo``."""
        return await self._run(lambda: [p if isinstance(p, str) else self._decode(p) for p in prompts])

    async def parse(self, parser: Callable[[], T]) -> T:
        """Run a body's parsing here when it is large."""
        return await self._run(parser)

    async def _run(self, call: Callable[[], T], short: bool = False) -> T:
        if short and self._backend is not None:  # another tokenizer may be in somebody's hands for long
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _chat(self, request: ChatCompletionRequest | TokenizeRequest, special: bool) -> tuple[str, list[int]]:
        if not self._tokenizer.chat_template:
            raise BadRequestError("The model has no chat template; use /v1/completions.", param="messages")
        prompt = self._render(request)
        return prompt, self._encode(prompt, special)

    def _render(self, request: ChatCompletionRequest | TokenizeRequest) -> str:
        kwargs = (
            request.template_kwargs() if isinstance(request, ChatCompletionRequest) else request.chat_template_kwargs
        )
        for name in _RESERVED.intersection(kwargs):
            raise BadRequestError(f"chat_template_kwargs.{name} is not allowed.", param=f"chat_template_kwargs.{name}")
        tools: Any = request.template_tools()  # transformers' own type is invariant
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                request.template_messages(),
                tools=tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise BadRequestError(f"The chat template refused the messages: {error}", param="messages") from error
        return str(rendered)

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._backend is not None and len(text) <= _SHORT:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        if self._backend is not None:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        with self._turn:
            return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _strings(self, token_ids: list[int]) -> list[str]:
        texts = {token_id: self._decode([token_id]) for token_id in set(token_ids)}
        return [texts[token_id] for token_id in token_ids]

    def _decode(self, token_ids: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode_batch([token_ids], skip_special_tokens=False)[0])
        with self._turn:
            return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _is_short(request: ChatCompletionRequest | TokenizeRequest) -> bool:
    """Whether a template has little to do: few texts, and nothing that a client could make it turn in loops with."""
    if len(request.messages) > _FEW or request.tools or request.chat_template_kwargs:
        return False
    texts = [message.content for message in request.messages if message.model_fields_set <= _PLAIN]
    return len(texts) == len(request.messages) and sum(len(text or "") for text in texts) <= _SHORT
