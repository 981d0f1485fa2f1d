"""What a server says of itself once it has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.engines.base import EngineInfo
from executor.models import ModelFiles
from serve.config import Config
from serve.facts import server_facts
from serve.prompts import Prompts
from serve.tokenizer_loading import load_tokenizer
from tests.process.server import make_tokenizer

INFO = EngineInfo("e", vocab_size=500, max_model_len=100, supported=())


def test_clients_load_the_tokenizer_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub by the model's name there, else from this machine."""
    place = make_tokenizer(tmp_path / "place")
    (tmp_path / "org" / "local").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    prompts = Prompts(load_tokenizer(place))

    def root(config: Config, name: str | None, tokenizer: Path = place) -> str:
        files = ModelFiles(tokenizer, name) if name else None
        return server_facts(config, files, INFO, prompts, tokenizer).root

    assert root(Config(model="org/model"), "org/model") == "org/model"
    assert root(Config(model="org/model", tokenizer=str(place)), "org/model") == str(place), "another tokenizer"
    assert root(Config(model="org/local"), "org/local") == str(place), "a directory goes before the hub"
    assert root(Config(), "SmolLM2") == root(Config(model="m.gguf"), "m") == str(place), "converted"
    assert root(Config(engine="replay"), None, Path("place")) == str(place)
    prompts.close()
