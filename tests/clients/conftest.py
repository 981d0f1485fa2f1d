"""Servers of two scripted models, one per family, for all clients of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.models import OSS, QWEN, ScriptedModel
from tests.clients.scenario import OSS_ANSWERS, QWEN_ANSWERS
from tests.process.server import Server


@pytest.fixture(scope="package")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Qwen3 with hermes calls, one token per step, through one worker process."""
    model = ScriptedModel(QWEN, QWEN_ANSWERS, tmp_path_factory.mktemp("qwen"))
    with model.server("--num_postprocess_workers", "1", step_interval=0.001) as server:
        yield server


@pytest.fixture(scope="package")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """gpt-oss, three tokens per step, post-processed in the front end; reasoning under both of its keys."""
    model = ScriptedModel(OSS, OSS_ANSWERS, tmp_path_factory.mktemp("oss"))
    with model.server("--num_postprocess_workers", "0", "--reasoning_alias", tokens_per_step=3) as server:
        yield server


@pytest.fixture(params=["qwen", "oss"])
def server(request: pytest.FixtureRequest) -> Server:
    """Either of them."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found
