"""From a recording to the spec that admission made of the live request."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from postproc_workers.spec import StreamSpec
from serve.recordings import admit_recording
from tests.helpers import CHAT, COMPLETIONS
from tests.recordings.checker import merge_document


def recording(endpoint: str = CHAT, request: Any = None, **changed: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": "Go."}]}
    request = request if request is not None else chat if endpoint == CHAT else {"prompt": "Once"}
    return {"name": "r", "endpoint": endpoint, "request": request, "server": {}, "prompt_tokens": 5} | changed


def spec(stream: bool = True, **changed: Any) -> StreamSpec:
    made = admit_recording(recording(**changed), stream)
    assert isinstance(made, StreamSpec)
    return made


def test_the_replay_chooses_whether_to_stream() -> None:
    request = recording()["request"] | {"stream": True}
    assert spec(request=request).post_processor == "chat_stream"
    assert spec(False, request=request).post_processor == "chat_unary"
    assert spec(False, endpoint=COMPLETIONS).post_processor == "completion_unary"


def test_what_the_request_asked_for_is_in_the_spec() -> None:
    request = recording()["request"] | {
        "n": 3, "stop": ["a", "b"], "stop_token_ids": [7], "logprobs": True, "top_logprobs": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    made = spec(request=request)
    assert (made.outputs, made.stop, made.stop_token_ids, made.logprobs) == (3, ("a", "b"), (7,), 2)
    assert made.include_stop and not made.skip_special_tokens and made.args["include_usage"]
    assert made.prompt_tokens == 5 and not made.continuation and made.recording is None


def test_prompts_of_a_completion() -> None:
    made = spec(endpoint=COMPLETIONS, request={"prompt": ["a", "b"], "echo": True, "n": 2})
    assert (made.outputs, made.args["echo"], made.continuation) == (4, ["a", "b"], True)
    assert spec(endpoint=COMPLETIONS, request={"prompt": "a", "echo": True}, prompt="rendered").args["echo"] == [
        "rendered"
    ]
    assert spec(endpoint=COMPLETIONS, request={"prompt": [1, 2], "echo": True}).args["echo"] == [""]
    assert spec(endpoint=COMPLETIONS, request={"prompt": [1, 2], "echo": True}, prompt="ab").args["echo"] == ["ab"]


def test_a_replay_mints_nothing_by_chance() -> None:
    made = spec()
    assert (made.args["id"], made.args["created"]) == ("replay-r", 0) and made == spec()


def test_the_model_is_the_one_that_was_asked_for() -> None:
    assert spec(request=recording()["request"] | {"model": "mine"}).args["model"] == "mine"
    assert spec().args["model"] == ""


def test_what_no_engine_here_would_honour_is_replayed_all_the_same() -> None:
    """Some server has answered it: only its shape counts."""
    assert (
        spec(
            request=recording()["request"] | {"temperature": 0.3, "top_k": 5, "max_tokens": 10**6, "min_p": 0.1}
        ).outputs
        == 1
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"endpoint": "/v1/embeddings"}, {"endpoint": None}, {"request": {}}, {"request": []}, {"request": "x"},
        {"request": None},
        {"request": {"messages": [{"role": "user", "content": "x"}], "n": "two"}}, {"endpoint": COMPLETIONS,
        "request": {"prompt": 5}},
    ],
)  # fmt: skip
def test_a_request_that_is_refused_is_its_error(changed: dict[str, Any]) -> None:
    for stream in (True, False):
        body = admit_recording({**recording(), **changed}, stream)
        assert isinstance(body, bytes)
        assert (merge_document(body, CHAT).error or {})["type"] == "invalid_request_error"


def test_a_request_that_is_no_object_is_named() -> None:
    body = admit_recording(recording() | {"request": ["x"]}, True)
    assert isinstance(body, bytes)
    error = merge_document(body, CHAT).error or {}
    assert (error["param"], error["message"]) == ("request", "request must be an object.")


def test_a_recording_stays_as_it_is() -> None:
    made = recording(request=recording()["request"] | {"stop": "a", "seed": None})
    before = copy.deepcopy(made)
    admit_recording(made, True)
    assert made == before


def test_a_scaffolded_chat_is_replayed_as_one() -> None:
    asked = {"method": "majority_vote", "n": 3}
    for stream, name in ((True, "scaffolding_stream"), (False, "scaffolding_unary")):
        made = admit_recording(recording(request=recording()["request"] | {"scaffolding": asked}), stream)
        assert isinstance(made, StreamSpec)
        assert (made.post_processor, made.outputs) == (name, 3)
