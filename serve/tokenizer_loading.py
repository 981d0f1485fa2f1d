"""From a path to a tokenizer here, and from that to the file that workers load."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast


class TokenizerError(ValueError):
    """There is no tokenizer at a path; the message says why."""


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """A tokenizer from a directory in Hugging Face layout or from a tokenizer.json. Raises TokenizerError."""
    with _LoadingErrors(source):
        if source.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(source))
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)


class _LoadingErrors:
    """What loading a tokenizer may raise, as a TokenizerError. The tokenizers library raises Exception itself for a
    malformed file, so the class has to be looked at: an except clause for it would catch everything else too."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or isinstance(error, (OSError, ValueError, KeyError, TypeError)):
            raise TokenizerError(f"no tokenizer can be loaded from {self._source}: {error}") from error


def worker_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path, directory: Path) -> str:
    """What workers load, so that they need not import transformers: the very tokenizer that is used here, saved into
    ``directory``. Some classes of transformers build another one than the tokenizer.json beside the model says."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:  # the file would not say that it cleans up
        return str(source)
    file = directory / "tokenizer.json"
    backend.save(str(file))
    return str(file)
