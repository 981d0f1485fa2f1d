"""The routes, without a server: what reaches the executor, what a client is told, and what is let go of."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
from starlette.types import Message
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from executor.messages import BODY, REQUEST_END, Abort, Emissions, Rejected
from executor.proxy import GenerationExecutor
from executor.request import GenerationRequest, SamplingParams
from executor.result import ResultError
from postproc_workers.pool import WorkerPool
from serve import app, http
from serve.admission import ServerFacts
from serve.app import App, ServerState
from serve.limits import ClientLimits
from serve.outlets import KEY
from serve.prompts import Prompts
from tests.recordings.build_tokenizers import byte_level
from tests.serve.test_streams import Pipe

T = TypeVar("T")

FACTS = ServerFacts(
    model="m", max_model_len=500, vocab_size=300, supported=frozenset(f.name for f in fields(SamplingParams))
)
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def prompts() -> Prompts:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return Prompts(made)


class Client:
    """One exchange with the application. sent: what the application sent; leave: what the client does."""

    def __init__(self, body: bytes, fails_to_read: bool = False) -> None:
        self.sent: list[Message] = []
        self.arrived = asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._fails_to_read = fails_to_read

    async def receive(self) -> Message:
        return await self._incoming.get()

    async def send(self, message: Message) -> None:
        if self._fails_to_read and message["type"] == "http.response.body":
            raise ConnectionResetError
        self.sent.append(dict(message))
        self.arrived.set()

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    def json(self) -> Any:
        return json.loads(self.body)


class Clock:
    """A clock that goes when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Served:
    """An application whose executor is this test: ``to_executor`` is what it was sent, ``answer`` its answer."""

    def __init__(self, facts: ServerFacts = FACTS, pool: WorkerPool | None = None, **limits: Any) -> None:
        self.proxy, self.state, self.prompts = GenerationExecutor(), ServerState(), prompts()
        self.to_executor: list[Any] = []
        self.submitted = asyncio.Event()
        self.proxy.connect_in_process(self._take)
        self.app = App(self.proxy, self.prompts, facts, self.state, pool, ClientLimits(**limits))

    def _take(self, message: Any) -> None:
        self.to_executor.append(message)
        self.submitted.set()

    @property
    def request(self) -> GenerationRequest:
        request = self.to_executor[0]
        assert isinstance(request, GenerationRequest)
        return request

    def answer(self, payload: bytes, flags: int = 0, number: int = 0) -> None:
        self.proxy.receive(Emissions.build(0, [(self.to_executor[number].rid, 0, 0, 1, flags, payload)]))

    async def call(
        self,
        path: str,
        body: Any = None,
        method: str = "POST",
        client: Client | None = None,
        state: Any = None,
        **headers: str,
    ) -> Client:
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        client = client or Client(content)
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs, "state": dict(state or {})}
        await self.app(scope, client.receive, client.send)
        return client

    def metric(self, line: str) -> bool:
        return line in self.app.metrics.render().decode()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


# -------------------------------------------------------------------------------- generation


def test_a_stream() -> None:
    async def main() -> None:
        served = Served()
        call = asyncio.create_task(
            served.call("/v1/chat/completions", {**CHAT, "stream": True, "n": 2, "seed": 5}, x_request_id="me")
        )
        await served.submitted.wait()
        request = served.request
        assert ([list(ids) for ids in request.prompts], request.n, request.sampling.seed) == ([[72, 105]], 2, 5)
        served.answer(b"data: 1\n\n")
        served.answer(b"data: [DONE]\n\n", REQUEST_END)
        client = await call
        assert client.status == 200 and client.body == b"data: 1\n\ndata: [DONE]\n\n"
        assert client.headers[b"x-request-id"] == b"me" and client.headers[b"content-type"].startswith(
            b"text/event-stream"
        )
        assert served.proxy.open_requests == 0
        assert served.metric('path="/v1/chat/completions",status="200"} 1.0') and served.metric(
            "first_chunk_seconds_count 1.0"
        )

    run(main())


