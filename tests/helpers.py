"""A whole system in one thread: an engine, the executor's core, workers and a front end's proxy, without sockets.

Every message goes through the wire's encoding. Nothing moves by itself: a test says who works when, who dies, and what
is lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from executor.core import ExecutorCore
from executor.engines.base import (
    Engine,
    EngineInfo,
    Part,
    StepColumns,
    StepRow,
    TokenLogprob,
    UnsupportedError,
)
from executor.messages import (
    BODY,
    FAILED,
    REQUEST_END,
    Cancel,
    EmissionRow,
    Emissions,
    Message,
    Open,
    Recall,
    StepRecords,
    WorkerJoined,
)
from executor.proxy import GenerationExecutor
from executor.request import GenerationRequest, SamplingParams
from executor.rids import Rids
from executor.wire import FrameReader, decode, encode
from postproc_workers.deltas import POST_PROCESSORS as DELTAS
from postproc_workers.hook import HookFactory
from postproc_workers.post_processor import PostProcessor
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker, WorkerOutput
from serve.admission import Minted, ServerFacts, chat_spec, completion_spec
from serve.body import parse
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest
from serve.post_processors import POST_PROCESSORS as HANDLERS
from tests.recordings.build_tokenizers import byte_level, ids, pieces

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

#: Every post-processor there is.
ALL_POST_PROCESSORS: Mapping[str, PostProcessor] = {**DELTAS, **HANDLERS}

FACTS = ServerFacts(model="m", max_model_len=2**31, vocab_size=2**31, supported=frozenset())


@lru_cache
def vocabulary(name: str = "byte_level") -> Vocabulary:
    """``byte_level``, ``pieces`` or ``text``; see ``tests/recordings/build_tokenizers.py``."""
    if name == "text":
        return Vocabulary.text()
    return Vocabulary.from_library({"byte_level": byte_level, "pieces": pieces}[name]())


def tokens(*texts: str) -> list[int]:
    """Ids of byte-level tokens given by their texts."""
    return ids("byte_level", texts)


# ------------------------------------------------------------------------------------------------------ requests


def spec_of(
    endpoint: str, *, stream: bool = True, prompt_tokens: int = 3, facts: ServerFacts = FACTS, **body: Any
) -> StreamSpec:
    """The spec that admission makes of a request body; ``messages`` and ``prompt`` have defaults."""
    minted = Minted(rid=0, response_id="r-1", created=1_700_000_000, seed=0)
    if endpoint == CHAT:
        body = {"messages": [{"role": "user", "content": "Hi"}]} | body
        chat = parse(ChatCompletionRequest, json.dumps(body).encode())
        return chat_spec(chat, prompt="", prompt_tokens=prompt_tokens, facts=facts, minted=minted, streaming=stream)
    completion = parse(CompletionRequest, json.dumps({"prompt": "Once"} | body).encode())
    texts = [text if isinstance(text, str) else "" for text in completion.prompt]
    return completion_spec(
        completion, prompt_tokens=prompt_tokens, prompt_texts=texts, facts=facts, minted=minted, streaming=stream
    )


def request_of(
    rid: int, spec: StreamSpec, sampling: SamplingParams | None = None, prompts: int = 1, frontend: int = 0
) -> GenerationRequest:
    """A request with that spec; its prompts are three ids each."""
    sampling = sampling or SamplingParams(max_tokens=1000, logprobs=spec.logprobs, stop_token_ids=spec.stop_token_ids)
    outputs = spec.outputs // prompts
    return GenerationRequest(rid, [[1, 2, 3]] * prompts, sampling, spec.encode(), outputs, frontend)


# ------------------------------------------------------------------------------------------------------ the parts


class Columns:
    """Makes of rows what an engine gives: columns of the usual ones, the same object while they bring the same rids."""

    def __init__(self) -> None:
        self._rids = Rids()

    def of(self, rows: Iterable[StepRow]) -> list[Part]:
        """Columns first; an output that comes again begins another step."""
        parts: list[Part] = []
        step: dict[tuple[int, int], StepRow] = {}
        for row in rows:
            if (row.rid, row.index) in step:
                parts += self._step(step.values())
                step = {}
            step[row.rid, row.index] = row
        return parts + self._step(step.values())

    def _step(self, rows: Iterable[StepRow]) -> list[Part]:
        usual = {
            row.rid: row.token_ids[0]
            for row in rows
            if not row.index and len(row.token_ids) == 1 and row.finish_reason is None and row.logprobs is None
        }
        odd = [row for row in rows if row.index or row.rid not in usual]
        return [self._columns(usual), *odd] if usual else [*odd]

    def _columns(self, usual: Mapping[int, int]) -> StepColumns:
        rids = Rids(usual)
        self._rids = self._rids if rids == self._rids else rids
        return StepColumns(self._rids, list(usual.values()))


class ScriptedEngine:
    """An engine that emits the rows it is given, one list per step, the usual ones as columns. refuse: SamplingParams
    fields it does not honour."""

    def __init__(self, refuse: Iterable[str] = ()) -> None:
        self.added: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []
        #: (rid, index) -> the ids that an output had when it was added
        self.resumed: dict[tuple[int, int], list[int]] = {}
        self.closed = 0
        self._refuse = frozenset(refuse)
        self._steps: list[list[StepRow]] = []
        self._columns = Columns()

    def give(self, *rows: StepRow) -> None:
        """One more step."""
        self._steps.append(list(rows))

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        return EngineInfo("scripted", 1000, 2**20, ("max_tokens",))

    def add(
        self, rid: int, index: int, prompt_ids: Sequence[int], sampling: SamplingParams, history: Sequence[int] = ()
    ) -> None:
        for name in self._refuse.intersection(sampling.changed()):
            raise UnsupportedError(f"{name}: not honoured")
        self.added.append((rid, index))
        if history:
            self.resumed[rid, index] = list(history)

    def cancel(self, rid: int, index: int) -> None:
        self.cancelled.append((rid, index))

    def collect(self) -> list[Part]:
        return self._columns.of(self._steps.pop(0)) if self._steps else []

    def poll_timeout(self) -> float | None:
        return 0.0 if self._steps else None

    def stats(self) -> dict[str, Any]:
        return {"running": len(self.added), "waiting": 0}

    def close(self) -> None:
        self.closed += 1


class Client:
    """Who waits for a request's bytes."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.ended = self.failed = self.whole = False
        self.error: str | None = None
        self.status = 200

    @property
    def body(self) -> bytes:
        """All bytes so far."""
        return b"".join(self.payloads)

    def feed(self, payload: bytes, flags: int) -> None:
        assert not self.ended, f"bytes behind the end: {payload!r}"
        self.payloads.append(payload)
        self.ended = bool(flags & REQUEST_END)
        self.failed, self.whole = bool(flags & FAILED), bool(flags & BODY)

    def feed_parts(self, head: bytes, piece: bytes, tail: bytes) -> None:
        self.feed(head + piece + tail, 0)

    def fail(self, message: str) -> None:
        assert not self.ended
        self.ended, self.error = True, message

    def refuse(self, message: str, status: int, retry_after: float) -> None:
        assert not self.ended and not self.payloads, "refused behind its first bytes"
        self.ended, self.error, self.status = True, message, status


