"""OpenAI's Python client on /v1/chat/completions: what it makes of reasoning and tool calls, streamed and at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from serve.openai_protocol import Message
from tests.clients.scenario import (
    AFTERTHOUGHT,
    ARGUMENTS,
    BREAK,
    BROKEN,
    CUT,
    FINAL,
    GREETING,
    HELLO,
    OTHER_ARGUMENTS,
    OTHER_GREETING,
    PARAMETERS,
    PREAMBLE,
    QUESTION,
    REASONING,
    THANKS,
    TOO_LONG,
    TWO,
    WEATHER,
    WELCOME,
    argument_text,
)  # fmt: skip
from tests.process.server import Server

MODEL = "replay"
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
def qwen_client(qwen: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def streamed(client: openai.OpenAI, messages: list[Any], **more: Any) -> tuple[list[Any], ChatCompletion]:
    """The events of the client's own accumulator, and what it has made of them."""
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(model=MODEL, messages=messages, stream_options=options, **more) as stream:
        events = list(stream)
        return events, stream.get_final_completion()


def said(completion: ChatCompletion, index: int = 0) -> dict[str, Any]:
    """What a choice says, without what is minted for each request."""
    choice = completion.choices[index]
    made: Any = choice.message.tool_calls or []
    calls = [(call.function.name, call.function.arguments) for call in made]
    return {
        "reasoning": getattr(choice.message, "reasoning_content", None),
        "content": choice.message.content,
        "calls": calls,
        "finish": choice.finish_reason,
    }


def usage(completion: ChatCompletion) -> Any:
    assert completion.usage is not None
    plain = completion.usage.model_dump(exclude_none=True)
    assert plain["total_tokens"] == plain["prompt_tokens"] + plain["completion_tokens"]
    return plain


# ------------------------------------------------------------------------------------------------------ a tool


def test_a_call_with_reasoning(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=user(QUESTION), tools=TOOLS)
    call = ("get_weather", argument_text(ARGUMENTS))
    assert said(completion) | {"content": (completion.choices[0].message.content or "").strip()} == {
        "reasoning": REASONING, "content": PREAMBLE, "calls": [call], "finish": "tool_calls",
    }  # fmt: skip
    details = usage(completion)["completion_tokens_details"]
    assert 5 < details["reasoning_tokens"] < usage(completion)["completion_tokens"] - 10
    events, final = streamed(client, user(QUESTION), tools=TOOLS)
    assert said(final) == said(completion) and usage(final) == usage(completion)
    parsed: Any = final.choices[0].message
    assert parsed.tool_calls[0].function.parsed_arguments == ARGUMENTS
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [call]


def test_an_answer_that_is_voted_on(client: openai.OpenAI) -> None:
    """The answer is an ordinary one, reasoning and calls included; usage is that of all generations."""
    vote: Any = {"scaffolding": {"method": "majority_vote", "n": 3}}
    hello = client.chat.completions.create(model=MODEL, messages=user(HELLO), extra_body=vote)
    assert said(hello)["content"] == GREETING
    once = client.chat.completions.create(model=MODEL, messages=user(QUESTION), tools=TOOLS)
    voted = client.chat.completions.create(model=MODEL, messages=user(QUESTION), tools=TOOLS, extra_body=vote)
    _, final = streamed(client, user(QUESTION), tools=TOOLS, extra_body=vote)
    assert said(final) == said(voted) == said(once)
    for made in (voted, final):
        assert usage(made)["completion_tokens"] == 3 * usage(once)["completion_tokens"]
        assert usage(made)["prompt_tokens"] == 3 * usage(once)["prompt_tokens"]
        details = [each["completion_tokens_details"]["reasoning_tokens"] for each in (usage(made), usage(once))]
        assert details[0] == 3 * details[1]


