"""Connections, seen from behind: what their clients have not taken yet, and the end of those that take nothing.

Bytes for a client wait in three places: the slot of its stream (``streams.py``), the write buffer of its transport,
and the kernel. uvicorn writes into the transport at once and stops a response's writer (``await send``) while too much
waits there, so one client that does not read delays nobody; but nothing in it ever gives up on that client.
This file does:

- An ``Outlet`` is one connection's transport. It lives as long as the connection, whatever the route, since bytes of a
  response may wait long after the application has returned.
- ``Outlets`` is all of them. One timer for the whole server looks at each, once a second by default: 4,096 connections
  with an open stream take 2 ms then, and no chunk pays for a timer (``wait_for`` would cost it 8 µs, a timer that is
  armed anew 1 µs).
- A client is disconnected with a reset. An orderly end would wait for it to take what it has not taken so far, in our
  memory and then in the kernel's.
- What the kernel takes for a client is bounded by options of the listening socket, and so is the time for which a
  client may leave that alone. So nothing is kept for a client that has vanished without a word either.

**Progress** is a transport buffer that holds less than it did and than was written since: it shrinks only if the client
(or the kernel, for it) takes something. It is looked at once a tick, and by a stream that gets more while bytes wait;
uvicorn's wake-up of a blocked writer counts as progress as well, for what is no stream.

**Time** is that in which the loop was alive: after a standstill of this process, say by SIGSTOP, the first turn of the
loop must not find that all its clients have been idle meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Scope

from serve.limits import ClientLimits

logger = logging.getLogger("tailrace.clients")

#: Key of a connection's Outlet in the ``state`` of its scopes.
KEY = "tailrace.outlet"

#: Bytes in a transport's buffer that stop its writer. uvloop's own mark is 64 KiB, and full of events of 200 bytes that
#: takes 300 kB: each write waits as an object of its own. In the slot of a stream the same bytes are far smaller.
HIGH_WATER = 16 << 10
#: Bytes that the kernel takes of us before it has sent the earlier ones. By default it takes up to 4 MB for a client
#: that does not read (measured on loopback: 3.9 MB, with this 140 kB); neither limit would see those.
_UNSENT = 128 << 10

#: Clients that are disconnected in one turn of the loop, and the seconds before the next ones are.
_AT_ONCE, _PAUSE = 16, 0.005

#: SO_LINGER with 0 seconds: closing resets, and drops what the kernel still holds.
_RESET = struct.pack("ii", 1, 0)


class Transport(Protocol):
    """The part of asyncio's write transports that is needed here."""

    def get_write_buffer_size(self) -> int:
        """Bytes that wait."""

    def set_write_buffer_limits(self, high: int) -> None:
        """Stop its writer with so many."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """The socket."""

    def write(self, data: bytes) -> None:
        """Send, or keep in the buffer."""

    def abort(self) -> None:
        """Close at once."""


class Outlet:
    """One connection.

    label: of its latest request, for the log. clear: whether a stream may ``send``. written: bytes of streams so far.

    What is written into the socket costs a third less than what a transport is given to write; but bytes that wait in
    the transport go first.
    """

    __slots__ = (
        "label", "written", "clear", "_outlets", "_transport", "_socket", "_buffered", "_taken", "_took", "_since",
        "_dropped", "_gone",
    )  # fmt: skip

    def __init__(self, outlets: Outlets, transport: Transport, now: float) -> None:
        self.label = b""
        self.written, self.clear = 0, True
        self._outlets, self._transport = outlets, transport
        #: whether something may wait in the transport
        self._socket, self._buffered = _descriptor(transport), True
        #: ``written`` without what is still in the buffer, as of the last tick; whether something else was taken since
        self._taken, self._took = 0, False
        #: when the client last took something, or had nothing to take
        self._since = now
        self._dropped = self._gone = False

    def waiting(self) -> int:
        """Bytes in the transport's buffer."""
        return self._transport.get_write_buffer_size()

    def put(self, data: bytes) -> None:
        """Write, for whoever is no stream."""
        self._buffered = True
        self._transport.write(data)

    def send(self, data: bytes, size: int) -> None:
        """Write bytes of a stream, ``size`` of them without what they are wrapped in. To be called while ``clear``."""
        self.written += size
        if self._buffered and (self._socket < 0 or self.waiting()):
            self._transport.write(data)
            return
        self._buffered = False
        try:
            sent = os.write(self._socket, data)
        except TimeoutError:  # the kernel's verdict: it says so once, and has said it to us
            self.drop("seconds")
            return
        except OSError:  # full, or the client is gone: the transport finds that out, and knows what to do
            sent = 0
        if sent != len(data):
            self.put(data[sent:])

    def paused(self) -> None:
        """The buffer is above its mark."""
        self.clear = False

    def resumed(self) -> None:
        """It is below it again: the client has taken something, and a look at the buffer may not show it."""
        self._took, self.clear = True, not self._dropped and not self._gone

    def closing(self) -> None:
        """Nothing more may be written, though the connection is there."""
        self.clear = False

    def idle(self, now: float) -> float:
        """Seconds for which the client has taken nothing of what waits for it; called once a tick."""
        waiting = self.waiting()
        taken = self.written - waiting
        if not waiting or taken > self._taken or self._took:
            self._since = now
        self._taken, self._took = taken, False
        return now - self._since

    def drop(self, limit: str) -> None:
        """Disconnect the client soon: it has passed a limit (``bytes``, ``seconds``). Idempotent."""
        if not self._dropped:
            self._dropped, self.clear = True, False
            self._outlets.doom(self, limit)

    def cut(self, limit: str) -> None:
        """Disconnect the client now, if it is still there."""
        name, size = self.label.decode("latin-1") or "-", self.waiting()
        logger.warning("request %r: its client is too slow (%s), with %d bytes in its transport", name, limit, size)
        if not self._gone:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    def gone(self) -> None:
        """The connection is closed: its socket may not be touched any more."""
        self._gone, self.clear = True, False


