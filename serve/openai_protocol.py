"""Request bodies as clients of OpenAI, vLLM and SGLang send them, read through ``serve/body.py``.

The rule is that nothing is silently ignored. A field is one of four things:

* *honoured*: declared on a model below, with its type and range;
* *harmless*: declared and unused, since ignoring it cannot change an answer (``user``, ``metadata``, ...);
* *neutral*: named in ``neutral`` with the values that ask for nothing (``use_beam_search: false``); any other value is
  a 400 that gives the reason;
* *unknown*: a 400 that names it.

``null`` means "as if absent" for every field, known or not: generated clients send their whole data model. Types are
strict: ``true`` is not 1, ``"5"`` is not 5, 5.0 is not an integer; NaN, Infinity and lone surrogates are not JSON.

Field names, types and ranges follow OpenAI's API reference; the further sampling fields follow vLLM's and SGLang's.
Models are inbound only: responses are written by the post-processors, without a model per token.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from postproc_workers.spec import (
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STREAM_INTERVAL,
    MAX_TOKEN_ID,
    MAX_TOP_LOGPROBS,
)
from postproc_workers.stop_strings import MAX_STOPS
from serve.body import Body, quote, wrong

MAX_PROMPTS = 2048  #: prompts of one completion request
#: Messages and tools of a request, and items of a response's input. Each takes 5 to 20 µs of the event loop's time, or
#: of the interpreter's lock: a body full of the shortest ones would stop everybody for ten seconds.
MAX_MESSAGES, MAX_TOOLS = 1 << 14, 1 << 11
MAX_BIASES = 1024  #: entries of ``logit_bias``
MAX_COUNT = MAX_TOKEN_ID  #: bound of every count, so that sums of them stay small integers everywhere


# ------------------------------------------------------------------ fields that take more than one type
#
# Each is checked by a function and described by a JSON schema, for the OpenAPI document; the two stand side by side
# because nothing but a test keeps them together.

#: An object's unknown names: null is as if absent for them too.
ONLY_NULL = {"type": "null"}
_TOKEN_ID = {"type": "integer", "format": "token-id", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID}

# cache_control marks a prefix worth caching for some hosted services, and gateways leave it in.
_PART = ("type", "text", "cache_control")
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}, "cache_control": {}},
    "additionalProperties": ONLY_NULL,
}
_TEXT_OR_PARTS = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}


def _text_or_parts(value: Any) -> str:
    """Message content: a string, or a list of text parts, which are joined by newlines as vLLM does."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("must be a string or a list of one or more text parts")
    return "\n".join(_part(part, index) for index, part in enumerate(value))


def _part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong('must be an object with a "type"', str(index))
    if kind != "text":
        raise wrong(f"is a part of type {quote(kind)}, which is not supported: this server takes text only", str(index))
    if not isinstance(part.get("text"), str):
        raise wrong("must be a string", f"{index}.text")
    for name in (name for name, entry in part.items() if entry is not None and name not in _PART):
        raise wrong("is not a known field", f"{index}.{name}")
    text: str = part["text"]
    return text


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS = {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]}


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong(f"must be a string or a list of up to {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"must not hold more than {MAX_STOPS} strings, got {len(stops)}")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise wrong(f"must hold strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


_SOME_IDS = {**_TOKEN_IDS, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _SOME_IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _SOME_IDS},
    ]
}


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """One string, several, one list of token ids, or several; always returned as several."""
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()  # a long list of ids is checked at C speed
    if kinds == {int}:
        return [_ids(value)]
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in value)):
        if len(value) > MAX_PROMPTS:
            raise wrong(f"must not hold more than {MAX_PROMPTS} prompts, got {len(value)}")
        return value if kinds == {str} else [_ids(ids) for ids in value]
    raise wrong(
        "must be a string, a list of strings, a list of token ids or a list of such lists; no list may be empty"
    )


def _ids(ids: list[int]) -> list[int]:
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise wrong(f"must hold token ids from 0 to {MAX_TOKEN_ID}")
    return ids


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise wrong("must be a list of token ids")
    return _ids(value) if value else value


_BIASES = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise wrong(f"must be an object of up to {MAX_BIASES} token ids and their biases")
    return {_bias_id(key): _bias(key, bias) for key, bias in value.items()}


def _bias_id(key: str) -> int:
    # "٣", "+3" and "03" are integers to int(): only the spelling that JSON itself would use is one token's name.
    digits = key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key
    if not digits or int(key) > MAX_TOKEN_ID:
        raise wrong(f"must have token ids as keys, got {quote(key)}")
    return int(key)


def _bias(key: str, bias: Any) -> float:
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        raise wrong("must be a number from -100 to 100", key)
    return float(bias)


_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": _NAMED},
        },
    ]
}


