"""Reads a response body strictly, merges its events, and compares the result with what a recording expects.

AssertionError says what is wrong. The rules are those of the OpenAI API reference: one id, creation time and model for
all chunks; a role first; finish_reason null until a choice's last chunk; nothing behind ``[DONE]``; usage where it was
asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_KINDS = {
    "/v1/chat/completions": ("chat.completion.chunk", "chat.completion"),
    "/v1/completions": ("text_completion",) * 2,
}


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def strict_json(data: str | bytes) -> Any:
    """JSON without NaN and Infinity."""
    return json.loads(data, parse_constant=_no_constant)


@dataclass
class Choice:
    """One choice, merged."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Merged:
    """A whole response. chunks: the parsed events of a stream, in order; error: the error object that ended it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)

    def choice(self, index: int) -> Choice:
        """The choice, made when it is first spoken of."""
        return self.choices.setdefault(index, Choice())


def events(body: bytes) -> list[str]:
    """The data of each server-sent event."""
    text = body.decode("utf-8")
    assert text.endswith("\n\n"), f"no blank line at the end: {text[-60:]!r}"
    assert "\r" not in text, "a raw carriage return"
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), f"not an event: {text[:200]!r}"
    return [block[6:] for block in blocks]


def merge_stream(body: bytes, endpoint: str, *, include_usage: bool = False, continuous: bool = False) -> Merged:
    """A stream, merged. An error before the first event is a document: it has ``error`` and no chunks."""
    merged = Merged()
    if body.startswith(b"{"):
        merged.error = _error(strict_json(body)["error"])
        return merged
    data = events(body)
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1, f"[DONE] is not the last event: {data[-1][:80]!r}"
    merged.chunks = [strict_json(event) for event in data[:-1]]
    if merged.chunks and "error" in merged.chunks[-1]:
        merged.error = _error(merged.chunks.pop()["error"])
    _check_heads(merged.chunks, _KINDS[endpoint][0])
    for chunk in merged.chunks:
        _add_chunk(merged, chunk, endpoint, include_usage, continuous)
    _check_end(merged, include_usage)
    return merged


def _error(error: Any) -> dict[str, Any]:
    assert isinstance(error, dict) and error.keys() == {"message", "type", "param", "code"}, (
        f"no error object: {error!r}"
    )
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    return error


def _check_heads(chunks: list[dict[str, Any]], kind: str) -> None:
    heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
    assert len(heads) <= 1, f"id, created, model or object changed: {heads}"
    for chunk in chunks:
        assert chunk["object"] == kind and isinstance(chunk["created"], int) and chunk["id"], f"head: {chunk}"


def _add_chunk(merged: Merged, chunk: dict[str, Any], endpoint: str, include_usage: bool, continuous: bool) -> None:
    assert merged.usage is None, f"a chunk behind the usage: {chunk}"
    assert ("usage" in chunk) == include_usage, f"usage, though include_usage is {include_usage}: {chunk}"
    if not chunk["choices"]:
        merged.usage = _usage(chunk["usage"])
        return
    assert (chunk.get("usage") is not None) == continuous, (
        f"usage, though continuous_usage_stats is {continuous}: {chunk}"
    )
    if continuous:
        _usage(chunk["usage"])
    (item,) = chunk["choices"]
    first = item["index"] not in merged.choices
    choice = merged.choice(item["index"])
    assert choice.finish_reason is None, f"a chunk behind the choice's last: {chunk}"
    assert "logprobs" in item and "finish_reason" in item, f"keys: {chunk}"
    assert ("stop_reason" in item) == (item["finish_reason"] is not None), f"stop_reason: {chunk}"
    choice.finish_reason, choice.stop_reason = item["finish_reason"], item.get("stop_reason")
    assert choice.finish_reason != "", "finish_reason is empty"
    if endpoint == "/v1/chat/completions":
        _add_delta(choice, item["delta"], first, item)
        choice.logprobs += _chat_logprobs(item["logprobs"])
    else:
        assert isinstance(item["text"], str)
        choice.content += item["text"]
        choice.logprobs += _completion_logprobs(item["logprobs"])


def _add_delta(choice: Choice, delta: dict[str, Any], first: bool, item: dict[str, Any]) -> None:
    assert ("role" in delta) == first, f"role: {delta}"
    if first:
        assert delta == {"role": "assistant", "content": ""}, f"first delta: {delta}"
    elif not delta:
        assert item["finish_reason"] is not None or item["logprobs"] is not None, f"a chunk that says nothing: {item}"
    else:
        assert all(delta.values()), f"an empty delta: {delta}"
    choice.content += delta.get("content") or ""
    choice.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls", ()):
        _add_call(choice.tool_calls, call)


def _add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        assert call["id"] and call["type"] == "function" and call["function"]["name"], f"first delta of a call: {call}"
        calls.append({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
        return
    assert call["index"] == len(calls) - 1 and "id" not in call and "type" not in call, f"later delta of a call: {call}"
    calls[-1]["arguments"] += call["function"]["arguments"]


def _usage(usage: Any) -> dict[str, int]:
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    assert usage.keys() - {"completion_tokens_details"} == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert details.keys() == {"reasoning_tokens"} and details["reasoning_tokens"] <= usage["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], f"usage: {usage}"
    return usage


def _chat_logprobs(logprobs: Any) -> list[dict[str, Any]]:
    if logprobs is None:
        return []
    for entry in logprobs["content"]:
        for token in (entry, *entry["top_logprobs"]):
            assert isinstance(token["token"], str) and isinstance(token["logprob"], float), f"entry: {entry}"
            assert all(0 <= byte < 256 for byte in token["bytes"]), f"entry: {entry}"
    return list(logprobs["content"])


def _completion_logprobs(logprobs: Any) -> list[dict[str, Any]]:
    if logprobs is None:
        return []
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert logprobs.keys() == set(names) and len({len(logprobs[name]) for name in names}) == 1, f"columns: {logprobs}"
    keys = ("token", "logprob", "top_logprobs", "text_offset")
    return [dict(zip(keys, row)) for row in zip(*(logprobs[name] for name in names))]


def _check_end(merged: Merged, include_usage: bool) -> None:
    if merged.error is not None:
        return
    assert merged.choices, "no chunk of any choice"
    for index, choice in merged.choices.items():
        assert choice.finish_reason is not None, f"choice {index} has no finish_reason"
    assert (merged.usage is not None) == include_usage, f"final usage, though include_usage is {include_usage}"


def merge_document(body: bytes, endpoint: str) -> Merged:
    """A unary body in the same form."""
    document, merged = strict_json(body), Merged()
    if "error" in document:
        merged.error = _error(document["error"])
        return merged
    assert document["object"] == _KINDS[endpoint][1], f"object: {document['object']}"
    merged.usage = _usage(document["usage"])
    assert [item["index"] for item in document["choices"]] == list(range(len(document["choices"]))), "order of choices"
    for item in document["choices"]:
        choice = merged.choice(item["index"])
        choice.finish_reason, choice.stop_reason = item["finish_reason"], item["stop_reason"]
        if endpoint == "/v1/chat/completions":
            message = item["message"]
            assert message["role"] == "assistant"
            choice.content, choice.reasoning = message["content"] or "", message.get("reasoning_content") or ""
            choice.tool_calls = [call["function"] for call in message.get("tool_calls", ())]
            choice.logprobs = _chat_logprobs(item["logprobs"])
        else:
            choice.content, choice.logprobs = item["text"], _completion_logprobs(item["logprobs"])
    return merged


# ------------------------------------------------------------------------------------------------------ expect


def options(recording: dict[str, Any]) -> dict[str, bool]:
    """The usage options of a recorded request, as arguments for ``merge_stream``."""
    asked = recording["request"].get("stream_options") or {}
    return {
        "include_usage": asked.get("include_usage", False),
        "continuous": asked.get("include_usage", False) and asked.get("continuous_usage_stats", False),
    }


def compare(merged: Merged, expect: dict[str, Any]) -> None:
    """Every key of ``expect`` against a merged response; text with outer white space stripped."""
    if expect.get("error"):
        assert merged.error is not None, "no error object"
        return
    assert merged.error is None, f"an error: {merged.error}"
    for name in ("content", "reasoning", "finish_reason"):
        for index, wanted in enumerate(_by_choice(expect.get(name))):
            got = getattr(merged.choices[index], name)
            assert _stripped(got) == _stripped(wanted), f"{name} of choice {index}: {got!r}, not {wanted!r}"
    if "stop_reason" in expect:
        assert merged.choices[0].stop_reason == expect["stop_reason"], f"stop_reason: {merged.choices[0].stop_reason!r}"
    for key, wanted in (expect.get("usage") or {}).items() if merged.usage is not None else ():
        assert merged.usage[key] == wanted, f"usage: {merged.usage}"
    _compare_logprobs(merged, expect)
    for word in expect.get("never", ()):
        for choice in merged.choices.values():
            assert word not in choice.content + choice.reasoning, f"{word!r} was sent"


def _by_choice(wanted: Any) -> list[Any]:
    if wanted is None:
        return []
    return wanted if isinstance(wanted, list) else [wanted]


def _stripped(text: str | None) -> str | None:
    return text.strip() if isinstance(text, str) else text


def _compare_logprobs(merged: Merged, expect: dict[str, Any]) -> None:
    if "logprobs" not in expect:
        return
    got, wanted = merged.choices[0].logprobs, expect["logprobs"]
    assert len(got) == len(wanted), f"{len(got)} logprobs, not {len(wanted)}"
    for entry, keys in zip(got, wanted):
        for key, value in keys.items():
            assert entry[key] == value, f"logprobs, {key}: {entry}"
