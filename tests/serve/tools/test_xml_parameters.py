"""Nested tags: where a value ends, what a model may leave out, what comes back."""

from __future__ import annotations

import json

import pytest

from tests.serve.tools.formats import result, tool

TOOLS = [
    tool(
        "f", city={"type": "string"}, days={"type": "integer"}, o={"type": "object"}, label={"type": ["string", "null"]}
    ),
    tool("ping"),
]


def coder(*parameters: str) -> str:
    return "<tool_call>\n<function=f>\n" + "".join(f"{each}\n" for each in parameters) + "</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "    def f(a, b):\n        return a<b\n\n    # end\\n",
        '<p class="x">Tom &amp; Jerry &lt;3</p>',
        "\nleading and trailing\n",
        "use </parameter> and <parameter=x> and </function> and </tool_call> inline",
        "</parameter>",
        "a\n</parameter>\nb",
        "<tool_call>\n<function=g>",
        'quotes " and \\ and \t and \x00 and 😀',
        "null",
        "12",
    ],
)
def test_strings_are_literal(value: str) -> None:
    content, [(name, arguments)] = result("qwen3_coder", coder(parameter("city", value)), TOOLS)
    assert (content, name, json.loads(arguments)) == ("", "f", {"city": value})
    assert result("qwen3_coder", coder(parameter("city", value)), TOOLS, step=1000)[1] == [(name, arguments)]


def test_values_are_typed_by_the_schema() -> None:
    text = coder(
        *(
            parameter(key, value)
            for key, value in [("days", "7"), ("o", '{"a": [1]}'), ("label", "null"), ("x", "02139")]
        )
    )
    [(_, arguments)] = result("qwen3_coder", text, TOOLS)[1]
    assert arguments == '{"days": 7, "o": {"a": [1]}, "label": null, "x": "02139"}'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>", '{"city": "Rome"}'),
        ("<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>", '{"city": "Rome"}'),
        ("<tool_call><function=f><parameter=city>Rome</parameter></function></tool_call>", '{"city": "Rome"}'),
        ("<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</tool_call>", '{"city": "Rome"}'),
        ("<tool_call>\n<function=f>\n<parameter=city>\nRome\n</function>\n</tool_call>", '{"city": "Rome"}'),
        (
            "<tool_call>\n<function=f>\n<parameter=city>\nRome\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            '{"city": "Rome", "days": 3}',
        ),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "{}"),
        ("<tool_call>\n<function=f>\n</tool_call>", "{}"),
    ],
)
def test_what_a_model_leaves_out(text: str, arguments: str) -> None:
    assert (
        result("qwen3_coder", text, TOOLS) == result("qwen3_coder", text, TOOLS, step=1000) == ("", [("f", arguments)])
    )


def test_a_call_that_was_not_closed_ends_where_the_next_begins() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=days>\n3\n</parameter>\n"
    text += "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
    assert result("qwen3_coder", text, TOOLS) == ("", [("f", '{"days": 3}'), ("ping", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno function\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f\n<parameter=city>Rome</parameter>\n</function>\n</tool_call>",
        "Write <function=name> and then text.",
        "<tool_call>\n<function=f>\nno parameter",
        "<tool_call>\n<function=fo",
    ],
)
def test_no_call(text: str) -> None:
    assert result("qwen3_coder", text, TOOLS) == (text, [])


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("<function=f>", ""),
        ("<function=f>\n<para", ""),
        ("<function=f>\n<parameter=ci", ""),
        ("<function=f>\n<parameter=city>\nSan Fr", '{"city": "San Fr'),
        ("<function=f>\n<parameter=days>\n4", '{"days": 4'),
        ('<function=f>\n<parameter=o>\n{"a": [1', '{"o": {"a": [1'),
        ("<function=f>\n<parameter=city>\nRome\n</parameter>", '{"city": "Rome"'),
        ("<function=f>\n<parameter=city>\nRome\n</parameter>\n<parame", '{"city": "Rome"'),
        ("<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_", '{"city": "Rome"}'),
    ],
)
def test_cut_off(cut: str, arguments: str) -> None:
    assert result("qwen3_coder", "<tool_call>\n" + cut, TOOLS) == ("", [("f", arguments)])


def test_seed_oss_writes_its_values_in_line() -> None:
    text = (
        "<seed:tool_call>\n<function=f>\n<parameter=city>Barcelona, Spain</parameter>\n</function>\n</seed:tool_call>"
    )
    assert result("seed_oss", text, TOOLS) == ("", [("f", '{"city": "Barcelona, Spain"}')])


