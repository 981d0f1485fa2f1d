"""The two small tokenizers that our recordings use, and ids for texts.

Run it to write the files again: ``python -m tests.recordings.build_tokenizers``. Ids never move: append to a list,
never insert, or the recordings mean something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

FOLDER = Path(__file__).parent / "tokenizers"

# : What output of a model is made of where it is hard: parts of tags and of stops, characters that end inside of a
# token.
FRAGMENTS = [
    *("<thi", "nk>", "</thi", "</", "<", ">", "</tool", "_call>", "<tool", "<|", "|>", "<|im", "_end|>", "[TOOL", "]"),
    *(
        "ST",
        "STO",
        "OP",
        "P.",
        "STOP",
        "TOP",
        "aab",
        "aa",
        "ab",
        "aaab",
        "END",
        "EN",
        "D.",
        "ENDED",
        "User",
        ":",
        "###",
    ),
    *("Hello", " world", "the", " the", " answer", " is", "ing", " a", ", ", ". ", "  ", "\n", "\n\n", "\t", "."),
    *('"', "\\", '{"', '":', "}", "0", "1", "42", "-", "/", "'", "&amp;", "\r", "\x00", "\x1f", "\u2028", "\u2029"),
    *(
        "é",
        "ñ",
        "ü",
        "世",
        "界",
        "世界",
        "你好",
        "서울",
        "뷁",
        "Ω",
        "😀",
        "🎉",
        "👍🏽",
        "\u200d",
        "e\u0301",
        "\ufeff",
        "\ufffd",
    ),
]

#: Bytes that stop inside a character, or begin inside one.
PARTIAL = [
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xf0\x9f\x98",
    b"\x80!",
    b"\xe4\xb8",
    b"\x96",
    b" \xf0",
    b"a\xe4",
    b"\x96b",
    b"\xc3",
    b"\xff",
]

SPECIAL = ["<|end|>", "<|pad|>", "<|role|>"]
#: Added, but no special tokens.
MARKS = ["<think>", "</think>"]

PIECES = [
    *(
        "▁",
        "▁▁",
        "▁the",
        "▁answer",
        "▁Hello",
        "Hello",
        "▁world",
        "▁is",
        "ing",
        "▁a",
        "a",
        "b",
        "ab",
        ".",
        ",",
        "▁,",
        "\n",
    ),
    *(
        "ST",
        "OP",
        "▁STO",
        "P",
        "END",
        "▁END",
        "<",
        ">",
        '"',
        "\\",
        "é",
        "世",
        "界",
        "▁서울",
        "뷁",
        "😀",
        "-",
        "1",
        "2",
        "'s",
    ),
]


def _alphabet() -> list[str]:
    """Byte -> the character that stands for it in a byte-level vocabulary (GPT-2's rule)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def _spell(data: bytes) -> str:
    alphabet = _alphabet()
    return "".join(alphabet[byte] for byte in data)


def byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes, then FRAGMENTS, PARTIAL, SPECIAL, MARKS."""
    strings = [
        *_alphabet(),
        *(_spell(text.encode()) for text in FRAGMENTS if len(text.encode()) > 1),
        *map(_spell, PARTIAL),
    ]
    tokenizer = Tokenizer(models.BPE({string: i for i, string in enumerate(dict.fromkeys(strings))}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text) for text in MARKS])
    return tokenizer


def pieces() -> Tokenizer:
    """SentencePiece with byte fallback: 0..2 are special, 3..258 the bytes, then PIECES."""
    strings = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE({string: i for i, string in enumerate(strings)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    members = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(members)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


BUILDERS = {"byte_level": byte_level, "pieces": pieces}


@lru_cache
def ids_by_text(name: str) -> dict[str, int]:
    """What to call an id when writing a case: its text; ``<0xE4>`` for a byte."""
    vocab = BUILDERS[name]().get_vocab()
    if name == "pieces":
        return {text.replace("▁", " "): i for text, i in vocab.items()}
    places = {char: byte for byte, char in enumerate(_alphabet())}
    named = {}
    for text, i in vocab.items():
        if text in SPECIAL or text in MARKS:
            named[text] = i
            continue
        data = bytes(places[char] for char in text)
        named[data.decode("utf-8", "backslashreplace")] = i
        if len(data) == 1:
            named[f"<0x{data[0]:02X}>"] = i
    return named


def ids(name: str, texts: Sequence[str]) -> list[int]:
    """The ids of tokens given by their texts."""
    return [ids_by_text(name)[text] for text in texts]


def main() -> None:
    """Write the files."""
    for name, build in BUILDERS.items():
        build().save(str(FOLDER / f"{name}.json"), pretty=False)


if __name__ == "__main__":
    main()
