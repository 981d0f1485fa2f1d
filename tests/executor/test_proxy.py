"""The front end's end of the channel, and the whole system in one thread: submit to bytes, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from executor.engines.replay_engine import ReplayEngine
from executor.messages import (
    BODY,
    FAILED,
    OUTPUT_END,
    REQUEST_END,
    Abort,
    Emissions,
    Message,
    Release,
    Status,
    WorkerJoined,
    WorkerLost,
)
from executor.proxy import GenerationExecutor
from executor.request import SamplingParams
from executor.result import AbortedError, OutputDelta, ResultError
from executor.wire import decode, encode, encode_delta
from postproc_workers.deltas import deltas_request
from tests.executor.test_result import run
from tests.helpers import CHAT, COMPLETIONS, Client, ScriptedEngine, System, each, request_of, row, spec_of, tokens
from tests.recordings.checker import Merged, merge_document, merge_stream

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")


class Wired(GenerationExecutor):
    """A proxy whose messages are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self.connect_in_process(self.sent.append)


def emission(
    rid: int, payload: bytes, flags: int = 0, *, count: int = 1, epoch: int = 0, index: int = 0, worker: int = 0
) -> Emissions:
    return Emissions.build(worker, [(rid, epoch, index, count, flags, payload)])


# ------------------------------------------------------------------------------------------------------ the proxy


def test_bytes_reach_the_sink_and_the_end_is_released() -> None:
    proxy, client = Wired(), Client()
    request = request_of(5, spec_of(CHAT))
    proxy.open(request, client)
    assert list(map(encode, proxy.sent)) == [encode(request)] and proxy.open_requests == 1
    proxy.receive(emission(5, b"a"))
    proxy.receive(emission(5, b"b", OUTPUT_END | REQUEST_END, count=2))
    assert client.body == b"ab" and client.ended and proxy.open_requests == 0
    assert proxy.sent[1:] == [Release(5)]
    proxy.receive(emission(5, b"c"))
    assert client.body == b"ab" and proxy.late_rows == 1


def test_rows_that_belong_to_nobody_are_counted() -> None:
    proxy, client = Wired(), Client()
    proxy.open(request_of(5, spec_of(CHAT)), client)
    proxy.receive(emission(5, b"new", epoch=2))
    proxy.receive(emission(5, b"old", epoch=1))
    proxy.receive(emission(5, b"where", epoch=2, index=1))
    proxy.receive(emission(6, b"who"))
    proxy.worker_lost(3)
    proxy.receive(Emissions.build(3, [(5, 3, 0, 1, 0, b"late"), (6, 0, 0, 1, 0, b"late")]))
    assert client.body == b"new" and proxy.late_rows == 5


def test_a_lost_worker_is_reported_with_what_clients_have() -> None:
    proxy, client = Wired(), Client()
    proxy.open(request_of(5, spec_of(CHAT, n=2)), client)
    proxy.open(request_of(6, spec_of(CHAT)), Client())
    proxy.open(request_of(7, spec_of(CHAT)), Client())
    proxy.receive(emission(5, b"a", count=3))
    proxy.receive(emission(5, b"b", OUTPUT_END, count=4, index=1))
    proxy.receive(emission(7, b"c", worker=1))
    proxy.worker_lost(0)
    assert proxy.sent[-1] == WorkerLost(0, {5: [(3, False), (4, True)]})
    proxy.receive(emission(5, b"d", count=9, epoch=1, worker=2))
    lost = proxy.sent[-1]
    assert isinstance(lost, WorkerLost) and lost.delivered[5][0] == (3, False)  # as it was


def test_a_request_that_lost_two_workers_is_still_reported() -> None:
    proxy, client = Wired(), Client()
    proxy.open(request_of(5, spec_of(CHAT)), client)
    proxy.receive(emission(5, b"a", count=3))
    proxy.worker_lost(0)
    proxy.worker_lost(1)
    assert proxy.sent[-1] == WorkerLost(1, {5: [(3, False)]})


