"""Harmony (gpt-oss): marks and text of one choice -> events. Messages have headers, headers say whose text follows.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>                                  reasoning
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>   a call of f
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>                                a preamble: content
    <|start|>assistant<|channel|>final<|message|>...<|return|>                                  content

The hard thing is that a model breaks this frame: it leaves out ``<|start|>`` or ``<|message|>``, opens a message inside
another, writes without any frame. A parser for the well-formed grammar is no help there. The one in the
``openai-harmony`` package raises where a ``<|start|>`` is missing or a recipient stands in an unusual place, shows
marks inside a message as text, drops what has no frame, wants a vocabulary file that a server need not have, and takes
5.7 µs a token (0.0.8, CPU). So this is a small machine of its own with two states, header and body. Every mark has a
meaning in both, and no order of marks and text is an error. What it promises:

* Text between marks is either a header or goes out, once; a header's words never go out, an answer's always do.
  ``harmony_header.py`` tells them apart.
* A recipient makes a call when it is one of ``functions.``, or a declared tool, or any other on the commentary channel
  (a model that calls ``python`` there means it). On the analysis channel the model talks to tools of its own, which
  this server does not have: what it says to them is reasoning.
* A call begins with its first argument text, or when its message ends: then it had none, and they are ``{}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from postproc_workers.stop_strings import Literals, LiteralScanner
from serve.events import ContentDelta, Event, ReasoningDelta
from serve.harmony_header import BETWEEN, CHANNEL, INITIAL, ROLE, TYPE, Header, Section, scan
from serve.tools.calls import Calls

START, CHANNEL_MARK, CONSTRAIN, MESSAGE, END, CALL, OTHER = range(7)

#: The special tokens that mean something, by their text.
MARKS = {
    "<|start|>": START,
    "<|channel|>": CHANNEL_MARK,
    "<|constrain|>": CONSTRAIN,
    "<|message|>": MESSAGE,
    "<|end|>": END,
    "<|return|>": END,
    "<|endoftext|>": END,
    "<|call|>": CALL,
    "<|startoftext|>": OTHER,
    "<|endofprompt|>": OTHER,
}
_LITERALS = Literals(MARKS)
_SPECIAL = re.compile(rb"<\|\w+\|>")

_CONTENT, _REASONING, _CALL = range(3)

#: Recipients that are no tools.
_PEOPLE = frozenset(("", "assistant", "user", "system", "developer", "all"))
_FUNCTIONS = "functions."


def mark_of(token: bytes) -> int | None:
    """The mark that a token's bytes spell; OTHER for a special token without a meaning here, None for ordinary text."""
    if _SPECIAL.fullmatch(token) is None:
        return None
    return MARKS.get(token.decode(), OTHER)


