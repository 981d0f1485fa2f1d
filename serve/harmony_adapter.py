"""Harmony (gpt-oss) on token ids: the post-processors of its chat choices, and the parser they share with responses.

In a vocabulary that has the marks as special tokens a mark is an id, and the same characters written with ordinary
tokens are text. So marks are taken from the ids. Text is not: what may be shown is what the record's ``text_diff``
says, because a stop string has cut it and a hook may have replaced it. The hard thing here is to bring the two
together. While a stop string may be coming, text lags behind the ids; so ids are decoded once more, by a detokenizer
like the record's own, into a queue of marks and pieces of text, and the record's text, as it comes, says how far the
queue may be read. Where it says something else than the queue, a hook has spoken: then headers are read from the queue,
which a hook has no business with, and bodies from the record.

Special tokens are always skipped in the record's text (``harmony_spec``), so a stop string never matches a mark. It may
match a header's words: stop strings look at raw text.

The machine behind it is in ``harmony_parser.py``, which also says why it is not the ``openai-harmony`` package's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from executor.result import CompletionOutput, DetokenizedGenerationResultBase
from postproc_workers.detokenizer import REPLACEMENT
from postproc_workers.spec import MAX_STOP_CHARS, StreamSpec
from postproc_workers.vocabulary import Vocabulary
from serve.events import Event
from serve.harmony_parser import HarmonyMachine, HarmonyTextParser, harmony_machine, mark_of
from serve.parsers import HARMONY, ChatParser
from serve.postprocess_handlers import ChatPostprocArgs, chat_stream_post_processor, chat_unary_post_processor

Record = DetokenizedGenerationResultBase


def is_harmony(args: Mapping[str, Any]) -> bool:
    """Whether a spec's args ask for this format."""
    return HARMONY in (args.get("reasoning_parser"), args.get("tool_parser"))


def harmony_spec(spec: StreamSpec, reasoning_parser: str | None, tool_parser: str | None) -> StreamSpec:
    """``spec``, for a server with these parsers: as it is, or changed to what the post-processors here expect."""
    if HARMONY not in (reasoning_parser, tool_parser):
        return spec
    name = spec.post_processor.replace("chat_", "chat_harmony_", 1)
    args = spec.args | {"holds_text": bool(spec.stop), "spaces": spec.spaces_between_special_tokens}
    return replace(spec, post_processor=name, args=args, skip_special_tokens=True)


class _Mark(NamedTuple):
    """A mark in the queue. text: what of it the record's text has: nothing, or all of it where the vocabulary, such as
    one converted from another format, has the marks as tokens that are not special."""

    kind: int
    text: str = ""


