"""What a post-processor is, and how a worker is given its table of them: by dotted name, at start-up.

Nothing here imports the packages that define post-processors, so `postproc_workers` depends on `executor` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from executor.result import DetokenizedGenerationResultBase


class Express(NamedTuple):
    """What a worker has to know to write a stream's usual events itself, without a call of ``process``.

    escaped: text -> the bytes that stand for it in an event.
    around: args -> the bytes before and behind them, or None. Not None means: until the request's only output ends,
        every step that adds text makes one event of this form, and a step that adds none makes none.
    """

    escaped: Mapping[str, bytes]
    around: Callable[[Any], tuple[bytes, bytes] | None]


class PostProcessor(NamedTuple):
    """One entry of a table of post-processors.

    process: (record, args) -> the bytes that ``record``'s last step adds to the response, b"" for none. Completion is
        read from ``record.finished``; state of the stream lives in ``args``.
    make_args: the spec's plain-data args -> the args object of one stream. ValueError names a bad field.
    fail: (args, message) -> (bytes, whole): how the response ends when the request fails. ``whole``: nothing had been
        sent and the bytes are a complete JSON document with an error object.
    streams: False when the response is one document: there are no bytes before the end, and text is kept.
    express: see there; None where events are not that simple.
    """

    process: Callable[[DetokenizedGenerationResultBase, Any], bytes]
    make_args: Callable[[Mapping[str, Any]], Any]
    fail: Callable[[Any, str], tuple[bytes, bool]]
    streams: bool = True
    express: Express | None = None


def load_object(name: str, what: str) -> Any:
    """The object behind ``package.module:attribute``; ValueError says which part of ``name`` is wrong."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"{what}: {name!r} is not of the form package.module:name")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"{what}: no module {error.name!r} (from {name!r})") from error
    except AttributeError:
        raise ValueError(f"{what}: module {module!r} has no {attribute!r}") from None


def load_post_processors(name: str) -> Mapping[str, PostProcessor]:
    """The table that ``name`` points to."""
    table = load_object(name, "post_processors")
    if not isinstance(table, Mapping) or not all(isinstance(entry, PostProcessor) for entry in table.values()):
        raise ValueError(f"post_processors: {name!r} is not a mapping of PostProcessor entries")
    return table
