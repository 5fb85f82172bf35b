"""Level 2: the vectors against the real counterd, over TCP and over its Unix socket.

One daemon for each serves all cases, so that remains of one case are noticed in later ones."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

CASES = vectors.load("beanstalk")
# With the counters, of which some jobs need permits. The addresses of beanstalk come first in the log.
BOTH = {"beanstalk.enable": "true"}


@pytest.fixture(scope="module", params=["tcp", "unix"])
def connect(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    directory = tmp_path_factory.mktemp("beanstalk")
    path = str(directory / "s")
    unix = request.param == "unix"
    settings = {
        **BOTH,
        "beanstalk.port": "0",
        "beanstalk.bind": " " if unix else "127.0.0.1",
        "beanstalk.socket": path if unix else "",
    }

    def connected() -> socket.socket:
        if not unix:
            return counterd.connect()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.connect(path)
        return made

    with daemon.running(directory / "daemon", settings) as counterd:
        yield connected
        assert not counterd.lines("WARNING|ERROR|Traceback")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counterd_does_what_the_vector_says(case: vectors.Case, connect: object) -> None:
    vectors.run_case(case, lambda: vectors.SocketPeer(connect()))  # type: ignore[operator]
