"""Clients that never read. The server has to let go of them, by its limits of bytes and of time.

A socket that is nobody's to read from can only be asked whether the other side has reset it. The kernel would take
megabytes for such a client over the loopback; a small window and small segments make it a client far away, for which
the server's kernel takes some ten kilobytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from random import Random

from tests.process.chaos.stage import Stage
from tests.process.chaos.templates import Template, endless

#: How long a client keeps still, while there is somebody who can make bytes for it. It has to be let go of by then.
PATIENCE = 20.0
#: After that it reads, for so many seconds: an answer that was cut has an end.
_READS = 5.0


class Staller:
    """One client after the other that takes nothing of what it asked for; ``number`` names its chain of choices."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self._random = Random(f"{stage.options.seed} staller {number}")
        self._label = f"staller-{number}"
        self._asked = 0

    async def run(self) -> None:
        """Stall until the disturbance is over."""
        while await self._stage.pause(self._random.uniform(0, 2)):
            self._asked += 1
            await self._stall(endless(self._random.choice((1, 2, 6))), f"{self._label}-{self._asked}")

    async def _stall(self, template: Template, label: str) -> None:
        self._stage.open += 1
        sock = _far_away()
        try:
            await _ask(sock, self._stage.url, template, label)
            if await self._let_go(sock, template, label):
                self._stage.tally.stalls += 1
        finally:
            sock.close()
            self._stage.open -= 1

    async def _let_go(self, sock: socket.socket, template: Template, label: str) -> bool:
        """Wait for the server to end the connection; False if it has refused the request, or time is over before."""
        waited = 0.0
        while waited < PATIENCE:
            if _is_reset(sock):
                self._stage.tally.stalls_cut += 1
                return True
            if _status(sock) in (b"429", b"503"):
                return False
            if not await self._stage.pause(0.2):
                return False
            waited += 0.2 if self._stage.whole else 0.0
        ended, received = await _read(sock)
        if ended:
            self._stage.tally.stalls_cut += 1
        else:
            what = f"a client that reads nothing is kept for {PATIENCE} s, and gets {len(received)} bytes then"
            self._stage.findings.failed(what, template, label=label, received=received[-2000:])
        return True


def _far_away() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
    sock.setblocking(False)
    return sock


async def _ask(sock: socket.socket, url: str, template: Template, label: str) -> None:
    loop = asyncio.get_running_loop()
    host, _, port = url.removeprefix("http://").rpartition(":")
    await loop.sock_connect(sock, (host, int(port)))
    body = json.dumps(template.body).encode()
    head = f"POST {template.path} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {label}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + body)


def _is_reset(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, 0)  # errors and hang-ups are always told
    return bool(poll.poll(0))


def _status(sock: socket.socket) -> bytes:
    """The status of the answer, which stays unread; b"" before it is there."""
    try:
        return sock.recv(12, socket.MSG_PEEK)[9:]
    except (BlockingIOError, ConnectionError):
        return b""


async def _read(sock: socket.socket) -> tuple[bool, bytes]:
    """Whether the answer has an end, and what came of it."""
    loop, received = asyncio.get_running_loop(), bytearray()
    deadline = loop.time() + _READS
    with contextlib.suppress(asyncio.TimeoutError):
        while loop.time() < deadline:
            try:
                part = await asyncio.wait_for(loop.sock_recv(sock, 1 << 16), _READS)
            except ConnectionError:
                return True, bytes(received)
            if not part:
                return True, bytes(received)
            received += part
    return False, bytes(received)