def test_a_scaffolded_chat_is_one_request_and_counted_by_its_method() -> None:
    async def main() -> None:
        served = Served()
        body = {**CHAT, "scaffolding": {"method": "majority_vote", "n": 4}}
        refused = await served.call("/v1/chat/completions", {**body, "n": 2})
        assert refused.status == 400 and refused.json()["error"]["param"] == "n"
        client = Client(json.dumps(body).encode())
        call = asyncio.create_task(served.call("/v1/chat/completions", client=client))
        await served.submitted.wait()
        assert (served.request.num_outputs, served.proxy.open_requests) == (4, 1)
        client.leave()
        await call
        assert served.to_executor[1:] == [Abort(served.request.rid)]
        assert served.metric('tailrace_scaffolding_requests_total{method="majority_vote"} 1.0')
        assert served.metric('tailrace_scaffolding_requests_total{method="best_of_n"} 0.0')

    run(main())


def test_a_document() -> None:
    async def main() -> None:
        served = Served()
        call = asyncio.create_task(served.call("/v1/completions", {"prompt": ["a", "bc"], "echo": True}))
        await served.submitted.wait()
        assert [list(ids) for ids in served.request.prompts] == [[97], [98, 99]] and served.request.num_outputs == 2
        served.answer(b"{}", REQUEST_END | BODY)
        client = await call
        assert client.status == 200 and client.body == b"{}" and len(client.headers[b"x-request-id"]) == 32
        assert served.metric("first_chunk_seconds_count 0.0")

    run(main())


