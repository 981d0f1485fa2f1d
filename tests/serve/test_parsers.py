"""Both stages together, tool_choice, finish reasons, and which formats a model speaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.events import ContentDelta, Event, EventParser, Folded, ReasoningDelta, ToolCallDelta
from serve.parsers import (
    ChatParser,
    chat_parser,
    check_names,
    detect,
    finish_reason_of,
    parse_reasoning,
    parse_tool_calls,
    visible_markers,
)
from serve.reasoning import REASONING_PARSERS
from serve.tools import TOOL_PARSERS
from tests.serve.tools.formats import merged, render, tool
from tests.serve.tools.strategies import COMMON, cuts, fragments

TOOLS = [tool("get_weather", city={"type": "string"}, days={"type": "integer"}), tool("ping")]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PROMPT = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def make(**args: Any) -> ChatParser:
    parser = chat_parser({"id": "chatcmpl-1", "tools": TOOLS, "tool_choice": "auto", "prompt_tail": PROMPT} | args, 0)
    assert parser is not None
    return parser


def run(parser: EventParser, pieces: Any) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)] + list(parser.flush())
    assert not list(parser.flush())
    return events


def folded(text: str, step: int = 1, **args: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls)"""
    result = Folded()
    for event in run(make(**args), [text[i : i + step] for i in range(0, len(text), step)]):
        result.add(event)
    calls = [(call.name, "".join(call.arguments)) for call in result.tool_calls]
    return "".join(result.reasoning), "".join(result.content), calls


# ------------------------------------------------------------------ both stages


@given(data=st.data())
def test_no_split_matters(data: st.DataObject) -> None:
    reasoning, name = (
        data.draw(st.sampled_from(sorted(REASONING_PARSERS))),
        data.draw(st.sampled_from(sorted(TOOL_PARSERS))),
    )
    row = REASONING_PARSERS[reasoning]
    choice = data.draw(st.sampled_from(["auto", "required", NAMED]))
    pieces = fragments(name) | st.sampled_from([*row.opens, *row.closes, "\n", '{"city": "x"}', "[{", *COMMON[:3]])
    text = "".join(data.draw(st.lists(pieces, max_size=16)))
    args = {"reasoning_parser": reasoning, "tool_parser": name, "tool_choice": choice}
    events = run(make(**args), data.draw(cuts(text)))
    assert merged(events) == merged(run(make(**args), [text])) == merged(run(make(**args), text))
    assert all(isinstance(event, ToolCallDelta) or event.text for event in events)


def test_reasoning_first_and_then_calls() -> None:
    text = f"<think>\nI need 2 < 3 things.\n</think>\n\n{CALL}"
    for step in (1, 3, 1000):
        assert folded(text, step, reasoning_parser="qwen3", tool_parser="hermes") == (
            "I need 2 < 3 things.",
            "",
            [("get_weather", '{"city": "Rome"}')],
        )


def test_everything_in_one_step_is_in_order() -> None:
    events = list(make(reasoning_parser="qwen3", tool_parser="hermes").feed(f"<think>a</think>b{CALL}c"))
    assert [type(event) for event in events] == [
        ReasoningDelta,
        ContentDelta,
        ToolCallDelta,
        ToolCallDelta,
        ContentDelta,
    ]


def test_a_call_inside_reasoning_is_text() -> None:
    assert folded(f"<think>{CALL}</think>b", reasoning_parser="qwen3", tool_parser="hermes") == (CALL, "b", [])


def test_reasoning_may_be_left_out() -> None:
    text = f"<think>a</think>b{CALL}"
    args = {"reasoning_parser": "qwen3", "tool_parser": "hermes", "include_reasoning": False}
    assert folded(text, **args) == ("", "b", [("get_weather", '{"city": "Rome"}')])


def test_without_parsers_there_is_none() -> None:
    assert chat_parser({"tool_choice": "auto"}, 0) is None
    assert chat_parser({"tool_choice": "none", "tool_parser": "hermes"}, 0) is None


def test_no_tools_no_tool_parser() -> None:
    assert folded(f"<think>a</think>{CALL}", reasoning_parser="qwen3", tool_parser="hermes", tool_choice="none") == (
        "a",
        CALL,
        [],
    )


def test_the_span_of_reasoning_does_not_depend_on_the_steps() -> None:
    text = "\n<think>\nabc\n</think>\n\nxyz"
    for step in (1, 2, 5, 100):
        parser = make(reasoning_parser="qwen3", tool_parser="hermes")
        run(parser, [text[i : i + step] for i in range(0, len(text), step)])
        assert parser.reasoning_span is not None
        start, end = parser.reasoning_span
        assert text[start:end] == "\nabc\n"
    parser.feed("more")
    assert parser.reasoning_span == (start, end)


