"""What the tests know of the formats: how a call is written in each, and what a stream merges to.

``render`` writes calls from a row's own data, by its shape: a new row of a known shape is tested by being registered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve.events import ContentDelta, Event, Folded, ReasoningDelta
from serve.tools import TOOL_PARSERS
from serve.tools.calls import Calls
from serve.tools.gemma import DELIMITER, GemmaFormat
from serve.tools.json_objects import JsonFormat
from serve.tools.key_value_tags import PairFormat
from serve.tools.name_then_json import NamedFormat
from serve.tools.pythonic import PythonicFormat
from serve.tools.xml_parameters import XmlFormat

Call = tuple[str, dict[str, Any]]


def tool(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """A declaration as in an OpenAI body."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def declare(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Declarations that type the arguments of ``calls`` as they are."""
    return [tool(name, **{key: {"type": json_type(value)} for key, value in args.items()}) for name, args in calls]


def json_type(value: Any) -> str:
    """The JSON schema type of a value."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


# ------------------------------------------------------------------ streams


def stream(name: str, pieces: Iterable[str], tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> list[Event]:
    """The events of a stream that comes in these pieces."""
    row = TOOL_PARSERS[name]
    parser = row.parser(Calls(tools, seed="test", ids=row.ids, **options))
    events = [event for piece in pieces for event in parser.feed(piece)] + list(parser.flush())
    assert not list(parser.flush())
    return events


def fold(events: Iterable[Event]) -> Folded:
    """What a unary response says."""
    folded = Folded()
    for event in events:
        folded.add(event)
    return folded


def result(
    name: str, text: str, tools: Sequence[Mapping[str, Any]] = (), step: int = 1
) -> tuple[str, list[tuple[str, str]]]:
    """(content, [(name, argument text)]) of a text that comes ``step`` characters at a time."""
    folded = fold(stream(name, [text[i : i + step] for i in range(0, len(text), step)], tools))
    return "".join(folded.content), [(call.name, "".join(call.arguments)) for call in folded.tool_calls]


def merged(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """The events with neighbours of one kind joined: what every split must agree in."""
    out: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, ContentDelta | ReasoningDelta):
            kind, text = (type(event).__name__,), event.text
        else:
            kind, text = ("arguments", event.index), event.arguments
            if event.id is not None:
                out.append(("call", event.index, event.id, event.name))
        if text and out and out[-1][:-1] == kind:
            out[-1] = (*kind, out[-1][-1] + text)
        elif text:
            out.append((*kind, text))
    return out


# ------------------------------------------------------------------ how a format writes calls


def render(row: Any, calls: Sequence[Call]) -> str:
    """``calls`` as a model of the row's family writes them."""
    if isinstance(row, PairFormat):
        return "\n".join(_pairs(row, *call) for call in calls)
    shapes = {
        JsonFormat: _objects,
        NamedFormat: _named,
        XmlFormat: _xml,
        PythonicFormat: _pythonic,
        GemmaFormat: _gemma,
    }
    return shapes[type(row)](row, calls)


def _objects(row: JsonFormat, calls: Sequence[Call]) -> str:
    objects = [json.dumps({"name": name, "arguments": args}, ensure_ascii=False) for name, args in calls]
    openers = [each for each in row.markers.openers if each not in row.bare]
    if not openers and "[" not in row.bare:
        return "; ".join(objects)
    opener = openers[0] if openers else ""
    return f"{opener}[{', '.join(objects)}]{''.join(row.markers.closers[:1])}"


def _named(row: NamedFormat, calls: Sequence[Call]) -> str:
    opener = next(each for each in row.markers.openers if each not in row.sections)
    ends = row.markers.closers
    parts = [
        f"{opener}{row.label}{_header(row, name, index)}{separator_of(row)}{json.dumps(args, ensure_ascii=False)}"
        f"{chr(10) + row.tail if row.tail else ''}{ends[0] if ends else ''}"
        for index, (name, args) in enumerate(calls)
    ]
    return "".join(row.sections[:1]) + "\n".join(parts) + "".join(ends[-1:])


def _header(row: NamedFormat, name: str, index: int) -> str:
    return f"functions.{name}:{index}" if "index" in row.header.groupindex else name


def separator_of(row: NamedFormat) -> str:
    """What ends the header, as the template writes it."""
    return f"\n{row.separators[0]}\n" if row.tail else row.separators[0]


def xml_value(value: Any) -> str:
    """A value as literal text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _xml(row: XmlFormat, calls: Sequence[Call]) -> str:
    openers = [each for each in row.markers.openers if each != row.call]
    line = "\n" if row.newlines else ""
    parts = []
    for name, args in calls:
        inner = "".join(
            f"{row.parameter}{key}{_kind(row, value)}{line}{xml_value(value)}{line}{row.value_end}\n"
            for key, value in args.items()
        )
        parts.append(f"{row.call}{name}{row.name_end}\n{inner}{row.call_end}")
    return openers[0] + "\n" + "\n".join(parts) + "\n" + "".join(row.markers.closers[-1:])


def _kind(row: XmlFormat, value: Any) -> str:
    return f'" string="{str(isinstance(value, str)).lower()}">' if row.kinds else row.name_end


def _pairs(row: PairFormat, name: str, args: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"{row.parameter}{key}{row.key_end}\n{row.value}{xml_value(value)}{row.value_end}\n"
        for key, value in args.items()
    )
    return f"{row.call}{name}\n{pairs}{row.call_end}"


def _pythonic(row: PythonicFormat, calls: Sequence[Call]) -> str:
    texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    body = "\n".join(texts) if row.lines else f"[{', '.join(texts)}]"
    opener = row.markers.openers[-1]
    return opener + body + row.markers.closers[-1]


def _gemma(row: GemmaFormat, calls: Sequence[Call]) -> str:
    return "".join(
        f"{row.markers.openers[0]}{row.label}{name}{_gemma_value(args)}{row.markers.closers[0]}" for name, args in calls
    )


def _gemma_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return DELIMITER + value + DELIMITER if isinstance(value, str) else json.dumps(value)
