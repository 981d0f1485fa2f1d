"""What is asked: prompts, from chance or from a file; the same ones for the same seed.

A random prompt of N tokens is made of tokens that begin a word (`` river``), because the text of such tokens, put
together, is cut into the same tokens again by any tokenizer that cuts at spaces. Where a vocabulary has none, and
against what still merges, the text is encoded, shortened or lengthened until it has its length. Without a tokenizer it
is N common English words, of which nearly every vocabulary makes a token each; what is reported is what the server says
it read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .options import Options

_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name president team minute idea body information back parent "
    "face others level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education river light"
)
#: Each a token of its own, with the space before it, in the usual vocabularies.
WORDS = tuple(_COMMON.split())
#: Answer of a custom prompt that says nothing about its length, in tokens.
CUSTOM_OUTPUT_LEN = 256
#: Ids looked at for word-like tokens; how many of these are enough; and too few, since prompts would look alike.
_CANDIDATES, _ENOUGH, _FEW = 20_000, 2_000, 50
_ATTEMPTS = 8


class DatasetError(ValueError):
    """A dataset or tokenizer cannot be used."""


class Tokenizer(Protocol):
    """What we ask of a tokenizer. special: ids that are no text."""

    special: set[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def get_vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to be.

    text: a prompt, or a conversation's messages.
    input_tokens: as far as is known here; the server's own count goes before it.
    output_tokens: at most so many are asked for.
    """

    text: str | list[dict[str, Any]]
    input_tokens: int
    output_tokens: int

    def body(self, options: Options, model: str) -> dict[str, Any]:
        """The request's JSON."""
        length = "max_completion_tokens" if options.is_chat else "max_tokens"
        body: dict[str, Any] = {"model": model, **self._content(options.is_chat), length: self.output_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | ({"ignore_eos": True} if options.ignore_eos else {}) | options.body

    def _content(self, chat: bool) -> dict[str, Any]:
        if not chat:
            return {"prompt": self.text}
        return {"messages": [{"role": "user", "content": self.text}] if isinstance(self.text, str) else self.text}


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, without special tokens around what it encodes."""

    def __init__(self, path: Path) -> None:
        # Imported here: whoever needs no tokenizer needs no library for it.
        from tokenizers import Tokenizer as Loaded

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DatasetError(f"--tokenizer: there is no file {file}")
        self._tokenizer = Loaded.from_file(str(file))
        self.special = {id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(ids))

    def get_vocab_size(self) -> int:
        """One more than the largest id."""
        return int(self._tokenizer.get_vocab_size())


def prompts(options: Options, tokenizer: Tokenizer | None) -> tuple[list[Prompt], list[Prompt]]:
    """(those that count, those to warm up with), in the order in which they are sent. Raises DatasetError.

    Warm-up has prompts of its own, so that no measured one is found in a prefix cache because of it; a custom file that
    is too short for that is used again from its start.
    """
    make = _custom if options.dataset_name == "custom" else _random
    source = make(options, tokenizer)
    measured = [next(source) for _ in range(options.num_prompts)]
    return measured, [next(source) for _ in range(options.num_warmups)]


# ------------------------------------------------------------------------------------------------ random


def _random(options: Options, tokenizer: Tokenizer | None) -> Iterator[Prompt]:
    rng = np.random.default_rng([options.seed, 0])
    make = _words(rng) if tokenizer is None else _tokens(rng, tokenizer)
    # Lengths from another generator: the n-th prompt's length does not depend on how the others' texts were found.
    lengths = np.random.default_rng([options.seed, 1])
    draw_input, draw_output = (_lengths(lengths, ratio) for ratio in options.random_range_ratio)
    prefix = make(options.random_prefix_len, "") if options.random_prefix_len else ""
    while True:
        length = draw_input(options.random_input_len)
        text = make(options.random_prefix_len + length, prefix)
        yield Prompt(text, options.random_prefix_len + length, draw_output(options.random_output_len))


def _lengths(rng: np.random.Generator, ratio: float) -> Callable[[int], int]:
    def draw(length: int) -> int:
        low, high = int(np.floor(length * (1 - ratio))), int(np.ceil(length * (1 + ratio)))
        return max(1, int(rng.integers(low, high, endpoint=True)))

    return draw


def _words(rng: np.random.Generator) -> Callable[[int, str], str]:
    def make(count: int, prefix: str) -> str:
        wanted = count - len(prefix.split())
        words = " ".join(WORDS[n] for n in rng.integers(0, len(WORDS), wanted))
        return f"{prefix} {words}" if prefix else words

    return make


def _tokens(rng: np.random.Generator, tokenizer: Tokenizer) -> Callable[[int, str], str]:
    pool = _pool(rng, tokenizer)

    def more(count: int) -> str:
        return tokenizer.decode([int(id) for id in rng.choice(pool, count)])

    def make(count: int, prefix: str) -> str:
        """A text of ``count`` tokens that begins with ``prefix``, or nearly so many if none was found."""
        text = prefix + more(count - len(tokenizer.encode(prefix)))
        for _ in range(_ATTEMPTS):
            ids = tokenizer.encode(text)
            if len(ids) == count:
                break
            text = text + more(count - len(ids)) if len(ids) < count else tokenizer.decode(ids[:count])
        return text

    return make


def _pool(rng: np.random.Generator, tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids to make prompts of: tokens that begin a word; where there are few, those whose text is theirs alone; where
    there are few of these too, all but the special ones."""
    size = tokenizer.get_vocab_size()
    ids = [id for id in rng.permutation(size)[:_CANDIDATES].tolist() if id not in tokenizer.special]
    words: list[int] = []
    alone: list[int] = []
    for id in ids:
        text = tokenizer.decode([id])
        if tokenizer.encode(text) == [id]:
            alone.append(id)
            if text[:1] == " " and text[1:].isalpha():
                words.append(id)
        if len(words) == _ENOUGH:
            break
    return np.array(next((pool for pool in (words, alone) if len(pool) >= _FEW), ids))


# ------------------------------------------------------------------------------------------------ custom


def _custom(options: Options, tokenizer: Tokenizer | None) -> Iterator[Prompt]:
    assert options.dataset_path is not None
    rows = list(_rows(options.dataset_path, options, tokenizer))
    if not rows:
        raise DatasetError(f"{options.dataset_path}: no prompt in it")
    order = list(range(len(rows)))
    if not options.disable_shuffle:
        np.random.default_rng([options.seed, 0]).shuffle(order)
    while True:
        yield from (rows[n] for n in order)


def _rows(path: Path, options: Options, tokenizer: Tokenizer | None) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DatasetError(f"--dataset-path: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _row(json.loads(line), options, tokenizer)
            except ValueError as error:
                raise DatasetError(f"{path}:{number}: {error}") from None


def _row(row: Any, options: Options, tokenizer: Tokenizer | None) -> Prompt:
    """A line's prompt. Raises ValueError naming the key."""
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    text = row.get("prompt", row.get("messages"))
    if isinstance(text, list) and not options.is_chat:
        raise ValueError("messages: need --backend openai-chat")
    if not (isinstance(text, str) and text) and not (isinstance(text, list) and all(isinstance(m, dict) for m in text)):
        raise ValueError("prompt: must be a text, or messages a list of objects")
    return Prompt(text, _count(text, tokenizer), _output_tokens(row, options.custom_output_len))


def _count(text: str | list[dict[str, Any]], tokenizer: Tokenizer | None) -> int:
    joined = text if isinstance(text, str) else " ".join(str(message.get("content")) for message in text)
    return len(joined.split() if tokenizer is None else tokenizer.encode(joined))


def _output_tokens(row: dict[str, Any], forced: int | None) -> int:
    if forced is not None and forced > 0:
        return forced
    value = row.get("output_tokens", CUSTOM_OUTPUT_LEN if forced is None else None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"output_tokens: must be an integer >= 1, and is {value!r}")
    return value
