"""Who takes nothing of what waits for him, and what becomes of him, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from serve.config import Config
from serve.limits import ClientLimits
from serve.outlets import HIGH_WATER, KEY, Outlet, Outlets, outlet_of


class Socket:
    """Remembers its options."""

    def __init__(self) -> None:
        self.options: dict[tuple[int, int], Any] = {}

    def fileno(self) -> int:
        return -1

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        self.options[level, name] = value


class Pipe:
    """A transport whose client takes what the test lets it take."""

    def __init__(self, size: int = 0) -> None:
        self.size, self.socket, self.aborted = size, Socket(), 0

    def get_write_buffer_size(self) -> int:
        return self.size

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == HIGH_WATER

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self.socket}.get(name, default)

    def write(self, data: bytes) -> None:
        self.size += len(data)

    def abort(self) -> None:
        self.aborted += 1


class Timer:
    """What the loop was asked to do, and when."""

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at, self.call = at, call


class Loop:
    """An event loop's clock and timers, nothing else."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + delay, call))
        return self.timers[-1]

    def run(self, seconds: float) -> None:
        """Let time pass, and timers with it."""
        end = self.now + seconds
        while self.timers and min(self.timers, key=lambda timer: timer.at).at <= end:
            timer = min(self.timers, key=lambda timer: timer.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.call()
        self.now = end


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    return made


class Server:
    """Outlets, and what they report."""

    def __init__(self, **limits: Any) -> None:
        self.dropped: list[str] = []
        self.outlets = Outlets(ClientLimits(**limits), self.dropped.append)

    def client(self, size: int = 0) -> tuple[Pipe, Outlet]:
        pipe = Pipe(size)
        return pipe, self.outlets.opened(pipe)


# -------------------------------------------------------------------------------- clients that take nothing


def test_who_takes_nothing_is_disconnected(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(client_stall_timeout=30.0)
    (pipe, outlet), (fast, _) = server.client(70_000), server.client(0)
    outlet.label = b"the-id"
    loop.run(29.5)
    assert not pipe.aborted
    with caplog.at_level(logging.WARNING, "tailrace.clients"):
        loop.run(1.5)
    assert pipe.aborted == 1 and not fast.aborted and server.dropped == ["seconds"]
    assert "request 'the-id'" in caplog.text and "70000 bytes" in caplog.text
    loop.run(100)
    outlet.drop("bytes")
    loop.run(1)
    assert pipe.aborted == 1 and server.dropped == ["seconds"]


def test_whatever_it_takes_is_enough(loop: Loop) -> None:
    server = Server(client_stall_timeout=30.0)
    pipe, _ = server.client(70_000)
    for _ in range(40):
        loop.run(29)
        pipe.size -= 1
    assert not pipe.aborted
    loop.run(32)
    assert pipe.aborted


def test_a_client_that_takes_less_than_comes_is_no_idle_one(loop: Loop) -> None:
    """Its buffer grows from tick to tick, but by less than is written."""
    server = Server(client_stall_timeout=3.0)
    pipe, outlet = server.client(1000)
    for _ in range(100):
        pipe.size -= 1
        outlet.send(bytes(100), 100)
        loop.run(0.5)
    assert not pipe.aborted


def test_neither_is_one_whose_writer_was_woken(loop: Loop) -> None:
    server = Server(client_stall_timeout=3.0)
    pipe, outlet = server.client(65_536)
    for _ in range(20):
        outlet.paused()
        outlet.resumed()
        loop.run(2)
    assert not pipe.aborted


def test_an_idle_connection_may_stay(loop: Loop) -> None:
    server = Server(client_stall_timeout=1.0)
    pipe, _ = server.client(0)
    loop.run(1000)
    pipe.size = 10
    loop.run(0.9)
    assert not pipe.aborted
    loop.run(1)
    assert pipe.aborted


def test_a_standstill_of_ours_is_not_held_against_clients(loop: Loop) -> None:
    server = Server(client_stall_timeout=30.0)
    pipe, _ = server.client(10)
    loop.run(10)
    loop.now += 3600
    loop.run(15)
    assert not pipe.aborted
    loop.run(10)
    assert pipe.aborted


def test_nobody_is_looked_for_without_clients(loop: Loop) -> None:
    server = Server()
    (_, outlet), (_, other) = server.client(), server.client()
    assert len(loop.timers) == 1
    for each in (outlet, other):
        server.outlets.closed(each)
    loop.run(2)
    assert loop.timers == [] and outlet.idle(0.0) == 0


@pytest.mark.parametrize(
    ("stall", "interval", "period"), [(30, 15, 1), (2, 15, 0.5), (30, 1, 0.25), (0, 1, 0.25), (0.001, 9, 0.01)]
)
def test_the_period_fits_the_limits(loop: Loop, stall: float, interval: float, period: float) -> None:
    Server(client_stall_timeout=stall, keep_alive_interval=interval).client()
    assert loop.timers[0].at - loop.now == pytest.approx(period)


def test_without_times_nothing_is_timed(loop: Loop) -> None:
    server = Server(client_stall_timeout=0, keep_alive_interval=0)
    pipe, _ = server.client(10)
    assert loop.timers == [] and not pipe.aborted


# -------------------------------------------------------------------------------- what a disconnect does


def test_many_at_once_leave_the_loop_time_for_others(loop: Loop) -> None:
    server = Server(client_stall_timeout=4.0)
    pipes = [server.client(1)[0] for _ in range(100)]
    cut: list[int] = []
    loop.run(3.9)
    for _ in range(200):
        before = sum(pipe.aborted for pipe in pipes)
        loop.run(0.005)
        cut.append(sum(pipe.aborted for pipe in pipes) - before)
    assert sum(cut) == 100 and max(cut) < 40 and len(server.dropped) == 100


def test_the_connection_is_reset(loop: Loop) -> None:
    """Else the kernel would keep what the client has not taken, and wait for it."""
    server = Server()
    pipe, outlet = server.client(5)
    outlet.drop("bytes")
    loop.run(0)
    assert pipe.aborted and server.dropped == ["bytes"]
    assert pipe.socket.options == {(socket.SOL_SOCKET, socket.SO_LINGER): struct.pack("ii", 1, 0)}


def test_who_leaves_before_that_is_left_alone(loop: Loop) -> None:
    """A closed socket refuses its options, and the next one has to be cut all the same."""
    server = Server()
    (left, outlet), (pipe, other) = server.client(5), server.client(5)
    for each in (outlet, other):
        each.drop("bytes")
    server.outlets.closed(outlet)
    loop.run(0)
    assert not left.aborted and not left.socket.options and pipe.aborted


def test_the_kernels_verdict_counts_too(loop: Loop) -> None:
    server = Server()
    (pipe, stalled), (_, left), (_, reset) = server.client(), server.client(), server.client()
    server.outlets.closed(left)
    server.outlets.closed(reset, ConnectionResetError())
    assert server.dropped == []
    server.outlets.closed(stalled, TimeoutError())
    assert server.dropped == ["seconds"]
    loop.run(2)
    assert loop.timers == [] and not pipe.aborted


@pytest.mark.parametrize("timeout", [0.0, 0.2, 30.0, 1e6])
def test_accepted_sockets_inherit_the_bounds(timeout: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Outlets(ClientLimits(client_stall_timeout=timeout)).prepare(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 128 << 10
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                seconds = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
                assert seconds == {0.0: 0, 0.2: 1, 30.0: 60, 1e6: 32767}[timeout]


# -------------------------------------------------------------------------------- streams


class Stream:
    """Notes when it was told the time."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def tick(self, now: float, interval: float) -> None:
        self.ticks.append(now)
        assert interval == 8


def test_streams_are_told_the_time(loop: Loop) -> None:
    outlets, stream = Outlets(ClientLimits(keep_alive_interval=8)), Stream()
    outlets.add(stream)
    loop.run(3.5)
    assert stream.ticks == [1, 2, 3]
    outlets.discard(stream)
    loop.run(10)
    assert len(stream.ticks) == 3 and loop.timers == []
    silent = Outlets(ClientLimits(keep_alive_interval=0))
    silent.add(stream)
    loop.run(10)
    assert len(stream.ticks) == 3


def test_an_outlet_is_found_by_its_scope(loop: Loop) -> None:
    _, outlet = Server().client()
    assert outlet_of({"state": {KEY: outlet}}) is outlet
    assert outlet_of({"state": {}}) is outlet_of({}) is None


def test_limits_are_flags_of_the_same_name() -> None:
    limits = ClientLimits.of(Config(max_requests=7, client_stall_timeout=0.5))
    assert (limits.max_requests, limits.client_stall_timeout) == (7, 0.5)
    assert ClientLimits.of(Config()) == ClientLimits()
    assert {field.name for field in fields(ClientLimits)} <= {field.name for field in fields(Config)}