def test_a_submit_that_cannot_be_sent_leaves_nothing() -> None:
    proxy = GenerationExecutor()
    with pytest.raises(RuntimeError, match="listen"):
        proxy.open(request_of(5, spec_of(CHAT)), Client())
    assert proxy.open_requests == 0


def test_aborts_are_sent_while_they_can_matter() -> None:
    proxy, client = Wired(), Client()
    proxy.open(request_of(5, spec_of(CHAT)), client)
    proxy.abort(5)
    proxy.discard(5)
    proxy.discard(5)
    proxy.discard(99)
    proxy.abort(99)
    assert proxy.sent[1:] == [Abort(5), Abort(5)] and proxy.open_requests == 1
    proxy.receive(emission(5, b"end", REQUEST_END))
    assert client.body == b"" and proxy.open_requests == 0 and proxy.sent[-1] == Release(5)
    proxy.abort(5)
    assert proxy.sent[-1] == Release(5)


def test_failing_all_tells_everybody_who_waits() -> None:
    proxy, clients = Wired(), [Client() for _ in range(3)]
    for rid, client in enumerate(clients):
        proxy.open(request_of(rid, spec_of(CHAT)), client)
    proxy.discard(2)
    proxy.fail_all("the executor is gone")
    assert [client.error for client in clients] == ["the executor is gone"] * 2 + [None]
    assert proxy.open_requests == 0
    proxy.receive(emission(0, b"late"))
    assert proxy.late_rows == 1


def test_waiting_for_idle() -> None:
    async def main() -> None:
        proxy = Wired()
        await proxy.wait_idle()
        for rid in (1, 2):
            proxy.open(request_of(rid, spec_of(CHAT)), Client())
        waiting = asyncio.ensure_future(proxy.wait_idle())
        proxy.receive(emission(1, b"", REQUEST_END))
        await asyncio.sleep(0)
        assert not waiting.done()
        proxy.receive(emission(2, b"", REQUEST_END))
        await waiting

    run(main())


def test_reports_are_kept_and_other_messages_dropped() -> None:
    proxy = Wired()
    proxy.receive(Status({"open": 3}))
    proxy.receive(Emissions(4, (), (), (), (), (), (), b"", {"rows": 1}))
    proxy.receive(Abort(5))
    assert proxy.status == {"open": 3} and proxy.worker_stats == {4: {"rows": 1}}
    proxy.worker_lost(4)
    proxy.receive(Emissions(4, (), (), (), (), (), (), b"", {"rows": 2}))
    assert proxy.worker_stats == {}
    proxy.worker_joined(5, "inproc://five")
    assert proxy.sent[-1] == WorkerJoined(5, "inproc://five")


def test_the_lag_of_a_message_is_counted_once_it_is_handed_over() -> None:
    proxy, now = Wired(), time.monotonic_ns()
    seen: list[int] = []

    class Watching(Client):
        def feed(self, payload: bytes, flags: int) -> None:
            super().feed(payload, flags)
            seen.append(sum(proxy.write_lag.counts))

    proxy.open(request_of(1, spec_of(CHAT)), Watching())
    message = Emissions.build(0, [(1, 0, 0, 1, 0, b"a"), (1, 0, 0, 2, 0, b"b")])
    message.stamp, message.sent = now - 7_000_000_000, now - 3_000_000_000
    proxy.receive(message)
    assert seen == [0, 0]
    assert sum(proxy.write_lag.counts) == sum(proxy.chunk_lag.counts) == 1, "once a message"
    assert 3 <= proxy.write_lag.total < 7 <= proxy.chunk_lag.total < 60
    message.stamp = 0
    proxy.receive(message)
    assert sum(proxy.write_lag.counts) == 2 and sum(proxy.chunk_lag.counts) == 1
    proxy.receive(Emissions(0, (), (), (), (), (), (), b"", {"rows": 1}))
    proxy.worker_lost(0)
    proxy.receive(message)  # its bytes are dropped
    assert sum(proxy.write_lag.counts) == 2