def test_the_first_bytes_are_timed_from_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reading of the body, the template and the tokens, which a client waits for too."""
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)

    async def main() -> None:
        served, tokenize = Served(), Prompts.chat

        async def slow(prompts: Prompts, request: Any) -> tuple[str, list[int]]:
            clock.now += 40
            return await tokenize(prompts, request)

        monkeypatch.setattr(Prompts, "chat", slow)
        call = asyncio.create_task(served.call("/v1/chat/completions", {**CHAT, "stream": True}))
        await served.submitted.wait()
        clock.now += 2
        served.answer(b"data: [DONE]\n\n", REQUEST_END)
        await call
        assert served.metric("first_chunk_seconds_sum 42.0") and served.metric("request_seconds_sum 42.0")

    run(main())


def test_every_request_is_minted_anew() -> None:
    async def main() -> None:
        specs = []
        for _ in range(2):
            served = Served()
            call = asyncio.create_task(served.call("/v1/chat/completions", CHAT))
            await served.submitted.wait()
            specs.append((served.request.rid, served.request.spec, served.request.sampling.seed))
            served.answer(b"{}", REQUEST_END | BODY)
            await call
        assert all(a != b for a, b in zip(*specs))

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_forgotten_and_its_request_aborted(stream: bool) -> None:
    async def main() -> None:
        served, client = Served(), Client(json.dumps({**CHAT, "stream": stream}).encode())
        call = asyncio.create_task(served.call("/v1/chat/completions", client=client))
        await served.submitted.wait()
        if stream:
            served.answer(b"data: 1\n\n")
            await client.arrived.wait()
        client.leave()
        await call
        assert served.to_executor[1:] == [Abort(served.request.rid)]
        assert served.proxy.open_requests == 1  # until the executor has confirmed
        served.answer(b"data: [DONE]\n\n", REQUEST_END)
        assert served.proxy.open_requests == 0
        assert served.metric('status="499"} 1.0') and served.metric("tailrace_disconnects_total 1.0")

    run(main())


def test_a_write_that_fails_aborts_too() -> None:
    async def main() -> None:
        served, client = Served(), Client(json.dumps({**CHAT, "stream": True}).encode(), fails_to_read=True)
        call = asyncio.create_task(served.call("/v1/chat/completions", client=client))
        await served.submitted.wait()
        served.answer(b"data: 1\n\n")
        with pytest.raises(ConnectionResetError):
            await call
        assert served.to_executor[1:] == [Abort(served.request.rid)]
        assert served.metric('path="/v1/chat/completions",status="500"} 1.0') and served.metric(
            "request_seconds_count 1.0"
        )

    run(main())


def test_a_fault_of_ours_is_counted() -> None:
    async def main() -> None:
        served = Served()

        async def broken(*arguments: Any) -> list[list[int]]:
            raise RuntimeError("a bug")

        served.prompts.texts = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a bug"):
            await served.call("/v1/completions", {"prompt": "a"})
        assert served.metric('path="/v1/completions",status="500"} 1.0') and served.metric("request_seconds_count 1.0")

    run(main())


def test_a_client_that_leaves_while_it_sends() -> None:
    async def main() -> None:
        served, client = Served(), Client(b"")
        client._incoming.get_nowait()
        client.leave()
        await served.call("/v1/chat/completions", client=client)
        assert client.sent == [] and served.to_executor == [] and served.metric("tailrace_disconnects_total 1.0")

    run(main())


# -------------------------------------------------------------------------------- who is not admitted


def assert_refused(client: Client) -> None:
    assert client.status == 503 and client.headers[b"retry-after"] == b"5"
    assert (
        client.json()["error"]["message"] == "The server is draining."
        and client.json()["error"]["code"] == "overloaded"
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_nobody_is_admitted_while_the_server_ends(path: str) -> None:
    async def main() -> None:
        served = Served()
        served.state.draining = True
        assert_refused(await served.call(path, CHAT))
        health = await served.call("/health", method="GET")
        assert health.status == 503 and health.json()["status"] == "draining" and health.json()["open_requests"] == 0
        assert served.metric('tailrace_refused_requests_total{reason="unready"} 1.0')
        assert (await served.call("/live", method="GET")).status == 200
        assert (await served.call("/tokenize", {"prompt": "a"})).status == 200

    run(main())


def test_the_most_final_reason_is_given() -> None:
    state = ServerState()
    assert state.unready is None
    state.restarting = "restarting its executor"
    assert state.unready == "restarting its executor"
    state.draining = True
    assert state.unready == "draining"
    state.ending = "all workers are gone"
    assert state.unready == "ending: all workers are gone"
    with pytest.raises(AttributeError):
        state.unready = "anything"  # type: ignore[misc]


def test_nor_is_who_was_being_tokenized() -> None:
    """Otherwise the request would be opened behind the drain, and cut off without a word."""

    async def main() -> None:
        served = Served()
        tokenize = served.prompts.texts

        async def slow(*arguments: Any) -> list[list[int]]:
            served.state.draining = True
            return await tokenize(*arguments)

        served.prompts.texts = slow  # type: ignore[method-assign]
        assert_refused(await served.call("/v1/completions", {"prompt": "a"}))
        assert served.to_executor == [] and served.proxy.open_requests == 0

    run(main())


# -------------------------------------------------------------------------------- too much at once


def too_many(client: Client) -> bool:
    error = client.json()["error"]
    return client.status == 429 and client.headers[b"retry-after"] == b"1" and error["type"] == "rate_limit_error"


GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "Hi", "store": False},
}


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [True, False])
def test_one_more_request_than_may_be_open(path: str, stream: bool) -> None:
    async def main() -> None:
        served = Served(max_requests=2)
        calls = [asyncio.create_task(served.call(path, GENERATING[path])) for _ in range(2)]
        while len(served.to_executor) < 2:
            await asyncio.sleep(0.001)
        assert too_many(await served.call(path, {**GENERATING[path], "stream": stream}))
        assert too_many(await served.call("/tokenize", {"prompt": "a"}))
        assert (await served.call("/health", method="GET")).status == 200
        assert served.metric('tailrace_refused_requests_total{reason="requests"} 2.0')
        for number in range(2):
            served.answer(b"{}", REQUEST_END | BODY, number)
        await asyncio.gather(*calls)
        assert (await served.call("/tokenize", {"prompt": "a"})).status == 200

    run(main())


def test_requests_that_are_being_tokenized_count() -> None:
    async def main() -> None:
        served, gate = Served(max_requests=1), asyncio.Event()
        tokenize = served.prompts.texts

        async def slow(*arguments: Any) -> list[list[int]]:
            await gate.wait()
            return await tokenize(*arguments)

        served.prompts.texts = slow  # type: ignore[method-assign]
        first = asyncio.create_task(served.call("/v1/completions", {"prompt": "a" * 600}))
        await asyncio.sleep(0)
        assert too_many(await served.call("/v1/completions", {"prompt": "b"}))
        gate.set()
        assert (await first).status == 400
        assert (await served.call("/tokenize", {"prompt": "a"})).status == 200

    run(main())


def test_those_that_are_still_being_sent_do_not() -> None:
    """Whoever sends a body byte by byte would keep everybody out."""

    async def main() -> None:
        served, slow = Served(max_requests=1), Client(b"")
        slow._incoming.get_nowait()
        call = asyncio.create_task(served.call("/v1/completions", client=slow))
        await asyncio.sleep(0)
        assert (await served.call("/tokenize", {"prompt": "a"})).status == 200
        slow.leave()
        await call

    run(main())


def test_those_that_a_client_has_left_do_until_their_end_is_confirmed() -> None:
    async def main() -> None:
        served, client = Served(max_requests=1), Client(json.dumps(CHAT).encode())
        call = asyncio.create_task(served.call("/v1/chat/completions", client=client))
        await served.submitted.wait()
        client.leave()
        await call
        assert too_many(await served.call("/v1/chat/completions", CHAT))
        served.answer(b"", REQUEST_END)
        assert (await served.call("/tokenize", {"prompt": "a"})).status == 200

    run(main())


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("reason", "status"), [("queue", 429), ("timeout", 503)])
def test_a_request_that_the_executor_rejects(path: str, stream: bool, reason: str, status: int) -> None:
    """With the status, also where a stream was asked for: nothing has been sent yet."""

    async def main() -> None:
        served = Served()
        call = asyncio.create_task(served.call(path, {**GENERATING[path], "stream": stream}))
        await served.submitted.wait()
        served.proxy.receive(Rejected(served.request.rid, reason))
        client = await call
        error = client.json()["error"]
        assert client.status == status and int(client.headers[b"retry-after"]) >= 1
        assert error["type"] == ("rate_limit_error" if status == 429 else "overloaded_error")
        assert client.headers[b"content-type"] == b"application/json"
        assert served.metric(f'tailrace_refused_requests_total{{reason="{reason}"}} 1.0')
        assert served.proxy.open_requests == 0 and not any(isinstance(sent, Abort) for sent in served.to_executor)

    run(main())


def test_an_executor_that_takes_nothing() -> None:
    async def main() -> None:
        served = Served()

        def full(message: Any) -> None:
            raise ResultError("the executor does not take requests")

        served.proxy.connect_in_process(full)
        client = await served.call("/v1/chat/completions", {**CHAT, "stream": True})
        assert client.status == 503 and client.headers[b"retry-after"] == b"5"
        assert client.json()["error"]["message"] == "The request was refused: the executor does not take requests."
        assert served.metric('tailrace_refused_requests_total{reason="queue"} 1.0')
        assert served.proxy.open_requests == 0

    run(main())


# -------------------------------------------------------------------------------- clients that do not read


class StoppedPipe(Pipe):
    """A transport of which nobody takes anything."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def write(self, data: bytes) -> None:
        raise AssertionError("this client takes nothing")

    def abort(self) -> None:
        super().abort()
        self._client.leave()


