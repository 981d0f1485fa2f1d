"""Every message as the wire carries it, whole and damaged, and what its receivers make of it.

Three properties. A message that is built comes back as it was. A frame with one thing wrong is refused, or is a
message that agrees with itself. And a receiver that is given such a message neither raises nor lets a request feel it
that the message does not name: what it sends on, others can read.

``test_wire.py`` has the cases that are worth a name; here the machine draws.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from executor.core import ExecutorCore
from executor.engines.base import StepRow
from executor.engines.replay_engine import ReplayEngine
from executor.messages import (
    Cancel,
    Emissions,
    FrontendLost,
    Histories,
    Message,
    Open,
    Recall,
    Resubmit,
    Status,
    StepRecords,
    Synced,
    WireError,
    WorkerJoined,
    WorkerLost,
)
from executor.proxy import GenerationExecutor
from executor.request import GenerationRequest, SamplingParams
from executor.wire import decode, encode
from postproc_workers.deltas import deltas_request
from postproc_workers.worker import PostprocWorker
from serve.streams import ClientStream
from tests.executor.strategies import KINDS, MESSAGES, SPECS, STRATEGIES, damaged, damaged_fields, plain, records
from tests.helpers import ALL_POST_PROCESSORS, CHAT, COMPLETIONS, Client, request_of, spec_of, vocabulary

#: The request that no hostile message names; its front end, and where it is.
WITNESS, FRONTEND, WORKER = 7, 0, 0
#: Of the engine: small, for one is made in every example.
VOCABULARY = 1000


def test_every_kind_of_message_is_drawn() -> None:
    assert set(STRATEGIES) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_sent_arrives(kind: type) -> None:
    @given(STRATEGIES[kind])
    def check(message: Message) -> None:
        frame = encode(message)
        again = decode(frame)
        assert type(again) is kind and plain(again) == plain(message)
        assert encode(again) == frame

    check()


def read(frame: bytes) -> Message | None:
    """The message of a frame, None for one that is refused with a reason; nothing else happens, and not for long."""
    begin = time.perf_counter()
    try:
        return decode(frame)
    except WireError as error:
        assert str(error)
        return None
    finally:
        assert time.perf_counter() - begin < 2.0


def agrees(message: Message) -> None:
    """The columns of a message fit each other, and it can be sent on."""
    assert plain(decode(encode(message))) == plain(message)
    records = message.steps if isinstance(message, Histories) else message
    if isinstance(records, StepRecords):
        rows = list(records.rows())
        assert len(rows) == len(records.rids) and sum(len(row[2]) for row in rows) == len(records.tokens)
        assert all(row[4] is None or len(row[4]) == len(row[2]) for row in rows)
        assert sum(row[3] is not None for row in rows) == len(records.finishes)
        for opened in records.opens:  # a worker answers with these numbers
            decode(encode(Emissions.build(0, [(opened.rid, opened.epoch, 0, 0, 0, b"")])))
    if isinstance(message, Emissions):
        assert b"".join(row[5] for row in message.rows()) == message.payload
    if isinstance(message, Resubmit):
        assert len(message.delivered) == message.request.num_outputs


@settings(max_examples=50 * settings().max_examples)
@given(st.data(), MESSAGES)
def test_a_damaged_frame_is_refused_or_a_message(data: st.DataObject, message: Message) -> None:
    changed = read(data.draw(damaged(message)))
    event("refused" if changed is None else "read")
    if changed is not None:
        agrees(changed)


# ------------------------------------------------------------------------------------------------------ receivers


def hostile(kinds: Iterable[type]) -> st.SearchStrategy[Message]:
    """Messages that the wire lets through: as drawn, or damaged."""
    drawn = st.one_of([STRATEGIES[kind] for kind in kinds])
    return drawn | drawn.flatmap(damaged).map(read).filter(lambda message: message is not None)


def names(message: Message) -> set[int]:
    """The requests that a message is about."""
    if isinstance(message, Histories):
        return names(message.steps)
    if isinstance(message, StepRecords):
        return {*message.rids, *(opened.rid for opened in message.opens)}
    if isinstance(message, Emissions):
        return set(message.rids)
    if isinstance(message, Cancel):
        return {rid for rid, _ in message.outputs}
    if isinstance(message, WorkerLost):
        return {*message.delivered, message.culprit}
    if isinstance(message, Resubmit):
        return {message.request.rid}
    return {message.rid} if hasattr(message, "rid") else set()


def spares_the_witness(message: Message) -> bool:
    """Also not by saying that its front end is gone, or has been replaced."""
    return WITNESS not in names(message) and message not in (FrontendLost(FRONTEND), Synced(FRONTEND))


class Executor:
    """An executor that has, or takes over, the witness; and what its workers are sent, read as they would read it."""

    def __init__(self, incarnation: int = 0) -> None:
        self.core = ExecutorCore(
            ReplayEngine({"vocab_size": VOCABULARY}), incarnation=incarnation, frontends=incarnation
        )
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.ended = False
        self.joined: set[int] = set()

    def receive(self, message: Message) -> None:
        self.core.receive(message)
        self.core.dispatcher.validate()
        self.joined |= {message.worker} if isinstance(message, WorkerJoined) else set()

    def step(self) -> None:
        for _, steps in self.core.step(1):
            self.observe(decode(encode(steps)))
        self.core.dispatcher.validate()
        decode(encode(Status(self.core.stats())))
        for _, answer in self.core.answers:
            decode(encode(answer))
        self.core.answers.clear()

    def observe(self, steps: Message) -> None:
        assert isinstance(steps, StepRecords)
        if any(opened.rid == WITNESS for opened in steps.opens):  # a worker begins anew
            self.tokens, self.logprobs, self.ended = [], [], False
        for rid, _, ids, finish, logprobs in steps.rows():
            if rid == WITNESS:
                assert not self.ended and logprobs is not None
                self.tokens += ids
                self.logprobs += logprobs
                self.ended = finish is not None

    def finish(self) -> tuple[list[int], list[Any]]:
        """All that a worker has got of the witness, once the others have gone and one that is well has come."""
        for worker in self.joined - {WORKER}:
            self.receive(WorkerLost(worker, {}))
        self.receive(WorkerJoined(500, "inproc://worker-500"))
        self.receive(Histories(500, StepRecords([], [], [], [])))
        for _ in range(20):
            self.step()
        assert self.ended
        return self.tokens, self.logprobs


REQUEST = GenerationRequest(WITNESS, [[1, 2, 3]], SamplingParams(max_tokens=12, logprobs=1), b"spec", 1, FRONTEND)


def undisturbed() -> tuple[list[int], list[Any]]:
    executor = Executor()
    executor.receive(WorkerJoined(WORKER, "inproc://worker"))
    executor.receive(REQUEST)
    return executor.finish()


#: A front end that an Open cannot name, and epochs behind which there is none.
LIES: tuple[Message, ...] = (
    GenerationRequest(1, [[1]], SamplingParams(4), b"spec", 1, 2**31),
    GenerationRequest(1, [[1]], SamplingParams(4), b"spec", 1, 2**63 - 1),
    Resubmit(GenerationRequest(1, [[1]], SamplingParams(4), b"spec"), [(0, False)], 2**32 - 2),
    Resubmit(GenerationRequest(1, [[1]], SamplingParams(4), b"spec"), [(0, False)], 2**32 - 1),
)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: type(lie).__name__)
def test_numbers_that_do_not_fit_what_is_sent_on(lie: Message) -> None:
    """A message that a worker refuses is refused with all that it holds of others."""
    executor, message = Executor(), read(encode(lie))
    executor.receive(WorkerJoined(WORKER, "inproc://worker"))
    executor.receive(REQUEST)
    if message is not None:
        executor.receive(message)
    executor.step()
    for worker in (WORKER, 500):  # the epoch grows with each that is lost
        executor.receive(WorkerLost(worker, {}))
        executor.receive(WorkerJoined(worker + 500, "inproc://worker"))
        executor.step()
    assert executor.finish() == undisturbed()


@settings(max_examples=5 * settings().max_examples)
@given(st.lists(hostile(KINDS), min_size=1, max_size=4), st.integers(0, 3))
def test_an_executor_survives_any_message(messages: Sequence[Message], steps: int) -> None:
    executor = Executor()
    for message in (WorkerJoined(WORKER, "inproc://worker"), WorkerJoined(1, "inproc://worker-1"), REQUEST):
        executor.receive(message)
    for _ in range(steps):
        executor.step()
    for message in filter(spares_the_witness, messages):
        executor.receive(message)
        executor.step()
    assert executor.finish() == undisturbed()


@settings(max_examples=5 * settings().max_examples)
@given(st.lists(st.tuples(st.integers(0, 4), hostile(KINDS)), min_size=1, max_size=4))
def test_an_executor_that_takes_over_survives_any_message(messages: Sequence[tuple[int, Message]]) -> None:
    """They come before, between and behind what everybody has to say."""
    tokens, logprobs = undisturbed()
    executor, had = Executor(incarnation=1), StepRow(WITNESS, 0, tokens[:5], logprobs=logprobs[:5])
    executor.tokens, executor.logprobs = tokens[:5], logprobs[:5]
    said: list[Message] = [
        WorkerJoined(WORKER, "inproc://worker"),
        Resubmit(REQUEST, [(2, False)]),
        Synced(FRONTEND),
        Histories(WORKER, StepRecords.build([had], [Open(WITNESS, 0, FRONTEND, b"")])),
    ]
    for place in range(len(said) + 1):
        for _, message in filter(lambda entry, place=place: entry[0] == place, messages):  # type: ignore[misc]
            # Were its worker announced again, it would be asked again, and answer.
            if spares_the_witness(message) and not (isinstance(message, WorkerJoined) and message.worker == WORKER):
                executor.receive(message)
                executor.step()
        if place < len(said):
            executor.receive(said[place])
    assert executor.finish() == (tokens, logprobs)


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": 65_536},
        {"logprobs": 2**62},
        {"logprobs": -1},
        {"temperature": float("nan"), "top_p": float("inf"), "min_p": -float("inf")},
        {"top_k": -(2**62), "seed": 2**64 - 1, "min_tokens": -(2**62)},
    ],
    ids=str,
)
def test_no_sampling_value_makes_what_cannot_be_sent(values: dict[str, Any]) -> None:
    """Of a vocabulary that is larger than a column's count of alternatives."""
    core = ExecutorCore(ReplayEngine({"vocab_size": 70_000}))
    core.receive(WorkerJoined(WORKER, "inproc://worker"))
    request = read(encode(GenerationRequest(1, [[1, 2, 3]], SamplingParams(4, **values), b"spec")))
    if request is not None:
        core.receive(request)
    for _ in range(6):
        for _, steps in core.step(1):
            decode(encode(steps))


