"""The address that clients connect to.

With several front ends each has a listening socket of its own at the same address (SO_REUSEPORT), and the kernel
spreads the connections over them. Anybody of our user may join such an address, a second server by mistake too. So the
launcher first takes it alone, which fails if somebody is there, and then holds a place that does not listen: with it
the port is ours while front ends come and go.
"""

from __future__ import annotations

import socket

_BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0: a free one. OSError if the address cannot be had. shared: beside others of ours."""
    both = host == "::" and socket.has_dualstack_ipv6()  # every address: those of IPv4 too
    return socket.create_server(
        (host, port), family=_family(host), backlog=_BACKLOG, dualstack_ipv6=both, reuse_port=shared
    )


def reserve(host: str, port: int) -> socket.socket:
    """A place at an address where ``listen`` with ``shared`` will succeed; it gets no connections. OSError as there."""
    with listen(host, port) as alone:
        port = alone.getsockname()[1]
    place = socket.socket(_family(host), socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if place.family == socket.AF_INET6:
        place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
    try:
        place.bind((host, port))
    except OSError:
        # What is left of connections of an earlier server. SO_REUSEADDR takes no offence at it, but while none of ours
        # listens it would let others in.
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
    return place


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
