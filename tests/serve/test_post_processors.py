"""The table that a server gives its workers."""

from __future__ import annotations

from postproc_workers.post_processor import PostProcessor, load_post_processors
from postproc_workers.replay import POST_PROCESSORS


def test_what_a_servers_workers_can_do() -> None:
    table = load_post_processors(POST_PROCESSORS)
    assert all(isinstance(entry, PostProcessor) for entry in table.values())
    assert set(table) == {
        "deltas",  # handles in other processes (GenerationExecutor.submit) step what this one makes
        "chat_stream",
        "chat_unary",
        "completion_stream",
        "completion_unary",
        "chat_harmony_stream",
        "chat_harmony_unary",
        "responses_stream",
        "responses_unary",
        "scaffolding_stream",
        "scaffolding_unary",
    }
