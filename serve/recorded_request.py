"""What a recording says of its request: with its prompts, or with a stand-in that quotes nobody. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.openai_protocol import ChatCompletionRequest, CompletionRequest

#: fields that tell who asked; a recording without prompts leaves them out too
_PERSONAL = ("user", "metadata", "safety_identifier", "prompt_cache_key")
#: the run of tags and white space that ends a prompt, e.g. ``<think>\n``
_CLOSING_TAGS = re.compile(r"(?:<[^<>\s]{1,64}>|\[/?\w{1,32}\]|\s)*\Z")


@dataclass(frozen=True, slots=True)
class RecordedServer:
    """What every recording has from the server.

    prompts: whether prompts are recorded.
    server: tokenizer, tool_parser and reasoning_parser, None where there is none.
    minted: id, created and model of the response. They are beyond the format's keys: with them a replay gives the
        client's bytes to the letter.
    """

    prompts: bool
    server: dict[str, str | None]
    minted: dict[str, Any]


def recorded_chat(request: ChatCompletionRequest, prompt: str, server: RecordedServer) -> dict[str, Any]:
    """The recording of a chat request. ``prompt`` is the rendered prompt; of one that is not recorded, its tail."""
    # The stand-in must be a legal request: only an assistant's message can be continued.
    role = "assistant" if request.continue_final_message else "user"
    stand_in = {"messages": [{"role": role, "content": ""}]}
    kept = prompt if server.prompts else _template_tail(request, prompt)
    return _recorded(request, "/v1/chat/completions", stand_in, kept, server)


def recorded_completion(
    request: CompletionRequest, prompt_texts: Sequence[str], server: RecordedServer
) -> dict[str, Any]:
    """The recording of a completion request with its prompts as text."""
    stand_in = {"prompt": "" if len(prompt_texts) == 1 else [""] * len(prompt_texts)}
    kept = prompt_texts[0] if server.prompts and len(prompt_texts) == 1 else ""
    return _recorded(request, "/v1/completions", stand_in, kept, server)


def _recorded(
    request: ChatCompletionRequest | CompletionRequest,
    endpoint: str,
    stand_in: dict[str, Any],
    prompt: str,
    server: RecordedServer,
) -> dict[str, Any]:
    body = request.as_sent()
    if not server.prompts:
        body = {name: value for name, value in body.items() if name not in _PERSONAL} | stand_in
    recording = {
        "name": server.minted["id"],
        "endpoint": endpoint,
        "request": body,
        "server": server.server,
        "minted": server.minted,
    }
    return recording | {"prompt": prompt} if prompt else recording


def _template_tail(request: ChatCompletionRequest, prompt: str) -> str:
    """The tags that end a prompt: they say whether the output starts inside a reasoning block, and quote nobody.

    A message that ends in a tag itself could run into them, and then nothing is kept.
    """
    last = (request.messages[-1].content or "").rstrip()
    match = _CLOSING_TAGS.search(prompt)
    return match.group() if match and last and not last.endswith((">", "]")) else ""
