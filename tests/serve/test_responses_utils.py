"""The Responses API's stream and unary body: the order of events, and the last one is what the others add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from executor.engines.base import StepRow
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from serve.admission import Minted, ServerFacts
from serve.body import parse
from serve.events import ContentDelta, Event, Folded, ReasoningDelta, ToolCallDelta
from serve.responses_admission import response_spec
from serve.responses_messages import chat_request
from serve.responses_protocol import ResponsesRequest
from serve.responses_utils import ResponsesStreamingProcessor
from tests.helpers import FACTS
from tests.serve.harmony import HARMONY, encode, every_cut, play, play_steps, rows

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "search", "parameters": SCHEMA}]
HERMES = replace(FACTS, tool_parser="hermes", reasoning_parser="qwen3")
TEXT = Vocabulary.text()

Happening = dict[str, Any]


def spec(facts: ServerFacts = FACTS, *, stream: bool = True, prompt: str = "", **body: Any) -> StreamSpec:
    """The spec of a response."""
    request = parse(ResponsesRequest, json.dumps({"model": "m", "input": "Hi"} | body).encode())
    minted = Minted(rid=0, response_id="resp_1", created=1_700_000_000, seed=0)
    return response_spec(
        request,
        chat_request(request),
        prompt=prompt,
        prompt_tokens=3,
        facts=facts,
        minted=minted,
        streaming=stream,
        stored=True,
    )


def happenings(body: bytes) -> list[Happening]:
    """The events of a stream, read strictly: each names itself twice, and they are counted from 0."""
    text = body.decode()
    assert text.endswith("\n\n") and "[DONE]" not in text
    found = []
    for number, block in enumerate(text[:-2].split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number, block
        found.append(event)
    return found


def text_body(pieces: Sequence[str], finish: str = "stop", facts: ServerFacts = FACTS, **body: Any) -> bytes:
    """The body for an output that comes in these pieces of text."""
    ids = [[ord(char) for char in piece] for piece in pieces]
    steps = [*(StepRow(0, 0, each) for each in ids[:-1]), StepRow(0, 0, ids[-1], finish)]
    return play(spec(facts, **body), steps, words=TEXT)


def text_events(
    pieces: Sequence[str], finish: str = "stop", facts: ServerFacts = FACTS, **body: Any
) -> list[Happening]:
    return happenings(text_body(pieces, finish, facts, **body))


def kinds(events: Iterable[Happening]) -> list[str]:
    """The types, without their prefix, neighbours of one type once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


def check_whole(events: Sequence[Happening]) -> dict[str, Any]:
    """What holds for every stream; returns the final response object."""
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert response["output"] == done, "the snapshot is what the items were when they were done"
    for index, item in enumerate(done):
        of_item = [event for event in events if event.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added" and of_item[0]["item"]["id"] == item["id"]
        assert of_item[-1]["type"] == "response.output_item.done"
        text = "".join(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert all(event["delta"] for event in of_item if event["type"].endswith(".delta"))
        assert {event["item_id"] for event in of_item[1:-1]} == {item["id"]}
    return response


def check_with_openai(events: Sequence[Happening]) -> None:
    """OpenAI's own models accept each event, and its client accumulates them to the same output."""
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        parsed = adapter.validate_python(event)
        assert parsed.type == event["type"]
        state.handle_event(parsed)
    Response.model_validate(events[-1]["response"])


# ---------------------------------------------------------------------------------------------------- the sequence

MESSAGE = [
    *("output_item.added", "content_part.added", "output_text.delta"),
    *("output_text.done", "content_part.done", "output_item.done"),
]
REASONING = [each.replace("output_text", "reasoning_text") for each in MESSAGE]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
BEGIN = ["created", "in_progress"]


def test_a_text_goes_through_the_documented_events() -> None:
    events = text_events(["Na", "ïve ", "🙂."])
    assert kinds(events) == [*BEGIN, *MESSAGE, "completed"]
    check_with_openai(events)
    response = check_whole(events)
    (item,) = response["output"]
    assert item == {
        "id": "msg_1_0",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Naïve 🙂.", "annotations": [], "logprobs": []}],
    }
    assert response["incomplete_details"] is None and response["error"] is None
    deltas = [event for event in events if event["type"].endswith("delta")]
    assert [event["delta"] for event in deltas] == ["Na", "ïve ", "🙂."]
    assert all(event["logprobs"] == [] and event["content_index"] == 0 for event in deltas)


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"q": "a"}}\n</tool_call>'
    pieces = ["<think>\nHm, ", "so.\n</think>\n\n", "Looking.\n", *call, "\n", call]
    events = text_events(pieces, facts=HERMES, tools=TOOLS)
    assert kinds(events) == [*BEGIN, *REASONING, *MESSAGE, *CALL, *CALL, "completed"]
    check_with_openai(events)
    output = check_whole(events)["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm, so."}] and output[0]["summary"] == []
    assert [item["id"] for item in output] == ["rs_1_0", "msg_1_1", "fc_1_2", "fc_1_3"]
    assert len({item["call_id"] for item in output[2:]}) == 2
    assert all((item["name"], json.loads(item["arguments"])) == ("search", {"q": "a"}) for item in output[2:])


