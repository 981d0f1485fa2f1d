"""The stream post-processors of the two text endpoints, and their unary bodies as folds of the same events.

Each is a function of (record, args): the record says what the last step added to which choice and, through
``finished``, whether the whole result is complete; args keeps what the response needs between steps. Per choice the
events are: a role chunk (chat), deltas, a chunk with the finish reason. Behind the last choice come usage, if asked
for, and ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from executor.messages import MAX_OUTPUTS
from executor.result import CompletionOutput, DetokenizedGenerationResultBase
from postproc_workers.post_processor import Express, PostProcessor
from serve.chunks import DONE, ESCAPED, GAP, NULL, ChunkFormat, usage_json
from serve.errors import EngineError, stream_error
from serve.events import ChoiceParser, ContentDelta, Event, Folded, ToolCallDelta, choice_events
from serve.logprobs_format import (
    ChatLogprobs,
    ChatTokens,
    CompletionLogprobs,
    CompletionRow,
    chat_logprobs,
    completion_logprobs,
    shared,
)
from serve.parsers import chat_parser, finish_reason_of

#: Where reasoning text stands; the second is what some clients look for, and is sent beside the first when asked for.
REASONING_KEYS = ("reasoning_content", "reasoning")

Record = DetokenizedGenerationResultBase


class ResponseArgs:
    """What both endpoints' args hold: who the response is, and what of usage the client asked for."""

    kind: str
    unary_kind: str
    field: str

    def __init__(self, args: Mapping[str, Any], choices: int) -> None:
        if not 0 < choices <= MAX_OUTPUTS:  # before anything is made for each of them
            raise ValueError(f"n: {choices} choices, not 1 to {MAX_OUTPUTS}")
        self.id, self.created, self.model = str(args["id"]), int(args["created"]), str(args["model"])
        self.choices = choices
        #: how often usage counts the prompt
        self.prompt_uses = 1
        self.include_usage = bool(args["include_usage"])
        self.continuous_usage = self.include_usage and bool(args["continuous_usage"])
        self.format = ChunkFormat(self.id, self.kind, self.created, self.model, self.field, self.include_usage)
        self.started = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Reasoning tokens over all choices so far; None where reasoning is not looked for."""
        return None

    def usage(self, record: Record) -> bytes:
        """The usage object: totals over all choices so far."""
        return usage_json(record.prompt_tokens * self.prompt_uses, record.completion_tokens, self.reasoning_tokens)

    def running_usage(self, record: Record) -> bytes:
        """The usage of a chunk: totals so far when the client wants them in every chunk, else null."""
        return self.usage(record) if self.continuous_usage else NULL

    def document(self, record: Record, choices: Sequence[Mapping[str, Any]]) -> bytes:
        """The unary body."""
        head = {
            "id": self.id,
            "object": self.unary_kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return orjson.dumps(head)[:-1] + b',"usage":' + self.usage(record) + b"}"


# ---------------------------------------------------------------------------------------------------------- chat


class ChatChoice:
    """One choice of a chat response between two steps.

    steady: it has started, and its events carry no usage: between constants, only text and log-probabilities change.
    plain: steady, and without log-probabilities and parser, so that a step is one content delta.
    told, told_tail: what stands around the log-probabilities of an event, instead of ``tail``.
    writer: of log-probabilities, once it has started; None where nobody asked for them.
    logprobs: items of the unary body.
    """

    __slots__ = (
        "plain", "steady", "started", "head", "tail", "content_head", "content_tail", "told", "told_tail",
        "reasoning_keys", "parser", "writer", "folded", "logprobs",
    )  # fmt: skip

    def __init__(
        self, index: int, format: ChunkFormat, parser: ChoiceParser | None, reasoning_keys: Sequence[str]
    ) -> None:
        self.plain = self.steady = self.started = False
        self.head, self.tail = format.head(index), format.tail()
        self.content_head = self.head + b'{"content":'
        self.content_tail = b"}" + self.tail
        self.told, self.told_tail = format.around(chat_logprobs(GAP))
        self.reasoning_keys = [b'"' + key.encode() + b'":' for key in reasoning_keys]
        self.parser = parser
        self.writer: ChatLogprobs | None = None
        self.folded = Folded()
        self.logprobs: list[bytes] = []

    def delta(self, event: Event) -> bytes:
        """The value of ``delta`` for an event."""
        if isinstance(event, ToolCallDelta):
            return _call_json(event)
        text = ESCAPED[event.text]
        if isinstance(event, ContentDelta):
            return b'{"content":' + text + b"}"
        return b"{" + b",".join([key + text for key in self.reasoning_keys]) + b"}"

    def steady_step(self, output: CompletionOutput) -> bytes:
        """The bytes of a step of a steady choice that does not end it."""
        items = b"" if self.writer is None else self.writer.items(output.logprobs_diff)
        if items and self.parser is None and (text := output.text_diff):  # the usual event with log-probabilities
            return b"".join((self.content_head, ESCAPED[text], b"}", self.told, items, self.told_tail))
        deltas = [self.delta(event) for event in choice_events(output, self.parser)]
        if not items:
            return b"".join([self.head + delta + self.tail for delta in deltas])
        last = deltas.pop() if deltas else b"{}"  # held back or swallowed text has log-probabilities all the same
        before = [self.head + delta + self.tail for delta in deltas]
        return b"".join([*before, self.head, last, self.told, items, self.told_tail])


def _call_json(event: ToolCallDelta) -> bytes:
    arguments = ESCAPED[event.arguments]
    if event.id is None:
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":' % event.index + arguments + b"}}]}"
    head = (
        b'{"tool_calls":[{"index":%d,"id":' % event.index
        + ESCAPED[event.id]
        + b',"type":"function","function":{"name":'
    )
    return head + ESCAPED[event.name or ""] + b',"arguments":' + arguments + b"}}]}"


class ChatPostprocArgs(ResponseArgs):
    """Arguments and state of one chat response; made from the plain data of a spec."""

    kind, unary_kind, field = "chat.completion.chunk", "chat.completion", "delta"

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__(args, int(args["n"]))
        self.role = str(args.get("role", "assistant"))
        self.logprobs = bool(args["logprobs"])
        self.top_logprobs = int(args["top_logprobs"])
        self._writer: ChatLogprobs | None = None
        self.tool_choice = args.get("tool_choice")
        self.reasoning_keys = REASONING_KEYS if args.get("reasoning_alias") else REASONING_KEYS[:1]
        self.counts_reasoning = args.get("reasoning_parser") is not None
        self.by_choice = [
            ChatChoice(i, self.format, chat_parser(args, i), self.reasoning_keys) for i in range(self.choices)
        ]

    @property
    def reasoning_tokens(self) -> int | None:
        """Reasoning tokens over all choices so far; None where reasoning is not looked for."""
        if not self.counts_reasoning:
            return None
        return sum(choice.parser.reasoning_tokens for choice in self.by_choice if choice.parser is not None)

    def writer(self, record: Record) -> ChatLogprobs | None:
        """What writes log-probabilities; None where nobody asked for them. Only the record knows the vocabulary."""
        if self._writer is None and self.logprobs and record.vocabulary is not None:
            self._writer = shared(ChatTokens, record.vocabulary).writer(self.top_logprobs)
        return self._writer

    def items(self, record: Record) -> bytes:
        """The last step's log-probabilities, as the endpoint writes them."""
        writer, diff = self.writer(record), record.updated.logprobs_diff
        return writer.items(diff) if writer is not None and diff else b""

    def folded_answer(self, record: Record) -> bytes:
        """What the finished record's folded choices come to."""
        return self.document(record, [chat_choice(self, output) for output in record.outputs])


