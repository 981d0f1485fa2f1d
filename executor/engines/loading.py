"""From a directory in Hugging Face layout to a model in memory, and from its size to the bounds of a batch.

On a CPU the bounds are ours, where transformers would take 60% of the machine's memory for the cache and 8192 tokens
for a step. On CUDA the library measures what is free; it gets :data:`CUDA_MEMORY_SHARE` of it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads
from transformers.utils import logging as transformers_logging

logger = logging.getLogger("tailrace.engine")

#: Key-value cache on a CPU, unless one output of ``max_model_len`` needs more.
CPU_CACHE_BYTES = 1 << 30
#: Tokens per cache page on a CPU; prompts share whole pages. On CUDA the library's default fits its kernels.
CPU_PAGE_TOKENS = 32
#: Ids in a step on a CPU: 256 of a prompt take 135 million parameters on two cores 0.3 s, and all streams wait for it.
CPU_BATCH_TOKENS = 256
CPU_NUM_SEQS = 64
#: Bounds the scores of a step: 256 rows of 150 000 float32 are 150 MB, and sampling takes a few times that.
CUDA_NUM_SEQS = 256
#: Share of free GPU memory for cache and batch; the rest is for scores.
CUDA_MEMORY_SHARE = 0.8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch; None is this module's choice. Raises ValueError naming the field.

    max_batch_tokens: ids per step, prompts included; max_num_seqs: outputs per step; max_model_len: prompt and
    generated ids of one output, at most and by default the model's.
    """

    max_batch_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")


def parse_device(name: str) -> torch.device:
    """``auto`` is CUDA if there is one, else the CPU. Raises ValueError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {name!r} is no torch device") from error


def check_dtype(name: str) -> str:
    """The name, or ValueError."""
    if name != "auto" and name not in DTYPES:
        raise ValueError(f"dtype: {name!r} is none of auto, {', '.join(DTYPES)}")
    return name


def load_model(model_dir: Path, device: torch.device, dtype: str) -> Any:
    """The causal language model in ``model_dir``, on ``device``. Raises OSError or ValueError."""
    began = time.monotonic()
    transformers_logging.disable_progress_bar()
    # The library tells of sizes and seeds that are not ours to explain, in a format of its own.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    logger.info("loading %s on %s", model_dir, device)
    wanted = _load_dtype(device, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=wanted, device_map=device, trust_remote_code=False
    )
    if wanted == "auto" and model.dtype == torch.float32:
        model = model.to(torch.bfloat16)
    millions, took = model.num_parameters() / 1e6, time.monotonic() - began
    logger.info("loaded %.0f million parameters as %s in %.1f s", millions, model.dtype, took)
    return model


def _load_dtype(device: torch.device, dtype: str) -> torch.dtype | str:
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.float32 if device.type == "cpu" else "auto"


def end_of_sequence(model: Any) -> tuple[int, ...]:
    """generation_config.json's ids, else config.json's; either may hold one id, a list or nothing."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def model_length(asked: int | None, model: Any) -> int:
    """Ids that one output may have, prompt included. Raises ValueError for more than the model reads."""
    most: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = asked or most
    if length is None:
        raise ValueError("max_model_len: the model does not say how much it reads; give it")
    if most is not None and length > most:
        raise ValueError(f"max_model_len: {length} exceeds the model's {most}")
    return length


def batching_config(model: Any, device: torch.device, limits: Limits) -> ContinuousBatchingConfig:
    """The library's settings. Without CUDA graphs and asynchronous batching: sampling.py says why."""
    common: dict[str, Any] = {"use_cuda_graph": False, "use_async_batching": False}
    if device.type != "cpu":
        return ContinuousBatchingConfig(
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_num_seqs or CUDA_NUM_SEQS,
            max_memory_percent=CUDA_MEMORY_SHARE,
            **common,
        )
    num_seqs = limits.max_num_seqs or CPU_NUM_SEQS
    batch_tokens = limits.max_batch_tokens or max(CPU_BATCH_TOKENS, num_seqs)
    return ContinuousBatchingConfig(
        page_size=CPU_PAGE_TOKENS,
        num_blocks=_cpu_blocks(model, num_seqs, limits),
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=min(num_seqs, batch_tokens),
        auto_switch_to_flash=False,
        **common,
    )


def _cpu_blocks(model: Any, num_seqs: int, limits: Limits) -> int:
    """Cache pages: enough for all outputs at full length, within the bound; one whose length was asked for always fits.

    A model that reads more than the bound holds, and was given no length, gets the shorter length that fits.
    """
    config = model.config.get_text_config()
    heads, width = find_num_key_value_heads(config), find_head_dim(config)
    page_bytes = 2 * CPU_PAGE_TOKENS * config.num_hidden_layers * heads * width * model.dtype.itemsize
    one = -(-model_length(limits.max_model_len, model) // CPU_PAGE_TOKENS) + 1
    bounded: int = max(1, min(num_seqs * one, CPU_CACHE_BYTES // page_bytes))
    return max(one, bounded) if limits.max_model_len else bounded
