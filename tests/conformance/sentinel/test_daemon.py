"""Level 2: the vectors against the real counterd, over TCP and over its Unix socket.

One daemon for each serves all cases, so that remains of one case are noticed in later ones. Cases that drive the
clock run only at level 1, except a lease that ends and a window that slides in real time."""

from __future__ import annotations

import shutil
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from conformance import vectors
from conformance.sentinel.dialect import MAX_ALLOWED_QPS
from conformance.sentinel.engine import HERE
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.rules import parse_rules
from counterd.protocols.sentinel.wire import Response, Status
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASES = [case for case in vectors.load("sentinel") if not case.driven]
QUIET = 0.01  # seconds without a byte that count as nothing; a byte that comes later is found by the next step
FILES = {"first": "rules.json", "changed": "changed.json"}


class Served:
    """A daemon with a file of rules, and how to connect to it."""

    def __init__(self, counterd: daemon.Daemon, settings: dict[str, Any], rules: Path, path: Path | None) -> None:
        self.counterd, self.settings, self.rules, self.path = counterd, settings, rules, path
        self.given = "first"

    def connect(self) -> socket.socket:
        if self.path is None:
            return self.counterd.connect()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(str(self.path))
        return connected

    def happen(self, name: str) -> None:
        shutil.copy(HERE / FILES[name], self.rules)
        self.counterd.reload(self.settings)
        self.given = name


@pytest.fixture(scope="module", params=["tcp", "unix"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp(request.param)
    rules, path = directory / "rules.json", directory / "s"
    shutil.copy(HERE / FILES["first"], rules)
    unix = request.param == "unix"
    settings = {
        "counter.enable": "false",
        "counter.port": "",
        "counter.bind": "",
        "sentinel.enable": "true",
        "sentinel.port": "0",
        "sentinel.bind": " " if unix else "127.0.0.1",
        "sentinel.socket": str(path) if unix else "",
        "sentinel.rules": str(rules),
        "sentinel.max_allowed_qps": str(MAX_ALLOWED_QPS),
    }
    with daemon.running(directory / "daemon", settings) as counterd:
        yield Served(counterd, settings, rules, path if unix else None)
        assert not counterd.lines("WARNING|ERROR|Traceback")


def test_counterd_does_what_the_vectors_say(served: Served) -> None:
    def play(case: vectors.Case) -> None:
        if served.given != "first":  # a case that failed has left others
            served.happen("first")
        vectors.run_case(case, lambda: vectors.SocketPeer(served.connect(), quiet=QUIET), happen=served.happen)

    vectors.run_cases(CASES, play)


class Caller:
    """Makes requests as calls, one after the other."""

    def __init__(self, connected: socket.socket) -> None:
        self.peer = vectors.SocketPeer(connected)

    def ask(self, request: bytes) -> Response:
        self.peer.send(request)
        header = self.peer.recv_exactly(2)
        (response,) = wire.ResponseParser().feed(header + self.peer.recv_exactly(int.from_bytes(header, "big")))
        return response


def flow_named(resource: str) -> int:
    """The flow of the rule whose resource begins with this, the name of a case."""
    rules = parse_rules((HERE / FILES["first"]).read_text())
    return next(rule.flow_id for rule in rules.flows if rule.resource.startswith(resource))


def test_a_window_slides_and_a_lease_ends_by_the_clock(served: Served) -> None:
    """clientOfflineTime is 300 ms there, and the window a second."""
    flow, tokens = flow_named("flow-window-slides"), flow_named("offline-ignore")
    with served.connect() as connected:
        caller = Caller(connected)
        assert caller.ask(wire.flow(1, flow, 3)).status == Status.OK
        with served.connect() as leaver:
            assert Caller(leaver).ask(wire.acquire(1, tokens, 1)).status == Status.OK
        left = time.monotonic()
        assert caller.ask(wire.acquire(2, tokens, 1)).status == Status.BLOCKED

        def granted() -> bool:
            return caller.ask(wire.acquire(3, tokens, 1)).status == Status.OK

        daemon.wait_until(granted, "its token is free")
        assert time.monotonic() - left >= 0.25
        daemon.wait_until(lambda: caller.ask(wire.flow(4, flow, 3)).status == Status.OK, "the window is empty")
