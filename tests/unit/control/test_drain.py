"""Waiting for what is held, on a loop whose clock jumps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import structlog

import memory
from counterd.control.drain import wait_for_holdings


class Room:
    """A service. held: how many holdings it has; leases: of the first of them; connections: who is there."""

    def __init__(self, name: str, held: int = 0) -> None:
        self.room = SimpleNamespace(name=name)
        self.held = held
        self.first: list[tuple[int, bytes, int, int]] = []
        self.store = SimpleNamespace(held=lambda: self.held, leases=lambda limit: self.first[:limit])
        self.server = SimpleNamespace(connections={})


def drained(loop: memory.Loop, timeout: float, *services: Room) -> tuple[int, list[str], float]:
    """What was left, the lines of the log, and how long it took."""
    with structlog.testing.capture_logs() as entries:
        left = loop.run(wait_for_holdings(services, timeout))
    lines = [
        f"{entry['log_level']} {entry['event']}{' | ' + entry['held'] if 'held' in entry else ''}" for entry in entries
    ]
    return left, lines, loop.now


def test_nothing_is_held():
    assert drained(memory.Loop(), 10, Room("a"), Room("b")) == (0, ["info draining: nothing is held any more"], 0.0)


def test_what_is_held_comes_back():
    loop, room = memory.Loop(), Room("a", 2)
    room.first = [(7, b"jobs", 3, time.monotonic_ns() // 100_000_000 - 20), (8, b"\xff" + 80 * b"x", 1, 0)]
    room.server.connections[7] = SimpleNamespace(origin=lambda: "127.0.0.1:5432")
    loop.call_later(7, setattr, room, "held", 1)
    loop.call_later(12, setattr, room, "held", 0)
    left, lines, seconds = drained(loop, 60, room, Room("b"))
    assert left == 0
    assert seconds == pytest.approx(12, abs=0.1)
    assert [line.partition(" |")[0] for line in lines] == [
        "info draining: waiting for 2 holdings of a",
        "info draining: waiting for 2 holdings of a",
        "info draining: waiting for 1 holdings of a",
        "info draining: nothing is held any more",
    ]
    first = lines[0].partition(" | ")[2]
    assert first.startswith("3 of jobs by 127.0.0.1:5432 for 2.")
    assert f", 1 of \\xff{79 * 'x'}... by a connection that has gone for " in first


@pytest.mark.parametrize("timeout", [0, 3])
def test_the_timeout(timeout):
    left, lines, seconds = drained(memory.Loop(), timeout, Room("a", 1), Room("b", 4))
    assert left == 5
    assert seconds == pytest.approx(timeout, abs=0.1)
    assert lines == [
        "info draining: waiting for 1 holdings of a | ",
        "info draining: waiting for 4 holdings of b | ",
        "warning drain.timeout is over: 5 holdings have not come back",
    ]
