"""A worker's process with real sockets, and front ends that take nothing: what is theirs becomes larger, not more."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from executor.channel import EMISSIONS_HWM, STEPS_HWM, bind_pull, connect_push
from executor.child import ChildProcess
from executor.messages import Emissions, Open, StepRecords
from executor.request import PostprocWorkerConfig, SamplingParams
from executor.result import OutputDelta
from executor.wire import FrameReader, decode_deltas, encode
from postproc_workers.deltas import deltas_request
from tests.helpers import row

STREAMS, STEPS = 256, 100


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="wp-") as made:
        yield Path(made)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class FrontEnd:
    """Takes emissions when it is told to. ids: rid -> what has come of it; messages: how many had rows."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._frames = FrameReader(logging.getLogger())
        self.ids: dict[int, list[int]] = {}
        self.messages = 0

    def take(self) -> None:
        """Until each stream has all its ids."""
        while len(self.ids) < STREAMS or min(map(len, self.ids.values())) < STEPS:
            assert self.socket.poll(30_000), "nothing came for half a minute"
            message = self._frames.read(self.socket.recv())
            assert isinstance(message, Emissions)
            self.messages += bool(message.rids)
            for rid, _, _, _, _, payload in message.rows():
                for delta in decode_deltas(payload):
                    assert isinstance(delta, OutputDelta)
                    self.ids.setdefault(rid, []).extend(delta.token_ids)


def steps(frontends: int) -> Iterator[StepRecords]:
    """The same rows in each, of as many streams at each front end."""
    rids = {frontend: range(1000 * frontend, 1000 * frontend + STREAMS) for frontend in range(frontends)}
    spec = deltas_request(0, [[1]], SamplingParams()).spec
    opens: Sequence[Open] = [Open(rid, 0, frontend, spec) for frontend, own in rids.items() for rid in own]
    for number in range(STEPS):
        yield StepRecords.build([row([number], rid=rid) for own in rids.values() for rid in own], opens)
        opens = ()


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_front_end_does_not_take_gathers(
    others: int, directory: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    addresses = [f"ipc://{directory}/frontend-{number}" for number in range(1 + others)]
    frontends = [FrontEnd(bind_pull(context, address, EMISSIONS_HWM)) for address in addresses]
    address = f"ipc://{directory}/worker"
    executor = f"ipc://{directory}/executor"
    config = {
        "worker": 0, "address": address, "executor": executor, "frontends": addresses,
        "postproc": dataclasses.asdict(PostprocWorkerConfig(1)),
    }  # fmt: skip
    receiver = bind_pull(context, executor)

    async def main() -> None:
        child = await ChildProcess.spawn("worker", "postproc_workers.process", config)
        await child.ready()
        sender = connect_push(context, address, STEPS_HWM)
        for step in steps(1 + others):
            sender.send(encode(step))
        standing, *rest = frontends
        for frontend in rest:  # they get theirs while the first one stands still
            frontend.take()
        standing.take()
        assert standing.messages < STEPS / 2
        for frontend in frontends:
            assert len(frontend.ids) == STREAMS
            assert all(ids == list(range(STEPS)) for ids in frontend.ids.values())
        assert await child.stop() == 0

    asyncio.run(main())
    assert not receiver.poll(0)  # nothing was cancelled
