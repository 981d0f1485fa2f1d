"""Try a format without a model: raw model text in, what the parser makes of it out.

    POST /parse/reasoning    {"text", "parser"?, "prompt_tail"?}
    POST /parse/tool_calls   {"text", "parser"?, "tools"?}

``parser`` is a name; without it the server's own. The answers are the fold of the very events that a stream would
bring.

A parser is Python: a text of nothing but brackets, each of which might begin a call, takes 4 µs a character, 1 s at the
bound. So texts are parsed in a thread, one at a time, and not in those that prompts wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field
from starlette.types import Receive, Scope, Send

from serve.admission import PROMPT_TAIL, ServerFacts
from serve.body import Body
from serve.errors import BadRequestError
from serve.events import Folded
from serve.gateway import Gateway
from serve.http import JSON, Header, json_body, send_body
from serve.openai_protocol import Tools
from serve.parsers import check_names, parse_reasoning, parse_tool_calls

MAX_TEXT = 256 << 10  #: characters


class ParseReasoningRequest(Body):
    """The body of ``POST /parse/reasoning``. prompt_tail: the end of the prompt, which may open a reasoning block."""

    text: Annotated[str, Field(max_length=MAX_TEXT)]
    parser: str | None = None
    prompt_tail: Annotated[str, Field(max_length=MAX_TEXT)] = ""


class ParseToolCallsRequest(Body):
    """The body of ``POST /parse/tool_calls``. tools: declared ones, by whose schemas XML formats type their values."""

    text: Annotated[str, Field(max_length=MAX_TEXT)]
    parser: str | None = None
    tools: Tools = []


class Playground:
    """The two routes."""

    def __init__(self, gateway: Gateway, facts: ServerFacts) -> None:
        self._gateway, self._facts = gateway, facts
        self._turn = asyncio.Semaphore(1)

    async def reasoning(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        """``POST /parse/reasoning``."""
        request = await self._gateway.parsed(ParseReasoningRequest, scope, receive)
        name = _known(request.parser or self._facts.reasoning_parser, "reasoning")
        tail = request.prompt_tail[-PROMPT_TAIL:]  # what a parser sees of a prompt when a model speaks
        return await self._answer(send, name, headers, lambda: parse_reasoning(name, request.text, prompt_tail=tail))

    async def tool_calls(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        """``POST /parse/tool_calls``."""
        request = await self._gateway.parsed(ParseToolCallsRequest, scope, receive)
        name = _known(request.parser or self._facts.tool_parser, "tool")
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools]
        return await self._answer(send, name, headers, lambda: parse_tool_calls(name, request.text, tools))

    async def _answer(self, send: Send, name: str, headers: list[Header], parse: Callable[[], Folded]) -> int:
        async with self._turn:
            body = await asyncio.to_thread(lambda: json_body({"parser": name, **folded_json(parse())}))
        await send_body(send, 200, body, [JSON, *headers])
        return 200


def _known(name: str | None, kind: str) -> str:
    if name is None:
        raise BadRequestError(f"parser is required: this server has no {kind} parser of its own.", param="parser")
    try:
        check_names(**{"reasoning": None, "tool": None, kind: name})
    except ValueError as error:
        raise BadRequestError(f"parser: {error}", param="parser", code="invalid_value") from error
    return name


def folded_json(folded: Folded) -> dict[str, Any]:
    """A fold as plain data, with the keys of a chat message."""
    return {
        "content": "".join(folded.content),
        "reasoning_content": "".join(folded.reasoning),
        "tool_calls": [call.as_json() for call in folded.tool_calls],
    }