def _tool_choice(value: Any) -> str | dict[str, Any]:
    if value in ("none", "auto", "required"):
        chosen: str = value
        return chosen
    name = (
        value["function"].get("name") if isinstance(value, dict) and isinstance(value.get("function"), dict) else None
    )
    if not isinstance(name, str) or value.get("type") != "function":
        raise wrong('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
    return {"type": "function", "function": {"name": name}}


_ARGUMENTS = {"type": ["string", "object"]}


def _arguments(value: Any) -> str | dict[str, Any]:
    if not isinstance(value, str | dict):
        raise wrong("must be a string that holds a JSON object")
    return value


Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, json_schema_extra={"format": "token-id"})]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Content = Annotated[str, PlainValidator(_text_or_parts), WithJsonSchema(_TEXT_OR_PARTS)]
ToolChoice = Annotated[str | dict[str, Any], PlainValidator(_tool_choice), WithJsonSchema(_TOOL_CHOICE)]


# ------------------------------------------------------------------ models


class FunctionCall(Body):
    """A call made in an earlier turn. OpenAI's ``arguments`` is JSON text; an object is taken too.

    parsed_arguments: OpenAI's Python client adds it to calls that it has parsed, and sends it back with the message.
    """

    name: str
    arguments: Annotated[str | dict[str, Any], PlainValidator(_arguments), WithJsonSchema(_ARGUMENTS)] = "{}"
    parsed_arguments: Any = None