def chat_stream_post_processor(record: Record, args: ChatPostprocArgs) -> bytes:
    """The events that the last step adds to a chat stream."""
    output = record.updated
    choice = args.by_choice[output.index]
    if output.finish_reason is None:
        if choice.plain:  # the fast lane: one delta between two constants
            text = output.text_diff
            return choice.content_head + ESCAPED[text] + choice.content_tail if text else b""
        if choice.steady:
            return choice.steady_step(output)
    return _chat_step(record, args, output, choice)


def _chat_step(record: Record, args: ChatPostprocArgs, output: CompletionOutput, choice: ChatChoice) -> bytes:
    deltas = [] if choice.started else [_start_chat(record, args, choice)]
    deltas += [choice.delta(event) for event in choice_events(output, choice.parser)]
    items = args.items(record)
    if items and not deltas and output.finish_reason is None:
        deltas.append(b"{}")  # tokens whose text is held back or swallowed still have log-probabilities
    return _chat_events(record, args, output, choice.head, deltas, items) + _response_end(record, args)


def _chat_events(
    record: Record, args: ChatPostprocArgs, output: CompletionOutput, head: bytes, deltas: list[bytes], items: bytes
) -> bytes:
    """An event for each delta, and for the end of the output if it has ended; log-probabilities are in the last."""
    usage = args.running_usage(record)
    finish = finish_reason_of(output.finish_reason, args.by_choice[output.index].parser, args.tool_choice)
    if finish is not None:
        deltas = [*deltas, b"{}"]
    parts = [head + delta + args.format.tail(usage=usage) for delta in deltas[:-1]]
    if deltas:
        last = args.format.tail(chat_logprobs(items) if items else NULL, finish, output.stop_reason, usage)
        parts.append(head + deltas[-1] + last)
    return b"".join(parts)


