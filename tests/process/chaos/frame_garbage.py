"""Nonsense for every socket between the server's processes: what is no message is refused, and nobody ends over it.

Whoever can enter the run directory may send valid messages too, and does harm with them; so what is well formed here
speaks of requests and workers that there are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import zmq

from executor.messages import Abort, Cancel, Emissions, Finish, Open, Release, Status, StepRecords, WorkerJoined
from executor.wire import encode
from tests.process.chaos.stage import Stage

#: rids that are never minted: those of a front end begin at the clock.
_NO_RID = 2**61

_VALID = (
    encode(Abort(_NO_RID)),
    encode(Release(_NO_RID + 1)),
    encode(Cancel(0, [(_NO_RID + 2, -1), (_NO_RID + 3, 5)])),
    encode(WorkerJoined(10**6, "ipc:///no/such/directory/socket")),
    encode(StepRecords([11], [3], [1], [2**30], {0: Finish("stop")}, opens=[Open(11, 0, 0, b"no spec")])),
    encode(Emissions.build(10**6, [(_NO_RID, 9, 60000, 1, 3, b"data")])),
)
#: Cut or changed they are nonsense; as they are they would be believed.
_ONLY_BROKEN = (encode(Status({"open": 1, "resumed": 2})),)

_NAMES = ("submit", "abort", "release", "cancel", "joined", "lost", "steps", "emissions", "status", "x", "")


class FrameGarbage:
    """Sends to a random socket of the run directory, now and then."""

    def __init__(self, stage: Stage, run_directory: Path, interval: float = 0.3) -> None:
        self._stage, self._run_directory, self._interval = stage, run_directory, interval
        self._random = Random(f"{stage.options.seed} frame garbage")

    async def run(self) -> None:
        """Send until the disturbance is over."""
        while await self._stage.pause(self._random.uniform(0, 2 * self._interval)):
            sockets = sorted(path for path in self._run_directory.iterdir() if path.is_socket())
            if not sockets:
                continue
            path = self._random.choice(sockets)
            frames = [garbage(self._random) for _ in range(self._random.randrange(1, 12))]
            self._stage.tally.garbage_frames += len(frames)
            if self._random.random() < 0.2:
                await asyncio.to_thread(_talk_nonsense, path, frames)
            else:
                await asyncio.to_thread(_push, path, frames)


def garbage(random: Random) -> bytes:
    """One frame that is no message, or one that speaks of nothing there is."""
    valid = random.choice((*_VALID, *_ONLY_BROKEN))
    kind = random.randrange(6)
    if kind == 0:
        return random.randbytes(random.randrange(2000))
    if kind == 1:
        return valid[: random.randrange(len(valid))]
    if kind == 2:
        return random.choice(_VALID)
    if kind == 3:
        return bytes(msgpack.packb(_value(random, 4)))
    if kind == 4:
        return bytes(msgpack.packb({"t": random.choice(_NAMES), **{name: _value(random, 2) for name in ("rid", "n")}}))
    return random.choice((b"", b"\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\x91" * 5000, b"\xc1" * 10))


def _value(random: Random, depth: int) -> Any:
    leaves = (None, True, -1, 2**63, 0.5, "text", b"bytes", random.randbytes(8))
    kind = random.randrange(3) if depth else 2
    if kind == 0:
        return [_value(random, depth - 1) for _ in range(random.randrange(4))]
    if kind == 1:
        return {str(key): _value(random, depth - 1) for key in range(random.randrange(4))}
    return random.choice(leaves)


def _push(path: Path, frames: list[bytes]) -> None:
    """Over ZeroMQ; what a dead process's socket does not take is given up."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 200)
        push.connect(f"ipc://{path}")
        for frame in frames:
            push.send(frame)
        push.send_multipart([b"two", b"parts"])


def _talk_nonsense(path: Path, frames: list[bytes]) -> None:
    """Not even ZeroMQ."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(1)
        raw.connect(str(path))
        for frame in frames:
            raw.sendall(frame)
