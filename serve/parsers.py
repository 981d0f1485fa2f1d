"""From the names in a request's spec to the parser of one chat choice, and the finish reason that follows from it.

    raw text ─▶ reasoning (serve/reasoning) ─▶ tool calls (serve/tools) ─▶ events

The reasoning stage comes first: markup inside reasoning is text. Both stages are tables of formats; a parser here only
joins them. Which formats a model speaks is read off its chat template (``detect``).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from serve.events import ChoiceParser, ContentDelta, Event, EventParser, Folded, ReasoningDelta
from serve.harmony_parser import harmony_text_parser
from serve.reasoning import REASONING_PARSERS
from serve.reasoning.blocks import ReasoningParser, Stage, TaggedContent, joined
from serve.tools import TOOL_PARSERS
from serve.tools.calls import Calls
from serve.tools.markup import literals_of
from serve.tools.openings import named_opening, required_opening

#: gpt-oss's format: reasoning and calls are parts of one frame, so it is no stage of either kind.
HARMONY = "harmony"


class ToolStage(Protocol):
    """What makes content and calls of content."""

    def feed(self, text: str) -> Sequence[Event]: ...

    def flush(self) -> Sequence[Event]: ...


class ChatParser:
    """Raw text of one choice -> reasoning, content and tool calls.

    reasoning_span: where the reasoning is in the raw text: offsets of its first character and behind its last, the
    markers not counted. The end is None while the block is open, the whole is None while there is none. It does not
    depend on the steps the text came in, so tokens counted by it do not either.
    """

    counting: bool

    def __init__(
        self, reasoning: ReasoningParser | TaggedContent | None, tools: ToolStage | None, calls: Calls, *, show: bool
    ) -> None:
        self._reasoning = self._stage = reasoning
        self._tools, self._calls, self._show = tools, calls, show
        #: offsets in the raw text behind each token, until the reasoning is over; then how many of them it had
        self._ends = array("q")
        self.counting = reasoning is not None
        self._length = self._counted = 0

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._calls.count

    @property
    def reasoning_tokens(self) -> int:
        """Tokens with text inside the reasoning block so far."""
        if not self.counting:
            return self._counted
        if self.reasoning_span is None:
            return 0
        start, end = self.reasoning_span
        last = len(self._ends) if end is None else min(bisect_left(self._ends, end) + 1, len(self._ends))
        return max(0, last - bisect_right(self._ends, start))

    def observe_pieces(self, pieces: Sequence[str]) -> None:
        """The text of each token of the step whose text is fed next."""
        for piece in pieces:
            self._length += len(piece)
            self._ends.append(self._length)

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning block."""
        return self.reasoning_span is not None and self.reasoning_span[1] is None

    @property
    def reasoning_span(self) -> tuple[int, int | None] | None:
        """See the class."""
        return self._reasoning.span if self._reasoning is not None else None

    def feed(self, text: str) -> Sequence[Event]:
        """Events that ``text`` completes."""
        if self._stage is None:
            return self._tools.feed(text) if self._tools is not None else [ContentDelta(text)]
        events = self._stage.feed(text)
        if len(events) == 1 and isinstance(events[0], ReasoningDelta):
            return events if self._show else ()
        passed = self._through(events)
        if events and self._stage.passes:
            self._stage = None  # from here on one stage less
            self._counted = self.reasoning_tokens
            self.counting, self._ends = False, array("q")
        return passed

    def flush(self) -> Sequence[Event]:
        """What was held, as events; final and idempotent."""
        events = self._through(self._stage.flush()) if self._stage is not None else ()
        if self._ends and (span := self.reasoning_span) is not None and span[1] is not None:
            self._ends[-1] = max(self._ends[-1], span[1])  # the rest of a last character belongs to the last token
        return joined([*events, *self._tools.flush()]) if self._tools is not None else events

    def _through(self, events: Sequence[Event]) -> Sequence[Event]:
        if self._tools is not None and len(events) == 1 and isinstance(events[0], ContentDelta):
            return self._tools.feed(events[0].text)
        passed: list[Event] = []
        for event in events:
            if not isinstance(event, ContentDelta):
                passed += [event] if self._show else []
            elif self._tools is None:
                passed.append(event)
            else:
                passed += self._tools.feed(event.text)
        return passed


def chat_parser(args: Mapping[str, Any], index: int) -> ChoiceParser | None:
    """The parser of choice ``index``; None when all text is content. ValueError for a name that is not known.

    Of ``args`` it reads ``id``, ``tool_parser``, ``reasoning_parser``, ``tools``, ``tool_choice``,
    ``parallel_tool_calls``, ``include_reasoning`` and ``prompt_tail``.
    """
    reasoning_name, tool_name = args.get("reasoning_parser"), args.get("tool_parser")
    choice = args.get("tool_choice")
    check_names(reasoning_name, tool_name)
    if HARMONY in (reasoning_name, tool_name):
        return harmony_text_parser(args, index)
    named = choice if isinstance(choice, Mapping) else None
    if choice == "none" or tool_name is None and named is None and choice != "required":
        tool_name = None
        if reasoning_name is None:
            return None
    calls = Calls(
        args.get("tools") or (),
        seed=f"{args.get('id', '')}/{index}",
        parallel=args.get("parallel_tool_calls") is not False,
        **({"ids": TOOL_PARSERS[tool_name].ids} if tool_name is not None else {}),
    )
    tools = _tool_stage(tool_name, choice, calls) if choice != "none" else None
    reasoning = REASONING_PARSERS[reasoning_name].parser(args.get("prompt_tail") or "") if reasoning_name else None
    return ChatParser(reasoning, tools, calls, show=args.get("include_reasoning") is not False)


