"""Bodies of ``POST /v1/responses``: what is taken, what is refused in which words, and the chat request it means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.body import parse
from serve.errors import BadRequestError
from serve.responses_messages import chat_request, check_calls, messages_of
from serve.responses_protocol import ResponsesRequest, item_of

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "21"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
ANSWER = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}],
}  # fmt: skip


def request(**body: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"input": "Hi"} | body).encode())


def messages(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(instructions, [item_of(item, str(i)) for i, item in enumerate(items)])


# ---------------------------------------------------------------------------------------------------- conversations


def test_a_text_is_the_users_message() -> None:
    assert messages_of(None, request().input) == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "user", "content": [{"type": "text", "text": "Hi"}], "id": None, "status": None},
    ],
)
def test_a_message_has_many_forms(item: dict[str, Any]) -> None:
    assert messages_of(None, request(input=[item]).input) == [{"role": "user", "content": "Hi"}]


def test_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts})[0]["content"] == "a\nb"


def test_the_models_side_is_one_message_per_turn() -> None:
    call2 = CALL | {"call_id": "c2", "name": "g"}
    turn, result = messages(THOUGHT, ANSWER, CALL, call2, RESULT)
    assert turn["role"] == "assistant" and (turn["reasoning_content"], turn["content"]) == ("Hm.", "So.")
    assert [(call["id"], call["function"]["name"]) for call in turn["tool_calls"]] == [("c1", "f"), ("c2", "g")]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "21"}


def test_a_turn_ends_where_another_speaks_or_another_thought_begins() -> None:
    said = messages(CALL, RESULT, CALL, RESULT, ANSWER, {"role": "user", "content": "?"})
    roles = [message["role"] for message in said]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert len(messages(ANSWER, ANSWER)) == len(messages(ANSWER, THOUGHT, ANSWER)) == 2
    assert messages(THOUGHT, THOUGHT)[0]["reasoning_content"] == "Hm.\nHm."


def test_reasoning_without_readable_text_is_left_out() -> None:
    secret = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
    assert messages(secret, ANSWER) == [{"role": "assistant", "content": "So."}]
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}
    assert messages(summary, ANSWER)[0]["reasoning_content"] == "In short."


def test_a_refusal_is_what_the_model_said() -> None:
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages(item) == [{"role": "assistant", "content": "No."}]


def test_instructions_come_first_and_are_one_with_a_system_message() -> None:
    user = {"role": "user", "content": "Hi"}
    assert messages(user, instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    for role in ("system", "developer"):
        joined = messages({"role": role, "content": "Be kind."}, user, instructions="Be brief.")
        assert joined[0] == {"role": role, "content": "Be brief.\n\nBe kind."} and len(joined) == 2


def test_what_came_out_can_be_sent_back_in() -> None:
    output = [THOUGHT | {"status": "completed", "encrypted_content": None}, ANSWER | {"phase": None}, CALL]
    assert len(request(input=[*output, RESULT]).input) == 4


def test_the_output_of_a_call_that_nobody_made_is_refused() -> None:
    items = request(input=[{"role": "user", "content": "Hi"}, RESULT]).input
    with pytest.raises(BadRequestError, match=r"^input\.1\.call_id is \"c1\", and no function call") as caught:
        check_calls(items)
    assert caught.value.param == "input.1.call_id"
    check_calls(items, request(input=[CALL]).input)
    check_calls(request(input=[CALL, RESULT]).input)


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    """A body with one message of these parts."""
    return {"input": [{"role": "user", "content": list(content)}]}


# ---------------------------------------------------------------------------------------------------- the chat request


def test_tools_and_their_choice_are_nested() -> None:
    chat = chat_request(request(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False))
    assert chat.plain_tools() == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}} and not chat.parallel_tool_calls


def test_sampling_is_handed_on() -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"], "presence_penalty": 1.0,
        "logit_bias": {"5": 1}, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [7],
    }  # fmt: skip
    chat = chat_request(request(**asked, max_output_tokens=9, reasoning={"effort": "high"}))
    for name, value in asked.items():
        assert getattr(chat, name) == ({5: 1.0} if name == "logit_bias" else value)
    assert chat.token_limit == 9 and chat.template_kwargs()["reasoning_effort"] == "high"


def test_history_comes_before_the_input() -> None:
    chat = chat_request(request(instructions="Be brief."), request(input=[ANSWER]).input)
    assert [message.role for message in chat.messages] == ["system", "assistant", "user"]


@pytest.mark.parametrize(
    "body",
    [
        {"truncation": "disabled"},
        {"background": False},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"include": ["reasoning.encrypted_content"]},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "k", "user": "u"},
        {"metadata": {"a": "b"}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"max_tool_calls": 3, "top_logprobs": 0, "conversation": None, "prompt": None},
        {"tool_choice": "auto"},
    ],
)
def test_what_asks_for_nothing_special_is_taken(body: dict[str, Any]) -> None:
    chat_request(request(**body))


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": []}, "input", "must be a string or a list"),
        ({"input": 5}, "input", "must be a string or a list"),
        ({"input": ["Hi"]}, "input.0", "must be an object"),
        ({"input": [{"content": "Hi"}]}, "input.0", 'must have a "type"'),
        ({"input": [{"type": "mcp_call", "id": "x"}]}, "input.0", '"mcp_call", which is not supported'),
        ({"input": [{"role": "user"}]}, "input.0.content", "is required"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "must be 'system'"),
        ({"input": [{"role": "user", "content": "x", "b": 1}]}, "input.0.b", "is not a known field"),
        (parts({"type": "input_image", "image_url": "x"}), "input.0.content.0", "input_image"),
        (parts({"type": "input_text"}), "input.0.content.0.text", "must be a string"),
        (parts({"type": "text", "text": "a", "b": 1}), "input.0.content.0.b", "known field"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", "is required"),
        ({"input": [CALL | {"arguments": {}}]}, "input.0.arguments", "must be a string"),
        ({"input": [RESULT | {"output": [{"type": "input_file"}]}]}, "input.0.output.0", "input_file"),
        ({"instructions": 5}, "instructions", "must be a string, got 5"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"messages": []}, "messages", "use input"),
        ({"n": 2}, "n", "one choice"),
        ({"background": True}, "background", "while the client waits"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"truncation": "auto"}, "truncation", "never truncated"),
        ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include.0", "not supported"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format", "constrained"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "required"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a string"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "up to 16"),
        ({"previous_response_id": ""}, "previous_response_id", "must not be empty"),
        ({"nonsense": 1}, "nonsense", "is not a known field"),
        ({"guided_json": {}}, "guided_json", "constrained"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(body: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        request(**body)
    assert caught.value.param == param
    assert caught.value.message.startswith(param) and said in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": 2, "split_steps": True}, "stream_interval"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ],
)
def test_what_chat_refuses_is_refused_under_the_same_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat_request(request(**body))
    assert caught.value.param == param


_NAMES = ["type", "role", "content", "text", "id", "call_id", "name", "arguments", "output", "summary", "message"]
_NAMES += ["function_call", "function_call_output", "reasoning", "item_reference", "input_text", "user", "assistant"]
_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(allow_nan=False), st.sampled_from(_NAMES))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(_NAMES), inner, max_size=5)),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from([*ResponsesRequest.model_fields, "truncation", "background"]), _VALUES, max_size=3),
    _VALUES,
)
def test_any_body_is_taken_or_refused_in_words(body: dict[str, Any], sent: Any) -> None:
    try:
        made = request(**{"input": sent} | body)
        check_calls(made.input)
        chat_request(made)
    except BadRequestError as error:
        assert error.message


def test_the_input_is_kept_as_it_was_sent() -> None:
    assert request().input_as_sent() == [{"type": "message", "role": "user", "content": "Hi"}]
    assert request(input=[CALL]).input_as_sent() == [CALL]
