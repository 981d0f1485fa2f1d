"""What the endpoints make of a recording: the spec that admission made when the request was live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from postproc_workers.spec import StreamSpec
from serve.admission import Minted, ServerFacts, chat_spec, completion_spec
from serve.body import parse_object
from serve.errors import ApiError, BadRequestError
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest
from serve.parsers import check_names
from serve.responses_admission import ENDPOINT as RESPONSES
from serve.responses_admission import response_spec
from serve.responses_messages import chat_request
from serve.responses_protocol import ResponsesRequest


def admit_recording(recording: Mapping[str, Any], stream: bool) -> StreamSpec | bytes:
    """The spec of the recorded request, or the body of the error that refuses it. Its own ``stream`` is ignored."""
    try:
        return _spec(recording, stream)
    except ApiError as error:
        return error.body()


def _spec(recording: Mapping[str, Any], stream: bool) -> StreamSpec:
    body = recording.get("request")
    endpoint, prompt, tokens = (
        recording.get("endpoint"),
        recording.get("prompt") or "",
        recording.get("prompt_tokens", 0),
    )
    if not isinstance(body, dict):
        raise BadRequestError("request must be an object.", param="request", code="invalid_value")
    facts, minted = _facts(recording), _minted(recording)
    try:
        check_names(facts.reasoning_parser, facts.tool_parser)
    except ValueError as error:
        raise BadRequestError(str(error), param="server") from error
    if endpoint == "/v1/chat/completions":
        chat = parse_object(ChatCompletionRequest, body)
        return chat_spec(chat, prompt=prompt, prompt_tokens=tokens, facts=facts, minted=minted, streaming=stream)
    if endpoint == "/v1/completions":
        completion = parse_object(CompletionRequest, body)
        texts = _prompt_texts(completion, prompt)
        return completion_spec(
            completion, prompt_tokens=tokens, prompt_texts=texts, facts=facts, minted=minted, streaming=stream
        )
    if endpoint == RESPONSES:
        request, said = parse_object(ResponsesRequest, body), _minted_keys(recording)
        return response_spec(
            request,
            chat_request(request),
            prompt=prompt,
            prompt_tokens=tokens,
            facts=replace(facts, default_sampling={name: said.get(name) for name in ("temperature", "top_p")}),
            minted=minted,
            streaming=stream,
            stored=said.get("store") is True,
        )
    raise BadRequestError(f"endpoint: {endpoint!r} cannot be replayed.", param="endpoint")


def _prompt_texts(request: CompletionRequest, prompt: str) -> list[str]:
    """One text per prompt: as recorded, else as sent; a prompt of token ids has no text here."""
    sent = request.prompt
    if prompt and len(sent) == 1:
        return [prompt]
    return [text if isinstance(text, str) else "" for text in sent]


def _facts(recording: Mapping[str, Any]) -> ServerFacts:
    server, request = recording.get("server") or {}, recording.get("request")
    sent = request.get("model") if isinstance(request, dict) else None
    return ServerFacts(
        model=str(_minted_keys(recording).get("model") or sent or ""),
        max_model_len=2**31,
        vocab_size=2**31,
        supported=frozenset(),
        tool_parser=server.get("tool_parser"),
        reasoning_parser=server.get("reasoning_parser"),
    )


def _minted(recording: Mapping[str, Any]) -> Minted:
    """What the server minted, if the recording has it: a replay has no clock and no chance of its own."""
    keys = _minted_keys(recording)
    created = keys.get("created", 0)
    response_id = str(keys.get("id") or f"replay-{recording.get('name', '')}")
    return Minted(rid=0, response_id=response_id, created=created if type(created) is int else 0, seed=0)


def _minted_keys(recording: Mapping[str, Any]) -> Mapping[str, Any]:
    keys = recording.get("minted")
    return keys if isinstance(keys, dict) else {}
