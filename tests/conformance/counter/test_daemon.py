"""Level 2: the vectors against the real counterd, over TCP and over its Unix socket.

One daemon for each serves all cases, so that remains of one case are noticed in later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = vectors.load("counter")
Served = tuple[daemon.Daemon, bool, list[str]]  # whether on a Unix socket, and the cases so far


@pytest.fixture(scope="module", params=["tcp", "unix"])
def connection_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    unix = request.param == "unix"
    directory = tmp_path_factory.mktemp(request.param)
    settings = {"counter.socket": str(directory / "s"), "counter.bind": " "} if unix else {}
    with daemon.running(directory / "daemon", settings) as counterd:
        played: list[str] = []  # of the tests that this process runs
        yield counterd, unix, played
        figures = counterd.wait_for_stats(curr_connections=1, holdings=0, holdings_leaving=0)
        assert figures["internal_errors"] == 0
        assert figures["total_connections"] > len(played)
        assert not counterd.lines("WARNING|ERROR|Traceback")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counterd_does_what_the_vector_says(case: vectors.Case, connection_kind: Served) -> None:
    counterd, unix, played = connection_kind
    played.append(case.name)
    vectors.run_case(case, lambda: vectors.SocketPeer(counterd.connect(unix=unix)))