class HarmonyMachine:
    """The two states. Events gather until they are taken.

    may_call: whether calls are wanted; if not, what is said to a tool is text of its channel.
    body: inside a message's text; else inside a header. reasons: the text that comes now is reasoning.
    """

    __slots__ = (
        "body", "calls", "reasons", "_begun", "_blank", "_channel", "_events", "_held", "_may_call", "_name",
        "_recipient", "_section", "_show_reasoning", "_sink", "_thoughts",
    )  # fmt: skip

    def __init__(self, calls: Calls, *, may_call: bool = True, show_reasoning: bool = True) -> None:
        self.calls = calls
        self._may_call, self._show_reasoning = may_call, show_reasoning
        self._events: list[Event] = []
        #: Pieces of a reasoning delta.
        self._thoughts: list[str] = []
        self.body = self.reasons = False
        #: The header: its section, the text since its last mark, and what it has said so far.
        self._section: Section = INITIAL
        self._held = self._channel = self._recipient = ""
        #: The body: whose it is, for a call its name and whether it has begun, and whether it is blank so far.
        self._sink, self._name, self._begun, self._blank = _CONTENT, "", False, True

    def start_from(self, prompt: str) -> None:
        """Begin in the state in which the rendered prompt ends: it may have opened a message already."""
        head, start, opened = prompt.rpartition("<|start|>")
        if not start or opened.strip() == "assistant":  # the usual end; INITIAL stands behind it
            return
        probe = HarmonyMachine(Calls(list(self.calls.tools.values())), may_call=self._may_call)
        probe.mark(START)
        for text, literal in (scanner := LiteralScanner(_LITERALS)).feed(opened):
            probe.read(text, literal)
        probe.read(scanner.flush(), None)
        self.body, self.reasons, self._sink, self._name = probe.body, probe.reasons, probe._sink, probe._name
        self._section, self._held, self._channel, self._recipient = (
            probe._section, probe._held, probe._channel, probe._recipient
        )  # fmt: skip

    def take(self) -> list[Event]:
        """The events since the last ``take``."""
        self._think()
        events = self._events + self.calls.take()
        self._events = []
        return events

    def read(self, text: str, literal: str | None) -> None:
        """Text, and the mark behind it as it is spelled."""
        if text:
            self.text(text)
        if literal is not None:
            self.mark(MARKS[literal])

    def text(self, text: str) -> None:
        """Text between marks."""
        if self.body:
            self._write(text)
            return
        self._held += text
        header = scan(self._section, self._held)
        if header.end is not None:
            rest = self._held[header.end :]
            self._open(header)
            self._write(rest)

    def delta(self, text: str) -> Event | None:
        """What ``text`` adds inside a body, when nothing waits to be taken. None: take the long way, ``text``."""
        if self._sink == _CALL or not self._show_reasoning:
            return None
        self._blank = False
        return ReasoningDelta(text) if self.reasons else ContentDelta(text)

    def mark(self, mark: int) -> None:
        """A mark. Every one is legal everywhere."""
        if mark == MESSAGE:
            if not self.body:
                self._open(scan(self._section, self._held))
        elif mark == CONSTRAIN:
            self._constrain()
        elif mark == CHANNEL_MARK and not self.body:
            self._note(scan(self._section, self._held))
            self._section, self._held = CHANNEL, ""
        elif mark != OTHER:
            self._end(mark)

    def finish(self, complete: bool) -> None:
        """No more comes. complete: the output ended by itself; else it was cut off, and an open call stays as it is."""
        if not self.body or complete:
            self._end(END)
        elif self._sink == _CALL and not self._begun:
            self._begin()

    # -------------------------------------------------------------------------------- headers

    def _expect(self, section: Section) -> None:
        """A new header."""
        self.body = self.reasons = False
        self._section, self._held = section, ""
        self._channel = self._recipient = ""

    def _note(self, header: Header) -> None:
        """What a section said. A later section overrules an earlier one, but its silence does not."""
        self._channel = header.channel or self._channel
        self._recipient = header.recipient or self._recipient

    def _constrain(self) -> None:
        if self.body and (self._begun or not self._blank):
            return  # inside of a text
        if not self.body:
            self._note(scan(self._section, self._held))
        self.body = self.reasons = False
        self._section, self._held = TYPE, ""

    def _end(self, mark: int) -> None:
        """What was there before an END, CALL, START or CHANNEL_MARK ends."""
        if self.body:
            self._close()
        else:
            self._give_up(mark)
        self._expect(_NEXT.get(mark, BETWEEN))

    def _give_up(self, mark: int) -> None:
        """The message of this header will not begin: send what of it was no header."""
        header = scan(self._section, self._held)
        self._note(header)
        if mark == CALL and self._call_name():
            self._open(header)
            self._close()
        elif not (mark == START and self._section.strict) and (text := header.unopened(self._section, self._held)):
            self._content(text)

    # -------------------------------------------------------------------------------- bodies

    def _open(self, header: Header) -> None:
        self._note(header)
        self._name = self._call_name()
        if self._name:
            self._sink = _CALL
        else:
            self._sink = _REASONING if self._channel == "analysis" else _CONTENT
        self.body, self._begun, self._blank = True, False, True
        self.reasons = self._sink == _REASONING
        self._held = ""

    def _call_name(self) -> str:
        """The function that is called, "" for none."""
        recipient = self._recipient
        if not self._may_call or recipient in _PEOPLE:
            return ""
        if recipient.startswith(_FUNCTIONS):
            return self._without_type(recipient.removeprefix(_FUNCTIONS))
        if recipient in self.calls.tools or self._channel == "commentary":
            return recipient
        return ""

    def _without_type(self, name: str) -> str:
        """``f`` for ``fjson``: models forget the space before the content type."""
        short: str = name.removesuffix("json")
        return short if name not in self.calls.tools and short in self.calls.tools else name

    def _write(self, text: str) -> None:
        if self._sink == _CALL:
            if not self._begun:
                self._begin()
            self.calls.arguments(text)
            self._blank = self._blank and text.isspace()
            return
        self._blank = self._blank and not text
        if self._sink == _REASONING:
            self._reason(text)
        else:
            self._content(text)

    def _begin(self) -> None:
        self._think()
        self.calls.start(self._name)
        self._begun = True

    def _close(self) -> None:
        if self._sink == _CALL:
            if not self._begun:
                self._begin()
            if self._blank:
                self.calls.arguments("{}")

    # -------------------------------------------------------------------------------- events

    def _content(self, text: str) -> None:
        self._think()
        self.calls.content(text)

    def _reason(self, text: str) -> None:
        if not self._show_reasoning:
            return
        if not self._thoughts:
            self._events += self.calls.take()
        self._thoughts.append(text)

    def _think(self) -> None:
        """Join the pieces of reasoning before anything else happens."""
        if self._thoughts:
            self._events.append(ReasoningDelta("".join(self._thoughts)))
            self._thoughts = []


