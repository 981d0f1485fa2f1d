"""The laws that every reasoning format keeps, on text of its own markers. A new row is tested by being registered."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.events import ContentDelta, Event, ReasoningDelta
from serve.reasoning import REASONING_PARSERS
from serve.reasoning.blocks import ReasoningFormat
from tests.serve.tools.formats import merged
from tests.serve.tools.strategies import cuts

NAMES = sorted(REASONING_PARSERS)
PROMPTS = ["", "<|im_start|>assistant\n"]

every_format = pytest.mark.parametrize("name", NAMES)


def markers(row: ReasoningFormat) -> list[str]:
    return [*row.opens, *row.closes, *row.ends, *row.dropped, *filter(None, [row.label.strip()])]


def texts(name: str) -> st.SearchStrategy[str]:
    """Markers, whole and cut, newlines and text."""
    whole = markers(REASONING_PARSERS[name])
    cut = [each[:end] for each in whole for end in (1, len(each) // 2, len(each) - 1)] + [each[1:] for each in whole]
    pieces = (
        whole * 2
        + [each for each in cut if each]
        + ["\n", "\n\n", " ", "a", "<", "word. ", "日本", "😀", "|", "</th", "ink>"]
    )
    return st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=14).map("".join)


def prompts(name: str) -> st.SearchStrategy[str]:
    """A prompt that opens a block, one that closes it, one that says nothing, none."""
    row = REASONING_PARSERS[name]
    return st.sampled_from(
        [*PROMPTS, f"<|im_start|>assistant\n{row.opens[0]}\n", f"{row.opens[0]}\n{row.closes[0]}\n\n"]
    )


def stream(name: str, pieces: list[str] | str, prompt: str) -> list[Event]:
    parser = REASONING_PARSERS[name].parser(prompt)
    events = [event for piece in pieces for event in parser.feed(piece)] + list(parser.flush())
    assert not list(parser.flush())
    return events


@every_format
@given(data=st.data())
def test_no_split_matters(name: str, data: st.DataObject) -> None:
    text, prompt = data.draw(texts(name)), data.draw(prompts(name))
    events = stream(name, data.draw(cuts(text)), prompt)
    assert merged(events) == merged(stream(name, [text], prompt)) == merged(stream(name, text, prompt))
    assert all(event.text for event in events)


@every_format
@given(data=st.data())
def test_nothing_vanishes_but_markers_and_newlines(name: str, data: st.DataObject) -> None:
    text, prompt = data.draw(texts(name)), data.draw(prompts(name))
    row = REASONING_PARSERS[name]
    sent = "".join(part[-1] for part in merged(stream(name, [text], prompt)))
    assert without(row, sent) == without(row, text)


def without(row: ReasoningFormat, text: str) -> str:
    """Text without white space that may go with a marker, and without markers, also those that joining makes."""

    def bare(text: str) -> str:
        return "".join(char for char in text if char not in row.trimmed)

    found = sorted(map(bare, markers(row)), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, found)))
    text, before = bare(text), ""
    while text != before:
        text, before = pattern.sub("", text), text
    return text


@every_format
@given(data=st.data())
def test_span_is_where_the_reasoning_was(name: str, data: st.DataObject) -> None:
    text, prompt = data.draw(texts(name)), data.draw(prompts(name))
    row = REASONING_PARSERS[name]
    if row.keeps_tags:
        return
    parser = row.parser(prompt)
    events = [event for piece in data.draw(cuts(text)) for event in parser.feed(piece)] + list(parser.flush())
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    start, end = parser.span or (0, 0)
    assert end is not None and 0 <= start <= end <= len(text)
    label = row.label.strip()
    assert text[start:end].strip(row.trimmed).removeprefix(label).strip(row.trimmed) == reasoning.removeprefix(
        label
    ).strip(row.trimmed)


@every_format
def test_plain_text_passes_at_once(name: str) -> None:
    row = REASONING_PARSERS[name]
    for prompt, kind in ((f"{row.opens[0]}\n", ReasoningDelta), (f"{row.opens[0]}{row.closes[0]}", ContentDelta)):
        parser = row.parser(prompt)
        kind = ContentDelta if row.keeps_tags else kind
        first = (
            "Zürich"
            if not row.keeps_tags or kind is not ContentDelta or row.closes[0] in prompt
            else row.opens[0] + "Zürich"
        )
        assert list(parser.feed("Zürich")) == [kind(first)]
        assert list(parser.feed(" is nice.")) == [kind(" is nice.")]


@every_format
def test_only_a_proper_prefix_of_a_marker_waits(name: str) -> None:
    row = REASONING_PARSERS[name]
    for prompt, marker in ((f"{row.opens[0]}\n", row.closes[0]), ("<|im_start|>assistant\n", row.opens[0])):
        parser = row.parser(prompt)
        seen = [event for char in "Z" + marker[:-1] for event in parser.feed(char)] + list(parser.feed("\x00"))
        text = "".join(event.text for event in seen)
        assert text.removeprefix(row.opens[0] if row.keeps_tags else "") == "Z" + marker[:-1] + "\x00"
