"""All that post-processing needs of a tokenizer, built once per process and shared by every detokenizer.

Where the structure of the decoder allows it, ids are looked up in tables (`token_tables.py`), which are first compared
with the library's ``decode`` on pseudo-random sequences of ids; at the first difference, and for every other decoder,
the vocabulary decodes through the library over a window. So an unknown tokenizer is slow, not wrong.

A ``tokenizer.json`` is read with the ``tokenizers`` package alone: neither transformers nor torch is imported for it,
which would cost a worker seconds and hundreds of megabytes.

Where transformers is the reference (5.24): its fast tokenizers ignore ``spaces_between_special_tokens``, and so do the
tables; it is passed on to every other. ``clean_up_tokenization_spaces``, where a tokenizer has it set, is not applied
to BPE models unless ``clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output`` is set too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tokenizers import AddedToken, Tokenizer

from postproc_workers.detokenizer import (
    REPLACEMENT,
    ByteLevelDetokenizer,
    ByteTable,
    CleanUpDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    PieceTable,
    TextDetokenizer,
    TokenError,
    Window,
    WindowDetokenizer,
    check_ids,
)
from postproc_workers.token_tables import Tokens, agrees, build_table, byte_level_bytes, check_sequences, fallback_byte

__all__ = ["DecodeError", "TokenError", "Vocabulary"]

_T = TypeVar("_T")

_UNICODE = 0x110000
#: Sets of kept special tokens whose tables are remembered.
_MAX_KEEPING = 16
#: Ids that are searched for an ordinary word to put before a window.
_ANCHOR_IDS = 4096
_FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

#: (ids, skip special tokens, spaces between special tokens) -> text, without clean-up: what tables are held against and
#: windows are decoded with.
_Decode = Callable[[list[int], bool, bool], str]


class DecodeError(RuntimeError):
    """The tokenizer's library failed on ids that are in range."""


