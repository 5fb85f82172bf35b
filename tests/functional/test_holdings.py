"""Holdings come back whatever ends their connection, and others see that within moments."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd import errors
from counterd.protocols.counter import wire
from kit import daemon, peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


HOLDER = Path(__file__).with_name("holder.py")
MOMENTS = 2.0  # seconds: far above the milliseconds that it takes
KINDS = pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])


@pytest.fixture
def counterd(start: Callable[..., daemon.Daemon], short_path: Path) -> daemon.Daemon:
    return start({"counter.socket": str(short_path / "s")})


def comes_back(counterd: daemon.Daemon, seconds: float = MOMENTS, connections: int = 0) -> None:
    """Waits until nobody holds anything and so many connections are left."""
    counterd.wait_for_stats(
        seconds, holdings=0, holdings_leaving=0, busy=0, curr_connections=connections + 1, internal_errors=0
    )


@KINDS
@pytest.mark.parametrize("ending", ["close", "reset", "half_close", "wrong_magic", "within_request"])
def test_holdings_of_a_connection_come_back(ending: str, unix: bool, counterd: daemon.Daemon) -> None:
    with counterd.client() as other, counterd.connect(unix=unix) as connection:
        assert peers.ask(connection, wire.acquire(1, b"jobs", 3, 5)).status == 0
        assert peers.ask(connection, wire.acquire(1, b"jobs", 1, 5)).status == 0
        assert peers.ask(connection, wire.acquire(1, b"more", 1, 1)).status == 0
        assert other.get("jobs") == 4
        if ending == "close":
            connection.close()
        elif ending == "reset":
            peers.reset(connection)
        elif ending == "half_close":
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        elif ending == "wrong_magic":
            connection.sendall(wire.frame(0, 1, magic=0x55))
            assert peers.receive_all(connection)
            connection.close()
        else:
            connection.sendall(wire.acquire(2, b"jobs", 1, 5)[:-1])
            connection.close()
        comes_back(counterd, connections=1)
        assert other.get("jobs") == other.get("more") == 0
        assert other.acquire("jobs", 5, maximum=5) == 5


@contextlib.contextmanager
def holder(counterd: daemon.Daemon, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A client in its own process, which holds 3 of `jobs`."""
    command = [sys.executable, HOLDER, *map(str, counterd.address), "jobs", "3", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            process.kill()


def test_holdings_of_a_killed_process_come_back(counterd: daemon.Daemon) -> None:
    with holder(counterd) as process, counterd.client() as other:
        assert other.get("jobs") == 3
        process.kill()
        comes_back(counterd, connections=1)
        assert other.get("jobs") == 0


def test_holdings_of_a_process_killed_while_not_reading_come_back(counterd: daemon.Daemon) -> None:
    """The daemon does not read from it then either."""
    with counterd.connect() as many:
        peers.acquire_many(many, [b"counter %d" % number for number in range(20_000)])
        with holder(counterd, "30") as process:
            counterd.wait_for_stats(stuck_outputs=1)
            process.kill()
            counterd.wait_for_stats(MOMENTS, holdings=20_000, curr_connections=2, slow_readers=0)
            with counterd.client() as other:
                assert other.get("jobs") == 0


@KINDS
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_holdings_of_a_connection_that_never_read_come_back(unix: bool, reset: bool, counterd: daemon.Daemon) -> None:
    with counterd.connect(unix=unix, receive_buffer=8192) as connection:
        connection.settimeout(0.3)
        with contextlib.suppress(TimeoutError):  # the daemon takes no more of them
            connection.sendall(b"".join(wire.acquire(1, b"%d" % number, 1, 1) for number in range(60_000)))
        assert counterd.stats()["holdings"] > 100
        if reset:
            peers.reset(connection)
    comes_back(counterd)


@KINDS
def test_after_a_half_close_requests_are_answered(unix: bool, counterd: daemon.Daemon) -> None:
    with counterd.connect(unix=unix) as connection:
        assert peers.ask(connection, wire.acquire(0, peers.NAME, 7, 7)).status == 0
        connection.sendall(peers.gets(10_000))
        connection.shutdown(socket.SHUT_WR)
        assert peers.receive_all(connection) == peers.get_responses(10_000, 7)
        comes_back(counterd)


@KINDS
def test_after_a_half_close_of_a_slow_reader_requests_are_answered(unix: bool, counterd: daemon.Daemon) -> None:
    """Replies longer than all buffers, with requests and the end behind them."""
    with counterd.connect() as many, counterd.connect(unix=unix, receive_buffer=8192) as connection:
        peers.acquire_many(many, [b"counter %d" % number for number in range(20_000)])
        connection.sendall(wire.acquire(0, peers.NAME, 7, 7) + wire.dump(1) * 15)
        counterd.wait_for_stats(stuck_outputs=1)
        connection.sendall(wire.get(2, peers.NAME))
        connection.shutdown(socket.SHUT_WR)
        found = peers.responses(peers.receive_all(connection))
        assert len(found) == 1 + 20_002 * 15 + 1
        assert (found[-1].opaque, wire.decode_consumption(found[-1].body)) == (2, 7)
        counterd.wait_for_stats(MOMENTS, holdings=20_000, curr_connections=2)


def test_holdings_of_many_connections_come_back(counterd: daemon.Daemon) -> None:
    with counterd.client() as other:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(counterd.connect(unix=number % 2 == 0)) for number in range(300)]
            for number, connection in enumerate(connections):
                connection.sendall(wire.acquire(1, b"shared", 2, 600) + wire.acquire(2, b"own %d" % number, 1, 1))
            for connection in connections:
                assert [found.status for found in peers.responses(peers.receive(connection, 32))] == [0, 0]
            assert other.get("shared") == 600
            for connection in connections[::3]:
                peers.reset(connection)
            for connection in connections[1::3]:
                connection.close()
            for connection in connections[2::3]:
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b""
        comes_back(counterd, connections=1)
        assert other.get("shared") == 0
        assert other.get("own 7") == 0


def test_holdings_of_many_successive_connections_come_back(counterd: daemon.Daemon) -> None:
    """Each takes all permits, so each must see what the one before gave back."""
    for _ in range(200):
        with counterd.client() as client:
            deadline = time.monotonic() + daemon.PATIENCE
            while True:
                with contextlib.suppress(errors.NotAvailable):
                    client.acquire("jobs", 5, maximum=5)
                    break
                assert time.monotonic() < deadline
    comes_back(counterd)


def test_a_hundred_thousand_holdings_come_back_while_others_are_served(counterd: daemon.Daemon) -> None:
    count = 100_000
    with counterd.client() as other, counterd.connect() as connection:
        peers.acquire_many(connection, [b"counter number %d" % number for number in range(count)])
        assert int(other.stats()["holdings"]) == count
        connection.close()
        slowest, left, began = 0.0, count, counterd.cpu()
        while left:
            before = counterd.cpu()
            assert before - began < MOMENTS, left
            other.acquire("other", maximum=2)
            other.release("other")
            left = int(other.stats()["holdings"])
            slowest = max(slowest, counterd.cpu() - before)
        assert slowest < MOMENTS / 2
        figures = other.stats()
        assert int(figures["given_back"]) == count
        assert other.get("counter number 99999") == 0
