"""Admission of ``/v1/responses``: chat's rules under this endpoint's names, and the spec of the stream."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from executor.request import GenerationRequest
from postproc_workers.spec import StreamSpec
from serve.admission import Minted, ServerFacts
from serve.body import parse
from serve.errors import ApiError, BadRequestError, ContextLengthError
from serve.openai_protocol import MAX_MESSAGES
from serve.recordings import admit_recording
from serve.responses_admission import admit_response, own_names
from serve.responses_messages import chat_request
from serve.responses_protocol import ResponsesRequest

FACTS = ServerFacts(
    model="m", max_model_len=100, vocab_size=1000, supported=frozenset({"max_tokens", "temperature", "top_p", "seed"})
)
MINTED = Minted(rid=7, response_id="resp_1", created=1_700_000_000, seed=3)
TOOL = {"type": "function", "name": "f"}


def admit(facts: ServerFacts = FACTS, ids: int = 10, stored: bool = False, **body: Any) -> GenerationRequest:
    request = parse(ResponsesRequest, json.dumps({"input": "Hi"} | body).encode())
    chat = chat_request(request)
    return admit_response(request, chat, prompt="P", prompt_ids=[1] * ids, facts=facts, minted=MINTED, stored=stored)


def spec_of(admitted: GenerationRequest) -> StreamSpec:
    return StreamSpec.decode(admitted.spec)


def test_a_request_is_admitted_with_its_sampling_and_its_spec() -> None:
    admitted = admit(max_output_tokens=9, temperature=0.5, stream=True, stream_interval=5, stored=True)
    assert (admitted.rid, admitted.prompts, admitted.n) == (7, [[1] * 10], 1)
    assert (admitted.sampling.max_tokens, admitted.sampling.temperature) == (9, 0.5)
    spec = spec_of(admitted)
    assert (spec.post_processor, spec.streaming, spec.prompt_tokens) == ("responses_stream", True, 10)
    assert spec.stream_interval == 5
    response = spec.args["response"]
    assert (response["id"], response["created_at"], response["model"]) == ("resp_1", 1_700_000_000, "m")
    assert response["store"] is True
    assert (response["temperature"], response["top_p"]) == (0.5, 1.0)
    assert spec_of(admit()).post_processor == "responses_unary"
    assert spec_of(admit(split_steps=True)).split_steps and not spec.split_steps


def test_without_a_limit_the_answer_may_fill_the_context() -> None:
    assert admit().sampling.max_tokens == 90


def test_the_models_presets_are_said_to_hold() -> None:
    facts = replace(FACTS, default_sampling={"temperature": 0.25, "top_p": 0.75})
    response = spec_of(admit(facts)).args["response"]
    assert (response["temperature"], response["top_p"]) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("body", "ids", "param"), [({"max_output_tokens": 91}, 10, "max_output_tokens"), ({}, 100, "input")]
)
def test_what_does_not_fit_the_context_is_said_in_own_words(body: dict[str, Any], ids: int, param: str) -> None:
    with pytest.raises(ContextLengthError) as caught:
        admit(ids=ids, **body)
    assert caught.value.param == param
    assert "messages" not in caught.value.message and "100 tokens" in caught.value.message


@pytest.mark.parametrize(("body", "ids"), [({}, 0), ({"input": [{"type": "reasoning", "summary": []}]}, 10)])
def test_an_input_without_anything_to_answer_is_refused_under_its_own_name(body: dict[str, Any], ids: int) -> None:
    with pytest.raises(BadRequestError, match="^input h") as caught:
        admit(ids=ids, **body)
    assert (caught.value.param, caught.value.code) == ("input", "invalid_value")


def test_an_input_has_no_more_items_than_a_conversation_may_have() -> None:
    with pytest.raises(BadRequestError, match="^input must not hold more than") as caught:
        admit(input=[{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1))
    assert caught.value.param == "input"


def test_what_a_chat_template_refuses_is_refused_under_its_own_name() -> None:
    with pytest.raises(BadRequestError) as caught, own_names():
        raise BadRequestError("The chat template refused the messages: no", param="messages")
    assert (caught.value.param, caught.value.message) == ("input", "The chat template refused the input: no")


@pytest.mark.parametrize(
    ("body", "param"), [({"tools": [TOOL]}, "tools"), ({"top_k": 5}, "top_k"), ({"model": "x"}, "model")]
)
def test_what_the_server_cannot_do_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        admit(**body)
    assert caught.value.param == param


def test_a_harmony_model_keeps_its_way_of_reading_marks() -> None:
    facts = replace(FACTS, reasoning_parser="harmony", tool_parser="harmony")
    spec = spec_of(admit(facts, tools=[TOOL], stop=["x"], skip_special_tokens=False))
    assert spec.skip_special_tokens and spec.args["holds_text"] and spec.post_processor == "responses_unary"


def test_a_recording_says_what_was_asked_and_without_prompts_quotes_nobody() -> None:
    said = {"input": "secret", "instructions": "secret", "user": "secret", "metadata": {"a": "secret"}}
    body = said | {"max_output_tokens": 5}
    recording = spec_of(admit(replace(FACTS, record=True), **body)).recording
    assert recording is not None
    assert (recording["endpoint"], recording["request"]) == ("/v1/responses", {"input": "", "max_output_tokens": 5})
    kept = spec_of(admit(replace(FACTS, record=True, record_prompts=True), **body)).recording
    assert kept is not None and kept["request"] == body and kept["prompt"] == "P"


@pytest.mark.parametrize("stream", [True, False])
def test_a_recording_is_replayed_to_the_letter(stream: bool) -> None:
    facts = replace(FACTS, record=True, record_prompts=True, default_sampling={"temperature": 0.25})
    live = spec_of(admit(facts, stream=stream, stored=True, instructions="Be brief."))
    assert live.recording is not None
    replayed = admit_recording(live.recording | {"prompt_tokens": 10}, stream)
    assert isinstance(replayed, StreamSpec) and replayed.args["response"] == live.args["response"]


def test_a_recording_is_admitted_as_the_request_was() -> None:
    item = {"type": "function_call_output", "call_id": "of a response that is not here", "output": "1"}
    body = {"model": "m", "input": [item], "previous_response_id": "resp_0"}
    recording = {"name": "r", "endpoint": "/v1/responses", "request": body, "server": {}, "prompt_tokens": 3}
    spec = admit_recording(recording, True)
    assert isinstance(spec, StreamSpec) and spec.post_processor == "responses_stream"
    refused = admit_recording(recording | {"request": body | {"truncation": "auto"}}, True)
    assert isinstance(refused, bytes) and json.loads(refused)["error"]["param"] == "truncation"


def test_errors_are_bad_requests() -> None:
    with pytest.raises(BadRequestError):
        admit(tool_choice="required")
