"""Models that say what a test has written: a tokenizer, a chat template and a script of answers, behind a real server.

A scripted model answers the *key* of a conversation, which its chat template writes before everything else: a letter
per message, and the text of the last one. So a request gets its answer whatever the order in which requests come, and
an answer tells that the conversation arrived as the client meant it. The letters are those of the roles (``s``, ``u``,
``a``, ``t``), ``c`` for an assistant that called tools, and a capital where its reasoning was sent back.

The tokenizer is a byte-level BPE that is trained on the answers themselves: tokens end inside of words, of JSON and of
characters, as a real model's do. Markers are tokens of their own: those of Qwen3 ordinary ones, harmony's special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.process.server import Server, serving

#: What all templates write first.
_KEY = """\
{%- macro letter(m) %}{% set l = 'c' if m.tool_calls else m.role[0] %}\
{{ l | upper if m.reasoning_content else l }}{% endmacro -%}
{%- for m in messages %}{{ letter(m) }}{% endfor %}:{{ messages[-1].content }}{{ '\\n' }}"""

_QWEN_TEMPLATE = (
    _KEY
    + """\
{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
)

_OSS_TEMPLATE = (
    _KEY
    + """\
{%- for m in messages %}{% if m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>\
{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}
{%- if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>
{%- for call in m.tool_calls or [] %}<|start|>assistant<|channel|>commentary to=functions.{{ call.function.name }} \
<|constrain|>json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
)


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    ends: tokens that end an output. marks: the other tokens of its format; special: whether they are special tokens.
    """

    template: str
    ends: tuple[str, ...]
    marks: tuple[str, ...]
    special: bool


QWEN = Family(
    _QWEN_TEMPLATE, ("<|im_end|>",), ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"), False
)
OSS = Family(
    _OSS_TEMPLATE,
    ("<|return|>", "<|call|>"),
    ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    True,
)


@dataclass(frozen=True)
class Answer:
    """What the model says to conversations with one of ``keys``.

    An answer without an end token was cut off: by a limit or, where there is a message, by an engine that failed.
    """

    keys: tuple[str, ...]
    text: str
    message: str = ""


def answer(shapes: str, last: str, text: str, message: str = "") -> Answer:
    """For conversations of these shapes, separated by spaces, whose last message is ``last``."""
    return Answer(tuple(f"{shape}:{last}\n" for shape in shapes.split()), text, message)


class ScriptedModel:
    """A family with its answers, as files of a tokenizer and settings of the replay engine.

    A conversation without an answer gets a synthetic stream, and gets it to the end of a short context.
    """

    def __init__(self, family: Family, answers: Sequence[Answer], directory: Path) -> None:
        self._family, self._answers, self._directory = family, answers, directory
        self._tokenizer = _train(family, answers)

    def encode(self, text: str) -> list[int]:
        """The ids of a text in which markers are markers."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @contextmanager
    def server(self, *arguments: str, **engine: Any) -> Iterator[Server]:
        """A server of this model. engine: more settings of the replay engine."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(self._directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._family.ends[0]}
        (self._directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (self._directory / "chat_template.jinja").write_text(self._family.template, encoding="utf-8")
        scripts = self._directory / "engine.json"
        scripts.write_text(json.dumps(self._engine_config() | engine), encoding="utf-8")
        flags = ["--engine", "replay", "--engine_config", str(scripts), "--tokenizer", str(self._directory)]
        with serving(*flags, *arguments) as server:
            yield server

    def _engine_config(self) -> dict[str, Any]:
        size = self._tokenizer.get_vocab_size()
        ends = [self._tokenizer.token_to_id(end) for end in self._family.ends]
        scripts = [self._script(key, each) for each in self._answers for key in each.keys]
        return {
            "vocab_size": size, "eos_token_ids": ends, "max_model_len": 3000, "rule": "prompt", "scripts": scripts,
        }  # fmt: skip

    def _script(self, key: str, answer: Answer) -> Mapping[str, Any]:
        complete = answer.text.endswith(self._family.ends)
        return {
            "prompt": self.encode(key),
            "token_ids": self.encode(answer.text),
            "finish_reason": "stop" if complete else "error" if answer.message else "length",
            "message": answer.message,
        }


def _train(family: Family, answers: Sequence[Answer]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    between = re.compile("|".join(map(re.escape, (*family.ends, *family.marks))))
    tokenizer.train_from_iterator([part for each in answers for part in between.split(each.text)], trainer)
    tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in family.ends])
    marks = [AddedToken(mark, special=family.special, normalized=False) for mark in family.marks]
    (tokenizer.add_special_tokens if family.special else tokenizer.add_tokens)(marks)
    return tokenizer
