"""The least that a Python server can pay for an event on a socket: one ticker that writes to uvloop's transports.

It is a process of its own, so that it has the CPU time to itself:

    python floor.py N SIZE EVENTS_PER_WRITE INTERVAL SECONDS

N connections; each tick writes to each of them ``EVENTS_PER_WRITE`` events of ``SIZE`` bytes in one piece, ``INTERVAL``
seconds after the tick before (0: as fast as the loop turns). stdout: the port, then, after ``SECONDS`` of measuring
from the moment at which all are connected, a line of JSON: CPU µs per event, and events.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

import uvloop

#: Bytes in a transport at which its connection is left out of a tick: the client has not kept up.
FULL = 64 << 10


class Connection(asyncio.Protocol):
    """One client; what it sends does not matter."""

    transports: list[asyncio.Transport] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transports.append(transport)  # type: ignore[arg-type]


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def run(count: int, size: int, per_write: int, interval: float, seconds: float) -> None:
    """Serve, tick, report."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while len(Connection.transports) < count:
        await asyncio.sleep(0.01)
    event = b"%x\r\n" % size + b"data: " + b"x" * (size - 8) + b"\n\n" + b"\r\n"
    piece = event * per_write
    for transport in Connection.transports:
        transport.write(piece)
    await asyncio.sleep(0.2)
    begin, cpu, events, due = time.monotonic(), _cpu(), 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        for transport in Connection.transports:
            if transport.get_write_buffer_size() < FULL:
                transport.write(piece)
                events += per_write
        due += interval
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    print(json.dumps({"us_per_event": 1e6 * (_cpu() - cpu) / events, "events": events}), flush=True)


if __name__ == "__main__":
    count, size, per_write, interval, seconds = sys.argv[1:]
    uvloop.run(run(int(count), int(size), int(per_write), float(interval), float(seconds)))
