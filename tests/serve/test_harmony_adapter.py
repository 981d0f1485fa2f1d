"""Harmony on token ids, through a worker: what a frame means, whole or broken, and laws for every sequence of ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postproc_workers.hook import Emit, Replace, Suppress
from postproc_workers.vocabulary import Vocabulary
from tests.helpers import CHAT
from tests.recordings.checker import Choice, merge_document, merge_stream
from tests.serve.harmony import MARKS, STRANGE, chat, encode, every_cut, play, play_steps, rows, spec, spell, vocabulary

THINK = "<|channel|>analysis<|message|>Hm.<|end|>"
NEXT = "<|start|>assistant"

Said = tuple[str, str, list[tuple[str, str]]]


def said(choice: Choice) -> Said:
    """(reasoning, content, calls)"""
    return choice.reasoning, choice.content, [(call["name"], call["arguments"]) for call in choice.tool_calls]


def check(text: str, wanted: Said, finish: str = "stop", **request: Any) -> None:
    """Every cut of a stream, and the unary body, say what is wanted."""
    ids = encode(text)
    called = finish == "stop" and wanted[2] and not isinstance(request.get("tool_choice"), dict)
    ended = "tool_calls" if called else finish
    for cuts in every_cut(len(ids)):
        choice = chat(ids, cuts, finish, **request).choices[0]
        assert (said(choice), choice.finish_reason) == (wanted, ended), cuts
    unary = chat(ids, (), finish, stream=False, **request).choices[0]
    assert (said(unary), unary.finish_reason) == (wanted, ended)


WELL_FORMED: dict[str, tuple[str, Said]] = {
    "final": ("<|channel|>final<|message|>Hello — 你好 😀<|return|>", ("", "Hello — 你好 😀", [])),
    "analysis, then final": (f"{THINK}{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
    "a call": (
        f'{THINK}{NEXT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{{"a": 1}}<|call|>',
        ("Hm.", "", [("get_weather", '{"a": 1}')]),
    ),
    "recipient in the role": (
        f'{THINK}{NEXT} to=functions.search<|channel|>commentary <|constrain|>json<|message|>{{"a": "|"}}<|call|>',
        ("Hm.", "", [("search", '{"a": "|"}')]),
    ),
    "recipient in the prompt's role": (
        " to=functions.search<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("search", "{}")])
    ),
    "no constrain": ("<|channel|>commentary to=functions.ping json<|message|>{}<|call|>", ("", "", [("ping", "{}")])),
    "no type": ("<|channel|>commentary to=functions.ping<|message|>{}<|call|>", ("", "", [("ping", "{}")])),
    "preamble": (
        f"<|channel|>commentary<|message|>So.<|end|>{NEXT}"
        "<|channel|>commentary to=functions.ping<|message|>{}<|call|>",
        ("", "So.", [("ping", "{}")]),
    ),
    "two calls, then text": (
        f"<|channel|>commentary to=functions.ping<|message|>{{}}<|end|>{NEXT}<|channel|>commentary to=functions.search"
        f'<|message|>{{"q": "é"}}<|end|>{NEXT}<|channel|>final<|message|>Done.<|return|>',
        ("", "Done.", [("ping", "{}"), ("search", '{"q": "é"}')]),
    ),
    "analysis twice": (
        f"{THINK}{NEXT}{THINK}{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("Hm.Hm.", "Hi.", [])
    ),
    "a call without arguments": (
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|><|call|>", ("", "", [("ping", "{}")])
    ),
    "a constrained answer": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', ("", '{"a": 1}', [])),
    "a call from analysis": (
        "<|channel|>analysis to=functions.ping json<|message|>{}<|call|>", ("", "", [("ping", "{}")])
    ),
    "a tool of its own": ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ("print(1)", "", [])),
    "another tool": (
        "<|channel|>commentary to=browser.search json<|message|>{}<|call|>", ("", "", [("browser.search", "{}")])
    ),
    "a declared tool, barely named": ("<|channel|>final to=search<|message|>{}<|call|>", ("", "", [("search", "{}")])),
    "marks spelled with ordinary tokens in an argument": (
        '<|channel|>commentary to=functions.search<|message|>{"q": "<|"}<|call|>', ("", "", [("search", '{"q": "<|"}')])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_FORMED)
def test_a_well_formed_frame(name: str) -> None:
    check(*WELL_FORMED[name])


BROKEN: dict[str, tuple[str, Said]] = {
    "no frame at all": ("Plain answer: 1 < 2.", ("", "Plain answer: 1 < 2.", [])),
    "no frame, a header's words": ("final answer of the analysis", ("", "final answer of the analysis", [])),
    "nothing but a header's word": ("final<|return|>", ("", "final", [])),
    "nothing": ("<|return|>", ("", "", [])),
    "no start": (f"{THINK}<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
    "no start, but the role": (f"{THINK}assistant<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
    "no start and no channel mark": (
        f"{THINK}commentary to=functions.ping <|constrain|>json<|message|>{{}}<|call|>", ("Hm.", "", [("ping", "{}")])
    ),
    "no channel mark": (f"{THINK}{NEXT}final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
    "no channel": (f"{THINK}{NEXT}<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
    "no message mark": ("<|channel|>analysisThe user asks.<|end|>", ("The user asks.", "", [])),
    "no message mark behind a space": ("<|channel|>final Hello you.<|return|>", ("", "Hello you.", [])),
    "no message mark in a call": (
        '<|channel|>commentary to=functions.search json{"q": 1}<|call|>', ("", "", [("search", '{"q": 1}')])
    ),
    "no message mark, no type": (
        '<|channel|>commentary to=functions.search{"q": 1}<|call|>', ("", "", [("search", '{"q": 1}')])
    ),
    "no space before the type": (
        "<|channel|>commentary to=functions.searchjson<|message|>{}<|call|>", ("", "", [("search", "{}")])
    ),
    "no message in a call": ("<|channel|>commentary to=functions.ping<|call|>", ("", "", [("ping", "{}")])),
    "no end before a channel": (
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])
    ),
    "no end before a start": (
        f"<|channel|>analysis<|message|>Hm.{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])
    ),
    "no end behind a call": (
        f"<|channel|>commentary to=functions.ping<|message|>{{}}{NEXT}<|channel|>final<|message|>Hi.<|return|>",
        ("", "Hi.", [("ping", "{}")]),
    ),
    "text behind a message": (f"{THINK}Hi there.<|return|>", ("Hm.", "Hi there.", [])),
    "white space behind a message": (f"{THINK}\n\n{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
    "a message in a message": ("<|channel|>final<|message|>a<|message|>b<|return|>", ("", "ab", [])),
    "a channel in a channel": ("<|channel|>analysis<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "a channel behind a recipient": (
        "<|channel|>commentary to=functions.ping<|channel|>commentary<|message|>{}<|call|>", ("", "", [("ping", "{}")])
    ),
    "constrain in a body": (
        '<|channel|>commentary to=functions.search<|message|><|constrain|>json<|message|>{"q": 1}<|call|>',
        ("", "", [("search", '{"q": 1}')]),
    ),
    "constrain inside a text": ("<|channel|>final<|message|>a<|constrain|>b<|return|>", ("", "ab", [])),
    "start again and again": (f"{NEXT}<|start|>{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "an unknown channel": ("<|channel|>thoughts<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "an unknown channel and no message": ("<|channel|>thoughts<|return|>", ("", "thoughts", [])),
    "an unknown role": ("<|start|>Hello, you.<|return|>", ("", "Hello, you.", [])),
    "the user's turn": (f"<|start|>user<|message|>Hm?<|end|>{NEXT}<|channel|>final<|message|>Hi.", ("", "Hm?Hi.", [])),
    "strange marks": (
        "<|channel|>final<|message|>Use <|reserved_200009|>one<|startoftext|> two<|endoftext|>", ("", "Use one two", [])
    ),
    "a recipient that is nobody": ("<|channel|>commentary to=<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "a function without a name": ("<|channel|>commentary to=functions.<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "marks in all the wrong places": ("<|message|><|constrain|><|end|><|call|><|channel|><|start|>", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_frame_loses_nothing_and_leaks_nothing(name: str) -> None:
    check(*BROKEN[name])


@pytest.mark.parametrize("cut", range(60))
def test_a_truncated_stream_keeps_its_text_and_leaks_no_header(cut: int) -> None:
    call = f"{NEXT}<|channel|>commentary to=functions.search <|constrain|>json<|message|>{{!"
    whole = encode(f"{THINK}{NEXT}<|channel|>commentary<|message|>So.<|end|>{call}")
    ids = whole[:cut]
    wanted = said(chat(whole, (), "length").choices[0])
    for cuts in every_cut(len(ids)) if ids else [[]]:
        choice = chat(ids, cuts, "length").choices[0]
        assert choice.finish_reason == "length"
        reasoning, content, calls = said(choice)
        assert wanted[0].startswith(reasoning) and wanted[1].startswith(content)
        assert all(name == "search" and "{!".startswith(arguments) for name, arguments in calls)


def test_a_call_that_was_cut_off_is_not_completed() -> None:
    head = "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
    check(head, ("", "", [("search", "")]), "length")
    check(head + '{"q": "a', ("", "", [("search", '{"q": "a')]), "length")


def test_marks_written_with_ordinary_tokens_are_text() -> None:
    ids = [*encode("<|channel|>final<|message|>Say "), *spell(b"<|end|>"), *encode(" now.<|return|>")]
    for cuts in every_cut(len(ids)):
        assert chat(ids, cuts).choices[0].content == "Say <|end|> now."


def test_characters_are_whole_and_what_a_mark_cuts_off_stays_on_its_side() -> None:
    face = "😀".encode()
    ids = encode("<|channel|>final<|message|>a") + spell(face[:2])
    ids += encode(f"<|end|>{NEXT}<|channel|>final<|message|>b") + spell(face) + encode("<|return|>")
    for cuts in every_cut(len(ids)):
        assert chat(ids, cuts).choices[0].content == "a\N{REPLACEMENT CHARACTER}b😀"


@pytest.mark.parametrize("name", [*WELL_FORMED, *BROKEN])
def test_marks_need_not_be_special_tokens(name: str) -> None:
    text, wanted = (WELL_FORMED | BROKEN)[name]
    ids = encode(text)
    for cuts in every_cut(len(ids)):
        for request in ({}, {"stop": ["d|>zzz", "nal<|mz"]}):
            assert said(chat(ids, cuts, words=vocabulary(special=False), **request).choices[0]) == wanted, cuts


def test_ids_that_are_characters_are_read_as_text() -> None:
    text, wanted = WELL_FORMED["a call"]
    steps = rows([ord(char) for char in text], range(1, len(text)), "length")
    for stream, merge in ((True, merge_stream), (False, merge_document)):
        body = play(spec(stream=stream), steps, words=Vocabulary.text())
        assert said(merge(body, CHAT).choices[0]) == wanted


# ---------------------------------------------------------------------------------------------------- the request


@pytest.mark.parametrize(
    ("prompt", "text", "wanted"),
    [
        ("<|start|>assistant<|channel|>final<|message|>He", "llo.<|return|>", ("", "llo.", [])),
        (f"{NEXT}<|channel|>analysis<|message|>", f"A.<|end|>{NEXT}<|channel|>final<|message|>Hi.", ("A.", "Hi.", [])),
        (f"{NEXT}<|channel|>", "analysis<|message|>Hm.<|end|>", ("Hm.", "", [])),
        (f"{NEXT} to=functions.f<|channel|>commentary<|message|>{{", '"q": 1}<|call|>', ("", "", [("f", '"q": 1}')])),
        ("<|start|>user<|message|>Hi<|end|>", f"{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
        ("no marks in this tail", "<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
    ],
)  # fmt: skip
def test_the_prompt_decides_where_the_output_begins(prompt: str, text: str, wanted: Said) -> None:
    check(text, wanted, prompt=prompt)


def test_calls_are_made_only_where_they_are_wanted() -> None:
    text = "<|channel|>commentary to=functions.ping<|message|>{}<|call|>"
    check(text, ("", "{}", []), tool_choice="none")
    check(text, ("", "{}", []), tools=[])
    check(text, ("", "", [("ping", "{}")]), tool_choice="required")
    check(text, ("", "", [("ping", "{}")]), tool_choice={"type": "function", "function": {"name": "ping"}})


def test_one_call_at_most_without_parallel_calls() -> None:
    text, wanted = WELL_FORMED["two calls, then text"]
    check(text, (wanted[0], wanted[1], wanted[2][:1]), parallel_tool_calls=False)


def test_reasoning_can_be_left_out() -> None:
    check(f"{THINK}{NEXT}<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", []), include_reasoning=False)


def test_call_ids_are_the_same_in_every_replay_and_differ_between_calls_and_choices() -> None:
    ids = encode(WELL_FORMED["two calls, then text"][0])
    steps = [step for index in (0, 1) for step in rows(ids, (), "stop", index=index)]
    bodies = [play(spec(stream=False, n=2), steps) for _ in range(2)]
    assert bodies[0] == bodies[1]
    choices = json.loads(bodies[0])["choices"]
    made = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(made)) == 4 and all(each.startswith("call_") for each in made)


def test_choices_do_not_mix() -> None:
    texts = [WELL_FORMED["a call"], BROKEN["no start"], BROKEN["no frame at all"]]
    outputs = [rows(encode(text), range(1, 500), "stop", index=i) for i, (text, _) in enumerate(texts)]
    turns = max(map(len, outputs))
    steps = [output[turn] for turn in range(turns) for output in outputs if turn < len(output)]
    merged = merge_stream(play(spec(n=3), steps), CHAT)
    assert [said(merged.choices[i]) for i in range(3)] == [wanted for _, wanted in texts]


def test_usage_counts_every_token() -> None:
    ids = encode(WELL_FORMED["a call"][0])
    merged = chat(ids, [5], stream_options={"include_usage": True})
    assert merged.usage is not None and merged.usage["completion_tokens"] == len(ids)


# ---------------------------------------------------------------------------------------------------- stops and hooks

STOPPED = f"<|channel|>analysis<|message|>A STOP b<|end|>{NEXT}<|channel|>final<|message|>One, two. END<|return|>"


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ("STOP", ("A ", "", [])),
        ("END", ("A STOP b", "One, two. ", [])),
        ("two. E", ("A STOP b", "One, ", [])),
        ("two. X", ("A STOP b", "One, two. END", [])),
        ("ENDING", ("A STOP b", "One, two. END", [])),
        ("|", ("A STOP b", "One, two. END", [])),
        ("<|end|>", ("A STOP b", "One, two. END", [])),
        (" bas", ("A STOP", "", [])),
    ],
)
def test_a_stop_string_cuts_the_text_and_never_a_mark(stop: str, wanted: Said) -> None:
    check(STOPPED, wanted, stop=[stop])


def test_a_stop_string_may_be_shown_and_the_token_behind_it_is_not() -> None:
    check(STOPPED, ("A STOP", "", []), stop=["STOP"], include_stop_str_in_output=True)
    ids = encode("<|channel|>final<|message|>x get_weather")  # get_weather is one token
    for cuts in every_cut(len(ids)):
        assert chat(ids, cuts, stop=["t_w"]).choices[0].content == "x ge"


def test_a_stop_string_inside_arguments_leaves_the_call_cut_off() -> None:
    text = '<|channel|>commentary to=functions.search<|message|>{"q": "STOP"}<|call|>'
    check(text, ("", "", [("search", '{"q": "')]), stop=["STOP"])
    check(text, ("", "", [("search", "")]), stop=['{"q'])


class Upper:
    """A hook that changes letters only."""

    def __call__(self, output: Any, text: str) -> Any:
        return Replace(text.upper()) if text else Emit()


class Secret:
    """A hook that hides digits, and with them the length of the text."""

    def __call__(self, output: Any, text: str) -> Any:
        return Replace(text.replace("4", "[hidden]")) if "4" in text else Emit()


class Silent:
    """A hook that lets nothing through."""

    def __call__(self, output: Any, text: str) -> Any:
        return Suppress()


@pytest.mark.parametrize("request_", [{}, {"stop": ["zzz"]}])
def test_a_hooks_text_is_what_is_shown_and_headers_are_none_of_its_business(request_: dict[str, Any]) -> None:
    ids = encode(f"{THINK}{NEXT}<|channel|>final<|message|>Hi 4 you.<|return|>")
    for cuts in every_cut(len(ids)):
        assert said(chat(ids, cuts, hook=Upper, **request_).choices[0]) == ("HM.", "HI 4 YOU.", [])
    each = list(range(1, len(ids)))
    assert said(chat(ids, each, hook=Secret, **request_).choices[0]) == ("Hm.", "Hi [hidden] you.", [])
    for cuts in every_cut(len(ids)):
        assert said(chat(ids, cuts, hook=Silent, **request_).choices[0]) == ("", "", [])


def test_what_a_hook_hides_does_not_gather() -> None:
    ids = encode("<|channel|>final<|message|>" + "never shown. " * 400)
    merged = chat(ids, range(1, len(ids)), "length", hook=Silent, stop=["zzz"])
    assert merged.choices[0].content == ""


# ---------------------------------------------------------------------------------------------------- laws

#: What breaks every header, so that it is text wherever it stands.
_TEXTS = [f"{{{i}!é😀}}" for i in range(6)]
_HEADER = [
    *(
        "assistant",
        "analysis",
        "comment",
        "ary",
        "final",
        " to",
        "to=",
        "=functions",
        ".search",
        "json",
        "user",
        " ",
        "\n",
    ),
    *("get_weather", "functions.", "python", "a", "<|", "|>", "STOP", "ST"),
]
_BYTES = [b"\xf0\x9f", b"\x98\x80", b"\xe4\xb8", b"\xff", b"\xc3"]

fragments = st.one_of(
    st.sampled_from(MARKS).map(encode),
    st.sampled_from(STRANGE).map(encode),
    st.sampled_from(_HEADER).map(encode),
    st.sampled_from(_TEXTS).map(encode),
    st.sampled_from(_BYTES).map(spell),
    st.sampled_from([text for text, _ in WELL_FORMED.values()]).map(encode),
)
outputs = st.lists(fragments, max_size=12).map(lambda parts: [token for part in parts for token in part])
requests = st.sampled_from(
    [{}, {"stop": ["STOP"]}, {"stop": ["!é", "ST"]}, {"tool_choice": "none"}, {"include_reasoning": False}, {"n": 1}]
)
finishes = st.sampled_from(["stop", "length", "abort"])


@given(outputs, st.lists(st.integers(1, 60)), requests, finishes, st.booleans())
def test_any_cut_of_any_ids_merges_to_the_unary_body(
    ids: list[int], cuts: Sequence[int], request: dict[str, Any], finish: str, special: bool
) -> None:
    words = vocabulary(special)
    whole = chat(ids, (), finish, stream=False, words=words, **request)
    for some in (cuts, (), range(1, len(ids))):
        assert chat(ids, some, finish, words=words, **request).choices == whole.choices


@given(st.lists(st.one_of(st.sampled_from([*MARKS, *STRANGE, *_HEADER]), st.sampled_from(_TEXTS)), max_size=14))
def test_no_text_is_lost_and_no_mark_is_shown(parts: list[str]) -> None:
    choice = chat(encode("".join(parts)), range(1, 400), "length").choices[0]
    reasoning, content, calls = said(choice)
    shown = [reasoning, content, *(arguments for _, arguments in calls)]
    for text in _TEXTS:
        assert sum(each.count(text) for each in shown) == parts.count(text)
    for mark in (*MARKS, *STRANGE):
        assert not any(mark in each for each in (*shown, *(name for name, _ in calls)))


def test_a_step_without_text_has_no_events() -> None:
    """A worker that takes over is told how many tokens the client has: no event may lie between them and their text."""
    ids = encode(WELL_FORMED["a call without arguments"][0] + f"{NEXT}<|channel|>final<|message|>Hi.<|return|>")
    made = spec()
    for known in range(1, len(ids)):
        steps = rows(ids, [known], "stop")
        first = play_steps(made, steps)
        again = play_steps(made, steps, delivered=[(known, False)])
        assert again[0] == b""
        assert said(merge_stream(first[0] + again[1], CHAT).choices[0]) == ("", "Hi.", [("ping", "{}")])
