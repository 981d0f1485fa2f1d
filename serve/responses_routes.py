"""The HTTP routes of the Responses API: ``POST /v1/responses``, ``GET`` and ``DELETE /v1/responses/{id}``.

What makes a response retrievable is its document, which a worker writes and this process hands on unread. So a stored
response is read once, from the bytes of its end: the unary body, or the last event of its stream. It is stored before
those bytes are sent: a client that answers at once with ``previous_response_id`` must find it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import PydanticCustomError
from starlette.types import Receive, Scope, Send

from serve.admission import ServerFacts, check_model
from serve.errors import BadRequestError
from serve.gateway import Gateway
from serve.http import JSON, Header, send_body
from serve.prompts import Prompts
from serve.responses_admission import ENDPOINT, admit_response, own_names
from serve.responses_messages import chat_request, check_calls
from serve.responses_protocol import Item, ItemReference, ResponsesRequest, item_of
from serve.responses_store import ResponseStore, StoredResponse
from serve.streams import ClientStream

Handler = Callable[[Scope, Receive, Send, list[Header]], Awaitable[int]]

_ONE = ENDPOINT + "/"
#: The events that end a stream with something to come back to.
_ENDINGS = (b"event: response.completed\ndata: ", b"event: response.incomplete\ndata: ")


class ResponsesRoutes:
    """The routes of responses, and the store behind them."""

    def __init__(self, gateway: Gateway, prompts: Prompts, facts: ServerFacts, store: ResponseStore) -> None:
        self._gateway, self._prompts, self._facts, self._store = gateway, prompts, facts, store

    def match(self, path: str) -> Mapping[str, Handler] | None:
        """Method -> handler for a path of ours, else None."""
        if path == ENDPOINT:
            return {"POST": self._create}
        if path.startswith(_ONE) and "/" not in path.removeprefix(_ONE):
            return {"GET": self._retrieve, "DELETE": self._delete}
        return None

    @staticmethod
    def label(path: str) -> str:
        """The route of a path of ours, for metrics: a label per id would let clients grow the registry."""
        return ENDPOINT if path == ENDPOINT else _ONE + "{id}"

    # -------------------------------------------------------------------------------- create

    async def _create(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        self._gateway.begin(scope)
        request = await self._gateway.parsed(ResponsesRequest, scope, receive)
        check_model(request.model, self._facts)
        keep = self._keeps(request)
        before = self._store.previous(request.previous_response_id)
        history = _parsed_items(before.items if before is not None else (), "previous_response_id")
        plain = self._resolve(request)
        check_calls(request.input, history)
        with own_names():
            chat = await self._prompts.parse(lambda: chat_request(request, history))  # a conversation may be long
            prompt, ids = await self._prompts.chat(chat)
        admitted = admit_response(
            request,
            chat,
            prompt=prompt,
            prompt_ids=ids,
            facts=self._facts,
            minted=self._gateway.mint("resp_"),
            stored=keep,
        )
        stream = _KeepingStream(lambda document: self._keep(document, plain, before)) if keep else ClientStream()
        return await self._gateway.answer(admitted, request.stream, scope, receive, send, headers, stream)

    def _keeps(self, request: ResponsesRequest) -> bool:
        """Whether the response will be stored: unless the client says no; only an explicit yes is refused."""
        if request.store and not self._store.enabled:
            raise BadRequestError(
                "store is not supported: this server stores no responses.", param="store", code="unsupported_parameter"
            )
        return request.store is not False and self._store.enabled

    def _resolve(self, request: ResponsesRequest) -> list[Mapping[str, Any]]:
        """Put stored items in the place of references to them; returns the input as plain data."""
        plain = self._store.resolve(request.input_as_sent())
        if any(isinstance(item, ItemReference) for item in request.input):
            request.input = _parsed_items(plain, "input")
        return plain

    def _keep(self, document: bytes, items: Sequence[Mapping[str, Any]], before: StoredResponse | None) -> None:
        self._store.put(document, items, before)

    # -------------------------------------------------------------------------------- stored responses

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        if b"stream=true" in scope.get("query_string", b""):
            message = "stream is not supported: a stored response is not streamed again."
            raise BadRequestError(message, param="stream", code="unsupported_parameter")
        await send_body(send, 200, self._store.document(_id(scope)), [JSON, *headers])
        return 200

    async def _delete(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        self._store.document(_id(scope))
        self._store.delete(_id(scope))
        body = orjson.dumps({"id": _id(scope), "object": "response", "deleted": True})
        await send_body(send, 200, body, [JSON, *headers])
        return 200


def _id(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(_ONE)


def _parsed_items(items: Sequence[Mapping[str, Any]], where: str) -> list[Item]:
    """Items of the store. What the model said may be no valid input, and outside of a body nothing words the refusal:
    BadRequestError."""
    try:
        return [item_of(item, f"{where}.{index}") for index, item in enumerate(items)]
    except PydanticCustomError as error:
        said = error.context or {}
        message = f"{said['param']} {said['message']}."
        raise BadRequestError(message, param=said["param"], code="invalid_value") from error


class _KeepingStream(ClientStream):
    """A stream whose end is read before it is sent. keep: takes the response object, as JSON."""

    __slots__ = ("_keep",)

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        super().__init__()
        self._keep = keep

    async def next(self) -> bytes:
        """All bytes that have gathered, b"" when the response is over or its client gone."""
        part = await super().next()
        if part and self.ended and not self.failed and (document := _document(part, self.whole)):
            self._keep(document)
        return part


def _document(part: bytes, whole: bool) -> bytes:
    """The response object in the last bytes of a response: the body, or what the last event holds; b"" without one.

    Events are never cut: bytes gather by whole payloads, and the last payload has the last event.
    """
    if whole:
        return part
    for ending in _ENDINGS:
        if (at := part.rfind(ending)) >= 0:
            return orjson.dumps(orjson.loads(part[at + len(ending) :])["response"])
    return b""