def _tool_stage(name: str | None, choice: Any, calls: Calls) -> ToolStage | None:
    own: ToolStage = TOOL_PARSERS[name].parser(calls) if name is not None else _Content()
    if choice == "required":
        return required_opening(TOOL_PARSERS["json"].parser(calls), own)
    if isinstance(choice, Mapping):
        return named_opening(str(choice["function"]["name"]), calls, TOOL_PARSERS["json"].parser(calls), own)
    return own if name is not None else None


class _Content:
    """Where no format is configured all text is content."""

    def feed(self, text: str) -> Sequence[Event]:
        return [ContentDelta(text)] if text else []

    def flush(self) -> Sequence[Event]:
        return []


def finish_reason_of(reason: str | None, parser: EventParser | None, tool_choice: Any) -> str | None:
    """The finish reason as the chat endpoint words it: a stop behind a call is ``tool_calls``, unless the request named
    the function; truncation stays ``length``."""
    called = isinstance(parser, ChatParser) and parser.calls > 0
    return "tool_calls" if reason == "stop" and called and not isinstance(tool_choice, Mapping) else reason


# ------------------------------------------------------------------ which formats?


def check_names(reasoning: str | None, tool: str | None) -> None:
    """Raise ValueError, naming the known ones, for a parser that does not exist. None and "auto" are no names."""
    for kind, name, known in (("reasoning", reasoning, REASONING_PARSERS), ("tool", tool, TOOL_PARSERS)):
        if name is not None and name != HARMONY and name not in known:
            raise ValueError(f"{kind}_parser: {name!r} is not one of {', '.join(sorted((*known, HARMONY)))}")


def reasoning_gate(name: str | None, prompt_tail: str) -> tuple[bool, list[str], list[str]] | None:
    """(inside, opens, closes) of the block that stop strings may leave alone; None where all text is content."""
    format = REASONING_PARSERS.get(name or "")
    if format is None or format.keeps_tags or (stage := format.initial_stage(prompt_tail)) is Stage.AFTER:
        return None
    return stage is Stage.INSIDE, list(format.opens), [*format.closes, *format.ends]


def visible_markers(reasoning: str | None, tool: str | None) -> frozenset[str]:
    """The markers of two formats. Where the tokenizer has them as special tokens they must reach the parser as text."""
    markers: set[str] = set()
    if reasoning in REASONING_PARSERS:
        format = REASONING_PARSERS[reasoning]
        markers.update(format.opens, format.closes, format.ends, format.dropped)
    if tool in TOOL_PARSERS:
        markers.update(literals_of(TOOL_PARSERS[tool]))
    return frozenset(map(str.strip, markers))


#: What a chat template or the list of special tokens must all contain -> tool parser. The first row that fits wins.
_TOOL_EVIDENCE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|start|>", "<|channel|>", "<|message|>"), HARMONY),
    (("<｜DSML｜", "function_calls"), "deepseek_v32"),
    (("<｜DSML｜", "tool_calls"), "deepseek_v4"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("steptml:invoke",), "step3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("functools[",), "phi4_mini_json"),
    (("<|/tool_call|>",), "phi4_mini_json"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>", "<answer>"), "hunyuan_a13b"),
    (("<tool_calls>",), "jamba"),
    (("<tool_call>", "<response>"), "ernie45"),
    (("<tool_call>",), "hermes"),
)

#: The same for reasoning parsers.
_REASONING_EVIDENCE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|start|>", "<|channel|>", "<|message|>"), HARMONY),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<seed:think>",), "seed_oss"),
    (("[THINK]",), "mistral"),
    (("◁think▷",), "kimi"),
    (("Here is my thought process",), "granite"),
    (("<think>", "<|im_middle|>"), "kimi_k2"),
    (("<think>", "]~b]"), "minimax_m2"),
    (("<think>", "steptml:invoke"), "step3"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>", "truncate_history_thinking"), "nemotron"),
    (("</think>", "<｜Assistant｜>", "thinking is defined"), "deepseek_v3"),
    (("</think>", "<｜DSML｜"), "deepseek_v3"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("<think>", "enable_thinking"), "qwen3"),
    (("<think>\\n' }}{%- endif",), "qwen3_thinking"),
    (("<think>",), "qwen3"),
)


def detect(chat_template: str, special_tokens: Iterable[str]) -> tuple[str | None, str | None]:
    """The reasoning and the tool parser that a model's chat template and special tokens speak for; None for none."""
    evidence = "\n".join((chat_template, *special_tokens))

    def first(table: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
        return next((name for words, name in table if all(word in evidence for word in words)), None)

    return first(_REASONING_EVIDENCE), first(_TOOL_EVIDENCE)


# ------------------------------------------------------------------ raw text at once


def parse_reasoning(name: str, text: str, *, prompt_tail: str = "") -> Folded:
    """What the reasoning parser ``name`` makes of raw model text. ValueError for an unknown name."""
    return _fold(chat_parser({"reasoning_parser": name, "prompt_tail": prompt_tail, "tool_choice": "none"}, 0), text)


def parse_tool_calls(name: str, text: str, tools: Sequence[Mapping[str, Any]] = (), *, request_id: str = "") -> Folded:
    """What the tool parser ``name`` makes of raw model text. ValueError for an unknown name."""
    return _fold(chat_parser({"tool_parser": name, "tools": tools, "tool_choice": "auto", "id": request_id}, 0), text)


def _fold(parser: EventParser | None, text: str) -> Folded:
    folded = Folded()
    if parser is not None:
        for event in (*parser.feed(text), *parser.flush()):
            folded.add(event)
    return folded
