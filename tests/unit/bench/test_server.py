"""The CPU time and memory of a server, found by its listening socket, or reported as unknown."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from counterd.bench import server
from counterd.bench.connection import Place
from counterd.bench.server import Unknown, Watch, processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Listens where it is told, says where, and then computes until it is killed.
LISTENS = """
import socket, sys
family, address = int(sys.argv[1]), eval(sys.argv[2])
listener = socket.socket(family)
listener.bind(address)
listener.listen()
print(repr(listener.getsockname()), flush=True)
while True: sum(range(1000))
"""


@pytest.fixture(params=["IPv4", "IPv6", "Unix"])
def place(request: pytest.FixtureRequest, short_path: Path) -> Iterator[tuple[Place, int]]:
    """A server at an address of this kind, and its process."""
    family, address, host = {
        "IPv4": (socket.AF_INET, ("127.0.0.1", 0), "127.0.0.1"),
        "IPv6": (socket.AF_INET6, ("::1", 0), "::1"),
        "Unix": (socket.AF_UNIX, str(short_path / "a b"), ""),
    }[request.param]
    command = [sys.executable, "-c", LISTENS, str(int(family)), repr(address)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = eval(process.stdout.readline())
            bound = found if family == socket.AF_UNIX else (host, *found[1:])
            yield Place(family, bound, host, None), process.pid
        finally:
            process.kill()


def test_cpu_and_memory_of_a_server_are_measured(place: tuple[Place, int]) -> None:
    where, pid = place
    assert processes(where) == [pid]
    watch = Watch(where)
    watch.begin()
    until = time.monotonic() + 2 * server.TIME_MIN_S
    while time.monotonic() < until:
        watch.begin()  # again, which changes nothing
    used = watch.end()
    assert used.unknown == ""
    assert used.cores >= 0
    assert used.memory > 1 << 20


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"


@pytest.mark.parametrize(
    ("socket_of", "pid", "found"),
    [
        ("0100007F:2BCF 0A tcp", "77", True),
        ("00000000:2BCF 0A tcp", "77", True),
        (f"{'0' * 32}:2BCF 0A tcp6", "77", True),
        ("0200007F:2BCF 0A tcp", "77", False),
        ("0100007F:2BCE 0A tcp", "77", False),
        ("0100007F:2BCF 01 tcp", "77", False),
        ("0100007F:2BCF 0A tcp", "1", False),
    ],
)
def test_which_sockets_are_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, socket_of: str, pid: str, found: bool
) -> None:
    """Those that listen at its address, or at all addresses; but not what systemd keeps open for it."""
    local, state, table = socket_of.split()
    (tmp_path / "net").mkdir()
    row = f"   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 5555 1"
    (tmp_path / "net" / table).write_text(f"{HEAD}\n{row}\n")
    (tmp_path / pid / "fd").mkdir(parents=True)
    (tmp_path / pid / "fd" / "3").symlink_to("socket:[5555]")
    monkeypatch.setattr(server, "PROC", tmp_path)
    where = Place(socket.AF_INET, ("127.0.0.1", 0x2BCF), "", None)
    if found:
        assert processes(where) == [77]
    else:
        with pytest.raises(Unknown):
            processes(where)


def test_without_a_listening_socket_the_use_is_unknown() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        for where in (
            Place(socket.AF_INET, bound.getsockname(), "", None),
            Place(socket.AF_UNIX, "/no/such", "", None),
        ):
            with pytest.raises(Unknown, match="no process that this user may see"):
                processes(where)
            assert Watch(where).end().unknown == "no process that this user may see listens at this address"


def test_the_use_on_another_machine_is_unknown() -> None:
    with pytest.raises(Unknown, match="the server is on another machine"):
        processes(Place(socket.AF_INET, ("192.0.2.1", 80), "192.0.2.1", None))


def test_the_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LINKS_MAX", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(Unknown, match="too many files"):
        processes(Place(socket.AF_INET, listener.getsockname(), "", None))


def test_the_use_is_unknown_after_a_short_run_or_the_end_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = Place(socket.AF_INET, listener.getsockname(), "", None)
        assert processes(where) == [os.getpid()]
        assert Watch(where).end().unknown == "the run was too short", "it has never begun"
        monkeypatch.setattr(server, "TIME_MIN_S", 0.0)
        watch = Watch(where)
        watch.begin()
        assert watch.end().memory > 0
        monkeypatch.setattr(server, "PROC", server.PROC / "no")
        assert watch.end().unknown == "the server has ended"
