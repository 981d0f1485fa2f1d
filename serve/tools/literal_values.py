"""Values in a notation other than JSON -> JSON text, while they are generated.

Pythonic calls and Gemma's write nested literals with strings, names and commas of their own. The structure is the
same, and is read here with an explicit stack: a model may nest as deeply as it likes. What a notation's strings and
words look like is its ``atom``. Nothing is sent that could still turn out different: a word waits for its end, and for
what comes behind it, a ``{`` until it is known whether a mapping or a set begins. Strings stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve.tools.calls import Calls
from serve.tools.json_text import quoted
from serve.tools.markup import Markers, MarkupParser
from serve.tools.reader import Steps

_CLOSING = {"[": "]", "(": ")", "{": "}"}


@dataclass
class Box:
    """An open container. kind: "list", "dict" with a key due or a value due ("key", "value"), or "open" before its
    first element. count: elements so far."""

    close: str
    kind: str
    count: int = 0


class LiteralParser(MarkupParser):
    """Base of the parsers whose arguments are such literals.

    opening: brackets that open a container. sets: whether braces without keys are one.
    """

    opening = "[{"
    sets = False

    def __init__(self, calls: Calls, markers: Markers) -> None:
        super().__init__(calls, markers)
        self._name = ""
        #: Whether the current call has begun; until then what it sent comes back as content if it is none.
        self.begun = True
        #: Argument text that goes before the next piece.
        self.head = ""
        self._captured: list[str] | None = None

    def atom(self, where: str) -> Steps[bool]:
        """Read a string or a word and ``emit`` it as JSON. where: kind of the box around, "" for none.

        False if there is none here, or if the text ends inside of it.
        """
        raise NotImplementedError

    def emit(self, text: str) -> None:
        """More JSON text. The first piece shows that this is a call."""
        if self._captured is not None:
            self._captured.append(text)
            return
        if not self.begun:
            self.begun = True
            self.accept()
            self.calls.start(self._name)
        self.calls.arguments(self.head + text)
        self.head = ""

    def value(self) -> Steps[bool]:
        """Read one value at the cursor. False if it is broken or cut off."""
        boxes: list[Box] = []
        while True:
            yield from self.reader.space()
            char = yield from self.reader.peek()
            box = boxes[-1] if boxes else None
            if char == "":
                return False
            if box is not None and char == box.close and box.kind != "value":
                self.reader.take(1)
                self._close(boxes.pop())
            elif char in self.opening and (box is None or box.kind in ("list", "value")):
                boxes.append(self._open(box, self.reader.take(1)))
                continue
            elif box is not None and box.kind in ("key", "open"):
                if not (yield from self._key(box)):
                    return False
                if box.kind == "value":
                    continue
            else:
                self._separate(box)
                if not (yield from self.atom(box.kind if box else "")):
                    return False
            if not (yield from self._after_value(boxes)):
                return False
            if not boxes:
                return True

    def _open(self, box: Box | None, bracket: str) -> Box:
        self._separate(box)
        if bracket != "{":
            self.emit("[")
        return Box(_CLOSING[bracket], "open" if bracket == "{" else "list")

    def _close(self, box: Box) -> None:
        self.emit("{}" if box.kind == "open" else "]" if box.kind == "list" else "}")

    def _separate(self, box: Box | None) -> None:
        if box is not None and box.kind == "list":
            if box.count:
                self.emit(", ")
            box.count += 1

    def _key(self, box: Box) -> Steps[bool]:
        """A key and its colon, or the first element of a set."""
        self._captured = []
        read = yield from self.atom(box.kind)
        text, self._captured = "".join(self._captured), None
        yield from self.reader.space()
        char = yield from self.reader.peek()
        before = "{" if box.kind == "open" else ", "
        if not read or char == "":
            if self.reader.ended and text:
                self.emit(before + text)
            return False
        if char == ":":
            self.reader.take(1)
            self.emit(f"{before}{text if text.startswith(chr(34)) else quoted(text)}: ")
            box.kind = "value"
            return True
        if self.sets and box.kind == "open" and char in (",", "}"):
            self.emit("[" + text)
            box.kind, box.count = "list", 1
            return True
        return False

    def _after_value(self, boxes: list[Box]) -> Steps[bool]:
        """Commas and closing brackets behind a value. False where neither comes."""
        while boxes:
            box = boxes[-1]
            yield from self.reader.space()
            char = yield from self.reader.peek()
            if char == ",":
                self.reader.take(1)
                if box.kind == "value":
                    box.kind = "key"
                return True
            if char != box.close:
                return False
            self.reader.take(1)
            self._close(boxes.pop())
        return True
