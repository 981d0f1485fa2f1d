"""A front end's short queue: nothing overtakes, nothing is lost, and of the reports the newest stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from executor.channel import bind_pull, connect_push, drain
from postproc_workers.outbound import Outbound

ADDRESS = "inproc://front-end"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def receiver(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    return bind_pull(context, ADDRESS, 1)


@pytest.fixture
def outbound(context: zmq.Context[zmq.Socket[bytes]], receiver: zmq.Socket[bytes]) -> Outbound:
    """Between two sockets of a process the marks add up: two frames are taken."""
    return Outbound(connect_push(context, ADDRESS, 1))


def test_what_is_refused_waits_and_leaves_in_order(outbound: Outbound, receiver: zmq.Socket[bytes]) -> None:
    for number in range(5):
        assert outbound.full is (number > 2)
        outbound.send(b"%d" % number)
    taken = drain(receiver)
    assert taken == [b"0", b"1"]
    outbound.send(b"5")  # there is room, but others wait
    while outbound.full:
        outbound.retry()
        taken += drain(receiver)
    assert taken == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_the_newest_report_comes_behind_all_else(outbound: Outbound, receiver: zmq.Socket[bytes]) -> None:
    for frame in (b"0", b"1", b"2"):
        outbound.send(frame)
    outbound.report(b"old")
    outbound.report(b"new")
    outbound.retry()  # nobody has taken anything
    taken = drain(receiver)
    while outbound.full:
        outbound.retry()
        taken += drain(receiver)
    assert taken == [b"0", b"1", b"2", b"new"]


def test_a_report_alone_waits_too(outbound: Outbound, receiver: zmq.Socket[bytes]) -> None:
    for frame in (b"0", b"1"):
        outbound.report(frame)
    assert not outbound.full
    outbound.report(b"2")
    assert outbound.full
    assert drain(receiver) == [b"0", b"1"]
    while outbound.full:  # word of the room takes a moment
        outbound.retry()
    assert drain(receiver) == [b"2"]
