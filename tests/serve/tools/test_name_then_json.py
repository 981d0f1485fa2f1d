"""A name in a header of special tokens, and JSON arguments behind it."""

from __future__ import annotations

import pytest

from tests.serve.tools.formats import fold, result, stream, tool

WEATHER = [tool("get_weather", city={"type": "string"})]


def kimi(*calls: str) -> str:
    return "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"


def one(header: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{header} <|tool_call_argument_begin|>{arguments} <|tool_call_end|>"


# ------------------------------------------------------------------ kimi


@pytest.mark.parametrize(
    ("headers", "ids"),
    [
        (["functions.f:0", "functions.f:1"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:3", "g:4"], ["functions.f:3", "functions.g:4"]),
        (["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:1"]),
    ],
)
def test_kimi_ids(headers: list[str], ids: list[str]) -> None:
    folded = fold(stream("kimi_k2", kimi(*(one(header, "{}") for header in headers))))
    assert [call.id for call in folded.tool_calls] == ids


def test_kimi_ids_are_unique_whatever_the_model_says() -> None:
    headers = ["functions.f:1", "functions.f:1", "functions.f:1"]
    ids = [call.id for call in fold(stream("kimi_k2", kimi(*(one(each, "{}") for each in headers)))).tool_calls]
    assert len(set(ids)) == 3


def test_kimi_counts_without_a_name_when_there_is_one_tool() -> None:
    assert result("kimi_k2", kimi(one("0", "{}")), WEATHER) == ("", [("get_weather", "{}")])
    text = kimi(one("0", "{}"))
    assert result("kimi_k2", text, [*WEATHER, tool("ping")]) == (text, [])


def test_a_header_that_is_none_hides_no_other_call() -> None:
    bad = one("functions.invalid.0", "{}")
    text = "Help. " + kimi(bad, one("functions.valid:1", "{}"))
    assert result("kimi_k2", text) == (f"Help. <|tool_calls_section_begin|>{bad}", [("valid", "{}")])


def test_arguments_that_were_never_closed_end_at_the_marker() -> None:
    text = kimi(one("functions.bad:0", '{"city": "Rome"'), one("functions.good:1", '{"a": "<|tool_call_end|>"}'))
    assert result("kimi_k2", text) == ("", [("bad", '{"city": "Rome" '), ("good", '{"a": "<|tool_call_end|>"}')])


def test_a_section_without_a_call_is_content() -> None:
    assert result("kimi_k2", "x " + kimi()) == ("x " + kimi(), [])
    assert result("kimi_k2", kimi("noise ", one("functions.f:0", "{}")) + " After")[1] == [("f", "{}")]


# ------------------------------------------------------------------ deepseek

CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BEGIN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def test_deepseek_v3_fences_its_arguments() -> None:
    first = f'{CALL}function{SEP}f\n```json\n{{"q": "```json in md"}}\n```{END}'
    text = f"{BEGIN}{first}\n{CALL}function{SEP}g\n```json\n{{}}\n```{END}{CLOSE}"
    assert result("deepseek_v3", text + "Text with ```code```.") == (
        "Text with ```code```.",
        [("f", '{"q": "```json in md"}'), ("g", "{}")],
    )


@pytest.mark.parametrize("body", ["{}", "", " "])
def test_deepseek_v31_without_arguments(body: str) -> None:
    assert result("deepseek_v31", f"{BEGIN}{CALL}ping{SEP}{body}{END}{CLOSE}") == ("", [("ping", "{}")])


def test_a_call_without_its_section() -> None:
    assert result("deepseek_v31", f"Well. {CALL}ping{SEP}{{}}{END}") == ("Well. ", [("ping", "{}")])


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("kimi_k2", "<|tool_call_begin|>functions.search:0<|tool_call_argu", ("search", "")),
        ("kimi_k2", "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>", ("search", "")),
        ("deepseek_v31", f"{CALL}search<｜tool▁s", ("search", "")),
        ("deepseek_v31", f"{CALL}search{SEP}{{", ("search", "{")),
        ("deepseek_v31", f'{CALL}search{SEP}{{"a": 1}}<｜tool▁call▁e', ("search", '{"a": 1}')),
        ("deepseek_v3", f"{CALL}function{SEP}search\n```json\n", ("search", "")),
        ("deepseek_v3", f'{CALL}function{SEP}search\n```json\n{{"a": 1}}\n``', ("search", '{"a": 1}')),
        ("mistral", "[TOOL_CALLS]search[AR", ("search", "")),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"a', ("search", '{"a')),
    ],
)
def test_cut_off(name: str, text: str, call: tuple[str, str]) -> None:
    assert result(name, text) == ("", [call])


@pytest.mark.parametrize(
    "text", [f"{BEGIN}{CALL}get_wea", f"{BEGIN}{CALL}", BEGIN, f"{BEGIN}{CALL}f{SEP}text{END}{CLOSE}"]
)
def test_no_call(text: str) -> None:
    assert result("deepseek_v31", text) == (text, [])


# ------------------------------------------------------------------ mistral


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
        ('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ('[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3} } ]\nrest', "\nrest", [("add", '{"a": 3}')]),
        ('[TOOL_CALLS] {"name": "add", "arguments": {}}', "", [("add", "{}")]),
        ('hi{hi[TOOL_CALLS]bash{"c": "{}[TOOL_CALLS]"}', "hi{hi", [("bash", '{"c": "{}[TOOL_CALLS]"}')]),
        ("[TOOL_CALLS] not json at all", "[TOOL_CALLS] not json at all", []),
        ("[TOOL_CALLS]toolname_no_args", "[TOOL_CALLS]toolname_no_args", []),
    ],
)
def test_mistral_of_all_versions(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert result("mistral", text) == result("mistral", text, step=1000) == (content, calls)


def test_mistral_ids_fit_its_templates() -> None:
    [call] = fold(stream("mistral", "[TOOL_CALLS]f[ARGS]{}")).tool_calls
    assert len(call.id) == 9 and call.id.isalnum()
    [call] = fold(stream("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}")).tool_calls
    assert call.id == "abc123def"
