"""The laws that every tool format keeps, on text that is mostly markup. A new row is tested by being registered."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.events import ContentDelta, Event, ToolCallDelta
from serve.tools import TOOL_PARSERS
from serve.tools.calls import Calls
from serve.tools.reader import MAX_AHEAD, MAX_BLANKS
from tests.serve.tools.formats import declare, fold, merged, render, result, stream, tool
from tests.serve.tools.strategies import NAMES, calls, cuts, damaged, soups

TOOLS = [tool("f", k={"type": "string"}, n={"type": "integer"}, o={"type": "object"}, u={"type": ["string", "null"]})]

every_format = pytest.mark.parametrize("name", NAMES)


def content(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def check_stream(name: str, text: str, pieces: list[str]) -> None:
    """All laws of one text in one division."""
    events = stream(name, pieces, TOOLS)
    assert merged(events) == merged(stream(name, [text], TOOLS)) == merged(stream(name, text, TOOLS))
    assert_conserved(name, text, events)
    assert_shape(events)


def assert_conserved(name: str, text: str, events: list[Event]) -> None:
    """Without a call content is the text; with one it is what is left of it, in order."""
    characters = iter(text)
    assert all(char in characters for char in content(events))
    if not any(isinstance(event, ToolCallDelta) for event in events):
        expected = text
        for dropped in TOOL_PARSERS[name].markers.dropped:
            expected = expected.replace(dropped, "")
        assert content(events) == expected or TOOL_PARSERS[name].markers.dropped


def assert_shape(events: list[Event]) -> None:
    """First delta of an index with id and name and no text, later ones text alone; nothing empty; ids are unique."""
    seen: list[str] = []
    for event in events:
        if isinstance(event, ToolCallDelta) and event.id is not None:
            assert event.index == len(seen) and event.name and event.arguments == "" and event.id not in seen
            seen.append(event.id)
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(seen) - 1 and event.name is None and event.arguments
        else:
            assert event.text


@every_format
@given(data=st.data())
def test_soup_of_markers(name: str, data: st.DataObject) -> None:
    text = data.draw(soups(name))
    check_stream(name, text, data.draw(cuts(text)))


@every_format
@given(data=st.data())
def test_damaged_calls(name: str, data: st.DataObject) -> None:
    text = data.draw(damaged(name))
    check_stream(name, text, data.draw(cuts(text)))


@every_format
@given(data=st.data())
def test_calls_come_out_as_they_were_meant(name: str, data: st.DataObject) -> None:
    wanted = data.draw(calls(name))
    text = render(TOOL_PARSERS[name], wanted)
    folded = fold(stream(name, data.draw(cuts(text)), declare(wanted)))
    assert [(call.name, json.loads("".join(call.arguments))) for call in folded.tool_calls] == wanted
    assert "".join(folded.content) == ""


@every_format
@given(data=st.data())
def test_a_cut_off_stream_begins_like_the_whole_one(name: str, data: st.DataObject) -> None:
    """What was sent is never taken back: the deltas up to a cut are a beginning of the deltas of the whole text."""
    wanted = data.draw(calls(name))
    text = "Well. " + render(TOOL_PARSERS[name], wanted)
    end = data.draw(st.integers(0, len(text)))
    row = TOOL_PARSERS[name]
    parser = row.parser(Calls(declare(wanted), seed="test", ids=row.ids))
    before = merged([event for char in text[:end] for event in parser.feed(char)])
    whole = merged(stream(name, text, declare(wanted)))
    if before:
        assert before[:-1] == whole[: len(before) - 1]
        assert whole[len(before) - 1][:-1] == before[-1][:-1]
        assert str(whole[len(before) - 1][-1]).startswith(str(before[-1][-1]))


# ------------------------------------------------------------------ hold-back


@every_format
def test_plain_text_passes_at_once(name: str) -> None:
    parser = TOOL_PARSERS[name].parser(Calls())
    for piece in ("Zürich", " ", "is\n", "\n\n", "nice", ".", "  "):
        assert list(parser.feed(piece)) == [ContentDelta(piece)]


@every_format
def test_only_a_proper_prefix_of_a_marker_waits(name: str) -> None:
    for opener in TOOL_PARSERS[name].markers.openers:
        parser = TOOL_PARSERS[name].parser(Calls())
        seen = content(list(parser.feed("Z")))
        for char in opener[:-1]:
            seen += content(list(parser.feed(char)))
        assert seen + content(list(parser.feed("\x00"))) == "Z" + opener[:-1] + "\x00"


@every_format
def test_arguments_stream_as_they_are_generated(name: str) -> None:
    value = "abcdefgh" * 8
    row = TOOL_PARSERS[name]
    head, _, rest = render(row, [("f", {"k": value})]).partition(value)
    parser = row.parser(Calls(TOOLS, ids=row.ids))
    sent = "".join(event.arguments for event in parser.feed(head) if isinstance(event, ToolCallDelta))
    for number, char in enumerate(value):
        sent += "".join(event.arguments for event in parser.feed(char) if isinstance(event, ToolCallDelta))
        assert sent.endswith(value[: number + 1])
    parser.feed(rest)


@every_format
@pytest.mark.parametrize("filler", [" ", "a", "'", '"', "{", "[", "f(", "1", "\\", "<", '{"arguments":'])
def test_what_stays_unread_is_bounded(name: str, filler: str) -> None:
    """Nothing is looked at twice but a short end: so the cost is linear in the length of the text."""
    row = TOOL_PARSERS[name]
    bound = 2 * (MAX_BLANKS + MAX_AHEAD) + max(map(len, row.markers.openers + row.markers.closers))
    for before in (
        row.markers.openers[0],
        render(row, [("f", {"k": "v"})]).partition("v")[0],
        render(row, [("f", {})]),
    ):
        parser = row.parser(Calls(TOOLS))
        for char in before + filler * 200:
            parser.feed(char)
            assert len(parser.reader.text) - parser.reader.at <= bound


# ------------------------------------------------------------------ what all formats agree in


@every_format
def test_no_arguments(name: str) -> None:
    assert result(name, render(TOOL_PARSERS[name], [("ping", {})])) == ("", [("ping", "{}")])


@every_format
def test_a_tool_that_was_not_declared_is_called_all_the_same(name: str) -> None:
    text = render(TOOL_PARSERS[name], [("launch", {"code": 42})])
    seen, [(function, arguments)] = result(name, text, TOOLS)
    assert (seen, function, json.loads(arguments)) == ("", "launch", {"code": 42})


@every_format
def test_text_around_calls(name: str) -> None:
    text = render(TOOL_PARSERS[name], [("ping", {}), ("ping", {"k": "v"})])
    seen, found = result(name, f"Checking;{text}done.", [tool("ping", k={"type": "string"})])
    assert seen == "Checking;done."
    assert [(function, json.loads(arguments)) for function, arguments in found] == [("ping", {}), ("ping", {"k": "v"})]


@every_format
def test_white_space_around_calls_alone_is_no_content(name: str) -> None:
    assert result(name, f"\n {render(TOOL_PARSERS[name], [('ping', {})])}\n\n") == ("", [("ping", "{}")])


@every_format
def test_a_call_that_is_cut_off_keeps_its_text(name: str) -> None:
    text = render(TOOL_PARSERS[name], [("f", {"k": "San Francisco"})]).partition("ancisco")[0]
    seen, [(function, arguments)] = result(name, text, TOOLS)
    assert (seen, function) == ("", "f") and arguments.endswith("San Fr")
    with pytest.raises(ValueError):
        json.loads(arguments)


@every_format
def test_ids_derive_from_the_request_alone(name: str) -> None:
    text = render(TOOL_PARSERS[name], [("ping", {}), ("ping", {})])

    def ids(seed: str) -> list[str]:
        row = TOOL_PARSERS[name]
        parser = row.parser(Calls(seed=seed, ids=row.ids))
        return [call.id for call in fold([*parser.feed(text), *parser.flush()]).tool_calls]

    assert ids("a/0") == ids("a/0") and len(set(ids("a/0"))) == 2
    assert ids("a/0") != ids("a/1") or name == "kimi_k2"


@every_format
def test_without_parallel_calls_the_first_one_counts(name: str) -> None:
    text = "One;" + render(TOOL_PARSERS[name], [("ping", {"k": "a"}), ("f", {"k": "b"})]) + "two."
    folded = fold(stream(name, text, [*TOOLS, tool("ping")], parallel=False))
    assert [(call.name, json.loads("".join(call.arguments))) for call in folded.tool_calls] == [("ping", {"k": "a"})]
    assert "".join(folded.content) == "One;two."