class ToolCall(Body):
    """One entry of an assistant message's ``tool_calls``; ``index`` is left over from merged stream deltas."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Count | None = None


class Message(Body):
    """One turn. Text only; what a client got from a chat response may be sent back as it came, or as OpenAI's Python
    client has parsed it (``parsed``)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] = []
    parsed: Any = None

    @model_validator(mode="after")
    def _fits_role(self) -> Message:
        if self.role != "assistant":
            if self.content is None:
                raise wrong("is required", "content")
            if self.tool_calls:
                raise wrong("is only allowed in assistant messages", "tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: a call's arguments are an object where their text is one."""
        plain = self.model_dump(exclude_unset=True, exclude={"annotations", "parsed"})
        plain["content"] = self.content if self.content is not None else self.refusal or ""
        for call in plain.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
            call["function"]["arguments"] = _as_object(call["function"].get("arguments", "{}"))
        return plain


def _as_object(arguments: str | dict[str, Any]) -> Any:
    """A call that was cut off stays the text it is: refusing it would end the whole conversation."""
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


class Function(Body):
    """A tool's declaration; ``parameters`` is a JSON schema, handed to the chat template as it is."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()]


class Scaffolding(Body):
    """One answer that is chosen from n generations. extract: what of a text is its vote, by default all of it."""

    method: Literal["majority_vote", "best_of_n"]
    n: Annotated[int, Field(ge=2, le=MAX_COUNT)]
    extract: Literal["text", "last_line", "last_number"] | None = None

    @model_validator(mode="after")
    def _votes_on_something(self) -> Scaffolding:
        if self.extract is not None and self.method != "majority_vote":
            raise wrong("is only allowed when method is majority_vote", "extract")
        return self


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # harmless: padding against eavesdroppers, which no client reads


_CONSTRAINED = "output cannot be constrained by this server"
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), f'only {{"type": "text"}} is supported: {_CONSTRAINED}'),
    "structured_outputs": ((), _CONSTRAINED),
    "guided_json": ((), _CONSTRAINED),
    "guided_regex": ((), _CONSTRAINED),
    "guided_choice": ((), _CONSTRAINED),
    "guided_grammar": ((), _CONSTRAINED),
    "json_schema": ((), _CONSTRAINED),
    "regex": ((), _CONSTRAINED),
    "ebnf": ((), _CONSTRAINED),
    "allowed_token_ids": ((), _CONSTRAINED),
    "bad_words": (([],), _CONSTRAINED),
    "logits_processors": (([],), "code from a client is not run"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1, 1.0), "beam search is not supported"),
    "early_stopping": ((False,), "beam search is not supported"),
    "prompt_logprobs": ((), "log-probabilities of the prompt are not supported"),
    "truncate_prompt_tokens": ((), "prompts are never truncated"),
    "return_token_ids": ((False,), "token ids are not returned"),
    "return_tokens_as_token_ids": ((False,), "token ids are not returned"),
    "store": ((False,), "responses are not stored"),
    "priority": ((0,), "requests have no priority"),
    "cache_salt": ((), "the prefix cache is shared and cannot be salted"),
}


class _Generation(Body):
    """What chat and completion requests share: sampling, stopping and the form of the answer."""

    neutral = _NEUTRAL

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: Count = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_biases), WithJsonSchema(_BIASES)] = {}
    stop: Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: Positive = 1
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    # These two are honoured without a stream too: a document is the same however its tokens come.
    stream_interval: Annotated[int, Field(ge=1, le=MAX_STREAM_INTERVAL)] | None = None
    split_steps: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # Harmless: they label, bill or route a request, and no answer depends on them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def outputs(self) -> int:
        """Generations per prompt."""
        return self.n

    @model_validator(mode="after")
    def _one_size_of_event(self) -> _Generation:
        if self.split_steps and (self.stream_interval or 1) > 1:
            raise wrong("cannot be combined with split_steps, unless it is 1", "stream_interval")
        return self


class _Templated(Body):
    """What turns messages into a prompt; shared by chat and ``/tokenize``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    tools: Tools = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_way_to_end(self) -> _Templated:
        """Continuing the last message excludes opening a new one; if nobody asked for that, it is turned off."""
        if not self.continue_final_message:
            return self
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise wrong("cannot be combined with add_generation_prompt", "continue_final_message")
        if self.messages and self.messages[-1].role != "assistant":
            raise wrong("needs a last message of role assistant", "continue_final_message")
        self.add_generation_prompt = False
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template expects them."""
        return [message.for_template() for message in self.messages]

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as a chat template expects them: None, not [], when there are none."""
        return self.plain_tools() or None

    def plain_tools(self) -> list[dict[str, Any]]:
        """The tools as plain data, as sent."""
        return [tool.model_dump(exclude_unset=True) | {"type": tool.type} for tool in self.tools]


class ChatCompletionRequest(_Generation, _Templated):
    """The body of ``POST /v1/chat/completions``."""

    neutral = _NEUTRAL | {
        "chat_template": ((), "a template from a client is not trusted; the model's own is used"),
        "documents": (([],), "documents are not supported; put them into the messages"),
        "functions": (([],), "it is deprecated; use tools"),
        "function_call": (("none",), "it is deprecated; use tool_choice"),
        "modalities": ((["text"],), "this server writes text only"),
        "audio": ((), "this server writes text only"),
        "mm_processor_kwargs": (({},), "this server takes text only"),
        "prediction": ((), "predicted outputs are not supported"),
        "web_search_options": ((), "web search is not supported"),
        "verbosity": (("medium",), "verbosity is not supported"),
        "echo": ((False,), "chat does not echo its prompt"),
        "add_special_tokens": ((False,), "the chat template writes the special tokens"),
    }

    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    stop_in_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    scaffolding: Scaffolding | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("needs logprobs to be true", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise wrong(
                "and max_tokens differ; max_tokens is the older name of the same field", "max_completion_tokens"
            )
        self._check_tool_choice()
        if self.scaffolding is not None:
            self._check_scaffolding()
        return self

    def _check_scaffolding(self) -> None:
        if self.n != 1:
            raise wrong("cannot be combined with scaffolding, unless it is 1: scaffolding has its own", "n")
        for name in ("stream_interval", "split_steps"):
            if getattr(self, name):
                raise wrong("cannot be combined with scaffolding, whose answer comes in one piece", name)

    def _check_tool_choice(self) -> None:
        named = self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None
        if (named is not None or self.tool_choice == "required") and not self.tools:
            raise wrong("needs tools", "tool_choice")
        if named is not None and all(tool.function.name != named for tool in self.tools):
            raise wrong(f"names {quote(named)}, which is not among the tools", "tool_choice")

    @property
    def token_limit(self) -> int | None:
        """``max_completion_tokens``, or ``max_tokens``, its older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def outputs(self) -> int:
        """Generations: choices, or those that the only one is chosen from."""
        return self.n if self.scaffolding is None else self.scaffolding.n

    @property
    def effective_tool_choice(self) -> str | dict[str, Any]:
        """What an absent ``tool_choice`` stands for: ``auto`` with tools, ``none`` without."""
        return self.tool_choice or "auto" if self.tools else "none"

    def template_kwargs(self) -> dict[str, Any]:
        """Further variables for the chat template; ``reasoning_effort`` is one, as models that know it expect."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs


class CompletionRequest(_Generation):
    """The body of ``POST /v1/completions``. ``prompt`` is held as a list of prompts, whatever form it was sent in."""

    neutral = _NEUTRAL | {
        "suffix": (("",), "text cannot be inserted before a suffix"),
        "prompt_embeds": ((), "prompts are text or token ids"),
        "add_special_tokens": ((True,), "prompts given as text get the tokenizer's special tokens"),
    }

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Positive | None = None

    @model_validator(mode="after")
    def _no_selection(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise wrong(f"must equal n ({self.n}): drawing more choices than are returned is not supported", "best_of")
        return self

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate per choice at most, as asked for."""
        return self.max_tokens


class TokenizeRequest(_Templated):
    """The body of ``POST /tokenize``: a prompt, or messages as for chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES), FailFast()] = []
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise wrong("or messages is required, and not both", "prompt")
        if not self.messages and self.tools:
            raise wrong("needs messages", "tools")
        return self

    @property
    def special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens: by default to a prompt, not to what a template has written."""
        return not self.messages if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_TOKEN_IDS)]
