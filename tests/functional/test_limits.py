"""How many connections are admitted: max_connections, and what the descriptors of the process allow."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from kit import daemon, peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS = pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
# The descriptors that are set aside for everything but connections.
RESERVED = 64


def admitted(counterd: daemon.Daemon, stack: contextlib.ExitStack, count: int, unix: bool = False) -> list:
    """Makes so many connections that were accepted."""
    connections = [stack.enter_context(counterd.connect(unix=unix)) for _ in range(count)]
    for connection in connections:
        assert peers.ask(connection, wire.noop(1)).status == 0
    return connections


def is_refused(counterd: daemon.Daemon, unix: bool = False, sends: bytes = b"") -> bool:
    with counterd.connect(unix=unix) as connection:
        if sends:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(sends)
        return peers.ends(connection)


def low_limit(descriptors: int) -> tuple[str, ...]:
    return daemon.after(f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))")


@KINDS
def test_a_surplus_connection_is_closed_and_counted(
    unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    counterd = start({"counter.max_connections": 3, "counter.socket": str(short_path / "s")})
    with contextlib.ExitStack() as stack:
        connections = admitted(counterd, stack, 3, unix)
        assert is_refused(counterd, unix)
        assert is_refused(counterd, unix, sends=wire.acquire(1, b"jobs", 1, 9) * 1000)
        assert is_refused(counterd, not unix)
        figures = wire.decode_stats(peers.ask(connections[0], wire.stats(1)).body)
        assert figures["rejected:max_connections"] == "3"
        assert figures["curr_connections"] == figures["connections_max"] == "3"
        assert figures["total_connections"] == "3"
        assert figures["internal_errors"] == "0"
        assert figures["command:acquire"] == "0"
        for connection in connections:
            assert peers.ask(connection, wire.noop(1)).status == 0
    counterd.wait_for_log("WARNING connection refused: 3 connections are open, which is the limit")


@KINDS
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_a_connection_is_admitted_after_another_has_ended(
    unix: bool, reset: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    counterd = start({"counter.max_connections": 2, "counter.socket": str(short_path / "s")})
    with contextlib.ExitStack() as stack:
        first, second = admitted(counterd, stack, 2, unix)
        assert is_refused(counterd)
        if reset:
            peers.reset(first)
        else:
            first.close()
        daemon.wait_until(
            lambda: wire.decode_stats(peers.ask(second, wire.stats(1)).body)["curr_connections"] == "1", "a place"
        )
        admitted(counterd, stack, 1, unix)
        assert is_refused(counterd)


def test_each_protocol_has_its_own_limit(start: Callable[..., daemon.Daemon]) -> None:
    protocol = {"enable": "true", "port": "0", "bind": "127.0.0.1", "max_connections": 2}
    counterd = start({"counter.max_connections": 1, **{f"beanstalk.{key}": value for key, value in protocol.items()}})
    counterd.addresses = counterd.served("counter listens on")
    with contextlib.ExitStack() as stack:
        admitted(counterd, stack, 1)
        counterd.addresses = counterd.served("beanstalk listens on")
        for _ in range(2):
            connection = stack.enter_context(counterd.connect())
            connection.sendall(b"list-tube-used\r\n")
            assert connection.recv(99) == b"USING default\r\n"
        assert is_refused(counterd)
        line = counterd.wait_for_log("connection refused: 2 connections are open, which is the limit")
        assert " protocol=beanstalk " in line


def test_refusals_are_logged_at_a_bounded_rate(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 1})
    with contextlib.ExitStack() as stack:
        (connection,) = admitted(counterd, stack, 1)
        for _ in range(200):
            assert is_refused(counterd)
        figures = wire.decode_stats(peers.ask(connection, wire.stats(1)).body)
        assert figures["rejected:max_connections"] == "200"
    counterd.stop()
    assert 1 <= len(counterd.lines("connection refused")) <= 10  # 5 in 10 s, and a slow machine


def test_the_daemon_survives_more_connections_than_descriptors(
    start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """The limit follows from RLIMIT_NOFILE, so that a surplus connection is refused and accept() never fails."""
    path = str(short_path / "s")
    counterd = start({"counter.socket": path}, program=low_limit(100))
    with contextlib.ExitStack() as stack:
        first, *_ = admitted(counterd, stack, 100 - RESERVED)
        figures = wire.decode_stats(peers.ask(first, wire.stats(1)).body)
        assert figures["connections_max"] == str(100 - RESERVED)
        # One burst, on both listeners, with many waiting to be accepted at the same time.
        attempts = [stack.enter_context(counterd.connect(unix=number % 2 == 0)) for number in range(400)]
        for number, attempt in enumerate(attempts):
            assert peers.ends(attempt), number
        figures = wire.decode_stats(peers.ask(first, wire.stats(1)).body)
        assert figures["rejected:max_connections"] == "400"
        assert figures["curr_connections"] == str(100 - RESERVED)
        assert figures["internal_errors"] == "0"
    # Until it has seen that they are gone it has no room for who asks, either.
    daemon.wait_until(lambda: not is_refused(counterd, sends=wire.noop(1)), "there is room again")
    counterd.wait_for_stats(curr_connections=1)
    with contextlib.ExitStack() as stack:
        admitted(counterd, stack, 100 - RESERVED)


def test_the_descriptors_bound_max_connections(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 1000}, program=low_limit(200))
    assert counterd.stats()["connections_max"] == 200 - RESERVED


def test_the_soft_limit_of_descriptors_is_raised(start: Callable[..., daemon.Daemon]) -> None:
    """It is often 1,024 for the sake of programs that use select()."""
    soft = daemon.after("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (70, 300))")
    counterd = start(program=soft)
    assert counterd.stats()["connections_max"] == 300 - RESERVED
    with contextlib.ExitStack() as stack:
        admitted(counterd, stack, 300 - RESERVED)


def test_fewer_descriptors_than_are_reserved(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start(program=low_limit(RESERVED - 24))
    with contextlib.ExitStack() as stack:
        (connection,) = admitted(counterd, stack, 1)
        assert is_refused(counterd)
        assert peers.ask(connection, wire.noop(1)).status == 0


@pytest.mark.parametrize("descriptors", [8, 14, 20, 31])
def test_too_few_descriptors_are_an_error_of_one_line(descriptors: int, tmp_path: Path) -> None:
    """Each of these ended it with a traceback, by SIGABRT, or left it ready although no client could connect."""
    config = tmp_path / "a.conf"
    config.write_text("counter.enable = true\ncounter.port = 0\n")
    result = daemon.run("-c", config, program=low_limit(descriptors))
    assert result.returncode == 2
    assert (
        result.stderr
        == f"{config}: the process may open {descriptors} files and needs at least 32: raise the limit (ulimit -n)\n"
    )


LACKS_MEMORY = """\
from counterd.control.process.daemon import Daemon
def lack(daemon):
    raise MemoryError("no room for 9 bytes")
Daemon.log_stats = lack"""


def test_a_lack_of_memory_is_no_internal_error(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start(program=daemon.within(LACKS_MEMORY))
    counterd.send_signal(signal.SIGUSR1)
    counterd.wait_for_log("ERROR out of memory: .*no room for 9 bytes")
    figures = counterd.stats()
    assert (figures["memory_errors"], figures["internal_errors"]) == (1, 0)


def test_a_burst_of_connections_is_accepted(start: Callable[..., daemon.Daemon]) -> None:
    """All at once, without a SYN that has to be sent again."""
    counterd = start()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.socket()) for _ in range(1000)]
        for connection in connections:
            connection.settimeout(daemon.PATIENCE)
            connection.connect(counterd.address)
        for connection in connections:
            connection.sendall(wire.noop(1))
        for connection in connections:
            assert len(peers.receive(connection, 12)) == 12
        counterd.wait_for_stats(curr_connections=1001)
    counterd.wait_for_stats(curr_connections=1)
