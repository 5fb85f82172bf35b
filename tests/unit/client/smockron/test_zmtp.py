"""One connection of a gatekeeper to a master, without a socket or a clock: handshake, subscriptions and heartbeats."""

from __future__ import annotations

from typing import Any

import pytest

from counterd.client._addresses import Address
from counterd.client.smockron._zmtp import HURRY_S, JOIN_S, OUT_MAX, PREFIXES_MAX, ZmtpSession
from counterd.errors import ProtocolError, Timeout
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Parser, SocketType

OLD = bytearray(wire.greeting())
OLD[11] = 0  # of ZMTP 3.0


def line_of(kind: SocketType, *, heartbeat: float = 5.0, timeout: float = 3.0) -> ZmtpSession:
    session = ZmtpSession(kind, Address("h", 1), heartbeat, timeout)
    session.opened(100.0)
    return session


def sent(session: ZmtpSession) -> bytes:
    data = bytes(session.out)
    session.out.clear()
    return data


def items(data: bytes) -> list[Any]:
    """The items that a master parses out of the data after the greeting."""
    parser = Parser()
    parser.feed(wire.greeting())
    return parser.feed(data)


def ready(session: ZmtpSession, greeting: bytes = wire.greeting(), more: bytes = b"", now: float = 100.0) -> list[Any]:
    """Performs the handshake. Returns the messages that the master sent after it."""
    kind = SocketType.SUB if session.kind is SocketType.PUB else SocketType.PUB
    return session.feed(greeting + wire.ready(kind) + more, now)


def test_the_handshake_goes_on_when_the_peer_has_greeted() -> None:
    session = line_of(SocketType.SUB)
    session.subscribe(b"d\0")
    assert sent(session) == wire.greeting()
    assert session.feed(wire.greeting()[:63], 100.0) == []
    assert sent(session) == b""
    session.feed(wire.greeting()[63:], 100.0)
    assert sent(session) == wire.ready(SocketType.SUB)
    assert not session.is_ready
    assert session.feed(wire.ready(SocketType.PUB) + wire.message(b"d\0", b"x"), 100.0) == [(b"d\0", b"x")]
    assert sent(session) == wire.subscribe(b"d\0") + wire.ping(15, bytes([0, 0, 0, 1]))
    session.subscribe(b"e\0")
    session.subscribe(b"f\0")
    assert sent(session) == wire.subscribe(b"e\0") + wire.subscribe(b"f\0")
    session.look(100.0)
    assert sent(session) == wire.ping(15, bytes([0, 0, 0, 3]))
    session.look(100.0)
    assert sent(session) == b""


def test_a_pong_confirms_the_subscriptions_before_its_ping() -> None:
    """It says nothing about subscriptions that were sent after that PING."""
    session = line_of(SocketType.SUB)
    session.subscribe(b"d\0")
    ready(session)
    session.subscribe(b"e\0")
    session.look(100.0)
    assert (session.joined, session.is_settled, session.due) == (0, False, 105.0)
    session.feed(wire.command(b"PONG", bytes([0, 0, 0, 1])), 100.0)
    assert (session.joined, session.is_settled) == (1, False)
    session.feed(wire.command(b"PONG", bytes([0, 0, 0, 2])), 100.0)
    assert (session.joined, session.is_settled) == (2, True)
    session.look(100.0)
    assert session.due == 105.0
    session.closed(100.0)
    assert (session.joined, session.is_settled) == (0, False)


@pytest.mark.parametrize("greeting", [wire.greeting(), bytes(OLD)])
def test_pongs_without_a_context_are_counted(greeting: bytes) -> None:
    """libzmq 4.2 does not repeat the context."""
    session = line_of(SocketType.SUB)
    session.subscribe(b"d\0")
    ready(session, greeting)
    session.look(105.0)  # a heartbeat
    session.subscribe(b"e\0")
    session.look(105.0)
    for joined in (1, 1, 2, 2):
        session.feed(wire.command(b"PONG"), 105.0)
        assert session.joined == joined
    session.closed(106.0)
    session.opened(106.0)
    ready(session, greeting, now=106.0)
    session.feed(wire.command(b"PONG"), 106.0)
    assert session.is_settled


def test_subscriptions_wait_for_the_pong_of_a_peer_that_knows_pings() -> None:
    """However slow it is, up to the timeout that every PING has."""
    session = line_of(SocketType.SUB)
    session.subscribe(b"d\0")
    ready(session)
    session.look(109.9)
    assert not session.is_settled
    with pytest.raises(Timeout, match="did not answer a PING"):
        session.look(110.0)


def test_without_pongs_a_subscription_counts_as_taken_after_some_time() -> None:
    """However many more subscriptions follow."""
    session = line_of(SocketType.SUB)
    session.subscribe(b"d\0")
    ready(session, bytes(OLD))
    session.subscribe(b"e\0")
    session.look(100.0 + JOIN_S / 2)
    assert (session.joined, session.due) == (0, 100.0 + JOIN_S)
    session.look(100.0 + JOIN_S)
    assert (session.joined, session.due) == (1, 100.0 + JOIN_S / 2 + JOIN_S)
    session.look(100.0 + 2 * JOIN_S)
    assert (session.joined, session.is_settled) == (2, True)


def test_a_port_is_tried_at_once_when_the_other_port_is_back() -> None:
    session = line_of(SocketType.SUB)
    session.hurry(100.0)
    ready(session)
    for now in (100.0, 100.5):
        session.closed(now)
    session.hurry(100.0 + HURRY_S - 0.1)
    assert session.retry_at > 100.5, "else a port that is lost all the time would be tried without a pause"
    session.hurry(100.0 + HURRY_S)
    assert session.retry_at == 0.0
    session.closed(102.0)
    assert 0.025 <= session.retry_at - 102.0 <= 0.05