@pytest.mark.parametrize("epoch", [2**32 - 2, 2**32 - 1])
def test_what_a_worker_says_of_an_epoch_is_sent_on(epoch: int) -> None:
    executor = Executor(incarnation=1)
    executor.tokens, executor.logprobs = undisturbed()
    had = StepRow(WITNESS, 0, executor.tokens[:5], logprobs=executor.logprobs[:5])
    executor.receive(WorkerJoined(WORKER, "inproc://worker"))
    executor.receive(Resubmit(REQUEST, [(2, False)]))
    executor.receive(Synced(FRONTEND))
    executor.receive(Histories(WORKER, StepRecords.build([had], [Open(WITNESS, epoch, FRONTEND, b"")])))
    for worker in (WORKER, 500):
        executor.receive(WorkerLost(worker, {}))
        executor.receive(WorkerJoined(worker + 500, "inproc://worker"))
        executor.step()
    assert executor.finish() == undisturbed()


@pytest.mark.parametrize("epoch", [2**32 - 2, 2**32 - 1])
def test_what_a_worker_says_of_an_epoch_is_told_to_the_next_executor(epoch: int) -> None:
    proxy, sent = GenerationExecutor(FRONTEND), []
    proxy.connect_in_process(lambda message: sent.append(encode(message)))
    proxy.open(REQUEST, Client())
    proxy.receive(Emissions.build(WORKER, [(WITNESS, epoch, 0, 1, 0, b"a")]))
    proxy.executor_lost()
    sent.clear()
    proxy.executor_joined()
    assert [type(decode(frame)) for frame in sent] == [Resubmit, Synced]


