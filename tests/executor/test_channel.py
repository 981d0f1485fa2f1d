"""Sockets: which addresses are used at all, and that nothing blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from executor.channel import AddressError, bind_pull, check_address, connect_push, drain, try_send


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    os.chmod(tmp_path, 0o700)
    return tmp_path


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777, 0o720])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    os.chmod(tmp_path, mode)
    with pytest.raises(AddressError, match=f"{mode:04o}"):
        check_address(f"ipc://{tmp_path}/socket")


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5555", "tcp://*:0", "ipc://", "ipc://socket", "ipc://@name", "ipc:///no/such/place/socket",
    "udp://x", "", "inproc://",
     "/tmp/socket", "ipc:/tmp/x"],
)  # fmt: skip
def test_addresses_that_are_refused(address: str, private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(private)  # a relative path would lie in a private directory, and still be refused
    with pytest.raises(AddressError):
        check_address(address)


def test_the_refusal_of_tcp_says_why() -> None:
    with pytest.raises(AddressError, match="CURVE"):
        check_address("tcp://127.0.0.1:5555")
    check_address("tcp://127.0.0.1:5555", curve=True)
    with pytest.raises(AddressError, match="not an ipc://"):
        check_address("udp://127.0.0.1:5555", curve=True)


@pytest.mark.parametrize("kind", ["ipc", "inproc"])
def test_frames_arrive_in_order(kind: str, context: zmq.Context[zmq.Socket[bytes]], private: Path) -> None:
    address = f"ipc://{private}/socket" if kind == "ipc" else "inproc://here"
    receiver, sender = bind_pull(context, address), connect_push(context, address)
    frames = [b"%d" % i for i in range(300)]
    for frame in frames:
        sender.send(frame)
    got: list[bytes] = []
    while len(got) < 300:
        assert receiver.poll(10_000), "frames are missing"
        part = list(drain(receiver, 100))
        assert len(part) <= 100
        got += part
    assert got == frames and list(drain(receiver)) == []


def test_a_full_queue_refuses_instead_of_blocking(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    receiver, sender = bind_pull(context, "inproc://full", 2), connect_push(context, "inproc://full", 2)
    sent = 0
    while try_send(sender, b"%d" % sent):
        sent += 1
        assert sent < 100
    assert list(drain(receiver)) == [b"%d" % i for i in range(sent)]
    assert sender.poll(10_000, zmq.POLLOUT) and try_send(sender, b"again")


def test_a_taken_address(context: zmq.Context[zmq.Socket[bytes]], private: Path) -> None:
    first = bind_pull(context, "inproc://taken")
    with pytest.raises(zmq.ZMQError):
        bind_pull(context, "inproc://taken")
    first.close()


def test_a_sender_may_come_before_the_receiver(context: zmq.Context[zmq.Socket[bytes]], private: Path) -> None:
    sender = connect_push(context, f"ipc://{private}/later")
    assert try_send(sender, b"early")
    receiver = bind_pull(context, f"ipc://{private}/later")
    assert receiver.poll(10_000) and list(drain(receiver)) == [b"early"]
