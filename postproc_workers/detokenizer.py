"""ids -> text, incrementally: one detokenizer per output of a request.

The hard thing: the merged text must be ``tokenizer.decode(all ids)`` however the ids were cut into steps, at a cost
per id that does not grow, and nothing that was sent can be taken back. Three ways, chosen by ``vocabulary.py``:

* *Byte level* (GPT-2, Llama 3, Qwen, DeepSeek, gpt-oss, ...). Every id is a string of bytes, the text is the UTF-8 of
  their concatenation. A character may lie across ids, so at most three bytes are held until it is complete; invalid
  bytes become U+FFFD as ``bytes.decode(errors="replace")`` does it, which is what the library does too.
* *Pieces with byte fallback* (SentencePiece: Llama 2, Mistral, Gemma, ...). An id is a piece of text or one byte. The
  library joins a run of byte tokens and, if the run as a whole is not UTF-8, makes *each* of its bytes one U+FFFD. To
  know that one would have to hold the run to its end. The rule here: at most one character is held; the first byte
  that cannot be right makes it and the bytes held U+FFFD each, and so is each later byte of that run. The text is the
  library's but for one case: valid characters of a run, sent before an invalid byte of the same run, stay.
* *Window* (everything else, slow tokenizers included). The last few ids are decoded again with each new one, and what
  goes beyond the text already shown is new. The window has left context, because decoders look left (spaces between
  words); it moves by ids, never by the length of the text, so ids without text cannot hold it in place; it is
  bounded, and so is the cost. A decode that contradicts what was shown restarts the window of that stream only.

The usual call is one id whose bytes are complete. For it the first two ways keep a table id -> text (``strings``), and
a caller may look into the table itself and save the call. The contract: while ``pending`` is empty, a
``strings[token_id]`` with ``0 <= token_id < len(strings)`` that is not None is what ``decode((token_id,))`` would
return, and returning it changes no state. In every other case call ``decode``. Read both attributes anew for every
id: ``strings`` is empty whenever the table does not hold (at the start of a text whose first space is stripped, in a
broken run of bytes, on the window path).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index

from postproc_workers.stop_strings import Literals, LiteralScanner

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: `Detokenizer.strings` while no table holds.
NO_STRINGS: list[str | None] = []

#: Bytes of the longest character, and so ids: the fourth completes it or nothing does.
_MAX_INCOMPLETE = 4
#: The window path tries to shorten its window from this length on, to this many ids, ...
_WINDOW, _CONTEXT = 10, 4
#: ... and does so whatever the decoder says from this length on, as soon as no text is held.
_MAX_WINDOW = 32


class TokenError(ValueError):
    """An id that the vocabulary does not have: negative, too large, or no integer."""

    def __init__(self, token_id: object, size: int) -> None:
        super().__init__(f"token_ids: {token_id!r} is not an id in 0..{size - 1}")


def check_ids(token_ids: Sequence[int], size: int) -> None:
    """Raises TokenError for the first of `token_ids` that is not in ``range(size)``."""
    for token_id in token_ids:
        try:
            good = 0 <= index(token_id) < size
        except TypeError:
            good = False
        if not good:
            raise TokenError(token_id, size)


class Detokenizer:
    """What all of them offer. Text is given out once and in order; a TokenError leaves the state as it was."""

    __slots__ = ("_size", "pending", "strings")

    def __init__(self, size: int, strings: list[str | None]) -> None:
        self._size = size
        #: id -> text, or None where the bytes are not complete UTF-8; see the contract above. Never write to it.
        self.strings = strings
        #: Bytes held because their character is not complete; at most 3.
        self.pending = b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """All new text these ids make. Raises TokenError."""
        count = len(token_ids)
        if count == 1:
            token_id = token_ids[0]
            if type(token_id) is int and 0 <= token_id < self._size:
                if not self.pending and self.strings and (text := self.strings[token_id]) is not None:
                    return text
                return self._step(token_id)
        elif count and not self.pending and (strings := self.strings):
            try:
                if min(token_ids) >= 0:
                    return "".join([strings[token_id] for token_id in token_ids])  # type: ignore[misc]
            except (IndexError, TypeError):
                pass  # a bad id, or a None in the table: the careful way tells them apart
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The same text, one piece per id: a character belongs to the id that completes it. Raises TokenError."""
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._size:
                check_ids(token_ids, self._size)
        pieces = []
        for token_id in token_ids:
            text = self.strings[token_id] if self.strings and not self.pending else None
            pieces.append(self._step(token_id) if text is None else text)
        return pieces

    def flush(self) -> str:
        """The rest, when no id follows: incomplete bytes as U+FFFD. Final and idempotent."""
        raise NotImplementedError

    def _step(self, token_id: int) -> str:
        """The new text of one id that is in range; the careful way, right in every state."""
        raise NotImplementedError


