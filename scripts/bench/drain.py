"""Clients that only take: N connections, one request each, whose answers are read and dropped.

    python drain.py HOST PORT N BYTES_OF_REQUEST_ON_STDIN

stdin: the HTTP request that every connection sends, then the pipe stays open; its end ends the program. stdout: one
JSON line when every connection has had its first bytes, and one for each line that is read from stdin later:
``{"bytes": ..., "events": ...}`` since the start. An event is told by the blank line behind it.

While it connects it takes already: a server cuts off who does not read. It is a program of its own so that its CPU time
is nobody else's, and as cheap as Python allows: one epoll, one buffer.
"""

from __future__ import annotations

import json
import select
import socket
import sys

#: Connections that are opened between two looks at those that are open: each look may have something of all of them.
_CONNECTS = 64


class Clients:
    """Connections whose bytes are counted and dropped. begun: how many have had some."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._silent: set[int] = set()
        self._view = memoryview(bytearray(1 << 18))
        self.bytes = self.events = self.begun = 0

    def connect(self, host: str, port: int, request: bytes) -> None:
        """Open one and send."""
        made = socket.create_connection((host, port))
        made.sendall(request)
        made.setblocking(False)
        self._sockets[made.fileno()] = made
        self._silent.add(made.fileno())
        self._poll.register(made, select.EPOLLIN)

    def watch(self, number: int) -> None:
        """See to another descriptor too."""
        self._poll.register(number, select.EPOLLIN)

    def take(self, timeout: float = -1.0) -> bool:
        """All that is there, once something is; seconds. Whether the other descriptor has something."""
        other = False
        for number, _ in self._poll.poll(timeout):
            if (client := self._sockets.get(number)) is None:
                other = True
            else:
                self._take(number, client)
        return other

    def _take(self, number: int, client: socket.socket) -> None:
        try:
            got = client.recv_into(self._view)
        except (BlockingIOError, ConnectionResetError):
            return
        if not got:
            self._poll.unregister(number)
            return
        self.bytes += got
        self.events += bytes(self._view[:got]).count(b"\n\n")
        if self._silent and number in self._silent:
            self._silent.discard(number)
            self.begun += 1


def main() -> int:
    """Take until stdin ends."""
    host, port, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    stdin, clients = sys.stdin.buffer, Clients()
    request = stdin.read(size)
    for number in range(count):
        clients.connect(host, port, request)
        if number % _CONNECTS == 0:
            clients.take(0)
    clients.watch(stdin.fileno())
    while clients.begun < count:
        if clients.take() and not stdin.readline():
            return 0
    print(json.dumps({"begun": count}), flush=True)
    while True:
        if clients.take():
            if not stdin.readline():
                return 0
            print(json.dumps({"bytes": clients.bytes, "events": clients.events}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
