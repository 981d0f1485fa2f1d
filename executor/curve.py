"""CURVE for ``tcp://``: who is at the other end of a connection between two machines, and nobody reads along.

CURVE (ZeroMQ RFC 26) encrypts, and shows a sender that its receiver holds the secret key of a public one. In the other
direction it shows less than it seems: *a receiver takes every sender that knows its public key*, with a key pair made
up on the spot, unless its context has a handler that is asked about each one (ZAP, RFC 27). A public key is no secret,
so such a receiver would take messages from anybody. Two things close that:

- ``Gate`` is that handler. It lets in the keys that were named for a socket, and no others.
- Every socket that it guards says that it must be asked (``ZAP_ENFORCE_DOMAIN``). Without a handler, or after the end
  of it, a socket lets nobody in; ZeroMQ's own default is to let everybody in then.

A sender that is not let in notices nothing but that its queue fills up: ``try_send`` returns False in the end, as with
a receiver that is not there. Nothing waits.

No flag of the server leads here yet: all its processes run on one machine, over ``ipc://``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

import zmq
from zmq.auth.thread import ThreadAuthenticator

_KEY_LENGTH = 40


class CurveError(ValueError):
    """Keys that cannot be used, or a ZeroMQ without CURVE; the message says which, and shows no secret."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A process's own key pair and the public keys of whom it talks to, all in Z85 (40 ASCII characters).

    A receiver lets in any of its ``peers``; a sender has one, the receiver it expects.
    """

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        if not zmq.has("curve"):
            raise CurveError("this build of ZeroMQ has no CURVE (libsodium)")
        for name, key in [("public", self.public), ("secret", self.secret), *(("peers", key) for key in self.peers)]:
            if not isinstance(key, bytes) or len(key) != _KEY_LENGTH:
                raise CurveError(f"{name}: a key is {_KEY_LENGTH} bytes in Z85")
        if _public_of(self.secret) != self.public:
            raise CurveError("public is not the public key of secret")

    @classmethod
    def generate(cls, *peers: bytes) -> CurveKeys:
        """A new pair."""
        if not zmq.has("curve"):
            raise CurveError("this build of ZeroMQ has no CURVE (libsodium)")
        public, secret = zmq.curve_keypair()
        return cls(public, secret, frozenset(peers))

    def knowing(self, *peers: bytes) -> CurveKeys:
        """The same pair with these peers."""
        return CurveKeys(self.public, self.secret, frozenset(peers))


class Gate:
    """Lets known senders into the receiving sockets of a context. There can be one per context, and it has to be closed
    before the context is; it runs a thread of its own, for a socket's thread may be busy when somebody knocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._guarded = 0
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()

    def guard(self, socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
        """Let nobody but ``keys.peers`` in; before the socket is bound."""
        domain, self._guarded = f"tailrace-{self._guarded}", self._guarded + 1
        self._authenticator.configure_curve_callback(domain, _Peers(keys.peers))
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        _set_pair(socket, keys)

    def close(self) -> None:
        """Let nobody in any more. Who is in stays in."""
        self._authenticator.stop()

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Peers:
    """What ``ThreadAuthenticator`` asks about a socket's senders."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the holder of a public key may send."""
        return key in self._keys


def identify(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Make a sending socket show its key, and accept its one peer as the receiver; before it is connected."""
    if len(keys.peers) != 1:
        raise CurveError(f"peers: a sender has one receiver, not {len(keys.peers)}")
    (receiver,) = keys.peers
    socket.setsockopt(zmq.CURVE_SERVERKEY, receiver)
    _set_pair(socket, keys)


def _set_pair(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _public_of(secret: bytes) -> bytes:
    try:
        return zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise CurveError("secret: it is not in Z85") from None