def _descriptor(transport: Transport) -> int:
    """-1 where bytes have to go through the transport: it encrypts them, or has no socket."""
    found = transport.get_extra_info("socket")
    encrypts = transport.get_extra_info("sslcontext") is not None
    return -1 if found is None or encrypts else int(found.fileno())


class Ticking(Protocol):
    """Who wants to know the time."""

    def tick(self, now: float, interval: float) -> None:
        """Seconds on the clock of ``Outlets``, and those between two signs of life."""


class Outlets:
    """All connections of a server and its open streams. dropped: told the limit, for each client that is disconnected.

    All methods are called on the event loop's thread.
    """

    def __init__(
        self, limits: ClientLimits | None = None, dropped: Callable[[str], object] = lambda limit: None
    ) -> None:
        limits = ClientLimits() if limits is None else limits
        self.dropped = dropped
        self._timeout, self._interval = limits.client_stall_timeout, limits.keep_alive_interval
        #: a fourth of the shorter time, so that no limit is overrun by much
        shorter = min([4.0, *(limit for limit in (self._timeout, self._interval) if limit)])
        self._period = max(0.01, shorter / 4)
        self._connections: set[Outlet] = set()
        self._streams: set[Ticking] = set()
        #: clients to be disconnected, and what for
        self._doomed: deque[tuple[Outlet, str]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        #: seconds in which the loop was alive, and when it was last seen so
        self._now, self._seen = 0.0, 0.0

    def opened(self, transport: Transport) -> Outlet:
        """A client has connected."""
        transport.set_write_buffer_limits(high=HIGH_WATER)
        outlet = Outlet(self, transport, self._now)
        self._connections.add(outlet)
        self._start()
        return outlet

    def closed(self, outlet: Outlet, error: Exception | None = None) -> None:
        """It is gone. error: what the transport says of it; a timeout is the kernel's verdict, by our options."""
        self._connections.discard(outlet)
        outlet.gone()
        if isinstance(error, TimeoutError):
            outlet.drop("seconds")

    def doom(self, outlet: Outlet, limit: str) -> None:
        """Count a client, and disconnect it."""
        self.dropped(limit)
        self._doomed.append((outlet, limit))
        if len(self._doomed) == 1:
            asyncio.get_running_loop().call_later(0, self._cut_some)

    def _cut_some(self) -> None:
        """Few at a time: the end of a connection and of its request takes 0.2 ms, and a thousand clients that started
        together reach a limit together."""
        now = [self._doomed.popleft() for _ in range(min(_AT_ONCE, len(self._doomed)))]
        if self._doomed:
            asyncio.get_running_loop().call_later(_PAUSE, self._cut_some)
        for outlet, limit in now:
            outlet.cut(limit)

    def add(self, stream: Ticking) -> None:
        """A stream has begun."""
        self._streams.add(stream)
        self._start()

    def discard(self, stream: Ticking) -> None:
        """It has ended."""
        self._streams.discard(stream)

    def prepare(self, listener: socket.socket) -> None:
        """Bound what the kernel keeps for the clients of a listening socket: accepted sockets inherit these options."""
        for name, value in self._options():
            if (number := getattr(socket, name, None)) is not None:  # most are Linux's
                listener.setsockopt(socket.IPPROTO_TCP, number, value)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _options(self) -> list[tuple[str, int]]:
        """While nothing waits in this process, it is the kernel's to see whether a client takes what it was sent. It
        gets twice the time, since it can tell less: the name of the request is known here."""
        options = [("TCP_NOTSENT_LOWAT", _UNSENT)]
        if self._timeout:
            seconds = min(max(1, int(2 * self._timeout)), 32767)
            options += [("TCP_USER_TIMEOUT", 1000 * seconds), ("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", seconds)]
        return options

    def _start(self) -> None:
        if self._timer is None and (self._timeout or self._interval):
            loop = asyncio.get_running_loop()
            self._seen = loop.time()
            self._timer = loop.call_later(self._period, self._tick)

    def _tick(self) -> None:
        """Look at everybody; nobody is looked for while there is nobody."""
        self._timer = None
        self._now += min(asyncio.get_running_loop().time() - self._seen, 2 * self._period)
        if self._connections or self._streams:
            self._start()
        if self._timeout:
            now, timeout = self._now, self._timeout
            for outlet in [outlet for outlet in self._connections if outlet.idle(now) >= timeout]:
                outlet.drop("seconds")
        if self._interval:
            for stream in self._streams:
                stream.tick(self._now, self._interval)


def outlet_of(scope: Scope) -> Outlet | None:
    """The connection of a request; None behind another server than ours."""
    outlet: Outlet | None = scope.get("state", {}).get(KEY)
    return outlet