def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        served, client = Served(client_buffer_bytes=100), Client(json.dumps({**CHAT, "stream": True}).encode())
        pipe = StoppedPipe(client)
        outlet = served.app.outlets.opened(pipe)
        call = asyncio.create_task(
            served.call("/v1/chat/completions", client=client, state={KEY: outlet}, x_request_id="mine")
        )
        await served.submitted.wait()
        served.answer(b"data: 1\n\n")
        await client.arrived.wait()
        pipe.size = 101
        served.answer(b"data: 2\n\n")
        await call
        assert pipe.aborted and served.to_executor[1:] == [Abort(served.request.rid)]
        assert served.metric('tailrace_slow_clients_total{limit="bytes"} 1.0')
        assert served.metric('status="499"} 1.0') and b"data: 2" not in client.body

    run(main())
    assert "request 'mine': its client is too slow (bytes)" in caplog.text


def test_an_idle_stream_gets_comments_between_its_events() -> None:
    async def main() -> None:
        served, client = Served(keep_alive_interval=0.01), Client(json.dumps({**CHAT, "stream": True}).encode())
        call = asyncio.create_task(served.call("/v1/chat/completions", client=client))
        await served.submitted.wait()
        served.answer(b"data: 1\n\n")
        while client.body.count(b": ping\n\n") < 2:
            await asyncio.sleep(0.001)
        served.answer(b"data: [DONE]\n\n", REQUEST_END)
        await call
        assert client.body.replace(b": ping\n\n", b"") == b"data: 1\n\ndata: [DONE]\n\n"

    run(main())