def test_arguments_stream_as_they_are_generated() -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"q": "abcdef"}}\n</tool_call>'
    events = text_events(call, facts=HERMES, tools=TOOLS)
    deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
    assert len(deltas) > 5 and "".join(deltas) == '{"q": "abcdef"}'


def test_a_harmony_model_gives_the_same_items() -> None:
    ids = encode("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>")
    ids += encode('<|start|>assistant<|channel|>commentary to=functions.search json<|message|>{"q": "é"}<|call|>')
    wanted = ["Hm.", "So.", '{"q": "é"}']
    made = spec(HARMONY, tools=TOOLS, prompt="<|start|>assistant")
    for cuts in every_cut(len(ids)):
        response = check_whole(happenings(play(made, rows(ids, cuts, "stop"))))
        output = response["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in output] == wanted
        assert response["usage"]["output_tokens"] == len(ids)
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len("Hm.")


def test_a_response_that_was_cut_off_is_incomplete_and_so_is_its_last_item() -> None:
    events = text_events(["<think>Hm</think>", "one, tw"], "length", HERMES, tools=TOOLS)
    response = check_whole(events)
    check_with_openai(events)
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    call = text_events(['<tool_call>{"name": "search", "arguments": {"q": "a'], "length", HERMES, tools=TOOLS)
    (item,) = check_whole(call)["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"q": "a')


@pytest.mark.parametrize("reason", ["abort", "content_filter"])
def test_another_end_is_named(reason: str) -> None:
    processor = ResponsesStreamingProcessor({"id": "resp_1"})
    response = happenings(processor.start() + processor.end(reason, {}))[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})


@pytest.mark.parametrize("text", ["", "<think>Only thoughts.</think>"])
def test_a_complete_response_without_an_answer_has_an_empty_message(text: str) -> None:
    events = text_events([text], facts=HERMES)
    check_with_openai(events)
    last = check_whole(events)["output"][-1]
    assert (last["type"], last["content"][0]["text"]) == ("message", "")


def test_usage_and_the_clients_own_settings_are_in_the_response() -> None:
    body = {
        "instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}, "temperature": 0.5, "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "search"}, "parallel_tool_calls": False, "user": "u",
        "reasoning": {"effort": "low"}, "previous_response_id": "resp_0",
    }  # fmt: skip
    response = check_whole(text_events(["Hi."], facts=HERMES, **body))
    echoed = {
        "instructions",
        "max_output_tokens",
        "metadata",
        "temperature",
        "tool_choice",
        "previous_response_id",
        "user",
    }
    assert {name: response[name] for name in echoed} == {name: body[name] for name in echoed}
    assert response["parallel_tool_calls"] is False and response["reasoning"]["effort"] == "low"
    assert response["tools"][0]["name"] == "search" and response["top_p"] == 1.0
    assert response["created_at"] == 1_700_000_000
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }


# ---------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("facts", [FACTS, HERMES])
def test_the_final_payload_comes_once_the_record_is_finished_and_not_before(facts: ServerFacts) -> None:
    steps = [StepRow(0, 0, [ord("a")]), StepRow(0, 0, [ord("b")]), StepRow(0, 0, [ord("c")], "stop")]
    parts = play_steps(spec(facts), steps, words=TEXT)
    assert [part.count(b"response.completed") > 0 for part in parts] == [False, False, True]
    assert [part.count(b'"status":"completed"') > 0 for part in parts] == [False, False, True]
    assert all(parts)
    assert [bool(part) for part in play_steps(spec(facts, stream=False), steps, words=TEXT)] == [False, False, True]