def test_whether_the_text_so_far_ends_in_reasoning() -> None:
    parser = make(reasoning_parser="qwen3")
    states = [
        parser.in_reasoning
        for piece in ("Hi", "<thi", "nk>", "a", "</think>", "b")
        if list(parser.feed(piece)) is not None
    ]
    assert states == [False, False, True, True, False, False]
    assert not make(tool_parser="hermes").in_reasoning


def test_ids_tell_request_choice_and_call_apart() -> None:
    def ids(request: str, choice: int) -> list[str]:
        parser = chat_parser({"id": request, "tool_parser": "hermes", "tool_choice": "auto"}, choice)
        assert parser is not None
        return [event.id for event in run(parser, [CALL, CALL]) if isinstance(event, ToolCallDelta) and event.id]

    assert ids("a", 0) == ids("a", 0)
    everything = ids("a", 0) + ids("a", 1) + ids("b", 0)
    assert len(set(everything)) == 6
    assert all(each.startswith("call_") and len(each) == 29 for each in everything)


def test_parallel_calls_may_be_unwanted() -> None:
    text = f"a{CALL}b{CALL}c"
    assert folded(text, tool_parser="hermes", parallel_tool_calls=False) == (
        "",
        "abc",
        [("get_weather", '{"city": "Rome"}')],
    )


# ------------------------------------------------------------------ tool_choice


@pytest.mark.parametrize("name", [*sorted(TOOL_PARSERS), None])
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_named_output_is_the_arguments(name: str | None, step: int) -> None:
    text = ' \n{"city": "Paris", "days": 3}\n'
    args = {"tool_parser": name, "tool_choice": NAMED, "reasoning_parser": "qwen3"}
    reasoning, content, calls = folded(f"<think>a</think>{text}", step, **args)
    assert (reasoning, content.strip(), calls) == ("a", "", [("get_weather", '{"city": "Paris", "days": 3}')])


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_named_output_may_be_markup_all_the_same(name: str) -> None:
    text = render(TOOL_PARSERS[name], [("get_weather", {"city": "Paris"})])
    for choice in (NAMED, "required"):
        for step in (1, 1000):
            _, content, [(function, arguments)] = folded(text, step, tool_parser=name, tool_choice=choice)
            assert (content, function, json.loads(arguments)) == ("", "get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"city": "Par', "", [("get_weather", '{"city": "Par')]),
        ('{"na', "", [("get_weather", '{"na')]),
        ("{}", "", [("get_weather", "{}")]),
        ('{"name": "Bob"}', "", [("get_weather", '{"name": "Bob"}')]),
        ('{ "name" : "get_weather", "arguments": {"city": "x"}}', "", [("get_weather", '{"city": "x"}')]),
        ('[{"name": "get_weather", "parameters": {}}]', "", [("get_weather", "{}")]),
        ("I cannot.", "I cannot.", []),
        ("[1] no", "[1] no", []),
        ("", "", []),
        ('{"city": "x"} and more', " and more", [("get_weather", '{"city": "x"}')]),
    ],
)
def test_named(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for step in (1, 1000):
        assert folded(text, step, tool_parser="hermes", tool_choice=NAMED) == ("", content, calls)


@pytest.mark.parametrize("name", ["hermes", "pythonic", "llama3_json", "mistral", None])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '[{"name": "ping", "parameters": {}}, {"name": "ping", "arguments": {"a": 1}}]',
            "",
            [("ping", "{}"), ("ping", '{"a": 1}')],
        ),
        ('{"name": "ping", "parameters": {}}', "", [("ping", "{}")]),
        ("I cannot.", "I cannot.", []),
        ('[ {"name": "ping", "parame', "", [("ping", "")]),
        ("[1] no", "[1] no", []),
        ("[", "[", []),
    ],
)
def test_required_output_may_be_bare(name: str | None, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for step in (1, 1000):
        assert folded(text, step, tool_parser=name, tool_choice="required") == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "reason", "choice", "wanted"),
    [
        (CALL, "stop", "auto", "tool_calls"),
        (CALL, "stop", "required", "tool_calls"),
        (CALL, "stop", NAMED, "stop"),
        (CALL, "length", "auto", "length"),
        (CALL, "abort", "auto", "abort"),
        (CALL, None, "auto", None),
        ("text", "stop", "auto", "stop"),
        ("text", "stop", "required", "stop"),
        (CALL[:-40], "length", "required", "length"),
    ],
)
def test_finish_reasons(text: str, reason: str | None, choice: Any, wanted: str | None) -> None:
    parser = make(tool_parser="hermes", tool_choice=choice)
    run(parser, text)
    assert finish_reason_of(reason, parser, choice) == wanted
    assert finish_reason_of(reason, None, choice) == reason


