"""A drain waits for holdings to come back, on a loop whose clock jumps."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
import structlog

from counterd.control.config.keys import Drain
from counterd.control.process.drain import drain, wait_for_holdings
from kit import memory


class Fake:
    """A service. held: the number of its holdings; leases: of the first of them; connections: the open ones. steps: the
    calls that it received. empty: set when the last connection has gone.
    """

    def __init__(self, name: str, held: int = 0) -> None:
        self.spec = SimpleNamespace(name=name)
        self.held = held
        self.first: list[tuple[int, bytes, int, int]] = []
        self.store = SimpleNamespace(held=lambda: self.held, leases=lambda limit: self.first[:limit])
        self.store.about = lambda number: ("one" * (number == 7), None)
        self.empty = asyncio.Event()
        self.steps: list[str] = []
        self.server = SimpleNamespace(connections={}, emptied=self.empty.wait, part=self.part)

    def unlisten(self) -> None:
        self.steps.append("unlisten")

    def part(self) -> None:
        self.steps.append("part")

    async def finish(self, timeout: float) -> None:
        self.steps.append("finish")

    def connect(self, number: int) -> None:
        """Adds a connection that reads nothing, and stays until it is cut off."""
        self.server.connections[number] = SimpleNamespace(
            origin=lambda: f"127.0.0.1:{number}", abort=lambda: self.steps.append(f"abort {number}")
        )


def drained(loop: memory.Loop, timeout: float, *services: Fake) -> tuple[int, list[str], float]:
    """Drains; returns what was left, the lines of the log, and how long it took."""
    with structlog.testing.capture_logs() as entries:
        left = loop.run(wait_for_holdings(services, timeout))
    lines = [
        f"{entry['log_level']} {entry['event']}{' | ' + entry['held'] if 'held' in entry else ''}" for entry in entries
    ]
    return left, lines, loop.now


def test_a_drain_without_holdings_ends_at_once():
    assert drained(memory.Loop(), 10, Fake("a"), Fake("b")) == (0, ["info drained: all holdings were given back"], 0.0)


def test_a_drain_ends_when_all_holdings_are_back():
    loop, service = memory.Loop(), Fake("a", 2)
    service.first = [(7, b"jobs", 3, time.monotonic_ns() // 100_000_000 - 20), (8, b"\xff" + 80 * b"x", 1, 0)]
    service.server.connections[7] = SimpleNamespace(origin=lambda: "127.0.0.1:5432")
    loop.call_later(7, setattr, service, "held", 1)
    loop.call_later(12, setattr, service, "held", 0)
    left, lines, seconds = drained(loop, 60, service, Fake("b"))
    assert left == 0
    assert seconds == pytest.approx(12, abs=0.1)
    assert [line.partition(" |")[0] for line in lines] == [
        "info draining: waiting for 2 holdings of a",
        "info draining: waiting for 2 holdings of a",
        "info draining: waiting for 1 holding of a",
        "info drained: all holdings were given back",
    ]
    first = lines[0].partition(" | ")[2]
    assert first.startswith("3 of jobs by one 127.0.0.1:5432 for 2.")
    assert f", 1 of \\xff{79 * 'x'}... by a connection that has ended for " in first


@pytest.mark.parametrize("timeout", [0, 3])
def test_a_drain_ends_at_its_timeout(timeout):
    left, lines, seconds = drained(memory.Loop(), timeout, Fake("a", 1), Fake("b", 4))
    assert left == 5
    assert seconds == pytest.approx(timeout, abs=0.1)
    assert lines == [
        "info draining: waiting for 1 holding of a | ",
        "info draining: waiting for 4 holdings of b | ",
        f"warning draining: 5 holdings not given back within {timeout} s",
    ]


@pytest.mark.parametrize("mode", ["close", "wait"])
@pytest.mark.parametrize("timeout", [0, 1, 4, 60])
def test_holders_and_slow_readers_together_do_not_exceed_the_timeout(mode: str, timeout: int) -> None:
    """One client holds, one reads nothing: waiting for the first leaves the second some of the time, and no more."""
    loop, service = memory.Loop(), Fake("a", 1)
    service.connect(7)
    with structlog.testing.capture_logs() as entries:
        loop.run(drain([service], Drain(mode, timeout)))
    assert service.steps == [*(["unlisten"] if mode == "wait" else []), "part", "abort 7", "finish"]
    assert loop.now == pytest.approx(timeout, abs=0.001)
    assert [entry["event"] for entry in entries][-2:] == [
        "drain.timeout is over: closed 1 connection at once",
        "stopped",
    ]


def test_a_drain_ends_when_holders_disconnect() -> None:
    loop, service, other = memory.Loop(), Fake("a", 1), Fake("b")
    loop.call_later(2, setattr, service, "held", 0)
    loop.call_later(3, service.empty.set)
    loop.call_later(4, other.empty.set)
    with structlog.testing.capture_logs() as entries:
        loop.run(drain([service, other], Drain("wait", 60)))
    assert loop.now == pytest.approx(4, abs=0.1)
    assert (service.steps, other.steps) == (["unlisten", "part", "finish"], ["unlisten", "part", "finish"])
    assert entries[-1]["event"] == "stopped"
    assert not any(entry["log_level"] == "warning" for entry in entries)
