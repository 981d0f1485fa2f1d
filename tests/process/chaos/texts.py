"""What the scripted model says: text that is hard to cut, drawn from a seed."""

from __future__ import annotations

import json
from random import Random

#: Words, characters of two to four bytes and of several code points, beginnings of stop strings and of tags that come
#: to nothing, white space, what JSON has to escape.
_WORDS = (
    "Hello", " world", " the", " answer", " is", "ing", ", ", ". ", "\n", "\n\n", "  ", "\t", "0", "1", "42", "-",
    "世", "界", "世界", "你好", "서울", "뷁", "Ω", "é", "ñ", "😀", "🎉", "👍🏽", "e\u0301", "\u2028",
    "ST", "STO", "OP", "EN", "D.", "aab", "aa", "User", "<", ">", "</", "<|", "|>", "<tool", "_cal", "<thi", "nk",
    '"', "\\", "{", "}", "[", "]", "&amp;", "'",
)  # fmt: skip

#: What requests stop at; prose has them now and then, and their beginnings often.
STOPS = ("STOP", "END", "aab<", "世界!")


def prose(random: Random, chars: int, *, stops: bool = False) -> str:
    """Text of about so many characters; with ``stops`` one of STOPS comes in its second half."""
    parts, length = [], 0
    while length < chars:
        word = random.choice(_WORDS)
        parts.append(word)
        length += len(word)
    if stops:
        parts.insert(random.randrange(len(parts) // 2, len(parts)), random.choice(STOPS))
    return "".join(parts)


def arguments(random: Random, chars: int) -> str:
    """The arguments of a call, as JSON text."""
    value = {"city": prose(random, chars), "days": random.randrange(100), "names": ["Ålesund", prose(random, 8)]}
    return json.dumps(value, ensure_ascii=random.random() < 0.5)


def hermes_answer(random: Random, chars: int, calls: int, *, reasoning: bool) -> str:
    """An answer of Qwen3's kind: reasoning, text, calls."""
    share = chars // (calls + 1 + reasoning)
    thought = f"<think>\n{prose(random, share)}\n</think>\n\n" if reasoning else ""
    made = [f'{{"name": "get_weather", "arguments": {arguments(random, share)}}}' for _ in range(calls)]
    return thought + prose(random, share) + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in made)


def harmony_answer(random: Random, chars: int, calls: int, *, reasoning: bool) -> str:
    """An answer of gpt-oss's kind; its last message is a call, or the final text."""
    share = chars // (max(calls, 1) + 2 * reasoning)
    said = [("analysis", "", prose(random, share))] if reasoning else []
    said += [("commentary", "", prose(random, share // 2))] if reasoning and calls else []
    said += [("commentary", " to=functions.get_weather", arguments(random, share)) for _ in range(calls)]
    said += [] if calls else [("final", "", prose(random, share))]
    heads = [f"<|channel|>{channel}{to}{' <|constrain|>json' if to else ''}<|message|>" for channel, to, _ in said]
    bodies = "<|end|><|start|>assistant".join(head + text for head, (_, _, text) in zip(heads, said))
    return bodies + ("<|call|>" if calls else "<|return|>")


ANSWERS = {"hermes": hermes_answer, "harmony": harmony_answer}
