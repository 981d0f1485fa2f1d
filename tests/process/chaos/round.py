"""One round: a server of one format, from its start over the disturbance to its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random

from tests.process.chaos.clients import Client, read_all
from tests.process.chaos.disturber import Disturber
from tests.process.chaos.frame_garbage import FrameGarbage
from tests.process.chaos.http_garbage import HttpGarbage
from tests.process.chaos.leaks import Leaks, Look, ended, metrics, settled
from tests.process.chaos.merged import MALFORMED, error_of, merged
from tests.process.chaos.model import Model
from tests.process.chaos.options import Options
from tests.process.chaos.plan import make_plan
from tests.process.chaos.stage import Stage
from tests.process.chaos.stallers import Staller
from tests.process.chaos.tally import Findings, Tally
from tests.process.chaos.templates import Template, long_prompt, make_templates, quick
from tests.process.client import begin
from tests.process.server import Server, launch

#: The pace of the engine. 200 clients at 20 steps a second keep two cores busy, and do not drown them.
STEP_INTERVAL, TOKENS_PER_STEP = 0.05, 2
#: Limits small enough to be hit: seconds, bytes, tokens.
HANG_TIMEOUT, STALL_TIMEOUT = 2.0, 3.0
BUFFER_BYTES, BODY_BYTES, QUEUED_TOKENS = 256 << 10, 1 << 20, 400_000
#: Requests that the server takes beyond the crowd's.
ROOM = 60

Say = Callable[[str], None]


@dataclass(slots=True)
class Round:
    """What came of one server. exit_code: None if it did not end in time. tracebacks: in its log."""

    kind: str
    seconds: float
    tally: Tally
    leaks: Leaks = field(default_factory=Leaks)
    exit_code: int | None = None
    tracebacks: int = 0


def server_flags(options: Options) -> list[str]:
    """The limits of the server."""
    flags: dict[str, object] = {
        "num_postprocess_workers": options.workers, "max_requests": options.clients + ROOM,
        "max_queued_tokens": QUEUED_TOKENS, "queue_timeout": 30, "client_buffer_bytes": BUFFER_BYTES,
        "client_stall_timeout": STALL_TIMEOUT, "keep_alive_interval": 1, "hang_timeout": HANG_TIMEOUT,
        "max_body_bytes": BODY_BYTES, "shutdown_timeout": 10,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


async def play(options: Options, findings: Findings, kind: str, seconds: float, say: Say) -> Round:
    """One round; the findings keep its tally. AssertionError if the server does not start, or refuses a template."""
    model = Model(kind, Random(f"{options.seed} {kind} model"))
    templates = make_templates(model, max(8, int(options.longest / STEP_INTERVAL)), TOKENS_PER_STEP)
    floods = [(quick(), options.clients + 2 * ROOM), (long_prompt(), 2 * QUEUED_TOKENS // 20_000)]
    with tempfile.TemporaryDirectory(prefix="chaos-model-") as directory:
        flags = model.flags(Path(directory), STEP_INTERVAL, TOKENS_PER_STEP)
        with launch(*flags, *server_flags(options)) as server:
            await asyncio.to_thread(server.wait_until_ready)
            stage = Stage(options, server.url, templates, findings)
            await asyncio.gather(*(_undisturbed(stage, each) for each in (*templates, *(each for each, _ in floods))))
            before, _ = await settled(server.url, server.pid, server.run_directory(), None, options.workers)
            say(f"{kind}: {len(templates)} undisturbed answers; now {seconds:.0f} s of disturbance")
            await _disturb(stage, server, floods, kind, seconds, say)
            return await _finish(stage, server, before, kind, seconds)


# ------------------------------------------------------------------------------------------------------ undisturbed


async def _undisturbed(stage: Stage, template: Template) -> None:
    """Note what an answer is, and how long it has no news, while nothing happens to the server."""
    exchange = await begin(stage.url, template.path, template.body)
    stage.gaps[template.name] = await read_all(exchange)
    exchange.close()
    body = bytes(exchange.body)
    try:
        leaves = stage.expected[template.name] = merged(template, exchange.status, body)
    except MALFORMED as error:
        raise AssertionError(f"{template.name}: undisturbed, and malformed: {error}\n{body!r}") from error
    entitled = "broken" in template.name
    assert bool(error_of(leaves)) == entitled, f"{template.name}: {exchange.status} {error_of(leaves)}"


# ------------------------------------------------------------------------------------------------------ disturbed


async def _disturb(
    stage: Stage, server: Server, floods: list[tuple[Template, int]], kind: str, seconds: float, say: Say
) -> None:
    options, run_directory = stage.options, server.run_directory()
    plan = make_plan(options, seconds, kind, HANG_TIMEOUT)
    disturber = Disturber(stage, server.pid, run_directory, HANG_TIMEOUT, floods)
    acting = [Client(stage, number).run() for number in range(options.clients)]
    acting += [Staller(stage, number).run() for number in range(max(2, options.clients // 50))]
    acting += [HttpGarbage(stage, number).run() for number in range(3)]
    acting += [FrameGarbage(stage, run_directory).run(), disturber.run(plan), _count_resumed(stage)]
    tasks = [asyncio.create_task(each) for each in acting]
    try:
        await _progress(stage, server, seconds, say)
        stage.over.set()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _count_resumed(stage: Stage) -> None:
    """Add up a counter that begins anew with each executor."""
    last = 0
    while await stage.pause(0.5):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            values = await metrics(stage.url)
            now = int(values.get("tailrace_executor_resumed_requests_total", last))
            stage.tally.resumed += now - last if now >= last else now
            last = now


async def _progress(stage: Stage, server: Server, seconds: float, say: Say) -> None:
    """Until the time is over, or the server; a line each second."""
    begin = time.monotonic()
    for second in range(1, ceil(seconds) + 1):
        await asyncio.sleep(begin + min(second, seconds) - time.monotonic())
        tally = stage.tally
        say(
            f"{time.monotonic() - begin:5.0f} s  open {stage.open:4d}  completed {tally.completed:6d}  killed "
            f"{tally.worker_kills:3d}+{tally.executor_kills}  stopped {tally.stops:2d}  left {tally.disconnects:4d}  "
            f"refused {sum(tally.refused.values()):4d}  differing {tally.differing}  failures {len(tally.failures)}"
        )
        if server.process.poll() is not None:
            stage.findings.failed(f"the server ended with exit code {server.process.poll()}", log=server.log[-50000:])
            return


# ------------------------------------------------------------------------------------------------------ the end


async def _finish(stage: Stage, server: Server, before: Look, kind: str, seconds: float) -> Round:
    result = Round(kind, seconds, stage.tally)
    if server.process.poll() is None:
        run_directory = server.run_directory()
        now, result.leaks = await settled(server.url, server.pid, run_directory, before, stage.options.workers)
        server.send(signal.SIGTERM)
        result.exit_code = await ended(server, [each.pid for each in now.members], result.leaks)
    result.tracebacks = server.log.count("Traceback (most recent call last)")
    wrong = stage.tally.failures or stage.tally.differing or result.leaks.what
    if wrong or result.tracebacks or result.exit_code != 0:
        stage.findings.keep_log(server.log)
    return result