WITNESS_SPEC = spec_of(COMPLETIONS, stream=False)
WITNESS_ROWS = [[72], [101, 108], [195], [169], [33]]


def rows_of(ids: Sequence[int], finish: str | None = None) -> StepRecords:
    return StepRecords.build([StepRow(WITNESS, 0, ids, finish)])


class Worker:
    """A worker with the witness; ``body`` is what its client gets."""

    def __init__(self) -> None:
        self.worker = PostprocWorker(vocabulary(), ALL_POST_PROCESSORS)
        self.body = b""
        self.receive([StepRecords([], [], [], [], opens=[Open(WITNESS, 0, FRONTEND, WITNESS_SPEC.encode())])])

    def receive(self, messages: Sequence[StepRecords | Recall]) -> None:
        output = self.worker.receive(messages)
        sent = output.emissions
        for frontend, emissions in sent:
            again = decode(encode(emissions))
            assert isinstance(again, Emissions)
            for rid, _, _, _, _, payload in again.rows():
                if rid == WITNESS:
                    assert frontend == FRONTEND
                    self.body += payload
        decode(encode(Cancel(0, output.cancels)))
        for histories in output.histories:
            agrees(histories)


def for_workers(message: Message) -> bool:
    """What a worker's shell lets through. Those of a later executor end what an earlier one has begun."""
    return isinstance(message, StepRecords | Recall) and message.incarnation == 0 and spares_the_witness(message)