def test_a_body_that_is_too_large() -> None:
    client = run(Served(max_body_bytes=10).call("/v1/completions", b" " * 11))
    assert client.status == 413 and client.json()["error"]["code"] == "payload_too_large"


def test_a_large_body_is_parsed_in_a_thread() -> None:
    """It must not delay anybody's next chunk; what is wrong with it is said all the same."""
    text = "x" * 400_000
    client = run(Served().call("/v1/completions", {"prompt": text, "nope": 1}))
    assert client.status == 400 and client.json()["error"]["param"] == "nope"
    client = run(Served().call("/v1/completions", {"prompt": text}))
    assert client.status == 400 and client.json()["error"]["code"] == "context_length_exceeded"


def test_health_without_workers() -> None:
    pool = WorkerPool(2, {}, str, lambda worker, address: None, lambda worker: None, lambda reason: None)
    client = run(Served(pool=pool).call("/health", method="GET"))
    assert client.status == 503 and client.json()["status"] == "without post-processing workers"
    assert client.json()["worker_restarts"] == 0


# -------------------------------------------------------------------------------- the other routes


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", b"POST"),
        ("POST", "/v1/models/m", b"GET"),
        ("HEAD", "/tokenize", b"POST"),
        ("PUT", "/live", b"GET"),
    ],
)
def test_wrong_methods(method: str, path: str, allow: bytes) -> None:
    client = run(Served().call(path, method=method))
    assert client.status == 405 and client.headers[b"allow"] == allow
    assert client.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/models/m", "/v1/models/a/b"])
def test_the_models_card(path: str) -> None:
    served = Served(replace(FACTS, model=path.removeprefix("/v1/models/")))
    card = run(served.call(path, method="GET")).json()
    assert card["id"] == card["root"] == path.removeprefix("/v1/models/") and card["max_model_len"] == 500
    assert run(served.call("/v1/models", method="GET")).json() == {"object": "list", "data": [card]}
    assert run(served.call("/v1/models/other", method="GET")).status == 404


def test_paths_do_not_grow_the_metrics() -> None:
    served = Served()

    async def main() -> None:
        for i in range(20):
            await served.call(f"/v1/models/{i}", method="GET")
            await served.call(f"/some/{i}", method="GET")

    run(main())
    assert served.metric('path="/v1/models/{model}",status="404"} 20.0') and served.metric(
        'path="other",status="404"} 20.0'
    )


def test_tokenize_and_detokenize() -> None:
    served = Served()

    async def main() -> None:
        answer = (await served.call("/tokenize", {"prompt": "é!", "return_token_strs": True})).json()
        assert answer == {"count": 3, "max_model_len": 500, "tokens": [195, 169, 33], "token_strs": ["�", "�", "!"]}
        assert (await served.call("/tokenize", CHAT)).json()["tokens"] == [72, 105]
        assert (await served.call("/detokenize", {"tokens": [195, 169, 33]})).json() == {"prompt": "é!"}
        wrong = await served.call("/detokenize", {"tokens": [1, 300]})
        assert wrong.status == 400 and "300" in wrong.json()["error"]["message"]

    run(main())


def test_a_long_answer_is_made_in_few_steps_and_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    served, threads = Served(), []
    run_, json_body = Prompts._run, http.json_body

    async def counted(prompts: Prompts, call: Any, short: bool = False) -> Any:
        threads.append("hop")
        return await run_(prompts, call, short)

    def made(value: Any) -> bytes:
        threads.append(threading.current_thread().name.partition("_")[0])
        return json_body(value)

    monkeypatch.setattr(Prompts, "_run", counted)
    monkeypatch.setattr(app, "json_body", made)
    answer = run(served.call("/tokenize", {"prompt": "ab" * 1000, "return_token_strs": True})).json()
    assert answer["tokens"] == [97, 98] * 1000 and answer["token_strs"] == ["a", "b"] * 1000
    assert threads == ["hop", "hop", "hop", "prompts"]


def test_version() -> None:
    assert run(Served().call("/version", method="GET")).json()["version"].count(".") == 2


def test_other_kinds_of_connection_are_ignored() -> None:
    async def main() -> None:
        client = Client(b"")
        await Served().app({"type": "lifespan"}, client.receive, client.send)
        assert client.sent == []

    run(main())
