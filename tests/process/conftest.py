"""Servers on the replay engine that the tests of this folder share: one per number of workers, started on demand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.expected import script, vocabulary_config
from tests.process.server import Server, make_tokenizer, replay_arguments, serving

#: Text that is hard to cut: characters over several tokens, beginnings of stops that come to nothing, and a stop.
HARD = (
    "Hello",
    "<0xE4>",
    "<0xB8>",
    "<0x96>",
    " a",
    "ST",
    "STO",
    "aa",
    "aab",
    "<",
    "|>",
    "😀",
    "STO",
    "P.",
    " the",
    "END",
)
OTHER = (
    "the",
    " answer",
    " is",
    "<0xF0>",
    "!",
    "42",
    "\n\n",
    "EN",
    "EN",
    "D.",
    "Hello",
    "STO",
    "OP",
    " world",
    "STOP",
    "!",
)

#: Streams to be hurt: at CONFIG's pace they take a second and a half.
SLOW = ("Hello", " world", "<0xE4>", "<0xB8>", "<0x96>", "ST", "OP", " the", "😀", "aab", "STO", " a") * 9

CONFIG: dict[str, Any] = {
    **vocabulary_config(),
    "step_interval": 0.01,
    "rule": "prompt",
    "scripts": [
        script("hard", *HARD, logprobs=True),
        script("hard", *OTHER, logprobs=True),
        script("slow", *SLOW, *HARD, logprobs=True),
        script("slow", *SLOW, *OTHER, logprobs=True),
        script("excited", "Hello", " world", "!", " the", "Hello"),
        script("broken", "Hello", " world", finish_reason="error", message="the engine has had enough"),
    ],
}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's directory."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="package")
def replay_server(tokenizer: Path) -> Iterator[Callable[[int], Server]]:
    """A server with that many workers on ``CONFIG``. Whoever kills one of its workers waits for the replacement."""
    with contextlib.ExitStack() as stack:
        running: dict[int, Server] = {}

        def get(workers: int) -> Server:
            if workers not in running:
                running[workers] = stack.enter_context(serving(*replay_arguments(tokenizer, workers, **CONFIG)))
            return running[workers]

        yield get