@settings(max_examples=5 * settings().max_examples)
@given(st.data(), st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=4))
def test_a_worker_survives_any_message(data: st.DataObject, places: list[tuple[int, bool]]) -> None:
    """Each hostile message comes with a row of the witness: in one go with it, or in a batch of its own."""
    specs = st.sampled_from(SPECS)
    steps = st.one_of(records(specs), records(specs.flatmap(damaged_fields)), STRATEGIES[Recall])
    drawn = steps | steps.flatmap(damaged).map(read).filter(lambda message: message is not None)
    worker, body = Worker(), undisturbed_body()
    for place, ids in enumerate(WITNESS_ROWS):
        row = rows_of(ids, "length" if place == len(WITNESS_ROWS) - 1 else None)
        batch: list[Any] = [row]
        for at, together in places:
            if at != place:
                continue
            message = data.draw(drawn)
            if for_workers(message):
                batch = [message, *batch] if together else batch
                if not together:
                    worker.receive([message])
        worker.receive(batch)
    assert worker.body == body


def undisturbed_body() -> bytes:
    worker = Worker()
    for place, ids in enumerate(WITNESS_ROWS):
        worker.receive([rows_of(ids, "length" if place == len(WITNESS_ROWS) - 1 else None)])
    assert worker.body
    return worker.body


@settings(max_examples=5 * settings().max_examples)
@given(st.lists(hostile(KINDS), min_size=1, max_size=5))
def test_a_front_end_survives_any_message(messages: list[Message]) -> None:
    proxy, sent = GenerationExecutor(FRONTEND), []
    proxy.connect_in_process(lambda message: sent.append(encode(message)))
    witness, streams = Client(), [ClientStream(), ClientStream()]
    proxy.open(request_of(WITNESS, WITNESS_SPEC), witness)
    for rid, stream in enumerate(streams, 1):
        proxy.open(request_of(rid, spec_of(CHAT, n=2)), stream)
    handle = proxy.submit(deltas_request(3, [[1, 2, 3]], SamplingParams(max_tokens=4), n=2))
    for message in filter(spares_the_witness, messages):
        proxy.receive(message)
    assert not handle.finished  # nobody has stepped it
    proxy.worker_lost(WORKER)
    proxy.receive(Emissions.build(1, [(WITNESS, 1, 0, 2, 0, b"ab")]))
    proxy.receive(Emissions.build(1, [(WITNESS, 1, 0, 3, 3, b"c")]))
    assert witness.ended and witness.payloads == [b"ab", b"c"]
    proxy.executor_lost()
    proxy.executor_joined()
    proxy.fail_all("the end")
    for frame in sent:
        agrees(decode(frame))
