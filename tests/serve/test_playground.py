"""The playground: raw model text through a parser, over HTTP and with ``tailrace replay --text``, without a model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve import cli, playground
from serve.events import Folded
from serve.parsers import HARMONY, parse_reasoning, parse_tool_calls
from serve.playground import MAX_TEXT, folded_json
from serve.reasoning import REASONING_PARSERS
from serve.tools import TOOL_PARSERS
from tests.recordings.checker import merge_document, merge_stream
from tests.serve.test_app import FACTS, Client, Served, run

REASONING, TOOLS = "/parse/reasoning", "/parse/tool_calls"
THOUGHT = "<think>\nHm, é😀.\n</think>\n\nHi."
CALL = 'Well.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ålesund"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=n>5</parameter>\n<parameter=s>5</parameter>\n</function>\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
DECLARED = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
HARMONY_TEXT = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"n": 5}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>'
)


def post(path: str, body: Any, method: str = "POST", **facts: Any) -> Client:
    """The answer of an application whose server has these parsers."""
    client: Client = run(Served(replace(FACTS, **facts)).call(path, body, method))
    return client


def parsed(path: str, **body: Any) -> Any:
    client = post(path, body)
    assert client.status == 200, client.body
    assert client.headers[b"content-type"] == b"application/json"
    return client.json()


def functions(answer: Any) -> list[tuple[str, Any]]:
    """Name and arguments of the calls; each has what a chat message's call has."""
    assert all(call["type"] == "function" and call["id"] for call in answer["tool_calls"])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer["tool_calls"]]


# ------------------------------------------------------------------------------------------------------ reasoning


def test_reasoning() -> None:
    assert parsed(REASONING, text=THOUGHT, parser="qwen3") == {
        "parser": "qwen3",
        "content": "Hi.",
        "reasoning_content": "Hm, é😀.",
        "tool_calls": [],
    }


@pytest.mark.parametrize(
    ("tail", "reasoning", "content"),
    [
        ("", "", "Hm.</think>Hi."),
        ("<|im_start|>assistant\n<think>\n", "Hm.", "Hi."),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "Hm.</think>Hi."),
    ],
)
def test_the_prompt_may_open_the_block(tail: str, reasoning: str, content: str) -> None:
    answer = parsed(REASONING, text="Hm.</think>Hi.", parser="qwen3", prompt_tail=tail)
    assert (answer["reasoning_content"], answer["content"]) == (reasoning, content)


def test_of_a_whole_prompt_the_end_counts_as_it_does_for_a_model() -> None:
    tail = "<think>\n" + "x" * 255
    near = parsed(REASONING, text="Hm.</think>Hi.", parser="qwen3", prompt_tail="x" * 10_000 + "<think>\n")
    far = parsed(REASONING, text="Hm.</think>Hi.", parser="qwen3", prompt_tail=tail)
    assert (near["reasoning_content"], far["reasoning_content"]) == ("Hm.", "")


@pytest.mark.parametrize("name", [*REASONING_PARSERS, HARMONY])
def test_every_reasoning_parser_has_a_name_here(name: str) -> None:
    assert parsed(REASONING, text=THOUGHT, parser=name) == {
        "parser": name,
        **folded_json(parse_reasoning(name, THOUGHT)),
    }


# ------------------------------------------------------------------------------------------------------ tool calls


def test_tool_calls() -> None:
    answer = parsed(TOOLS, text=CALL, parser="hermes")
    assert functions(answer) == [("get_weather", {"city": "Ålesund"})]
    assert (answer["parser"], answer["content"].strip(), answer["reasoning_content"]) == ("hermes", "Well.", "")


def test_values_are_typed_by_the_declared_schema() -> None:
    assert functions(parsed(TOOLS, text=XML, parser="qwen3_coder", tools=DECLARED)) == [("f", {"n": 5, "s": "5"})]


@pytest.mark.parametrize("name", [*TOOL_PARSERS, HARMONY])
def test_every_tool_parser_has_a_name_here(name: str) -> None:
    for text in (CALL, XML):
        answer = parsed(TOOLS, text=text, parser=name, tools=DECLARED)
        assert answer == {"parser": name, **folded_json(parse_tool_calls(name, text, DECLARED))}


def test_harmony_has_all_in_one_frame() -> None:
    thought = parsed(REASONING, text=HARMONY_TEXT, parser=HARMONY)
    assert thought["reasoning_content"] == "Hm." and thought["content"].endswith("Done.")
    calls = parsed(TOOLS, text=HARMONY_TEXT, parser=HARMONY, tools=DECLARED)
    assert functions(calls) == [("f", {"n": 5})] and calls["content"] == "Done."


