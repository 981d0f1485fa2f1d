"""The Responses API's stream, and its unary body as the fold of the same events.

A response goes through these events, in OpenAI's API reference (streaming events of the Responses API):

    response.created  response.in_progress
    per item:  response.output_item.added
                 response.content_part.added                        a message's text, or reasoning
                 response.output_text.delta ... .done               (response.reasoning_text.delta ... .done)
                 response.content_part.done
                 response.function_call_arguments.delta ... .done   a function call
               response.output_item.done
    response.completed | response.incomplete | response.failed

``sequence_number`` counts them from 0 without a gap. The last event holds the whole response, and that is the unary
body: both come from the items of one ``ResponsesStreamingProcessor``. It ends the stream; there is no ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from executor.result import DetokenizedGenerationResultBase
from serve.chunks import ESCAPED
from serve.errors import EngineError
from serve.events import ChoiceParser, ContentDelta, Event, ToolCallDelta, choice_events
from serve.harmony_adapter import HarmonyParser, is_harmony
from serve.parsers import chat_parser
from serve.responses_items import OutputItem, kind_of

Record = DetokenizedGenerationResultBase

#: Names of the events that carry an item's text: (delta, done).
_TEXT_EVENTS = {
    "message": ("response.output_text.delta", "response.output_text.done"),
    "reasoning": ("response.reasoning_text.delta", "response.reasoning_text.done"),
    "function_call": ("response.function_call_arguments.delta", "response.function_call_arguments.done"),
}


class ResponsesStreamingProcessor:
    """Events of one response -> its items, and the server-sent events that say so.

    response: what the response object holds from the start. mute: nobody reads the events (a unary body): they are not
    written, the items grow all the same.
    """

    def __init__(self, response: Mapping[str, Any], *, mute: bool = False) -> None:
        self.response, self.mute = response, mute
        self.items: list[OutputItem] = []
        self.started = False
        self._sequence = 0
        #: events without a delta
        self._others = 0
        #: The item that grows; the last of ``items``.
        self._open: OutputItem | None = None
        #: An event with a delta of it: all before the delta, and all between the delta and the sequence number.
        self._head = self._tail = b""

    def start(self) -> bytes:
        """The first two events."""
        self.started = True
        new = self._snapshot("in_progress")
        return self._write("response.created", response=new) + self._write("response.in_progress", response=new)

    def add(self, events: Iterable[Event]) -> bytes:
        """Take events of the choice."""
        return b"".join([self._add(event) for event in events])

    def content(self, text: str) -> bytes:
        """Take more of the answer; the usual event, so without a detour."""
        item = self._open
        if item is None or item.kind != "message":
            return self._add(ContentDelta(text))
        item.parts.append(text)
        return self._delta(text)

    def end(self, reason: str, usage: Mapping[str, Any]) -> bytes:
        """The last events, for a choice that ended with finish reason ``reason``."""
        cut = reason != "stop"
        parts = [self._close("incomplete" if cut else "completed")]
        if not cut and all(item.kind == "reasoning" for item in self.items):
            # Clients loop until there is a message or a call: an answer without text is an empty message.
            parts += [self._add(ContentDelta("")), self._close("completed")]
        status = "incomplete" if cut else "completed"
        response = self._snapshot(status, usage, reason if cut else None)
        return b"".join(parts) + self._write(f"response.{status}", response=response)

    def fail(self, error: Mapping[str, Any]) -> bytes:
        """The last events of a response that failed."""
        closed = self._close("incomplete")
        return closed + self._write("response.failed", response=self._snapshot("failed") | {"error": dict(error)})

    def document(self, reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The response object that ``end`` puts into its last event."""
        status = "completed" if reason == "stop" else "incomplete"
        return self._snapshot(status, usage, reason if reason != "stop" else None)

    def resumed(self) -> None:
        """What was folded so far had been sent by another worker, in more and smaller deltas perhaps: go on with a
        number that it cannot have used. Every delta has a character at least, so no worker, however it came to take
        over, has got beyond this one."""
        self._sequence = self._others + sum(len(item.text) for item in self.items)

    # -------------------------------------------------------------------------------- items

    def _add(self, event: Event) -> bytes:
        text = event.arguments if isinstance(event, ToolCallDelta) else event.text
        before = b""
        if self._open is None or not self._open.takes(event):
            before = self._close("completed") + self._begin(event)
        if not text:
            return before
        assert self._open is not None
        self._open.parts.append(text)
        return before + self._delta(text)

    def _begin(self, event: Event) -> bytes:
        item = OutputItem(kind_of(event), len(self.items), str(self.response["id"]), event)
        self.items.append(item)
        self._open = item
        added = self._write("response.output_item.added", output_index=item.index, item=item.as_json())
        if item.kind != "function_call":
            added += self._write("response.content_part.added", **self._place(item), part=item.empty_part())
        self._prepare(item)
        return added

    def _prepare(self, item: OutputItem) -> None:
        """What never changes about an item's deltas is encoded once."""
        name = _TEXT_EVENTS[item.kind][0]
        head = orjson.dumps({"type": name, **self._place(item)})
        self._head = f"event: {name}\ndata: ".encode() + head[:-1] + b',"delta":'
        logprobs = b',"logprobs":[]' if item.kind == "message" else b""
        self._tail = logprobs + b',"sequence_number":'

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        item.status = "completed" if status == "completed" else "incomplete"
        if self.mute:
            return b""
        place = self._place(item)
        return self._text_done(item, place) + self._write(
            "response.output_item.done", output_index=item.index, item=item.as_json()
        )

    def _text_done(self, item: OutputItem, place: Mapping[str, Any]) -> bytes:
        name = _TEXT_EVENTS[item.kind][1]
        if item.kind == "function_call":
            return self._write(name, **place, name=item.name, arguments=item.text)
        logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        done = self._write(name, **place, text=item.text, **logprobs)
        return done + self._write("response.content_part.done", **place, part=item.part())

    @staticmethod
    def _place(item: OutputItem) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        return place if item.kind == "function_call" else place | {"content_index": 0}

    def _snapshot(self, status: str, usage: Mapping[str, Any] | None = None, cut: str | None = None) -> dict[str, Any]:
        reason = "max_output_tokens" if cut == "length" else cut
        return {
            **self.response,
            "status": status,
            "output": [item.as_json() for item in self.items],
            "incomplete_details": {"reason": reason} if reason is not None else None,
            "usage": usage,
        }

    # -------------------------------------------------------------------------------- events

    def _delta(self, text: str) -> bytes:
        if self.mute:
            return b""
        number, self._sequence = self._sequence, self._sequence + 1
        return self._head + ESCAPED[text] + self._tail + b"%d}\n\n" % number

    def _write(self, type: str, **fields: Any) -> bytes:
        if self.mute:
            return b""
        self._others += 1
        number, self._sequence = self._sequence, self._sequence + 1
        data = orjson.dumps({"type": type, **fields, "sequence_number": number})
        return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"