class System:
    """Everything of a server but HTTP and sockets.

    workers: id -> worker, while it lives; inboxes: id -> frames that wait for it. proxies: of the front ends; proxy:
    the first. to_executor: what each has sent. A frame on its way to a front end has its number beside it.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        workers: int = 1,
        *,
        names: str = "byte_level",
        hook: HookFactory | None = None,
        stream_interval: int = 1,
        frontends: int = 1,
    ) -> None:
        self.scripted = ScriptedEngine()
        self.core = ExecutorCore(engine or self.scripted, frontends=frontends)
        self._incarnation = 0
        self.proxies = [GenerationExecutor(number) for number in range(frontends)]
        self.proxy = self.proxies[0]
        self.to_executor: list[list[bytes]] = [[] for _ in self.proxies]
        #: front end -> dead workers of which it has not heard
        self._news: list[list[int]] = [[] for _ in self.proxies]
        for proxy in self.proxies:
            proxy.connect_in_process(self._sender(proxy.frontend))
            proxy.executor_joined()
        self.workers: dict[int, PostprocWorker] = {}
        self.inboxes: dict[int, list[bytes]] = {}
        #: a column that comes again is the same object, as between processes
        self._readers: dict[int, FrameReader] = {}
        self._frontend_readers = [FrameReader(logging.getLogger("test")) for _ in self.proxies]
        self._make = lambda worker: PostprocWorker(
            vocabulary(names), ALL_POST_PROCESSORS, hook, worker=worker, stream_interval=stream_interval
        )
        self._next_worker = 0
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> int:
        """A worker joins; returns its id."""
        worker, self._next_worker = self._next_worker, self._next_worker + 1
        self.workers[worker], self.inboxes[worker] = self._make(worker), []
        self._readers[worker] = FrameReader(logging.getLogger("test"))
        for proxy in self.proxies:
            proxy.worker_joined(worker, f"inproc://worker-{worker}")
        return worker

    def _sender(self, frontend: int) -> Callable[[Message], None]:
        return lambda message: self.to_executor[frontend].append(encode(message))

    def kill_executor(self) -> None:
        """The executor dies, and with it all that was on its way there."""
        for proxy in self.proxies:
            self.to_executor[proxy.frontend] = []
            proxy.executor_lost()

    def new_executor(self, engine: Engine | None = None) -> None:
        """The next one. It is told what there is."""
        self._incarnation += 1
        self.scripted = ScriptedEngine()
        frontends = len(self.proxies)
        self.core = ExecutorCore(engine or self.scripted, incarnation=self._incarnation, frontends=frontends)
        for proxy in self.proxies:
            self.to_executor[proxy.frontend] = []
            proxy.executor_joined()

    def kill(self, worker: int, unaware: Container[int] = ()) -> None:
        """A worker dies with all it has; the front ends notice, but for those who will ``hear`` of it."""
        del self.workers[worker], self.inboxes[worker]
        for proxy in self.proxies:
            if proxy.frontend in unaware:
                self._news[proxy.frontend].append(worker)
            else:
                proxy.worker_lost(worker)

    def hear(self) -> None:
        """Every front end hears of all deaths."""
        for proxy, news in zip(self.proxies, self._news):
            for worker in news:
                proxy.worker_lost(worker)
            news.clear()

    def open(self, request: GenerationRequest) -> Client:
        """Submit a request; returns who waits for it."""
        client = Client()
        self.proxies[request.frontend].open(request, client)
        return client

    def executor(self, busy: Iterable[int] = (), deaf: Container[int] = ()) -> None:
        """The executor takes its messages, but for those of front ends to which it is deaf, and makes one step."""
        heard = [number for number in range(len(self.proxies)) if number not in deaf]
        frames = [frame for number in heard for frame in self.to_executor[number]]
        for number in heard:
            self.to_executor[number] = []
        asked = set(self.core.workers)
        for frame in frames:
            message = decode(frame)
            self.core.receive(message)
            self.core.dispatcher.validate()
            if isinstance(message, WorkerJoined) and message.worker in self.inboxes.keys() - asked:
                asked.add(message.worker)
                self.inboxes[message.worker].append(encode(Recall(self._incarnation)))
        for frontend, answer in self.core.answers:
            self.proxies[frontend].receive(decode(encode(answer)))
        self.core.answers = []
        for worker, steps in self.core.step(0, frozenset(busy)):
            if worker in self.inboxes:  # else it is dead, and the executor does not know yet
                self.inboxes[worker].append(encode(steps))
        self.core.dispatcher.validate()

    def work(self, worker: int) -> list[tuple[int, bytes]]:
        """A worker handles all that waits for it. Its cancels go out; its emissions are returned, not delivered."""
        frames, self.inboxes[worker] = self.inboxes[worker], []
        read = self._readers[worker].read
        output = self.workers[worker].receive(
            [steps for frame in frames if isinstance(steps := read(frame), StepRecords | Recall)]
        )
        if output.cancels:
            self.core.receive(decode(encode(Cancel(worker, output.cancels))))
        for histories in output.histories:
            self.core.receive(decode(encode(histories)))
        return [(frontend, encode(emissions)) for frontend, emissions in output.emissions]

    def deliver(self, frames: Iterable[tuple[int, bytes]]) -> None:
        """Emissions reach their front ends."""
        for frontend, frame in frames:
            message = self._frontend_readers[frontend].read(frame)
            assert message is not None
            self.proxies[frontend].receive(message)

    def turn(self) -> None:
        """Everybody works once, and all messages arrive."""
        self.executor()
        self.turn_workers()

    def turn_workers(self) -> None:
        """Every worker works once."""
        for worker in list(self.workers):
            self.deliver(self.work(worker))

    def run(self, turns: int = 10_000) -> None:
        """Turns until nothing waits: no message, and no row in the engine."""
        for _ in range(turns):
            self.turn()
            quiet = self.core.poll_timeout() is None and not any(self.inboxes.values())
            if quiet and not any(self.to_executor):
                return
        raise AssertionError(f"not quiet after {turns} turns")


# ------------------------------------------------------------------------------------------------------ one worker


def whole_rows(emissions: Emissions, known: dict[int, tuple[bytes, bytes]]) -> list[EmissionRow]:
    """Its rows, with whole events. known: rid -> head and tail, as this message and earlier ones tell."""
    if emissions.around is None:
        return list(emissions.rows())
    for at, constants in emissions.around.items():
        assert known.setdefault(emissions.rids[at], constants) == constants
    return [(*row[:5], known[row[0]][0] + row[5] + known[row[0]][1]) for row in emissions.rows()]


class Bench:
    """One worker, one request, its bytes: for whoever needs no executor."""

    def __init__(
        self,
        spec: StreamSpec,
        *,
        names: str = "byte_level",
        hook: HookFactory | None = None,
        stream_interval: int = 1,
        delivered: Sequence[tuple[int, bool]] = (),
        table: Mapping[str, PostProcessor] = ALL_POST_PROCESSORS,
    ) -> None:
        self.worker = PostprocWorker(vocabulary(names), table, hook, stream_interval=stream_interval)
        self.payloads: list[bytes] = []
        self.rows: list[tuple[int, int, int, int, int, bytes]] = []
        self.cancels: list[tuple[int, int]] = []
        self.recordings: list[dict[str, Any]] = []
        self._take(self.worker.receive([StepRecords([], [], [], [], opens=[Open(0, 0, 0, spec.encode(), delivered)])]))

    @property
    def body(self) -> bytes:
        """All bytes so far."""
        return b"".join(self.payloads)

    @property
    def ended(self) -> bool:
        """Whether the last bytes have come."""
        return any(row[4] & REQUEST_END for row in self.rows)

    def give(self, *rows: StepRow) -> bytes:
        """One step; returns its bytes."""
        return self.backlog([list(rows)])

    def backlog(self, steps: Sequence[Sequence[StepRow]]) -> bytes:
        """Several steps that waited, handled in one go; returns their bytes."""
        before = len(self.payloads)
        self._take(self.worker.receive([StepRecords.build(rows) for rows in steps]))
        return b"".join(self.payloads[before:])

    def _take(self, output: WorkerOutput) -> None:
        for _, emissions in output.emissions:
            assert isinstance(decode(encode(emissions)), Emissions)
            self.rows += emissions.rows()
            self.payloads += [row[5] for row in emissions.rows()]
        self.cancels += output.cancels
        self.recordings += output.recordings


def row(
    ids: Sequence[int], finish: str | None = None, *, rid: int = 0, index: int = 0, stop_token: bool = False,
    message: str = "", logprobs: Sequence[TokenLogprob] | None = None,
) -> StepRow:  # fmt: skip
    """A StepRow with defaults."""
    return StepRow(rid, index, ids, finish, stop_token, message, logprobs)


def each(
    ids: Sequence[int], finish: str | None = None, *, rid: int = 0, index: int = 0, stop_token: bool = False
) -> list[StepRow]:
    """One row per id, the finish on the last."""
    last = len(ids) - 1
    return [
        StepRow(rid, index, [token], finish if i == last else None, stop_token and i == last)
        for i, token in enumerate(ids)
    ]
