"""A front end's life: what it opens it closes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from executor.engines.base import EngineInfo
from serve.config import Config
from serve.frontend import Frontend, Model
from serve.gateway import ServerState
from serve.listening import listen
from serve.tokenizer_loading import load_tokenizer
from tests.process.client import fetch
from tests.process.server import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prompt_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prompts")]


def test_what_it_opens_it_closes(tokenizer: Path) -> None:
    model = Model(None, tokenizer, EngineInfo("replay", 300, 1000, ()))
    config = Config(engine="replay", tokenizer=str(tokenizer))
    others = set(prompt_threads())

    async def main() -> None:
        frontend = Frontend(config, ServerState())
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        facts = await frontend.start(listener, load_tokenizer(tokenizer), model, None)
        assert facts.max_model_len == 1000
        answer = await fetch(url, "/tokenize", {"prompt": "a"})
        assert (answer.status, answer.json()["tokens"]) == (200, [97])
        assert set(prompt_threads()) - others
        await frontend.stop_http()
        await frontend.stop_http()
        frontend.close()
        with pytest.raises(ConnectionRefusedError):
            await fetch(url, "/live", method="GET")

    asyncio.run(main())
    own = set(prompt_threads()) - others
    for thread in own:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in own)


def test_a_drain_ends_at_once_without_streams(tokenizer: Path) -> None:
    async def main() -> None:
        frontend = Frontend(Config(), ServerState())
        await asyncio.wait_for(frontend.drain(asyncio.Event(), timeout=60.0), 5.0)

    asyncio.run(main())
