"""A recording -> exactly the bytes that a client would have received. No server, no model, no socket, no clock.

The same ``PostprocWorker`` that serves does the work, so a stream that went wrong somewhere goes wrong here too. What a
request body means is `serve`'s business; as a worker is given its post-processors, a replay is given its admission by
dotted name: ``admit(recording, stream) -> StreamSpec``, or an HTTP body (bytes) when the request is refused.

The tokens may be cut into steps in several ways (``steps_of``); the merged stream is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import Open, StepRecords
from postproc_workers.post_processor import load_object, load_post_processors
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker

ADMISSION = "serve.recordings:admit_recording"
POST_PROCESSORS = "serve.post_processors:POST_PROCESSORS"

Admission = Callable[[Mapping[str, Any], bool], StreamSpec | bytes]


class RecordingError(ValueError):
    """Something that is no recording; the message names the key."""


def replay(
    recording: dict[str, Any],
    *,
    split: str = "each",
    stream: bool = True,
    base_dir: Path | str = ".",
    admission: str = ADMISSION,
    post_processors: str = POST_PROCESSORS,
) -> bytes:
    """The bytes of the HTTP response body: the event stream, or the JSON document for ``stream=False``.

    split: ``whole``, ``each``, ``every:N``, ``at:K`` or ``random:SEED``. base_dir: folder of the recording's file;
    ``server.tokenizer`` is relative to it. RecordingError for a malformed recording or split.
    """
    _check_types(recording)
    outputs = [_read_output(entry, i) for i, entry in enumerate(_outputs(recording))]
    admit: Admission = load_object(admission, "admission")
    spec = admit(recording, stream)
    if isinstance(spec, bytes):
        return spec
    if spec.outputs != len(outputs):
        raise RecordingError(f"outputs: {len(outputs)} where the request asks for {spec.outputs}")
    worker = PostprocWorker(_vocabulary(recording, base_dir), load_post_processors(post_processors))
    body = [_run(worker, StepRecords([], [], [], [], opens=[Open(0, 0, 0, spec.encode())]))]
    body += [_run(worker, StepRecords.build([row])) for row in rows_of(outputs, split)]
    return b"".join(body)


def _run(worker: PostprocWorker, step: StepRecords) -> bytes:
    emissions = dict(worker.receive([step]).emissions).get(0)
    return emissions.payload if emissions is not None else b""


# -------------------------------------------------------------------------------- what the recording holds


class RecordedOutput:
    """One choice of a recording. token_ids are code points when the recording holds text."""

    def __init__(self, index: int, token_ids: Sequence[int], finish: StepRow, logprobs: Sequence[TokenLogprob] | None):
        self.index, self.token_ids, self.finish, self.logprobs = index, token_ids, finish, logprobs

    def row(self, start: int, stop: int) -> StepRow:
        """The row of the tokens from ``start`` to ``stop``; the last one brings the finish."""
        logprobs = self.logprobs[start:stop] if self.logprobs is not None else None
        row = StepRow(0, self.index, self.token_ids[start:stop], logprobs=logprobs)
        if stop < len(self.token_ids):
            return row
        return self.finish._replace(token_ids=row.token_ids, logprobs=logprobs)


def _check_types(recording: Mapping[str, Any]) -> None:
    """The keys around the outputs, so that what reads them need not look twice."""
    for name, kind in (("server", dict), ("prompt", str)):
        if not isinstance(recording.get(name), kind | None):
            raise RecordingError(f"{name}: {kind.__name__} is needed")
    tokens = recording.get("prompt_tokens", 0)
    if type(tokens) is not int or tokens < 0:
        raise RecordingError("prompt_tokens: a number of tokens is needed")


def _outputs(recording: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    outputs = recording.get("outputs")
    if not isinstance(outputs, list) or not outputs or not all(isinstance(entry, dict) for entry in outputs):
        raise RecordingError("outputs: a list of at least one object is needed")
    if not all(type(entry.get("index", 0)) is int for entry in outputs):
        raise RecordingError("outputs.index: an integer is needed")
    return sorted(outputs, key=lambda entry: entry.get("index", 0))


def _read_output(entry: Mapping[str, Any], index: int) -> RecordedOutput:
    if entry.get("index", index) != index:
        raise RecordingError(f"outputs: index {entry.get('index')!r} where {index} is due")
    text = entry.get("text", "")
    if not isinstance(text, str):
        raise RecordingError("outputs.text: a string is needed")
    ids = entry["token_ids"] if "token_ids" in entry else [ord(char) for char in text]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):  # ids out of range are the stream's business
        raise RecordingError("outputs.token_ids: a list of integers is needed")
    reason = entry.get("finish_reason")
    if reason not in ("stop", "length", "abort", "error"):
        raise RecordingError(f"outputs.finish_reason: {reason!r} is not stop, length, abort or error")
    stopped = entry.get("stop_token_id") is not None and bool(ids) and ids[-1] == entry["stop_token_id"]
    message = "the engine failed" if reason == "error" else ""
    return RecordedOutput(index, ids, StepRow(0, index, (), reason, stopped, message), _logprobs(entry, len(ids)))


def _logprobs(entry: Mapping[str, Any], count: int) -> list[TokenLogprob] | None:
    items = entry.get("logprobs")
    if items is None:
        return None
    if not isinstance(items, list) or len(items) != count:
        raise RecordingError(f"outputs.logprobs: one entry for each of the {count} tokens is needed")
    try:
        return [TokenLogprob(float(item["logprob"]), [(i, float(v)) for i, v in item.get("top", ())]) for item in items]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RecordingError(
            "outputs.logprobs: entries are objects with logprob and top, [[id, logprob], ...]"
        ) from None


def _vocabulary(recording: Mapping[str, Any], base_dir: Path | str) -> Vocabulary:
    if not any("token_ids" in entry for entry in recording["outputs"]):
        return Vocabulary.text()
    tokenizer = (recording.get("server") or {}).get("tokenizer")
    if not tokenizer:
        raise RecordingError("server.tokenizer: needed, since an output has token_ids")
    path = Path(base_dir, tokenizer)
    if not path.exists():
        raise RecordingError(f"server.tokenizer: there is no {path}")
    return _load(str(path.resolve()))


@lru_cache(maxsize=8)
def _load(path: str) -> Vocabulary:
    return Vocabulary.load(path)


# -------------------------------------------------------------------------------- how the tokens are cut


def cuts(count: int, split: str) -> list[int]:
    """The ends of the steps that ``split`` makes of ``count`` tokens; at least one step, the last ends at ``count``."""
    kind, _, argument = split.partition(":")
    if kind in ("whole", "each") and not argument:
        ends = list(range(1, count)) if kind == "each" else []
    elif kind in ("every", "at", "random") and argument.isdecimal():
        ends = _parametric_cuts(count, kind, int(argument))
    else:
        raise RecordingError(f"split: {split!r} is not whole, each, every:N, at:K or random:SEED")
    return [*ends, count]


def _parametric_cuts(count: int, kind: str, number: int) -> list[int]:
    if kind == "at":
        return [number] if 0 < number < count else []
    if kind == "every":
        if number < 1:
            raise RecordingError("split: every:N needs N of at least 1")
        return list(range(number, count, number))
    ends: list[int] = []
    at, state = 0, number
    while True:
        # Knuth's MMIX generator: the same division on every machine and Python, which `random` does not promise.
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        at += (1, 1, 2, 3, 5, 8, 13, 21)[state >> 61]
        if at >= count:
            return ends
        ends.append(at)


def rows_of(outputs: Sequence[RecordedOutput], split: str) -> Iterator[StepRow]:
    """The rows in the order in which steps bring them: the choices round-robin."""
    steps = [list(_steps(output, split)) for output in outputs]
    for turn in range(max(map(len, steps))):
        for rows in steps:
            if turn < len(rows):
                yield rows[turn]


def _steps(output: RecordedOutput, split: str) -> Iterator[StepRow]:
    start = 0
    for end in cuts(len(output.token_ids), split):
        yield output.row(start, end)
        start = end
