"""One connection of a gatekeeper to a master, without a socket or a clock: handshake, subscriptions and heartbeats."""

from __future__ import annotations

from typing import Any

import pytest

from counterd.client._addresses import Address
from counterd.client.smockron._line import HURRY_S, JOIN_S, OUT_MAX, PREFIXES_MAX, Line
from counterd.errors import ProtocolError, Timeout
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Parser, SocketType

OLD = bytearray(wire.greeting())
OLD[11] = 0  # of ZMTP 3.0


def line_of(kind: SocketType, *, heartbeat: float = 5.0, timeout: float = 3.0) -> Line:
    line = Line(kind, Address("h", 1), heartbeat, timeout)
    line.opened(100.0)
    return line


def sent(line: Line) -> bytes:
    data = bytes(line.out)
    line.out.clear()
    return data


def items(data: bytes) -> list[Any]:
    """What a master finds in what comes after the greeting."""
    parser = Parser()
    parser.feed(wire.greeting())
    return parser.feed(data)


def ready(line: Line, greeting: bytes = wire.greeting(), more: bytes = b"", now: float = 100.0) -> list[Any]:
    """The handshake. Returns the messages in what the master said more."""
    kind = SocketType.SUB if line.kind is SocketType.PUB else SocketType.PUB
    return line.feed(greeting + wire.ready(kind) + more, now)


def test_the_handshake_goes_on_when_the_peer_has_greeted() -> None:
    line = line_of(SocketType.SUB)
    line.subscribe(b"d\0")
    assert sent(line) == wire.greeting()
    assert line.feed(wire.greeting()[:63], 100.0) == []
    assert sent(line) == b""
    line.feed(wire.greeting()[63:], 100.0)
    assert sent(line) == wire.ready(SocketType.SUB)
    assert not line.is_ready
    assert line.feed(wire.ready(SocketType.PUB) + wire.message(b"d\0", b"x"), 100.0) == [(b"d\0", b"x")]
    assert sent(line) == wire.subscribe(b"d\0") + wire.ping(15, bytes([0, 0, 0, 1]))
    line.subscribe(b"e\0")
    line.subscribe(b"f\0")
    assert sent(line) == wire.subscribe(b"e\0") + wire.subscribe(b"f\0")
    line.look(100.0)
    assert sent(line) == wire.ping(15, bytes([0, 0, 0, 3]))
    line.look(100.0)
    assert sent(line) == b""


def test_a_pong_says_how_many_subscriptions_were_taken() -> None:
    """That of a PING which was sent before says nothing about those that came after it."""
    line = line_of(SocketType.SUB)
    line.subscribe(b"d\0")
    ready(line)
    line.subscribe(b"e\0")
    line.look(100.0)
    assert (line.joined, line.is_settled, line.due) == (0, False, 105.0)
    line.feed(wire.command(b"PONG", bytes([0, 0, 0, 1])), 100.0)
    assert (line.joined, line.is_settled) == (1, False)
    line.feed(wire.command(b"PONG", bytes([0, 0, 0, 2])), 100.0)
    assert (line.joined, line.is_settled) == (2, True)
    line.look(100.0)
    assert line.due == 105.0
    line.closed(100.0)
    assert (line.joined, line.is_settled) == (0, False)


@pytest.mark.parametrize("greeting", [wire.greeting(), bytes(OLD)])
def test_pongs_without_a_context_are_counted(greeting: bytes) -> None:
    """libzmq 4.2 does not repeat the context."""
    line = line_of(SocketType.SUB)
    line.subscribe(b"d\0")
    ready(line, greeting)
    line.look(105.0)  # a heartbeat
    line.subscribe(b"e\0")
    line.look(105.0)
    for joined in (1, 1, 2, 2):
        line.feed(wire.command(b"PONG"), 105.0)
        assert line.joined == joined
    line.closed(106.0)
    line.opened(106.0)
    ready(line, greeting, now=106.0)
    line.feed(wire.command(b"PONG"), 106.0)
    assert line.is_settled


def test_a_peer_that_answers_pings_is_waited_for_until_it_answers() -> None:
    """However slow it is, up to the patience that every PING has."""
    line = line_of(SocketType.SUB)
    line.subscribe(b"d\0")
    ready(line)
    line.look(109.9)
    assert not line.is_settled
    with pytest.raises(Timeout, match="did not answer a PING"):
        line.look(110.0)


def test_by_a_peer_that_may_not_answer_pings_a_subscription_counts_as_taken_after_some_time() -> None:
    """However many come later."""
    line = line_of(SocketType.SUB)
    line.subscribe(b"d\0")
    ready(line, bytes(OLD))
    line.subscribe(b"e\0")
    line.look(100.0 + JOIN_S / 2)
    assert (line.joined, line.due) == (0, 100.0 + JOIN_S)
    line.look(100.0 + JOIN_S)
    assert (line.joined, line.due) == (1, 100.0 + JOIN_S / 2 + JOIN_S)
    line.look(100.0 + 2 * JOIN_S)
    assert (line.joined, line.is_settled) == (2, True)


