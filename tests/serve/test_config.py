"""One frozen object with all settings."""

from __future__ import annotations

import dataclasses
import json

import pytest

from serve.config import Config, default_workers


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (32, 8), (128, 8)])
def test_default_workers(cores: int, workers: int) -> None:
    assert default_workers(cores) == workers


def test_the_default_is_for_this_machine() -> None:
    assert Config().num_postprocess_workers == default_workers()


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().port = 1  # type: ignore[misc]


def test_arguments_of_an_engine() -> None:
    replay = Config(engine="replay", engine_config={"vocab_size": 5})
    assert replay.engine_args(None) == {"config": {"vocab_size": 5}}
    own = Config(device="cpu", max_num_seqs=3).engine_args("/a/model")
    assert own["model_dir"] == "/a/model" and own["device"] == "cpu" and own["max_num_seqs"] == 3
    assert set(own) == {"model_dir", "device", "dtype", "max_batch_tokens", "max_num_seqs", "max_model_len"}


def test_plain_and_back() -> None:
    """As a front end's process gets them: through JSON."""
    config = Config(
        model="m", engine_config={"scripts": [{"token_ids": [1]}]}, api_key=("a", "b"), cors_origin=("https://x",),
        port=0, queue_timeout=1.5,
    )  # fmt: skip
    assert Config.from_plain(json.loads(json.dumps(config.to_plain()))) == config
