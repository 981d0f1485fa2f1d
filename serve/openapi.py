"""The OpenAPI 3.1 document of this server, for ``GET /openapi.json``. What a server has started with decides it.

Request schemas are those of the pydantic models, made to say what the way in really does (``serve/body.py``): null is
as if absent for every field, unknown ones too; fields of other servers that are only accepted where they ask for
nothing are listed with those values; token ids, choices and model names have this server's bounds. What no schema says
is how fields depend on each other and on the model (a prompt that is too long, ``top_logprobs`` without ``logprobs``):
that is a 400 as well, and named in its message. JSON Schema calls 5.0 an integer, and the server does not.

The routes stand here a second time; ``tests/serve/test_openapi.py`` compares them with those that ``App`` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from serve.admission import ServerFacts
from serve.body import Body
from serve.openai_protocol import (
    MAX_MESSAGES,
    ONLY_NULL,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from serve.openapi_answers import ANSWERS, Schema, events_content, json_content, ref
from serve.playground import ParseReasoningRequest, ParseToolCallsRequest
from serve.responses_protocol import ChatFields, Item, ResponsesRequest

_USER = {"role": "user", "content": "Hello"}
_TEXT_PLAIN = {"text/plain": {"schema": {"type": "string"}}}
#: Documents without content: the answer is what the route is asked for.
_DOCUMENT = {"application/json": {"schema": {"type": "object", "required": ["openapi", "paths"]}}}


_READS_BODY = (400, 413, 415)
_GENERATES = (404, 429, 500, 503, *_READS_BODY)


class Operation(NamedTuple):
    """One method of one route. errors: statuses it answers with an error object, besides those that all answer."""

    id: str
    summary: str
    content: Mapping[str, Any]
    body: type[Body] | None = None
    example: Mapping[str, Any] | None = None
    errors: tuple[int, ...] = ()
    parameter: str | None = None
    public: bool = False

    @property
    def generates(self) -> bool:
        """Whether there is a generation that may be timed."""
        return self.errors == _GENERATES


#: path -> method -> what it is.
OPERATIONS: dict[str, dict[str, Operation]] = {
    "/v1/chat/completions": {
        "POST": Operation(
            "createChatCompletion",
            "Answer a conversation.",
            json_content("ChatCompletion") | events_content("ChatCompletionChunk", done=True),
            ChatCompletionRequest,
            {"messages": [_USER], "max_tokens": 16},
            _GENERATES,
        )
    },
    "/v1/completions": {
        "POST": Operation(
            "createCompletion",
            "Continue a text.",
            json_content("Completion") | events_content("CompletionChunk", done=True),
            CompletionRequest,
            {"prompt": "Once upon a time", "max_tokens": 16},
            _GENERATES,
        )
    },
    "/v1/responses": {
        "POST": Operation(
            "createResponse",
            "Answer a conversation, in the form of the Responses API.",
            json_content("Response") | events_content("ResponseEvent", done=False),
            ResponsesRequest,
            {"input": "Hello", "max_output_tokens": 16},
            _GENERATES,
        )
    },
    "/v1/responses/{id}": {
        "GET": Operation(
            "getResponse", "A stored response.", json_content("Response"), errors=(400, 404), parameter="id"
        ),
        "DELETE": Operation(
            "deleteResponse",
            "Forget a stored response.",
            json_content("ResponseDeleted"),
            errors=(404,),
            parameter="id",
        ),
    },
    "/v1/models": {"GET": Operation("listModels", "The served model.", json_content("ModelList"))},
    "/v1/models/{model}": {
        "GET": Operation("getModel", "One model.", json_content("Model"), errors=(404,), parameter="model")
    },
    "/tokenize": {
        "POST": Operation(
            "tokenize",
            "The token ids of a prompt or of messages.",
            json_content("Tokens"),
            TokenizeRequest,
            {"prompt": "Hello"},
            (404, *_READS_BODY),
        )
    },
    "/detokenize": {
        "POST": Operation(
            "detokenize",
            "The text of token ids.",
            json_content("Detokenized"),
            DetokenizeRequest,
            {"tokens": [0, 1]},
            (404, *_READS_BODY),
        )
    },
    "/parse/reasoning": {
        "POST": Operation(
            "parseReasoning",
            "What a reasoning parser makes of a text.",
            json_content("Parsed"),
            ParseReasoningRequest,
            {"text": "<think>Hm.</think>Hello", "parser": "qwen3"},
            _READS_BODY,
        )
    },
    "/parse/tool_calls": {
        "POST": Operation(
            "parseToolCalls",
            "What a tool parser makes of a text.",
            json_content("Parsed"),
            ParseToolCallsRequest,
            {"text": "Hello", "parser": "hermes"},
            _READS_BODY,
        )
    },
    "/health": {"GET": Operation("health", "Whether requests are admitted.", json_content("Health"), public=True)},
    "/live": {"GET": Operation("live", "Whether the process runs.", json_content("Live"), public=True)},
    "/version": {"GET": Operation("version", "The version of the server.", json_content("Version"))},
    "/metrics": {"GET": Operation("metrics", "Counters, in Prometheus' text format.", _TEXT_PLAIN)},
    "/openapi.json": {"GET": Operation("openapi", "This document.", _DOCUMENT)},
}

#: status -> (name, what it means, its own headers)
_ERRORS: dict[int, tuple[str, str, tuple[str, ...]]] = {
    400: ("BadRequest", "The request is wrong; `param` names the field.", ()),
    401: ("Unauthorized", "No API key, or none that is known.", ("WWW-Authenticate",)),
    403: ("Forbidden", "The server listens on its machine alone, and was called by a name that is not its own.", ()),
    404: ("NotFound", "There is no such model or object.", ()),
    405: ("MethodNotAllowed", "The path takes other methods. GET routes answer HEAD too.", ("Allow",)),
    413: ("PayloadTooLarge", "The body is larger than the server reads.", ()),
    415: ("UnsupportedMediaType", "The body is not plain JSON.", ()),
    429: ("TooManyRequests", "This client has to slow down.", ("Retry-After",)),
    500: ("EngineError", "The engine or a worker failed before the first byte of the answer.", ()),
    503: ("Unavailable", "Nobody is admitted: too much work, or the server starts or ends.", ("Retry-After",)),
}

_HEADERS = {
    "X-Request-Id": {
        "description": "The request's own X-Request-Id, else a new one. A label, not a key.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Server-Timing": {
        "description": "Where the time of the request went, if X-Timings asks and the answer is no stream.",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"description": "Bearer.", "required": True, "schema": {"const": "Bearer"}},
    "Allow": {"description": "Methods that the path takes.", "required": True, "schema": {"type": "string"}},
}


_DESCRIPTION = (
    "Refusals are OpenAI's error object. Any request may also be answered 400, 408 or 431 with it: one that is not"
    " HTTP, that does not come to its end, or whose headers are too long."
)


def openapi_document(facts: ServerFacts, *, version: str, secured: bool = False) -> dict[str, Any]:
    """The document. version: the server's. secured: whether it asks for API keys."""
    unused = {403} if secured else {401}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tailrace", "version": version, "description": _DESCRIPTION},
        "paths": {path: dict(_path(path, methods, secured)) for path, methods in OPERATIONS.items()},
        "components": {
            "schemas": ANSWERS | request_schemas(facts),
            "responses": {
                name: _error(text, own) for status, (name, text, own) in _ERRORS.items() if status not in unused
            },
            "headers": {name: said for name, said in _HEADERS.items() if secured or name != "WWW-Authenticate"},
            "parameters": {"RequestId": _REQUEST_ID, "Timings": _TIMINGS},
        },
    }
    if secured:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


