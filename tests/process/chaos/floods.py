"""More requests than the server takes, all at once: the surplus has to be refused, and what is taken to be answered."""

from __future__ import annotations

import asyncio

from tests.process.chaos.clients import BROKEN, check_answer, read_all, refused
from tests.process.chaos.stage import DEADLINE, Stage
from tests.process.chaos.templates import Template
from tests.process.client import begin


async def flood(stage: Stage, template: Template, count: int) -> None:
    """So many requests; nobody comes back who was refused."""
    stage.tally.floods += 1
    stage.open += count
    try:
        await asyncio.gather(*(_one(stage, template) for _ in range(count)))
    finally:
        stage.open -= count


async def _one(stage: Stage, template: Template) -> None:
    try:
        await asyncio.wait_for(_ask(stage, template), DEADLINE)
    except asyncio.TimeoutError:
        stage.findings.failed(f"in a flood: no end within {DEADLINE} s", template)
    except BROKEN as error:
        stage.findings.failed(f"in a flood: the connection broke: {error!r}", template)


async def _ask(stage: Stage, template: Template) -> None:
    stage.tally.requests += 1
    exchange = await begin(stage.url, template.path, template.body)
    try:
        await read_all(exchange)
    finally:
        exchange.close()
    if exchange.status in (429, 503):
        refused(stage, exchange, template)
    else:
        check_answer(stage, exchange, template)
