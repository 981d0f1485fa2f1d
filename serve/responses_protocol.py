"""The body of ``POST /v1/responses``, and what a response says of it.

The rules are those of ``openai_protocol.py``: nothing is silently ignored, types are strict, null is absent. Field
names, types and ranges follow OpenAI's API reference (create a model response); what a client got in ``output`` may be
sent back in ``input`` as it came. The sampling fields that other servers add to chat are taken here too.

A response is generated like a chat choice; ``responses_messages.py`` makes the chat request of a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, PlainValidator, ValidationError, WithJsonSchema

# The base class and the words of refusals are those of the other bodies, so that all errors sound alike.
from serve.body import Body, bad_request, quote, wrong
from serve.openai_protocol import MAX_COUNT, MAX_MESSAGES, MAX_TOOLS, ONLY_NULL, ChatCompletionRequest, Positive

MAX_METADATA = 16  #: pairs; keys of 64 and values of 512 characters (OpenAI's API reference)

#: Parts that are text, by type: the key of the text, and what else may stand beside it.
_PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "input_text": ("text", ("cache_control", "prompt_cache_breakpoint")),
    "output_text": ("text", ("annotations", "logprobs")),
    "text": ("text", ("cache_control",)),
    "refusal": ("refusal", ()),
    "summary_text": ("text", ()),
    "reasoning_text": ("text", ()),
}


def _part_schema(kind: str) -> dict[str, Any]:
    key, others = _PARTS[kind]
    return {
        "type": "object",
        "required": ["type", key],
        "properties": {"type": {"const": kind}, key: {"type": "string"}, **{name: {} for name in others}},
        "additionalProperties": ONLY_NULL,
    }


def _parts_schema(*kinds: str) -> WithJsonSchema:
    items = {"anyOf": [_part_schema(kind) for kind in kinds]}
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": items}]})


def _parts(*kinds: str) -> Any:
    """A validator of text: a string or a list of parts of ``kinds``; parts are joined by newlines, as for chat."""

    def text(value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong("must be a string or a list of text parts")
        return "\n".join(_part(part, index, kinds) for index, part in enumerate(value))

    return PlainValidator(text)


def _part(part: Any, index: int, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong('must be an object with a "type"', str(index))
    if kind not in kinds:
        only = ", ".join(kinds)
        raise wrong(f"is a part of type {quote(kind)}, which is not supported here: only {only}", str(index))
    key, others = _PARTS[kind]
    text = part.get(key)
    if not isinstance(text, str):
        raise wrong("must be a string", f"{index}.{key}")
    for name in (name for name, entry in part.items() if entry is not None and name not in ("type", key, *others)):
        raise wrong("is not a known field", f"{index}.{name}")
    return text


# ------------------------------------------------------------------ items of the conversation

_SAID = ("input_text", "output_text", "text", "refusal")
_RETURNED = ("input_text", "output_text", "text")
_SUMMARY, _REASONING = ("summary_text",), ("reasoning_text",)


class _Item(Body):
    """What items have in common; ``id`` and ``status`` are left over from an output."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, _parts(*_SAID), _parts_schema(*_SAID)]
    phase: str | None = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]  # of any length: it is the model's word, and what came out goes in again
    arguments: str


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Annotated[str, _parts(*_RETURNED), _parts_schema(*_RETURNED)]
    name: str | None = None


class ReasoningItem(_Item):
    """``encrypted_content`` of another service cannot be read here and is left out of the prompt."""

    type: Literal["reasoning"]
    summary: Annotated[str, _parts(*_SUMMARY), _parts_schema(*_SUMMARY)] = ""
    content: Annotated[str, _parts(*_REASONING), _parts_schema(*_REASONING)] = ""
    encrypted_content: str | None = None


class ItemReference(_Item):
    """Stands for a stored item; whoever holds the store puts that in its place."""

    type: Literal["item_reference"] = "item_reference"
    id: Annotated[str, Field(min_length=1)]


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference

_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


def _items(value: Any) -> list[Item]:
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list) or not value:
        raise wrong("must be a string or a list of one or more items")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"must not hold more than {MAX_MESSAGES} items, got {len(value)}")
    return [item_of(each, str(index)) for index, each in enumerate(value)]


def item_of(value: Any, where: str) -> Item:
    """One item; a refusal names its place, ``where``, and the field."""
    if not isinstance(value, dict):
        raise wrong("must be an object", where)
    kind = value.get("type") or ("message" if "role" in value else "item_reference" if set(value) == {"id"} else None)
    if not isinstance(kind, str):
        raise wrong('must have a "type"', where)
    if kind not in _ITEMS:
        raise wrong(f"is an item of type {quote(kind)}, which is not supported: only {', '.join(_ITEMS)}", where)
    try:
        return _ITEMS[kind].model_validate(value)
    except ValidationError as error:
        fault = bad_request(error)
        field = fault.param or ""
        raise wrong(fault.message.removeprefix(field).strip(" ."), f"{where}.{field}".rstrip(".")) from error


