"""Tables id -> text for the decoders whose structure is understood, and the check that they are right.

What the ``tokenizers`` library does with a token string, for the two families that have a table:

* ``ByteLevel``: each character of a token stands for one byte (GPT-2's alphabet). A token with any character outside
  the alphabet, as added tokens have, is taken literally; an added token inside it is mapped all the same, so that an
  added "é" decodes to the lone byte E9. The bytes of all tokens are joined, then decoded with replacement.
* ``Replace``... or ``Metaspace``, then ``ByteFallback``, ``Fuse``, ``Strip``, each optional, in this order: characters
  are replaced within a token, ``<0xE4>`` is a byte, and after everything is joined a few characters are stripped at
  the start. ``Metaspace`` removes every mark from the *first* token instead of making spaces of them.

Any other order or member gives no table. `agrees` then holds a table against the library itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from postproc_workers.detokenizer import ByteTable, Detokenizer, PieceTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: As the library reads them, a sign included.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

#: Sequences and ids in each that a table is checked with, and texts that byte tokens spell: 20 to 60 ms in all.
_CHECKS, _CHECK_LENGTH = 192, 32
_SPELLED = ("é", "世界", "😀", "a\N{ZERO WIDTH JOINER}", "뷁")


class Tokens:
    """The tokens of a ``tokenizers`` object.

    size: number of ids.
    strings: id -> token string, None where there is no token.
    special: ids of special tokens.
    decoder: the decoder as the library writes it to ``tokenizer.json``, or None.
    """

    __slots__ = ("decoder", "size", "special", "strings")

    def __init__(self, tokenizer: Tokenizer, size: int = 0) -> None:
        """size: ids the model may emit; 0 takes one more than the largest id that has a token."""
        vocab = tokenizer.get_vocab(with_added_tokens=False)
        strings: dict[int, str | None] = {token_id: string for string, token_id in vocab.items()}
        added = tokenizer.get_added_tokens_decoder()
        # An added token goes before the model's with the same id; normalized ones are decoded from their normalized
        # form ("né▁w"), which only this call tells.
        strings.update((token_id, tokenizer.id_to_token(token_id)) for token_id in added)
        self.size = size or 1 + max(strings, default=-1)
        self.strings: list[str | None] = [strings.get(token_id) for token_id in range(self.size)]
        # The library goes by the string, so another id with the string of a special token is special too.
        special = {token.content for token in added.values() if token.special}
        self.special = frozenset(i for i, string in enumerate(self.strings) if string in special)
        state: Any = tokenizer.decoder.__getstate__() if tokenizer.decoder else b"null"
        self.decoder: dict[str, Any] | None = json.loads(state)


def build_table(tokens: Tokens) -> ByteTable | None:
    """The table for these tokens, or None if their decoder is not one of those described above."""
    parts = _parts(tokens.decoder)
    if [part["type"] for part in parts] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _byte_table(tokens)
    plan = _plan(parts)
    return _piece_table(tokens, plan) if plan else None


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for member in decoder["decoders"] for part in _parts(member)]


def _alphabet() -> dict[int, int]:
    """GPT-2's characters -> bytes, and what is below 256 and not in it -> a character that no byte stands for."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**dict.fromkeys(hidden, 0xFFFF), **{b: b for b in visible}, **{256 + i: b for i, b in enumerate(hidden)}}


_ALPHABET = _alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token string."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """The byte that a token like ``<0xE4>`` stands for; None for any other token."""
    if len(token) != 6 or token[0] != "<":
        return None
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else None


def _complete(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _skipping(shown: list[str | None], special: frozenset[int]) -> list[str | None]:
    skipped = shown.copy()
    for token_id in special:
        skipped[token_id] = ""
    return skipped


def _byte_table(tokens: Tokens) -> ByteTable:
    shown: list[str | None] = [""] * tokens.size
    partial: dict[int, bytes] = {}
    for token_id, token in enumerate(tokens.strings):
        if token is None:
            continue
        data = byte_level_bytes(token)
        text = shown[token_id] = _complete(data)
        if text is None:
            partial[token_id] = data
    return ByteTable(shown, _skipping(shown, tokens.special), partial)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a decoder of pieces does. metaspace: the mark that the first token of a text loses, or ""."""

    replaces: tuple[tuple[str, str], ...]
    metaspace: str
    byte_fallback: bool
    strip: tuple[str, int]

    def text(self, token: str) -> str:
        for old, new in self.replaces:
            token = token.replace(old, new)
        return token