def test_minted_ids_never_meet() -> None:
    minted = [GenerationExecutor(frontend).mint() for frontend in range(3) for _ in range(3)]
    one = GenerationExecutor(1)
    minted += [one.mint() for _ in range(100)]
    assert len(set(minted[-100:])) == 100 and {rid % 1024 for rid in minted[-100:]} == {1}
    assert all(0 < rid < 2**63 for rid in minted)


def test_frames_that_are_none_are_counted() -> None:
    proxy = Wired()
    for frame in (b"", b"\xc1", b"\x81\xa1t\xa3abc"):
        proxy._receive_frame(frame)
    assert proxy.refused_frames == 3


# ------------------------------------------------------------------------------------------------------ handles


def handle_request(rid: int, **kwargs: Any) -> Any:
    sampling = kwargs.pop("sampling", SamplingParams(max_tokens=100))
    return deltas_request(rid, [[1, 2]], sampling, **kwargs)


def test_a_handle_is_stepped_with_text_ids_and_logprobs() -> None:
    async def main() -> None:
        system = System()
        handle = system.proxy.submit(handle_request(1, sampling=SamplingParams(max_tokens=9, logprobs=1), n=2))
        entry = TokenLogprob(-0.5, ((3, -0.5),))
        system.scripted.give(
            row(HELLO[:1], rid=1, logprobs=[entry]), row(HELLO[:2], "length", rid=1, index=1, logprobs=[entry] * 2)
        )
        system.scripted.give(row(HELLO[1:3], "stop", rid=1, logprobs=[entry] * 2))
        system.run()
        seen = [
            (step.updated.index, step.updated.text_diff, list(step.updated.token_ids_diff)) async for step in handle
        ]
        assert seen == [(0, "Hello", HELLO[:1]), (1, "Hello world", HELLO[:2]), (0, " world,", HELLO[1:3])]
        assert handle.finished and [o.finish_reason for o in handle.outputs] == ["stop", "length"]
        assert handle.outputs[1].logprobs_diff == () and [e.piece for e in handle.outputs[0].logprobs_diff] == [
            " world",
            ",",
        ]
        assert handle.prompt_tokens == 2 and handle.completion_tokens == 5
        assert system.proxy.open_requests == system.core.dispatcher.open_requests == 0

    run(main())


def test_an_aborted_handle_ends_in_an_error() -> None:
    async def main() -> None:
        system = System()
        handle = system.proxy.submit(handle_request(1, n=2))
        system.scripted.give(row(HELLO[:1], rid=1))
        system.run()
        await anext(handle)
        handle.abort()
        system.run()
        for _ in range(2):
            with pytest.raises(AbortedError):
                await anext(handle)
        assert handle.finished and system.scripted.cancelled == [(1, 0), (1, 1)]
        assert system.proxy.open_requests == system.core.dispatcher.open_requests == 0

    run(main())


def test_tokens_in_the_row_of_an_abort_come_before_its_error() -> None:
    """The worker joins what waits: the last tokens and the abort are one row then, for each output."""

    async def main() -> None:
        system = System()
        handle = system.proxy.submit(handle_request(1, n=2))
        system.scripted.give(row(HELLO[:1], rid=1), row(HELLO[:2], index=1, rid=1))
        system.executor()
        handle.abort()
        system.run()
        seen = [((await anext(handle)).updated.index, handle.updated.text_diff) for _ in range(2)]
        assert sorted(seen) == [(0, "Hello"), (1, "Hello world")] and not handle.finished
        with pytest.raises(AbortedError):
            await anext(handle)
        assert handle.finished and handle.completion_tokens == 3

    run(main())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row([5000], rid=1)], "5000"),
        ([row(HELLO[:1], rid=1), row([], "error", rid=1, message="out of memory")], "out of memory"),
        ([row([], "error", rid=1)], "failed"),
    ],
)
def test_a_failed_handle_says_why(rows: list[StepRow], message: str) -> None:
    async def main() -> None:
        system = System()
        handle = system.proxy.submit(handle_request(1))
        system.scripted.give(*rows)
        system.run()
        with pytest.raises(ResultError, match=message):
            await handle.aresult()
        assert handle.finished and system.proxy.open_requests == 0

    run(main())


