"""The requests that clients choose from: of each kind one as a stream and one as a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.process.chaos.model import Model
from tests.process.chaos.texts import ANSWERS, STOPS, prose

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MODEL = "replay"

_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "names": {"type": "array"}},
}
_FUNCTION = {"name": "get_weather", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_USAGE = {"include_usage": True}
_RUNNING = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True, slots=True)
class Template:
    """A request; its body may be sent any number of times."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        """Whether the answer is an event stream."""
        return bool(self.body.get("stream"))

    @property
    def options(self) -> dict[str, bool]:
        """What usage was asked for, as the recordings' checker wants to know it."""
        asked = self.body.get("stream_options") or {}
        usage = bool(asked.get("include_usage"))
        return {"include_usage": usage, "continuous": usage and bool(asked.get("continuous_usage_stats"))}


def quick() -> Template:
    """A small request, for floods."""
    return Template("quick", COMPLETIONS, {"model": MODEL, "prompt": "quick", "max_tokens": 30})


def long_prompt() -> Template:
    """A request with a long prompt: many of them are more tokens than the server queues."""
    return Template("long prompt", COMPLETIONS, {"model": MODEL, "prompt": "long " * 4000, "max_tokens": 4})


def endless(choices: int) -> Template:
    """A stream of many bytes that ends when its client is gone; some 60 kB/s for each choice."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "endless"}], "stream": True, "n": choices,
        "logprobs": True, "top_logprobs": 20, "max_tokens": 900_000,
    }  # fmt: skip
    return Template(f"endless {choices}", CHAT, body)


def make_templates(model: Model, steps: int, tokens_per_step: int) -> list[Template]:
    """The requests, and their scripts added to the model; the longest answer takes so many engine steps."""
    return list(_Maker(model, steps * tokens_per_step).all())


class _Maker:
    """Draws answers for one model. longest: tokens of an answer at most."""

    def __init__(self, model: Model, longest: int) -> None:
        self._model, self._random, self._longest = model, model.random, longest
        self._made = 0

    def all(self) -> Iterator[Template]:
        for kinds in (self._chat, self._formats, self._completions, self._responses):
            for name, path, body in kinds():
                streamed: list[dict[str, Any]] = [{"stream": True}]
                if path != RESPONSES:
                    streamed.append({"stream": True, "stream_options": self._random.choice((_USAGE, _RUNNING))})
                yield Template(f"{name}, stream", path, {"model": MODEL, **body, **self._random.choice(streamed)})
                yield Template(f"{name}, document", path, {"model": MODEL, **body})

    # -------------------------------------------------------------------------------- answers

    def _prompt(self) -> str:
        self._made += 1
        return f"prompt {self._made}:"

    def _length(self) -> int:
        return self._random.randrange(self._longest // 4, self._longest)

    def _cut(self, text: str) -> tuple[list[int], bool]:
        """The ids of a text, and whether it was longer than an answer may be."""
        found = self._model.tokens(text)
        return found[: self._longest], len(found) > self._longest

    def _prose(self, *, stops: bool = False) -> str:
        """The prompt of two answers of plain text."""
        prompt = self._prompt()
        for _ in range(2):
            ids, cut = self._cut(prose(self._random, self._length(), stops=stops))
            self._model.add_script(prompt, ids if cut else [*ids, self._model.end()], "length" if cut else "stop")
        return prompt

    def _formatted(self, calls: int, *, reasoning: bool = True, truncated: bool = False) -> str:
        """The prompt of two answers in the model's format."""
        prompt, answer = self._prompt(), ANSWERS[self._model.kind]
        for _ in range(2):
            ids, cut = self._cut(answer(self._random, self._length(), calls, reasoning=reasoning))
            if truncated:
                ids, cut = ids[: len(ids) * 4 // 5], True
            if self._model.kind == "hermes" and not cut:
                ids.append(self._model.end())
            self._model.add_script(prompt, ids, "length" if cut else "stop")
        return prompt

    def _broken(self) -> str:
        """The prompt of an answer in which the engine fails."""
        prompt = self._prompt()
        ids, _ = self._cut(prose(self._random, self._length() // 2))
        self._model.add_script(prompt, ids, "error", "the engine has had enough")
        return prompt

    def _chatted(self, prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        return CHAT, {"messages": [{"role": "user", "content": prompt}], **fields}

    # -------------------------------------------------------------------------------- requests

    def _chat(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        stops = list(STOPS)
        limit = self._longest // 2
        yield "chat", *self._chatted(self._prose())
        yield "chat, two choices", *self._chatted(self._prose(), n=2)
        yield "chat, logprobs", *self._chatted(self._prose(), logprobs=True, top_logprobs=3)
        yield "chat, logprobs and stops", *self._chatted(self._prose(stops=True), n=2, logprobs=True, stop=stops)
        yield "chat, stops", *self._chatted(self._prose(stops=True), stop=stops)
        kept = {"stop": stops, "include_stop_str_in_output": True}
        yield "chat, stops kept", *self._chatted(self._prose(stops=True), n=2, **kept)
        yield "chat, limited", *self._chatted(self._prose(), max_tokens=limit)
        yield "chat, special tokens", *self._chatted(self._prose(), skip_special_tokens=False, n=2)
        yield "chat, broken", *self._chatted(self._broken())
        for n in (1, 4):
            yield f"chat, free, {n} choices", *self._chatted(f"free {n}", n=n, max_tokens=self._length())
        yield "chat, free, logprobs", *self._chatted("free", logprobs=True, top_logprobs=5, max_tokens=limit)
        yield "chat, free, stop ids", *self._chatted("else", stop_token_ids=[70, 80], min_tokens=20, max_tokens=limit)

    def _formats(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        yield "reasoning", *self._chatted(self._formatted(0))
        yield "reasoning, logprobs", *self._chatted(self._formatted(0), logprobs=True, top_logprobs=2)
        yield "reasoning, hidden", *self._chatted(self._formatted(0), include_reasoning=False, n=2)
        later = {"stop_in_reasoning": False} if self._model.kind == "hermes" else {}  # harmony servers refuse it
        yield "reasoning, stops", *self._chatted(self._formatted(0), stop=list(STOPS), **later)
        yield "tool", *self._chatted(self._formatted(1, reasoning=False), tools=_TOOLS)
        yield "tools", *self._chatted(self._formatted(3), tools=_TOOLS)
        yield "tools, two choices, logprobs", *self._chatted(self._formatted(2), tools=_TOOLS, n=2, logprobs=True)
        yield "tools, not parallel", *self._chatted(self._formatted(2), tools=_TOOLS, parallel_tool_calls=False)
        yield "tools, truncated", *self._chatted(self._formatted(2, truncated=True), tools=_TOOLS)
        yield "tools, none", *self._chatted(self._formatted(1), tools=_TOOLS, tool_choice="none")

    def _completions(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        long = {"max_tokens": self._longest}
        several = [self._prose(), "something else", self._prose(stops=True)]
        yield "completion", COMPLETIONS, {"prompt": self._prose(), **long}
        yield "completions", COMPLETIONS, {"prompt": several, "n": 2, "max_tokens": self._longest // 2}
        logprobs = {"logprobs": 2, "stop": list(STOPS), "n": 2}
        yield "completion, logprobs", COMPLETIONS, {"prompt": self._prose(stops=True), **logprobs, **long}
        yield "completion, echo", COMPLETIONS, {"prompt": self._prose(), "echo": True, **long}
        yield "completion, broken", COMPLETIONS, {"prompt": self._broken(), **long}
        yield "completion, short", COMPLETIONS, {"prompt": "short", "max_tokens": 1}

    def _responses(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        tools = [{"type": "function", **_FUNCTION}]
        yield "response", RESPONSES, {"input": self._prose(), "store": False}
        yield "response, stored", RESPONSES, {"input": self._prose()}
        yield "response, reasoning", RESPONSES, {"input": self._formatted(0), "store": False}
        yield "response, tools", RESPONSES, {"input": self._formatted(2), "tools": tools, "store": False}
        cut = {"max_output_tokens": self._longest // 3, "store": False}
        yield "response, limited", RESPONSES, {"input": self._formatted(1), "tools": tools, **cut}
        yield "response, broken", RESPONSES, {"input": self._broken(), "store": False}