def _start_chat(record: Record, args: ChatPostprocArgs, choice: ChatChoice) -> bytes:
    choice.started = args.started = True
    choice.writer = args.writer(record)
    choice.steady = not args.continuous_usage
    choice.plain = choice.steady and choice.parser is None and not args.logprobs
    return _role(args)


def _role(args: ChatPostprocArgs) -> bytes:
    return b'{"role":' + ESCAPED[args.role] + b',"content":""}'


def chat_answer(record: Record, args: ChatPostprocArgs, output: CompletionOutput) -> bytes:
    """The end of a stream that has said nothing of its choices so far: one of them, which was folded, is its only
    one."""
    choice = args.by_choice[output.index]
    deltas = [_role(args), *map(choice.delta, choice.folded.events())]
    events = _chat_events(record, args, output, args.format.head(0), deltas, b",".join(choice.logprobs))
    return events + _response_end(record, args)


def _response_end(record: Record, args: ResponseArgs) -> bytes:
    """Usage and [DONE], once all choices are complete."""
    if not record.finished:
        return b""
    usage = b""
    if args.include_usage:
        usage = args.format.usage(args.usage(record))
    return usage + DONE


def chat_unary_post_processor(record: Record, args: ChatPostprocArgs) -> bytes:
    """The chat.completion document, once the record is finished; until then its events are folded."""
    output = record.updated
    choice = args.by_choice[output.index]
    for event in choice_events(output, choice.parser):
        choice.folded.add(event)
    if items := args.items(record):
        choice.logprobs.append(items)
    if not record.finished:
        return b""
    return args.folded_answer(record)


def chat_choice(args: ChatPostprocArgs, output: CompletionOutput) -> dict[str, Any]:
    """A folded choice, as a document has it."""
    choice = args.by_choice[output.index]
    folded, content = choice.folded, "".join(choice.folded.content)
    calls = [call.as_json() for call in folded.tool_calls]
    message: dict[str, Any] = {"role": args.role, "content": content if content or not calls else None}
    if folded.reasoning:
        message |= dict.fromkeys(args.reasoning_keys, "".join(folded.reasoning))
    if calls:
        message["tool_calls"] = calls
    return {
        "index": output.index,
        "message": message,
        "logprobs": orjson.Fragment(chat_logprobs(b",".join(choice.logprobs))) if choice.logprobs else None,
        "finish_reason": finish_reason_of(output.finish_reason, choice.parser, args.tool_choice),
        "stop_reason": output.stop_reason,
    }


# ---------------------------------------------------------------------------------------------------------- completions


class CompletionChoice:
    """One choice of a completion between two steps; ``started``, ``told`` and ``writer`` as in ChatChoice, without a
    role. plain: it has sent something, and its events carry no usage."""

    __slots__ = ("plain", "started", "head", "tail", "told", "told_tail", "echo", "writer", "text", "logprobs")

    def __init__(self, index: int, format: ChunkFormat, echo: str, top: int | None) -> None:
        self.plain = self.started = False
        self.head, self.tail = format.head(index), format.tail()
        self.told, self.told_tail = format.around(GAP)
        self.echo = echo
        self.writer = None if top is None else CompletionLogprobs(top, len(echo))
        self.text: list[str] = [echo] if echo else []
        self.logprobs: list[CompletionRow] = []


