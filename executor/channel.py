"""ZeroMQ sockets between our processes: addresses, high-water marks, sizes, linger.

All of them are PUSH -> PULL. The receiver binds, so a sender may be replaced at any time. ``ipc://`` sockets lie in a
directory that only we can enter. ``tcp://`` is refused without CURVE keys (``curve.py``), since nothing on it would be
authenticated; the server itself has no use for it yet.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import zmq

from executor.curve import CurveKeys, Gate, identify
from executor.wire import MAX_FRAME

#: Messages, per side of a connection. A worker that has this many steps waiting is slow: the executor then joins steps.
STEPS_HWM = 64
#: Bytes that are handled in one turn of a loop: a million ids, which a worker that was left behind gets through in some
#: tenths of a second.
AT_ONCE = 4 << 20
#: Messages of emissions, likewise. A front end that is behind has no more than that waiting from each worker: a second
#: of bytes in a queue is a second of delay, whereas ids that gather make larger chunks.
EMISSIONS_HWM = 2
#: Submits and aborts are bounded by admission; the mark is only a backstop against a process that hangs.
CONTROL_HWM = 100_000


#: As plain integers: arithmetic on pyzmq's enumerations costs more than the calls.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)


class AddressError(ValueError):
    """An address that must not be used; the message says why."""


def check_address(address: str, curve: bool = False) -> None:
    """Refuse everything but ``inproc://``, an ``ipc://`` path in a private directory, and ``tcp://`` with CURVE."""
    scheme, _, path = address.partition("://")
    if scheme == "inproc" and path:
        return
    if scheme == "tcp" and curve:
        return
    if scheme == "tcp":
        raise AddressError(f"{address}: tcp:// is refused without CURVE keys; use ipc://")
    if scheme != "ipc" or not path.startswith("/"):  # "@name" would be an abstract socket, which no directory protects
        raise AddressError(f"{address}: not an ipc:// address with an absolute path")
    try:
        mode = stat.S_IMODE(os.stat(Path(path).parent).st_mode)
    except (OSError, ValueError) as error:
        raise AddressError(f"{address}: its directory cannot be used: {error}") from None
    if mode & 0o077:
        raise AddressError(f"{address}: the directory has mode {mode:04o}; it must not be open to others (0700)")


def bind_pull(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    hwm: int = CONTROL_HWM,
    *,
    curve: CurveKeys | None = None,
    gate: Gate | None = None,
) -> zmq.Socket[bytes]:
    """A receiving socket. With ``curve`` it takes messages of those peers alone, and needs the context's gate.
    AddressError for an address that must not be used; zmq.ZMQError if it is taken."""
    check_address(address, curve is not None)
    if (curve is None) != (gate is None):
        raise AddressError(f"{address}: CURVE keys and a gate go together; without the gate, the keys let everybody in")
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.LINGER, 0)
    if curve is not None and gate is not None:
        gate.guard(socket, curve)
    socket.bind(address)
    return socket


def connect_push(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    hwm: int = CONTROL_HWM,
    linger_ms: int = 1000,
    *,
    curve: CurveKeys | None = None,
) -> zmq.Socket[bytes]:
    """A sending socket. ``linger_ms``: how long its last messages may still leave once it is closed. ``curve``: our
    keys, and the receiver's as the one peer."""
    check_address(address, curve is not None)
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.LINGER, linger_ms)
    if curve is not None:
        identify(socket, curve)
    socket.connect(address)
    return socket


def drain(socket: zmq.Socket[bytes], limit: int = 256, most: int = 1 << 40) -> list[bytes]:
    """Frames that have arrived, at most ``limit``, and none once there are ``most`` bytes: one busy sender must not
    keep the loop from everything else. Less than that: the socket is empty, and its descriptor will tell of the next
    one."""
    frames: list[bytes] = []
    size = 0
    # To ask costs a third of the exception that an empty socket raises.
    while len(frames) < limit and size < most and socket.getsockopt(_EVENTS) & _POLLIN:  # type: ignore[operator]
        frames.append(socket.recv(_NOBLOCK))
        size += len(frames[-1])
    return frames


def try_send(socket: zmq.Socket[bytes], frame: bytes) -> bool:
    """Send without waiting; False when the receiver's queue is full."""
    try:
        socket.send(frame, _NOBLOCK)
    except zmq.Again:
        return False
    return True
