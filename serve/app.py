"""The HTTP routes. A request becomes a ``GenerationRequest`` here and is handed to the executor; the bytes that come
back are written as they are: nothing in this process looks into them.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from executor.proxy import GenerationExecutor
from serve.access import Access
from serve.admission import ServerFacts, admit_chat, admit_completion, check_model
from serve.board import Board
from serve.body import MAX_QUOTED
from serve.errors import ApiError, BadRequestError, MethodNotAllowedError, NotFoundError
from serve.gateway import Gateway, ServerState
from serve.http import (
    JSON,
    ClientGone,
    Header,
    json_body,
    note_arrival,
    request_id,
    send_body,
    send_error,
    send_json,
    since_arrival,
)
from serve.limits import ClientLimits
from serve.metrics import CONTENT_TYPE, ServerMetrics, Workers
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serve.openapi import openapi_document
from serve.outlets import Outlets
from serve.playground import Playground
from serve.prompts import Prompts
from serve.responses_routes import ResponsesRoutes
from serve.responses_store import ResponseStore

logger = logging.getLogger("tailrace.serve")


class App:
    """The ASGI application. ``facts`` is what admission knows, ``state`` what the launcher tells it, ``access`` who may
    call; everybody without it."""

    def __init__(
        self,
        proxy: GenerationExecutor,
        prompts: Prompts,
        facts: ServerFacts,
        state: ServerState,
        pool: Workers | None,
        limits: ClientLimits | None = None,
        store: ResponseStore | None = None,
        access: Access | None = None,
        board: Board | None = None,
    ) -> None:
        board = Board.alone() if board is None else board
        self.metrics = ServerMetrics(proxy, pool, state, board)
        self._proxy, self._prompts, self._facts = proxy, prompts, facts
        self._state, self._pool, self._access = state, pool, access
        metrics, limits = self.metrics, ClientLimits() if limits is None else limits
        self.outlets = Outlets(limits, lambda limit: metrics.slow_clients.labels(limit).inc())
        self._gateway = Gateway(
            proxy, prompts, state, limits, observe=metrics.first_chunk.observe,
            refused=lambda reason: metrics.refused.labels(reason).inc(), outlets=self.outlets, board=board,
        )  # fmt: skip
        # An empty store is falsy.
        self._responses = ResponsesRoutes(self._gateway, prompts, facts, ResponseStore() if store is None else store)
        playground = Playground(self._gateway, facts)
        self._document: bytes | None = None
        self._routes: dict[str, dict[str, Callable[[Scope, Receive, Send, list[Header]], Awaitable[int]]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/parse/reasoning": {"POST": playground.reasoning},
            "/parse/tool_calls": {"POST": playground.tool_calls},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/live": {"GET": self._live},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics_text},
            "/openapi.json": {"GET": self._openapi},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request, from the first header to the last byte."""
        if scope["type"] != "http":
            return
        note_arrival(scope)
        label = request_id(scope)
        headers = [(b"x-request-id", label)]
        status = 500  # what the server makes of an exception that is none of ours, and it must be counted too
        try:
            if self._access is not None:
                self._access.check(scope, headers)
            status = await self._dispatch(scope, receive, send, headers)
        except ApiError as error:
            status = error.status
            await send_error(send, error, headers)
        except ClientGone:
            status = 499
        finally:
            self._gateway.leave(scope)
            self._count(scope, status)
            logger.debug("%r %s %r: %d", label.decode("latin-1"), scope["method"], scope["path"], status)

    def _count(self, scope: Scope, status: int) -> None:
        if status == 499:
            self.metrics.disconnects.inc()
        self.metrics.requests.labels(self._label(scope["path"]), str(status)).inc()
        self.metrics.duration.observe(since_arrival(scope))

    def _label(self, path: str) -> str:
        """The route of a path: a label per path would let clients grow the registry."""
        if path in self._routes:
            return path
        if self._responses.match(path) is not None:
            return ResponsesRoutes.label(path)
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        path, method = scope["path"], scope["method"]
        methods = self._routes.get(path) or self._responses.match(path)
        if methods is None and path.startswith("/v1/models/"):
            methods = {"GET": self._model}
        if methods is None:
            raise NotFoundError(f"There is no {path[:MAX_QUOTED]}.")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            headers.append((b"allow", ", ".join(methods).encode()))
            raise MethodNotAllowedError(f"{path[:MAX_QUOTED]} takes {', '.join(methods)}, not {method[:MAX_QUOTED]}.")
        return await handler(scope, receive, send, headers)

    # -------------------------------------------------------------------------------- generation

    async def _chat(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        self._gateway.begin(scope)
        request = await self._gateway.parsed(ChatCompletionRequest, scope, receive)
        check_model(request.model, self._facts)
        prompt, ids = await self._prompts.chat(request)
        minted = self._gateway.mint("chatcmpl-")
        admitted = admit_chat(request, prompt=prompt, prompt_ids=ids, facts=self._facts, minted=minted)
        if request.scaffolding is not None:
            self.metrics.scaffolding.labels(request.scaffolding.method).inc()
        return await self._gateway.answer(admitted, request.stream, scope, receive, send, headers)

    async def _completions(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        self._gateway.begin(scope)
        request = await self._gateway.parsed(CompletionRequest, scope, receive)
        check_model(request.model, self._facts)
        prompts = await self._prompts.texts(request.prompt)
        texts = await self._prompts.echoes(request.prompt) if request.echo else [""] * len(prompts)
        minted = self._gateway.mint("cmpl-")
        admitted = admit_completion(request, prompts=prompts, prompt_texts=texts, facts=self._facts, minted=minted)
        return await self._gateway.answer(admitted, request.stream, scope, receive, send, headers)

    # -------------------------------------------------------------------------------- around it

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        request = await self._gateway.parsed(TokenizeRequest, scope, receive)
        check_model(request.model, self._facts)
        if request.messages:
            _, ids = await self._prompts.chat(request)
        else:
            ids = (await self._prompts.texts([request.prompt or ""], request.special_tokens))[0]
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._facts.max_model_len, "tokens": ids}
        answer["token_strs"] = await self._prompts.strings(ids) if request.return_token_strs else None
        return await self._send_large(send, answer, headers)

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        request = await self._gateway.parsed(DetokenizeRequest, scope, receive)
        check_model(request.model, self._facts)
        last = self._facts.vocab_size - 1
        if request.tokens and max(request.tokens) > last:
            message = f"tokens holds token id {max(request.tokens)}; the model's ids are 0 to {last}."
            raise BadRequestError(message, param="tokens", code="invalid_value")
        return await self._send_large(send, {"prompt": await self._prompts.decode(request.tokens)}, headers)

    async def _send_large(self, send: Send, answer: dict[str, Any], headers: list[Header]) -> int:
        """An answer as long as a client's prompt: made in a thread, as the prompt was."""
        await send_body(send, 200, await self._prompts.parse(lambda: json_body(answer)), [JSON, *headers])
        return 200

    async def _models(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        return await send_json(send, {"object": "list", "data": [self._model_card()]}, headers)

    async def _model(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        check_model(scope["path"].removeprefix("/v1/models/"), self._facts)
        return await send_json(send, self._model_card(), headers)

    def _model_card(self) -> dict[str, Any]:
        card = {"id": self._facts.model, "object": "model", "created": int(self._state.started), "owned_by": "tailrace"}
        return card | {"root": self._facts.root or self._facts.model, "max_model_len": self._facts.max_model_len}

    async def _health(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        """503 with the reason while nobody is admitted or no worker lives."""
        reason = self._state.unready
        workers = self._pool.alive if self._pool is not None else {}
        if reason is None and self._pool is not None and not workers:
            reason = "without post-processing workers"
        answer = {
            "status": reason or "ok",
            "workers": len(workers),
            "open_requests": self._gateway.open_requests,
            "executor_restarts": self._state.executor_restarts,
        }
        if self._pool is not None:
            answer |= {"worker_restarts": self._pool.restarts, "paused_workers": self._pool.paused}
        return await send_json(send, answer, headers, 200 if reason is None else 503)

    async def _live(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        return await send_json(send, {"status": "live"}, headers)

    async def _version(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        return await send_json(send, {"version": importlib.metadata.version("tailrace")}, headers)

    async def _metrics_text(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        await send_body(send, 200, self.metrics.render(), [(b"content-type", CONTENT_TYPE.encode()), *headers])
        return 200

    async def _openapi(self, scope: Scope, receive: Receive, send: Send, headers: list[Header]) -> int:
        if self._document is None:  # made when somebody asks: most servers never are
            secured, version = self._access is not None and self._access.secured, importlib.metadata.version("tailrace")
            self._document = json_body(openapi_document(self._facts, version=version, secured=secured))
        await send_body(send, 200, self._document, [JSON, *headers])
        return 200
