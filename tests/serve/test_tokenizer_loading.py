"""Tokenizers that load, those that do not, and the file that workers get."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from serve.tokenizer_loading import TokenizerError, load_tokenizer, worker_tokenizer
from tests.process.server import make_tokenizer


def test_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    assert load_tokenizer(folder).chat_template
    assert load_tokenizer(folder / "tokenizer.json").encode("ab", add_special_tokens=False) == [97, 98]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_workers_get_the_tokenizer_that_is_used_here(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<added>"])
    file = worker_tokenizer(tokenizer, folder, tmp_path)
    assert file == str(tmp_path / "tokenizer.json")
    assert Tokenizer.from_file(file).token_to_id("<added>") == len(tokenizer) - 1


def test_workers_load_one_that_cleans_up_by_themselves(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.clean_up_tokenization_spaces = True
    assert worker_tokenizer(tokenizer, folder, tmp_path) == str(folder)
