"""A user's hook on the text of a stream: emit, replace, suppress or terminate.

``--post_processor_hook package.module:Class`` names a class. One object of it is made per request, so state it keeps on
``self`` ends with the request, and a resumed request builds the same state again from the same tokens. It runs once per
output and step, after detokenization and stop strings, and before reasoning and tool parsers. Steps are cut by load, so
a hook that must not depend on the cut keeps its own buffer.

    class NoDigits:
        def __call__(self, output, text):
            return Replace("#" * len(text)) if text.isdigit() else EMIT

An exception in a hook fails its request closed: the step's text is not sent, the client gets an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from executor.result import CompletionOutput
from postproc_workers.post_processor import load_object


@dataclass(frozen=True, slots=True)
class Emit:
    """Send the text as it is."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Send other text instead."""

    text: str


@dataclass(frozen=True, slots=True)
class Suppress:
    """Send nothing of this step; its tokens still count in usage."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send ``text``, end this output with ``finish_reason``, and stop generating it."""

    text: str = ""
    finish_reason: str = "stop"


EMIT = Emit()
SUPPRESS = Suppress()

HookAction = Emit | Replace | Suppress | Terminate


class HookError(TypeError):
    """A hook answered with something that is no action."""


class PostProcessorHook(Protocol):
    """What the hook class's objects do."""

    def __call__(self, output: CompletionOutput, text: str) -> HookAction:
        """Decide about ``text``, which this step adds to ``output`` (as it was before the step). May be "" at the
        end."""


HookFactory = Callable[[], PostProcessorHook]


def load_hook(name: str | None) -> HookFactory | None:
    """The hook class of a dotted name, or None."""
    if name is None:
        return None
    factory: HookFactory = load_object(name, "post_processor_hook")
    if not callable(factory):
        raise ValueError(f"post_processor_hook: {name!r} is not a class")
    return factory