# ------------------------------------------------------------------ other tags


def test_invokes_count_only_between_the_outer_tags() -> None:
    invoke = '<invoke name="f"><parameter name="city">Rome</parameter></invoke>'
    text = f"{invoke} <minimax:tool_call>{invoke}\n{invoke}</minimax:tool_call> {invoke}"
    assert result("minimax_m2", text, TOOLS) == (f"{invoke}  {invoke}", [("f", '{"city": "Rome"}')] * 2)


def test_white_space_in_a_value_stays_where_the_template_adds_none() -> None:
    parameters = '<parameter name="city">\n  x </parameter><parameter name="days"> 4 </parameter>'
    text = f'<minimax:tool_call><invoke name="f">{parameters}</invoke></minimax:tool_call>'
    assert result("minimax_m2", text, TOOLS)[1] == [("f", '{"city": "\\n  x ", "days": 4}')]


@pytest.mark.parametrize(
    ("kind", "value", "json_text"),
    [
        (' string="true"', "42", '"42"'),
        (' string="false"', "42", "42"),
        (' string="false"', "hello", '"hello"'),
        ("", "[1]", "[1]"),
    ],
)
def test_deepseek_says_what_is_a_string_where_the_schema_does_not(kind: str, value: str, json_text: str) -> None:
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="zz">\n'
        f'<｜DSML｜parameter name="a"{kind}>{value}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    assert result("deepseek_v32", text, TOOLS) == ("", [("zz", f'{{"a": {json_text}}}')])


def test_deepseek_v4_may_write_json_instead_of_parameters() -> None:
    first = '<｜DSML｜invoke name="f">\n{"city": "Rome"}\n</｜DSML｜invoke>'
    second = '<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>'
    text = f"<｜DSML｜tool_calls>\n{first}\n{second}\n</｜DSML｜tool_calls>"
    assert result("deepseek_v4", text, TOOLS) == ("", [("f", '{"city": "Rome"}'), ("ping", "{}")])
    assert result("deepseek_v4", text.partition("oke>")[0], TOOLS) == ("", [("f", '{"city": "Rome"}')])
    other = text.replace("tool_calls", "function_calls")
    assert result("deepseek_v4", other, TOOLS) == (other, [])


def test_step3_has_labels_before_its_calls() -> None:
    text = (
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>f\n<steptml:invoke name="f">'
        '<steptml:parameter name="city">Rome </steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜>\n'
        '<｜tool_call_begin｜><steptml:invoke name="ping"></steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>\n\nBye"
    )
    assert result("step3", text, TOOLS) == ("\n\nBye", [("f", '{"city": "Rome "}'), ("ping", "{}")])


# ------------------------------------------------------------------ pairs of tags


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>ping</tool_call>", "", [("ping", "{}")]),
        ("<tool_call>ping\n</tool_call>", "", [("ping", "{}")]),
        ("<tool_call>f<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>", "", [("f", '{"days": 3}')]),
        (
            "<tool_call>f\n    <arg_key>city</arg_key>\n    <arg_value> a </arg_value>\n    </tool_call>\n"
            " <tool_call>ping</tool_call>x",
            "x",
            [("f", '{"city": " a "}'), ("ping", "{}")],
        ),
        (
            "<tool_call>f\n<arg_key>city\n<arg_value>Rome</arg_value>\n</tool_call>",
            "",
            [("f", '{"city": "Rome"}')],
        ),
        ("<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
    ],
)
def test_glm(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for name in ("glm45", "glm47"):
        assert result(name, text, TOOLS) == result(name, text, TOOLS, step=1000) == (content, calls)


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("f\n", ""),
        ("f<arg_k", ""),
        ("f<arg_key>ci", ""),
        ("f<arg_key>city</arg_key><arg_va", ""),
        ("f<arg_key>city</arg_key><arg_value>Ro", '{"city": "Ro'),
        ("f<arg_key>city</arg_key><arg_value>Rome</arg_value></tool", '{"city": "Rome"'),
    ],
)
def test_glm_cut_off(cut: str, arguments: str) -> None:
    assert result("glm47", "<tool_call>" + cut, TOOLS) == ("", [("f", arguments)])


def test_glm_cut_off_in_the_name_is_content() -> None:
    assert result("glm47", "<tool_call>get_wea", TOOLS) == ("<tool_call>get_wea", [])
