"""A front end process: HTTP for the clients that the kernel gives it.

Config (see ``executor.child``): ``number`` of its seat; ``settings``, those of ``Config``; ``files``, ``tokenizer`` and
``info`` for ``Model``; ``address`` to bind and ``executor`` to send to; ``worker``, the config of the worker that it is
itself, or null; ``host`` and ``port``; ``board`` and ``responses``, files that all front ends share; ``started``, the
server's age; ``roster``, as of its spawn. Behind the config come further rosters, one a line (``serve/roster.py``).

SIGTERM: nobody new is admitted, open streams may finish within ``shutdown_timeout``; with ``hurry`` in the roster they
end at once. Run as ``python -m serve.frontend_process`` by ``serve/frontend_pool.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from executor.child import Child, run_child
from executor.engines.base import EngineInfo
from executor.models import ModelFiles
from serve.board import Board
from serve.config import Config
from serve.frontend import Frontend, Model
from serve.gateway import ServerState
from serve.listening import listen
from serve.responses_store import ResponseStore
from serve.roster import Follower, RemotePool, Roster
from serve.tokenizer_loading import load_tokenizer


class FrontendProcess:
    """What surrounds a ``Frontend`` that is a process."""

    def __init__(self, child: Child) -> None:
        self._child, config = child, child.config
        self._config = Config.from_plain(config["settings"])
        self._state = ServerState(started=config["started"])
        board = Board.open(config["board"], config["number"])
        self._frontend = Frontend(self._config, self._state, config["number"], board)
        self._pool = RemotePool()
        self._follower = Follower(self._frontend.proxy, self._state, self._pool, config["executor"])
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        #: of a line of the parent's that has not come whole
        self._rest = b""

    async def run(self) -> None:
        """Serve until asked to end, or until the parent is gone."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        try:
            await self._start()
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)
            self._child.ready({})
            self._beat()
            await self._stop.wait()
            await self._frontend.drain(self._hurry, self._config.shutdown_timeout)
        finally:
            await self._frontend.stop_http()
            self._frontend.close()

    async def _start(self) -> None:
        config = self._child.config
        self._frontend.listen(config["address"])
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(config["tokenizer"]))
        self._follow(config["roster"])
        if config["worker"] is not None:
            self._frontend.work_alone(config["worker"])
        listener = listen(config["host"], config["port"], shared=True)
        pool = self._pool if config["worker"] is None else None
        await self._frontend.start(listener, tokenizer, _model(config), pool, ResponseStore(path=config["responses"]))

    def _follow(self, line: bytes | str) -> None:
        roster = Roster.decode(line)
        self._follower.follow(roster)
        if roster.hurry:
            self._hurry.set()

    def _on_stdin(self) -> None:
        """A roster, or the parent's end: then nobody is left to answer for."""
        news = os.read(sys.stdin.fileno(), 1 << 16)
        if not news:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._hurry.set()
            self._stop.set()
            return
        *lines, self._rest = (self._rest + news).split(b"\n")
        for line in lines:
            self._follow(line)

    def _on_term(self) -> None:
        self._state.draining = True
        self._stop.set()

    def _beat(self) -> None:
        self._child.beat()
        self._frontend.tell()
        asyncio.get_running_loop().call_later(self._child.beat_interval / 2, self._beat)


def _model(config: dict[str, Any]) -> Model:
    files = config["files"]
    info = config["info"] | {name: tuple(config["info"][name]) for name in ("supported", "eos_token_ids")}
    known = None if files is None else ModelFiles(Path(files["directory"]), files["name"])

    return Model(known, Path(config["tokenizer"]), EngineInfo(**info))


def main(child: Child) -> None:
    """One event loop, from the first socket to the last."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    uvloop.run(FrontendProcess(child).run())


if __name__ == "__main__":
    sys.exit(run_child(main))