class TextDetokenizer(Detokenizer):
    """Ids are Unicode code points; a surrogate, which no text can hold, is U+FFFD."""

    __slots__ = ()

    def __init__(self, size: int) -> None:
        super().__init__(size, NO_STRINGS)

    def _step(self, token_id: int) -> str:
        return REPLACEMENT if 0xD800 <= token_id <= 0xDFFF else chr(token_id)

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class ByteTable:
    """A byte-level vocabulary; shared by all its detokenizers.

    shown, skipped: id -> text with special tokens shown or skipped, "" where there is no token, None for `partial`.
    partial: id -> bytes, for tokens that are not complete UTF-8 by themselves.
    """

    shown: list[str | None]
    skipped: list[str | None]
    partial: Mapping[int, bytes]


class ByteLevelDetokenizer(Detokenizer):
    """Bytes of ids, concatenated and decoded as UTF-8 with replacement."""

    __slots__ = ("_partial",)

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool) -> None:
        super().__init__(len(table.shown), table.skipped if skip_special_tokens else table.shown)
        self._partial = table.partial

    def _step(self, token_id: int) -> str:
        text = self.strings[token_id]
        data = self.pending + (self._partial[token_id] if text is None else text.encode())
        text, used = utf_8_decode(data, "replace", False)
        self.pending = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self.pending, "replace", True)
        self.pending = b""
        return text


@dataclass(frozen=True, slots=True)
class PieceTable(ByteTable):
    """A vocabulary of pieces with byte fallback; shared by all its detokenizers. `partial` holds every byte token.

    empty: ids that do have a token, of no text: unlike ids without a token they end a run of bytes.
    strip: a character and how many of it are stripped at the start of a whole text.
    first: None, or texts that the first token of a whole text has; for ids not in it, the usual without its spaces.
    """

    empty: frozenset[int] = frozenset()
    strip: tuple[str, int] = (" ", 0)
    first: Mapping[int, str] | None = None


class PieceDetokenizer(Detokenizer):
    """Pieces of text and single bytes; see the rule for runs of bytes above."""

    __slots__ = ("_broken", "_first", "_strip", "_table", "_texts")

    def __init__(self, table: PieceTable, *, skip_special_tokens: bool, continuation: bool) -> None:
        super().__init__(len(table.shown), NO_STRINGS)
        self._table = table
        self._texts = table.skipped if skip_special_tokens else table.shown
        #: An invalid byte was seen in the current run.
        self._broken = False
        #: The first token has not been seen, and has a text of its own.
        self._first = table.first is not None and not continuation
        #: Characters that may still have to be stripped.
        self._strip = 0 if continuation else table.strip[1]
        self._settle()

    def _settle(self) -> None:
        held = self._broken or self._first or self._strip
        self.strings = NO_STRINGS if held else self._texts

    def _step(self, token_id: int) -> str:
        text, table = self._texts[token_id], self._table
        if text == "" and token_id not in table.empty:
            return ""  # no token, or a skipped one: a run of bytes goes on across it
        data = table.partial.get(token_id)
        text = self._word(token_id, text or "") if data is None else self._byte(data)
        self._first = False
        if self._strip:
            text = self._stripped(text)
        self._settle()
        return text

    def _word(self, token_id: int, text: str) -> str:
        if self._first and (first := self._table.first) is not None:
            text = first.get(token_id, text.replace(" ", ""))
        return self._end_run() + text

    def _end_run(self) -> str:
        text = REPLACEMENT * len(self.pending)
        self.pending, self._broken = b"", False
        return text

    def _byte(self, data: bytes) -> str:
        if self._broken:
            return REPLACEMENT
        data = self.pending + data
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            text, used = REPLACEMENT * len(data), len(data)
        self.pending = data[used:]
        return text

    def _stripped(self, text: str) -> str:
        """`text` without the leading characters that are still to be stripped; other text ends the stripping."""
        char, most = self._table.strip[0], min(self._strip, len(text))
        count = next((i for i in range(most) if text[i] != char), most)
        if text:
            self._strip = self._strip - count if count == len(text) else 0
        return text[count:]

    def flush(self) -> str:
        text = self._end_run()
        self._settle()
        return text


