"""The model that a round's server pretends to have: a byte-level tokenizer, a chat template, scripts by prompt.

Its tokens are bytes, fragments of words and the marks of its format. A text becomes tokens by chance: at each place the
longest fragment that fits, or a single byte, so tokens end inside of characters, of stop strings and of tags.

A script answers a whole rendered prompt, and nothing but its own tokens may follow it: so an executor that is given the
prompt with what was generated before goes on in the script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, pre_tokenizers

from tests.recordings.build_tokenizers import FRAGMENTS, MARKS, SPECIAL, byte_level, ids

_CONTENTS = "{% for message in messages %}{{ message.content }}{% endfor %}"
#: format -> chat template
_TEMPLATES = {"hermes": _CONTENTS, "harmony": _CONTENTS + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"}
#: What the template writes behind the messages.
_TAILS = {"hermes": "", "harmony": "<|start|>assistant"}
_FORMAT_MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
}
_ENDS = {"hermes": ("<|end|>",), "harmony": ("<|call|>", "<|return|>")}
_PARSERS = {"hermes": ("qwen3", "hermes"), "harmony": ("harmony", "harmony")}


class Model:
    """The model of one format, and its scripts. ``flags`` start a server of it."""

    def __init__(self, kind: str, random: Random) -> None:
        self.kind, self.random = kind, random
        self.scripts: list[dict[str, Any]] = []
        self._tokenizer = byte_level()
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        special = kind == "harmony"  # gpt-oss has its marks as special tokens, Qwen3 its tags as ordinary ones
        marks = [AddedToken(mark, special=special, normalized=False) for mark in _FORMAT_MARKS[kind]]
        (self._tokenizer.add_special_tokens if special else self._tokenizer.add_tokens)(marks)
        self._marks = {mark: self._id(mark) for mark in (*MARKS, *SPECIAL, *_FORMAT_MARKS[kind])}
        self._fragments = {text: ids("byte_level", [text])[0] for text in FRAGMENTS if len(text.encode()) > 1}

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, cut by chance; marks are always marks."""
        found: list[int] = []
        while text:
            mark = next((mark for mark in self._marks if text.startswith(mark)), None)
            fits = sorted((part for part in self._fragments if text.startswith(part)), key=len, reverse=True)
            if mark is not None:
                found.append(self._marks[mark])
                text = text[len(mark) :]
            elif fits and self.random.random() < 0.7:
                found.append(self._fragments[fits[0]])
                text = text[len(fits[0]) :]
            else:
                found += text[0].encode()  # ids below 256 are the bytes
                text = text[1:]
        return found

    def add_script(self, prompt: str, token_ids: Sequence[int], finish: str = "stop", message: str = "") -> None:
        """An answer to a prompt, as chat and as a completion; a second one to the same prompt is that of choice 1."""
        entry: dict[str, Any] = {"token_ids": list(token_ids), "finish_reason": finish}
        entry |= {"message": message} if message else {}
        if finish == "stop" and token_ids[-1] in self._end_ids():
            entry["stop_token_id"] = token_ids[-1]
        for rendered in dict.fromkeys((prompt, prompt + _TAILS[self.kind])):
            self.scripts.append({"prompt": self._tokenizer.encode(rendered).ids, **entry})

    def end(self) -> int:
        """The id that ends an output."""
        return self._end_ids()[0]

    def _end_ids(self) -> list[int]:
        return [self._marks[end] for end in _ENDS[self.kind]]

    def flags(self, directory: Path, step_interval: float, tokens_per_step: int) -> list[str]:
        """Write tokenizer and scripts into the directory; returns the server's flags for them."""
        directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATES[self.kind]}
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        engine = {
            "vocab_size": self._tokenizer.get_vocab_size(), "special_token_ids": sorted(self._marks.values()),
            "eos_token_ids": self._end_ids(), "rule": "prompt", "scripts": self.scripts, "batch_size": 4096,
            "step_interval": step_interval, "tokens_per_step": tokens_per_step,
        }  # fmt: skip
        (directory / "engine.json").write_text(json.dumps(engine), encoding="utf-8")
        reasoning, tools = _PARSERS[self.kind]
        return [
            "--engine", "replay", "--engine_config", str(directory / "engine.json"), "--tokenizer", str(directory),
            "--reasoning_parser", reasoning, "--tool_parser", tools,
        ]  # fmt: skip
