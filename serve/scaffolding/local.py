"""An executor and its workers without HTTP: what a script needs that generates in its own process.

    async with LocalExecutor(Config()) as local:
        llm = ScaffoldingLlm(controller, {GENERATION: local.worker()})

The same processes as a server's, started and watched by the same seats: a worker or executor that dies is replaced, and
its generations go on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from transformers import PreTrainedTokenizerBase

from executor.engines.base import EngineInfo
from executor.models import ModelFiles, resolve_model
from executor.proxy import GenerationExecutor
from postproc_workers.link import InProcessLink
from postproc_workers.pool import WorkerPool
from serve.admission import ServerFacts
from serve.children import Children
from serve.config import Config
from serve.executor_seat import ExecutorSeat
from serve.facts import server_facts
from serve.gateway import ServerState
from serve.prompts import Prompts
from serve.run_directory import RunDirectory
from serve.scaffolding.executor_worker import ExecutorWorker
from serve.tokenizer_loading import load_tokenizer, worker_tokenizer


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class LocalExecutor:
    """config: a server's; what it says of HTTP, recordings and formats has no effect. Nor has ``queue_timeout``: it is
    there for clients who would rather be refused than wait, and a script that starts a thousand generations at once
    wants them all, however long the last one waits for its turn. progress: told, in words for a user, what takes time.

    executor, prompts, facts: ready within the block. failure: why there is no executor or worker any more; every open
    generation has failed with it. Entering raises ModelError, TokenizerError, ChildError, ValueError or OSError for
    what cannot start, and leaves no process.
    """

    executor: GenerationExecutor
    prompts: Prompts
    facts: ServerFacts

    def __init__(self, config: Config | None = None, progress: Callable[[str], None] = _to_stderr) -> None:
        given = Config() if config is None else config
        self._config = dataclasses.replace(given, queue_timeout=0.0, num_serve_frontends=1)
        self._say = progress
        self.failure: str | None = None
        #: what has been started, to be ended in the opposite order
        self._started = AsyncExitStack()
        self._children = Children(self._config, Path())

    def worker(self) -> ExecutorWorker:
        """A worker over this executor."""
        return ExecutorWorker(self.executor, self.prompts, self.facts, lambda: self.failure)

    async def __aenter__(self) -> LocalExecutor:
        async with AsyncExitStack() as started:
            await self._start(started)
            self._started = started.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_up("the executor was ended")  # nobody waits for what will not come
        await self._started.aclose()

    async def _start(self, started: AsyncExitStack) -> None:
        run_dir = RunDirectory.make()
        started.callback(run_dir.remove)
        self._children = Children(self._config, run_dir.path)
        files = await asyncio.to_thread(self._files)
        source = files.directory if files and not self._config.tokenizer else Path(self._config.tokenizer or "")
        tokenizer = await asyncio.to_thread(load_tokenizer, source)
        self.executor = GenerationExecutor()
        self.executor.listen(self._children.frontends[0])
        started.callback(self.executor.close)
        info = await self._start_executor(files, tokenizer, started)
        await self._start_workers(info, worker_tokenizer(tokenizer, source, run_dir.path), started)
        self.prompts = Prompts(tokenizer)
        started.callback(self.prompts.close)
        self.facts = server_facts(self._config, files, info, self.prompts, source)

    def _files(self) -> ModelFiles | None:
        """The model's; None for the replay engine, which needs a tokenizer only."""
        if self._config.engine != "replay" or self._config.model is not None:
            return resolve_model(self._config.model, progress=self._say)
        if self._config.tokenizer is None:
            raise ValueError("tokenizer: the replay engine needs one, since there is no model to take it from")
        return None

    async def _start_executor(
        self, files: ModelFiles | None, tokenizer: PreTrainedTokenizerBase, started: AsyncExitStack
    ) -> EngineInfo:
        self._say(f"starting the {self._config.engine} engine ...")
        children, args = self._children, self._children.engine_args(files, tokenizer)
        seat = ExecutorSeat(
            self._config, children.executor, children.frontends, args, self.executor, ServerState(), self._give_up
        )  # fmt: skip
        started.push_async_callback(seat.stop, 5.0)
        return await seat.start()

    async def _start_workers(self, info: EngineInfo, tokenizer: str, started: AsyncExitStack) -> None:
        size, children = self._config.num_postprocess_workers, self._children
        config = children.worker_config(info, tokenizer)
        if not size:
            link = InProcessLink({**config, "worker": 0, "address": children.worker(0)}, self.executor)
            started.callback(link.close)
            link.start()
            return
        pool = WorkerPool(
            size, config, children.worker, self.executor.worker_joined,
            self.executor.worker_lost, self._give_up, hang_timeout=self._config.hang_timeout,
        )  # fmt: skip
        started.push_async_callback(pool.stop, 2.0)
        await pool.start()

    def _give_up(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.executor.fail_all(reason)
