"""Reasoning formats one by one: where a stream starts, what belongs to which text."""

from __future__ import annotations

import pytest

from serve.events import ContentDelta, ReasoningDelta
from serve.reasoning import REASONING_PARSERS
from serve.reasoning.blocks import Stage

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def split(name: str, text: str, prompt: str = CHATML, step: int = 1) -> tuple[str, str]:
    """(reasoning, content)"""
    parser = REASONING_PARSERS[name].parser(prompt)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    events = [event for piece in pieces for event in parser.feed(piece)] + list(parser.flush())
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
    )


# ------------------------------------------------------------------ where a stream starts


@pytest.mark.parametrize(
    ("prompt", "stage"),
    [
        (CHATML, Stage.BEFORE),
        (CHATML + "<think>\n", Stage.INSIDE),
        (CHATML + "<think>", Stage.INSIDE),
        (CHATML + "<think>\nFirst, I", Stage.INSIDE),
        (CHATML + "<think>\n\n</think>\n\n", Stage.AFTER),
        ("<｜User｜>Hi<｜Assistant｜></think>", Stage.AFTER),
        (CHATML + "<think>\n\n</think>\n\nThe answer", Stage.AFTER),
        ("<|im_start|>assistant\n<think>a</think>b<|im_end|>\n" + CHATML, Stage.BEFORE),
        ("<|im_start|>user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n", Stage.BEFORE),
        ("[INST]What does <think> mean?[/INST]", Stage.BEFORE),
        ("<seed:bos>user\n<think><seed:eos><seed:bos>assistant\n", Stage.BEFORE),
        ("]~b]user\n</think>[e~[\n]~b]ai\n", Stage.BEFORE),
        ("<start_of_turn>user\n<think><end_of_turn>\n<start_of_turn>model\n", Stage.BEFORE),
        ("", Stage.BEFORE),
    ],
)
def test_the_end_of_the_prompt_decides(prompt: str, stage: Stage) -> None:
    assert REASONING_PARSERS["qwen3"].initial_stage(prompt) is stage


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3_thinking", "step3", "minimax_m2"])
def test_some_start_inside_when_the_prompt_says_nothing(name: str) -> None:
    assert split(name, "a</think>b") == split(name, "a</think>b", "") == ("a", "b")
    assert split(name, "a</think>b", "<think></think>") == ("", "a</think>b")


@pytest.mark.parametrize("name", ["kimi_k2", "nemotron", "seed_oss"])
def test_some_start_inside_only_when_there_is_no_prompt(name: str) -> None:
    close = REASONING_PARSERS[name].closes[0]
    assert split(name, f"a{close}b", "") == ("a", "b")
    assert split(name, "plain answer") == ("", "plain answer")


@pytest.mark.parametrize("text", ["<think>\na</think>b", "\n<think>a\n</think>\n\nb", "a</think>b"])
def test_an_opening_tag_although_the_stream_starts_inside(text: str) -> None:
    assert split("deepseek_r1", text, CHATML + "<think>\n") == ("a", "b")


# ------------------------------------------------------------------ what belongs to which text


def test_tags_after_the_block_are_text() -> None:
    assert split("qwen3", "<think>a</think>b <think>c</think> d") == ("a", "b <think>c</think> d")


def test_an_opening_tag_inside_the_block_is_text() -> None:
    assert split("qwen3", "<think>a <think> b</think>c") == ("a <think> b", "c")


def test_text_before_the_block() -> None:
    assert split("qwen3", "Hm. <think>a</think>b") == ("a", "Hm. b")


def test_newlines_around_markers_belong_to_neither_text() -> None:
    assert split("qwen3", "\n<think>\n\na\n\nb\n</think>\n\n  c\n") == ("a\n\nb", "  c\n")


def test_newlines_without_a_marker_stay() -> None:
    assert split("qwen3", "\n\na\n\n") == ("", "\n\na\n\n")
    assert split("qwen3", "<think>\n\n\na\n\n") == ("a\n\n", "")


def test_cut_off_inside() -> None:
    assert split("qwen3", "<think>\nx </thin") == ("x </thin", "")
    assert split("qwen3", "x <thin") == ("", "x <thin")


def test_an_empty_block() -> None:
    assert split("qwen3", "<think>\n\n</think>\n\nb") == ("", "b")


def test_reasoning_and_content_never_share_a_delta() -> None:
    parser = REASONING_PARSERS["qwen3"].parser(CHATML)
    assert list(parser.feed("<think>\na\n</think>\n\nb")) == [ReasoningDelta("a"), ContentDelta("b")]


def test_a_tool_section_ends_kimis_reasoning() -> None:
    text = "a\n<|tool_calls_section_begin|><|tool_call_begin|>"
    assert split("kimi_k2", text, "<think>") == ("a", "<|tool_calls_section_begin|><|tool_call_begin|>")


def test_a_tool_call_tag_in_reasoning_is_text() -> None:
    assert split("qwen3", "<think>use <tool_call></think>b") == ("use <tool_call>", "b")


# ------------------------------------------------------------------ formats of their own kind


def test_gemmas_label_may_be_the_prompts() -> None:
    assert split("gemma4", "thought\na<channel|>b", "<|turn>model\n<|channel>") == ("a", "b")
    assert split("gemma4", "thought\na<channel|>b", "<|turn>model\n<|channel>thought\n") == ("thought\na", "b")


def test_cohere_wraps_the_answer_too() -> None:
    text = "<|START_THINKING|>a<|END_THINKING|>\n<|START_RESPONSE|>b <| c<|END_RESPONSE|>"
    assert split("cohere_command3", text) == ("a", "b <| c")
    assert split("cohere_command3", "<|START_RESPONSE|>b<|END_RESPONSE|>") == ("", "b")


def test_granite_has_sentences_for_markers() -> None:
    text = "Here is my thought process: A. Here is my plan. Here is my response: B."
    assert split("granite", text) == ("A. Here is my plan.", "B.")
    assert split("granite", "Here's my thought process:\nA\nHere's my response:\nB") == ("A", "B")
    assert split("granite", "Here is my thought failure") == ("", "Here is my thought failure")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel>thought\na\nb<channel|>c", ("a\nb", "c")),
        ("<|channel>thought\n<channel|>", ("", "")),
        ("<|channel>a<channel|>c", ("a", "c")),
        ("<|channel>thousand reasons<channel|>c", ("thousand reasons", "c")),
        ("<|channel>tho<channel|>c", ("tho", "c")),
        ("<|channel>thou", ("thou", "")),
        ("<|tool_call>call:f{}", ("", "<|tool_call>call:f{}")),
        ("<|channel>thought\na<|tool_call>call:f{}", ("a", "<|tool_call>call:f{}")),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_gemma_labels_its_block(text: str, wanted: tuple[str, str], step: int) -> None:
    assert split("gemma4", text, step=step) == wanted


@pytest.mark.parametrize(
    ("text", "prompt", "content"),
    [
        ("a</think>b", "<think>\n", "<think>a</think>b"),
        ("</think>b", "", "<think></think>b"),
        ("<think>a</think>b", "<think>\n", "<think>a</think>b"),
        ("<thi", "<think>\n", "<think><thi"),
        ("b", "<think></think>", "b"),
        ("", "<think>", ""),
    ],
)
def test_minimax_may_keep_its_tags_in_the_content(text: str, prompt: str, content: str) -> None:
    for step in (1, 100):
        assert split("minimax_m2_append_think", text, prompt, step) == ("", content)
