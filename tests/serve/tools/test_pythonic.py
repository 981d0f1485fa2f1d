"""Python calls, and Gemma's notation: what is one, and what models write that is not quite."""

from __future__ import annotations

import json

import pytest

from tests.serve.tools.formats import result, tool

TOOLS = [tool("get_weather", city={"type": "string"}), tool("ping")]


def both(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    found = result(name, text, TOOLS)
    assert found == result(name, text, TOOLS, step=1000)
    return found


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("f(a='it\\'s \"(a, b)\" ]', b=2)", {"a": 'it\'s "(a, b)" ]', "b": 2}),
        ("f(v=[1, -2], o={'a': None, 'b': [True]}, r=2.5, g=False, z='02139')",
         {"v": [1, -2], "o": {"a": None, "b": [True]}, "r": 2.5, "g": False, "z": "02139"}),
        ("f(a=null, b=true, c=false)", {"a": None, "b": True, "c": False}),
        ("f(a=07, b=-1_000, c=0x1F, d=.5, e=5., f=1e3, g=+3)",
         {"a": 7, "b": -1000, "c": 31, "d": 0.5, "e": 5.0, "f": 1000.0, "g": 3}),
        ("f(t=(1, 'a',), s={'x', 'y'}, e={}, l=[], n=[[[1]]])",
         {"t": [1, "a"], "s": ["x", "y"], "e": {}, "l": [], "n": [[[1]]]}),
        ("f(d={1: 'a', None: 2, 'k': (1, 2),})", {"d": {"1": "a", "null": 2, "k": [1, 2]}}),
        ("f(a='''x 'y' \"z\"\n''', b=\"q\", c='', d=r'\\d', e=u'u')",
         {"a": "x 'y' \"z\"\n", "b": "q", "c": "", "d": "\\d", "e": "u"}),
        (r"f(a='\u00e9\x41\n\t\\\ud83d\ude00\U0001F600\,')", {"a": "éA\n\t\\😀😀\\,"}),
        ("f(a='line1\nline2', b='nul\x00')", {"a": "line1\nline2", "b": "nul\x00"}),
        ("run(cmd='sed -n '360,450p' /a/b.py')", {"cmd": "sed -n '360,450p' /a/b.py"}),
        ("run(cmd='grep -F \"]\" log.txt', n=[\"it's\", 'b'])", {"cmd": 'grep -F "]" log.txt', "n": ["it's", "b"]}),
        ("run(cmd='python3 -c \"print(latex(3*x, s='\\,'))\"')", {"cmd": "python3 -c \"print(latex(3*x, s='\\,'))\""}),
        ("a.b-c.d( x = 1 , y = 'z' , )", {"x": 1, "y": "z"}),
    ],
)  # fmt: skip
def test_arguments(call: str, arguments: dict[str, object]) -> None:
    content, [(name, text)] = both("lfm2", f"<|tool_call_start|> [{call}]<|tool_call_end|>")
    assert (content, name, json.loads(text)) == ("", call.partition("(")[0], arguments)


@pytest.mark.parametrize(
    "text",
    [
        "[1] Smith (2020), [2] Jones.",
        "[link](url) and [f(x)](url)",
        "[ping",
        "[]",
        "[ ]",
        "[foo(x=1])]",
        "[f(x=b'z')]",
        "[f(x=1e999)]",
        "[f(x=g(1))]",
        "[f(**kw)]",
        "[f(x",
        "hello world[A(A=\t)A(A=,\t\t)A(A=,\t",
        "[get_weather is a function]",
        "In prose [main(a=1)] stays.",
        "<|python_start|>text<|python_end|>",
    ],
)
def test_no_call(text: str) -> None:
    assert both("pythonic", text) == (text, [])


def test_calls_amid_text() -> None:
    text = "First [get_weather(city='London')] and [ping()], done."
    assert both("pythonic", text) == ("First  and , done.", [("get_weather", '{"city": "London"}'), ("ping", "{}")])