class CompletionPostprocArgs(ResponseArgs):
    """Arguments and state of one completions response. Choice ``p * n + j`` is the j-th for prompt p."""

    kind, unary_kind, field = "text_completion", "text_completion", "text"

    def __init__(self, args: Mapping[str, Any]) -> None:
        n = int(args["n"])
        super().__init__(args, n * int(args["prompt_count"]))
        echo: Sequence[str] | None = args["echo"]
        top = None if args["logprobs"] is None else int(args["logprobs"])
        self.by_choice = [
            CompletionChoice(i, self.format, echo[i // n] if echo else "", top) for i in range(self.choices)
        ]


def completion_stream_post_processor(record: Record, args: CompletionPostprocArgs) -> bytes:
    """The events that the last step adds to a completions stream."""
    output = record.updated
    choice = args.by_choice[output.index]
    if choice.plain and output.finish_reason is None:
        text = output.text_diff
        if choice.writer is not None and (rows := _logprob_rows(record, choice)):
            return b"".join((choice.head, ESCAPED[text], choice.told, completion_logprobs(rows), choice.told_tail))
        return choice.head + ESCAPED[text] + choice.tail if text else b""
    return _completion_step(record, args, output, choice)


def _completion_step(
    record: Record, args: CompletionPostprocArgs, output: CompletionOutput, choice: CompletionChoice
) -> bytes:
    usage, parts, text = args.running_usage(record), [], output.text_diff
    if not choice.started and choice.echo:
        parts.append(choice.head + ESCAPED[choice.echo] + args.format.tail(usage=usage))
    rows = _logprob_rows(record, choice)
    news = bool(text or rows or output.finish_reason is not None)
    _start_completion(args, choice, bool(parts) or news)
    if news:
        tail = args.format.tail(completion_logprobs(rows), output.finish_reason, output.stop_reason, usage)
        parts.append(choice.head + ESCAPED[text] + tail)
    return b"".join(parts) + _response_end(record, args)


def _start_completion(args: CompletionPostprocArgs, choice: CompletionChoice, sent: bool) -> None:
    args.started = args.started or sent
    choice.started = True
    choice.plain = sent and not args.continuous_usage


def _logprob_rows(record: Record, choice: CompletionChoice) -> list[CompletionRow]:
    diff, vocabulary = record.updated.logprobs_diff, record.vocabulary
    if choice.writer is None or not diff or vocabulary is None:
        return []
    return choice.writer.rows(diff, vocabulary)


def completion_unary_post_processor(record: Record, args: CompletionPostprocArgs) -> bytes:
    """The text_completion document, once the record is finished; until then its steps are folded."""
    output = record.updated
    choice = args.by_choice[output.index]
    choice.text.append(output.text_diff)
    choice.logprobs += _logprob_rows(record, choice)
    if not record.finished:
        return b""
    return args.document(record, [_completion_choice(args, each) for each in record.outputs])


def _completion_choice(args: CompletionPostprocArgs, output: CompletionOutput) -> dict[str, Any]:
    choice = args.by_choice[output.index]
    return {
        "index": output.index,
        "text": "".join(choice.text),
        "logprobs": orjson.Fragment(completion_logprobs(choice.logprobs)),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


# ---------------------------------------------------------------------------------------------------------- failure


def fail_stream(args: ResponseArgs, message: str) -> tuple[bytes, bool]:
    """An error event and [DONE]; a whole error document while nothing had been sent."""
    if not args.started:
        return fail_unary(args, message)
    error = EngineError(message)
    return stream_error(error.message, error.type, error.code) + DONE, False


def fail_unary(args: ResponseArgs, message: str) -> tuple[bytes, bool]:
    """The error document."""
    return EngineError(message).body(), True


#: What a worker is given at start-up, by the dotted name of this table.
def _around_chat(args: ChatPostprocArgs) -> tuple[bytes, bytes] | None:
    choice = args.by_choice[0]
    return (choice.content_head, choice.content_tail) if choice.plain else None


def _around_completion(args: CompletionPostprocArgs) -> tuple[bytes, bytes] | None:
    choice = args.by_choice[0]
    return (choice.head, choice.tail) if choice.plain else None


_EXPRESS_CHAT, _EXPRESS_COMPLETION = Express(ESCAPED, _around_chat), Express(ESCAPED, _around_completion)

POST_PROCESSORS = {
    "chat_stream": PostProcessor(chat_stream_post_processor, ChatPostprocArgs, fail_stream, express=_EXPRESS_CHAT),
    "chat_unary": PostProcessor(chat_unary_post_processor, ChatPostprocArgs, fail_unary, streams=False),
    "completion_stream": PostProcessor(
        completion_stream_post_processor,
        CompletionPostprocArgs,
        fail_stream,
        express=Express(ESCAPED, _around_completion),
    ),
    "completion_unary": PostProcessor(
        completion_unary_post_processor, CompletionPostprocArgs, fail_unary, streams=False
    ),
}
