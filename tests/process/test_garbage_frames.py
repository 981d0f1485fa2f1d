"""Nonsense on the sockets between our processes is refused and counted; nobody ends over it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import msgpack
import pytest
import zmq

from executor.messages import Abort, Cancel, Emissions, Finish, Open, Status, StepRecords, WorkerJoined
from executor.wire import encode
from tests.process.client import fetch
from tests.process.server import Server, until
from tests.process.test_disconnects import nothing_open
from tests.process.test_streams import chat

#: Not MessagePack, not a message, or a message whose fields are wrong: every receiver refuses these.
GARBAGE = [
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 1000,
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\x7f\xff\xff\xff",
    b"\x91" * 5000,
    msgpack.packb([1, 2, 3]),
    msgpack.packb("steps"),
    msgpack.packb({"t": "nothing we know"}),
    msgpack.packb({"t": ["steps"]}),
    msgpack.packb({"t": "steps", "rid": b"1234567", "token": b""}),
    msgpack.packb({"t": "submit", "rid": 1, "prompts": [b"\x01"], "sampling": {}, "spec": b"", "n": 1, "frontend": 0}),
    msgpack.packb({"t": "emissions", "worker": 0, "rid": b"\x00" * 8, "count": b"", "size": b"", "payload": b"x"}),
    msgpack.packb({"t": "status", "values": {"tokens": "many"}}),
    encode(Abort(7))[:-1],
    encode(Emissions.build(0, [(5, 0, 0, 1, 0, b"data")]))[:-3],
]

#: Messages that are well made and make no sense.
NONSENSE = [
    encode(Abort(2**62)),
    encode(Cancel(0, [(1, -1), (2**61, 5)])),
    encode(WorkerJoined(99, "tcp://127.0.0.1:9")),
    encode(WorkerJoined(98, "ipc:///no/such/directory/socket")),
    encode(StepRecords([11], [3], [1], [2**30], {0: Finish("stop")}, opens=[Open(11, 0, 0, b"no spec")])),
    encode(StepRecords([12], [3], [1], [5], opens=[Open(12, 0, 77, b"no spec")])),
    encode(Emissions.build(55, [(5, 9, 60000, 1, 3, b"data")])),
    encode(Emissions(54, (), (), (), (), (), (), b"", {"tokens": 1.5, "no such counter": 3})),
    encode(Status({"no such number": 1})),
]


@contextlib.contextmanager
def sender(path: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 5000)
    push.connect(f"ipc://{path}")
    try:
        yield push
    finally:
        push.close()
        context.term()


def talk_nonsense(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as raw:  # not even ZeroMQ
        raw.connect(path)
        raw.sendall(b"\xff\x00\x00\x00 nothing like a greeting" * 20)
    with sender(path) as push:
        for frame in GARBAGE:
            push.send(frame)
        push.send_multipart([b"two", b"parts"])
        for frame in NONSENSE:
            push.send(frame)


@pytest.mark.parametrize("workers", [0, 2])
def test_garbage_is_refused_and_counted(replay_server: Callable[[int], Server], workers: int) -> None:
    server = replay_server(workers)
    nothing_open(server)
    restarts, pids = server.health().get("worker_restarts"), [process.pid for process in server.everybody()]
    sockets = sorted(path.name for path in server.run_directory().iterdir())
    before = server.metrics()
    for name in sockets:
        with contextlib.suppress(ConnectionRefusedError):  # the socket of a worker that was killed in an earlier test
            talk_nonsense(str(server.run_directory() / name))

    refused = ["tailrace_refused_frames_total", "tailrace_executor_refused_frames_total"]
    refused += [key for key in before if key.startswith("tailrace_worker_refused_frames_total")]
    assert len(refused) == 2 + max(workers, 1)
    for key in refused:
        wanted = before[key] + len(GARBAGE) + 2
        until(lambda key=key, wanted=wanted: server.metrics().get(key, 0) >= wanted, f"{wanted} as {key}")  # type: ignore[misc]
    assert "tcp:// is refused" in server.log and "not MessagePack" in server.log and "Traceback" not in server.log

    nothing_open(server)
    assert [process.pid for process in server.everybody()] == pids
    assert server.health().get("worker_restarts") == restarts
    assert asyncio.run(fetch(server.url, *chat("hard"))).status == 200
