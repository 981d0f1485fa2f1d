"""A recording -> bytes: how tokens are cut, and that a malformed recording says what is wrong with it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postproc_workers.replay import RecordingError, cuts, replay
from tests.helpers import CHAT, COMPLETIONS, tokens
from tests.recordings.build_tokenizers import FOLDER
from tests.recordings.checker import merge_document, merge_stream

SPLITS = st.sampled_from(["whole", "each"]) | st.builds(
    "{}:{}".format, st.sampled_from(["every", "at", "random"]), st.integers(1, 2**64)
)


def recording(**changed: Any) -> dict[str, Any]:
    output = {
        "index": 0,
        "token_ids": tokens("a", "b", "<|end|>"),
        "finish_reason": "stop",
        "stop_token_id": tokens("<|end|>")[0],
    }
    return {
        "name": "r",
        "endpoint": CHAT,
        "request": {"model": "m", "messages": [{"role": "user", "content": "Go."}]},
        "server": {"tokenizer": "tokenizers/byte_level.json", "tool_parser": None, "reasoning_parser": None},
        "prompt_tokens": 5,
        "outputs": [output],
    } | changed


def text_recording(text: str, **changed: Any) -> dict[str, Any]:
    return recording(outputs=[{"index": 0, "text": text, "finish_reason": "length"}], server={}) | changed


def body(made: dict[str, Any], **options: Any) -> bytes:
    return replay(made, base_dir=FOLDER.parent, **options)


# ------------------------------------------------------------------------------------------------------ cuts


@given(st.integers(0, 60), SPLITS)
def test_cuts_cover_all_tokens_in_order(count: int, split: str) -> None:
    ends = cuts(count, split)
    assert ends[-1] == count and ends == sorted(set(ends)) and all(end > 0 for end in ends[:-1])
    assert cuts(count, split) == ends


def test_what_each_split_means() -> None:
    assert cuts(4, "whole") == [4] and cuts(4, "each") == [1, 2, 3, 4]
    assert cuts(5, "every:2") == [2, 4, 5] and cuts(4, "every:4") == [4]
    assert cuts(4, "at:3") == [3, 4] and cuts(4, "at:0") == [4] and cuts(4, "at:9") == [4]
    assert cuts(50, "random:1") != cuts(50, "random:2")
    assert [cuts(0, split) for split in ("whole", "each", "every:2", "at:1", "random:3")] == [[0]] * 5


@pytest.mark.parametrize(
    "split",
    [
        "",
        "half",
        "whole:1",
        "each:2",
        "every",
        "every:",
        "every:0",
        "every:-1",
        "every:x",
        "at:-1",
        "at:1.5",
        "random",
        "random:",
    ],
)
def test_splits_that_there_are_not(split: str) -> None:
    with pytest.raises(RecordingError, match="split"):
        body(recording(), split=split)


# ------------------------------------------------------------------------------------------------------ what comes out


def test_stream_and_document() -> None:
    made = recording()
    before = copy.deepcopy(made)
    stream = merge_stream(body(made), CHAT)
    assert (stream.choices[0].content, stream.choices[0].finish_reason) == ("ab", "stop")
    document = merge_document(body(made, stream=False), CHAT)
    assert document.choices == stream.choices
    assert document.usage == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert made == before


def test_a_replay_has_no_clock_and_no_chance() -> None:
    assert body(recording()) == body(recording())
    assert b'"id":"replay-r"' in body(recording()) and b'"created":0' in body(recording())


def test_text_is_replayed_by_characters() -> None:
    made = text_recording("a😀\ud800b".replace("\ud800", "é"))
    assert len(merge_stream(body(made), CHAT).chunks) == 1 + 4 + 1
    assert merge_stream(body(made, split="whole"), CHAT).choices[0].content == "a😀éb"


def test_the_prompt_is_echoed_where_asked_for() -> None:
    request = {"prompt": "Once", "echo": True}
    made = text_recording(" upon", endpoint=COMPLETIONS, request=request)
    assert merge_document(body(made, stream=False), COMPLETIONS).choices[0].content == "Once upon"
    made["prompt"] = "Twice"
    assert merge_document(body(made, stream=False), COMPLETIONS).choices[0].content == "Twice upon"


def test_a_request_that_is_refused_is_its_error() -> None:
    for changed in ({"request": {}}, {"request": None}, {"request": {"messages": [], "n": 0}}, {"endpoint": "/v1/no"}):
        for stream in (True, False):
            assert merge_document(body(recording(**changed), stream=stream), CHAT).error is not None


def test_bad_ids_end_the_request_and_not_the_replay() -> None:
    for bad in (-1, 332, 2**31, 2**40):
        made = recording(
            outputs=[{"index": 0, "token_ids": [*tokens("a"), bad, *tokens("b")], "finish_reason": "length"}]
        )
        for split in ("each", "whole", "at:1", "at:2"):
            merged = merge_stream(body(made, split=split), CHAT)
            assert merged.error is not None and merged.choices[0].content == "a"
        assert merge_document(body(made, stream=False), CHAT).error is not None


# ------------------------------------------------------------------------------------------------------ what is refused


def output(**changed: Any) -> dict[str, Any]:
    return {"outputs": [{"index": 0, "token_ids": tokens("a"), "finish_reason": "stop"} | changed]}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"outputs": []}, "outputs"),
        ({"outputs": None}, "outputs"),
        ({"outputs": [5]}, "outputs"),
        (output(index=1), "index"),
        (output(index="0"), "index"),
        (output(token_ids=None), "token_ids"),
        (output(token_ids=[1, None]), "token_ids"),
        (output(token_ids=[True]), "token_ids"),
        (output(token_ids=["1"]), "token_ids"),
        (output(finish_reason=None), "finish_reason"),
        (output(finish_reason="tired"), "finish_reason"),
        (output(logprobs=[]), "logprobs"),
        (output(logprobs=[{"top": []}]), "logprobs"),
        (output(logprobs=[5]), "logprobs"),
        (output(logprobs=[{"logprob": "x"}]), "logprobs"),
        (output(logprobs=[{"logprob": -1, "top": [5]}]), "logprobs"),
        ({"outputs": [{"index": 0, "text": 5, "finish_reason": "stop"}]}, "text"),
        ({"outputs": output()["outputs"] * 2}, "index"),
        ({"outputs": [*output()["outputs"], *output(index=1)["outputs"]]}, "outputs"),
        ({"request": recording()["request"] | {"n": 2}}, "outputs"),
        ({"server": {}}, "tokenizer"),
        ({"server": None}, "tokenizer"),
        ({"server": {"tokenizer": "no/such.json"}}, "tokenizer"),
        ({"prompt_tokens": "5"}, "prompt_tokens"),
        ({"prompt_tokens": None}, "prompt_tokens"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"prompt": 5}, "prompt"),
        ({"server": 5}, "server"),
    ],
)
def test_a_malformed_recording_names_the_key(changed: dict[str, Any], named: str) -> None:
    for stream in (True, False):
        with pytest.raises(RecordingError, match=named):
            body(recording(**changed), stream=stream)


def test_what_is_given_by_name_is_loaded_by_name() -> None:
    with pytest.raises(ValueError, match="post_processors"):
        body(recording(), post_processors="serve.no_such:TABLE")
    with pytest.raises(ValueError, match="admission"):
        body(recording(), admission="serve.no_such:admit")


def test_a_replay_needs_no_model_library() -> None:
    """Neither transformers nor torch: a bug report is looked at where there is no GPU."""
    code = (
        "import json, sys; from postproc_workers.replay import replay; made, base = json.load(sys.stdin);"
        "replay(made, base_dir=base);"
        "print([name for name in ('torch', 'transformers', 'zmq', 'starlette') if name in sys.modules])"
    )
    made = json.dumps([recording(), str(FOLDER.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], input=made, text=True, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