class ResponsesPostprocArgs:
    """Arguments and state of one response; made from the plain data of a spec.

    args: as for a chat choice, and ``response``: the response object as far as the request decides it.
    """

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.processor = ResponsesStreamingProcessor(args["response"])
        self.harmony = HarmonyParser(args, 0) if is_harmony(args) else None
        self.parser: ChoiceParser | None = self.harmony or chat_parser(args, 0)

    def resumed(self) -> None:
        """The client has everything up to here from another worker."""
        self.processor.resumed()

    def events(self, record: Record) -> list[Event]:
        """What the last step adds."""
        if self.harmony is not None:
            self.harmony.observe(record)
        return choice_events(record.updated, self.parser)

    def usage(self, record: Record) -> dict[str, Any]:
        """The usage object; details that are not known are 0."""
        prompt, completion = record.prompt_tokens, record.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {
                "reasoning_tokens": self.parser.reasoning_tokens if self.parser is not None else 0
            },
            "total_tokens": prompt + completion,
        }


def responses_api_streaming_post_processor(record: Record, args: ResponsesPostprocArgs) -> bytes:
    """The events that the last step adds to a response's stream."""
    output, processor = record.updated, args.processor
    if args.parser is None and output.finish_reason is None and processor.started:
        return processor.content(output.text_diff) if output.text_diff else b""
    start = b"" if processor.started else processor.start()
    parts = start + processor.add(args.events(record))
    if not record.finished:
        return parts
    return parts + processor.end(output.finish_reason or "stop", args.usage(record))


def responses_api_unary_post_processor(record: Record, args: ResponsesPostprocArgs) -> bytes:
    """The response object, once the record is finished; until then its events are folded."""
    processor, reason = args.processor, record.updated.finish_reason or "stop"
    processor.mute = True
    processor.add(args.events(record))
    if not record.finished:
        return b""
    usage = args.usage(record)
    processor.end(reason, usage)
    return orjson.dumps(processor.document(reason, usage))


def fail_response(args: ResponsesPostprocArgs, message: str) -> tuple[bytes, bool]:
    """``response.failed``; a whole error document while nothing had been sent."""
    if not args.processor.started:
        return EngineError(message).body(), True
    return args.processor.fail({"code": "server_error", "message": message}), False