# ------------------------------------------------------------------ paths

_REQUEST_ID = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Comes back with the response. One of more than 256 characters is replaced.",
    "schema": {"type": "string"},
}
_TIMINGS = {
    "name": "X-Timings",
    "in": "header",
    "description": "1: tell where this request's time went, in a comment that ends the stream, or in Server-Timing.",
    "schema": {"enum": ["0", "1"]},
}


def _path(path: str, methods: Mapping[str, Operation], secured: bool) -> Iterator[tuple[str, Any]]:
    yield "parameters", [{"$ref": "#/components/parameters/RequestId"}]
    for method, operation in methods.items():
        yield method.lower(), _operation(operation, secured)


def _operation(operation: Operation, secured: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"operationId": operation.id, "summary": operation.summary}
    if operation.parameter is not None:
        said["parameters"] = [
            {"name": operation.parameter, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if operation.generates:
        said["parameters"] = [{"$ref": "#/components/parameters/Timings"}]
    if operation.body is not None:
        media = {"schema": ref(operation.body.__name__), "example": operation.example}
        said["requestBody"] = {"required": True, "content": {"application/json": media}}
    if operation.public:
        said["security"] = []
    return said | {"responses": _responses(operation, secured)}


def _responses(operation: Operation, secured: bool) -> dict[str, Any]:
    own = ("Server-Timing",) if operation.generates else ()
    answer = {"headers": _header_refs(*own), "content": operation.content}
    responses = {"200": {"description": operation.summary, **answer}}
    if operation.id == "health":
        responses["503"] = {"description": "Why nobody is admitted.", **answer}
    refusals = {403} if not secured else {401} if not operation.public else set()
    errors = {405, *operation.errors, *refusals}
    return responses | {
        str(status): {"$ref": f"#/components/responses/{_ERRORS[status][0]}"} for status in sorted(errors)
    }


def _error(description: str, own: tuple[str, ...]) -> dict[str, Any]:
    return {"description": description, "headers": _header_refs(*own), "content": json_content("Error")}


def _header_refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *names)}


