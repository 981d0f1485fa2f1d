"""Detokenizers: the library's decode of all ids for every split, with bounded hold-back and at linear cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postproc_workers.detokenizer import Detokenizer, Window, WindowDetokenizer
from postproc_workers.vocabulary import TokenError, Vocabulary
from tests.postproc_workers.counting import calls
from tests.postproc_workers.tokenizers import HARD_TEXTS, KINDS, WITH_FALLBACK, expected, id_of, spelled, tokenizer

EVERY_KIND = pytest.mark.parametrize("name", KINDS)

#: Bytes that begin, continue, complete or break characters.
FRAGMENTS = [
    "é".encode(), "世".encode(), "😀".encode(), "한".encode(), "\ufffd".encode(), "\u200d".encode(), b"a", b" ",
    b"\xe4", b"\xb8", b"\x96", b"\xf0\x9f", b"\x98\x80", b"\xc3", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90",
]  # fmt: skip


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.from_library(tokenizer(name))


def streams(name: str) -> st.SearchStrategy[list[int]]:
    """Ids of all sorts, with texts and broken bytes spelled out, and special tokens in between."""
    library, size = tokenizer(name), vocabulary(name).size
    single = st.integers(0, size - 1).map(lambda token_id: [token_id])
    added = st.sampled_from(sorted(library.get_added_tokens_decoder())).map(lambda token_id: [token_id])
    fragment = st.sampled_from(FRAGMENTS).map(lambda data: spelled(library, data))
    text = st.sampled_from(HARD_TEXTS).map(lambda text: library.encode(text, add_special_tokens=False).ids)
    return st.lists(st.one_of(single, added, fragment, text), max_size=12).map(lambda parts: sum(parts, []))


def cut(ids: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted(place % (len(ids) + 1) for place in places), len(ids)]
    return [list(ids[a:b]) for a, b in pairwise(edges)]


def run(detokenizer: Detokenizer, steps: Sequence[Sequence[int]]) -> str:
    return "".join([detokenizer.decode(step) for step in steps]) + detokenizer.flush()


@EVERY_KIND
@given(data=st.data(), skip=st.booleans())
def test_the_text_is_the_library_s_decode(name: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(streams(name))
    detokenizer = vocabulary(name).detokenizer(skip_special_tokens=skip)
    if name == "fallback_metaspace":  # a window cannot take back what an invalid byte takes back
        assert run(detokenizer, [ids]).count("\ufffd") <= len(ids)
    else:
        assert run(detokenizer, [ids]) == expected(name, ids, skip)


@EVERY_KIND
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans(), places=st.lists(st.integers(0, 100), max_size=6))
def test_every_split_gives_the_same_text(
    name: str, data: st.DataObject, skip: bool, continuation: bool, places: list[int]
) -> None:
    ids = data.draw(streams(name))

    def fresh() -> Detokenizer:
        return vocabulary(name).detokenizer(skip_special_tokens=skip, continuation=continuation)

    whole = run(fresh(), [ids])
    assert run(fresh(), [[token_id] for token_id in ids]) == whole
    assert run(fresh(), cut(ids, places)) == whole
    detokenizer = fresh()
    pieces = [piece for step in cut(ids, places) for piece in detokenizer.pieces(step)]
    assert len(pieces) == len(ids)
    assert "".join(pieces) + detokenizer.flush() == whole


@pytest.mark.parametrize("name", WITH_FALLBACK)
@given(data=st.data())
def test_a_run_of_bytes_is_the_library_s_unless_characters_of_it_were_sent(name: str, data: st.DataObject) -> None:
    library = tokenizer(name)
    run_bytes = b"".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=5)))
    ids = [id_of(name, "a"), *spelled(library, run_bytes), id_of(name, "▁world")]
    text = run(vocabulary(name).detokenizer(), [[token_id] for token_id in ids])
    try:
        valid = run_bytes.decode()
    except UnicodeDecodeError as error:
        valid = run_bytes[: error.start].decode()
        assert text == "a" + valid + "\ufffd" * (len(run_bytes) - error.start) + " world"
    if not valid or valid.encode() == run_bytes:
        assert text == library.decode(ids)


@EVERY_KIND
@given(data=st.data())
def test_at_most_one_character_is_held(name: str, data: st.DataObject) -> None:
    ids = data.draw(streams(name))
    detokenizer = vocabulary(name).detokenizer()
    for token_id in ids:
        detokenizer.decode((token_id,))
        assert len(detokenizer.pending) <= 3
    tail = detokenizer.flush()
    assert set(tail) <= {"\ufffd"} and len(tail) <= 3
    assert detokenizer.flush() == ""


@EVERY_KIND
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_a_caller_may_use_the_table_itself(name: str, data: st.DataObject, skip: bool, continuation: bool) -> None:
    ids = data.draw(streams(name))
    flags: dict[str, Any] = {"skip_special_tokens": skip, "continuation": continuation}
    whole = run(vocabulary(name).detokenizer(**flags), [ids])
    detokenizer, texts = vocabulary(name).detokenizer(**flags), []
    for token_id in ids:
        text = None
        if not detokenizer.pending and token_id < len(detokenizer.strings):
            text = detokenizer.strings[token_id]
        texts.append(detokenizer.decode((token_id,)) if text is None else text)
    assert "".join(texts) + detokenizer.flush() == whole


@pytest.mark.parametrize(
    ("name", "tokens", "chat", "completion"),
    [
        ("llama", ["▁Hello", "▁world"], "Hello world", " Hello world"),
        ("llama", ["▁▁", "a"], " a", "  a"),
        ("llama", ["▁", "▁Hello"], " Hello", "  Hello"),
        ("llama", ["<0x20>", "▁Hello"], " Hello", "  Hello"),
        ("llama", ["<0xE4>", "▁Hello"], "\ufffd Hello", "\ufffd Hello"),
        ("llama_strip_three", ["▁", "▁▁▁", "a"], " a", "    a"),
        ("llama_strip_three", ["▁", "a", "▁▁"], "a  ", " a  "),
        ("gemma", ["▁Hello", "▁world"], " Hello world", " Hello world"),
        ("metaspace", ["▁▁▁", "▁Hello"], " Hello", "    Hello"),
        ("metaspace", [" ▁ x", "▁Hello"], "  x Hello", "   x Hello"),
        ("metaspace", ["né w", "▁Hello"], "néw Hello", "né w Hello"),
        ("metaspace_never", ["▁Hello"], " Hello", " Hello"),
        ("metaspace_fallback", ["<0xE4>", "<0xB8>", "<0x96>", "▁Hello"], "世 Hello", "世 Hello"),
        ("wordpiece", ["hello", "world", "##s"], "hello worlds", " hello worlds"),
        ("wordpiece", ["##ing"], "##ing", "ing"),
        ("bpe_suffix", ["hello</w>", "wor", "ld</w>"], "hello world", "hello world"),
        ("byte_level", ["Ġ", "a"], " a", " a"),
    ],
)
def test_a_completion_keeps_the_space_before_its_first_word(
    name: str, tokens: list[str], chat: str, completion: str
) -> None:
    ids = [id_of(name, token) for token in tokens]
    assert run(vocabulary(name).detokenizer(), [[token_id] for token_id in ids]) == chat
    assert chat == tokenizer(name).decode(ids)
    assert run(vocabulary(name).detokenizer(continuation=True), [[token_id] for token_id in ids]) == completion


@pytest.mark.parametrize("name", [name for name in KINDS if name != "fallback_metaspace"])
def test_a_special_token_shown_at_the_start_is_the_first_word(name: str) -> None:
    first = id_of(name, "<|end|>")
    ids = [first, *(token_id for token_id in range(min(vocabulary(name).size, 400)) if token_id % 29 == 5)]
    for skip in (True, False):
        assert run(vocabulary(name).detokenizer(skip_special_tokens=skip), [ids]) == expected(name, ids, skip)


def test_a_skipped_special_token_does_not_end_a_run_of_bytes() -> None:
    library = tokenizer("llama")
    e4, b8, ninety_six = spelled(library, "世".encode())
    ids = [e4, id_of("llama", "<|end|>"), b8, ninety_six]
    assert run(vocabulary("llama").detokenizer(), [[token_id] for token_id in ids]) == "世" == library.decode(ids)
    shown = vocabulary("llama").detokenizer(skip_special_tokens=False)
    assert run(shown, [ids]) == "\ufffd<|end|>\ufffd\ufffd" == library.decode(ids, skip_special_tokens=False)


def test_a_repeated_invalid_byte_is_one_replacement_each() -> None:
    for name in ("byte_level", "llama", "fallback_metaspace", "byte_level_replace"):
        invalid = spelled(tokenizer(name), b"\xff")
        detokenizer = vocabulary(name).detokenizer()
        texts = [detokenizer.decode(invalid) for _ in range(200)]
        assert "".join(texts) + detokenizer.flush() == "\ufffd" * 200
        assert len("".join(texts)) >= 197


@pytest.mark.parametrize("name", [name for name in KINDS if spelled(tokenizer(name), b"a")])
@pytest.mark.parametrize("text", ["世界人工智能" * 4, "é😀한a" * 6, "\u200d👨" * 8])
def test_a_long_run_of_bytes_is_never_cut_inside_a_character(name: str, text: str) -> None:
    for before in range(4):
        ids = [*[id_of(name, "a")] * before, *spelled(tokenizer(name), text.encode())]
        whole = tokenizer(name).decode(ids)
        assert run(vocabulary(name).detokenizer(), [[token_id] for token_id in ids]) == whole


def test_what_was_sent_is_not_sent_again_when_a_decode_contradicts_itself() -> None:
    name = "fallback_metaspace"  # on the window path an invalid byte changes the whole run, as sent already
    character, invalid = spelled(tokenizer(name), "世".encode()), spelled(tokenizer(name), b"\xff")
    ids = [id_of(name, "a"), *character, *invalid, id_of(name, "▁world"), *character]
    detokenizer, other = vocabulary(name).detokenizer(), vocabulary(name).detokenizer()
    assert run(detokenizer, [[token_id] for token_id in ids]) == "a世\ufffd world世"
    assert run(other, [character]) == "世"


@EVERY_KIND
@pytest.mark.parametrize("bad", [-1, 10**6, 2**40, None, "a", 1.0])
def test_a_bad_id_is_named_and_changes_nothing(name: str, bad: Any) -> None:
    for ids in ([bad], [1, bad], [bad, 1, 1]):
        detokenizer = vocabulary(name).detokenizer()
        for method in (detokenizer.decode, detokenizer.pieces):
            with pytest.raises(TokenError, match="token_ids: "):
                method(ids)
        assert run(detokenizer, [[1]]) == run(vocabulary(name).detokenizer(), [[1]])


def test_ids_without_a_token_are_empty_text() -> None:
    for name in KINDS:
        library = tokenizer(name)
        padded = Vocabulary.from_library(library, size=vocabulary(name).size + 100)
        ids = [padded.size - 1, 1, padded.size - 50, 2, 3, padded.size - 100]
        assert run(padded.detokenizer(), [ids]) == expected(name, [1, 2, 3], True)
        with pytest.raises(TokenError):
            padded.detokenizer().decode([padded.size])


def test_code_points() -> None:
    text = "caf\u00e9 \U0001f600\x00"
    assert run(Vocabulary.text().detokenizer(), [[ord(char)] for char in text]) == text
    assert Vocabulary.text().detokenizer().decode([0xD83D, 97]) == "\ufffda"
    with pytest.raises(TokenError):
        Vocabulary.text().detokenizer().decode([0x110000])


@EVERY_KIND
@pytest.mark.parametrize("which", ["plain", "special", "invalid", "mixed"])
def test_twice_the_ids_are_twice_the_work(name: str, which: str) -> None:
    library = tokenizer(name)
    ids = {
        "plain": list(range(1, 5)) * 50,
        "special": [id_of(name, "<|end|>")] * 200,
        "invalid": (spelled(library, b"\xff") or [1]) * 200,
        "mixed": (library.encode(HARD_TEXTS[4], add_special_tokens=False).ids or [1, 2]) * 20,
    }[which]

    def work(ids: list[int]) -> int:
        detokenizer = vocabulary(name).detokenizer()
        return calls(lambda: [detokenizer.decode((token_id,)) for token_id in ids])

    assert work(ids * 2) <= 2.1 * work(ids)


def test_ids_whose_text_is_empty_do_not_hold_a_window_in_place() -> None:
    library = tokenizer("bpe_suffix")
    empty = len(library.get_vocab())
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return library.decode([token_id for token_id in ids if token_id != empty])

    hello = id_of("bpe_suffix", "hello</w>")
    detokenizer = WindowDetokenizer(Window(empty + 1, decode, anchor=(hello,)), continuation=False)
    ids = [hello, *[empty] * 500, hello]
    assert run(detokenizer, [[token_id] for token_id in ids]) == "hello hello"
    assert max(seen) <= 40
