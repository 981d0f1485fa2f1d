"""Sends requests when they are due, at most so many at once, and gathers what they came to."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .client import Client
from .outcome import Outcome

Progress = Callable[[], None]
#: Descriptors that are not connections.
_SPARE_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """bodies: of the requests, in order. offsets: seconds from the start to each, ascending. path: where they go."""

    path: str
    bodies: Sequence[bytes]
    offsets: Sequence[float]
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a plan. duration: seconds to the end of the last answer. outcomes: of the plan's requests, in their
    order; None for one that was not sent, or not answered when the run was stopped."""

    duration: float
    outcomes: list[Outcome | None]


async def run(plan: Plan, client: Client, stop: asyncio.Event, progress: Progress = lambda: None) -> Run:
    """Carry out a plan; when ``stop`` is set, what is open is given up. progress: called after each answer."""
    _allow_descriptors(min(len(plan.bodies), plan.max_concurrency or len(plan.bodies)))
    outcomes: list[Outcome | None] = [None] * len(plan.bodies)
    start = client.clock()
    sending = asyncio.create_task(_send_all(plan, client, outcomes, progress))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not sending.done():
            sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    return Run(client.clock() - start, outcomes)


async def _send_all(plan: Plan, client: Client, outcomes: list[Outcome | None], progress: Progress) -> None:
    turns = asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else contextlib.nullcontext()

    async def send(number: int, due: float) -> None:
        async with turns:
            outcomes[number] = await client.stream(plan.path, plan.bodies[number], client.clock() - due)
        progress()

    loop = asyncio.get_running_loop()
    start, tasks = loop.time(), []
    try:
        for number, offset in enumerate(plan.offsets):
            if (wait := start + offset - loop.time()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(send(number, client.clock())))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _allow_descriptors(connections: int) -> None:
    """Each open request is a file descriptor, and many shells allow 1024 where the system allows more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
