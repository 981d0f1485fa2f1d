"""Recordings: every one, with every split and as a document, gives what it expects.

A fault that was fixed is kept as a line in a file of this folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postproc_workers.replay import replay
from tests.recordings.build_tokenizers import BUILDERS, FOLDER, ids_by_text
from tests.recordings.checker import Merged, compare, merge_document, merge_stream, options

HERE = Path(__file__).parent
#: The files that the text endpoints answer for; others hold what parsers and other endpoints are tested with.
FILES = ("detokenizer", "stop", "finish", "logprobs")


def recordings() -> Iterator[dict[str, Any]]:
    for name in FILES:
        for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").split("\n"):
            if line:
                yield json.loads(line)


RECORDINGS = {recording["name"]: recording for recording in recordings()}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def splits(recording: dict[str, Any]) -> list[str]:
    """Those a replay offers: all places for a short output."""
    longest = max(len(output.get("token_ids", output.get("text", ""))) for output in recording["outputs"])
    kinds = ["whole", "each", *(f"every:{n}" for n in (2, 3, 5)), *(f"random:{seed}" for seed in range(4))]
    return kinds + [f"at:{place}" for place in range(1, min(longest, 40))]


def streamed(recording: dict[str, Any], split: str) -> Merged:
    body = replay(recording, split=split, base_dir=HERE)
    merged = merge_stream(body, recording["endpoint"], **options(recording))
    merged.chunks = []
    return merged


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording(name: str) -> None:
    recording = RECORDINGS[name]
    shown = {key: value for key, value in recording.items() if key != "expect"}
    document = merge_document(replay(shown, stream=False, base_dir=HERE), recording["endpoint"])
    compare(document, recording["expect"])
    for split in splits(recording):
        merged = streamed(shown, split)
        compare(merged, recording["expect"])
        assert (merged.error is None) == (document.error is None), split
        if merged.error is None:
            assert merged.choices == document.choices, split
            assert merged.usage in (None, document.usage), split
    assert shown == {key: value for key, value in RECORDINGS[name].items() if key != "expect"}


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_split_is_the_same_stream(name: str) -> None:
    """Where a request fails in the middle, too, what came before does not depend on the cut (one choice only: how far
    the others got is the steps' business)."""
    recording = RECORDINGS[name]
    if len(recording["outputs"]) > 1 and recording["expect"].get("error"):
        return
    first = streamed(recording, "each")
    assert all(streamed(recording, split) == first for split in splits(recording))


def test_names_are_unique_and_say_where_they_stand() -> None:
    assert len(list(recordings())) == len(RECORDINGS)
    assert {name.partition("/")[0] for name in RECORDINGS} == set(FILES)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_tokenizers_are_those_that_the_code_builds(name: str) -> None:
    file = FOLDER / f"{name}.json"
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(BUILDERS[name]().to_str())
    assert file.stat().st_size < 100_000 and len(ids_by_text(name)) > 250


@pytest.mark.parametrize(
    ("expect", "fault"),
    [
        ({"content": "b"}, "content"),
        ({"finish_reason": "length"}, "finish_reason"),
        ({"stop_reason": "x"}, "stop_reason"),
        ({"usage": {"completion_tokens": 9}}, "usage"),
        ({"never": ["a"]}, "sent"),
        ({"error": True}, "error"),
        ({"logprobs": [{"token": "a"}]}, "logprobs"),
    ],
)
def test_the_checker_finds_faults(expect: dict[str, Any], fault: str) -> None:
    output = {"index": 0, "text": "a", "finish_reason": "stop"}
    request = {"messages": [{"role": "user", "content": "Go."}]}
    recording = {
        "name": "x",
        "endpoint": "/v1/chat/completions",
        "request": request,
        "prompt_tokens": 1,
        "outputs": [output],
    }
    document = merge_document(replay(recording, stream=False), "/v1/chat/completions")
    with pytest.raises(AssertionError, match=fault):
        compare(document, expect)


HEAD = '"id":"a","object":"chat.completion.chunk","created":1,"model":"m"'
ROLE = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
WORD = '"delta":{"content":"x"},"logprobs":null,"finish_reason":"stop","stop_reason":null'
DONE = "data: [DONE]\n\n"


def event(choice: str, head: str = HEAD) -> str:
    return f'data: {{{head},"choices":[{{"index":0,{choice}}}]}}\n\n'


@pytest.mark.parametrize(
    "body",
    [
        *("", "data: {}\n\n", DONE, DONE * 2, f"data: x\r\n\n{DONE}", "event: x\ndata: y\n\n"),
        event(WORD) + DONE,  # no role
        event(ROLE) + DONE,  # no finish reason
        event(ROLE) + event(WORD),  # no end
        event(ROLE) + event(WORD) + DONE + event(WORD),
        event(ROLE) + event(WORD) + event(WORD) + DONE,
        event(ROLE) + event(WORD, HEAD.replace('"a"', '"b"')) + DONE,
        f'data: {{"id":NaN}}\n\n{DONE}',
    ],
)
def test_the_checker_refuses_malformed_streams(body: str) -> None:
    assert merge_stream((event(ROLE) + event(WORD) + DONE).encode(), "/v1/chat/completions").choices[0].content == "x"
    with pytest.raises((AssertionError, KeyError, ValueError)):
        merge_stream(body.encode(), "/v1/chat/completions")
