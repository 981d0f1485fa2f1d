"""PostprocWorker: step records in, emissions out. Pure: it opens no socket, reads no clock and starts no thread, so the
same object runs in a worker process, in the front end (``num_postprocess_workers = 0``), in a replay and in a test.

What it finds out on the way (an output that ended here) it *returns*; whoever holds it passes the fact upstream.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from executor.batch import MAX_HISTORY
from executor.engines.base import StepRow
from executor.messages import (
    BODY,
    FAILED,
    REQUEST_END,
    EmissionRow,
    Emissions,
    Finish,
    Histories,
    Open,
    Recall,
    RecordRow,
    StepRecords,
)
from postproc_workers.express import ExpressLane, Lane, runs
from postproc_workers.hook import HookFactory
from postproc_workers.post_processor import PostProcessor
from postproc_workers.spec import SpecError, StreamSpec
from postproc_workers.stream import RecordCreator, Stream, default_record_creator
from postproc_workers.vocabulary import TokenError, Vocabulary

logger = logging.getLogger("tailrace.worker")

#: Bytes of one message's payload at most: well below the frame that a socket refuses (``executor.wire.MAX_FRAME``).
MAX_PAYLOAD = 128 << 20


class WorkerOutput:
    """What one call of ``receive`` made.

    emissions: (front end, message), one or more for each that has something to get. cancels: (rid, index) the executor
    has to be told of. recordings: finished requests whose spec asked to be recorded. histories: for an executor that
    asked.
    """

    __slots__ = ("emissions", "cancels", "recordings", "histories")

    def __init__(self) -> None:
        self.emissions: list[tuple[int, Emissions]] = []
        self.cancels: list[tuple[int, int]] = []
        self.recordings: list[dict[str, Any]] = []
        self.histories: list[Histories] = []


@dataclass(slots=True)
class WorkerStats:
    """Counters since start. rows: as received; coalesced: rows that were joined to an earlier one of the same output
    because both waited; late: tokens for a request or output that had ended already; failed: requests; stale: steps
    that an executor which is gone had left behind."""

    steps: int = 0
    stale: int = 0
    rows: int = 0
    tokens: int = 0
    chunks: int = 0
    coalesced: int = 0
    late: int = 0
    failed: int = 0
    opened: int = 0
    finished: int = 0


class PostprocWorker:
    """The post-processing of all requests that one worker has: rid -> stream."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        post_processors: Mapping[str, PostProcessor],
        hook_factory: HookFactory | None = None,
        *,
        worker: int = 0,
        stream_interval: int = 1,
        record_creator: RecordCreator = default_record_creator,
        marker: MutableSequence[int] | None = None,
    ) -> None:
        """marker: its first cell always holds the rid that is being handled, -1 between two batches: should this
        process die, that is what its parent looks at."""
        self.stats = WorkerStats()
        self._vocabulary = vocabulary
        self._post_processors = post_processors
        self._hook_factory = hook_factory
        self._worker = worker
        self._stream_interval = stream_interval
        self._record_creator = record_creator
        self._marker = [-1] if marker is None else marker
        self._incarnation = 0
        #: open requests; one leaves with its last output, so a finished request has no state here
        self._streams: dict[int, Stream] = {}
        #: those whose next row is most likely a text between two constants
        self._express = ExpressLane(worker, vocabulary.size)
        #: rid -> the ids that wait for a chunk to be due, how many may (``Stage.waiting``, ``Stage.room``), and what
        #: writes the chunk, if it can be written here
        self._gathering: dict[int, tuple[list[int], int, Lane | None]] = {}
        #: rows whose front end takes nothing at the moment; joined, one per output
        self._held: list[RecordRow] = []
        #: those whose tokens have an event each, whatever came together
        self._apart: set[int] = set()
        #: rows waiting to be built into a message, by front end; emptied at the end of each ``receive``
        self._outbox: dict[int, list[EmissionRow]] = {}

    @property
    def open_requests(self) -> int:
        """Requests with an output still open."""
        return len(self._streams)

    @property
    def holds(self) -> bool:
        """Whether rows wait for a front end: then ``receive`` has something to do without a message."""
        return bool(self._held)

    def receive(self, messages: Sequence[StepRecords | Recall], blocked: Collection[int] = ()) -> WorkerOutput:
        """Handle all that has arrived. A backlog is joined per output first: fewer, larger chunks, the same text.

        blocked: front ends that take nothing at the moment. What is theirs waits as ids, and the others do not wait for
        them.
        """
        output = WorkerOutput()
        steps = self._current(messages, output)
        made: list[tuple[int, Emissions]] = []
        if len(steps) == 1 and not blocked and not self._held:
            (step,) = steps
            if step.opens:
                self._open_all(step.opens, output)
            made, others = self._express.take(step)
            self._run(others, output)
        else:
            self._express.leave()
            self._run_several(steps, blocked, output)
        self._marker[0] = -1
        stats = self.stats
        stats.steps += len(steps)
        for step in steps:
            stats.rows += len(step.rids)
            stats.tokens += len(step.tokens)
        self._deliver(made, output)
        return output

    def _deliver(self, made: Iterable[tuple[int, Emissions]], output: WorkerOutput) -> None:
        """Messages of whole columns, and all other rows. The former stay apart: as long as their rows are the same ones
        as in the last step, a front end handles them by column too. Few are not worth a message."""
        for frontend, emissions in made:
            rows = self._outbox[frontend]
            if emissions.around is None and (rows or len(emissions.payload) > MAX_PAYLOAD):
                rows += emissions.rows()
            else:
                output.emissions.append((frontend, emissions))
        for frontend, rows in self._outbox.items():
            if rows:
                output.emissions += [(frontend, part) for part in self._split(rows)]
                rows.clear()
        self.stats.chunks += sum(len(emissions.rids) for _, emissions in output.emissions)

    def _current(self, messages: Sequence[StepRecords | Recall], output: WorkerOutput) -> Sequence[StepRecords]:
        """The steps of the executor that was heard of last. A new one is told what there is as of now, without what its
        predecessor has left in the queue: those tokens come again."""
        current = [step for step in messages if type(step) is StepRecords and step.incarnation == self._incarnation]
        if len(current) == len(messages):
            return current
        if any(isinstance(message, Recall) for message in messages):
            self._express.leave()
            output.histories = list(self._histories())
            self._held.clear()  # not in the histories, so they come again too
        self._incarnation = max(self._incarnation, *(message.incarnation for message in messages))
        steps = [message for message in messages if isinstance(message, StepRecords)]
        current = [step for step in steps if step.incarnation == self._incarnation]
        self.stats.stale += len(steps) - len(current)
        return current

    def _histories(self) -> Iterator[Histories]:
        """All that the open requests are made of, in messages that a socket takes: see ``executor/recovery.py``."""
        opens: list[Open] = []
        rows: list[StepRow] = []
        size = 0
        for stream in self._streams.values():
            opens.append(Open(stream.rid, stream.epoch, stream.frontend, b""))
            for row in stream.history():
                rows.append(row)
                size += len(row.token_ids)
                if size >= MAX_HISTORY:
                    yield Histories(self._worker, StepRecords.build(rows, opens), last=False)
                    opens, rows, size = [], [], 0
        yield Histories(self._worker, StepRecords.build(rows, opens))

    def _split(self, rows: Sequence[EmissionRow]) -> list[Emissions]:
        """Messages of no more than ``MAX_PAYLOAD`` bytes, or of one row that is larger than that alone."""
        whole = Emissions.build(self._worker, rows)
        if len(whole.payload) <= MAX_PAYLOAD:
            return [whole]
        parts: list[list[EmissionRow]] = [[]]
        size = 0
        for row in rows:
            if parts[-1] and size + len(row[5]) > MAX_PAYLOAD:
                parts.append([])
                size = 0
            parts[-1].append(row)
            size += len(row[5])
        return [Emissions.build(self._worker, part) for part in parts]

    def _run(self, rows: Iterable[RecordRow], output: WorkerOutput) -> None:
        """All rows in order, but for those that the express lane (``express.py``) has taken by column.

        Here it is open to rows of several ids. Next is the fast lane, for rows of one id. It does what ``Stream.step``
        does, without the calls: the text of an id whose bytes are complete is looked up by the contract that
        ``detokenizer.py`` states for ``strings`` and ``pending``, and what ``record.advance`` would set is set here.
        Inside it, ``Stream.watched_step`` is the lane of streams with stop strings or log-probabilities.

        An id of a chunk that is not due only waits (``gathering``): nothing of its stream is touched but the ids. The
        chunk then is a row of several ids, if its stream has a lane.

        A row of several ids of a stream that wants an event for each becomes rows of one id here, and all is as if the
        engine had made one token a step. Such a stream does not take the express lane, which knows nothing of that: so
        the others do not pay for it.
        """
        streams, outbox, marker, express = self._streams, self._outbox, self._marker, self._express.lanes
        gathering, size = self._gathering, self._vocabulary.size
        for rid, index, tokens, finish, logprobs in rows:
            marker[0] = rid
            lane = express.get(rid)
            if lane is not None:
                ids, head, tail, epoch, (frontend, table) = lane
                if finish is None and not index and (piece := table.join(tokens)) is not None:
                    ids.extend(tokens)
                    outbox[frontend].append((rid, epoch, 0, len(ids), 0, head + piece + tail))
                    continue
                del express[rid]
            elif gathering and (waits := gathering.get(rid)) is not None:
                waiting, room, lane = waits
                if finish is None and len(tokens) == 1 and 0 <= tokens[0] < size:
                    waiting.append(tokens[0])
                    if len(waiting) <= room:
                        continue
                    if lane is not None and (piece := lane.kind.table.join(waiting)) is not None:
                        ids, head, tail, epoch, (frontend, _) = lane
                        ids.extend(waiting)
                        waiting.clear()
                        outbox[frontend].append((rid, epoch, 0, len(ids), 0, head + piece + tail))
                        continue
                    waiting.pop()
                del gathering[rid]
            stream = streams.get(rid)
            if stream is None:
                self.stats.late += len(tokens)
                continue
            try:
                stage = stream.stages[index]
                record, choice = stream.record, stage.output
                if stage.plain and finish is None and len(tokens) == 1 and record.updated is choice:
                    (token,) = tokens
                    detokenizer = stage.detokenizer
                    strings = detokenizer.strings
                    if detokenizer.pending or not 0 <= token < len(strings) or (text := strings[token]) is None:
                        text = detokenizer.decode(tokens)
                    if not stage.watched or ((stops := stage.stops) is not None and stops.passes(text)):
                        ids = choice.token_ids
                        ids.append(token)
                        choice.token_ids_diff, choice.text_diff = tokens, text
                        if choice.parts is not None:
                            choice.parts.append(text)
                        if payload := stream.process(record, stream.args):
                            outbox[stream.frontend].append((rid, stream.epoch, index, len(ids), 0, payload))
                        if stream.express is not None and not detokenizer.pending:
                            self._express.enter(stream)
                        continue
                    payload = stream.watched_step(stage, tokens, text, logprobs)
                    if payload and not stream.flags:
                        sent = len(choice.token_ids)
                        outbox[stream.frontend].append((rid, stream.epoch, index, sent, 0, payload))
                        continue
                elif stream.split and len(tokens) > 1:
                    self._run(_singles(rid, index, tokens, finish, logprobs), output)
                    continue
                else:
                    payload = stream.step(index, tokens, finish, logprobs)
                    if stage.gathers and (room := stage.room) and len(stream.stages) == 1:
                        gathering[rid] = stage.waiting, room, self._express.lane(stream)
            except Exception as error:  # a broad one: a request fails alone, whatever its stages raise
                payload = self._fail(stream, error)
            if len(payload) > MAX_PAYLOAD:
                payload = self._refuse_size(stream, len(payload))
            if payload or stream.flags & REQUEST_END:  # an end is told also where it adds nothing
                updated = stream.record.updated  # a refused row may have named an output that does not exist
                sent = len(updated.token_ids)
                outbox[stream.frontend].append((rid, stream.epoch, updated.index, sent, stream.flags, payload))
            if stream.flags or stream.late_tokens:
                self._settle(stream, output)

    def _fail(self, stream: Stream, error: Exception) -> bytes:
        if isinstance(error, TokenError):
            logger.warning("request %d: %s", stream.rid, error)
            return stream.fail(str(error))
        logger.exception("request %d failed in post-processing", stream.rid)
        return stream.fail(f"post-processing failed: {type(error).__name__}")

    def _refuse_size(self, stream: Stream, size: int) -> bytes:
        """A response that no frame can carry: the receiving socket would drop it, and its client wait for ever."""
        logger.error("request %d made %d bytes at once and fails", stream.rid, size)
        return stream.fail(f"the response is larger than {MAX_PAYLOAD} bytes")

    def _settle(self, stream: Stream, output: WorkerOutput) -> None:
        """Take over what a stream reported besides its bytes, and let it go when it is complete."""
        self.stats.late += stream.late_tokens
        stream.late_tokens = 0
        output.cancels += [(stream.rid, index) for index in stream.cancels]
        stream.cancels.clear()
        if stream.flags & REQUEST_END:
            del self._streams[stream.rid]
            self._apart.discard(stream.rid)
            self._express.drop(stream.rid)
            self._gathering.pop(stream.rid, None)
            self.stats.finished += 1
            self.stats.failed += bool(stream.flags & FAILED)
            if (recording := stream.recording()) is not None:
                output.recordings.append(recording)
        stream.flags = 0

    def _open_all(self, opens: Iterable[Open], output: WorkerOutput) -> None:
        for opened in opens:
            self._marker[0] = opened.rid
            self._express.drop(opened.rid)
            self._gathering.pop(opened.rid, None)
            self._apart.discard(opened.rid)
            self.stats.opened += 1
            self._outbox.setdefault(opened.frontend, [])
            try:
                stream = self._streams[opened.rid] = self._stream(opened)
                if stream.split:
                    self._apart.add(opened.rid)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # A spec that cannot be decoded, or arguments that are not what their post-processor expects.
                logger.error("request %d refused: %s: %s", opened.rid, type(error).__name__, error)
                self._refuse(opened, output)

    def _stream(self, opened: Open) -> Stream:
        spec = StreamSpec.decode(opened.spec)
        post_processor = self._post_processors.get(spec.post_processor)
        if post_processor is None:
            known = ", ".join(sorted(self._post_processors))
            raise SpecError(f"post_processor: {spec.post_processor!r} is unknown; known: {known}")
        return Stream(
            opened,
            spec,
            self._vocabulary,
            post_processor,
            self._hook_factory,
            self._record_creator,
            self._stream_interval,
        )

    def _refuse(self, opened: Open, output: WorkerOutput) -> None:
        """There is no stream to end, hence no format to say it in: the front end words an empty failure itself."""
        self.stats.failed += 1
        self._outbox[opened.frontend].append((opened.rid, opened.epoch, 0, 0, REQUEST_END | FAILED | BODY, b""))
        output.cancels.append((opened.rid, -1))

    def _reopens(self, steps: Sequence[StepRecords]) -> bool:
        """Whether a request gets opened again: then rows before and after must not be joined."""
        rids = [opened.rid for step in steps for opened in step.opens]
        return len(set(rids)) != len(rids) or any(rid in self._streams for rid in rids)

    def _run_several(self, steps: Sequence[StepRecords], blocked: Collection[int], output: WorkerOutput) -> None:
        if blocked or self._held:
            self._run_unblocked(steps, blocked, output)
        elif not self._reopens(steps):
            for step in steps:
                self._open_all(step.opens, output)
            self._run(self._merge(chain.from_iterable(map(self._rows, runs(steps)))), output)
        else:
            for step in steps:
                self._open_all(step.opens, output)
                self._run(step.record_rows(), output)

    def _rows(self, run: Sequence[StepRecords]) -> Iterable[RecordRow]:
        """Those of a step, or of several with the same usual rows."""
        step = run[0]
        if len(run) == 1:
            return step.record_rows()
        self.stats.coalesced += len(step.rids) * (len(run) - 1)
        return zip(step.rids, step.indexes, zip(*(step.tokens for step in run)), repeat(None), repeat(None))

    def _run_unblocked(self, steps: Sequence[StepRecords], blocked: Collection[int], output: WorkerOutput) -> None:
        rows = self._held
        for step in steps:
            opened = {opened.rid for opened in step.opens}
            if not opened.isdisjoint(row[0] for row in rows):  # all of it comes again
                rows = [row for row in rows if row[0] not in opened]
            self._open_all(step.opens, output)
            rows += step.record_rows()
        streams = self._streams
        waiting = {rid for rid, stream in streams.items() if stream.frontend in blocked} if blocked else ()
        self._held = list(self._merge(row for row in rows if row[0] in waiting))
        self._run(self._merge(row for row in rows if row[0] not in waiting), output)

    def _merge(self, rows: Iterable[RecordRow]) -> Iterator[RecordRow]:
        """The rows with those of one output joined, in the order in which the outputs first appear. Rows of streams
        that want an event for each token stay as they came: behind the others, in their order."""
        merged: dict[tuple[int, int], tuple[list[int], list[bytes] | None, list[Finish]]] = {}
        apart, kept = self._apart, []
        for rid, index, tokens, finish, logprobs in rows:
            if apart and rid in apart:
                kept.append((rid, index, tokens, finish, logprobs))
                continue
            entry = merged.get((rid, index))
            if entry is None:
                logs = None if logprobs is None else list(logprobs)
                merged[rid, index] = (list(tokens), logs, [finish] if finish else [])
                continue
            if entry[2]:  # behind the output's end
                self.stats.late += len(tokens)
                continue
            self.stats.coalesced += 1
            entry[0].extend(tokens)
            if logprobs and entry[1] is not None:
                entry[1].extend(logprobs)
            if finish:
                entry[2].append(finish)
        for (rid, index), (ids, entries, finishes) in merged.items():
            yield rid, index, ids, finishes[0] if finishes else None, entries
        yield from kept


def _singles(
    rid: int, index: int, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None
) -> Iterator[RecordRow]:
    """A row as an engine would have given it that makes one token a step: the end comes with the last one."""
    last = len(tokens) - 1
    for place, token in enumerate(tokens):
        entry = logprobs[place : place + 1] if logprobs is not None else None
        yield rid, index, (token,), finish if place == last else None, entry