_NEXT = {START: ROLE, CHANNEL_MARK: CHANNEL}


class HarmonyTextParser:
    """Harmony whose marks are spelled in the text, as a recording of text has them, or a text to be tried out."""

    __slots__ = ("machine", "_ended", "_scanner")

    #: characters are no tokens, so there is nothing to count
    counting = False
    reasoning_tokens = 0

    def observe_pieces(self, pieces: Sequence[str]) -> None:
        """Nothing, see ``counting``."""

    def __init__(self, machine: HarmonyMachine) -> None:
        self.machine = machine
        self._scanner = LiteralScanner(_LITERALS)
        self._ended = False

    def feed(self, text: str) -> list[Event]:
        """Events that ``text`` completes."""
        for before, literal in self._scanner.feed(text):
            self.machine.read(before, literal)
        return self.machine.take()

    def flush(self, complete: bool = True) -> list[Event]:
        """What was held. complete: see ``HarmonyMachine.finish``."""
        if not self._ended:
            self._ended = True
            self.machine.read(self._scanner.flush(), None)
            self.machine.finish(complete)
        return self.machine.take()


def harmony_machine(args: Mapping[str, Any], index: int) -> HarmonyMachine:
    """The machine of choice ``index`` of a chat spec's args, in the state that its prompt left."""
    tools: Sequence[Mapping[str, Any]] = args.get("tools") or ()
    calls = Calls(tools, seed=f"{args.get('id', '')}/{index}", parallel=args.get("parallel_tool_calls") is not False)
    machine = HarmonyMachine(
        calls,
        may_call=args.get("tool_parser") is not None and args.get("tool_choice") != "none",
        show_reasoning=args.get("include_reasoning") is not False,
    )
    machine.start_from(str(args.get("prompt_tail") or ""))
    return machine


def harmony_text_parser(args: Mapping[str, Any], index: int) -> HarmonyTextParser:
    """A parser of raw text for choice ``index``; ``args`` as for ``harmony_machine``."""
    return HarmonyTextParser(harmony_machine(args, index))
