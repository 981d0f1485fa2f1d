"""OpenAI's Python client on /v1/responses: streams, conversations that the server keeps, function calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.clients.scenario import (
    AFTERTHOUGHT,
    ARGUMENTS,
    BREAK,
    BROKEN,
    CUT,
    FINAL,
    GREETING,
    HELLO,
    PARAMETERS,
    PREAMBLE,
    QUESTION,
    REASONING,
    THANKS,
    TOO_LONG,
    WEATHER,
    WELCOME,
    argument_text,
)  # fmt: skip
from tests.process.server import Server

MODEL = "replay"
TOOLS: Any = [{"type": "function", "name": "get_weather", "strict": True, "parameters": PARAMETERS}]
RESULT: Any = {"type": "function_call_output", "output": WEATHER["Ålesund"]}
CALL = ("function_call", "get_weather", argument_text(ARGUMENTS))


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, **request: Any) -> tuple[list[Any], Any]:
    """The events that the client's own accumulator makes, and the response it has gathered from them."""
    with client.responses.stream(model=MODEL, **request) as stream:
        events = list(stream)
        return events, stream.get_final_response()


def said(response: Response) -> list[tuple[str, ...]]:
    """What the items of a response say, without ids."""
    return [_said(item) for item in response.output]


def _said(item: Any) -> tuple[str, ...]:
    if item.type == "function_call":
        return item.type, item.name, item.arguments
    return item.type, "".join(part.text for part in item.content).strip()


def test_items_come_in_order_and_end_as_they_were_streamed(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS)
    assert said(response) == [("reasoning", REASONING), ("message", PREAMBLE), CALL]
    assert response.status == "completed" and response.error is None and response.usage is not None
    events, final = streamed(client, input=QUESTION, tools=TOOLS)
    assert said(final) == said(response) and final.usage == response.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"] and types[-1] == "response.completed"
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == 3
    assert final.output[-1].parsed_arguments == ARGUMENTS
    raw: list[Any] = list(client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS, stream=True))
    assert [event.item for event in raw if event.type == "response.output_item.done"] == raw[-1].response.output


@pytest.mark.parametrize(
    ("kind", "text"),
    [("reasoning_text", REASONING), ("output_text", PREAMBLE), ("function_call_arguments", argument_text(ARGUMENTS))],
)
def test_deltas_add_up(client: openai.OpenAI, kind: str, text: str) -> None:
    events, final = streamed(client, input=QUESTION, tools=TOOLS)
    deltas = [event for event in events if event.type == f"response.{kind}.delta"]
    assert "".join(event.delta for event in deltas).strip() == text and len(deltas) >= 1
    (item,) = {event.item_id for event in deltas}
    (index,) = {event.output_index for event in deltas}
    assert final.output[index].id == item


def test_what_the_client_itself_adds_up(client: openai.OpenAI) -> None:
    """The client builds snapshots of its own from the deltas, and raises where an event does not fit them."""
    events, final = streamed(client, input=HELLO)
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert done.text == snapshots[-1] == final.output_text == GREETING


def test_a_conversation_that_the_server_keeps(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, instructions="Be brief.", tools=TOOLS)
    call: Any = first.output[-1]
    _, second = streamed(client, input=[RESULT | {"call_id": call.call_id}], previous_response_id=first.id, tools=TOOLS)
    assert said(second) == [("reasoning", AFTERTHOUGHT), ("message", FINAL)] and second.output_text == FINAL
    third = client.responses.create(model=MODEL, input=THANKS, previous_response_id=second.id)
    assert third.output_text == WELCOME and third.previous_response_id == second.id
    assert third.usage is not None and third.usage.output_tokens_details.reasoning_tokens <= 1


def test_a_conversation_that_the_client_keeps(client: openai.OpenAI) -> None:
    """What came in ``output`` goes back as it is: the client's own objects."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    _, first = streamed(client, input=items, instructions="Be brief.", tools=TOOLS, store=False)
    items += [*first.output, RESULT | {"call_id": first.output[-1].call_id}]
    second = client.responses.create(model=MODEL, input=items, instructions="Be brief.", tools=TOOLS, store=False)
    assert said(second) == [("reasoning", AFTERTHOUGHT), ("message", FINAL)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response(client: openai.OpenAI, stream: bool) -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, tools=TOOLS, metadata={"a": "b"})
    if stream:
        _, made = streamed(client, input=QUESTION, tools=TOOLS, metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert found.to_dict() | {"output": 0} == made.to_dict() | {"output": 0} and said(found) == said(made)
    assert found.metadata == {"a": "b"}
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=THANKS, previous_response_id=made.id)
    assert refused.value.code == "previous_response_not_found"


def test_an_answer_that_was_cut_off(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=TOO_LONG)
    assert response.status == "incomplete" and response.output_text == "1, 2, 3,"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    raw = list(client.responses.create(model=MODEL, input=CUT, tools=TOOLS, stream=True))
    last: Any = raw[-1]
    assert last.type == "response.incomplete"
    call = last.response.output[-1]
    assert (call.status, call.name) == ("incomplete", "get_weather") and len(call.arguments) > 5
    assert argument_text(ARGUMENTS).startswith(call.arguments)


def test_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=[RESULT | {"call_id": "call_of_nobody"}], tools=TOOLS)
    assert refused.value.param == "input.0.call_id"
    with pytest.raises(openai.BadRequestError) as tool:
        client.responses.create(model=MODEL, input=HELLO, tools=[{"type": "web_search"}])
    assert tool.value.param == "tools.0.type"


def test_an_engine_that_fails(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=BROKEN):
        client.responses.create(model=MODEL, input=BREAK)
    last: Any = list(client.responses.create(model=MODEL, input=BREAK, stream=True))[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message == BROKEN and said(last.response)[-1] == ("message", PREAMBLE)
