"""The events of one choice while its output is parsed: content, and tool calls with their index and id.

Every parser of a choice writes to the same ``Calls``, so that indices go on when one parser hands over to another.
Neighbouring pieces of one kind are joined: a step gives one delta per kind, however many pieces a grammar read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2s
from typing import Any

from serve.events import ContentDelta, Event, ToolCallDelta

_CONTENT = -1
_LEFT_OUT = -2

IdStyle = Callable[[str, str, int], str]
"""(digest of request and call, function name, call index) -> id"""


def openai_id(digest: str, name: str, index: int) -> str:
    """``call_`` and 24 hex digits."""
    return "call_" + digest


def short_id(digest: str, name: str, index: int) -> str:
    """Nine letters and digits: the chat templates of Mistral models refuse any other id in a later turn."""
    return digest[:9]


def kimi_id(digest: str, name: str, index: int) -> str:
    """``functions.NAME:INDEX``: what Kimi models are trained to see again."""
    return f"functions.{name}:{index}"


class Calls:
    """Collects the events of one choice.

    tools: the request's tools as in an OpenAI body. seed: names request and choice; ids derive from it alone, so that a
    replayed stream has the same ones. parallel: whether more than one call is wanted; if not, those after the first are
    left out, text around them is not.
    count: calls begun so far, without those left out.
    """

    __slots__ = ("count", "tools", "_call", "_events", "_ids", "_parallel", "_pieces", "_seed", "_sink", "_used")

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        seed: str = "",
        ids: IdStyle = openai_id,
        parallel: bool = True,
    ) -> None:
        self.tools = {name: function for name, function in map(_function, tools) if name}
        self.count = 0
        self._seed, self._ids, self._parallel = seed, ids, parallel
        self._used: set[str] = set()
        self._events: list[Event] = []
        #: Index of the call that began last, or _LEFT_OUT.
        self._call = _LEFT_OUT
        #: Pieces of the delta being built, and whose it is: the index of a call, or _CONTENT.
        self._pieces: list[str] = []
        self._sink = _CONTENT

    def declared(self, name: str) -> bool:
        """Whether the request declares a tool of that name; True when it declares none: then any may be meant."""
        return not self.tools or name in self.tools

    def content(self, text: str) -> None:
        """More of the visible answer."""
        if text:
            self._add(_CONTENT, text)

    def start(self, name: str, native_id: str | None = None) -> None:
        """A call begins. native_id: the id that the model itself gave, used if it is new."""
        self._join()
        if self.count and not self._parallel:
            self._call = _LEFT_OUT
            return
        self._call = index = self.count
        self.count += 1
        self._events.append(ToolCallDelta(index, "", self._new_id(name, index, native_id), name))

    def arguments(self, text: str) -> None:
        """More argument text of the call that began last."""
        if text and self._call != _LEFT_OUT:
            self._add(self._call, text)

    def take(self) -> list[Event]:
        """The events since the last ``take``."""
        self._join()
        events, self._events = self._events, []
        return events

    def _add(self, sink: int, text: str) -> None:
        if self._sink != sink:
            self._join()
            self._sink = sink
        self._pieces.append(text)

    def _join(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._events.append(ContentDelta(text) if self._sink == _CONTENT else ToolCallDelta(self._sink, text))
            self._pieces = []

    def _new_id(self, name: str, index: int, native_id: str | None) -> str:
        digest = blake2s(f"{self._seed}/{index}".encode(), digest_size=12).hexdigest()
        for each in (native_id, self._ids(digest, name, index)):
            if each is not None and each not in self._used:
                break
        else:
            each = openai_id(digest, name, index)
        self._used.add(each)
        return each


def _function(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(name, declaration) of a tool, which is in its ``function`` or flat as in the Responses API; else ("", {})."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    return (name, function) if isinstance(name, str) else ("", {})
