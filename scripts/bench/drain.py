"""Clients that only take: N connections, one request each, whose answers are read and dropped.

    python drain.py HOST PORT N BYTES_OF_REQUEST_ON_STDIN

stdin: the HTTP request that every connection sends, then the pipe stays open; its end ends the program. stdout: one
JSON line when every connection has had its first bytes, and one for each line that is read from stdin later:
``{"bytes": ..., "events": ...}`` since the start. An event is told by the blank line behind it.

It is a program of its own so that its CPU time is nobody else's, and as cheap as Python allows: one epoll, one buffer.
"""

from __future__ import annotations

import json
import select
import socket
import sys


def connect(host: str, port: int, count: int, request: bytes) -> dict[int, socket.socket]:
    """Open the connections and send."""
    sockets = {}
    for _ in range(count):
        made = socket.create_connection((host, port))
        made.sendall(request)
        made.setblocking(False)
        sockets[made.fileno()] = made
    return sockets


def main() -> int:
    """Take until stdin ends."""
    host, port, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    stdin = sys.stdin.buffer
    sockets = connect(host, port, count, stdin.read(size))
    poll = select.epoll()
    for number in sockets:
        poll.register(number, select.EPOLLIN)
    poll.register(stdin.fileno(), select.EPOLLIN)
    silent, taken, events = set(sockets), 0, 0
    buffer = bytearray(1 << 18)
    view = memoryview(buffer)
    while True:
        for number, _ in poll.poll():
            if number == stdin.fileno():
                if not stdin.readline():
                    return 0
                print(json.dumps({"bytes": taken, "events": events}), flush=True)
                continue
            try:
                got = sockets[number].recv_into(buffer)
            except (BlockingIOError, ConnectionResetError):
                continue
            if not got:
                poll.unregister(number)
                continue
            taken += got
            events += bytes(view[:got]).count(b"\n\n")
            if silent:
                silent.discard(number)
                if not silent:
                    print(json.dumps({"begun": count}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
