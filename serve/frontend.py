"""A front end: HTTP on one side, the executor and the workers on the other. If it is the only one it lives in the
launcher's process; else each has a process of its own (``frontend_process.py``)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from executor.engines.base import EngineInfo
from executor.models import ModelFiles
from executor.proxy import GenerationExecutor
from postproc_workers.link import InProcessLink
from serve.access import Access
from serve.admission import ServerFacts
from serve.app import App
from serve.board import Board
from serve.config import Config
from serve.facts import server_facts
from serve.gateway import ServerState
from serve.http_server import HttpServer
from serve.limits import ClientLimits
from serve.metrics import Workers
from serve.prompts import Prompts
from serve.responses_store import ResponseStore


@dataclass(frozen=True, slots=True)
class Model:
    """What is served. files: None without weights; tokenizer: where it is; info: what the engine says of itself."""

    files: ModelFiles | None
    tokenizer: Path
    info: EngineInfo


class Frontend:
    """One front end, from ``listen`` to ``stop``.

    proxy: its end of the channel to the executor, which has to be told who is there. state: how the server stands.
    board: what the front ends tell each other.
    """

    def __init__(self, config: Config, state: ServerState, number: int = 0, board: Board | None = None) -> None:
        self.proxy = GenerationExecutor(number)
        self.state = state
        self._config, self._number = config, number
        self._board = Board.alone() if board is None else board
        self._prompts: Prompts | None = None
        self._http: HttpServer | None = None
        self._link: InProcessLink | None = None

    def listen(self, address: str) -> None:
        """Open the socket on which the workers' answers come; see ``GenerationExecutor.listen``."""
        self.proxy.listen(address)

    def work_alone(self, worker: Mapping[str, Any]) -> None:
        """Do the post-processing here. worker: a worker's config. Its id is this front end's number, also for whoever
        takes its place: nothing that it has sent outlives it."""
        address = f"{worker['frontends'][self._number]}-worker"
        self._link = InProcessLink({**worker, "worker": self._number, "address": address}, self.proxy)
        self._link.start()

    async def start(
        self,
        listener: socket.socket,
        tokenizer: PreTrainedTokenizerBase,
        model: Model,
        pool: Workers | None,
        store: ResponseStore | None = None,
    ) -> ServerFacts:
        """Serve HTTP; returns what is served. pool: what is known of the workers' lives, None without worker processes.
        store: of responses, where it is shared. OSError if it fails, ValueError for settings that cannot be."""
        config = self._config
        self._prompts = Prompts(tokenizer)
        facts = server_facts(config, model.files, model.info, self._prompts, model.tokenizer)
        app = App(
            self.proxy, self._prompts, facts, self.state, pool, ClientLimits.of(config), store,
            access=Access(config), board=self._board,
        )  # fmt: skip
        self._http = HttpServer(app, config, app.outlets)
        await self._http.start(listener)
        return facts

    def tell(self) -> None:
        """Keep the board up to date; to be called now and then."""
        self._board.follow(self.proxy)

    async def drain(self, hurry: asyncio.Event, timeout: float) -> None:
        """Let open streams finish, unless there is a hurry; then end the others."""
        if self.proxy.open_requests and not hurry.is_set():
            waits = [asyncio.ensure_future(self.proxy.wait_idle()), asyncio.ensure_future(hurry.wait())]
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        self.proxy.fail_all("the server is shutting down")

    async def stop_http(self) -> None:
        """Close all connections, and the threads behind them; idempotent."""
        if self._http is not None:
            await self._http.stop(3.0)
        if self._prompts is not None:
            self._prompts.close()

    def close(self) -> None:
        """Close the sockets; idempotent."""
        if self._link is not None:
            self._link.close()
        self.proxy.close()