def test_a_port_that_was_away_for_a_while_is_tried_at_once_when_another_is_back() -> None:
    line = line_of(SocketType.SUB)
    line.hurry(100.0)
    ready(line)
    for now in (100.0, 100.5):
        line.closed(now)
    line.hurry(100.0 + HURRY_S - 0.1)
    assert line.retry_at > 100.5, "else a port that is lost all the time would be tried without a pause"
    line.hurry(100.0 + HURRY_S)
    assert line.retry_at == 0.0
    line.closed(102.0)
    assert 0.025 <= line.retry_at - 102.0 <= 0.05


def test_to_zmtp_3_0_a_subscription_is_a_message() -> None:
    line = line_of(SocketType.SUB)
    line.subscribe(b"d\0")
    sent(line)
    ready(line, bytes(OLD))
    asked = wire.ping(15, bytes([0, 0, 0, 1]))
    assert sent(line) == wire.ready(SocketType.SUB) + wire.message(b"\1d\0") + asked


def test_a_master_subscribes_by_commands_or_messages() -> None:
    line = line_of(SocketType.PUB)
    ready(line, more=wire.subscribe(b"a") + wire.message(b"\1b") + wire.subscribe(b"a") + wire.message(b"\2c"))
    assert line.prefixes == {b"a": 2, b"b": 1}
    line.feed(wire.cancel(b"a") + wire.message(b"\0b") + wire.cancel(b"never"), 100.0)
    assert line.prefixes == {b"a": 1}
    line.feed(wire.cancel(b"a") + wire.message(b"\1", b"two frames") + wire.message(b""), 100.0)
    assert line.prefixes == {}


def test_a_master_cannot_subscribe_without_end() -> None:
    line = line_of(SocketType.PUB)
    ready(line, more=b"".join(wire.subscribe(b"%d" % number) for number in range(PREFIXES_MAX)))
    with pytest.raises(ProtocolError, match="subscribes to more than"):
        line.feed(wire.subscribe(b"one more"), 100.0)
    line = line_of(SocketType.PUB)
    with pytest.raises(ProtocolError, match="1025 bytes"):
        ready(line, more=wire.subscribe(bytes(1025)))


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
def test_what_is_no_master_is_left(said: bytes, wrong: str) -> None:
    with pytest.raises(ProtocolError, match=wrong):
        line_of(SocketType.PUB).feed(said, 100.0)


def test_pings_are_answered_and_sent() -> None:
    line = line_of(SocketType.PUB)
    ready(line)
    sent(line)
    line.feed(wire.ping(1, b"context"), 100.0)
    assert sent(line) == wire.command(b"PONG", b"context")
    line.look(104.9)
    assert (sent(line), line.due) == (b"", 105.0)
    line.look(105.0)
    assert (sent(line), line.due) == (wire.ping(15), 110.0)


def test_a_master_that_sends_pings_and_does_not_read_is_given_up() -> None:
    line = line_of(SocketType.SUB)
    ready(line)
    many = 1000 * wire.ping(0, b"context")
    pongs = 1000 * len(wire.command(b"PONG", b"context"))
    for _ in range(OUT_MAX // pongs):
        line.feed(many, 100.0)
    with pytest.raises(ProtocolError, match="h:1 sends PINGs, but does not read the answers"):
        line.feed(many, 100.0)
    assert OUT_MAX < len(line.out) < OUT_MAX + 100


def test_a_master_that_does_not_answer_is_given_up() -> None:
    line = line_of(SocketType.PUB)
    ready(line)
    line.look(105.0)
    line.look(109.9)
    with pytest.raises(Timeout, match="h:1 did not answer a PING within 10 s"):
        line.look(110.0)
    line.feed(wire.command(b"PONG"), 110.0)
    line.look(115.0)
    line.feed(wire.message(b"whatever comes is good"), 124.9)
    line.look(125.0)


def test_one_that_may_not_know_pings_is_not_given_up_before_it_has_answered_one() -> None:
    line = line_of(SocketType.PUB)
    ready(line, bytes(OLD))
    line.look(200.0)
    line.feed(wire.command(b"PONG"), 200.0)
    line.look(205.0)
    with pytest.raises(Timeout):
        line.look(215.0)
    line.closed(215.0)
    line.opened(220.0)
    ready(line, bytes(OLD), now=220.0)
    line.look(300.0)


def test_a_handshake_has_its_time() -> None:
    line = line_of(SocketType.PUB)
    assert line.due == 103.0
    line.look(102.9)
    with pytest.raises(Timeout, match="did not finish ZMTP's handshake within 3 s"):
        line.look(103.0)


def test_a_connection_that_is_lost_at_once_is_made_more_and_more_slowly() -> None:
    line = line_of(SocketType.PUB)
    now, pauses = 100.0, []
    for _ in range(8):
        line.opened(now)
        ready(line, now=now)
        line.closed(now)
        assert (line.is_open, line.is_ready, line.out, line.prefixes) == (False, False, b"", {})
        pauses.append(line.retry_at - now)
        now = line.retry_at
    assert 0.025 <= pauses[0] <= 0.05
    assert 1 <= pauses[-1] <= 2
    line.opened(now)
    ready(line, now=now)
    line.closed(now + 2)
    assert 0.025 <= line.retry_at - now - 2 <= 0.05
