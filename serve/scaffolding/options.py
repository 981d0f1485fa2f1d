"""The options of a generation: request fields as the server itself has them, checked by the server's own models.

A name that is not here is refused: every option is honoured. ``n``, ``stream`` and ``logprobs`` are a task's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.body import parse_object
from serve.errors import BadRequestError
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest
from serve.scaffolding.prompt import PromptError, is_messages
from serve.scaffolding.task import GenerationTask

#: Options of every generation.
SAMPLING = frozenset(
    ["max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"]
    + ["ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "model"]
    + ["skip_special_tokens"]
)
#: Options of messages: what the chat template is given.
TEMPLATE = frozenset(
    ["tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt"]
    + ["continue_final_message"]
)
#: Of those, what OpenAI's API does not have: a client has to pass it on as it is.
EXTENSIONS = frozenset(
    ["min_tokens", "top_k", "min_p", "stop_token_ids", "ignore_eos", "repetition_penalty", "skip_special_tokens"]
    + ["chat_template_kwargs", "add_generation_prompt", "continue_final_message"]
)


def body(task: GenerationTask) -> dict[str, Any]:
    """The body of the request that the task is. BadRequestError names an option that there is not."""
    chat = is_chat(task)
    for name in task.options:
        if name not in SAMPLING and not (chat and name in TEMPLATE):
            raise BadRequestError(f"options.{name}: there is no such option.", param=f"options.{name}")
    prompt = task.prompt if isinstance(task.prompt, str) else list(task.prompt)
    return {**task.options, **_logprobs(task.logprobs, chat), "messages" if chat else "prompt": prompt}


def is_chat(task: GenerationTask) -> bool:
    """Whether its prompt are messages. BadRequestError for what is no prompt."""
    try:
        return is_messages(task.prompt)
    except PromptError as error:
        raise BadRequestError(str(error), param="prompt") from error


def _logprobs(logprobs: int | None, chat: bool) -> Mapping[str, Any]:
    if logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": logprobs} if chat else {"logprobs": logprobs}


def chat_request(task: GenerationTask) -> ChatCompletionRequest:
    """The request that a task with messages is. BadRequestError names the field."""
    return parse_object(ChatCompletionRequest, body(task))


def completion_request(task: GenerationTask) -> CompletionRequest:
    """The request that a task with a text or ids is, but for its prompt, which is another one: what becomes of one need
    not go through a model. BadRequestError names the field."""
    return parse_object(CompletionRequest, body(task) | {"prompt": "-"})
