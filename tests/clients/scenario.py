"""The conversations that all clients have: about the weather, with a tool that knows it.

Reasoning, text and calls are the same for both families, each in its own format; ``*_SHAPE`` says what a client has to
send back for the second turn (see ``models.py``).
"""

from __future__ import annotations

import json
from typing import Any

from tests.clients.models import Answer, answer

QUESTION, TWO, TOO_LONG = "Weather in Ålesund?", "Weather in Ålesund and Rome?", "Count to a hundred."
CUT, THANKS, HELLO = "Use the tool at length.", "Thanks!", "Hello"
BREAK, BROKEN = "Break down.", "the engine has had enough"

#: What the tool says of a place, and what the model makes of it.
WEATHER = {"Ålesund": "3 °C, rain 🌧", "Rome": "19 °C, sun"}
REASONING = 'The user asks for "weather":\nI have a tool.'
PREAMBLE = "I'll look it up."
ARGUMENTS: dict[str, Any] = {"city": "Ålesund", "days": 2}
OTHER_ARGUMENTS: dict[str, Any] = {"city": "Rome", "days": 1}
AFTERTHOUGHT = "Now I know."
FINAL = "Ålesund: 3 °C and rain 🌧.\n\nTake a coat."
WELCOME = "You're **welcome** 👋🏽."
GREETING, OTHER_GREETING = "Hello there.", "Good day 🌞"

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def argument_text(arguments: dict[str, Any]) -> str:
    """Arguments as the scripted models spell them."""
    return json.dumps(arguments, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------------ Qwen3


def _qwen(text: str, reasoning: str = "", end: str = "<|im_end|>") -> str:
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "<think>\n\n</think>\n\n"
    return thought + text + end


def _hermes(arguments: dict[str, Any]) -> str:
    return f'\n<tool_call>\n{{"name": "get_weather", "arguments": {argument_text(arguments)}}}\n</tool_call>'


_ASKED = "u su"
#: Behind the tool's answers: with a system message or not, with the reasoning sent back (C) or not (c).
_ONE_RESULT, _TWO_RESULTS = "uct suct uCt suCt", "uctt suctt uCtt suCtt"
_LATER = "uctau suctau uCtau suCtau uCtAu suCtAu"

QWEN_ANSWERS: list[Answer] = [
    answer(_ASKED, QUESTION, _qwen(PREAMBLE + _hermes(ARGUMENTS), REASONING)),
    answer(_ASKED, TWO, _qwen(PREAMBLE + _hermes(ARGUMENTS) + _hermes(OTHER_ARGUMENTS), REASONING)),
    answer(_ONE_RESULT, WEATHER["Ålesund"], _qwen(FINAL, AFTERTHOUGHT)),
    answer(_TWO_RESULTS, WEATHER["Rome"], _qwen(FINAL, AFTERTHOUGHT)),
    answer(_LATER, THANKS, _qwen(WELCOME)),
    answer(_ASKED, TOO_LONG, _qwen("1, 2, 3,", end="")),
    answer(_ASKED, CUT, _qwen(_hermes(ARGUMENTS)[:-20], end="")),
    answer(_ASKED, BREAK, _qwen(PREAMBLE, REASONING, end=""), BROKEN),
    answer(_ASKED, HELLO, _qwen(GREETING)),
    answer(_ASKED, HELLO, _qwen(OTHER_GREETING, AFTERTHOUGHT)),
]

# ------------------------------------------------------------------------------------------------------ gpt-oss


def _analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


def _oss_call(arguments: dict[str, Any]) -> str:
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    return head + argument_text(arguments) + "<|call|>"


def _oss_final(text: str, end: str = "<|return|>") -> str:
    return f"<|channel|>final<|message|>{text}{end}"


_PREAMBLE = f"<|channel|>commentary<|message|>{PREAMBLE}<|end|><|start|>assistant"

OSS_ANSWERS: list[Answer] = [
    answer(_ASKED, QUESTION, _analysis(REASONING) + _PREAMBLE + _oss_call(ARGUMENTS)),
    answer(_ONE_RESULT, WEATHER["Ålesund"], _analysis(AFTERTHOUGHT) + _oss_final(FINAL)),
    answer(_LATER, THANKS, _oss_final(WELCOME)),
    answer(_ASKED, TOO_LONG, _oss_final("1, 2, 3,", end="")),
    answer(_ASKED, CUT, _oss_call(ARGUMENTS).removesuffix("<|call|>")[:-12]),
    answer(_ASKED, BREAK, _analysis(REASONING) + _oss_final(PREAMBLE, end=""), BROKEN),
    answer(_ASKED, HELLO, _oss_final(GREETING)),
    answer(_ASKED, HELLO, _analysis(AFTERTHOUGHT) + _oss_final(OTHER_GREETING)),
]