class _Source(Protocol):
    """Where a vocabulary's text comes from. Ids have been checked before."""

    kind: str

    def keeping(self, texts: frozenset[str]) -> _Source:
        """The same, with the special tokens of these texts never skipped."""

    def open(self, skip_special_tokens: bool, spaces: bool, continuation: bool) -> Detokenizer: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Vocabulary:
    """Ids, their bytes, and detokenizers for them.

    size: ids in ``range(size)`` are accepted; those without a token have no text.
    kind: how text is made: ``byte_level``, ``pieces``, ``window`` or ``text``; for logs and tests.
    """

    __slots__ = ("_clean_up", "_keeping", "_source", "_tables", "kind", "size")

    def __init__(self, source: _Source, size: int, *, clean_up: bool = False) -> None:
        self._source = source
        #: sources by what they keep; a server's parsers decide that, so there are one or two
        self._keeping: dict[frozenset[str], _Source] = {frozenset(): source}
        self._clean_up = clean_up
        #: what others derive from the vocabulary, by what made it
        self._tables: dict[object, Any] = {}
        self.size = size
        self.kind = source.kind

    @classmethod
    def text(cls) -> Vocabulary:
        """Ids are Unicode code points: for streams that were recorded as text."""
        return cls(_TextSource(), _UNICODE)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, size: int = 0) -> Vocabulary:
        """Read a ``tokenizer.json``. size: ids the model may emit; 0 takes the tokenizer's own number."""
        return cls.from_library(Tokenizer.from_file(os.fspath(path)), size=size)

    @classmethod
    def from_library(cls, tokenizer: Tokenizer, *, size: int = 0, clean_up: bool = False) -> Vocabulary:
        """From an object of the ``tokenizers`` package. clean_up: remove spaces as transformers does."""
        tokens = Tokens(tokenizer, size)
        return cls(_library_source(tokens, _library_decode(tokenizer)), tokens.size, clean_up=clean_up)

    @classmethod
    def from_transformers(cls, tokenizer: Any, *, size: int = 0) -> Vocabulary:
        """From any tokenizer of transformers: fast ones by tables where possible, others through their ``decode``."""
        decode = _transformers_decode(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            tokens = Tokens(backend, size)
            clean_up = _cleans_up(lambda name: getattr(tokenizer, name, None), type(backend.model).__name__)
            return cls(_library_source(tokens, decode), tokens.size, clean_up=clean_up)
        strings = [_token_string(tokenizer, token_id) for token_id in range(len(tokenizer))]
        size = size or len(strings)
        strings = strings[:size] + [None] * (size - len(strings))
        source = _WindowSource(strings, frozenset(tokenizer.all_special_ids), decode)
        return cls(source, size, clean_up=_cleans_up(lambda name: getattr(tokenizer, name, None), ""))

    @classmethod
    def load(cls, source: str, *, size: int = 0) -> Vocabulary:
        """From a ``tokenizer.json`` file, a directory in Hugging Face layout, or "" for text.

        A directory with a ``tokenizer.json`` is read without transformers, special tokens and the clean-up flag of its
        ``tokenizer_config.json`` included. Where a class of transformers builds a tokenizer of its own from the files,
        save its ``backend_tokenizer`` to a file once and load that.
        """
        if not source:
            return cls.text()
        file = Path(source, "tokenizer.json")
        if os.path.isfile(source) or source.endswith(".json"):
            return cls.from_file(source, size=size)
        if not file.is_file():
            from transformers import AutoTokenizer

            return cls.from_transformers(AutoTokenizer.from_pretrained(source, trust_remote_code=False), size=size)
        tokenizer, config = Tokenizer.from_file(str(file)), _read_config(file.with_name("tokenizer_config.json"))
        _add_special_tokens(tokenizer, config)
        return cls.from_library(tokenizer, size=size, clean_up=_cleans_up(config.get, type(tokenizer.model).__name__))

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        continuation: bool = False,
        keep: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """A detokenizer for one output.

        Its text is ``tokenizer.decode(all ids, skip_special_tokens=..., spaces_between_special_tokens=...)``.
        continuation: the output goes on from a prompt, so a space before its first word, which ``decode`` strips at the
        start of a text, stays.
        keep: texts of special tokens that are never skipped, because a parser looks for them.
        """
        inner = self._source_keeping(keep).open(skip_special_tokens, spaces_between_special_tokens, continuation)
        return CleanUpDetokenizer(self.size, inner) if self._clean_up else inner

    def _source_keeping(self, keep: frozenset[str]) -> _Source:
        source = self._keeping.get(keep)
        if source is None:
            if len(self._keeping) >= _MAX_KEEPING:
                self._keeping = {frozenset(): self._source}
            source = self._keeping[keep] = self._source.keeping(keep)
        return source

    def table(self, make: Callable[[Vocabulary], _T]) -> _T:
        """What ``make`` makes of this vocabulary, made once: a table that all its users share, and fill as they go."""
        if make not in self._tables:
            self._tables[make] = make(self)
        table: _T = self._tables[make]
        return table

    def token_bytes(self, token_id: int) -> bytes:
        """The token's raw bytes, not always UTF-8; a special token's literal text; b"" without a token."""
        if type(token_id) is not int or not 0 <= token_id < self.size:
            check_ids((token_id,), self.size)
        return self._source.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text, with U+FFFD for what is not UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")


class _TextSource:
    """Code points."""

    kind = "text"

    def keeping(self, texts: frozenset[str]) -> _Source:
        return self

    def open(self, skip_special_tokens: bool, spaces: bool, continuation: bool) -> Detokenizer:
        return TextDetokenizer(_UNICODE)

    def token_bytes(self, token_id: int) -> bytes:
        return TextDetokenizer(_UNICODE).decode((token_id,)).encode()


class _TableSource:
    """Tables of either exact kind."""

    def __init__(self, tokens: Tokens, table: ByteTable) -> None:
        self.kind = "pieces" if isinstance(table, PieceTable) else "byte_level"
        self._tokens, self._table = tokens, table
        #: Bytes of the tokens that are not just the text of the table.
        self._bytes = {**table.partial, **{i: (tokens.strings[i] or "").encode() for i in tokens.special}}

    def keeping(self, texts: frozenset[str]) -> _Source:
        shown, skipped = self._table.shown, list(self._table.skipped)
        for token_id in self._tokens.special:
            if self._tokens.strings[token_id] in texts:
                skipped[token_id] = shown[token_id]
        return _TableSource(self._tokens, replace(self._table, skipped=skipped))

    def open(self, skip_special_tokens: bool, spaces: bool, continuation: bool) -> Detokenizer:
        if isinstance(self._table, PieceTable):
            return PieceDetokenizer(self._table, skip_special_tokens=skip_special_tokens, continuation=continuation)
        return ByteLevelDetokenizer(self._table, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        return (self._table.shown[token_id] or "").encode() if data is None else data


class _WindowSource:
    """The library's own decode, over a window of ids."""

    kind = "window"

    def __init__(self, strings: Sequence[str | None], special: frozenset[int], decode: _Decode) -> None:
        """strings: id -> token string, None where there is no token."""
        self._strings = strings
        self._special = special
        self._decode = decode
        self._absent = frozenset(token_id for token_id, string in enumerate(strings) if string is None)
        self._anchor = self._find_anchor()
        self._windows: dict[tuple[bool, bool], Window] = {}

    def _find_anchor(self) -> tuple[int, ...]:
        """An id that decodes to a word, rather one that puts no space between itself and itself."""
        spaced: tuple[int, ...] = ()
        for token_id, string in enumerate(self._strings[:_ANCHOR_IDS]):
            if string is None or token_id in self._special or fallback_byte(string):
                continue  # a byte token would become part of the run of bytes that follows
            try:
                word, twice = (self._decode([token_id] * count, False, True) for count in (1, 2))
            except DecodeError:
                continue
            if word.isascii() and word.isalnum():
                if twice == word * 2:
                    return (token_id,)
                spaced = spaced or (token_id,)
        return spaced

    def keeping(self, texts: frozenset[str]) -> _Source:
        special = frozenset(i for i in self._special if self._strings[i] not in texts)
        # Ids that are skipped never enter a window, so the library need not skip any, and would skip the kept ones too.
        return _WindowSource(self._strings, special, lambda ids, skip, spaces: self._decode(ids, False, spaces))

    def open(self, skip_special_tokens: bool, spaces: bool, continuation: bool) -> Detokenizer:
        flags = skip_special_tokens, spaces
        if flags not in self._windows:
            self._windows[flags] = self._window(*flags)
        return WindowDetokenizer(self._windows[flags], continuation=continuation)

    def _window(self, skip: bool, spaces: bool) -> Window:
        silent = self._absent | self._special if skip else self._absent
        return Window(len(self._strings), lambda ids: self._decode(ids, skip, spaces), silent, self._anchor)

    def token_bytes(self, token_id: int) -> bytes:
        string = self._strings[token_id]
        if string is None or token_id in self._special:
            return (string or "").encode()
        # Behind a word, so that a space in front of the token shows.
        before = self._decode([*self._anchor], False, True)
        text = self._decode([*self._anchor, token_id], False, True)
        text = text[len(before) :] if text.startswith(before) else ""
        if not text or REPLACEMENT in text:
            return fallback_byte(string) or byte_level_bytes(string)
        return text.encode()


def _library_source(tokens: Tokens, decode: _Decode) -> _Source:
    """Tables if there are any that agree with the library, else a window."""
    table = build_table(tokens)
    if table is not None:
        source = _TableSource(tokens, table)
        sequences = check_sequences(tokens)
        if all(_agrees(sequences, source, decode, skip) for skip in (True, False)):
            return source
    return _WindowSource(tokens.strings, tokens.special, decode)


def _agrees(sequences: list[list[int]], source: _TableSource, decode: _Decode, skip: bool) -> bool:
    # Spaces would show between special tokens that are shown: ask for them there.
    try:
        return agrees(sequences, lambda: source.open(skip, not skip, False), lambda ids: decode(ids, skip, not skip))
    except DecodeError:
        return False


def _library_decode(tokenizer: Tokenizer) -> _Decode:
    return _guarded(lambda ids, skip, _spaces: tokenizer.decode(ids, skip_special_tokens=skip))


def _transformers_decode(tokenizer: Any) -> _Decode:
    """The tokenizer's ``decode`` without clean-up; without the flag for spaces where it is refused (mistral-common)."""

    def decode(ids: list[int], skip: bool, spaces: bool) -> str:
        flags = {"spaces_between_special_tokens": spaces} if accepted else {}
        return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False, **flags))

    accepted = True
    try:
        decode([], False, True)
    except (TypeError, ValueError):
        accepted = False
    return _guarded(decode)


