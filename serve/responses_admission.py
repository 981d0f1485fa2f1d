"""From a parsed ``/v1/responses`` request to an admitted one. Pure.

A response is generated like a chat choice and streamed in another form: so admission asks chat admission, and changes
the spec of the stream. Field names in refusals are those of this endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from executor.request import GenerationRequest
from postproc_workers.spec import StreamSpec
from serve.admission import Minted, ServerFacts, admit_chat, chat_spec
from serve.errors import BadRequestError
from serve.openai_protocol import ChatCompletionRequest
from serve.responses_protocol import ResponsesRequest, response_object

ENDPOINT = "/v1/responses"

_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
#: What a response says that neither the request nor the tokens decide.
SAID = ("temperature", "top_p", "store")
#: What a recording without prompts leaves out: what the client said, and who it is.
_PRIVATE = ("instructions", "previous_response_id", "user", "metadata", "safety_identifier", "prompt_cache_key")


def admit_response(
    request: ResponsesRequest,
    chat: ChatCompletionRequest,
    *,
    prompt: str,
    prompt_ids: list[int],
    facts: ServerFacts,
    minted: Minted,
    stored: bool,
) -> GenerationRequest:
    """Admit a request whose conversation, as ``chat``, was rendered to ``prompt`` and tokenized. Raises ApiError (4xx).

    stored: whether the response will be kept for ``previous_response_id``.
    """
    with own_names():
        admitted = admit_chat(chat, prompt=prompt, prompt_ids=prompt_ids, facts=facts, minted=minted)
    spec = response_spec(
        request,
        chat,
        prompt=prompt,
        prompt_tokens=len(prompt_ids),
        facts=facts,
        minted=minted,
        streaming=request.stream,
        stored=stored,
    )
    return GenerationRequest(minted.rid, [prompt_ids], admitted.sampling, spec.encode(), 1)


@contextmanager
def own_names() -> Iterator[None]:
    """What chat refuses is refused in the words of this endpoint, which has no ``messages``."""
    try:
        yield
    except BadRequestError as error:
        if error.param not in _NAMES:
            raise
        message = error.message.replace("messages", "input").replace("completion", "output")
        raise type(error)(message, param=_NAMES[error.param], code=error.code) from error


def response_spec(
    request: ResponsesRequest,
    chat: ChatCompletionRequest,
    *,
    prompt: str,
    prompt_tokens: int,
    facts: ServerFacts,
    minted: Minted,
    streaming: bool,
    stored: bool = False,
) -> StreamSpec:
    """The spec of a response's stream; arguments as for ``admit_response`` and ``chat_spec``."""
    spec = chat_spec(chat, prompt=prompt, prompt_tokens=prompt_tokens, facts=facts, minted=minted, streaming=streaming)
    said = {
        "id": minted.response_id,
        "created_at": minted.created,
        "model": request.model or facts.model,
        "temperature": _effective(chat.temperature, "temperature", facts),
        "top_p": _effective(chat.top_p, "top_p", facts),
        "store": stored,
    }
    return replace(
        spec,
        post_processor="responses_stream" if streaming else "responses_unary",
        args=spec.args | {"response": response_object(request, said)},
        recording=_recording(request, spec.recording, said, facts),
    )


def _effective(asked: float | None, name: str, facts: ServerFacts) -> float:
    """The client's value, the model's preset, or 1."""
    value = asked if asked is not None else facts.default_sampling.get(name)
    return float(value) if isinstance(value, int | float) else 1.0


def _recording(
    request: ResponsesRequest, chat: dict[str, Any] | None, said: dict[str, Any], facts: ServerFacts
) -> dict[str, Any] | None:
    """What chat would record, with this endpoint's request, and what else the server said of it."""
    if chat is None:
        return None
    body = request.as_sent()
    if not facts.record_prompts:
        body = {name: value for name, value in body.items() if name not in _PRIVATE} | {"input": ""}
    minted = chat["minted"] | {name: said[name] for name in SAID}
    return chat | {"endpoint": ENDPOINT, "request": body, "minted": minted}
