"""Level 2: the vectors against the real counterd, over TCP and over its Unix sockets.

One daemon for each serves all cases, so that remains of one case are noticed in later ones. Cases that drive the
clock run only at level 1."""

from __future__ import annotations

import shutil
import socket
from typing import TYPE_CHECKING, Any

import pytest

from conformance import vectors
from conformance.smockron.dialect import port_of
from conformance.smockron.engine import HERE
from kit import daemon, gates

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CASES = [case for case in vectors.load("smockron") if not case.driven]
QUIET = 0.01  # seconds without a byte that count as nothing; a byte that comes later is found by the next step
FILES = {"first": "rules.json", "changed": "changed.json"}


class Served:
    """A daemon with a file of rules, and how to connect to it."""

    def __init__(self, counterd: daemon.Daemon, settings: dict[str, Any], rules: Path, paths: list[Path]) -> None:
        self.counterd, self.settings, self.rules, self.paths = counterd, settings, rules, paths
        self.given = "first"

    def connect(self, name: str) -> socket.socket:
        if not self.paths:
            return socket.create_connection(gates.addresses(self.counterd)[port_of(name)], daemon.PATIENCE)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(str(self.paths[port_of(name)]))
        return connected

    def happen(self, name: str) -> None:
        shutil.copy(HERE / FILES[name], self.rules)
        self.counterd.reload(self.settings)
        self.given = name


@pytest.fixture(scope="module", params=["tcp", "unix"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp(request.param)
    rules, paths = directory / "rules.json", [directory / "a", directory / "c"]
    shutil.copy(HERE / FILES["first"], rules)
    settings = {**gates.SETTINGS, "counter.port": "", "counter.bind": "", "smockron.rules": str(rules)}
    if request.param == "unix":
        sockets = {"smockron.socket": str(paths[0]), "smockron.control_socket": str(paths[1])}
        settings |= {"smockron.bind": " ", **sockets}
    with daemon.running(directory / "daemon", settings) as counterd:
        yield Served(counterd, settings, rules, paths if request.param == "unix" else [])
        assert not counterd.lines("WARNING|ERROR|Traceback")


def test_counterd_does_what_the_vectors_say(served: Served) -> None:
    def play(case: vectors.Case) -> None:
        if served.given != "first":  # a case that failed has left others
            served.happen("first")
        vectors.run_case(
            case,
            lambda name: vectors.SocketPeer(served.connect(name), quiet=QUIET),
            by_name=True,
            happen=served.happen,
        )

    vectors.run_cases(CASES, play)
