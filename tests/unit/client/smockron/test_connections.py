"""What a gatekeeper's connections do in one turn, without I/O: each channel keeps what was sent in a list."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from counterd.client.smockron import _connections
from counterd.client.smockron._connections import SEND_PAUSE_S, Connections, reason
from counterd.client.smockron._gatekeeping import Core, Options, Verdict
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import SocketType

if TYPE_CHECKING:
    from counterd.client.smockron._zmtp import ZmtpSession

LOOKS = 3
PEERS = {SocketType.SUB: SocketType.PUB, SocketType.PUB: SocketType.SUB}


class Channel:
    def __init__(self) -> None:
        self.is_busy = self.is_closed = False
        self.sent = b""
        self.failure: OSError | None = None

    def send(self, data: bytes) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent += data

    def close(self) -> None:
        self.is_closed = True


class Scene:
    """A gatekeeper. asked: the sessions that it wanted to connect. woken: how often it asked for another turn."""

    def __init__(self) -> None:
        self.core = Core({"d": ("h:1", "h:2"), "e": ("i:1", "i:2")}, "d", tls=False, options=Options())
        self.asked: list[ZmtpSession] = []
        self.woken = self.changes = 0
        self.connections = Connections(
            self.core, threading.RLock(), changed=self.change, wake=self.wake, connect=self.asked.append, looks=LOOKS
        )

    def wake(self) -> None:
        self.woken += 1

    def change(self) -> None:
        self.changes += 1

    def turn(self) -> float:
        """Runs a turn. Returns how soon the next one is due."""
        return self.connections.turn() - time.monotonic()

    def decide(self, identifier: str, domain: str = "d") -> None:
        decision = self.core.decide(identifier, domain, b"", time.monotonic_ns(), time.time_ns())
        assert decision.verdict is Verdict.PASS

    def opened(self, session: ZmtpSession) -> Channel:
        channel = Channel()
        self.connections.opened(session, channel)
        return channel

    def connected(self, master: int = 0) -> Channel:
        """Connects to a master that subscribes to everything. Returns the channel for accounting."""
        for session in self.core.masters[master].sessions:
            accounting = self.opened(session)
            self.turn()
            self.connections.received(session, wire.greeting() + wire.ready(PEERS[session.kind]))
            if session.kind is SocketType.PUB:
                self.connections.received(session, wire.subscribe(b""))
            else:
                self.connections.received(session, wire.pong((1).to_bytes(4, "big")))
        self.rest()
        accounting.sent = b""
        return accounting

    def rest(self) -> None:
        """Runs turns until none is due soon."""
        for _ in range(LOOKS + 1):
            due = self.turn()
        assert due > SEND_PAUSE_S
        assert not self.core.is_awake
        self.woken = 0


def test_control_is_connected_first_and_each_session_once() -> None:
    scene = Scene()
    scene.turn()
    scene.turn()
    controls = [master.control for master in scene.core.masters]
    assert scene.asked == controls
    scene.opened(controls[0])
    scene.connections.lose(controls[1], "refused")
    assert scene.woken == 2
    due = scene.turn()
    assert due < 1, "the next attempt"
    assert scene.asked == [*controls, scene.core.masters[1].accounting]


def test_turns_look_for_more_messages_after_a_send() -> None:
    scene = Scene()
    channel = scene.connected()
    scene.decide("a")
    scene.decide("b")
    assert scene.woken == 1
    for _ in range(LOOKS):
        assert 0 < scene.turn() <= SEND_PAUSE_S
        scene.decide("c")
    assert scene.woken == 1
    assert channel.sent.count(b"ACCEPTED") == 2 + LOOKS - 1
    scene.rest()
    scene.decide("d")
    assert scene.woken == 1


def test_a_busy_channel_is_given_no_more_messages() -> None:
    scene = Scene()
    channel, other = scene.connected(0), scene.connected(1)
    channel.is_busy = True
    scene.decide("a")
    for _ in range(2 * LOOKS):
        assert 0 < scene.turn() <= SEND_PAUSE_S
    assert (channel.sent, scene.core.stats(time.monotonic_ns()).held) == (b"", 1)
    assert scene.connections.has_unsent()
    scene.decide("b", "e")
    scene.turn()
    assert b"ACCEPTED" in other.sent
    channel.is_busy = False
    scene.turn()
    assert b"ACCEPTED" in channel.sent
    assert not scene.connections.has_unsent()


@pytest.mark.parametrize("how", ["sending fails", "nonsense comes", "it is silent"])
def test_a_lost_connection_is_reported_and_retried(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    channel = scene.connected()
    session = scene.core.masters[0].accounting
    before = scene.changes
    if how == "sending fails":
        channel.failure = OSError("broken")
        scene.decide("a")
        scene.turn()
    elif how == "nonsense comes":
        scene.connections.received(session, b"\xff\xff")
    else:
        for later in (1e6, 2e6):
            monkeypatch.setattr(_connections, "monotonic", lambda later=later: time.monotonic() + later)
            scene.turn()
    assert channel.is_closed
    assert session not in scene.connections.channels
    assert not session.is_open
    assert scene.core.stats(time.monotonic_ns()).lost == (2 if how == "it is silent" else 1)
    assert scene.changes > before
    assert scene.woken >= 1


def test_a_connection_made_after_the_end_is_closed() -> None:
    scene = Scene()
    control, other = (master.control for master in scene.core.masters)
    scene.turn()
    scene.connections.end()
    assert scene.opened(control).is_closed
    scene.connections.lose(other, "refused")
    assert scene.connections.channels == {}
    assert scene.core.stats(time.monotonic_ns()).lost == 0
    assert scene.woken == 0


def test_the_reasons_of_failures(caplog: pytest.LogCaptureFixture) -> None:
    session = Scene().core.masters[0].control
    assert reason(TimeoutError(), session, 0.5) == "h:2 did not accept a connection within 0.5 s"
    assert reason(OSError("refused"), session, 0.5) == "cannot connect to h:2: refused"
    assert not caplog.records
    assert reason(ZeroDivisionError("x"), session, 0.5) == "internal error: ZeroDivisionError('x')"
    assert [record.name for record in caplog.records] == [_connections.log.name]