# ------------------------------------------------------------------ the request


class FunctionTool(Body):
    """A tool's declaration, flat; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def nested(self) -> dict[str, Any]:
        """The same as chat has it."""
        function = self.model_dump(exclude_unset=True, exclude={"type"})
        return {"type": "function", "function": function}


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    #: Reasoning is returned as it is, so there is nothing to choose a summary of; "auto" leaves that to the server.
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


_PLAIN_TEXT = {"const": {"type": "text"}}


def _text_format(value: Any) -> dict[str, Any]:
    if value != {"type": "text"}:
        raise wrong('must be {"type": "text"}: output cannot be constrained by this server')
    return dict(value)


class TextOptions(Body):
    format: Annotated[dict[str, Any], PlainValidator(_text_format), WithJsonSchema(_PLAIN_TEXT)] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: bool = False  # harmless: padding against eavesdroppers, which no client reads


_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
        },
    ]
}


def _tool_choice(value: Any) -> str | dict[str, Any]:
    if value in ("none", "auto", "required"):
        return str(value)
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str):
        return {"type": "function", "name": value["name"]}
    raise wrong('must be "none", "auto", "required" or {"type": "function", "name": ...}')


ToolChoice = Annotated[str | dict[str, Any], PlainValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE)]

#: Parts of items that this server never makes, so nothing of them can be left out; and reasoning comes in the clear.
_INCLUDABLE = frozenset(
    (
        "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)  # fmt: skip


_INCLUDE = {"type": "array", "items": {"enum": sorted(_INCLUDABLE)}}


def _include(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise wrong("must be a list of strings")
    for index, each in enumerate(value):
        if not isinstance(each, str) or each not in _INCLUDABLE:
            raise wrong(f"is {quote(each)}, which is not supported", str(index))
    return value


_METADATA = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise wrong(f"must be an object of up to {MAX_METADATA} strings")
    for key, entry in value.items():
        if not isinstance(entry, str) or len(key) > 64 or len(entry) > 512:
            raise wrong("must be a string of up to 512 characters under a key of up to 64", key)
    return value


_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "responses are made while the client waits"),
    "conversation": ((), "conversations are not stored; use previous_response_id"),
    "prompt": ((), "prompts are not stored"),
    "truncation": (("disabled",), "prompts are never truncated"),
    "top_logprobs": ((0,), "log-probabilities are offered by /v1/chat/completions"),
    "context_management": (([],), "contexts are not compacted"),
    "moderation": ((), "nothing is moderated"),
    "n": ((1,), "a response has one choice"),
    "max_tokens": ((), "use max_output_tokens"),
    "max_completion_tokens": ((), "use max_output_tokens"),
    "messages": ((), "use input"),
    "response_format": ((), "use text.format"),
    "reasoning_effort": ((), "use reasoning.effort"),
}


class ChatFields(Body):
    """Fields that mean what they mean in chat. They are checked there, by the chat request they are handed on to."""

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    stop_in_reasoning: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    stream_interval: Any = None
    split_steps: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    chat_template_kwargs: Any = None
    parallel_tool_calls: Any = None


class ResponsesRequest(ChatFields):
    """The body of ``POST /v1/responses``. ``input`` is held as a list of items, whatever form it was sent in."""

    neutral = {name: entry for name, entry in ChatCompletionRequest.neutral.items() if name != "store"} | _NEUTRAL

    model: str | None = None
    input: Annotated[list[Item], PlainValidator(_items)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    store: bool | None = None
    stream: bool = False
    stream_options: ResponsesStreamOptions = ResponsesStreamOptions()
    max_output_tokens: Positive | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FailFast()] = []
    tool_choice: ToolChoice | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    include: Annotated[list[str], PlainValidator(_include), WithJsonSchema(_INCLUDE)] = []
    #: Bounds calls of built-in tools, of which there are none.
    max_tool_calls: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    # Harmless: they label, bill or route a request, and no answer depends on them.
    metadata: Annotated[dict[str, str], PlainValidator(_metadata), WithJsonSchema(_METADATA)] = {}
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def input_as_sent(self) -> list[dict[str, Any]]:
        """The input items as plain data: what a store keeps."""
        sent = self.as_sent().get("input")
        return sent if isinstance(sent, list) else [{"type": "message", "role": "user", "content": sent}]


def response_object(request: ResponsesRequest, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the response object says of its request. ``facts``: id, created_at, model, temperature, top_p, store."""
    return {
        "id": facts["id"],
        "object": "response",
        "created_at": facts["created_at"],
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": facts["model"],
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": facts["store"],
        "temperature": facts["temperature"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": [_echo(tool) for tool in request.tools],
        "top_logprobs": 0,
        "top_p": facts["top_p"],
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _echo(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
