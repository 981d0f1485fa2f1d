"""Reasoning formats by name. A new one is a row here and nothing else; ``docs/parsers.md`` shows how."""

from __future__ import annotations

from serve.reasoning.blocks import ReasoningFormat


def _think(*, inside: bool = False, inside_unknown: bool = False, keeps_tags: bool = False) -> ReasoningFormat:
    return ReasoningFormat(
        ("<think>",), ("</think>",), inside=inside, inside_unknown=inside_unknown, keeps_tags=keeps_tags
    )


REASONING_PARSERS: dict[str, ReasoningFormat] = {
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",),
        ends=("<|START_ACTION|>",),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "deepseek_r1": _think(inside=True),
    "deepseek_v3": _think(),
    "gemma4": ReasoningFormat(("<|channel>",), ("<channel|>",), label="thought\n", ends=("<|tool_call>",)),
    "glm45": _think(),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        trimmed=" \n",
    ),
    "kimi": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "kimi_k2": ReasoningFormat(
        ("<think>",), ("</think>",), inside_unknown=True, ends=("<|tool_calls_section_begin|>",)
    ),
    "minimax_m2": _think(inside=True),
    "minimax_m2_append_think": _think(inside=True, keeps_tags=True),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "nemotron": _think(inside_unknown=True),
    "qwen3": _think(),
    "qwen3_thinking": _think(inside=True),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), inside_unknown=True),
    "step3": _think(inside=True),
}  # fmt: skip
