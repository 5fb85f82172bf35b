"""No control message that a gatekeeper's own requests cause is lost, in whatever order its two connections are made.

A real gatekeeper without sockets (client/smockron/_gatekeeping.py) and a real master in memory. Each test tries every
order of the steps: a connection is made or fails, bytes on one connection arrive in one direction, time passes. The
master answers each request with a control message, and the gatekeeper has to receive one for each request that it sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.smockron.engine import Pump, make_store
from counterd.client.smockron._gatekeeping import BLIND_S, Core, Options, report
from counterd.client.smockron._zmtp import JOIN_S
from counterd.protocols.smockron.rules import parse_rules
from kit.pump import START_NS, UNIX_NS

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client.smockron._zmtp import ZmtpSession
    from kit.pump import Peer

ACCOUNTING, CONTROL = 0, 1
PAUSE_NS = 700_000_000  # more than JOIN_S, and less than BLIND_S
RUNS_MAX = 20_000  # more than any test needs
RULE = parse_rules('{"d": {"rate": "1/hour", "burst": 0}}')[b"d"]


class Wire:
    """A connection, the bytes that are under way in it, and how many have arrived in each direction."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.to_master = bytearray()
        self.heard = self.told = 0


class Scene:
    """One master and one gatekeeper. refusals: how many attempts to connect to each port fail."""

    def __init__(self, refusals: dict[int, int]) -> None:
        self.pump = Pump(make_store({b"d": RULE, b"e": RULE}))
        self.core = Core("127.0.0.1", "d", tls=False, options=Options())
        self.master = self.core.masters[0]
        self.sessions = {ACCOUNTING: self.master.accounting, CONTROL: self.master.control}
        self.refusals = dict(refusals)
        self.wires: dict[int, Wire] = {}
        self.has_paused = False
        self.requests = 0

    @property
    def now_s(self) -> float:
        return self.pump.now_ns / 1e9

    def request(self, domain: str) -> None:
        self.requests += 1
        wall_ns = UNIX_NS + self.pump.now_ns - START_NS
        self.core.decide(str(self.requests), domain, b"", self.pump.now_ns, wall_ns)

    def turn(self) -> None:
        """What the owner of the sockets does in each turn."""
        for port, wire in self.wires.items():
            session = self.sessions[port]
            report(self.core.look(self.master, session, self.now_s))
            wire.to_master += self.core.take(self.master, session, self.pump.now_ns)

    def steps(self) -> list[Callable[[], None]]:
        """What can happen next."""
        found: list[Callable[[], None]] = []
        for port, session in self.sessions.items():
            wire = self.wires.get(port)
            if wire is None:
                if session is self.master.control or self.master.control.is_ready or self.master.control.has_failed:
                    found.append(lambda port=port, session=session: self.connect(port, session))  # type: ignore[misc]
                continue
            if wire.to_master:
                found.append(lambda wire=wire: self.hear(wire))  # type: ignore[misc]
            if wire.peer.output:
                found.append(lambda wire=wire, session=session: self.tell(wire, session))  # type: ignore[misc]
        if found and not self.has_paused:
            found.append(self.pause)
        return found

    def connect(self, port: int, session: ZmtpSession) -> None:
        if self.refusals.get(port):
            self.refusals[port] -= 1
            self.core.lost(self.master, session, "refused", self.now_s)
            return
        peer = self.pump.connect(port)
        self.pump.settle()
        self.wires[port] = Wire(peer)
        session.opened(self.now_s)

    def hear(self, wire: Wire) -> None:
        data, wire.to_master = bytes(wire.to_master), bytearray()
        wire.heard += len(data)
        wire.peer.send(data)

    def tell(self, wire: Wire, session: ZmtpSession) -> None:
        wall_ns = UNIX_NS + self.pump.now_ns - START_NS
        data = wire.peer.read()
        wire.told += len(data)
        report(self.core.feed(self.master, session, data, self.pump.now_ns, wall_ns))

    def pause(self) -> None:
        self.has_paused = True
        self.pump.now_ns += PAUSE_NS

    def lose(self, port: int) -> None:
        self.wires.pop(port).peer.close()
        self.core.lost(self.master, self.sessions[port], "it ended", self.now_s)

    def state(self) -> object:
        """Everything on which the rest depends."""
        wires = [
            (port, wire.heard, wire.told, len(wire.to_master), len(wire.peer.output))
            for port, wire in sorted(self.wires.items())
        ]
        sessions = [
            (session.is_ready, session.joined, tuple(session._asks), session.away_since, session.ready_at)
            for session in self.sessions.values()
        ]
        return self.has_paused, self.requests, tuple(self.refusals.values()), tuple(wires), tuple(sessions)

    def close(self) -> None:
        for wire in self.wires.values():
            wire.peer.close()


def explore(begin: Callable[[], Scene], middle: Callable[[Scene], None] | None = None) -> int:
    """Tries every order: runs from the beginning for each choice, up to a state that was there before.

    middle: called once in each run, when nothing is left to do. Returns how many states there were.
    """
    path: list[int] = []
    seen: set[object] = set()
    for _ in range(RUNS_MAX):
        scene = begin()
        sizes: list[int] = []
        todo = [middle] if middle is not None else []
        while True:
            scene.turn()
            steps = scene.steps()
            if not steps and todo:
                todo.pop()(scene)
                continue
            if not steps:
                check(scene, path)
                break
            if len(sizes) == len(path):
                if (state := scene.state()) in seen:
                    break
                seen.add(state)
                path.append(0)
            steps[path[len(sizes)]]()
            sizes.append(len(steps))
        scene.close()
        while path and path[-1] == sizes[len(path) - 1] - 1:
            path.pop()
        if not path:
            return len(seen)
        path[-1] += 1
    raise AssertionError("there are more orders than expected")


def check(scene: Scene, path: list[int]) -> None:
    stats = scene.core.stats(scene.pump.now_ns)
    assert (stats.sent, stats.held, stats.dropped) == (scene.requests, 0, 0), path
    assert stats.told == scene.requests, f"{scene.requests - stats.told} control messages were lost: {path}"


def requesting(refusals: dict[int, int]) -> Callable[[], Scene]:
    def begin() -> Scene:
        scene = Scene(refusals)
        scene.request("d")
        return scene

    return begin


def test_the_pause_is_long_enough_to_matter() -> None:
    assert JOIN_S < PAUSE_NS / 1e9 < BLIND_S


@pytest.mark.parametrize("refusals", [{}, {CONTROL: 1}, {CONTROL: 1, ACCOUNTING: 1}], ids=str)
def test_at_the_start(refusals: dict[int, int]) -> None:
    assert explore(requesting(refusals)) > 10


def connected() -> Scene:
    """Both connections work, and nothing is under way."""
    scene = Scene({})
    scene.has_paused = True
    scene.turn()
    while steps := scene.steps():
        steps[0]()
        scene.turn()
    assert scene.master.is_ready
    scene.has_paused = False
    return scene


def test_when_a_domain_is_added() -> None:
    def begin() -> Scene:
        scene = connected()
        scene.request("e")
        scene.request("d")
        return scene

    assert explore(begin, lambda scene: scene.request("e")) > 1


@pytest.mark.parametrize("lost", [(CONTROL,), (ACCOUNTING,), (CONTROL, ACCOUNTING)], ids=str)
def test_when_connections_are_made_again(lost: tuple[int, ...]) -> None:
    def begin() -> Scene:
        scene = connected()
        for port in lost:
            scene.lose(port)
        scene.request("d")
        return scene

    assert explore(begin) > 1