# ------------------------------------------------------------------ which formats?


def test_unknown_names_list_the_known_ones() -> None:
    check_names(None, None)
    check_names("qwen3", "hermes")
    with pytest.raises(ValueError, match=r"reasoning_parser: 'qwen' is not one of .*deepseek_r1.*qwen3"):
        check_names("qwen", None)
    with pytest.raises(ValueError, match=r"tool_parser: 'x' is not one of .*hermes.*mistral"):
        check_names(None, "x")
    with pytest.raises(ValueError, match="tool_parser"):
        chat_parser({"tool_parser": "x", "tool_choice": "auto"}, 0)


@pytest.mark.parametrize(
    ("template", "tokens", "wanted"),
    [
        ("{{ m }}", [], (None, None)),
        ("<tool_call>\n{\"name\": ...}\n</tool_call> enable_thinking <think>", [], ("qwen3", "hermes")),
        ("<tool_call>\n<function=f>\n<parameter=k>", [], (None, "qwen3_coder")),
        ("<｜Assistant｜><think> <｜tool▁calls▁begin｜> ```json </think>", [], ("deepseek_r1", "deepseek_v3")),
        ("<｜Assistant｜></think> thinking is defined <｜tool▁calls▁begin｜>", [], ("deepseek_v3", "deepseek_v31")),
        ("[INST]", ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], ("mistral", "mistral")),
        ("[gMASK]<tool_call>{{ n }}\n<arg_key>k</arg_key>\n<arg_value> <think>", [], ("glm45", "glm45")),
        ("[gMASK]<tool_call>{{ n }}<arg_key>k</arg_key><arg_value> <think>", [], ("glm45", "glm47")),
        ("<think> <|im_middle|> <|tool_calls_section_begin|>", [], ("kimi_k2", "kimi_k2")),
        ("]~b]ai <think> <minimax:tool_call>", [], ("minimax_m2", "minimax_m2")),
        ("", ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"], ("gemma4", "gemma4")),
        ("<seed:think> <seed:tool_call> <function= <parameter=", [], ("seed_oss", "seed_oss")),
        ("Here is my thought process: <|tool_call|>", [], ("granite", "granite")),
        ("<|python_tag|>", [], (None, "llama3_json")),
        ("<|START_THINKING|> <|START_ACTION|>", [], ("cohere_command3", "cohere_command3")),
        ("<think> truncate_history_thinking enable_thinking", [], ("nemotron", None)),
    ],
)  # fmt: skip
def test_detection(template: str, tokens: list[str], wanted: tuple[str | None, str | None]) -> None:
    assert detect(template, tokens) == wanted


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_detection_only_knows_formats_that_exist(name: str) -> None:
    row = TOOL_PARSERS[name]
    check_names(*detect("\n".join([*row.markers.openers, *row.markers.closers]), []))
    assert set(row.markers.openers) - {"{", "["} <= visible_markers(None, name) | set("{[")


def test_markers_that_must_stay_visible() -> None:
    assert {"<|START_THINKING|>", "<|END_RESPONSE|>"} <= visible_markers("cohere_command3", None)
    assert {"[TOOL_CALLS]", "[ARGS]", "[THINK]"} <= visible_markers("mistral", "mistral")
    assert "<|tool_call_argument_begin|>" in visible_markers(None, "kimi_k2")
    assert visible_markers(None, None) == frozenset()


# ------------------------------------------------------------------ raw text at once


def test_raw_text_to_reasoning() -> None:
    result = parse_reasoning("qwen3", "<think>a</think>b")
    assert ("".join(result.reasoning), "".join(result.content)) == ("a", "b")
    result = parse_reasoning("qwen3", "a</think>b", prompt_tail="<think>\n")
    assert ("".join(result.reasoning), "".join(result.content)) == ("a", "b")
    with pytest.raises(ValueError, match="reasoning_parser"):
        parse_reasoning("x", "")


def test_raw_text_to_calls() -> None:
    result = parse_tool_calls("hermes", f"a{CALL}", TOOLS)
    assert "".join(result.content) == "a"
    assert [(call.name, "".join(call.arguments)) for call in result.tool_calls] == [("get_weather", '{"city": "Rome"}')]
    with pytest.raises(ValueError, match="tool_parser"):
        parse_tool_calls("x", "")