def test_a_handle_ends_whatever_its_worker_answers() -> None:
    async def main() -> None:
        for payload, flags in (
            (b"\xc1", 0), (b"\x92\x01", 0), (b"", REQUEST_END | FAILED | BODY), (b"", REQUEST_END), (b"data: x\n\n",
            REQUEST_END),
            (encode_delta_of(7), 0),
        ):  # fmt: skip
            proxy = Wired()
            handle = proxy.submit(handle_request(1))
            proxy.receive(emission(1, payload, flags))
            with pytest.raises(ResultError):
                await handle.aresult()
            assert handle.finished

    run(main())


def encode_delta_of(index: int) -> bytes:
    return encode_delta(OutputDelta(index, [1], "x"))


def test_a_failing_executor_reaches_handles() -> None:
    async def main() -> None:
        proxy = Wired()
        handle = proxy.submit(handle_request(1))
        proxy.fail_all("gone")
        with pytest.raises(ResultError, match="gone"):
            await handle.aresult()

    run(main())


# ------------------------------------------------------------------------------------------------------ the system


def merged(client: Client, endpoint: str = CHAT, **options: bool) -> Merged:
    """A client's response, merged; it has ended."""
    assert client.ended
    if client.whole:
        return merge_document(client.body, endpoint)
    return merge_stream(client.body, endpoint, **options)


def test_from_submit_to_bytes() -> None:
    system = System()
    client = system.open(request_of(1, spec_of(CHAT)))
    system.scripted.give(*each(HELLO, "stop", rid=1, stop_token=True))
    system.run()
    choice = merged(client).choices[0]
    assert (choice.content, choice.finish_reason, choice.stop_reason) == (
        "Hello world, the answer is 42.",
        "stop",
        None,
    )
    assert system.proxy.open_requests == system.core.dispatcher.open_requests == 0
    assert system.workers[0].open_requests == 0 and system.scripted.cancelled == []


def test_the_replay_engine_end_to_end() -> None:
    scripts = [{"token_ids": HELLO, "finish_reason": "stop", "stop_token_id": HELLO[-1]}]
    for tokens_per_step in (1, 3, 50):
        system = System(ReplayEngine({"vocab_size": 332, "scripts": scripts, "tokens_per_step": tokens_per_step}), 2)
        clients = [system.open(request_of(rid, spec_of(CHAT, n=3, stream=rid % 2 == 0))) for rid in range(6)]
        system.run()
        for client in clients:
            whole = merged(client)
            assert [choice.content for choice in whole.choices.values()] == ["Hello world, the answer is 42."] * 3
        assert all(worker.open_requests == 0 for worker in system.workers.values())


def test_a_stop_string_cancels_once_and_late_rows_are_counted() -> None:
    system = System()
    client = system.open(request_of(1, spec_of(CHAT, stop=["answer"], n=2)))
    system.scripted.give(row(HELLO[:4], rid=1))
    system.scripted.give(row(HELLO[4:6], rid=1))
    system.scripted.give(row(HELLO[6:8], rid=1), row(HELLO[:2], rid=1, index=1))
    system.scripted.give(row(HELLO[8:], "stop", rid=1, stop_token=True), row(HELLO[2:3], "length", rid=1, index=1))
    system.run()
    choices = merged(client).choices
    assert (choices[0].content, choices[0].stop_reason) == ("Hello world, the ", "answer")
    assert choices[1].content == "Hello world," and system.scripted.cancelled == [(1, 0)]
    assert system.core.dispatcher.late_rows == 2


def test_an_abort_ends_a_response_and_frees_everything() -> None:
    system = System()
    client = system.open(request_of(1, spec_of(CHAT)))
    system.scripted.give(row(HELLO[:2], rid=1))
    system.run()
    system.proxy.discard(1)
    system.scripted.give(row(HELLO[2:3], rid=1))
    system.run()
    assert not client.ended and system.scripted.cancelled == [(1, 0)]
    assert system.proxy.open_requests == system.core.dispatcher.open_requests == system.workers[0].open_requests == 0
    system.scripted.give(row(HELLO[3:4], rid=1))
    system.run()
    assert system.core.dispatcher.late_rows == 2


