"""Tool-call formats by name. A format of a known shape is a row here and nothing else.

What each shape is and does stands in its file; ``docs/parsers.md`` shows how a row is made. Where the format of a model
family is public, the row follows its chat template.
"""

from __future__ import annotations

import re
from typing import Protocol

from serve.tools.calls import Calls, IdStyle, kimi_id, short_id
from serve.tools.gemma import GemmaFormat
from serve.tools.json_objects import FENCE, JsonFormat, json_format
from serve.tools.key_value_tags import pair_format
from serve.tools.markup import Markers, MarkupParser
from serve.tools.name_then_json import NamedFormat
from serve.tools.pythonic import PythonicFormat
from serve.tools.xml_parameters import XmlFormat


class ToolFormat(Protocol):
    """What every row is."""

    @property
    def markers(self) -> Markers: ...

    @property
    def ids(self) -> IdStyle: ...

    def parser(self, calls: Calls) -> MarkupParser: ...


_HERMES = json_format("<tool_call>", closers=("</tool_call>",))
_TOOL_CALLS_LIST = json_format("<tool_calls>", closers=("</tool_calls>",))
_QWEN3_CODER = XmlFormat(
    Markers(("<tool_call>", "<function="), ("</tool_call>",)),
    "<function=", "</function>", "<parameter=", "</parameter>", ">", newlines=True,
)  # fmt: skip
_PYTHONIC = PythonicFormat(Markers(("[", "<|python_start|>"), ("<|python_end|>",)))
_GLM = pair_format("<tool_call>", "</tool_call>", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))


def _dsml(outer: str, *, json_body: bool = False) -> XmlFormat:
    invoke = '<｜DSML｜invoke name="'
    return XmlFormat(
        Markers((f"<｜DSML｜{outer}>",), (f"</｜DSML｜{outer}>",), inner=(invoke,)),
        invoke, "</｜DSML｜invoke>", '<｜DSML｜parameter name="', "</｜DSML｜parameter>",
        kinds=True, json_body=json_body,
    )  # fmt: skip


def _deepseek(separators: tuple[str, ...], *, label: str = "", tail: str = "") -> NamedFormat:
    section, call = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    markers = Markers((section, call), ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"))
    return NamedFormat(markers, separators, sections=(section,), label=label, tail=tail)


TOOL_PARSERS: dict[str, ToolFormat] = {
    "cohere_command3": JsonFormat(
        Markers(
            ("<|START_ACTION|>",), ("<|END_ACTION|>",),
            dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        )
    ),
    "deepseek_v3": _deepseek(("```json", "```", ""), label="function<｜tool▁sep｜>", tail="```"),
    "deepseek_v31": _deepseek(("<｜tool▁sep｜>",)),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls", json_body=True),
    "ernie45": JsonFormat(Markers(("<tool_call>",), ("</tool_call>",), dropped=("<response>", "</response>"))),
    "gemma4": GemmaFormat(Markers(("<|tool_call>",), ("<tool_call|>",))),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": json_format("<|tool_call|>", "<tool_call>", closers=("</tool_call>",)),
    "hermes": _HERMES,
    "hunyuan_a13b": _TOOL_CALLS_LIST,
    "internlm": json_format(
        "<|action_start|><|plugin|>", "<|action_start|> <|plugin|>", closers=("<|action_end|>",)
    ),
    "jamba": _TOOL_CALLS_LIST,
    "json": json_format(FENCE, bare="{["),
    "kimi_k2": NamedFormat(
        Markers(
            ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
            ("<|tool_call_end|>", "<|tool_call_section_end|>", "<|tool_calls_section_end|>"),
        ),
        ("<|tool_call_argument_begin|>",),
        sections=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        header=re.compile(r"(?:(?:functions\.)?(?P<name>[\w./-]+):)?(?P<index>\d+)"),
        ids=kimi_id,
    ),
    "lfm2": PythonicFormat(Markers(("<|tool_call_start|>",), ("<|tool_call_end|>",))),
    "llama3_json": json_format("<|python_tag|>", bare="{"),
    "llama4_pythonic": _PYTHONIC,
    "longcat": json_format("<longcat_tool_call>", closers=("</longcat_tool_call>",)),
    "mimo": _QWEN3_CODER,
    "minimax_m2": XmlFormat(
        Markers(("<minimax:tool_call>",), ("</minimax:tool_call>",), inner=('<invoke name="',)),
        '<invoke name="', "</invoke>", '<parameter name="', "</parameter>",
    ),
    "mistral": NamedFormat(
        Markers(("[TOOL_CALLS]",)), ("[ARGS]", ""), id_mark="[CALL_ID]", objects=True, ids=short_id
    ),
    "olmo3": PythonicFormat(Markers(("<function_calls>",), ("</function_calls>",)), lines=True),
    "phi4_mini_json": json_format("functools"),
    "pythonic": _PYTHONIC,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": XmlFormat(
        Markers(("<seed:tool_call>", "<function="), ("</seed:tool_call>",)),
        "<function=", "</function>", "<parameter=", "</parameter>", ">", newlines=True,
    ),
    "step3": XmlFormat(
        Markers(
            ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>"),
            ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
            inner=('<steptml:invoke name="',),
        ),
        '<steptml:invoke name="', "</steptml:invoke>", '<steptml:parameter name="', "</steptml:parameter>", labels=True,
    ),
    "xlam": json_format(
        "[TOOL_CALLS]", "<tool_call>", FENCE, closers=("</tool_call>",), bare="{["
    ),
}  # fmt: skip
