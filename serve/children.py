"""What a server's executor and workers are started with, whether HTTP is in front of them or not: addresses, the
engine's arguments and the workers' config. ``serve/launcher.py`` and ``serve/scaffolding/local.py`` start them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from executor.engines.base import EngineInfo
from executor.models import ModelFiles
from executor.request import PostprocWorkerConfig
from serve.config import Config


class Children:
    """directory: of their sockets. frontends: where each front end listens."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._config, self._directory = config, directory
        self.frontends = [self.address(f"frontend-{number}") for number in range(config.num_serve_frontends)]
        self.executor = self.address("executor")

    def address(self, name: str) -> str:
        """Where the process of that name listens."""
        return f"ipc://{self._directory}/{name}"

    def worker(self, number: int) -> str:
        """Where a worker listens."""
        return self.address(f"worker-{number}")

    def engine_args(self, files: ModelFiles | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """What the engine is made with. tokenizer: the replay engine without a vocabulary of its own takes this one's,
        and leaves its special tokens out; other engines need none."""
        args = self._config.engine_args(str(files.directory) if files else None)
        if self._config.engine != "replay" or tokenizer is None:
            return args
        own = {"vocab_size": len(tokenizer), "special_token_ids": sorted(set(tokenizer.all_special_ids))}
        return {"config": own | args["config"]}

    def worker_config(
        self, info: EngineInfo, tokenizer: str, post_processors: str | None = None, record_dir: str | None = None
    ) -> dict[str, Any]:
        """Of every worker (``postproc_workers/shell.py``). tokenizer: where it is. post_processors: the dotted name of
        their table, by default that of handles alone."""
        postproc = PostprocWorkerConfig(
            num_postprocess_workers=self._config.num_postprocess_workers,
            tokenizer=tokenizer,
            post_processor_hook=self._config.post_processor_hook,
            vocab_size=info.vocab_size,
        )
        if post_processors is not None:
            postproc = dataclasses.replace(postproc, post_processors=post_processors)
        return {
            "executor": self.executor,
            "frontends": self.frontends,
            "postproc": dataclasses.asdict(postproc),
            "stream_interval": self._config.stream_interval,
            "record_dir": record_dir,
            "log_level": self._config.log_level,
        }
