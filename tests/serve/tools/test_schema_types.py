"""Text -> JSON by declared types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.tools.schema_types import ANY, STRING, may_be_typed, typed_json, types_of

OBJECT, ARRAY, INTEGER, NUMBER, BOOLEAN = (
    frozenset({each}) for each in ("object", "array", "integer", "number", "boolean")
)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "float"}, {"number"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 5}, {"integer", "null"}),
        ({"oneOf": [{"type": "array", "items": {}}, {"type": "null"}]}, {"array", "null"}),
        ({"allOf": [{"type": "object"}]}, {"object"}),
        ({"enum": ["c", "f"]}, {"string"}),
        ({"enum": [1, None, 2.5, True]}, {"integer", "null", "number", "boolean"}),
        ({"const": "x"}, {"string"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"$ref": "#/$defs/Unit"}, {"boolean"}),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/nowhere/at/all"}, None),
        ({"type": "date"}, None),
        ({}, None),
        ("no schema", None),
    ],
)
def test_types_of(schema: Any, types: set[str] | None) -> None:
    defs = {"Unit": {"type": "boolean"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    function = {"parameters": {"type": "object", "properties": {"p": schema}, "$defs": defs}}
    assert types_of(function, "p") == types
    assert types_of(function, "q") is None and types_of({}, "p") is None and types_of({"parameters": 7}, "p") is None


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("42", INTEGER, 42), (" 42\n", INTEGER, 42), ("-0", INTEGER, 0), ("007", INTEGER, 7), ("+5", INTEGER, 5),
        ("5.0", INTEGER, 5), ("5.5", INTEGER, "5.5"), ("abc", INTEGER, "abc"), ("9" * 4000, INTEGER, int("9" * 4000)),
        ("3", NUMBER, 3), ("5.0", NUMBER, 5.0), (".5", NUMBER, 0.5), ("1e3", NUMBER, 1000.0),
        ("1e999", NUMBER, "1e999"), ("nan", NUMBER, "nan"),
        ("-", NUMBER, "-"), ("e", NUMBER, "e"), ("+1e999", NUMBER, "+1e999"),
        ("true", BOOLEAN, True), ("False", BOOLEAN, False), ("1", BOOLEAN, True), ("yes", BOOLEAN, "yes"),
        ("null", frozenset({"integer", "null"}), None), ("None", frozenset({"integer", "null"}), None),
        ("null", frozenset({"string", "null"}), None), ("None", frozenset({"string", "null"}), "None"),
        ("null", STRING, "null"),
        ("42", frozenset({"string", "integer"}), 42), ("042", frozenset({"string", "integer"}), "042"),
        ('{"a": [1]}', OBJECT, {"a": [1]}), ("{'a': (1, None)}", OBJECT, {"a": [1, None]}), ("{a}", OBJECT, "{a}"),
        ("[1]", OBJECT, "[1]"),
        ('["a"]', ARRAY, ["a"]), ("[" * 3000, ARRAY, "[" * 3000), ("{1, 2}", OBJECT, "{1, 2}"),
        ("12", None, 12), ("-1.50", None, -1.5), ("02139", None, "02139"), ("1e5", None, "1e5"),
        ("1234567890123456", None, "1234567890123456"), ("true", None, True), ("True", None, "True"),
        ("null", None, None), ("[1]", None, [1]), ("{x", None, "{x"), (" a ", None, " a "),
    ],
)  # fmt: skip
def test_typed_json(text: str, types: frozenset[str] | None, value: Any) -> None:
    found = json.loads(typed_json(text, types))
    assert found == value and type(found) is type(value)


@given(
    st.text(max_size=6) | st.sampled_from(["12", "-1.5e+3", "tru", "null", "{", "[1"]),
    st.sets(st.sampled_from(sorted(ANY)), min_size=1),
)
def test_a_string_is_only_sent_when_nothing_else_is_possible(text: str, types: set[str]) -> None:
    """What streams as a string ends as a string."""
    word = text.strip()
    if not may_be_typed(word, frozenset(types)):
        assert typed_json(text, frozenset(types)).startswith('"')


@given(st.text(max_size=12))
def test_always_json(text: str) -> None:
    for types in (None, STRING, INTEGER, NUMBER, OBJECT, ANY):
        json.loads(typed_json(text, types))
