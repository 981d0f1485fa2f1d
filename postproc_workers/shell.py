"""What surrounds a ``PostprocWorker`` wherever it runs: it is built from a config, its queue is drained in one go, its
time is counted, its recordings are written. Sockets are the caller's: a process of its own (``process.py``) or the
front end's event loop (``link.py``).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from executor.histogram import Histogram
from executor.messages import Emissions, Recall, StepRecords
from executor.reporting import Reporting
from executor.request import PostprocWorkerConfig
from executor.wire import FrameReader
from postproc_workers.hook import load_hook
from postproc_workers.marker import Marker
from postproc_workers.post_processor import load_post_processors
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker, WorkerOutput

logger = logging.getLogger("tailrace.worker")


class WorkerShell:
    """Frames in, ``WorkerOutput`` out, with the counters that need a clock.

    config: ``worker`` (its id), ``postproc`` (the fields of PostprocWorkerConfig), ``stream_interval``, ``record_dir``,
    ``marker`` (the file that tells which request is being handled).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.worker_id = int(config["worker"])
        self._frames = FrameReader(logger)
        postproc = PostprocWorkerConfig(**config["postproc"])
        self._record_dir = Path(config["record_dir"]) if config.get("record_dir") else None
        self._worker = PostprocWorker(
            Vocabulary.load(postproc.tokenizer, size=postproc.vocab_size),
            load_post_processors(postproc.post_processors),
            load_hook(postproc.post_processor_hook),
            worker=self.worker_id,
            stream_interval=int(config.get("stream_interval", 1)),
            marker=Marker.open(config["marker"]).cells if config.get("marker") else None,
        )
        self._busy_seconds = 0.0
        #: seconds that each step had waited when it was taken, and that each batch took
        self._queue_age, self._post_processing = Histogram(), Histogram()
        self._batch_rows = 0
        self._reporting = Reporting()

    @property
    def holds(self) -> bool:
        """Whether something waits for a front end."""
        return self._worker.holds

    def handle(self, frames: Sequence[bytes], blocked: Collection[int] = ()) -> WorkerOutput:
        """Everything that has arrived, in one go. blocked: front ends that take nothing at the moment."""
        begin = time.monotonic_ns()
        messages = [message for frame in frames if (message := self._decode(frame)) is not None]
        output = self._worker.receive(messages, blocked)
        steps = [message for message in messages if isinstance(message, StepRecords)]
        end = time.monotonic_ns()
        self._busy_seconds += (end - begin) / 1e9
        if steps:
            self._note(steps, begin, end, output)
        return output

    def _note(self, steps: Sequence[StepRecords], begin: int, end: int, output: WorkerOutput) -> None:
        """What a batch took, and when its bytes were made: once a step and a message, never for each row."""
        stamps = [step.stamp for step in steps if step.stamp]
        for stamp in stamps:
            self._queue_age.observe((begin - stamp) / 1e9)
        self._post_processing.observe((end - begin) / 1e9)
        self._batch_rows = sum(len(step.rids) for step in steps)
        for _, emissions in output.emissions:
            emissions.stamp, emissions.sent = min(stamps, default=0), end

    def write(self, recordings: Sequence[dict[str, Any]]) -> None:
        """Write finished recordings. Call it once the batch's bytes are on their way: a slow disk must not hold them
        up."""
        for recording in recordings:
            self._write(recording)

    def report(self) -> Emissions | None:
        """The counters, when it is time for them and they have changed."""
        now = time.monotonic()
        if not self._reporting.due(now):
            return None
        counters = self.counters()
        if not self._reporting.news(now, counters):
            return None
        return Emissions(self.worker_id, (), (), (), (), (), (), b"", counters)

    def counters(self) -> dict[str, Any]:
        """All counters by name, seconds where a name says so; histograms as they report themselves."""
        return dataclasses.asdict(self._worker.stats) | {
            "open": self._worker.open_requests,
            "busy_seconds": self._busy_seconds,
            "batch_rows": self._batch_rows,
            "refused_frames": self._frames.refused,
            "queue_age": self._queue_age.report(),
            "post_processing": self._post_processing.report(),
        }

    def _decode(self, frame: bytes) -> StepRecords | Recall | None:
        message = self._frames.read(frame)
        if isinstance(message, StepRecords | Recall):
            return message
        if message is not None:
            self._frames.refuse("a message of kind %s that is not for a worker", type(message).__name__)
        return None

    def _write(self, recording: dict[str, Any]) -> None:
        """One file per request; a full disk or a missing directory costs the recording, not the stream."""
        if self._record_dir is None:
            return
        name = re.sub(r"[^A-Za-z0-9._-]", "_", str(recording["name"]))[:120]
        try:
            # For our user alone: it holds what a client asked, or what it was answered.
            with open(self._record_dir / f"{name}.jsonl", "w", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(recording, ensure_ascii=False) + "\n")
        except OSError as error:
            logger.error("recording %s was not written: %s", name, error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