class TokenQueue:
    """Ids of one output -> marks and text for the machine, as far as the record's text goes.

    holds: whether the record's text may lag behind the ids (stop strings).
    reasoning_tokens: tokens of reasoning text so far, marks and headers not counted.
    """

    __slots__ = ("reasoning_tokens", "_detokenizer", "_holds", "_late", "_machine", "_queue", "_vocabulary", "_waiting")

    def __init__(self, machine: HarmonyMachine, vocabulary: Vocabulary, *, spaces: bool, holds: bool) -> None:
        self._machine, self._vocabulary, self._holds = machine, vocabulary, holds
        self._detokenizer = vocabulary.detokenizer(skip_special_tokens=True, spaces_between_special_tokens=spaces)
        #: What the record's text has not reached yet: marks, and the text of one token each.
        self._queue: deque[_Mark | str] = deque()
        #: Characters in it.
        self._waiting = 0
        #: Marks that came inside of a character.
        self._late: list[_Mark] = []
        self.reasoning_tokens = 0

    def delta(self, token_ids: Sequence[int], text: str) -> Event | None:
        """The usual step in one go: one id of ordinary text inside a body. None if it is another; then ``read`` it."""
        machine, detokenizer = self._machine, self._detokenizer
        if len(token_ids) != 1 or not text or not machine.body or self._queue or self._late or text[0] == "<":
            return None
        strings = detokenizer.strings  # the contract of ``detokenizer.py``: a hit changes no state
        if not strings or detokenizer.pending or strings[token_ids[0]] != text:
            return None
        event = machine.delta(text)
        if event is not None:
            self.reasoning_tokens += machine.reasons
        return event

    def read(self, token_ids: Sequence[int], text: str, ended: bool) -> None:
        """One step: its ids, the text the record shows for it, and whether it is the last."""
        detokenizer = self._detokenizer
        for token_id in token_ids:  # one by one: whether bytes are pending is asked behind each
            self._push(token_id, detokenizer.decode((token_id,)))
        if ended:
            self._push_text(detokenizer.flush())
            self._queue += self._late
        self._release(text, ended)

    # -------------------------------------------------------------------------------- ids -> queue

    def _push(self, token_id: int, piece: str) -> None:
        if piece and "<|" not in piece:  # special tokens are skipped, so the others need no look at their bytes
            self._push_text(piece)
            return
        token = self._vocabulary.token_bytes(token_id)
        kind = mark_of(token)
        if kind is None:
            self._push_text(piece)
        elif piece:
            self._push_text(piece.removesuffix(token.decode()))
            self._append(_Mark(kind, token.decode()))
        elif self._detokenizer.pending or self._late:
            self._late.append(_Mark(kind))
        else:
            self._append(_Mark(kind))

    def _push_text(self, piece: str) -> None:
        """Bytes that a mark cut off become U+FFFD only with the next text: it belongs before the mark."""
        if self._late and piece:
            if piece.startswith(REPLACEMENT):
                self._append(REPLACEMENT)
                piece = piece[1:]
            self._queue += self._late
            self._late = []
        self._append(piece)

    def _append(self, entry: _Mark | str) -> None:
        self._queue.append(entry)
        self._waiting += len(_text(entry))

    # -------------------------------------------------------------------------------- queue -> machine

    def _release(self, text: str, ended: bool) -> None:
        """Read the queue as far as ``text`` goes. A mark behind it waits for the next text: so a step without text has
        no events, and a stream that another worker takes over there misses none."""
        if not text and not ended and (self._holds or not self._waiting):
            return
        if self._agrees(text, ended):
            self._read(text)
        else:
            self._replace(text)
        if ended and self._queue:
            last = self._queue[0]
            self._queue.clear()  # what a stop has cut off
            if isinstance(last, _Mark):  # the token that stopped the output is not shown, but it is a mark all the same
                self._feed(last)

    def _agrees(self, text: str, ended: bool) -> bool:
        if not self._holds and not ended:
            return len(text) == self._waiting and text == self._queued()
        return self._waiting - len(text) <= MAX_STOP_CHARS and self._queued().startswith(text)

    def _queued(self) -> str:
        return "".join(map(_text, self._queue))

    def _read(self, text: str) -> None:
        """``text`` is how the queue begins. A token whose text is released in part stays with the rest."""
        queue, at = self._queue, 0
        while queue and at + len(_text(queue[0])) <= len(text):
            entry = queue.popleft()
            at += len(_text(entry))
            self._feed(entry)
        self._waiting -= at
        if at < len(text):
            self._read_part(len(text) - at)

    def _read_part(self, count: int) -> None:
        """The first characters of a token. A mark is one with its last character."""
        entry = self._queue[0]
        self._waiting -= count
        if isinstance(entry, str):
            self._machine.text(entry[:count])
            self._queue[0] = entry[count:]
        else:
            self._queue[0] = entry._replace(text=entry.text[count:])

    def _feed(self, piece: _Mark | str) -> None:
        if isinstance(piece, _Mark):
            self._machine.mark(piece.kind)
            return
        self.reasoning_tokens += self._machine.reasons
        if piece:
            self._machine.text(piece)

    def _replace(self, text: str) -> None:
        """A hook's text. If it is as long as the queue's, it takes its place character by character; else all of it
        stands where the first text of a body was."""
        queue, self._queue = self._queue, deque()
        aligned, self._waiting, at = len(text) == self._waiting, 0, 0
        for entry in queue:
            if isinstance(entry, _Mark) or not self._machine.body:
                self._feed(entry)
            elif aligned:
                self._feed(text[at : at + len(entry)])
            else:
                self._feed(text)
                text = ""
            at += len(_text(entry))
        if text and not aligned and self._machine.body:
            self._machine.text(text)


