"""JSON objects that say name and arguments: which make a call, and what comes back when they do not."""

from __future__ import annotations

import pytest

from tests.serve.tools.formats import result, tool

TOOLS = [tool("ping"), tool("search", query={"type": "string"})]


def hermes(body: str) -> tuple[str, list[tuple[str, str]]]:
    found = result("hermes", f"<tool_call>{body}</tool_call>", TOOLS)
    assert found == result("hermes", f"<tool_call>{body}</tool_call>", TOOLS, step=1000)
    return found


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('\n{"name": "f", "arguments": {"a": 1}}\n', ("f", '{"a": 1}')),
        ('{"arguments": {"a": [1, "}"]}, "name": "f"}', ("f", '{"a": [1, "}"]}')),
        ('{"name": "f", "parameters": {"a": 1}}', ("f", '{"a": 1}')),
        ('{"id": 7, "name": "f", "x": [{"name": "g"}], "arguments": {}, "y": "z"}', ("f", "{}")),
        (
            '{"name": "f", "arguments": {"a": "</tool_call> <tool_call> \\" } ]"}}',
            ("f", '{"a": "</tool_call> <tool_call> \\" } ]"}'),
        ),
        ('{"name": "f", "arguments": {"name": "g", "arguments": {}}}', ("f", '{"name": "g", "arguments": {}}')),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', ("f", '{"a": 1, "a": 2}')),
        ('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', ("f", "{}")),
        ('{"name": "\\u0066\\n", "arguments": {}}', ("f\n", "{}")),
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "f", "arguments": ""}', ("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": \\"x\\\\ny \\ud83d\\ude00 \\u00e9\\"}"}', ("f", '{"a": "x\\ny 😀 é"}')),
        ('{"arguments": " {\\"a\\": 1}", "name": "f"}', ("f", ' {"a": 1}')),
        ('{"name": "f", "arguments": "hello"}', ("f", '"hello"')),
        ('{"function": {"name": "f", "arguments": {"a": 1}}, "type": "function"}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": {}}}}', ("f", "{}")),
        ('{"name": "f", "arguments": { "a" :1 } }', ("f", '{ "a" :1 }')),
        ('\n```json\n{"name": "f", "arguments": {}}\n```\n', ("f", "{}")),
    ],
)
def test_calls(body: str, call: tuple[str, str]) -> None:
    assert hermes(body) == ("", [call])