def test_a_field_that_the_engine_does_not_honour() -> None:
    system = System(ScriptedEngine(refuse={"top_k"}))
    clients = [
        system.open(request_of(rid, spec_of(endpoint, stream=stream), SamplingParams(top_k=3)))
        for rid, (endpoint, stream) in enumerate(
            [(CHAT, True), (CHAT, False), (COMPLETIONS, True), (COMPLETIONS, False)]
        )
    ]
    system.run()
    for client in clients:
        assert client.failed and client.whole and b"top_k: not honoured" in client.body
    assert system.proxy.open_requests == system.core.dispatcher.open_requests == 0


def test_a_refused_request_ends_without_bytes() -> None:
    system = System()
    spec = spec_of(CHAT)
    request = request_of(1, spec)
    client = system.open(type(request)(1, request.prompts, request.sampling, b"\x00nonsense"))
    system.scripted.give(row(HELLO[:1], rid=1))
    system.run()
    assert (client.body, client.ended, client.failed, client.whole) == (b"", True, True, True)
    assert system.scripted.cancelled == [(1, 0)] and system.core.dispatcher.open_requests == 0


def test_without_a_worker_requests_wait() -> None:
    system = System(workers=0)
    client = system.open(request_of(1, spec_of(CHAT)))
    system.scripted.give(*each(HELLO, "stop", rid=1, stop_token=True))
    system.run()
    assert client.body == b""
    system.add_worker()
    system.run()
    assert merged(client).choices[0].content == "Hello world, the answer is 42."


# ------------------------------------------------------------------------------------------------------ lost workers