@dataclass(frozen=True, slots=True)
class Window:
    """How a general detokenizer decodes; shared by all that have the same flags.

    size: ids are in ``range(size)``.
    decode: ids -> text of the whole.
    silent: ids that never have text here: no token, or a special one that is skipped. They do not enter a window.
    anchor: ids of an ordinary word, put before a window where a first word must not lose its space; may be empty.
    """

    size: int
    decode: Callable[[list[int]], str]
    silent: frozenset[int] = field(default_factory=frozenset)
    anchor: tuple[int, ...] = ()


class WindowDetokenizer(Detokenizer):
    """Decodes the last few ids again with each new one; right for every decoder that changes text only near its end."""

    __slots__ = ("_ids", "_shown", "_waiting", "_window")

    def __init__(self, window: Window, *, continuation: bool) -> None:
        super().__init__(window.size, NO_STRINGS)
        self._window = window
        self._open(list(window.anchor) if continuation else [])

    def _open(self, ids: list[int]) -> None:
        #: The ids in the window, and what of their text was given out.
        self._ids = ids
        self._shown = self._window.decode(ids) if ids else ""
        #: Lengths of the window's text after each of the last ids, as long as it has ended in U+FFFD.
        self._waiting: list[int] = []

    def _step(self, token_id: int) -> str:
        if token_id in self._window.silent:
            return ""
        self._ids.append(token_id)
        text = self._window.decode(self._ids)
        if not text.startswith(self._shown):
            self._open([])
            self._ids.append(token_id)
            text = self._window.decode(self._ids)
        end = self._ready(text)
        new, self._shown = text[len(self._shown) : end], text[:end]
        if len(self._ids) >= _WINDOW:
            self._shorten(text)
        return new

    def _ready(self, text: str) -> int:
        """Length of the text that will not change. The last three U+FFFD at its end may yet become a character (more
        bytes an incomplete one has not), but not those that were there `_MAX_INCOMPLETE` ids ago."""
        if not text.endswith(REPLACEMENT):
            self._waiting.clear()
            return len(text)
        self._waiting.append(len(text))
        old = self._waiting.pop(0) if len(self._waiting) == _MAX_INCOMPLETE else 0
        certain = max(len(text.rstrip(REPLACEMENT)), len(text) - _MAX_INCOMPLETE + 1)
        return max(certain, len(self._shown), min(old, len(text)))

    def _shorten(self, text: str) -> None:
        """Drop the oldest ids at a place where the rest decodes to the end of the same text.

        The rest must show some text: what a decoder strips off the end of a text (spaces, usually) is shown with the
        next word only if the ids it belongs to are still in the window.
        """
        held = len(text) - len(self._shown)
        for count in range(_CONTEXT, _CONTEXT + _MAX_INCOMPLETE):
            rest = self._window.decode(self._ids[-count:])
            if rest[: len(rest) - held].strip() and text.endswith(rest):
                self._waiting = [length - len(text) + len(rest) for length in self._waiting]
                self._ids, self._shown = self._ids[-count:], rest[: len(rest) - held]
                return
        if len(self._ids) >= _MAX_WINDOW and not held:
            self._open([*(self._window.anchor if self._shown else ()), *self._ids[-_CONTEXT:]])

    def flush(self) -> str:
        if not self._ids:
            return ""
        text = self._window.decode(self._ids)
        new, self._shown = text[len(self._shown) :], text
        return new


#: What transformers' `clean_up_tokenization` replaces, in its order: each one on the result of those before it.
_CLEAN_UPS = (
    *((" " + mark, mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((" " + end, end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
_CLEAN_UP_STAGES = tuple((Literals([old]), new) for old, new in _CLEAN_UPS)


class CleanUpDetokenizer(Detokenizer):
    """Another detokenizer's text with the spaces removed that transformers' clean-up removes.

    The replacements run one after the other over the whole text, so here each is a stage of its own, which holds back
    a proper prefix of what it replaces.
    """

    __slots__ = ("_inner", "_stages")

    def __init__(self, size: int, inner: Detokenizer) -> None:
        super().__init__(size, NO_STRINGS)
        self._inner = inner
        self._stages = [(LiteralScanner(literals), new) for literals, new in _CLEAN_UP_STAGES]

    def _step(self, token_id: int) -> str:
        text = self._inner.decode((token_id,))
        for scanner, new in self._stages:
            text = _replaced(scanner, new, text)
        return text

    def flush(self) -> str:
        text = self._inner.flush()
        for scanner, new in self._stages:
            text = _replaced(scanner, new, text) + scanner.flush()
        return text


def _replaced(scanner: LiteralScanner, new: str, text: str) -> str:
    return "".join([before + new if literal else before for before, literal in scanner.feed(text)])
