"""What the routes answer, as JSON schemas: the answers' part of ``components/schemas`` in the OpenAPI document.

Answers are written by the post-processors, without a model per token, so nothing else says how they look. Objects are
closed: a key that an answer has and its schema has not fails the fuzz test, as does one that it lacks. Only /health and
the events of the Responses API are open, for they differ by what a server runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, closed: bool = True
) -> Schema:
    schema = {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}
    return schema | {"additionalProperties": False} if closed else schema


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _optional(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_TEXT: Schema = {"type": "string"}
_BOOL: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NULL: Schema = {"type": "null"}

# ------------------------------------------------------------------ chat and completions

#: ``stop``, ``length`` or ``tool_calls``; a hook may end an output with a word of its own.
_FINISH: Schema = {"type": "string", "minLength": 1}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_CHAT_LOGPROBS = _or_null(
    _object({"content": _list(_object(_TOKEN | {"top_logprobs": _list(_object(_TOKEN))})), "refusal": _NULL})
)
_COMPLETION_LOGPROBS = _or_null(
    _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_NUMBER),
            "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": _list(_COUNT),
        }
    )
)
_CALL = _object({"name": _TEXT, "arguments": _TEXT})
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _optional("string")},
    {"reasoning_content": _TEXT, "reasoning": _TEXT, "tool_calls": _list(ref("AnsweredToolCall"), minItems=1)},
)
_CALL_DELTA = _object(
    {"index": _COUNT, "function": _object({"arguments": _TEXT}, {"name": _TEXT})},
    {"id": _TEXT, "type": {"const": "function"}},
)
_DELTA = _object(
    {},
    {
        "role": {"const": "assistant"},
        "content": _TEXT,
        "reasoning_content": _TEXT,
        "reasoning": _TEXT,
        "tool_calls": _list(_CALL_DELTA, minItems=1, maxItems=1),
    },
)


def _document(kind: str, choice: Schema, usage: bool) -> Schema:
    """A whole body, or one event of its stream, where ``usage`` is there if the client asked for it."""
    head = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    if usage:
        return _object(head | {"choices": _list(choice, minItems=1), "usage": ref("Usage")})
    return _object(head | {"choices": _list(choice)}, {"usage": _or_null(ref("Usage"))})


def _choice(said: Mapping[str, Schema], logprobs: Schema, *, whole: bool) -> Schema:
    head = {"index": _COUNT, **said, "logprobs": logprobs}
    if whole:
        return _object(head | {"finish_reason": _FINISH, "stop_reason": _STOP_REASON})
    return _object(head | {"finish_reason": _or_null(_FINISH)}, {"stop_reason": _STOP_REASON})


_CHAT: dict[str, Schema] = {
    "Usage": _object(
        {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
        {"completion_tokens_details": _object({"reasoning_tokens": _COUNT})},
    ),
    "AnsweredToolCall": _object({"id": _TEXT, "type": {"const": "function"}, "function": _CALL}),
    "ChatCompletion": _document("chat.completion", _choice({"message": _MESSAGE}, _CHAT_LOGPROBS, whole=True), True),
    "ChatCompletionChunk": _document(
        "chat.completion.chunk", _choice({"delta": _DELTA}, _CHAT_LOGPROBS, whole=False), False
    ),
    "Completion": _document("text_completion", _choice({"text": _TEXT}, _COMPLETION_LOGPROBS, whole=True), True),
    "CompletionChunk": _document("text_completion", _choice({"text": _TEXT}, _COMPLETION_LOGPROBS, whole=False), False),
}

# ------------------------------------------------------------------ responses

_ITEM = {"id": _TEXT, "status": {"enum": ["in_progress", "completed", "incomplete"]}}
_OUTPUT_TEXT = _object(
    {"type": {"const": "output_text"}, "text": _TEXT, "annotations": _list(_NULL, maxItems=0), "logprobs": _list({})}
)
_OUTPUT_ITEM: Schema = {
    "anyOf": [
        _object(_ITEM | {"type": {"const": "message"}, "role": {"const": "assistant"}, "content": _list(_OUTPUT_TEXT)}),
        _object(
            _ITEM
            | {
                "type": {"const": "reasoning"},
                "summary": _list(_NULL, maxItems=0),
                "content": _list(_object({"type": {"const": "reasoning_text"}, "text": _TEXT})),
            }
        ),
        _object(_ITEM | {"type": {"const": "function_call"}, "call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}),
    ]
}
_RESPONSE_USAGE = _object(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": _object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)
_FUNCTION_TOOL = _object(
    {
        "type": {"const": "function"},
        "name": _TEXT,
        "description": _optional("string"),
        "parameters": _optional("object"),
        "strict": _BOOL,
    }
)
_RESPONSES: dict[str, Schema] = {
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "background": {"const": False},
            "completed_at": _NULL,
            "error": _or_null(_object({"code": _TEXT, "message": _TEXT})),
            "incomplete_details": _or_null(_object({"reason": _TEXT})),
            "instructions": _optional("string"),
            "max_output_tokens": _optional("integer"),
            "max_tool_calls": _optional("integer"),
            "metadata": {"type": "object", "additionalProperties": _TEXT},
            "model": _TEXT,
            "output": _list(_OUTPUT_ITEM),
            "parallel_tool_calls": _BOOL,
            "previous_response_id": _optional("string"),
            "prompt_cache_key": _optional("string"),
            "reasoning": _object({"effort": _optional("string"), "summary": _NULL}),
            "safety_identifier": _optional("string"),
            "service_tier": {"const": "default"},
            "store": _BOOL,
            "temperature": _NUMBER,
            "text": _object({"format": _object({"type": {"const": "text"}}), "verbosity": {"const": "medium"}}),
            "tool_choice": {"type": ["string", "object"]},
            "tools": _list(_FUNCTION_TOOL),
            "top_logprobs": {"const": 0},
            "top_p": _NUMBER,
            "truncation": {"const": "disabled"},
            "usage": _or_null(_RESPONSE_USAGE),
            "user": _optional("string"),
        }
    ),
    "ResponseEvent": _object(
        {"type": {"type": "string", "pattern": "^response\\."}, "sequence_number": _COUNT},
        {"response": ref("Response"), "item": _OUTPUT_ITEM, "output_index": _COUNT, "content_index": {"const": 0}},
        closed=False,
    ),
    "ResponseDeleted": _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
}

# ------------------------------------------------------------------ around them

_PARSED = {
    "parser": _TEXT, "content": _TEXT, "reasoning_content": _TEXT, "tool_calls": _list(ref("AnsweredToolCall")),
}  # fmt: skip
_OTHERS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string", "minLength": 1},
                    "type": _TEXT,
                    "param": _optional("string"),
                    "code": _optional("string"),
                }
            )
        }
    ),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": {"const": "tailrace"},
            "root": _TEXT,
            "max_model_len": _COUNT,
        }
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _list(ref("Model"), minItems=1)}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": _or_null(_list(_TEXT)),
        }
    ),
    "Detokenized": _object({"prompt": _TEXT}),
    "Parsed": _object(_PARSED),
    "Health": _object(
        {"status": {"type": "string", "minLength": 1}, "workers": _COUNT, "open_requests": _COUNT},
        {"worker_restarts": _COUNT},
        closed=False,
    ),
    "Live": _object({"status": {"const": "live"}}),
    "Version": _object({"version": {"type": "string", "minLength": 1}}),
}

#: All of them by name.
ANSWERS: dict[str, Schema] = {**_CHAT, **_RESPONSES, **_OTHERS}


def json_content(name: str) -> Schema:
    """``content`` of an answer that is the named schema's."""
    return {"application/json": {"schema": ref(name)}}


def events_content(name: str, *, done: bool) -> Schema:
    """``content`` of a stream. The schema is that of one event; its ``data`` is JSON, an error object where the stream
    fails, and at last ``[DONE]`` where ``done`` says so."""
    said = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [ref(name), ref("Error")]},
    }
    data = {"if": {"const": "[DONE]"}, "else": said} if done else said
    return {"text/event-stream": {"schema": _object({"data": data}, {"event": _TEXT}, closed=False)}}
