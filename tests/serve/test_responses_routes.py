"""The routes of the Responses API, through OpenAI's own client: streams, unary bodies, conversations that go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from executor.engines.base import StepRow
from executor.messages import Open, StepRecords
from executor.proxy import GenerationExecutor
from executor.request import GenerationRequest
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from serve import responses_routes
from serve.errors import ApiError, NotFoundError
from serve.gateway import Gateway, ServerState
from serve.http import Header, note_arrival, send_error
from serve.post_processors import POST_PROCESSORS
from serve.prompts import Prompts
from serve.responses_protocol import Item, item_of
from serve.responses_routes import ResponsesRoutes
from serve.responses_store import ResponseStore
from tests.helpers import FACTS

HERMES = replace(FACTS, tool_parser="hermes")
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "a"}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": False}


class Scripted(GenerationExecutor):
    """An executor that answers each request at once with the next of its texts, one character per step."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._texts = list(texts)
        self._rids = iter(range(1000))
        self.requests: list[GenerationRequest] = []
        self.on_open: Callable[[], object] = lambda: None

    def mint(self) -> int:
        return next(self._rids)

    def open(self, request: GenerationRequest, sink: Any) -> None:
        self.requests.append(request)
        self.on_open()
        text, last = self._texts.pop(0), "stop"
        worker = PostprocWorker(Vocabulary.text(), POST_PROCESSORS)
        rows = [StepRow(request.rid, 0, [ord(char)]) for char in text]
        steps = [StepRecords([], [], [], [], opens=[Open(request.rid, 0, 0, request.spec)])]
        steps += [StepRecords.build([row]) for row in (*rows, StepRow(request.rid, 0, (), last))]
        for step in steps:
            for _, emissions in worker.receive([step]).emissions:
                for row in emissions.rows():
                    sink.feed(row[5], row[4])