class _PanicsAsErrors:
    """A panic is no Exception, so it would end the process of all requests, and its class cannot be imported: it is
    known by its module's name only."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and kind.__module__ == "pyo3_runtime":
            raise DecodeError(f"the tokenizer cannot decode these ids: {error}") from error


_PANICS = _PanicsAsErrors()


def _guarded(decode: _Decode) -> _Decode:
    """`decode`, with a panic of the Rust library (some decoders index out of bounds) as a DecodeError."""

    def guarded(ids: list[int], skip: bool, spaces: bool) -> str:
        with _PANICS:
            return decode(ids, skip, spaces)

    return guarded


def _token_string(tokenizer: Any, token_id: int) -> str | None:
    """The token of an id; None in a hole of the vocabulary, which some slow tokenizers meet with an exception."""
    try:
        string: str | None = tokenizer.convert_ids_to_tokens(token_id)
    except (LookupError, TypeError, ValueError):
        return None
    return string


def _cleans_up(get: Callable[[str], Any], model: str) -> bool:
    """Whether transformers' decode cleans up. get: reads a flag; model: the library's model class, "" without one."""
    return bool(get("clean_up_tokenization_spaces")) and (model != "BPE" or bool(get(_FORCED_CLEAN_UP)))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def _add_special_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Make tokens special that only the configuration says are, as transformers does when it loads a tokenizer."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    listed = extra if isinstance(extra, list) else ()
    named = dict(extra if isinstance(extra, dict) else config.get("model_specific_special_tokens", {}))
    named.update({key: value for key, value in config.items() if key.endswith("_token")})
    added = [token for token in config.get("added_tokens_decoder", {}).values() if token.get("special")]
    contents = [_content(value) for value in [*added, *named.values()]]
    # A listed token that is there already keeps its flag: transformers 5.24 shows it when special tokens are skipped.
    contents += [text for value in listed if tokenizer.token_to_id(text := _content(value)) is None]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in contents if text])


def _content(token: object) -> str:
    """The text of a token in a configuration: a str or a map; "" for anything else, such as the flag add_bos_token."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