def test_arguments_come_as_they_are_generated(client: openai.OpenAI) -> None:
    events, _ = streamed(client, user(QUESTION), tools=TOOLS)
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 1 and "".join(delta.arguments_delta for delta in deltas) == argument_text(ARGUMENTS)
    chunks = [event.chunk for event in events if event.type == "chunk"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert (calls[0].type, calls[0].function.name, calls[0].function.arguments) == ("function", "get_weather", "")
    assert all(call.id is None and call.type is None and call.function.name is None for call in calls[1:])


def test_two_calls_and_what_follows(qwen_client: openai.OpenAI) -> None:
    """The message is sent back as the client has it, reasoning included, and the conversation goes on."""
    client, messages = qwen_client, user(TWO)
    _, first = streamed(client, messages, tools=TOOLS)
    message = first.choices[0].message
    calls: Any = message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [ARGUMENTS, OTHER_ARGUMENTS]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
    messages.append(message)
    for call in calls:
        weather = WEATHER[json.loads(call.function.arguments)["city"]]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert said(second) == {"reasoning": AFTERTHOUGHT, "content": FINAL, "calls": [], "finish": "stop"}
    assert usage(second)["prompt_tokens"] > usage(first)["total_tokens"]


def test_a_whole_conversation(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *user(QUESTION)]
    for _ in range(2):
        _, completion = streamed(client, messages, tools=TOOLS)
        message: Any = completion.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            content = WEATHER[call.function.parsed_arguments["city"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert messages[-1].content == FINAL
    _, last = streamed(client, [*messages, *user(THANKS)], tools=TOOLS)
    assert said(last) == {"reasoning": None, "content": WELCOME, "calls": [], "finish": "stop"}
    assert usage(last)["completion_tokens_details"]["reasoning_tokens"] <= 1  # the newlines of an empty block


@pytest.mark.parametrize("choice", ["none", None])
def test_markup_without_tools_is_text(qwen_client: openai.OpenAI, choice: Any) -> None:
    more = {} if choice is None else {"tools": TOOLS, "tool_choice": choice}
    completion = qwen_client.chat.completions.create(model=MODEL, messages=user(QUESTION), **more)
    assert said(completion)["calls"] == [] and said(completion)["finish"] == "stop"
    assert "<tool_call>" in (completion.choices[0].message.content or "")
    assert streamed(qwen_client, user(QUESTION), **more)[1].choices[0].message.content == said(completion)["content"]


# ------------------------------------------------------------------------------------------------------ other ends


def test_a_call_that_was_cut_off(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=user(CUT), tools=TOOLS)
    ((name, arguments),) = said(completion)["calls"]
    assert name == "get_weather" and argument_text(ARGUMENTS).startswith(arguments) and len(arguments) > 5
    assert said(completion)["finish"] == "length"
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        streamed(client, user(CUT), tools=TOOLS)
    assert said(caught.value.completion)["calls"] == [(name, arguments)]


def test_a_limit_and_a_stop(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=user(TOO_LONG))
    assert said(completion)["content"] == "1, 2, 3," and said(completion)["finish"] == "length"
    stopped = client.chat.completions.create(model=MODEL, messages=user(TOO_LONG), stop=[", 3"])
    assert said(stopped)["content"] == "1, 2" and said(stopped)["finish"] == "stop"
    assert said(streamed(client, user(TOO_LONG), stop=[", 3"])[1]) == said(stopped)


def test_two_choices(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model=MODEL, messages=user(HELLO), n=2)
    assert [choice.message.content for choice in completion.choices] == [GREETING, OTHER_GREETING]
    assert [said(completion, index)["reasoning"] for index in range(2)] == [None, AFTERTHOUGHT]
    _, final = streamed(client, user(HELLO), n=2)
    assert [said(final, index) for index in range(2)] == [said(completion, index) for index in range(2)]
    assert usage(final) == usage(completion)
    assert usage(final)["completion_tokens_details"]["reasoning_tokens"] > 0


def test_logprobs_beside_a_parser(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=user(QUESTION), tools=TOOLS, logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == usage(completion)["completion_tokens"]
    _, final = streamed(client, user(QUESTION), tools=TOOLS, logprobs=True, top_logprobs=2)
    assert final.choices[0].logprobs is not None and final.choices[0].logprobs.content == logprobs.content


def test_reasoning_left_out_and_its_other_name(oss: Server) -> None:
    with openai.OpenAI(base_url=f"{oss.url}/v1", api_key="-", max_retries=0) as client:
        both: Any = client.chat.completions.create(model=MODEL, messages=user(QUESTION), tools=TOOLS).choices[0].message
        assert both.reasoning == both.reasoning_content == REASONING
        with client.chat.completions.create(model=MODEL, messages=user(QUESTION), tools=TOOLS, stream=True) as stream:
            deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in stream]
        thoughts = [delta for delta in deltas if "reasoning" in delta or "reasoning_content" in delta]
        assert all(delta == dict.fromkeys(("reasoning_content", "reasoning"), delta["reasoning"]) for delta in thoughts)
        assert "".join(delta["reasoning"] for delta in thoughts) == REASONING
        without = client.chat.completions.create(
            model=MODEL, messages=user(QUESTION), tools=TOOLS, extra_body={"include_reasoning": False}
        )
    assert said(without)["reasoning"] is None and len(said(without)["calls"]) == 1
    assert usage(without)["completion_tokens_details"]["reasoning_tokens"] > 0


# ------------------------------------------------------------------------------------------------------ errors


def test_refusals_are_the_client_s_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=user(HELLO))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=user(HELLO), extra_body={"temprature": 1})
    assert refused.value.param == "temprature"
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL


def test_an_engine_that_fails_is_the_client_s_exception(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=BROKEN):
        client.chat.completions.create(model=MODEL, messages=user(BREAK))
    text = ""
    with pytest.raises(openai.APIError, match=BROKEN):
        for chunk in client.chat.completions.create(model=MODEL, messages=user(BREAK), stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == PREAMBLE


def test_what_the_client_has_parsed_does_not_reach_the_template(client: openai.OpenAI) -> None:
    """It is the client's own, and would be in the prompt of templates that print a message whole."""
    _, completion = streamed(client, user(QUESTION), tools=TOOLS)
    message = completion.choices[0].message.model_dump(exclude_none=True)
    assert "parsed_arguments" in message["tool_calls"][0]["function"]
    seen = Message.model_validate(message | {"parsed": {"a": 1}}).for_template()
    assert "parsed" not in seen and seen["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}


# ------------------------------------------------------------------------------------------------------ our own


def test_timings_behind_the_last_event_are_not_seen(client: openai.OpenAI) -> None:
    """A comment is none of the client's business."""
    _, plain = streamed(client, user(QUESTION))
    _, timed = streamed(client, user(QUESTION), extra_headers={"X-Timings": "1"})
    assert said(timed) == said(plain) and usage(timed) == usage(plain)


def texts(client: openai.OpenAI, **fields: Any) -> list[str]:
    """What each event of an answer adds to its text, or to its reasoning."""
    with client.chat.completions.create(model=MODEL, messages=user(HELLO), stream=True, extra_body=fields) as stream:
        deltas: list[Any] = [chunk.choices[0].delta for chunk in stream]
    found = [delta.content or getattr(delta, "reasoning_content", None) for delta in deltas]
    return [text for text in found if text]


def test_the_size_of_events_is_the_requests(client: openai.OpenAI) -> None:
    """One of the servers makes three tokens in a step, and both may join steps."""
    split, joined = texts(client, split_steps=True), texts(client, stream_interval=1000)
    assert "".join(split) == "".join(joined) and len(split) > len(joined)
    assert split == texts(client, split_steps=True)
