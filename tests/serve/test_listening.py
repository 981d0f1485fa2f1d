"""Addresses that several processes share, and that no other server gets into."""

from __future__ import annotations

import socket

import pytest

from serve.listening import listen, reserve


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_reserved_port_is_shared_by_those_who_listen(host: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with reserve(host, 0) as place:
        port = place.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):  # the place itself does not listen
            socket.create_connection(("127.0.0.1", port), 5)
        with listen(host, port, shared=True) as first, listen(host, port, shared=True) as second:
            clients = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(64)]
            taken = []
            for listener in (first, second):
                listener.setblocking(False)
                taken.append(_accepted(listener))
            assert sum(taken) == 64 and min(taken) > 0
            for client in clients:
                client.close()


def _accepted(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_taken_port_is_not_joined() -> None:
    with reserve("127.0.0.1", 0) as place:
        port = place.getsockname()[1]
        for take in (reserve, listen):
            with pytest.raises(OSError):
                take("127.0.0.1", port)
    with reserve("127.0.0.1", port), listen("127.0.0.1", port, shared=True):
        pass
