"""The topology, top to bottom: what starts in which order, who watches whom, and how it all ends.

    launcher and front end (this process)
    |- executor             the engine; one child
    |- worker-0 ... N-1     post-processing; the pool starts, watches and replaces them
    `- front-end-0 ... K-1  HTTP, if there is more than one: then it is none of this process's

Start: the address (a taken port is found before a model is loaded), executor, workers, HTTP. End, on SIGTERM or ctrl-C:
nobody new is admitted and /health says so, open streams finish within ``shutdown_timeout``, then HTTP, workers,
executor. A second signal ends at once.

Exit codes: 0 ended by a signal, 1 could not start or lost its executor, all workers or all front ends, 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvloop
from transformers import PreTrainedTokenizerBase

from executor.child import ChildError
from executor.engines.base import EngineInfo
from executor.models import ModelError, ModelFiles, resolve_model
from executor.proxy import GenerationExecutor
from postproc_workers.hook import load_hook
from postproc_workers.pool import WorkerPool
from postproc_workers.replay import POST_PROCESSORS
from serve.access import check_access
from serve.admission import ServerFacts
from serve.children import Children
from serve.config import Config
from serve.executor_seat import ExecutorSeat
from serve.facts import server_facts
from serve.frontend import Frontend, Model
from serve.frontend_pool import FrontendPool
from serve.gateway import ServerState
from serve.listening import listen, reserve
from serve.parsers import check_names
from serve.prompts import Prompts
from serve.run_directory import RunDirectory
from serve.tokenizer_loading import load_tokenizer, worker_tokenizer

logger = logging.getLogger("tailrace.serve")


class StartError(RuntimeError):
    """The server cannot start; the message says why."""


def serve(config: Config) -> int:
    """Run a server until it is asked to end; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # Until the loop takes over, SIGTERM ends like ctrl-C: a conversion in a child process has to be stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if config.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # our banner says the same, and who listens where
    try:
        # What needs no model is looked at before one is loaded.
        config = check_access(config, os.environ)
        _check_hook(config.post_processor_hook)
        check_names(*(None if name == "auto" else name for name in (config.reasoning_parser, config.tool_parser)))
        listener = _listen(config)
        files = _model_files(config)
        return uvloop.run(_run(config, files, listener))
    except (ModelError, StartError, ChildError, ValueError, OSError) as error:
        print(f"tailrace serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # ctrl-C before the loop has taken over signals
        return 0


async def _run(config: Config, files: ModelFiles | None, listener: socket.socket) -> int:
    return await Launcher(config, files, listener).run()


def _check_hook(name: str | None) -> None:
    """Refuse a hook that cannot be imported. What else its module raises keeps its traceback: that shows the line."""
    try:
        load_hook(name)
    except (ImportError, SyntaxError) as error:
        raise StartError(f"post_processor_hook: {name} cannot be imported: {error}") from error


def _say(text: str) -> None:
    print(text, flush=True)


def _listen(config: Config) -> socket.socket:
    take = listen if config.num_serve_frontends == 1 else reserve
    try:
        return take(config.host, config.port)
    except OSError as error:
        raise StartError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from error


def _model_files(config: Config) -> ModelFiles | None:
    """The model's directory; None for the replay engine, which needs a tokenizer only."""
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise StartError(f"--tokenizer: there is no {config.tokenizer}")
    if config.engine == "replay" and config.model is None:
        if config.tokenizer is None:
            raise StartError("--tokenizer is needed with --engine replay, since there is no model to take it from")
        return None
    return resolve_model(config.model, progress=_say)


class Launcher:
    """One server from start to end."""

    def __init__(self, config: Config, files: ModelFiles | None, listener: socket.socket) -> None:
        self._config, self._files, self._listener = config, files, listener
        self._tokenizer_source = Path(config.tokenizer) if config.tokenizer else self._model_dir()
        self._run_dir = RunDirectory.make()
        self._state = ServerState()
        self._children = Children(config, self._run_dir.path)
        #: one of them: the front end in this process, or those that are processes
        self._frontend = Frontend(config, self._state) if config.num_serve_frontends == 1 else None
        self._frontends = self._frontend_pool() if self._frontend is None else None
        self._pool: WorkerPool | None = None
        self._executor: ExecutorSeat | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._fatal: str | None = None

    async def run(self) -> int:
        """Start, serve, drain, stop."""
        self._catch_signals()
        try:
            if await self._unless_stopped(self._start()):
                await self._stop.wait()
                await self._drain()
        finally:
            await self._shut_down()
        if self._fatal is not None:
            print(f"tailrace serve: {self._fatal}", file=sys.stderr)
        return 0 if self._fatal is None else 1

    # -------------------------------------------------------------------------------- start

    async def _start(self) -> None:
        begin = time.monotonic()
        if self._frontend is not None:
            self._frontend.listen(self._children.frontends[0])
        tokenizer, info = await self._load()
        source = worker_tokenizer(tokenizer, self._tokenizer_source, self._run_dir.path)
        worker = self._children.worker_config(info, source, POST_PROCESSORS, self._record_dir())
        await self._start_workers(worker)
        facts = await self._start_http(tokenizer, Model(self._files, self._tokenizer_source, info), worker)
        self._banner(info, facts, time.monotonic() - begin)

    def _frontend_pool(self) -> FrontendPool:
        children = self._children
        return FrontendPool(
            self._config, self._state, self._run_dir.path, children.frontends, children.executor, self._give_up
        )

    @property
    def _told(self) -> GenerationExecutor | FrontendPool:
        """Who has to know which processes there are."""
        if self._frontend is not None:
            return self._frontend.proxy
        assert self._frontends is not None
        return self._frontends

    async def _start_http(
        self, tokenizer: PreTrainedTokenizerBase, model: Model, worker: Mapping[str, Any]
    ) -> ServerFacts:
        alone = self._pool is None
        if self._frontend is not None:
            if alone:
                self._frontend.work_alone(worker)
            return await self._frontend.start(self._listener, tokenizer, model, self._pool)
        assert self._frontends is not None
        prompts = Prompts(tokenizer)
        prompts.close()  # only its template is looked at here: what cannot be served is found before processes start
        facts = server_facts(self._config, model.files, model.info, prompts, model.tokenizer)
        _say(f"starting {len(self._children.frontends)} front ends ...")
        address = self._config.host, self._listener.getsockname()[1]
        await self._frontends.start(address, model, self._pool, worker if alone else None)
        return facts

    async def _load(self) -> tuple[PreTrainedTokenizerBase, EngineInfo]:
        """Tokenizer and executor, at the same time. The first failure ends the start: a broken tokenizer need not wait
        for a model that may take minutes, and the other one is ended too."""
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, self._tokenizer_source))
        tasks: list[asyncio.Task[Any]] = [loading]
        try:
            _say(f"starting the {self._config.engine} engine ...")
            self._executor = ExecutorSeat(
                self._config, self._children.executor, self._children.frontends, await self._engine_args(loading),
                self._told, self._state, self._give_up,
            )  # fmt: skip
            tasks.append(asyncio.create_task(self._executor.start()))
            tokenizer, info = await asyncio.gather(*tasks)
        finally:
            await _end_tasks(tasks)
        return tokenizer, info

    async def _engine_args(self, tokenizer: asyncio.Task[PreTrainedTokenizerBase]) -> dict[str, Any]:
        """Only the replay engine waits for the tokenizer."""
        return self._children.engine_args(self._files, await tokenizer if self._config.engine == "replay" else None)

    async def _start_workers(self, config: Mapping[str, Any]) -> None:
        size, told = self._config.num_postprocess_workers, self._told
        if not size:
            return
        _say(f"starting {size} post-processing worker{'s' if size > 1 else ''} ...")
        self._pool = WorkerPool(
            size, config, self._children.worker, told.worker_joined, told.worker_lost, self._give_up,
            hang_timeout=self._config.hang_timeout,
        )  # fmt: skip
        await self._pool.start()

    def _record_dir(self) -> str | None:
        if self._config.record is None:
            return None
        directory = Path(self._config.record)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"--record: {directory} cannot be made: {error.strerror or error}") from error
        return str(directory.resolve())

    def _model_dir(self) -> Path:
        assert self._files is not None
        return self._files.directory

    def _banner(self, info: EngineInfo, facts: ServerFacts, seconds: float) -> None:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
        scheme = "http" if self._config.ssl_certfile is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        _say(f"\ntailrace serves {facts.model} at {url} (ready after {seconds:.1f} s)\n")
        for line in self._process_tree(info):
            _say(f"  {line}")
        _say(f"  parsers: reasoning {facts.reasoning_parser or 'none'}, tools {facts.tool_parser or 'none'}\n")
        body = {
            "model": facts.model,
            "stream": True,
            "max_tokens": 200,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        }
        key = ' -H "authorization: Bearer $TAILRACE_API_KEY"' if self._config.api_key else ""
        _say(f"  curl -N {url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{json.dumps(body)}'\n")

    def _process_tree(self, info: EngineInfo) -> Iterator[str]:
        assert self._executor is not None
        children: list[tuple[int | str | None, str]] = [
            (self._executor.pid, f"executor ({info.name}, up to {info.max_model_len} tokens)")
        ]
        if self._pool is not None:
            children += [(pid, f"worker-{worker}") for worker, pid in sorted(self._pool.alive.items())]
        else:
            children.append(("", "post-processing in the front end (num_postprocess_workers = 0)"))
        if self._frontends is not None:
            children += [(pid, f"front-end-{number}") for number, pid in sorted(self._frontends.alive.items())]
        yield f"{os.getpid():>8}  {'front end and launcher' if self._frontends is None else 'launcher'}"
        for child in children:
            yield f"{child[0]:>8}  {'`-' if child is children[-1] else '|-'} {child[1]}"

    # -------------------------------------------------------------------------------- watching

    def _give_up(self, reason: str) -> None:
        """Nothing can be served any more: tell every open stream, and end."""
        logger.error("%s", reason)
        self._fatal = self._fatal or reason
        self._state.ending = reason
        self._told.fail_all(reason)
        self._hurry.set()
        self._stop.set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._state.draining = True
        self._stop.set()

    async def _unless_stopped(self, start: Any) -> bool:
        """Await ``start``; False if a signal came first."""
        starting, stopped = asyncio.ensure_future(start), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return False
        starting.result()
        return True

    # -------------------------------------------------------------------------------- end

    async def _drain(self) -> None:
        """Let open streams finish, unless there is a hurry."""
        open_requests, timeout = self._told.open_requests, self._config.shutdown_timeout
        if open_requests and not self._hurry.is_set():
            _say(f"ending: {open_requests} open requests may finish within {timeout:.0f} s; again to end now")
        for frontend in (self._frontend, self._frontends):
            if frontend is not None:
                await frontend.drain(self._hurry, timeout)

    async def _shut_down(self) -> None:
        self._stop.set()  # also after a failed start: an executor that ends from here on does so because we say so
        if self._frontend is not None:
            await self._frontend.stop_http()
        if self._frontends is not None:
            await self._frontends.stop(3.0)
        if self._pool is not None:
            await self._pool.stop(2.0)
        if self._executor is not None:
            await self._executor.stop(5.0)
        if self._frontend is not None:
            self._frontend.close()
        self._listener.close()
        self._run_dir.remove()


async def _end_tasks(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and take what was raised: nobody else will look."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
