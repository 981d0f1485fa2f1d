"""CURVE over TCP: messages of known senders arrive, those of nobody else do, and nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from executor.channel import AddressError, bind_pull, connect_push, drain, try_send
from executor.curve import CurveError, CurveKeys, Gate, identify

ANY = "tcp://127.0.0.1:*"
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def gate(context: Context) -> Iterator[Gate]:
    with Gate(context) as made:
        yield made


RECEIVER, SENDER, OTHER = (CurveKeys.generate() for _ in range(3))


def receiving(context: Context, gate: Gate, *peers: CurveKeys, keys: CurveKeys = RECEIVER) -> tuple[Socket, str]:
    socket = bind_pull(context, ANY, curve=keys.knowing(*(peer.public for peer in peers)), gate=gate)
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


@contextmanager
def knocking(context: Context, address: str, keys: CurveKeys | None) -> Iterator[Socket]:
    """What a sender with a message on its way notices of its connection."""
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.LINGER, 0)
    events = push.get_monitor_socket(zmq.EVENT_ALL)
    if keys is not None:
        identify(push, keys)
    push.connect(address)
    assert try_send(push, b"let me in")
    yield events
    push.disable_monitor()
    push.close()


def outcome(events: Socket) -> int:
    """How the handshake ended."""
    ends = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    )  # fmt: skip
    while events.poll(10_000):
        event = recv_monitor_message(events)["event"]
        if event in ends:
            return int(event)
    raise AssertionError("the handshake has no end")


def test_messages_of_a_known_sender_arrive(context: Context, gate: Gate) -> None:
    receiver, address = receiving(context, gate, OTHER, SENDER)
    sender = connect_push(context, address, curve=SENDER.knowing(RECEIVER.public))
    frames = [b"%d" % i for i in range(300)]
    for frame in frames:
        sender.send(frame)
    got: list[bytes] = []
    while len(got) < len(frames):
        assert receiver.poll(10_000), "frames are missing"
        got += drain(receiver)
    assert got == frames


STRANGERS = {
    "no keys": (None, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    # All it knows is what is public: our key.
    "made-up keys": (OTHER.knowing(RECEIVER.public), zmq.EVENT_HANDSHAKE_FAILED_AUTH),
    "another receiver's key": (SENDER.knowing(OTHER.public), zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    "the receiver's own keys": (RECEIVER.knowing(RECEIVER.public), zmq.EVENT_HANDSHAKE_FAILED_AUTH),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_not_let_in(name: str, context: Context, gate: Gate) -> None:
    """The message of a known sender, that came later, is the only one."""
    keys, end = STRANGERS[name]
    receiver, address = receiving(context, gate, SENDER)
    with knocking(context, address, keys) as events:
        assert outcome(events) == end
        sender = connect_push(context, address, curve=SENDER.knowing(RECEIVER.public))
        assert try_send(sender, b"known")
        assert receiver.poll(10_000) and list(drain(receiver)) == [b"known"]


def test_a_sender_that_is_not_let_in_is_not_blocked(context: Context, gate: Gate) -> None:
    receiver, address = receiving(context, gate, SENDER)
    sender = connect_push(context, address, 2, 0, curve=OTHER.knowing(RECEIVER.public))
    assert [try_send(sender, b"x") for _ in range(100)][-1] is False
    assert list(drain(receiver)) == []


def test_each_receiver_has_peers_of_its_own(context: Context, gate: Gate) -> None:
    """One gate, two sockets: who is known to one is a stranger to the other."""
    first, first_address = receiving(context, gate, SENDER)
    second, second_address = receiving(context, gate, OTHER, keys=CurveKeys.generate())
    with knocking(context, first_address, OTHER.knowing(RECEIVER.public)) as events:
        assert outcome(events) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with knocking(context, first_address, SENDER.knowing(RECEIVER.public)) as events:
        assert outcome(events) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert first.poll(10_000) and list(drain(first)) == [b"let me in"]
    assert second_address != first_address and list(drain(second)) == []


def test_nobody_is_let_in_by_an_empty_list(context: Context, gate: Gate) -> None:
    receiver, address = receiving(context, gate)
    with knocking(context, address, SENDER.knowing(RECEIVER.public)) as events:
        assert outcome(events) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert list(drain(receiver)) == []


def test_nobody_is_let_in_when_there_is_nobody_to_ask(context: Context) -> None:
    """ZeroMQ's default is to let everybody in then. Here the gate is another context's, and hears of nothing."""
    elsewhere: Context = zmq.Context()
    with Gate(elsewhere) as gate:
        receiver, address = receiving(context, gate, SENDER)
        with knocking(context, address, SENDER.knowing(RECEIVER.public)) as events:
            assert outcome(events) != zmq.EVENT_HANDSHAKE_SUCCEEDED
            assert list(drain(receiver)) == []
    elsewhere.destroy(linger=0)


def test_keys_and_gate_go_together(context: Context, gate: Gate) -> None:
    with pytest.raises(AddressError, match="go together"):
        bind_pull(context, ANY, curve=RECEIVER.knowing(SENDER.public))
    with pytest.raises(AddressError, match="without CURVE keys"):
        bind_pull(context, ANY, gate=gate)
    with pytest.raises(AddressError, match="without CURVE keys"):
        connect_push(context, "tcp://127.0.0.1:1")


# ---------------------------------------------------------------------------------------------------- keys


def test_a_pair() -> None:
    keys = CurveKeys.generate(OTHER.public)
    assert keys.peers == {OTHER.public} and keys.knowing().peers == frozenset()
    assert keys.secret.decode() not in repr(keys) and keys != CurveKeys.generate(OTHER.public)


@pytest.mark.parametrize(
    ("public", "secret", "peers", "wrong"),
    [
        (b"short", SENDER.secret, (), "public: "),
        (SENDER.public, b"", (), "secret: "),
        (SENDER.public, b"\x00" * 40, (), "secret: "),
        (SENDER.public, SENDER.secret, (b"x",), "peers: "),
        (SENDER.public, SENDER.secret, (SENDER.public.decode(),), "peers: "),
        (OTHER.public, SENDER.secret, (), "public is not"),
    ],
)
def test_keys_that_cannot_be_used(public: bytes, secret: bytes, peers: tuple[bytes, ...], wrong: str) -> None:
    with pytest.raises(CurveError, match=f"^{wrong}") as caught:
        CurveKeys(public, secret, frozenset(peers))
    assert SENDER.secret.decode() not in str(caught.value)


@pytest.mark.parametrize("peers", [(), (SENDER.public, OTHER.public)])
def test_a_sender_has_one_receiver(context: Context, peers: tuple[bytes, ...]) -> None:
    with pytest.raises(CurveError, match="peers: "):
        connect_push(context, "tcp://127.0.0.1:1", curve=SENDER.knowing(*peers))


def test_a_zeromq_without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(CurveError, match="no CURVE"):
        CurveKeys.generate()
    with pytest.raises(CurveError, match="no CURVE"):
        CurveKeys(SENDER.public, SENDER.secret)