def test_a_failure_in_the_stream_is_the_last_event() -> None:
    steps = [StepRow(0, 0, [ord("a")]), StepRow(0, 0, (), "error", message="out of memory")]
    events = happenings(play(spec(), steps, words=TEXT))
    check_with_openai(events)
    response = check_whole(events)
    assert response["error"] == {"code": "server_error", "message": "out of memory"} and response["status"] == "failed"
    assert response["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_stream_is_an_error_document(stream: bool) -> None:
    body = play(spec(stream=stream), [StepRow(0, 0, (), "error", message="out of memory")], words=TEXT)
    assert json.loads(body)["error"]["message"] == "out of memory"


# ---------------------------------------------------------------------------------------------------- laws


def unary(pieces: Sequence[str], finish: str, facts: ServerFacts, **body: Any) -> dict[str, Any]:
    """The unary body."""
    document: dict[str, Any] = json.loads(text_body(pieces, finish, facts, stream=False, **body))
    Response.model_validate(document)
    return document


_FRAGMENTS = [
    *("<think>", "<thi", "nk>", "</think>", "</thi", "\n", "Hi ", "é😀", "<tool_call>", "</tool_call>", "<tool", "{"),
    *('{"name": "search", ', '"arguments": {"q": "a"}}', '"arguments": {}}', "STOP", "ST"),
]

pieces = st.lists(st.sampled_from(_FRAGMENTS), min_size=1, max_size=10)


@given(pieces, st.sampled_from(["stop", "length"]), st.sampled_from([{}, {"stop": ["STOP"]}]))
def test_the_unary_body_is_every_streams_final_snapshot(parts: list[str], finish: str, body: dict[str, Any]) -> None:
    document = unary(parts, finish, HERMES, tools=TOOLS, **body)
    whole = "".join(parts)
    for cut in (parts, list(whole), [whole]):
        assert check_whole(text_events(cut, finish, HERMES, tools=TOOLS, **body)) == document


@st.composite
def events_of_a_choice(draw: st.DrawFn) -> list[Event]:
    """Events in an order that a parser may make."""
    made: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("crsa"), max_size=12)):
        text = draw(st.sampled_from(["a", "b\n", "é😀", '"']))
        if kind == "s":
            made.append(ToolCallDelta(calls, "", f"call_{calls}", "f"))
            calls += 1
        elif kind == "a" and calls:
            made.append(ToolCallDelta(calls - 1, text))
        else:
            made.append(ReasoningDelta(text) if kind == "r" else ContentDelta(text))
    return made


def in_order(events: Sequence[Event]) -> list[Event]:
    """Without arguments of a call behind something else: parsers do not go back."""
    kept: list[Event] = []
    for event in events:
        late = isinstance(event, ToolCallDelta) and event.id is None
        if not (late and not isinstance(kept[-1], ToolCallDelta)):
            kept.append(event)
    return kept


@given(events_of_a_choice().map(in_order), st.sampled_from(["stop", "length"]))
def test_any_events_make_a_whole_stream_that_folds_to_the_same(events: list[Event], reason: str) -> None:
    streaming = ResponsesStreamingProcessor({"id": "resp_1"})
    mute = ResponsesStreamingProcessor({"id": "resp_1"}, mute=True)
    body = streaming.start() + b"".join([streaming.add([event]) for event in events]) + streaming.end(reason, {})
    assert mute.add(events) + mute.end(reason, {}) == b""
    response = check_whole(happenings(body))
    assert response == mute.document(reason, {})
    folded = Folded()
    for event in events:
        folded.add(event)
    by_type: dict[str, list[dict[str, Any]]] = {"message": [], "reasoning": [], "function_call": []}
    for item in response["output"]:
        by_type[item["type"]].append(item)
    for kind, text in (("message", folded.content), ("reasoning", folded.reasoning)):
        assert "".join(item["content"][0]["text"] for item in by_type[kind]) == "".join(text)
    assert [(item["call_id"], item["arguments"]) for item in by_type["function_call"]] == [
        (call.id, "".join(call.arguments)) for call in folded.tool_calls
    ]


def test_a_worker_that_takes_over_goes_on_with_numbers_that_were_not_used() -> None:
    first, second = (ResponsesStreamingProcessor({"id": "resp_1"}) for _ in range(2))
    sent = first.start() + b"".join([first.content(char) for char in "abcdef"])
    second.start()
    second.add([ContentDelta("abcdef")])
    second.resumed()
    numbers = [event["sequence_number"] for event in happenings(sent)]
    rest = [json.loads(block.split("data: ")[1]) for block in second.end("stop", {}).decode().split("\n\n") if block]
    assert rest[0]["sequence_number"] > numbers[-1]
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "abcdef"


def test_nor_does_a_third_worker_use_a_number_again() -> None:
    """However its history is cut into deltas: the second one had read it character by character."""
    second, third = (ResponsesStreamingProcessor({"id": "resp_1"}) for _ in range(2))
    second.start()
    second.add([ContentDelta(char) for char in "abcdef"])
    second.resumed()
    used = number(second.content("g"))
    third.start()
    third.add([ContentDelta("abcdefg")])
    third.resumed()
    assert number(third.content("h")) > used


def number(block: bytes) -> int:
    """The sequence number of one event."""
    return int(json.loads(block.split(b"data: ")[1])["sequence_number"])
