"""The OpenAPI document: valid, complete, and as exact about a request as the way in is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jsonschema_rs
import pytest
from openapi_spec_validator import validate

from serve.access import Access
from serve.admission import Minted, admit_chat, admit_completion, check_model
from serve.app import App
from serve.body import Body, parse
from serve.config import Config
from serve.errors import ApiError, BadRequestError
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve.openapi import OPERATIONS, openapi_document
from serve.playground import ParseReasoningRequest, ParseToolCallsRequest
from serve.responses_admission import admit_response
from serve.responses_messages import chat_request
from serve.responses_protocol import ResponsesRequest
from tests.serve.test_app import FACTS, Client, Served, run

MODEL_FACTS = replace(FACTS, tool_parser="hermes", reasoning_parser="qwen3")
MINTED = Minted(rid=1, response_id="r", created=0, seed=0)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")


@lru_cache
def document(secured: bool = False) -> dict[str, Any]:
    return openapi_document(MODEL_FACTS, version="1.2.3", secured=secured)


# ------------------------------------------------------------------------------------------------------ the document


@pytest.mark.parametrize("secured", [False, True])
def test_the_document_is_valid(secured: bool) -> None:
    validate(document(secured))


def test_every_schema_is_one() -> None:
    for schema in document()["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_the_server_gives_its_own_document(keys: tuple[str, ...]) -> None:
    async def main() -> Client:
        served = Served(MODEL_FACTS)
        access = Access(Config(api_key=keys))
        served.app = App(served.proxy, served.prompts, MODEL_FACTS, served.state, None, access=access)
        if keys:
            assert (await served.call("/openapi.json", method="GET")).status == 401
        return await served.call("/openapi.json", method="GET", authorization="Bearer key")

    client = run(main())
    assert client.status == 200 and client.headers[b"content-type"] == b"application/json"
    answer = client.json()
    assert answer == json.loads(json.dumps(document(bool(keys)))) | {"info": answer["info"]}
    assert answer["info"]["title"] == "Tailrace" and answer["info"]["version"]


def test_every_route_is_documented_and_no_other() -> None:
    app = Served().app
    routes = {path: set(methods) for path, methods in app._routes.items()}
    routes["/v1/models/{model}"] = {"GET"}  # by its prefix
    for path in ("/v1/responses", "/v1/responses/{id}"):
        routes[path] = set(app._responses.match(path.format(id="resp_1")) or ())
    assert {path: set(methods) for path, methods in OPERATIONS.items()} == routes
    documented = document()["paths"]
    assert {
        path: {name.upper() for name in item if name != "parameters"} for path, item in documented.items()
    } == routes


@pytest.mark.parametrize("path", OPERATIONS)
def test_every_other_method_is_answered_as_documented(path: str) -> None:
    async def main() -> None:
        served = Served()
        for method in METHODS:
            if ("GET" if method == "HEAD" else method) in OPERATIONS[path]:
                continue
            client = await served.call(path.format(id="resp_1", model="m"), b"", method)
            assert client.status == 405 and client.headers[b"allow"].decode().split(", ") == list(OPERATIONS[path])

    run(main())


def test_what_needs_a_key_says_so() -> None:
    for secured in (False, True):
        for path, methods in OPERATIONS.items():
            for method, operation in methods.items():
                said = document(secured)["paths"][path][method.lower()]
                assert ("401" in said["responses"]) == (secured and not operation.public)
                assert ("403" in said["responses"]) == (not secured)  # a key makes the question of hosts needless
                assert said.get("security") == ([] if operation.public else None)
    assert document(True)["security"] == [{"bearer": []}] and "security" not in document()


@pytest.mark.parametrize("secured", [False, True])
def test_every_reference_leads_somewhere_and_every_component_is_used(secured: bool) -> None:
    components = dict(document(secured)["components"])
    components.pop("securitySchemes", None)
    named = {f"#/components/{kind}/{name}" for kind, entries in components.items() for name in entries}
    assert set(re.findall(r'"(#/components/[^"]+)"', json.dumps(document(secured)))) == named


# ------------------------------------------------------------------------------------------------------ requests

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}, "index": 0}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t", "cache_control": {}}], "name": "n"},
        {"role": "assistant", "content": "c", "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "content": "c", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "logprobs": True,
}
PART = {"type": "input_text", "text": "t"}
RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [PART], "status": "completed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "t", "annotations": []}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [PART]},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
    "stream_options": {"include_obfuscation": True},
}


def admit_chat_body(request: ChatCompletionRequest) -> None:
    admit_chat(request, prompt="", prompt_ids=[1, 2], facts=MODEL_FACTS, minted=MINTED)


def admit_completion_body(request: CompletionRequest) -> None:
    prompts = [[1] if isinstance(prompt, str) else prompt for prompt in request.prompt]
    texts = [""] * len(prompts)
    admit_completion(request, prompts=prompts, prompt_texts=texts, facts=MODEL_FACTS, minted=MINTED)


def admit_response_body(request: ResponsesRequest) -> None:
    chat = chat_request(request)
    check_model(request.model, MODEL_FACTS)
    admit_response(request, chat, prompt="", prompt_ids=[1, 2], facts=MODEL_FACTS, minted=MINTED, stored=False)


def admit_tokenize_body(request: TokenizeRequest) -> None:
    check_model(request.model, MODEL_FACTS)


def admit_detokenize_body(request: DetokenizeRequest) -> None:
    check_model(request.model, MODEL_FACTS)
    if max(request.tokens, default=0) >= MODEL_FACTS.vocab_size:  # the route itself looks at that
        raise BadRequestError("token id", param="tokens")


#: model -> (a body with a bit of everything, what admission does with it)
BODIES: dict[type[Body], tuple[dict[str, Any], Callable[[Any], None]]] = {
    ChatCompletionRequest: (CHAT, admit_chat_body),
    CompletionRequest: ({"prompt": ["a", "b"], "stream": True, "stream_options": {}}, admit_completion_body),
    ResponsesRequest: (RESPONSE, admit_response_body),
    TokenizeRequest: ({"messages": CHAT["messages"], "tools": CHAT["tools"]}, admit_tokenize_body),
    DetokenizeRequest: ({"tokens": [1, 2]}, admit_detokenize_body),
    ParseReasoningRequest: ({"text": "t"}, lambda request: None),
    ParseToolCallsRequest: ({"text": "t", "tools": CHAT["tools"]}, lambda request: None),
}

#: Refusals that no schema foresees: fields that depend on each other or on the prompt, and Unicode in a key.
UNFORESEEN = (
    "and max_tokens differ", "best_of must equal", "cannot be combined with", "continuous_usage_stats needs",
    "has no tokens", "holds nothing", "is not among the tools", "maximum context length", "min_tokens must",
    "must have token ids as keys", "needs a last message", "needs logprobs", "needs tools", "no function call before",
    "token id",
)  # fmt: skip

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 17, 500, 501, 129, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 0.5, -0.5, -2.5,
    1e30, "", "a", "m", "é😀\x00", "a" * 1025, "auto", "required", "function", "text", "low", "hermes", "qwen3",
    [], [None], [0], [-1], [299], [300], [0.5], [True], [[1]], [[]], [["a"]], [1, "a"], ["a"], [""], ["a"] * 17,
    [[1], "a"], {}, {"a": None}, {"a": 1}, {"a": "b"}, {"a" * 65: "b"}, {"a": "b" * 513}, {"5": 1}, {"5": None},
    {"05": 1}, {"5": 101}, {"5": "1"}, {"type": "text"}, {"type": "text", "a": None}, {"type": "json_object"},
    {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}, {"type": "function"},
    {"name": "f"}, {"include_usage": None}, {"include_usage": True}, {"effort": None}, {"effort": "high"},
    [{}], [{"type": "text", "text": "a"}], [{"type": "text", "text": "a", "b": None}],
    [{"type": "text", "text": "a", "b": 1}], [{"type": "text", "text": None}], [{"type": "text"}],
    [{"type": "input_text", "text": "a"}], [{"type": "refusal", "refusal": "a"}], [{"type": "image_url"}],
    [{"role": "user", "content": "a"}], [{"role": "user"}], [{"role": "user", "content": None}],
    [{"role": "assistant"}], [{"role": "assistant", "content": None, "tool_calls": None}],
    [{"role": "user", "content": "a", "tool_calls": []}], [{"role": "user", "content": "a", "tool_calls": [CALL]}],
    [{"type": "reasoning"}], [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}], [{"type": "message", "role": "tool"}],
    ["reasoning.encrypted_content"], ["message"],
)  # fmt: skip


def variants(model: type[Body]) -> Iterator[dict[str, Any]]:
    """The model's body with one thing changed: an entry left out or replaced, a field or an unknown name added."""
    body = BODIES[model][0]
    names = document()["components"]["schemas"][model.__name__]["properties"]
    for name in (*names, "unknown", "é"):
        for value in (*ODD, *accepted(names.get(name, {}))):
            yield {**body, name: value}
            if name in ("stream", "messages", "tools"):  # what others depend on
                yield {key: entry for key, entry in body.items() if key != "stream_options"} | {name: value}
    for path in places(body):
        yield changed(body, path, lambda box, key: box.pop(key))
        for value in ODD:
            yield changed(body, path, lambda box, key, value=value: box.__setitem__(key, value))
    for path in places(body):
        yield changed(body, path, lambda box, key: box.__setitem__("unknown", 1) if isinstance(box, dict) else None)
        yield changed(body, path, lambda box, key: box.__setitem__("unknown", None) if isinstance(box, dict) else None)