def test_tags_around_the_list() -> None:
    text = "Mars. <|python_start|>[get_weather(city='Mars'),ping()]<|python_end|> In this way."
    assert both("llama4_pythonic", text) == (
        "Mars.  In this way.",
        [("get_weather", '{"city": "Mars"}'), ("ping", "{}")],
    )


def test_a_call_that_is_none_hides_no_other() -> None:
    assert both("pythonic", "[bad(x=b'z)'), ping()]") == ("[bad(x=b'z)')", [("ping", "{}")])
    assert both("pythonic", "[ping(), bad(x=b'z'), ping()]") == (", bad(x=b'z')", [("ping", "{}"), ("ping", "{}")])
    assert both("olmo3", "<function_calls>bad(x=b'z')\nping()</function_calls>") == (
        "<function_calls>bad(x=b'z')",
        [("ping", "{}")],
    )


def test_one_call_a_line() -> None:
    text = "<function_calls>get_weather(city='SF')\nping()\n</function_calls>"
    assert both("olmo3", text) == ("", [("get_weather", '{"city": "SF"}'), ("ping", "{}")])
    assert both("olmo3", "<function_calls>[ping()]</function_calls>") == ("", [("ping", "{}")])


@pytest.mark.parametrize(
    ("cut", "calls"),
    [
        ("[ping(", [("ping", "")]),
        ("[get_weather(city=", [("get_weather", '{"city": ')]),
        ("[ping(), get_weather(city='San Fr", [("ping", "{}"), ("get_weather", '{"city": "San Fr')]),
        ("[f(a=[1, 2", [("f", '{"a": [1, 2')]),
        ("[f(a={'b", [("f", '{"a": {"b')]),
        ("[f(a='x'", [("f", '{"a": "x"')]),
        ("[f(a='x\\", [("f", '{"a": "x\\\\')]),
        ("[ping()", [("ping", "{}")]),
        ("[ping(), ", [("ping", "{}")]),
    ],
)
def test_cut_off(cut: str, calls: list[tuple[str, str]]) -> None:
    assert both("pythonic", cut) == ("", calls)


def test_nesting_has_no_limit() -> None:
    deep = "[" * 5000 + "]" * 5000
    assert both("pythonic", f"[f(a={deep})]") == ("", [("f", f'{{"a": {deep}}}')])


# ------------------------------------------------------------------ gemma


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('city:<|"|>Paris, France<|"|>,n:42,b:true,s:3.14,z:null,d:108.',
         {"city": "Paris, France", "n": 42, "b": True, "s": 3.14, "z": None, "d": 108.0}),
        ('nested:{inner:<|"|>v<|"|>},list:[<|"|>a]<|"|>,<|"|>b<|"|>,[1]]',
         {"nested": {"inner": "v"}, "list": ["a]", "b", [1]]}),
        ('m:{<|"|>3<|"|>:<|"|>new text<|"|>}', {"m": {"3": "new text"}}),
        ('html:<|"|><p a="b">\n{}<|"|>', {"html": '<p a="b">\n{}'}),
        ("key:", {"key": ""}),
        ('a:"json \\"str\\"",b:hello world', {"a": 'json "str"', "b": "hello world"}),
        ("", {}),
    ],
)  # fmt: skip
def test_gemma(body: str, arguments: dict[str, object]) -> None:
    content, [(name, text)] = both("gemma4", f"<|tool_call>call:get-x.y{{{body}}}<tool_call|><div>")
    assert (content, name, json.loads(text)) == ("<div>", "get-x.y", arguments)


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("f{", ""),
        ('f{city:<|"|>Lon', '{"city": "Lon'),
        ('f{city:<|"|>Lon<|"|>,n:4', '{"city": "Lon", "n": 4'),
        ("f{a:[1,", '{"a": [1'),
    ],
)
def test_gemma_cut_off(cut: str, arguments: str) -> None:
    assert both("gemma4", "<|tool_call>call:" + cut) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "text", ["<|tool_call>text", "<|tool_call>call:f", "<|tool_call>call:f {:[t:[]", "<|tool_call><tool_call|>"]
)
def test_gemma_no_call(text: str) -> None:
    assert both("gemma4", text) == (text, [])
