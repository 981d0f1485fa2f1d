"""A tokenizer for executors on the replay engine, and their configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.config import Config
from tests.process.server import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's directory, with a chat template that writes the messages' texts one after another."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tokenizer: Path) -> Callable[..., Config]:
    """``config(workers=1, **engine_config)``: an executor on the replay engine."""

    def make(workers: int = 1, **engine_config: Any) -> Config:
        return Config(
            engine="replay", tokenizer=str(tokenizer), num_postprocess_workers=workers, engine_config=engine_config,
            log_level="warning",
        )  # fmt: skip

    return make
