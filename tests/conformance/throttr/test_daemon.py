"""Level 2: the vectors against the real counterd, over TCP and over its Unix socket, at every value size.

One daemon for each serves all cases, so that remains of one case are noticed in later ones. There is no level 3:
the reference server is not available as a package."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from conformance import vectors
from conformance.throttr import replies
from conformance.throttr.dialect import MAX_MESSAGE
from kit import daemon
from property.throttr_model import CONNECTION, WHOAMI, encode

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator
    from pathlib import Path

SIZES = (1, 2, 4, 8)
CASES = {size: [case for case in vectors.load("throttr", value_size=size) if not case.driven] for size in SIZES}
PARAMS = [(size, unix) for size in SIZES for unix in (False, True)]
KINDS = [f"uint{8 * size}-{'unix' if unix else 'tcp'}" for size, unix in PARAMS]
QUIET = 0.01  # seconds without a byte that count as nothing; a byte that comes later is found by the next step
# Throttr alone, so that the addresses in the log are its own.
ALONE = {"counter.enable": "false", "counter.port": "", "counter.bind": "", "throttr.enable": "true"}


class Served(NamedTuple):
    """A daemon, how to connect to it, and its value size."""

    counterd: daemon.Daemon
    path: str | None
    size: int

    def connect(self) -> socket.socket:
        if self.path is None:
            return self.counterd.connect()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect(self.path)
        return connected


def running(size: int, unix: bool, directory: Path) -> contextlib.AbstractContextManager[daemon.Daemon]:
    path = str(directory / "s")
    settings: dict[str, Any] = {
        **ALONE,
        "throttr.port": "0",
        "throttr.bind": " " if unix else "127.0.0.1",
        "throttr.socket": path if unix else "",
        "throttr.value_size": f"uint{8 * size}",
        "throttr.max_message": str(MAX_MESSAGE),
    }
    return daemon.running(directory / "daemon", settings)


@pytest.fixture(scope="module", params=PARAMS, ids=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    size, unix = request.param
    directory = tmp_path_factory.mktemp("throttr")
    with running(size, unix, directory) as counterd:
        yield Served(counterd, str(directory / "s") if unix else None, size)
        assert not counterd.lines("WARNING|ERROR|Traceback")


def test_counterd_does_what_the_vectors_say(served: Served) -> None:
    def play(case: vectors.Case) -> None:
        vectors.run_case(case, lambda: vectors.SocketPeer(served.connect(), quiet=QUIET))

    vectors.run_cases(CASES[served.size], play)


def test_the_address_of_a_connection(served: Served) -> None:
    with served.connect() as connected:
        peer = vectors.SocketPeer(connected)
        peer.send(encode(served.size, WHOAMI))
        identity = peer.recv_exactly(17)[1:]
        peer.send(encode(served.size, CONNECTION, identity))
        record = replies.read_record(peer.recv_exactly)
        assert record is not None
        told = {name: record[name] for name in ("type", "kind", "ip", "port")}
        if served.path is not None:
            assert told == {"type": 0, "kind": 1, "ip": bytes(16), "port": 0}
        else:
            ip, port = connected.getsockname()
            assert told == {"type": 0, "kind": 0, "ip": ip.encode().ljust(16, b"\0"), "port": port}
            assert record["ip_version"] == 4
        assert record["read_bytes"] == 1  # of what came before
        assert record["write_bytes"] == 17
