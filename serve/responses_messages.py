"""The chat request that generates a response: items turn into messages, flat tools into nested ones.

Neighbouring items of the model's side (reasoning, a message, function calls) are one turn, hence one message: chat
templates know no other form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.body import parse_object, quote
from serve.errors import BadRequestError
from serve.openai_protocol import ChatCompletionRequest
from serve.responses_protocol import (
    ChatFields,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)


def chat_request(request: ResponsesRequest, history: Sequence[Item] = ()) -> ChatCompletionRequest:
    """The chat request that generates the response. Raises BadRequestError.

    history: the items of the conversation before the request's own.
    """
    sent = request.as_sent()
    body = {name: sent[name] for name in ChatFields.model_fields if sent.get(name) is not None}
    body["messages"] = messages_of(request.instructions, [*history, *request.input])
    if not body["messages"]:  # nothing but reasoning without a text
        raise BadRequestError("input holds nothing to answer.", param="input", code="invalid_value")
    body["tools"] = [tool.nested() for tool in request.tools]
    body["model"], body["max_completion_tokens"] = request.model, request.max_output_tokens
    body["reasoning_effort"], body["tool_choice"] = request.reasoning.effort, _nested_choice(request.tool_choice)
    return parse_object(ChatCompletionRequest, body)


def _nested_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def check_calls(items: Sequence[Item], history: Sequence[Item] = ()) -> None:
    """Raise BadRequestError for the output of a call that nobody made: a chat template would garble or refuse it."""
    called = {item.call_id for item in history if isinstance(item, FunctionCallItem)}
    for index, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem) and item.call_id not in called:
            where = f"input.{index}.call_id"
            message = f"{where} is {quote(item.call_id)}, and no function call before it has that id."
            raise BadRequestError(message, param=where, code="invalid_value")


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """A conversation as chat messages. References must have been resolved; one that was not says nothing."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": item.content})
        else:
            _add_to_turn(messages, item)
    return _instructed(instructions, messages)


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """The model's side: one message per turn, and a turn has its reasoning, its text and its calls in this order."""
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, FunctionCallItem):
        turn = turn or _new_turn(messages)
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        turn.setdefault("tool_calls", []).append(call)
    elif isinstance(item, MessageItem):
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = _new_turn(messages)
        turn["content"] = item.content
    elif isinstance(item, ReasoningItem) and (text := item.content or item.summary):
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = _new_turn(messages)
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = f"{before}\n{text}" if before else text


def _new_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    messages.append(turn)
    return turn


def _instructed(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions come first. Many chat templates take one system message only, so a first one is joined to them."""
    if not instructions:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):
        return [messages[0] | {"content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
