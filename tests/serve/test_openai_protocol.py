"""Request bodies: what is accepted and how it reads, and which field is named when it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.body import MAX_DEPTH, parse, parse_object
from serve.errors import (
    ApiError,
    BadRequestError,
    EngineError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    stream_error,
)
from serve.openai_protocol import (
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOLS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)

USER = {"role": "user", "content": "Hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({"messages": [USER]} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Once"} | fields).encode())


def messages(*entries: Any) -> dict[str, Any]:
    return {"messages": list(entries)}


def parts(*entries: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": list(entries)})


def refusal(model_class: Any, body: bytes | dict[str, Any]) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse(model_class, body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


# ------------------------------------------------------------------ refused, with the field's name

SHARED_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "foo"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": 1 << 31}, "max_tokens"),
    ({"max_tokens": 1 << 200}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": False}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
    ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ({"logit_bias": {"5": None}}, "logit_bias.5"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": 1}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": [1, True]}, "stop_token_ids.1"),
    ({"stop_token_ids": [1 << 31]}, "stop_token_ids.0"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"ignore_eos": "true"}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"stream_interval": 1001}, "stream_interval"),
    ({"stream_interval": True}, "stream_interval"),
    ({"stream_interval": 2.0}, "stream_interval"),
    ({"stream_interval": "2"}, "stream_interval"),
    ({"stream_interval": 2, "split_steps": True}, "stream_interval"),
    ({"split_steps": 1}, "split_steps"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"user": 5}, "user"),
    ({"metadata": []}, "metadata"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"priority": 1}, "priority"),
]

VOTE = {"method": "majority_vote", "n": 2}

CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": {"0": USER}}, "messages"),
    (messages("Hi"), "messages.0"),
    (messages(None), "messages.0"),
    (messages(USER, {"content": "x"}), "messages.1.role"),
    (messages({"role": "function", "content": "x"}), "messages.0.role"),
    (messages({"role": 1, "content": "x"}), "messages.0.role"),
    (messages({"role": "user"}), "messages.0.content"),
    (messages({"role": "user", "content": None}), "messages.0.content"),
    (messages({"role": "tool", "tool_call_id": "1"}), "messages.0.content"),
    (messages({"role": "user", "content": 5}), "messages.0.content"),
    (messages({"role": "user", "content": {"type": "text"}}), "messages.0.content"),
    (messages({"role": "user", "content": "x", "colour": 1}), "messages.0.colour"),
    (messages({"role": "user", "content": "x", "tool_calls": [CALL]}), "messages.0.tool_calls"),
    (messages({"role": "assistant", "audio": {"id": "1"}}), "messages.0.audio"),
    (messages({"role": "assistant", "tool_calls": [{"id": "1"}]}), "messages.0.tool_calls.0.function"),
    (messages({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}), "messages.0.tool_calls.0.type"),
    (
        messages({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}),
        "messages.0.tool_calls.0.function.arguments",
    ),
    (parts(), "messages.0.content"),
    (parts("Hi"), "messages.0.content.0"),
    (parts({"text": "Hi"}), "messages.0.content.0"),
    (parts({"type": ["text"]}), "messages.0.content.0"),
    (parts({"type": "text"}), "messages.0.content.0.text"),
    (parts({"type": "text", "text": "a"}, {"type": "text", "text": 1}), "messages.0.content.1.text"),
    (parts({"type": "text", "text": "a", "lang": "no"}), "messages.0.content.0.lang"),
    (parts({"type": "image_url", "image_url": {"url": "data:"}}), "messages.0.content.0"),
    (parts({"type": "input_audio", "input_audio": {}}), "messages.0.content.0"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 5}, "max_completion_tokens"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools.0.function"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"function": {"name": ""}}]}, "tools.0.function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": "{}"}}]}, "tools.0.function.parameters"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": True}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "function": {"name": "weather"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [WEATHER]}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        messages({"role": "assistant", "content": "a"})
        | {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": "x"}, "prompt"),
    ({"scaffolding": "majority_vote"}, "scaffolding"),
    ({"scaffolding": {"n": 2}}, "scaffolding.method"),
    ({"scaffolding": {"method": "tree_search", "n": 2}}, "scaffolding.method"),
    ({"scaffolding": {"method": "best_of_n"}}, "scaffolding.n"),
    ({"scaffolding": {"method": "best_of_n", "n": 1}}, "scaffolding.n"),
    ({"scaffolding": {"method": "best_of_n", "n": "2"}}, "scaffolding.n"),
    ({"scaffolding": {"method": "best_of_n", "n": 2, "m": 1}}, "scaffolding.m"),
    ({"scaffolding": {"method": "best_of_n", "n": 2, "extract": "text"}}, "scaffolding.extract"),
    ({"scaffolding": {"method": "majority_vote", "n": 2, "extract": "."}}, "scaffolding.extract"),
    ({"scaffolding": VOTE, "n": 2}, "n"),
    ({"scaffolding": VOTE, "stream_interval": 1}, "stream_interval"),
    ({"scaffolding": VOTE, "split_steps": True}, "split_steps"),
]

NOT_PROMPTS: list[Any] = [None, 5, True, {}, [], [[]], [True], [1.0], [-1], [1 << 31], [1, "a"], ["a", 1], [[1], "a"]]

COMPLETION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    *(({"prompt": prompt}, "prompt") for prompt in NOT_PROMPTS),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], [False]]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
    ({"suffix": "the end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"messages": [USER]}, "messages"),
    ({"tools": [WEATHER]}, "tools"),
    ({"scaffolding": VOTE}, "scaffolding"),
]


def name_of(case: Any) -> str:
    return json.dumps(case)[:60] if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("fields", "param"), SHARED_REFUSALS + CHAT_REFUSALS, ids=name_of)
def test_chat_refusals(fields: dict[str, Any], param: str) -> None:
    error = refusal(ChatCompletionRequest, {"messages": [USER]} | fields)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert error.message.startswith(param) and error.message.endswith(".") and error.code


@pytest.mark.parametrize(("fields", "param"), SHARED_REFUSALS + COMPLETION_REFUSALS, ids=name_of)
def test_completion_refusals(fields: dict[str, Any], param: str) -> None:
    error = refusal(CompletionRequest, {"prompt": "Once"} | fields)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert error.message.startswith(param)


@pytest.mark.parametrize(
    ("model_class", "fields", "param"),
    [
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {"prompt": "a", "messages": [USER]}, "prompt"),
        (TokenizeRequest, {"prompt": 5}, "prompt"),
        (TokenizeRequest, {"prompt": "a", "tools": [WEATHER]}, "tools"),
        (TokenizeRequest, {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        (TokenizeRequest, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (DetokenizeRequest, {}, "tokens"),
        (DetokenizeRequest, {"tokens": "1 2"}, "tokens"),
        (DetokenizeRequest, {"tokens": [-1]}, "tokens"),
        (DetokenizeRequest, {"tokens": [True]}, "tokens"),
        (DetokenizeRequest, {"tokens": [1], "text": ""}, "text"),
    ],
)
def test_tokenizer_refusals(model_class: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal(model_class, fields).param == param


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "valid JSON"),
        (b"{", "column"),
        (b'{"a": 1,}', "line 1 column 8"),
        (b'{"messages":\n [1 2]}', "line 2"),
        (b"\xff\xfe", "valid JSON"),
        (b'{"temperature": NaN}', "valid JSON"),
        (b'{"temperature": Infinity}', "valid JSON"),
        (b'{"temperature": 1e999}', "valid JSON"),
        (b'{"model": "\\ud800"}', "valid JSON"),
        (b'{"model": "\xed\xa0\x80"}', "valid JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"messages"', "JSON object"),
        (b'{"x":' + b"[" * 100_000, "valid JSON"),
        (b'{"x":' * 5_000 + b"1" + b"}" * 5_000, "valid JSON"),
        (b'{"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
    ],
)
def test_bodies_that_are_no_json_object(body: bytes, says: str) -> None:
    error = refusal(ChatCompletionRequest, body)
    assert error.param is None and error.code == "invalid_json" and says in error.message


def test_brackets_side_by_side_are_not_deep() -> None:
    assert len(completion(prompt=[[1]] * (MAX_DEPTH + 1)).prompt) == MAX_DEPTH + 1
    assert chat(chat_template_kwargs={"x": [[]] * 500}).chat_template_kwargs == {"x": [[]] * 500}


def test_nesting_up_to_the_bound_is_fine() -> None:
    levels = MAX_DEPTH - 2  # the body and chat_template_kwargs are two
    body = b'{"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{"x":%s%s}}'
    parse(ChatCompletionRequest, body % (b"[" * levels, b"]" * levels))
    refusal(ChatCompletionRequest, body % (b"[" * (levels + 1), b"]" * (levels + 1)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must be greater than or equal to 1, got -1."),
        ({"temperature": "1"}, 'temperature must be a number, got "1".'),
        ({"foo": {"x": 1}}, "foo is not a known field."),
        ({"messages": []}, "messages must not be empty, got []."),
        ({"messages": None}, "messages is required."),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, f"messages must not hold more than {MAX_MESSAGES} entries."),
        ({"tools": [{"function": {"name": "f"}}] * (MAX_TOOLS + 1)}, "tools must not hold more than 2048 entries."),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must not hold more than 1024 entries."),
        ({"stop": "x" * 9000}, "stop must hold strings of 1 to 1024 characters."),
        (
            parts({"type": "image_url"}),
            'messages.0.content.0 is a part of type "image_url", which is not supported: this server takes text only.',
        ),
    ],
)
def test_messages_are_sentences(fields: dict[str, Any], message: str) -> None:
    assert refusal(ChatCompletionRequest, {"messages": [USER]} | fields).message == message


def test_a_long_name_or_value_does_not_come_back_whole() -> None:
    assert len(refusal(ChatCompletionRequest, {"messages": [USER], "x" * 100_000: 1}).body()) < 1000
    assert len(refusal(ChatCompletionRequest, parts({"type": "text", "text": "", "x" * 100_000: 1})).body()) < 1000
    assert len(refusal(ChatCompletionRequest, messages({"x" * 100_000: 1} | USER)).body()) < 1000
    assert len(refusal(ChatCompletionRequest, {"messages": [USER], "model": ["x" * 100_000]}).body()) < 1000
    assert len(refusal(ChatCompletionRequest, {"messages": [USER], "temperature": "x" * 100_000}).body()) < 1000


# ------------------------------------------------------------------ accepted, and how it reads


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1.0, "bad_words": []},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": -(1 << 63)},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_obfuscation": False}},
        {"n": 128, "ignore_eos": True, "min_tokens": 0, "max_tokens": 1},
        {"stop": [], "stop_token_ids": [], "logit_bias": {}},
        {"unknown_but_null": None, "guided_json": None},
    ],
    ids=name_of,
)
def test_accepted_on_both_endpoints(fields: dict[str, Any]) -> None:
    chat(**fields)
    completion(**fields)


def optional_fields(model_class: Any) -> list[str]:
    return [name for name, info in model_class.model_fields.items() if not info.is_required()]


@pytest.mark.parametrize("name", optional_fields(ChatCompletionRequest))
def test_null_is_the_default_in_chat(name: str) -> None:
    assert chat(**{name: None}).model_dump() == chat().model_dump()


@pytest.mark.parametrize("name", optional_fields(CompletionRequest))
def test_null_is_the_default_in_completions(name: str) -> None:
    assert completion(**{name: None}).model_dump() == completion().model_dump()


def test_null_is_the_default_in_nested_objects() -> None:
    assert not chat(stream_options={"include_usage": None}).stream_options.include_usage
    assert chat(messages=[USER | {"name": None, "tool_calls": None, "audio": None}]).messages[0].content == "Hi"


@pytest.mark.parametrize(
    ("sent", "read"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_every_form_of_prompt_is_read_as_a_list(sent: Any, read: Any) -> None:
    assert completion(prompt=sent).prompt == read


@pytest.mark.parametrize(("sent", "read"), [("a", ["a"]), (["a", "b"], ["a", "b"]), (None, [])])
def test_stop_is_read_as_a_list(sent: Any, read: list[str]) -> None:
    assert chat(stop=sent).stop == read


def test_logit_bias_is_read_by_id() -> None:
    assert chat(logit_bias={"0": -100, "50256": 1.5}).logit_bias == {0: -100.0, 50256: 1.5}


def test_text_parts_are_joined() -> None:
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    assert chat(messages=[{"role": "user", "content": text}]).messages[0].content == "a\nb"


def test_a_chat_answer_may_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "Let me look.",
        "tool_calls": [CALL | {"index": 0}],
    }
    reply = {"role": "tool", "tool_call_id": "call_1", "content": "7 degrees"}
    read = chat(messages=[USER, answer, reply]).template_messages()
    assert read[0] == USER
    assert read[1]["content"] == "" and read[1]["reasoning_content"] == "Let me look."
    assert read[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert read[2] == reply


@pytest.mark.parametrize(
    ("sent", "read"), [("", {}), ("{}", {}), ({"a": 1}, {"a": 1}), ('{"city": "Os', '{"city": "Os'), ("[1]", "[1]")]
)
def test_call_arguments_for_the_template(sent: Any, read: Any) -> None:
    call = {"function": {"name": "f", "arguments": sent}}
    request = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert request.template_messages()[1]["tool_calls"][0]["function"]["arguments"] == read


def test_tools_are_plain_again() -> None:
    request = chat(tools=[WEATHER, {"function": {"name": "f", "strict": True}}])
    assert request.plain_tools() == [WEATHER, {"type": "function", "function": {"name": "f", "strict": True}}]
    assert request.template_tools() == request.plain_tools()
    assert chat(tools=[]).template_tools() is None


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, "none"),
        ({"tool_choice": "auto"}, "none"),
        ({"tools": [WEATHER]}, "auto"),
        ({"tools": [WEATHER], "tool_choice": "none"}, "none"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "required"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, NAMED),
    ],
)
def test_effective_tool_choice(fields: dict[str, Any], choice: Any) -> None:
    assert chat(**fields).effective_tool_choice == choice


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
)
def test_token_limit(fields: dict[str, Any], limit: int | None) -> None:
    assert chat(**fields).token_limit == limit


def test_generations() -> None:
    assert chat(n=3).outputs == 3
    assert chat(n=1, split_steps=False, scaffolding=VOTE | {"extract": None}).outputs == 2


def test_continuing_the_last_message_opens_no_new_one() -> None:
    request = chat(messages=[USER, {"role": "assistant", "content": "He"}], continue_final_message=True)
    assert request.add_generation_prompt is False
    assert chat().add_generation_prompt is True


def test_template_kwargs_hold_the_reasoning_effort() -> None:
    request = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert request.template_kwargs() == {"reasoning_effort": "low", "enable_thinking": False}
    assert chat().template_kwargs() == {}


def test_the_body_as_sent_stays() -> None:
    body = {"messages": [USER], "stop": "x", "seed": None, "store": False}
    assert chat(**body).as_sent() == body
    assert ChatCompletionRequest(messages=[Message(role="user", content="Hi")]).as_sent()["messages"] == [USER]


def test_a_decoded_body_is_taken_too() -> None:
    body = {"messages": [USER], "stream_options": {"include_usage": True}, "guided_json": None}
    assert parse_object(ChatCompletionRequest, body).stream_options.include_usage


def test_tokenize_adds_special_tokens_to_prompts_only() -> None:
    prompt, turns = {"prompt": "a"}, {"messages": [USER]}
    assert parse_object(TokenizeRequest, prompt).special_tokens
    assert not parse_object(TokenizeRequest, turns).special_tokens
    assert parse_object(TokenizeRequest, turns | {"add_special_tokens": True}).special_tokens
    assert parse_object(DetokenizeRequest, {"tokens": []}).tokens == []


# ------------------------------------------------------------------ any JSON at all

WORDS = st.sampled_from(
    ["", "a", "5", "auto", "text", "type", "role", "name", "content", "function", "é\x00😀", "\ud800"]
)
NUMBERS = st.integers() | st.sampled_from([0.0, 0.5, 1.0, -1e300, 5e-324])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
CLASSES: list[Any] = [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
NAMES = sorted({name for c in CLASSES for name in (*c.model_fields, *c.neutral)})
BASES = [{}, {"messages": [USER]}, {"prompt": "a"}, {"tokens": [1]}]


@given(st.sampled_from(CLASSES), st.sampled_from(BASES), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
@example(ChatCompletionRequest, {"messages": [USER]}, {"logit_bias": {"": 1}})
@example(ChatCompletionRequest, {}, {"messages": [{"role": "user", "content": [{"type": {}}]}]})
def test_any_value_of_any_field_is_read_or_refused(model_class: Any, base: Any, fields: dict[str, Any]) -> None:
    try:
        request = parse(model_class, json.dumps(base | fields).encode())
    except ApiError as error:
        assert error.status == 400
        assert json.loads(error.body())["error"]["message"] == error.message
    else:
        assert request.as_sent() is not None


@given(JSON)
def test_any_json_is_read_or_refused(value: Any) -> None:
    refusal(ChatCompletionRequest, json.dumps(value).encode())


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    refusal(CompletionRequest, body)


@given(st.lists(st.one_of(JSON, st.fixed_dictionaries({"role": st.just("assistant")}, optional={"content": JSON}))))
def test_any_messages_are_read_or_refused(turns: list[Any]) -> None:
    try:
        request = parse(ChatCompletionRequest, json.dumps({"messages": turns}).encode())
    except BadRequestError as error:
        assert error.param is None or error.param.startswith("messages")
    else:
        assert len(request.template_messages()) == len(turns)


# ------------------------------------------------------------------ error objects


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequestError("m", param="p"), 400, "invalid_request_error", None),
        (NotFoundError("m", code="model_not_found"), 404, "not_found_error", "model_not_found"),
        (PayloadTooLargeError("m"), 413, "invalid_request_error", "payload_too_large"),
        (OverloadedError("m", retry_after=1), 429, "rate_limit_error", "rate_limit_exceeded"),
        (OverloadedError("m", retry_after=1, status=503), 503, "overloaded_error", "overloaded"),
        (EngineError("m"), 500, "server_error", "engine_error"),
        (ApiError("m", status=418, type="teapot"), 418, "teapot", None),
    ],
)
def test_error_objects(error: ApiError, status: int, kind: str, code: str | None) -> None:
    assert error.status == status and str(error) == "m"
    assert json.loads(error.body()) == {"error": {"message": "m", "type": kind, "param": error.param, "code": code}}


@pytest.mark.parametrize(("seconds", "header"), [(0, "1"), (0.2, "1"), (1.5, "2"), (30, "30")])
def test_retry_after_is_whole_seconds(seconds: float, header: str) -> None:
    assert OverloadedError("busy", retry_after=seconds).headers() == {"Retry-After": header}
    assert EngineError("m").headers() == {}


def test_an_error_in_a_stream_is_one_event() -> None:
    event = stream_error("first\nsecond \ud800", "server_error", "engine_error")
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and event.count(b"\n") == 2
    error = json.loads(event[len(b"data: ") :])["error"]
    assert error == {"message": "first\nsecond \ud800", "type": "server_error", "param": None, "code": "engine_error"}
