"""The crowd: clients that ask for one thing after the other, and know what they have to get.

Most read to the end, some of them slowly; others leave somewhere on the way. What was read to the end is compared with
the undisturbed answer. A request may be refused before any byte, with 429 or 503 and a time to come back, and comes
back then. Everything else is a failure: an error that nothing entitled the stream to, a connection that ends early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from tests.process.chaos.difference import compare
from tests.process.chaos.merged import MALFORMED, error_of, merged, without_comments
from tests.process.chaos.stage import DEADLINE, Stage
from tests.process.chaos.templates import Template
from tests.process.client import Exchange, begin

#: What an answer that was cut off raises while it is read.
BROKEN = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)

#: Ways to read, and how many clients of a hundred choose them.
_WAYS = {"read": 72, "dawdle": 10, "leave": 12, "reset": 6}

#: A client that was refused comes back no later than this, whatever it was told: a run is short.
MAX_RETRY = 5.0


class Client:
    """One client after the other on the same seat; ``number`` names its chain of choices."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self._random = Random(f"{stage.options.seed} client {number}")
        self._label = f"client-{number}"
        self._asked = 0

    async def run(self) -> None:
        """Ask until the disturbance is over."""
        random = self._random
        while await self._stage.pause(random.uniform(0, 0.3)):
            template = random.choice(self._stage.templates)
            (way,) = random.choices(list(_WAYS), list(_WAYS.values()))
            await self.ask(template, way)

    async def ask(self, template: Template, way: str = "read") -> None:
        """One request, whatever becomes of it."""
        stage = self._stage
        self._asked += 1
        label = f"{self._label}-{self._asked}"
        stage.open += 1
        try:
            await asyncio.wait_for(self._ask(template, way, label), DEADLINE)
        except asyncio.TimeoutError:
            stage.findings.failed(f"no end within {DEADLINE} s", template, label=label)
        except BROKEN as error:
            stage.findings.failed(f"the connection broke: {error!r}", template, label=label)
        finally:
            stage.open -= 1

    async def _ask(self, template: Template, way: str, label: str) -> None:
        while True:
            self._stage.tally.requests += 1
            exchange = await begin(self._stage.url, template.path, template.body, X_Request_Id=label)
            try:
                again = await self._exchange(exchange, template, way)
            finally:
                exchange.close()
            if again is None or not await self._stage.pause(min(again, MAX_RETRY)):
                return

    async def _exchange(self, exchange: Exchange, template: Template, way: str) -> float | None:
        """Read the answer; the seconds after which to ask again, None for never."""
        if way in ("leave", "reset") and await self._leaves(exchange, template):
            self._stage.tally.disconnects += 1
            exchange.reset() if way == "reset" else exchange.close()
            return None
        dawdles = way == "dawdle"
        gap = await read_all(exchange, (lambda: self._random.choice((0.0, 0.0, 0.0, 0.1, 0.4))) if dawdles else None)
        if exchange.status in (429, 503):
            return refused(self._stage, exchange, template)
        check_answer(self._stage, exchange, template)
        if template.streams and not dawdles:
            delay = gap - self._stage.gaps[template.name]
            self._stage.tally.longest_delay = max(self._stage.tally.longest_delay, delay)
        return None

    async def _leaves(self, exchange: Exchange, template: Template) -> bool:
        """Wait for the moment to leave; False if the answer came to its end, or to a refusal, before."""
        random = self._random
        if not template.streams or random.random() < 0.2:
            await self._stage.pause(random.uniform(0, 0.4 * self._stage.options.longest))
            return True
        await exchange.read_head()
        if exchange.status in (429, 503):
            return False
        await exchange.read_events(random.randrange(1, 60))
        return not exchange.complete


async def read_all(exchange: Exchange, pause: Callable[[], float] | None = None) -> float:
    """Read to the end, with pauses in between; returns the longest time without news, in seconds."""
    clock = asyncio.get_running_loop().time
    await exchange.read_head()
    longest, last, size = 0.0, clock(), 0
    while await exchange.read_some():
        if exchange.body[size : size + 1] != b":":  # a keep-alive comment is no news
            longest, last = max(longest, clock() - last), clock()
        size = len(exchange.body)
        if pause is not None and (seconds := pause()):
            await asyncio.sleep(seconds)
    return max(longest, clock() - last)


def refused(stage: Stage, exchange: Exchange, template: Template) -> float | None:
    """A 429 or 503: counted, and its form looked at; returns the seconds after which to come back."""
    stage.tally.refused[exchange.status] += 1
    try:
        after = float(exchange.headers["retry-after"])
        leaves = merged(template, exchange.status, bytes(exchange.body))
        if not error_of(leaves):
            raise ValueError("no error object")
        return after
    except MALFORMED as error:
        stage.findings.failed(f"a {exchange.status} that is not as documented: {error!r}", template,
                              headers=exchange.headers, body=bytes(exchange.body))  # fmt: skip
        return None


def check_answer(stage: Stage, exchange: Exchange, template: Template) -> None:
    """Compare a whole answer with the undisturbed one."""
    body, expected = bytes(exchange.body), stage.expected[template.name]
    try:
        received = merged(template, exchange.status, body)
    except MALFORMED as error:
        stage.findings.failed(f"malformed, status {exchange.status}: {error}", template, body=body[-20000:])
        return
    if error_of(received) and error_of(received) != error_of(expected):
        stage.findings.failed(f"status {exchange.status}, {error_of(received)}", template, expected=expected,
                              received=received, body=without_comments(body)[-20000:])  # fmt: skip
    elif difference := compare(expected, received):
        stage.findings.differs(template, difference, expected, received, body)
    stage.tally.completed += 1
    stage.tally.streams += template.streams