class Rendered(Prompts):
    """Prompts that are the messages themselves, as JSON."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []

    async def chat(self, request: Any) -> tuple[str, list[int]]:
        self.seen.append(request.template_messages())
        return json.dumps(self.seen[-1]), [1, 2, 3]

    async def parse(self, parser: Callable[[], Any]) -> Any:
        return parser()


class Server:
    """An ASGI application of these routes alone."""

    def __init__(self, texts: Sequence[str], store: ResponseStore | None = None, draining: bool = False) -> None:
        self.executor, self.prompts = Scripted(texts), Rendered()
        self.store = store if store is not None else ResponseStore()  # an empty one is false
        self.first_chunks: list[float] = []
        state = ServerState(draining=draining)
        self.gateway = Gateway(self.executor, self.prompts, state, observe=self.first_chunks.append)
        self.routes = ResponsesRoutes(self.gateway, self.prompts, HERMES, self.store)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[Header] = []
        note_arrival(scope)
        try:
            methods = self.routes.match(scope["path"])
            if methods is None or scope["method"] not in methods:
                raise NotFoundError(f"There is no {scope['path']}.")
            await methods[scope["method"]](scope, receive, send, headers)
        except ApiError as error:
            await send_error(send, error, headers)
        finally:
            self.gateway.leave(scope)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=server)
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http, max_retries=0)


def run(server: Server, use: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with client_of(server) as client:
            await use(client)

    asyncio.run(main())


def test_a_unary_response() -> None:
    server = Server(["Hello 🙂"])

    async def use(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(model="m", input="Hi", instructions="Be brief.")
        assert response.output_text == "Hello 🙂" and response.status == "completed" and response.id.startswith("resp_")
        assert response.usage is not None and response.usage.input_tokens == 3
        again = await client.responses.retrieve(response.id)
        assert again == response

    run(server, use)
    assert server.prompts.seen == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]]


def test_a_stream() -> None:
    server = Server(["Hello 🙂"])

    async def use(client: openai.AsyncOpenAI) -> None:
        async with client.responses.stream(model="m", input="Hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert kinds.count("response.output_text.delta") == len("Hello 🙂")
        assert final.output_text == "Hello 🙂"
        assert (await client.responses.retrieve(final.id)).output_text == "Hello 🙂"

    run(server, use)
    assert len(server.first_chunks) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_with_a_call_goes_on_from_the_stored_response(stream: bool) -> None:
    server = Server([CALL, "It is 21.", "You are welcome."])

    async def ask(client: openai.AsyncOpenAI, **body: Any) -> Any:
        if not stream:
            return await client.responses.create(model="m", tools=[TOOL], **body)
        async with client.responses.stream(model="m", tools=[TOOL], **body) as events:
            return await events.get_final_response()

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await ask(client, input="Search a.", instructions="Only now.")
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "search", {"q": "a"})
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
        second = await ask(client, input=result, previous_response_id=first.id)
        third = await ask(client, input="Thanks.", previous_response_id=second.id)
        assert third.output_text == "You are welcome." and third.previous_response_id == second.id

    run(server, use)
    assert [message["role"] for message in server.prompts.seen[0]] == ["system", "user"]
    assert [message["role"] for message in server.prompts.seen[2]] == ["user", "assistant", "tool", "assistant", "user"]
    turn = server.prompts.seen[2][1]
    assert turn["tool_calls"][0]["function"] == {"name": "search", "arguments": {"q": "a"}}


def test_the_clients_own_history_works_the_same_and_so_do_references() -> None:
    server = Server([CALL, "It is 21.", "Again 21."])

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", tools=[TOOL], input="Search a.")
        (call,) = first.output
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        for said in (call.model_dump(exclude_none=True), {"type": "item_reference", "id": call.id}):
            items: Any = [{"role": "user", "content": "Search a."}, said, result]
            await client.responses.create(model="m", tools=[TOOL], input=items)

    run(server, use)
    assert server.prompts.seen[1] == server.prompts.seen[2]


def test_a_deleted_response_is_gone() -> None:
    server = Server(["Hello"])

    async def use(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.create(model="m", input="Hi")
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(response.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id: there is no response"):
            await client.responses.create(model="m", input="And?", previous_response_id=response.id)

    run(server, use)


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_that_goes_while_the_next_is_made_is_part_of_its_conversation(stream: bool) -> None:
    server = Server(["One.", "Two.", "Three."])

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", input="1")
        server.executor.on_open = lambda: server.store.delete(first.id)
        second: Any = await client.responses.create(model="m", input="2", previous_response_id=first.id, stream=stream)
        response = [event async for event in second][-1].response if stream else second
        assert server.store.get(first.id) is None
        await client.responses.create(model="m", input="3", previous_response_id=response.id)

    run(server, use)
    assert [message["content"] for message in server.prompts.seen[2]] == ["1", "One.", "2", "Two.", "3"]


def test_a_conversation_goes_on_whatever_its_calls_are_named() -> None:
    name = "f" * 300
    server = Server([CALL.replace("search", name), "So.", "And so."])

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", input="Hi", tools=[TOOL])
        (call,) = first.output
        assert call.type == "function_call" and call.name == name
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        stored: Any = [result]
        await client.responses.create(model="m", tools=[TOOL], input=stored, previous_response_id=first.id)
        sent: Any = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
        await client.responses.create(model="m", tools=[TOOL], input=sent)

    run(server, use)
    assert server.prompts.seen[1] == server.prompts.seen[2]
    assert server.prompts.seen[1][1]["tool_calls"][0]["function"]["name"] == name


def test_a_stored_item_that_is_no_input_is_a_refusal() -> None:
    server = Server([])
    server.store.put(b'{"id": "resp_1", "output": [{"id": "fc_1", "type": "function_call", "call_id": "c"}]}', [])

    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"previous_response_id\.0\.name is required\.") as caught:
            await client.responses.create(model="m", input="Hi", previous_response_id="resp_1")
        assert (caught.value.param, caught.value.code) == ("previous_response_id.0.name", "invalid_value")
        reference: Any = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "fc_1"}]
        with pytest.raises(openai.BadRequestError, match=r"input\.1\.name is required\."):
            await client.responses.create(model="m", input=reference)

    run(server, use)


def test_an_input_without_references_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(value: Any, where: str) -> Item:
        read.append(where)
        return item_of(value, where)

    monkeypatch.setattr(responses_routes, "item_of", counted)
    server = Server(["Hello", "So."])

    async def use(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", input=[{"role": "user", "content": "Hi"}])
        assert read == []
        reference: Any = [{"type": "item_reference", "id": first.output[0].id}]
        await client.responses.create(model="m", input=reference)
        assert read == ["input.0"]

    run(server, use)
    assert server.prompts.seen[1] == [{"role": "assistant", "content": "Hello"}]


def test_what_is_not_to_be_stored_is_not() -> None:
    server = Server(["Hello"])

    async def use(client: openai.AsyncOpenAI) -> None:
        response: Any = await client.responses.create(model="m", input="Hi", store=False)
        assert response.store is False and len(server.store) == 0

    run(server, use)


def test_a_server_that_stores_nothing_says_so_only_when_asked_to() -> None:
    server = Server(["Hello"], ResponseStore(max_responses=0))

    async def use(client: openai.AsyncOpenAI) -> None:
        response: Any = await client.responses.create(model="m", input="Hi")
        assert response.store is False
        with pytest.raises(openai.BadRequestError, match="this server stores no responses"):
            await client.responses.create(model="m", input="Hi", store=True)
        with pytest.raises(openai.NotFoundError, match="this server stores no responses"):
            await client.responses.retrieve(response.id)

    run(server, use)


def test_refusals_have_their_status() -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="model `x` does not exist"):
            await client.responses.create(model="x", input="Hi")
        with pytest.raises(openai.BadRequestError, match="truncation is not supported"):
            await client.responses.create(model="m", input="Hi", truncation="auto")
        with pytest.raises(openai.BadRequestError, match=r"input\.0\.call_id"):
            result: Any = [{"type": "function_call_output", "call_id": "c", "output": "21"}]
            await client.responses.create(model="m", input=result)
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            await client.responses.retrieve("resp_1", stream=True)

    run(Server([]), use)


def test_nobody_is_admitted_while_the_server_is_not_ready() -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match="The server is draining"):
            await client.responses.create(model="m", input="Hi")

    run(Server([], draining=True), use)


def test_paths() -> None:
    routes = Server([]).routes
    assert list(routes.match("/v1/responses") or {}) == ["POST"]
    assert list(routes.match("/v1/responses/resp_1") or {}) == ["GET", "DELETE"]
    assert routes.match("/v1/responses/resp_1/cancel") is None and routes.match("/v1/models") is None
    assert routes.label("/v1/responses") == "/v1/responses"
    assert routes.label("/v1/responses/x") == "/v1/responses/{id}"
