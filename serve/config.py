"""What a server is started with: one frozen object, made from argv by ``serve/cli.py`` and read by
``serve/launcher.py``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: Front ends at most: each is a process with a tokenizer of its own.
MAX_FRONTENDS = 64


def default_workers(cores: int | None = None) -> int:
    """Post-processing workers for a machine: one up to 7 cores, then one per 4 cores, 8 at most."""
    cores = cores if cores is not None else len(os.sched_getaffinity(0))
    return max(1, min(8, cores // 4))


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of `tailrace serve`. Sizes are tokens, times seconds, bodies bytes.

    model: local directory in Hugging Face layout, .gguf file, hub name, or None for the embedded model.
    engine: a name of ``executor.engines``; engine_config: further arguments of the replay engine.
    """

    model: str | None = None
    num_postprocess_workers: int = field(default_factory=default_workers)
    num_serve_frontends: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer: str | None = None
    served_model_name: str | None = None
    engine: str = "transformers"
    engine_config: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "auto"
    max_batch_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    stream_interval: int = 1
    post_processor_hook: str | None = None
    reasoning_parser: str | None = "auto"
    tool_parser: str | None = "auto"
    reasoning_alias: bool = False
    record: str | None = None
    record_prompts: bool = False
    max_body_bytes: int = 32 << 20
    shutdown_timeout: float = 30.0
    max_requests: int = 4096
    max_queued_tokens: int = 4 << 20
    queue_timeout: float = 600.0
    client_buffer_bytes: int = 1 << 20
    client_stall_timeout: float = 30.0
    keep_alive_interval: float = 15.0
    hang_timeout: float = 10.0
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    cors_origin: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    log_level: str = "info"

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Config:
        """What ``to_plain`` gave, also behind a JSON codec."""
        lists = ("api_key", "cors_origin")
        return cls(**values | {name: tuple(values[name]) for name in lists})  # type: ignore[operator]

    def engine_args(self, model_dir: str | None) -> dict[str, Any]:
        """The engine's own arguments."""
        if self.engine == "replay":
            return {"config": dict(self.engine_config)}
        return {
            "model_dir": model_dir,
            "device": self.device,
            "dtype": self.dtype,
            "max_batch_tokens": self.max_batch_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_len,
        }