KINDS: dict[str, dict[str, Any]] = {
    "chat": {"endpoint": CHAT},
    "chat unary": {"endpoint": CHAT, "stream": False},
    "chat logprobs": {"endpoint": CHAT, "logprobs": True, "top_logprobs": 1},
    "chat usage": {"endpoint": CHAT, "stream_options": {"include_usage": True}},
    "chat continuous": {"endpoint": CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "chat stop": {"endpoint": CHAT, "stop": ["is 4", "rld,x"]},
    "chat stop shown": {"endpoint": CHAT, "stop": ["is 4"], "include_stop_str_in_output": True},
    "completion": {"endpoint": COMPLETIONS, "echo": True},
    "completion unary": {"endpoint": COMPLETIONS, "stream": False, "logprobs": 1},
    "completion logprobs": {"endpoint": COMPLETIONS, "logprobs": 1},
}


class Scenario:
    """Some requests, their engine's steps, and what their clients get."""

    def __init__(self, kind: str, n: int, interval: int) -> None:
        arguments = dict(KINDS[kind])
        self.endpoint = arguments.pop("endpoint")
        asked = arguments.get("stream_options", {})
        self.options = {"include_usage": "include_usage" in asked, "continuous": "continuous_usage_stats" in asked}
        self.system = System(workers=2, stream_interval=interval, frontends=2)
        spec = spec_of(self.endpoint, n=n, **arguments)
        self.clients = [self.system.open(request_of(rid, spec, frontend=rid % 2)) for rid in range(3)]
        outputs = [(rid, index) for rid in range(3) for index in range(n)]
        texts = {key: HELLO[: len(HELLO) - sum(key)] for key in outputs}  # they end at different steps
        for at in range(len(HELLO)):
            rows = [self._row(key, ids, at) for key, ids in texts.items() if at < len(ids)]
            self.system.scripted.give(*rows)

    def _row(self, key: tuple[int, int], ids: list[int], at: int) -> StepRow:
        rid, index = key
        last = at == len(ids) - 1
        stops = last and ids is not None and len(ids) == len(HELLO)
        logprobs = [TokenLogprob(-0.5, ((ids[at], -0.5),))]
        return StepRow(
            rid, index, ids[at : at + 1], ("stop" if stops else "length") if last else None, stops, "", logprobs
        )

    def results(self) -> list[Merged]:
        results = [merged(client, self.endpoint, **self.options) for client in self.clients]
        for result in results:
            result.chunks = []  # where a chunk ends may differ
        return results


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_worker_costs_its_clients_nothing(kind: str) -> None:
    """Steps, deaths and losses in any order: the merged responses are those of an undisturbed run."""

    @given(
        n=st.integers(1, 3),
        interval=st.sampled_from((1, 1, 3)),
        events=st.lists(
            st.sampled_from(("turn", "executor", "work", "keep", "lose", "kill", "half", "hear", "late")),
            max_size=30,
        ),
    )
    def check(n: int, interval: int, events: list[str]) -> None:
        undisturbed = Scenario(kind, n, interval)
        undisturbed.system.run()
        scenario = Scenario(kind, n, interval)
        disturb(scenario.system, events)
        scenario.system.run()
        assert scenario.results() == undisturbed.results()
        assert sum(proxy.open_requests for proxy in scenario.system.proxies) == 0
        assert scenario.system.core.dispatcher.open_requests == 0
        assert sorted(set(scenario.system.scripted.cancelled)) == sorted(scenario.system.scripted.cancelled)

    check()


def disturb(system: System, events: list[str]) -> None:
    """turn: all is well. executor, work: one half of a turn. keep: a worker works, and its bytes are on their way.
    lose: a worker works, then dies with its bytes. kill: a worker dies. late: what was on its way arrives. half: a
    worker dies, and only the first front end hears of it; hear: the other one does."""
    on_their_way: list[tuple[int, bytes]] = []
    for event in events:
        worker = min(system.workers)
        if event == "turn":
            system.deliver(on_their_way)
            on_their_way.clear()
            system.turn()
        elif event == "executor":
            system.executor()
        elif event == "hear":
            system.hear()
        elif event == "work":
            system.deliver(on_their_way)
            on_their_way.clear()
            system.deliver(system.work(worker))
        elif event == "keep":
            on_their_way += system.work(worker)
        elif event == "late":
            system.deliver(on_their_way)
            on_their_way.clear()
        else:
            if event == "lose":
                system.work(worker)
            system.add_worker()
            system.kill(worker, unaware={1} if event == "half" else ())
    system.deliver(on_their_way)
    system.hear()


def test_the_last_words_of_a_dead_worker_are_dropped_and_counted() -> None:
    system = System(workers=2)
    client = system.open(request_of(1, spec_of(CHAT)))
    for token in HELLO[:3]:
        system.scripted.give(row([token], rid=1))
    system.turn()
    system.executor()
    last_words = system.work(0)
    assert last_words and isinstance(decode(last_words[0][1]), Emissions)
    system.kill(0)
    system.deliver(last_words)
    assert system.proxy.late_rows == 1
    system.scripted.give(row(HELLO[3:], "stop", rid=1, stop_token=True))
    system.run()
    assert merged(client).choices[0].content == "Hello world, the answer is 42."
    assert system.core.dispatcher.resumed == 1


def test_exactly_the_bytes_that_are_missing_come_again() -> None:
    """Not only the merged text: with the same steps the second worker's bytes go on where the first one's ended."""
    whole = System()
    undisturbed = whole.open(request_of(1, spec_of(CHAT)))
    whole.scripted.give()
    for last, token in zip([False] * 9 + [True], HELLO):
        whole.scripted.give(row([token], "stop" if last else None, rid=1, stop_token=last))
    whole.run()
    for died_after in range(1, 10):
        system = System(workers=2)
        client = system.open(request_of(1, spec_of(CHAT)))
        system.scripted.give()
        for last, token in zip([False] * 9 + [True], HELLO):
            system.scripted.give(row([token], "stop" if last else None, rid=1, stop_token=last))
        for _ in range(died_after):
            system.turn()
        system.kill(0)
        system.run()
        assert client.body == undisturbed.body
