"""A prompt in any of its three forms, and what controllers make of it.

A text, token ids, or chat messages (``{"role": ..., "content": ...}``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

#: What an incomplete character at the end of a text looks like.
_INCOMPLETE = "\ufffd"


class PromptError(ValueError):
    """A prompt that is in none of the three forms, or not in the one that is needed."""


def is_messages(prompt: Prompt) -> bool:
    """Whether it is a chat. PromptError for what is no prompt at all."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence) or not prompt:
        raise PromptError("prompt: must be a text, token ids or messages, and not empty")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return False
    if not all(issubclass(kind, Mapping) for kind in kinds):
        raise PromptError("prompt: must hold either token ids or messages")
    return True


def continued(prompt: Prompt, text: str, token_ids: Sequence[int]) -> tuple[Prompt, dict[str, Any]]:
    """The prompt with a beginning of its answer behind it, and the options that it needs. A text and messages get the
    answer's text, ids its ids. ``continue_final_message`` is what vLLM, SGLang and this server call it."""
    if isinstance(prompt, str):
        return prompt + whole(text), {}
    if not is_messages(prompt):
        return [*prompt, *token_ids], {}
    return [*prompt, {"role": "assistant", "content": whole(text)}], {"continue_final_message": True}


def whole(text: str) -> str:
    """A text without the incomplete character that it may end in."""
    return text.rstrip(_INCOMPLETE)


def with_feedback(prompt: Prompt, answer: str, feedback: str) -> Prompt:
    """The prompt of another attempt. PromptError for token ids, which only a tokenizer could continue."""
    if isinstance(prompt, str):
        return f"{prompt}{answer}\n\n{feedback}\n\n"
    if not is_messages(prompt):
        raise PromptError("prompt: must be a text or messages to get feedback")
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": feedback}]
    return [*prompt, *said]
