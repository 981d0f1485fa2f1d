"""Stop strings and literal scanning: a naive reference, every split, hold-back no longer than needed, linear cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postproc_workers.stop_strings import MAX_CLEAR, MAX_STOPS, Literals, LiteralScanner, StopMatcher, StopStrings
from tests.postproc_workers.counting import calls

#: Parts of delimiters: drawn together they make near-misses, overlaps and stops inside each other.
FRAGMENTS = [
    "<", "</", "</s", "s>", "<|", "|>", "|", "a", "aa", "ab", "b", "END", "EN", "D.",
    "\n", "\n\nUser:", "。", "😀", "[",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
STOP = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4).map("".join)
STOPS = st.lists(STOP, min_size=1, max_size=MAX_STOPS)
PLACES = st.lists(st.integers(0, 60), max_size=8)


def first_to_complete(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """(end, stop): the smallest end at which a stop ends, and the longest stop that ends there."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, start, end)]
        if ending:
            return end, max(ending, key=len)
    return None


def longest_held(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that is a proper prefix of a stop."""
    ends = [text[i:] for i in range(len(text) + 1)]
    return next(end for end in ends if any(stop != end and stop.startswith(end) for stop in stops))


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def feed(matcher: StopMatcher, parts: Sequence[str]) -> tuple[str, int]:
    """(what was sent, place in the whole text behind the stop, or -1)."""
    sent, length, end = [], 0, -1
    for part in parts:
        before = matcher.matched
        sent.append(matcher.feed(part))
        if before is None and matcher.matched is not None:
            end = length + matcher.match_end
        length += len(part)
    return "".join([*sent, matcher.flush()]), end


@given(text=TEXTS, stops=STOPS, places=PLACES, include=st.booleans())
@example(text="caaabd", stops=["aab"], places=[1, 2, 3, 4, 5], include=False)
@example(text="abcd", stops=["abcd", "bc"], places=[1, 2, 3], include=False)
@example(text="xabc", stops=["c", "abc", "bc"], places=[], include=True)
def test_the_stop_that_completes_first_wins_for_every_split(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    compiled = StopStrings(stops, include=include)
    found = first_to_complete(text, stops)
    for parts in ([text], list(text), cut(text, places)):
        matcher = compiled.matcher()
        sent, end = feed(matcher, parts)
        if found is None:
            assert (sent, matcher.matched, matcher.match_end) == (text, None, 0)
        else:
            assert (end, matcher.matched) == found
            assert sent == text[: found[0]] if include else sent == text[: found[0] - len(found[1])]


@given(text=TEXTS, stops=STOPS, places=PLACES)
def test_only_a_proper_prefix_of_a_stop_is_held(text: str, stops: list[str], places: list[int]) -> None:
    matcher, seen, sent = StopStrings(stops).matcher(), "", ""
    for part in cut(text, places):
        sent += matcher.feed(part)
        seen += part
        if matcher.matched is not None:
            assert matcher.held == ""
            return
        assert matcher.held == longest_held(seen, stops)
        assert sent + matcher.held == seen


@given(text=TEXTS, stops=STOPS, places=PLACES, more=TEXTS)
def test_a_match_discards_the_rest_and_flush_is_final(
    text: str, stops: list[str], places: list[int], more: str
) -> None:
    matcher = StopStrings(stops).matcher()
    feed(matcher, cut(text, places))
    assert matcher.flush() == ""
    if matcher.matched is not None:
        stop = matcher.matched, matcher.match_end
        assert matcher.feed(more) == matcher.feed("") == matcher.flush() == ""
        assert (matcher.matched, matcher.match_end) == stop


def test_match_end_is_an_offset_in_the_last_text() -> None:
    matcher = StopStrings(["DEFGHIJ"]).matcher()
    assert [matcher.feed(part) for part in ("ABC", "DEF", "GHI")] == ["ABC", "", ""]
    assert matcher.feed("JKL") == "" and matcher.matched == "DEFGHIJ" and matcher.match_end == 1


@pytest.mark.parametrize("include", [False, True])
def test_a_text_without_a_first_character_is_returned_itself(include: bool) -> None:
    text = "nothing here"
    for stops in (["STOP"], ["STOP", "END"]):
        assert StopStrings(stops, include=include).matcher().feed(text) is text


@given(text=TEXTS, more=TEXTS, stops=STOPS)
def test_what_passes_would_have_been_returned_as_it_is(text: str, more: str, stops: list[str]) -> None:
    matcher, other = StopStrings(stops).matcher(), StopStrings(stops).matcher()
    matcher.feed(text)
    other.feed(text)
    for _ in range(2):  # the second time from memory
        if matcher.passes(more):
            assert other.feed(more) == more and (other.held, other.matched) == ("", None)
        else:
            assert matcher.held or matcher.matched is not None or any(stop[0] in more for stop in stops)


def test_what_is_remembered_of_texts_is_bounded() -> None:
    stops = StopStrings(["<stop>", "never"])
    matcher = stops.matcher()
    for number in range(MAX_CLEAR + 100):
        assert matcher.passes(str(number)) and matcher.feed(str(number)) == str(number)
    assert matcher.passes("x" * 99) and len(stops.literals.clear) == MAX_CLEAR
    assert not matcher.passes("<") and matcher.feed("<") == "" and not matcher.passes("1")


def test_equal_stops_are_compiled_once_unless_they_are_long() -> None:
    assert StopStrings(["a", "b"]).literals is StopStrings(("a", "b"), include=True).literals
    assert StopStrings(["a", "b"]).literals is not StopStrings(["b", "a"]).literals
    assert StopStrings(["x" * 300]).literals is not StopStrings(["x" * 300]).literals


@pytest.mark.parametrize("stops", [[], [""], ["a", ""], ["x"] * (MAX_STOPS + 1)])
def test_bad_stops_are_refused_by_name(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="^stop: "):
        StopStrings(stops)


def test_every_character_may_begin_a_stop() -> None:
    for char in "]^-\\[.*$|()\x00\n\U0001f600\ud800":
        for stops in ([char], [char, "zz", "-"]):
            matcher = StopStrings(stops).matcher()
            assert matcher.feed(f"q{char}r") == "q" and matcher.matched == char


def test_stops_of_different_outputs_do_not_meet() -> None:
    stops = StopStrings(["STOP"])
    one, two = stops.matcher(), stops.matcher()
    assert (one.feed("ST"), two.feed("OP"), one.feed("OP")) == ("", "OP", "")
    assert (one.matched, two.matched) == ("STOP", None)


# ------------------------------------------------------------------------------------------------ literals


def cut_at_literals(text: str, literals: Sequence[str]) -> list[tuple[str, str | None]]:
    parts: list[tuple[str, str | None]] = []
    start = 0
    while (found := first_to_complete(text, literals, start)) is not None:
        end, literal = found
        parts.append((text[start : end - len(literal)], literal))
        start = end
    return [*parts, (text[start:], None)] if text[start:] else parts


def merged(parts: Sequence[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Text parts without a literal joined to the part that follows them."""
    result: list[tuple[str, str | None]] = []
    for text, literal in parts:
        if result and result[-1][1] is None:
            text = result.pop()[0] + text
        result.append((text, literal))
    return result


@given(text=TEXTS, literals=STOPS, places=PLACES)
@example(text="aaa", literals=["aa"], places=[1, 2])
@example(text=" .  .", literals=[" ."], places=[1, 2, 3, 4])
def test_a_scanner_cuts_at_every_literal_for_every_split(text: str, literals: list[str], places: list[int]) -> None:
    compiled, wanted = Literals(literals), cut_at_literals(text, literals)
    for parts in ([text], list(text), cut(text, places)):
        scanner = LiteralScanner(compiled)
        found = [pair for part in parts for pair in scanner.feed(part)]
        assert ("", None) not in found
        tail = scanner.flush()
        assert merged([*found, (tail, None)] if tail else found) == merged(wanted)
        assert scanner.flush() == scanner.held == ""


@given(text=TEXTS, literals=STOPS, places=PLACES)
def test_a_scanner_holds_only_a_proper_prefix(text: str, literals: list[str], places: list[int]) -> None:
    scanner, seen, given_out, last_end = LiteralScanner(literals), "", 0, 0
    for part in cut(text, places):
        seen += part
        for before, literal in scanner.feed(part):
            given_out += len(before) + len(literal or "")
            last_end = given_out if literal else last_end
        assert scanner.held == longest_held(seen[last_end:], literals)
        assert given_out + len(scanner.held) == len(seen)


@given(text=st.text(alphabet="ab ", max_size=30), old=st.text(alphabet="ab ", min_size=1, max_size=3), places=PLACES)
def test_one_literal_is_found_where_replace_finds_it(text: str, old: str, places: list[int]) -> None:
    scanner = LiteralScanner([old])
    parts = [pair for part in cut(text, places) for pair in scanner.feed(part)]
    replaced = "".join([before + ("X" if literal else "") for before, literal in parts])
    assert replaced + scanner.flush() == text.replace(old, "X")


@pytest.mark.parametrize("literals", [[], [""], ["a", ""]])
def test_bad_literals_are_refused(literals: list[str]) -> None:
    with pytest.raises(ValueError, match="literal"):
        Literals(literals)


# ------------------------------------------------------------------------------------------------ cost


@pytest.mark.parametrize("stops", [["aaaab"], ["a" * 400 + "b"], ["aab", "aaaac", "ab" * 30 + "c"], ["\n\n", "</s>"]])
@pytest.mark.parametrize("text", ["a" * 3000, "ab" * 1500, "aaac" * 750, "x" * 3000, "\nx" * 1500])
@pytest.mark.parametrize("every", [1, 7, 3000])
def test_near_misses_cost_a_constant_number_of_moves_a_character(stops: list[str], text: str, every: int) -> None:
    matcher = StopStrings(stops).matcher()
    parts = [text[i : i + every] for i in range(0, len(text), every)]
    assert calls(lambda: [matcher.feed(part) for part in parts]) <= 6 * len(text) + 12 * len(parts) + 20