def test_markup_that_is_no_call_and_a_call_that_was_cut_off() -> None:
    broken = "<tool_call>\nno JSON at all\n</tool_call>"
    assert parsed(TOOLS, text=broken, parser="hermes")["content"].strip() == broken
    (call,) = parsed(TOOLS, text=CALL[: CALL.index("sund")], parser="hermes")["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Åle'}


# ------------------------------------------------------------------------------------------------------ its own parser


@pytest.mark.parametrize(
    ("path", "kind", "name", "text"),
    [(REASONING, "reasoning_parser", "qwen3", THOUGHT), (TOOLS, "tool_parser", "hermes", CALL)],
)
def test_the_server_s_own_parser(path: str, kind: str, name: str, text: str) -> None:
    assert post(path, {"text": text}, **{kind: name}).json() == parsed(path, text=text, parser=name)
    assert post(path, {"text": text, "parser": None}, **{kind: name}).json()["parser"] == name
    refused = post(path, {"text": text})
    assert refused.status == 400 and refused.json()["error"]["param"] == "parser"
    assert "has no" in refused.json()["error"]["message"]


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("path", [REASONING, TOOLS])
def test_an_unknown_parser_names_the_known_ones(path: str) -> None:
    error = post(path, {"text": "x", "parser": "qwen9"}).json()["error"]
    assert error["param"] == "parser" and error["code"] == "invalid_value"
    known = REASONING_PARSERS if path == REASONING else TOOL_PARSERS
    assert all(name in error["message"] for name in (*known, HARMONY))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (REASONING, {"parser": "qwen3"}, "text"),
        (REASONING, {"parser": "qwen3", "text": 5}, "text"),
        (REASONING, {"parser": "qwen3", "text": "x" * (MAX_TEXT + 1)}, "text"),
        (REASONING, {"parser": "qwen3", "text": "x", "prompt_tail": []}, "prompt_tail"),
        (REASONING, {"parser": "qwen3", "text": "x", "prompt_tail": "x" * (MAX_TEXT + 1)}, "prompt_tail"),
        (REASONING, {"parser": "qwen3", "text": "x", "tools": []}, "tools"),
        (TOOLS, {"parser": "hermes", "text": "x", "tools": [{"type": "function"}]}, "tools.0.function"),
        (TOOLS, {"parser": 5, "text": "x"}, "parser"),
    ],
)
def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    client = Client(json.dumps(body).encode())
    run(Served(FACTS, max_body_bytes=8 << 20).call(path, client=client))
    assert client.status == 400 and client.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [REASONING, TOOLS])
def test_other_methods(path: str) -> None:
    client = post(path, None, "GET")
    assert client.status == 405 and client.headers[b"allow"] == b"POST"


def test_a_long_text_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    started, goes_on = threading.Event(), threading.Event()

    def slow(name: str, text: str, tools: Any) -> Folded:
        started.set()
        assert goes_on.wait(20)
        return parse_tool_calls(name, text, tools)

    monkeypatch.setattr(playground, "parse_tool_calls", slow)

    async def main() -> None:
        served = Served(FACTS)
        parsing = asyncio.create_task(served.call(TOOLS, {"text": CALL, "parser": "hermes"}))
        await asyncio.to_thread(started.wait, 20)
        assert (await served.call("/live", method="GET")).status == 200 and not parsing.done()
        goes_on.set()
        assert len((await parsing).json()["tool_calls"]) == 1

    run(main())


def test_text_at_the_bound_is_taken() -> None:
    assert parsed(REASONING, text="x" * MAX_TEXT, parser="qwen3")["content"] == "x" * MAX_TEXT


def test_half_a_pair_in_an_answer_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = Folded(content=["half \ud83d"])
    monkeypatch.setattr(playground, "parse_tool_calls", lambda name, text, tools: folded)
    assert parsed(TOOLS, text="x", parser="hermes")["content"] == "half ?"


# ------------------------------------------------------------------------------------------------------ the command


def replayed(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> bytes:
    assert cli.main(["replay", *arguments]) == 0
    return bytes(capfdbinary.readouterr().out)


BOTH = ["--reasoning_parser", "qwen3", "--tool-parser", "hermes"]
SPLITS = [[], ["--split", "whole"], ["--split", "every:3"], ["--split", "at:12"], ["--split", "random:7"]]


@pytest.mark.parametrize("split", SPLITS)
def test_raw_text_on_the_command_line(capfdbinary: pytest.CaptureFixture[bytes], split: Sequence[str]) -> None:
    arguments = ["--text", THOUGHT + CALL, *BOTH, *split]
    streamed = merge_stream(replayed(capfdbinary, *arguments), "/v1/chat/completions").choices[0]
    (call,) = streamed.tool_calls
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Ålesund"})
    assert (streamed.reasoning, streamed.content.strip()) == ("Hm, é😀.", "Hi.Well.")
    assert streamed.finish_reason == "tool_calls"
    document = replayed(capfdbinary, *arguments, "--unary")
    assert merge_document(document, "/v1/chat/completions").choices[0] == streamed


def test_without_a_parser_text_is_content(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    text = "-- " + THOUGHT + CALL  # a value may begin like a flag
    message = json.loads(replayed(capfdbinary, f"--text={text}", "--unary"))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text}


def test_the_end_of_the_prompt(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    arguments = ["--text", "Hm.</think>Hi.", "--reasoning_parser", "qwen3", "--unary"]
    opened = json.loads(replayed(capfdbinary, *arguments, "--prompt", "<think>\n"))["choices"][0]["message"]
    assert (opened["reasoning_content"], opened["content"]) == ("Hm.", "Hi.")
    unknown = json.loads(replayed(capfdbinary, *arguments))["choices"][0]["message"]
    assert unknown["content"] == "Hm.</think>Hi."


def test_tools_from_a_file(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(DECLARED), encoding="utf-8")
    arguments = ["--text", XML, "--tool_parser", "qwen3_coder", "--tools", str(tmp_path / "tools.json"), "--unary"]
    (call,) = json.loads(replayed(capfdbinary, *arguments))["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"n": 5, "s": "5"}


def test_harmony_on_the_command_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    arguments = ["--text", HARMONY_TEXT, "--reasoning_parser", HARMONY, "--tool_parser", HARMONY, "--unary"]
    message = json.loads(replayed(capfdbinary, *arguments))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Done.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a file of recordings, or --text"),
        (["some.jsonl", "--text", "x"], "give a file of recordings, or --text"),
        (["--text", "x", "--tools", "missing.json"], "missing.json"),
        (["--text", "x", "--split", "sometimes"], "sometimes"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", *arguments]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_an_unknown_parser_on_the_command_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """It is told as a client would be told."""
    error = json.loads(replayed(capfdbinary, "--text", "x", "--tool_parser", "qwen9"))["error"]
    assert "qwen9" in error["message"] and "hermes" in error["message"]
