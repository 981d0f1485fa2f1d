"""Small tokenizers of every kind, built by code in milliseconds, and token ids to try on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "Hello world, this is a small tokenizer.",
    "The quick brown fox jumps over the lazy dog; it can't, won't and didn't.",
    "서울의 겨울은 춥지만 하늘이 맑습니다.",
    "人工智能改变了世界，你同意吗？",
    "naïve café, žluťoučký kůň 😀🎉 👨‍👩‍👧‍👦",
]

#: Text that is hard to put together from pieces: joined emoji, Korean, combining marks, spaces, a literal U+FFFD.
HARD_TEXTS = [
    *SENTENCES, "👨‍👩‍👧‍👦🏳️‍🌈👍🏽", "뷁쀍쏋", "e\u0301 n\u0303", "  two  spaces ", "\ufffd", "\n\t", "'s it 's . ' ,",
]  # fmt: skip

PIECES = [
    "▁Hello", "▁world", "▁", "▁▁", "▁▁▁", "a", "b", "ing", ",", ".",
    "▁n't", "▁'", "é", "世", "서울", "\ufffd", "▁.", "\n",
]  # fmt: skip


def _added(tokenizer: Tokenizer) -> Tokenizer:
    """Special tokens and ordinary added ones, some with characters that a decoder might touch."""
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<｜pad▁｜>", "<é>")])
    tokenizer.add_tokens([AddedToken(text) for text in ("<think>", "né w", "ñ")])
    tokenizer.add_tokens([AddedToken(" ▁ x", normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """Byte-level BPE, trained; every byte is a token, as are a few incomplete sequences of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _added(tokenizer)


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    strings = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE({string: i for i, string in enumerate(strings)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    return _added(tokenizer)


def llama() -> Tokenizer:
    """SentencePiece with byte fallback; one leading space of the whole text is stripped."""
    members = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(members))


def llama_strip_three() -> Tokenizer:
    """The same with up to three leading spaces."""
    members = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    return _sentencepiece(decoders.Sequence(members))


def gemma() -> Tokenizer:
    """SentencePiece with byte fallback that strips nothing."""
    return _sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Tokenizer:
    """T5: the first token loses its marks; byte tokens are ordinary text."""
    return _sentencepiece(decoders.Metaspace())


def metaspace_never() -> Tokenizer:
    """Metaspace without a rule for the first token."""
    return _sentencepiece(decoders.Metaspace(prepend_scheme="never"))


def metaspace_fallback() -> Tokenizer:
    """Metaspace, then byte fallback."""
    return _sentencepiece(decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]))


def fallback_metaspace() -> Tokenizer:
    """The other order: a run of bytes may be the first string that Metaspace sees."""
    return _sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]))


def panicking() -> Tokenizer:
    """The library panics on every text shorter than what this decoder may strip off its end."""
    return _sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 3)]))


def wordpiece() -> Tokenizer:
    """BERT: words are joined by spaces, ``##`` continues one."""
    words = ["[UNK]", "hello", "world", "##ing", "##s", "a", ",", ".", "'", "n't", "don", "é", "世"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _added(tokenizer)


def wordpiece_cleanup() -> Tokenizer:
    """The same with the decoder's own clean-up, which works inside tokens."""
    tokenizer = wordpiece()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


def bpe_suffix() -> Tokenizer:
    """BPE whose words end in ``</w>``: a space that shows only with the next token."""
    pieces = ["a", "b</w>", "hello</w>", "wor", "ld</w>", ",</w>", "é</w>", "世"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return _added(tokenizer)


def no_decoder() -> Tokenizer:
    """Tokens joined by spaces."""
    words = ["hello", "world", "a", "é", "世"]
    return _added(Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")))


def byte_level_replace() -> Tokenizer:
    """A byte-level decoder with something behind it, which no table describes."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("z", "s")])
    return tokenizer


#: name -> (how to build it, the kind of vocabulary it must become)
KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "byte_level": (byte_level, "byte_level"),
    "llama": (llama, "pieces"),
    "llama_strip_three": (llama_strip_three, "pieces"),
    "gemma": (gemma, "pieces"),
    "metaspace": (metaspace, "pieces"),
    "metaspace_never": (metaspace_never, "pieces"),
    "metaspace_fallback": (metaspace_fallback, "pieces"),
    "fallback_metaspace": (fallback_metaspace, "window"),
    "wordpiece": (wordpiece, "window"),
    "wordpiece_cleanup": (wordpiece_cleanup, "window"),
    "bpe_suffix": (bpe_suffix, "window"),
    "no_decoder": (no_decoder, "window"),
    "byte_level_replace": (byte_level_replace, "window"),
}

#: Those whose decoder joins byte tokens to runs, and has a table.
WITH_FALLBACK = ("llama", "llama_strip_three", "gemma", "metaspace_fallback")

BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


@cache
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name, built once."""
    return KINDS[name][0]()


def id_of(name: str, token: str) -> int:
    """The id of a token string."""
    found = tokenizer(name).token_to_id(token)
    assert found is not None, token
    return found


def spelled(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids of single-byte tokens for `data`; [] where the tokenizer has none."""
    if tokenizer.token_to_id("<0x00>") is not None:
        found = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    else:
        found = [tokenizer.token_to_id(_byte_char(byte)) for byte in data]
    return [token_id for token_id in found if token_id is not None]


def _byte_char(byte: int) -> str:
    hidden = [b for b in range(256) if not (0x21 <= b < 0x7F or 0xA1 <= b < 0xAD or b >= 0xAE)]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)


def expected(name: str, ids: list[int], skip: bool) -> str:
    """What a detokenizer must make of `ids`: the library's decode, but for broken runs of byte tokens.

    In a run of byte tokens the characters before the first invalid byte stay; from there on each byte is one U+FFFD.
    The library makes U+FFFD of the whole run then, which the text is equal to where no character precedes that byte.
    """
    library = tokenizer(name)
    if name not in WITH_FALLBACK:
        return library.decode(ids, skip_special_tokens=skip)
    hidden = {token.content for token in library.get_added_tokens_decoder().values() if token.special and skip}
    tokens = [token for token in map(library.id_to_token, ids) if token is not None and token not in hidden]
    kept: list[str] = []
    run = b""
    for token in [*tokens, None]:
        if token in BYTE_TOKENS:
            run += bytes([BYTE_TOKENS[token]])
            continue
        kept += _run_pieces(run)
        run = b""
        if token is not None:
            kept.append(token)
    assert library.decoder is not None
    return str(library.decoder.decode(kept))


def _run_pieces(run: bytes) -> list[str]:
    """A run of bytes as pieces for the decoder: its valid start as bytes, then U+FFFD for each byte that is left."""
    try:
        run.decode()
        valid = len(run)
    except UnicodeDecodeError as error:
        valid = error.start
    return [f"<0x{byte:02X}>" for byte in run[:valid]] + ["\ufffd"] * (len(run) - valid)