@pytest.mark.parametrize(
    "body",
    [
        "",
        "\nno json here\n",
        "{}",
        '{"name": ""}',
        '{"name": "", "arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{"name": "f", "arguments": {a: 1}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 7}',
        '{"name" "f"}',
        '{"name": "f" "arguments": tru',
        '["a"]',
        '{"function": {"function": {"name": "f"}}}',
    ],
)
def test_what_is_no_call_comes_back_whole(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert hermes(body) == (text, []) or body == '{"function": {"function": {"name": "f"}}}'


def test_several_objects_in_one_tag() -> None:
    assert hermes('{"name": "a", "arguments": {}},\n {"name": "b"}') == ("", [("a", "{}"), ("b", "{}")])
    assert hermes('[{"name": "a", "arguments": {}}, {"name": "b"}, ]') == ("", [("a", "{}"), ("b", "{}")])


def test_an_object_that_is_no_call_behind_one_that_is() -> None:
    assert hermes('{"name": "a"}, {"b": 1}') == (', {"b": 1}', [("a", "{}")])


def test_a_marker_behind_a_marker() -> None:
    assert result("hermes", '<tool_call><tool_call>{"name": "f"}') == ("<tool_call>", [("f", "{}")])


def test_arguments_that_break_off_inside_of_markup() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    assert result("hermes", text) == ("", [("f", '{"a": 1'), ("g", "{}")])


@pytest.mark.parametrize(
    ("cut", "call"),
    [
        ('{"name": "f"', ("f", "")),
        ('{"name": "f", "argu', ("f", "")),
        ('{"name": "f", "arguments": ', ("f", "")),
        ('{"name": "f", "arguments": {', ("f", "{")),
        ('{"name": "f", "arguments": {"a\\', ("f", '{"a\\')),
        ('{"name": "f", "arguments": {}', ("f", "{}")),
        ('{"name": "f", "arguments": nul', ("f", "nul")),
        ('{"name": "f", "arguments": "hel', ("f", '"hel')),
        ('{"name": "f", "arguments": "{\\"a\\": \\u00', ("f", '{"a": \\u00')),
        ('{"name": "f", "arguments": {}}\n</tool_c', ("f", "{}")),
    ],
)
def test_cut_off(cut: str, call: tuple[str, str]) -> None:
    assert result("hermes", "<tool_call>" + cut) == ("", [call])


@pytest.mark.parametrize("cut", ['{"na', '{"name": "get_wea', '{"arguments": {"a": 1}', "<tool_ca"])
def test_cut_off_before_the_name_is_content(cut: str) -> None:
    assert result("hermes", "<tool_call>" + cut) == ("<tool_call>" + cut, [])


# ------------------------------------------------------------------ without markers


@pytest.mark.parametrize("separator", ["; ", ";", " ; ", ";\n", "\n", ", ", ""])
def test_bare_objects_in_a_row(separator: str) -> None:
    text = '{"name": "search", "parameters": {"query": "a; b {c}"}}' + separator + '{"name": "ping", "parameters": {}}'
    assert result("llama3_json", text, TOOLS) == ("", [("search", '{"query": "a; b {c}"}'), ("ping", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": 21, "sky": "clear"}',
        '{"name": "ping"}',
        '{"parameters": {}}',
        '{"name": "Bob Smith", "parameters": {}}',
        '{"name": "Bob", "age": 3, "parameters": {}}',
        '{"name": "ping", "parameters": "text"}',
        'I used {ping} for this: {"query": "test"}.',
        'In prose {"name": "unknown", "parameters": {}} stays.',
        '{"name": "ping", "parameters": {invalid json}',
    ],
)
def test_an_answer_in_json_is_an_answer(text: str) -> None:
    assert result("llama3_json", text, TOOLS) == (text, [])
    assert result("json", text, TOOLS) == (text, [])


def test_bare_calls_amid_text() -> None:
    text = 'Here: {"name": "ping", "parameters": {}} Would you like more?'
    assert result("llama3_json", text, TOOLS) == ("Here:  Would you like more?", [("ping", "{}")])


def test_a_bare_call_may_be_of_a_tool_that_was_not_declared_if_nothing_precedes_it() -> None:
    assert result("llama3_json", '{"name": "launch", "parameters": {}}', TOOLS) == ("", [("launch", "{}")])


def test_a_broken_object_does_not_hide_the_next() -> None:
    text = '{"name": "ping", "parameters": {{"name": "ping", "parameters": {}}'
    assert result("llama3_json", text, TOOLS) == ('{"name": "ping", "parameters": {', [("ping", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        '[{"name": "ping", "arguments": {}}]',
        '```json\n[{"name": "ping", "arguments": {}}]\n```',
        '```\n[{"name": "ping", "arguments": {}}]```',
        '[TOOL_CALLS][{"name": "ping", "arguments": {}}]',
        '<tool_call>[{"name": "ping", "arguments": {}}]</tool_call>',
    ],
)
def test_xlam_wraps_its_list_in_many_ways(text: str) -> None:
    assert result("xlam", text, TOOLS) == ("", [("ping", "{}")])
    assert result("xlam", "<think>ok</think>" + text, TOOLS) == ("<think>ok</think>", [("ping", "{}")])


def test_code_in_a_fence_is_no_call() -> None:
    text = 'code: ```python\nx = {}\n``` and ```json\n{"name": "Bob"}\n``` [1] {a}'
    assert result("xlam", text, TOOLS) == (text, [])


def test_cohere_has_names_of_its_own() -> None:
    text = '<|START_ACTION|>\n[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]\n<|END_ACTION|>'
    assert result("cohere_command3", text) == ("", [("f", '{"a": 1}')])


def test_wrappers_of_the_answer_are_dropped() -> None:
    assert result("ernie45", "<response>\nHi\n</response>") == ("\nHi\n", [])
