"""What the examples share: their flags, where the generations come from, and the line that shows how it goes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.models import resolve_model
from serve.config import Config
from serve.scaffolding import GENERATION, Controller, OpenAIWorker, ProgressLine, ScaffoldingLlm
from serve.scaffolding.local import LocalExecutor
from serve.tokenizer_loading import load_tokenizer

Body = Callable[[ScaffoldingLlm], Awaitable[None]]


def parser(doc: str | None, prompt: str) -> argparse.ArgumentParser:
    """The flags of every example; ``prompt`` is the default of its own."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--prompt", default=prompt, help="what to ask (%(default)r)")
    add("--max_tokens", type=int, default=128, help="of each generation (%(default)s)")
    add("--temperature", type=float, default=0.7, help="(%(default)s)")
    add("--engine", choices=("transformers", "replay"), default="transformers",
        help="what generates; replay gives canned answers at once (%(default)s)")  # fmt: skip
    add("--model", help="a model's directory, .gguf file or hub name; with --url the served name")
    add("--tokenizer", help="of the replay engine: a tokenizer's directory or file (the model's)")
    add("--url", help="an OpenAI-compatible server, such as http://127.0.0.1:8000/v1, instead of an engine")
    add("--api_key", default="none", help="for --url")
    return made


def request(options: argparse.Namespace) -> dict[str, object]:
    """The options of every generation."""
    return {"max_tokens": options.max_tokens, "temperature": options.temperature}


def run(options: argparse.Namespace, controller: Controller, body: Body, canned: Sequence[str] = ()) -> int:
    """``await body(llm)`` with a scheduler over what the flags ask for. canned: the replay engine's answers, in the
    order in which they are asked for."""
    asyncio.run(_run(options, controller, body, canned))
    return 0


async def _run(options: argparse.Namespace, controller: Controller, body: Body, canned: Sequence[str]) -> None:
    if options.url:
        worker = OpenAIWorker(options.url, options.api_key, options.model)
        try:
            await _show(ScaffoldingLlm(controller, {GENERATION: worker}), body)
        finally:
            await worker.close()
        return
    async with LocalExecutor(_config(options, canned)) as local:
        await _show(ScaffoldingLlm(controller, {GENERATION: local.worker()}), body)


async def _show(llm: ScaffoldingLlm, body: Body) -> None:
    async with ProgressLine(llm.progress), llm:
        await body(llm)


def _config(options: argparse.Namespace, canned: Sequence[str]) -> Config:
    if options.engine != "replay":
        return Config(model=options.model, log_level="warning")
    source = options.tokenizer or str(resolve_model(options.model, progress=print).directory)
    tokenizer = load_tokenizer(Path(source))
    scripts = [{"token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in canned]
    engine = {"scripts": scripts, "step_interval": 0.02}
    return Config(engine="replay", tokenizer=source, engine_config=engine, log_level="warning")