def _text(entry: _Mark | str) -> str:
    return entry if isinstance(entry, str) else entry.text


class HarmonyParser(ChatParser):
    """The parser of one choice. It reads each step from the record (``observe``); ``feed`` and ``flush`` then only hand
    out what the step gave."""

    def __init__(self, args: Mapping[str, Any], index: int) -> None:
        self._machine = harmony_machine(args, index)
        super().__init__(None, None, self._machine.calls, show=True)
        self._spaces, self._holds = bool(args.get("spaces", True)), bool(args.get("holds_text", False))
        self._tokens: TokenQueue | None = None
        self._text: HarmonyTextParser | None = None
        self._events: list[Event] = []

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning text so far; 0 where the ids are no tokens."""
        return self._tokens.reasoning_tokens if self._tokens is not None else 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside a reasoning message."""
        return self._machine.reasons

    def observe(self, record: Record) -> None:
        """Read the record's last step, which must be one of this choice."""
        output, tokens = record.updated, self._tokens
        if tokens is not None and output.finish_reason is None:
            event = tokens.delta(output.token_ids_diff, output.text_diff)
            if event is not None:
                self._events.append(event)
                return
        if tokens is None and self._text is None:
            self._open(record)
        if self._tokens is not None:
            self._observe_tokens(self._tokens, output)
        elif self._text is not None:
            self._events += self._text.feed(output.text_diff)
            if output.finish_reason is not None:
                self._events += self._text.flush(_complete(output))

    def feed(self, text: str) -> Sequence[Event]:
        """The events of the step that was observed."""
        events, self._events = self._events, []
        return events

    def flush(self) -> Sequence[Event]:
        """The same: the step knew whether it was the last."""
        return self.feed("")

    def _open(self, record: Record) -> None:
        """Marks are ids, unless ids are characters (recordings of text) or there is no vocabulary to ask."""
        vocabulary = record.vocabulary
        if isinstance(vocabulary, Vocabulary) and vocabulary.kind != "text":
            self._tokens = TokenQueue(self._machine, vocabulary, spaces=self._spaces, holds=self._holds)
        else:
            self._text = HarmonyTextParser(self._machine)

    def _observe_tokens(self, tokens: TokenQueue, output: CompletionOutput) -> None:
        ended = output.finish_reason is not None
        tokens.read(output.token_ids_diff, output.text_diff, ended)
        if ended:
            self._machine.finish(_complete(output))
        self._events += self._machine.take()


def _complete(output: CompletionOutput) -> bool:
    """Whether the model itself ended the output: a stop string cuts like a limit does."""
    return output.finish_reason == "stop" and not isinstance(output.stop_reason, str)


class HarmonyPostprocArgs(ChatPostprocArgs):
    """Arguments and state of one chat response of a harmony model."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        super().__init__({**args, "reasoning_parser": None, "tool_parser": None, "tool_choice": "none"})
        self.tool_choice = args.get("tool_choice")
        self.counts_reasoning = True
        self.parsers = [HarmonyParser(args, choice) for choice in range(self.choices)]
        for choice, parser in zip(self.by_choice, self.parsers):
            choice.parser = parser


def chat_harmony_streaming_post_processor(record: Record, args: HarmonyPostprocArgs) -> bytes:
    """The events that the last step adds to a chat stream."""
    args.parsers[record.updated.index].observe(record)
    return chat_stream_post_processor(record, args)


def chat_harmony_unary_post_processor(record: Record, args: HarmonyPostprocArgs) -> bytes:
    """The chat.completion document, once the record is finished."""
    args.parsers[record.updated.index].observe(record)
    return chat_unary_post_processor(record, args)
