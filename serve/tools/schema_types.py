"""Text of an XML-style argument -> JSON, by the type that the tool's declaration gives the parameter.

The model writes ``7``; only the schema says whether that is a number or a string. Where several types are allowed the
narrowest that the text fits wins and a string comes last. Where none is declared only what cannot be meant otherwise
is taken for anything but a string: ``true``, ``12``, ``[1]``, but not ``02139`` or ``1e5``.

A string need not wait for its end: as soon as the text cannot be anything else it streams (``may_be_typed``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from serve.tools.json_text import quoted
from serve.tools.pythonic import literal_json

Types = frozenset[str]

STRING: Types = frozenset({"string"})
ANY: Types = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})

#: A property's JSON schema -> its types; only these words of a schema are read.
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "list": "array", "none": "null",
}  # fmt: skip
_CHOICES = ("anyOf", "oneOf", "allOf")

_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_LOOSE_INTEGER = re.compile(r"[+-]?\d+(?:\.0*)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
#: Integers that a double cannot hold, such as the ids of other systems, stay text unless the schema says otherwise.
_SAFE_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?")
_NUMBER_BEGUN = re.compile(r"[+-]?[\d.eE+-]{0,64}")
_WORDS = ("true", "false", "null", "none")

#: $refs and nested choices deeper than this are not followed: a schema may refer to itself.
_MAX_DEPTH = 8


def types_of(function: Mapping[str, Any], parameter: str) -> Types | None:
    """The types that a tool's declaration allows for a parameter; None if it says nothing of it."""
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    prop = properties.get(parameter) if isinstance(properties, Mapping) else None
    found = frozenset(_types(prop, schema, 0)) if isinstance(prop, Mapping) else frozenset()
    return found or None


def _types(schema: Any, root: Any, depth: int) -> Iterable[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    declared = schema.get("type")
    for each in [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else ():
        if isinstance(each, str) and _ALIASES.get(each.lower(), each.lower()) in ANY:
            yield _ALIASES.get(each.lower(), each.lower())
    if declared is None:
        yield from _implied(schema)
    for word in _CHOICES:
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            yield from _types(choice, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolve(reference, root), root, depth + 1)


def _implied(schema: Mapping[str, Any]) -> Iterable[str]:
    """Types that a schema without ``type`` implies: by its values, or by words that only one type has."""
    values = schema.get("enum")
    for value in values if isinstance(values, list) else ():
        yield _type_of(value)
    if "const" in schema:
        yield _type_of(schema["const"])
    if "properties" in schema:
        yield "object"
    if "items" in schema:
        yield "array"


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _resolve(reference: str, root: Any) -> Any:
    """What a local reference like ``#/$defs/Unit`` points to."""
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


# ------------------------------------------------------------------ text -> JSON


def may_be_typed(text: str, types: Types) -> bool:
    """Whether text that begins with ``text``, without white space around, may still become anything but a string."""
    if types == STRING:
        return False
    if not text:
        return True
    if text[0] in "{[":
        return "object" in types or "array" in types
    if text[0] in "+-.0123456789":
        return bool(types & {"integer", "number", "boolean"}) and _NUMBER_BEGUN.fullmatch(text) is not None
    return bool(types & {"boolean", "null"}) and any(word.startswith(text.lower()) for word in _WORDS)


def typed_json(text: str, types: Types | None) -> str:
    """The JSON text of an argument; a string of the whole text where no declared type fits it."""
    word = text.strip()
    if types is None:
        return _inferred(word) or quoted(text)
    return _converted(word, types) or quoted(text)


def _inferred(word: str) -> str | None:
    if word in ("true", "false", "null") or _SAFE_NUMBER.fullmatch(word):
        return word
    return _container(word) if word[:1] in ("{", "[") else None


def _converted(word: str, types: Types) -> str | None:
    lower = word.lower()
    if "null" in types and lower == "null" or lower == "none" and "null" in types and "string" not in types:
        return "null"
    if (number := _number(word, types)) is not None:
        return number
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if types == {"boolean"} and word in ("0", "1"):
        return "true" if word == "1" else "false"
    if word[:1] == "{" and "object" in types or word[:1] == "[" and "array" in types:
        return _container(word)
    return None


def _number(word: str, types: Types) -> str | None:
    """Valid JSON stays as it is written. ``+5``, ``007``, ``.5`` are taken where no string is allowed."""
    if not types & {"integer", "number"} or _NUMBER_BEGUN.fullmatch(word) and "e" in word.lower() and _is_huge(word):
        return None
    if _INTEGER.fullmatch(word) or "number" in types and _NUMBER.fullmatch(word):
        return word
    if "string" in types:
        return None
    if _LOOSE_INTEGER.fullmatch(word) and ("integer" in types or "." not in word):
        return _plain_integer(word)
    if "number" in types and _LOOSE_NUMBER.fullmatch(word):
        return repr(float(word))
    return None


def _is_huge(word: str) -> bool:
    """Whether a float cannot hold it: infinity is no JSON."""
    try:
        return float(word) in (float("inf"), float("-inf"))
    except ValueError:
        return False


def _plain_integer(word: str) -> str:
    digits = word.split(".")[0].lstrip("+-").lstrip("0") or "0"
    return "-" + digits if word.startswith("-") and digits != "0" else digits


def _container(word: str) -> str | None:
    """The text itself if it is a JSON object or array; a Python dict or list as JSON; None if it is neither."""
    try:
        orjson.loads(word)
    except orjson.JSONDecodeError:
        found = literal_json(word)
        return found if found is not None and found[0] == word[0] else None
    return word