# ------------------------------------------------------------------ requests


class _Untitled(GenerateJsonSchema):
    """A title that repeats the field's name says nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def request_schemas(facts: ServerFacts) -> dict[str, Schema]:
    """Every model of a request body by name, as the server reads it."""
    bodies = {operation.body for methods in OPERATIONS.values() for operation in methods.values() if operation.body}
    models = sorted(bodies | set(get_args(Item)), key=lambda model: model.__name__)
    _, made = models_json_schema(
        [(model, "validation") for model in models], ref_template=ref("{model}")["$ref"], schema_generator=_Untitled
    )
    schemas: dict[str, Schema] = made["$defs"]
    _describe_responses(schemas)
    for model in models:
        _describe_neutral(schemas[model.__name__], model)
    for name in schemas:
        schemas[name] = _as_read(schemas[name], facts) | _RULES.get(name, {})
    return schemas


_STREAMS_ONLY: Schema = {
    "if": {"properties": {"stream_options": {"type": "object", "minProperties": 1}}, "required": ["stream_options"]},
    "then": {"properties": {"stream": {"const": True}}, "required": ["stream"]},
}
#: The rules between fields that are simple enough for a schema.
_RULES: dict[str, Schema] = {
    "ChatCompletionRequest": _STREAMS_ONLY,
    "CompletionRequest": _STREAMS_ONLY,
    "Message": {
        "if": {"properties": {"role": {"const": "assistant"}}},
        "else": {
            "properties": {"content": {"type": ["string", "array"]}, "tool_calls": {"maxItems": 0}},
            "required": ["content"],
        },
    },
    "TokenizeRequest": {
        "if": {"properties": {"messages": {"type": "array", "minItems": 1}}, "required": ["messages"]},
        "then": {"properties": {"prompt": {"type": "null"}}},
        "else": {"properties": {"prompt": {"type": "string"}, "tools": {"maxItems": 0}}, "required": ["prompt"]},
    },
}


def _describe_responses(schemas: dict[str, Schema]) -> None:
    """Two things that the model of a response's request leaves to others: its items, and what it shares with chat."""
    properties = schemas[ResponsesRequest.__name__]["properties"]
    kinds = {"anyOf": [ref(item.__name__) for item in get_args(Item)]}
    items = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": kinds}
    properties["input"] = {"anyOf": [{"type": "string"}, items]}
    chat = schemas[ChatCompletionRequest.__name__]["properties"]
    properties.update({name: chat[name] for name in ChatFields.model_fields})


def _describe_neutral(schema: Schema, model: type[Body]) -> None:
    for name, (accepted, reason) in model.neutral.items():
        if name not in model.model_fields:
            schema["properties"][name] = {"enum": [*accepted, None], "description": f"Not supported: {reason}."}


def _as_read(schema: Schema, facts: ServerFacts) -> Schema:
    """A model's schema with what ``Body`` adds to it, and with this server's bounds."""
    required = schema.get("required", [])
    properties = {
        name: _bounded(name, each if name in required else _nullable(each), facts)
        for name, each in schema["properties"].items()
    }
    return schema | {"properties": properties, "additionalProperties": ONLY_NULL}


def _nullable(schema: Schema) -> Schema:
    """The schema or null, with its default outside."""
    said = {name: value for name, value in schema.items() if name in ("default", "description")}
    rest = {name: value for name, value in schema.items() if name not in said}
    if not rest or None in rest.get("enum", ()) or {"type": "null"} in rest.get("anyOf", ()):
        return schema
    return {"anyOf": [*rest["anyOf"], ONLY_NULL] if rest.keys() == {"anyOf"} else [rest, ONLY_NULL], **said}


def _most(name: str, facts: ServerFacts) -> int | None:
    """The highest value of a number that this server bounds. For tokens it is what the context has room for at most."""
    tokens = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
    return facts.max_n if name == "n" else facts.max_model_len if name in tokens else None


def _bounded(name: str, schema: Schema, facts: ServerFacts) -> Schema:
    if name == "model":
        return {"enum": [facts.model, "", None]}
    if "enum" not in schema and (most := _most(name, facts)) is not None:
        schema = _with_maximum(schema, most)
    bounded: Schema = _with_token_ids(schema, facts.vocab_size - 1)
    return bounded


def _with_maximum(schema: Schema, most: int) -> Schema:
    if "anyOf" not in schema:
        return {**schema, "maximum": most}
    kinds = [{**kind, "maximum": most} if kind.get("type") == "integer" else kind for kind in schema["anyOf"]]
    return {**schema, "anyOf": kinds}


def _with_token_ids(schema: Any, last: int) -> Any:
    if isinstance(schema, list):
        return [_with_token_ids(each, last) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bound = {"maximum": last} if schema.get("format") == "token-id" else {}
    return {name: _with_token_ids(each, last) for name, each in schema.items()} | bound
