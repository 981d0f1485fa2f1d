"""What a client has to receive: the replay engine's tokens, stepped here without a server, through `replay`.

Servers under test run on scripts that are found by the prompt, so a request says by its prompt which stream it wants.
Any other prompt gets a synthetic stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from executor.engines.base import expand
from executor.engines.replay_engine import ReplayEngine
from executor.request import SamplingParams
from postproc_workers.replay import replay
from tests.process.server import CHAT_TEMPLATE
from tests.recordings.build_tokenizers import SPECIAL, byte_level, ids

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "replay"


@lru_cache
def vocabulary_config() -> dict[str, Any]:
    """The replay engine's keys for our tokenizer."""
    tokenizer = byte_level()
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "special_token_ids": [tokenizer.token_to_id(text) for text in SPECIAL],
    }


def encoded(text: str) -> list[int]:
    """Prompt ids of a text: its bytes."""
    return list(text.encode())


def script(prompt: str, *texts: str, logprobs: bool = False, **more: Any) -> dict[str, Any]:
    """A stream of tokens given by their texts, for a prompt."""
    token_ids = ids("byte_level", texts)
    entry: dict[str, Any] = {"prompt": encoded(prompt), "token_ids": token_ids, **more}
    if logprobs:
        entry["logprobs"] = [
            {"logprob": -0.5 - n, "top": [[token, -0.5 - n], [(token + 1) % 256, -3.25]]}
            for n, token in enumerate(token_ids)
        ]
    return entry


def engine_outputs(
    config: Mapping[str, Any], prompts: Sequence[Sequence[int]], n: int, **sampling: Any
) -> list[dict[str, Any]]:
    """A request's outputs in a recording's form, as the replay engine makes them."""
    engine = ReplayEngine({**config, "step_interval": 0})
    engine.start(lambda: None)
    outputs = []
    for index in range(len(prompts) * n):
        engine.add(1, index, prompts[index // n], SamplingParams(**sampling))
        outputs.append({"index": index, "token_ids": [], "logprobs": []})
    while any("finish_reason" not in output for output in outputs):
        for row in expand(engine.collect()):
            output = outputs[row.index]
            output["token_ids"] += row.token_ids
            output["logprobs"] += [
                {"logprob": e.logprob, "top": [list(pair) for pair in e.top]} for e in row.logprobs or ()
            ]
            if row.finish_reason is not None:
                output["finish_reason"] = row.finish_reason
                if row.stop_token:
                    output["stop_token_id"] = row.token_ids[-1]
    if sampling.get("logprobs") is None:
        for output in outputs:
            del output["logprobs"]
    return outputs


def recording_of(config: Mapping[str, Any], tokenizer: Path, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The recording of a request to a server on the replay engine with that configuration."""
    prompts = [encoded(text) for text in _prompts(body)]
    logprobs = body.get("logprobs")
    if path == CHAT:
        logprobs = body.get("top_logprobs", 0) if logprobs else None
    limit = body.get("max_tokens") or (16 if path == COMPLETIONS else 2**20 - len(prompts[0]))
    outputs = engine_outputs(
        config, prompts, body.get("scaffolding", body).get("n", 1), max_tokens=limit, logprobs=logprobs,
        stop_token_ids=tuple(body.get("stop_token_ids", ())),
    )  # fmt: skip
    return {
        "name": "expected", "endpoint": path, "request": {**body, "model": MODEL}, "outputs": outputs,
        "prompt_tokens": sum(map(len, prompts)), "server": {"tokenizer": str(tokenizer / "tokenizer.json")},
    }  # fmt: skip


def _prompts(body: Mapping[str, Any]) -> list[str]:
    if "messages" in body:
        assert "message.content" in CHAT_TEMPLATE
        return ["".join(message["content"] for message in body["messages"])]
    return [body["prompt"]] if isinstance(body["prompt"], str) else list(body["prompt"])


def expected_body(config: Mapping[str, Any], tokenizer: Path, path: str, body: Mapping[str, Any], **how: Any) -> bytes:
    """The response body of a server that nothing happens to, normalised."""
    recording = recording_of(config, tokenizer, path, body)
    return normalised(replay(recording, stream=bool(body.get("stream")), **how))


# -------------------------------------------------------------------------------- comparing

_ID = re.compile(rb'"id":"(?:chatcmpl|cmpl|replay)-[^"]*"')
_CREATED = re.compile(rb'"created":\d+')


def normalised(body: bytes) -> bytes:
    """A body without what is minted anew for each request; it is one id and one time in all of it."""
    assert len(set(_ID.findall(body))) <= 1 and len(set(_CREATED.findall(body))) <= 1, body
    return _CREATED.sub(b'"created":0', _ID.sub(b'"id":"-"', body))


def events(body: bytes) -> list[Any]:
    """The events of a stream, which has to end with exactly one [DONE]."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == "", body[-200:]
    assert all(part.startswith("data: ") for part in parts), body
    assert parts[-1:] == ["data: [DONE]"] and parts.count("data: [DONE]") == 1, body[-200:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def merged(body: bytes) -> dict[str, Any]:
    """A stream put together: what must not depend on how its tokens were cut into steps."""
    choices: dict[int, dict[str, Any]] = {}
    result: dict[str, Any] = {"choices": choices, "usage": None, "errors": []}
    for event in events(normalised(body)):
        if "error" in event:
            result["errors"].append(event["error"])
            continue
        result.setdefault("head", {name: event[name] for name in ("id", "object", "created", "model")})
        assert result["head"] == {name: event[name] for name in ("id", "object", "created", "model")}
        result["usage"] = event.get("usage") or result["usage"]
        for choice in event["choices"]:
            _add(choices.setdefault(choice["index"], {"text": "", "roles": [], "logprobs": {}, "finish": []}), choice)
    return result


def _add(total: dict[str, Any], choice: Mapping[str, Any]) -> None:
    assert not total["finish"], "an event behind the choice's last one"
    delta = choice.get("delta", {})
    total["text"] += choice.get("text", "") + (delta.get("content") or "")
    total["roles"] += [delta["role"]] if "role" in delta else []
    for name, column in (choice["logprobs"] or {}).items():
        total["logprobs"].setdefault(name, []).extend(column or [])
    if choice["finish_reason"] is not None:
        total["finish"].append((choice["finish_reason"], choice["stop_reason"]))