def test_a_subscription_to_a_zmtp_3_0_peer_is_a_message() -> None:
    session = line_of(SocketType.SUB)
    session.subscribe(b"d\0")
    sent(session)
    ready(session, bytes(OLD))
    asked = wire.ping(15, bytes([0, 0, 0, 1]))
    assert sent(session) == wire.ready(SocketType.SUB) + wire.message(b"\1d\0") + asked


def test_a_master_subscribes_by_commands_or_messages() -> None:
    session = line_of(SocketType.PUB)
    ready(session, more=wire.subscribe(b"a") + wire.message(b"\1b") + wire.subscribe(b"a") + wire.message(b"\2c"))
    assert session.prefixes == {b"a": 2, b"b": 1}
    session.feed(wire.cancel(b"a") + wire.message(b"\0b") + wire.cancel(b"never"), 100.0)
    assert session.prefixes == {b"a": 1}
    session.feed(wire.cancel(b"a") + wire.message(b"\1", b"two frames") + wire.message(b""), 100.0)
    assert session.prefixes == {}


def test_the_subscriptions_of_a_master_are_bounded() -> None:
    session = line_of(SocketType.PUB)
    ready(session, more=b"".join(wire.subscribe(b"%d" % number) for number in range(PREFIXES_MAX)))
    with pytest.raises(ProtocolError, match="subscribes to more than"):
        session.feed(wire.subscribe(b"one more"), 100.0)
    session = line_of(SocketType.PUB)
    with pytest.raises(ProtocolError, match="1025 bytes"):
        ready(session, more=wire.subscribe(bytes(1025)))


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (wire.greeting() + wire.ready(SocketType.PUB), "is of type 'PUB', expected SUB or XSUB"),
        (wire.greeting() + wire.command(b"READY"), "is of type '', expected"),
        (wire.greeting() + wire.command(b"ERROR", b"\4full"), "refused the handshake: full"),
        (wire.greeting() + wire.subscribe(b""), "did not begin with READY"),
        (wire.greeting() + wire.message(b"x"), "did not begin with READY"),
        (wire.greeting() + wire.ready(SocketType.SUB) + wire.command(b"ERROR", b"\3bye"), "ends the connection: bye"),
        (b"HTTP/1.1 400", "not ZMTP"),
    ],
)
def test_a_peer_that_is_no_master_is_a_protocol_error(said: bytes, wrong: str) -> None:
    with pytest.raises(ProtocolError, match=wrong):
        line_of(SocketType.PUB).feed(said, 100.0)


def test_pings_are_answered_and_sent() -> None:
    session = line_of(SocketType.PUB)
    ready(session)
    sent(session)
    session.feed(wire.ping(1, b"context"), 100.0)
    assert sent(session) == wire.command(b"PONG", b"context")
    session.look(104.9)
    assert (sent(session), session.due) == (b"", 105.0)
    session.look(105.0)
    assert (sent(session), session.due) == (wire.ping(15), 110.0)


def test_a_master_that_sends_pings_and_does_not_read_is_given_up() -> None:
    session = line_of(SocketType.SUB)
    ready(session)
    many = 1000 * wire.ping(0, b"context")
    pongs = 1000 * len(wire.command(b"PONG", b"context"))
    for _ in range(OUT_MAX // pongs):
        session.feed(many, 100.0)
    with pytest.raises(ProtocolError, match="h:1 sends PINGs, but does not read the answers"):
        session.feed(many, 100.0)
    assert OUT_MAX < len(session.out) < OUT_MAX + 100


def test_a_master_that_does_not_answer_is_given_up() -> None:
    session = line_of(SocketType.PUB)
    ready(session)
    session.look(105.0)
    session.look(109.9)
    with pytest.raises(Timeout, match="h:1 did not answer a PING within 10 s"):
        session.look(110.0)
    session.feed(wire.command(b"PONG"), 110.0)
    session.look(115.0)
    session.feed(wire.message(b"whatever comes is good"), 124.9)
    session.look(125.0)


def test_a_peer_without_pongs_is_given_up_only_after_its_first_pong() -> None:
    session = line_of(SocketType.PUB)
    ready(session, bytes(OLD))
    session.look(200.0)
    session.feed(wire.command(b"PONG"), 200.0)
    session.look(205.0)
    with pytest.raises(Timeout):
        session.look(215.0)
    session.closed(215.0)
    session.opened(220.0)
    ready(session, bytes(OLD), now=220.0)
    session.look(300.0)


def test_a_slow_handshake_times_out() -> None:
    session = line_of(SocketType.PUB)
    assert session.due == 103.0
    session.look(102.9)
    with pytest.raises(Timeout, match="did not finish ZMTP's handshake within 3 s"):
        session.look(103.0)


def test_the_pause_grows_for_connections_that_are_lost_at_once() -> None:
    session = line_of(SocketType.PUB)
    now, pauses = 100.0, []
    for _ in range(8):
        session.opened(now)
        ready(session, now=now)
        session.closed(now)
        assert (session.is_open, session.is_ready, session.out, session.prefixes) == (False, False, b"", {})
        pauses.append(session.retry_at - now)
        now = session.retry_at
    assert 0.025 <= pauses[0] <= 0.05
    assert 1 <= pauses[-1] <= 2
    session.opened(now)
    ready(session, now=now)
    session.closed(now + 2)
    assert 0.025 <= session.retry_at - now - 2 <= 0.05