def _plan(parts: list[Mapping[str, Any]]) -> _Plan | None:
    """The plan of a decoder, or None if its parts are not of the kinds and in the order described above."""
    rest = list(parts)
    replaces, metaspace = _replaces(rest), ""
    if not replaces and rest and rest[0]["type"] == "Metaspace":
        first = rest.pop(0)
        replaces = [(first["replacement"], " ")]
        metaspace = first["replacement"] if first["prepend_scheme"] != "never" else ""
    fallback, fuse = _take(rest, "ByteFallback"), _take(rest, "Fuse")
    # Strip works on each of the strings it gets: only what was fused before it is stripped once.
    strip = _take(rest, "Strip") if fuse else None
    if rest or not parts or (strip and strip["stop"]):
        return None
    stripped = (strip["content"], strip["start"]) if strip else (" ", 0)
    return _Plan(tuple(replaces), metaspace, fallback is not None, stripped)


def _replaces(parts: list[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Take the replacements of plain strings off the front."""
    taken = []
    while parts and parts[0]["type"] == "Replace" and parts[0]["pattern"].get("String"):
        part = parts.pop(0)
        taken.append((part["pattern"]["String"], part["content"]))
    return taken


def _take(parts: list[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return parts.pop(0) if parts and parts[0]["type"] == kind else None


def _piece_table(tokens: Tokens, plan: _Plan) -> PieceTable:
    shown: list[str | None] = [""] * tokens.size
    partial: dict[int, bytes] = {}
    empty, first = set(), {}
    for token_id, token in enumerate(tokens.strings):
        if token is None:
            continue
        text = plan.text(token)
        data = fallback_byte(text) if plan.byte_fallback else None
        if data is not None:
            partial[token_id] = data
        elif not text:
            empty.add(token_id)
        elif plan.metaspace and " " in token:
            # Only marks go from a first token; where it has spaces of its own, `text` does not tell which are which.
            first[token_id] = token.replace(plan.metaspace, "")
        shown[token_id] = text if data is None else _complete(data)
    return PieceTable(
        shown,
        _skipping(shown, tokens.special),
        partial,
        empty=frozenset(empty),
        strip=plan.strip,
        first=first if plan.metaspace else None,
    )


def agrees(
    sequences: list[list[int]], open_detokenizer: Callable[[], Detokenizer], decode: Callable[[list[int]], str]
) -> bool:
    """Whether detokenizers give the library's text for these sequences of ids."""
    for ids in sequences:
        detokenizer = open_detokenizer()
        if detokenizer.decode(ids) + detokenizer.flush() != decode(ids):
            return False
    return True


def check_sequences(tokens: Tokens) -> list[list[int]]:
    """Sequences to check a table with: pseudo-random ids, special and byte tokens, characters spelled in byte tokens.

    Of byte tokens that follow each other only whole characters and lone ones occur: for other runs a table differs from
    the library where `detokenizer.py` says so.
    """
    if not tokens.size:
        return []
    spelled = {data[0]: i for i, token in enumerate(tokens.strings) if token and (data := fallback_byte(token))}
    singles = list(spelled.values())
    others = frozenset(singles) if len(singles) < tokens.size else frozenset[int]()
    special, plain = sorted(tokens.special), _pseudo_random(tokens.size, others)
    sequences = []
    for count in range(_CHECKS):
        ids = [next(plain) for _ in range(_CHECK_LENGTH)]
        if special:
            ids[count % 7 :: 11] = [special[count % len(special)] for _ in ids[count % 7 :: 11]]
        if singles:
            ids[count % _CHECK_LENGTH] = singles[count % len(singles)]
        sequences.append(ids)
    texts = [text.encode() for text in _SPELLED if all(byte in spelled for byte in text.encode())]
    return sequences + [[next(plain), *(spelled[byte] for byte in text), next(plain)] for text in texts]


def _pseudo_random(size: int, without: frozenset[int]) -> Iterator[int]:
    """Ids from a linear congruential generator (Knuth's MMIX): the same for every load of a vocabulary."""
    state = 1
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        token_id = (state >> 33) % size
        if token_id not in without:
            yield token_id
