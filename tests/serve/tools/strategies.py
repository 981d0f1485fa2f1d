"""What Hypothesis draws for tool formats: a format's own markers and their fragments, pieces of JSON, calls, damage.

A plain alphabet finds nothing: faults live where a marker, a quote or an escape is cut.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from serve.tools import TOOL_PARSERS
from serve.tools.markup import literals_of
from tests.serve.tools.formats import Call, render

#: Pieces that mean something in one notation or another.
COMMON = [
    '{"name": "f", "arguments": {', '{"name": "f"', '"arguments"', '"parameters": {"k": 1}}',
    '{"arguments": {}, "name": "g"}', '"k": "v"', ": ", "{", "}", "[", "]", "(", ")", '"', "'", "=", ",", ";", "\n",
    " ", "\\", "\\u00e", "\\ud83d", "\\ude00", "f", "k", "f(", "k='", "1", "-2.5", "true", "null",
    "<", ">", "/", "|", "日本", "😀", "functions.f:0", "call:f{",
    "```", "json", "function", "\u00a0",
]  # fmt: skip

#: One name of every row: names that share a row need no second test.
NAMES = sorted({id(row): name for name, row in reversed(TOOL_PARSERS.items())}.values())


def fragments(name: str) -> st.SearchStrategy[str]:
    """Markers of a format, whole and cut, and common pieces."""
    literals = sorted(set(literals_of(TOOL_PARSERS[name])))
    cut = [each[:end] for each in literals for end in (1, len(each) // 2, len(each) - 1)] + [
        each[1:] for each in literals
    ]
    return (
        st.sampled_from(literals) | st.sampled_from([each for each in cut if each] or [" "]) | st.sampled_from(COMMON)
    )


def soups(name: str) -> st.SearchStrategy[str]:
    """Fragments in any order."""
    return st.lists(fragments(name) | st.text(max_size=3), max_size=14).map("".join)


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """Ways to cut ``text`` into steps."""

    def cut(ends: list[int]) -> list[str]:
        places = [0, *sorted({end % (len(text) + 1) for end in ends}), len(text)]
        return [text[a:b] for a, b in zip(places, places[1:], strict=False) if a < b]

    return st.lists(st.integers(0, 10**6), max_size=12).map(cut)


# ------------------------------------------------------------------ calls

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "null",
        "02139",
        "12",
        "true",
        "it's",
        'said "hi"',
        "a<b",
        "</p>",
        "{a}",
        "[1]",
        "x, y",
        "f(x='y')",
        "&amp;",
        "\\n",
        "  pad ",
    ]
)
_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_VALUES = st.recursive(
    _TEXT | _NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def representable(name: str, value: Any) -> bool:
    """Whether a format can write a value unambiguously: those without escapes cannot write their own closing tag."""
    if isinstance(value, dict | list):
        return all(representable(name, each) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, str) or not any(
        each in value for each in literals_of(TOOL_PARSERS[name]) if len(each) > 1
    )


def calls(name: str) -> st.SearchStrategy[list[Call]]:
    """One to three calls of different functions."""
    args = st.dictionaries(st.sampled_from(["city", "k", "n_1"]), _VALUES, max_size=3).filter(
        lambda each: representable(name, each)
    )
    return st.lists(args, min_size=1, max_size=3).map(lambda all: [(f"fn{i}", each) for i, each in enumerate(all)])


def damaged(name: str) -> st.SearchStrategy[str]:
    """Calls as the format writes them, then cut, doubled or with something in between."""

    @st.composite
    def damage(draw: st.DrawFn) -> str:
        text = draw(st.sampled_from(["", "Sure. "])) + render(TOOL_PARSERS[name], draw(calls(name)))
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, len(text)))
            end = min(len(text), start + draw(st.integers(0, 12)))
            middle = draw(st.sampled_from(["drop", "double", "cut"]) | fragments(name))
            parts = {"drop": text[:start] + text[end:], "double": text[:end] + text[start:], "cut": text[:end]}
            text = parts.get(middle, text[:start] + middle + text[start:])
        return text

    return damage()