def accepted(schema: Mapping[str, Any]) -> list[Any]:
    """Values that a schema lists."""
    parts = [schema, *schema.get("anyOf", ())]
    return [value for part in parts for value in [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [deeper for key, entry in items for deeper in ((*path, key), *places(entry, (*path, key)))]


def changed(body: dict[str, Any], path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> dict[str, Any]:
    copy = box = json.loads(json.dumps(body))
    for key in path[:-1]:
        box = box[key]
    change(box, path[-1])
    assert isinstance(copy, dict)
    return copy


def refusal(model: type[Body], body: dict[str, Any]) -> str | None:
    """Why the server refuses a body, None when it does not."""
    try:
        BODIES[model][1](parse(model, json.dumps(body).encode()))
    except ApiError as error:
        assert 400 <= error.status < 500
        return error.message
    return None


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_a_body_is_valid_exactly_if_the_server_takes_it(model: type[Body]) -> None:
    schema = {"$ref": f"#/components/schemas/{model.__name__}", "components": document()["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    assert refusal(model, BODIES[model][0]) is None
    differ, taken, refused = [], 0, 0
    for body in variants(model):
        valid, why = validator.is_valid(body), refusal(model, body)
        taken, refused = taken + (why is None), refused + (why is not None)
        if valid != (why is None) and not (valid and any(words in str(why) for words in UNFORESEEN)):
            differ.append((valid, why, {k: v for k, v in body.items() if v != BODIES[model][0].get(k)}))
    assert differ == []
    assert taken > 20 and refused > 50
