"""What admission knows of this server: the model's limits, its formats and its presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from executor.engines.base import EngineInfo
from executor.models import ModelFiles
from serve.admission import PRESETS, ServerFacts
from serve.config import Config
from serve.parsers import check_names, detect
from serve.prompts import Prompts

#: The embedded model's own card recommends these; at the API's defaults (1, 1) so small a model soon loses the thread.
_EMBEDDED_PRESETS = {"temperature": 0.2, "top_p": 0.9}


def server_facts(
    config: Config, files: ModelFiles | None, info: EngineInfo, prompts: Prompts, tokenizer: Path
) -> ServerFacts:
    """The facts of a server that has started. files: None without a model. ValueError for a format that is unknown."""
    reasoning, tool = detect(prompts.chat_template, prompts.special_tokens)
    reasoning = reasoning if config.reasoning_parser == "auto" else config.reasoning_parser
    tool = tool if config.tool_parser == "auto" else config.tool_parser
    check_names(reasoning, tool)
    return ServerFacts(
        model=config.served_model_name or (files.name if files else "replay"),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        supported=frozenset(info.supported),
        eos_token_ids=info.eos_token_ids,
        tool_parser=tool,
        reasoning_parser=reasoning,
        default_sampling=default_sampling(config, files),
        record=config.record is not None,
        record_prompts=config.record_prompts,
        reasoning_alias=config.reasoning_alias,
        tokenizer=str(_tokenizer_file(tokenizer)),
        root=_root(config, files, tokenizer),
    )


def default_sampling(config: Config, files: ModelFiles | None) -> dict[str, Any]:
    """The model's own presets."""
    if config.model is None and files is not None:
        return dict(_EMBEDDED_PRESETS)
    path = files.directory / "generation_config.json" if files else None
    if path is None or not path.exists():
        return {}
    presets = json.loads(path.read_text(encoding="utf-8"))
    return {name: presets[name] for name in PRESETS if presets.get(name) is not None}


def _root(config: Config, files: ModelFiles | None, tokenizer: Path) -> str:
    """The hub's name of the model, if it came from there with its tokenizer; else where the tokenizer lies. Clients
    that count or make up tokens, as ``vllm bench serve`` does, load it from what the model card says here."""
    name = config.model
    if name is None or config.tokenizer is not None or files is None or Path(name).expanduser().exists():
        return str(tokenizer.resolve())
    return name


def _tokenizer_file(source: Path) -> Path:
    """The tokenizer.json that a recording names, if there is one."""
    file = source / "tokenizer.json"
    return (file if file.exists() else source).resolve()
