"""SIGTERM and SIGINT: the daemon accepts no more, answers received requests, closes all connections, and exits with
0."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from kit import daemon, peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
SHORTAGE_SIZE = wire.HEADER_SIZE + 13 + len("Draining")  # of the reply to a Take that was refused
KINDS = pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])


def many_counters(connection: socket.socket, count: int) -> None:
    peers.acquire_many(connection, [b"counter %d" % number for number in range(count)])


@BOTH
def test_idle_connections_are_closed(
    number: signal.Signals, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    counterd = start({"counter.socket": str(short_path / "s")})
    with counterd.connect() as tcp, counterd.connect(unix=True) as unix, counterd.connect() as holder:
        for connection in (tcp, unix):
            assert peers.ask(connection, wire.noop(1)).status == 0
        assert peers.ask(holder, wire.acquire(1, b"jobs", 1, 1)).status == 0
        counterd.send_signal(number)
        for connection in (tcp, unix, holder):
            assert connection.recv(1) == b""
            connection.close()
        assert counterd.ended() == 0
    assert counterd.lines("stopping")
    assert counterd.log[-1].endswith("stopped")
    assert not counterd.lines("cut off|ERROR|Traceback")


def test_a_drain_does_not_wait_until_clients_close(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 60})
    with counterd.connect() as idle, counterd.connect() as half:
        assert peers.ask(idle, wire.noop(1)).status == 0
        assert peers.ask(half, wire.noop(1)).status == 0
        half.sendall(wire.noop(2)[:5])
        assert counterd.stop() == 0
        assert peers.ends(idle)
        assert peers.ends(half)
    assert not counterd.lines("cut off")


def requests_and_answers(connection: socket.socket, kind: str, count: int) -> tuple[bytes, bytes]:
    """A burst of requests, and their answers. Numbers are shorter than their requests, errors are longer."""
    if kind == "errors":
        return wire.frame(1, 5) * count, wire.frame(1, 5, b"Invalid arguments", magic=0x91, flags=4) * count
    assert peers.ask(connection, wire.acquire(0, peers.NAME, 7, 7)).status == 0
    return peers.gets(count), peers.get_responses(count, 7)


def wait_until_received(connection: socket.socket, unix: bool) -> None:
    """Waits until the daemon's machine has acknowledged everything. A Unix socket delivers at once."""
    if not unix:
        daemon.wait_until(lambda: peers.unacknowledged(connection) == 0, "everything has arrived")


@KINDS
@pytest.mark.parametrize("kind", ["numbers", "errors"])
@pytest.mark.parametrize("count", [100, 5_000, 200_000])
def test_a_burst_sent_just_before_is_answered(
    count: int, kind: str, unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    counterd = start({"counter.socket": str(short_path / "s")})
    with counterd.connect(unix=unix) as connection:
        requests, expected = requests_and_answers(connection, kind, count)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(peers.receive_all, connection)
            connection.sendall(requests)
            wait_until_received(connection, unix)
            counterd.send_signal(signal.SIGTERM)
            received = receiving.result()
        assert len(received) == len(expected)
        assert received == expected
    assert counterd.ended() == 0


@KINDS
@pytest.mark.parametrize("kind", ["numbers", "errors"])
def test_an_unread_burst_is_answered(
    kind: str, unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """The daemon gets no CPU time until after the signal."""
    counterd = start({"counter.socket": str(short_path / "s")})
    with counterd.connect(unix=unix) as connection:
        requests, expected = requests_and_answers(connection, kind, 3_000)
        counterd.send_signal(signal.SIGSTOP)
        try:
            connection.sendall(requests)
            wait_until_received(connection, unix)
            counterd.send_signal(signal.SIGTERM)
        finally:
            counterd.send_signal(signal.SIGCONT)
        received = peers.receive_all(connection)
        assert len(received) == len(expected)
        assert received == expected
    assert counterd.ended() == 0


def test_acquires_sent_just_before_are_answered_on_every_connection(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    connections = [counterd.connect() for _ in range(50)]
    try:
        for connection in connections:
            assert peers.ask(connection, wire.noop(1)).status == 0
        for connection in connections:
            connection.sendall(wire.acquire(2, b"jobs", 1, 50))
        counterd.send_signal(signal.SIGTERM)
        for connection in connections:
            (response,) = peers.responses(peers.receive_all(connection))
            assert (response.opaque, response.status) == (2, 0)
    finally:
        for connection in connections:
            connection.close()
    assert counterd.ended() == 0


@KINDS
def test_unaccepted_connections_do_not_delay_the_drain(
    unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """Their kernel has connected them, the daemon has not. It may answer them or not, but must not wait for them."""
    counterd = start({"drain.timeout": 60, "counter.socket": str(short_path / "s")})
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(counterd.connect(unix=unix))
        assert peers.ask(first, wire.noop(1)).status == 0
        counterd.send_signal(signal.SIGSTOP)
        try:
            waiting = [stack.enter_context(counterd.connect(unix=unix)) for _ in range(200)]
            for connection in waiting[::2]:
                connection.sendall(wire.noop(2))
            counterd.send_signal(signal.SIGTERM)
        finally:
            counterd.send_signal(signal.SIGCONT)
        for connection in waiting:
            with contextlib.suppress(ConnectionResetError):
                assert peers.receive_all(connection) in (b"", wire.frame(0, 2, magic=0x91))
        assert counterd.ended() == 0
    assert not counterd.lines("cut off|ERROR")


def test_waiting_takes_are_answered(start: Callable[..., daemon.Daemon]) -> None:
    """On the connection that holds what they wait for, and on another one."""
    counterd = start({"drain.timeout": 3600})
    with counterd.connect() as holder, counterd.connect() as other:
        assert peers.ask(holder, wire.acquire(0, b"jobs", 1, 1)).status == 0
        for connection in (holder, other):
            connection.sendall(b"".join(wire.take(1 + i, [wire.Permit(b"jobs", 1, 1)], 3_600_000) for i in range(100)))
        counterd.wait_for_stats(waiters=200)
        counterd.send_signal(signal.SIGTERM)
        for connection in (holder, other):
            found = peers.responses(peers.receive_all(connection))
            assert [wire.decode_shortage(response.body).text for response in found] == ["Draining"] * 100
    assert counterd.ended() == 0


def test_a_pending_dump_is_finished(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    with counterd.connect() as holder, counterd.connect(receive_buffer=8192) as connection:
        many_counters(holder, 50_000)
        connection.sendall(wire.dump(1) * 2 + wire.noop(3))
        begin = peers.receive(connection, 1000)
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("stopping")
        found = peers.responses(begin + peers.receive_all(connection))
    assert len(found) == 50_001 * 2 + 1
    assert (found[-1].opcode, found[-1].opaque) == (0, 3)
    assert counterd.ended() == 0


@KINDS
def test_a_burst_behind_a_long_reply_is_answered(
    unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """The daemon does not read while its peer does not: when the signal comes, the burst is still in the kernel."""
    counterd = start({"counter.socket": str(short_path / "s")})
    with counterd.connect() as holder, counterd.connect(unix=unix, receive_buffer=8192) as connection:
        many_counters(holder, 20_000)
        connection.sendall(wire.dump(1) * 20)
        counterd.wait_for_stats(stuck_outputs=1)
        connection.sendall(wire.noop(2) * 100)
        wait_until_received(connection, unix)
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("stopping")
        found = peers.responses(peers.receive_all(connection))
    assert len([response for response in found if response.opcode == 0x11]) == 20_001 * 20
    assert len([response for response in found if response.opaque == 2]) == 100
    assert counterd.ended() == 0


@KINDS
def test_a_connection_that_does_not_read_is_cut_off(
    unix: bool, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    # More than the second that clients have to end their side, or the holder could be counted too.
    counterd = start({"drain.timeout": 3, "counter.socket": str(short_path / "s")})
    with counterd.connect() as holder, counterd.connect(unix=unix, receive_buffer=8192) as connection:
        many_counters(holder, 20_000)
        connection.sendall(wire.dump(1) * 50)
        counterd.wait_for_stats(stuck_outputs=1)
        began = time.monotonic()
        assert counterd.stop() == 0
        assert time.monotonic() - began >= 2.99
    assert counterd.lines(r"drain\.timeout is over: closed 1 connection at once$")


def test_a_drain_timeout_of_zero(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 0})
    with counterd.connect() as connection:
        assert peers.ask(connection, wire.noop(1)).status == 0
        assert counterd.stop() == 0
        assert peers.ends(connection)
    assert counterd.lines(r"drain\.timeout is over: closed 1 connection at once$")


def test_a_drain_timeout_of_zero_without_connections(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 0})
    assert counterd.stop() == 0
    assert counterd.log[-1].endswith("stopped")
    assert not counterd.lines("cut off")


@KINDS
def test_no_connection_is_accepted_any_more(unix: bool, start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    counterd = start({"drain.timeout": 60, "counter.socket": str(short_path / "s")}, status=1)
    with counterd.connect() as holder, counterd.connect(receive_buffer=8192) as connection:
        many_counters(holder, 20_000)
        connection.sendall(wire.dump(1) * 50)
        counterd.wait_for_stats(stuck_outputs=1)
        counterd.send_signal(signal.SIGTERM)
        assert holder.recv(1) == b""  # so it has begun
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as another:
            assert another.connect_ex(counterd.path if unix else counterd.address) == errno.ECONNREFUSED
        assert counterd.stop() == 1


# A journal that is never read to its end.
READING = """\
import asyncio
from counterd.control.service import Service
async def restore(self):
    await asyncio.Event().wait()
Service.restore = restore"""


@pytest.mark.parametrize("mode", ["close", "wait"])
def test_a_drain_while_a_journal_is_read_answers_waiting_requests(mode: str, tmp_path: Path) -> None:
    """The other protocols are served meanwhile."""
    config = tmp_path / "counterd.conf"
    queues = {"beanstalk.enable": "true", "beanstalk.port": 0, "beanstalk.journal": tmp_path / "jobs"}
    config.write_text(daemon.config_text({**queues, "drain.mode": mode, "drain.timeout": 3600}))
    with daemon.started([*daemon.within(READING), "-c", str(config)], config) as counterd:
        counterd.wait_for_log("counter listens on")
        counterd.addresses = counterd.served("listens on")
        with counterd.connect() as holder:
            assert peers.ask(holder, wire.acquire(0, b"jobs", 1, 1)).status == 0
            holder.sendall(wire.take(1, [wire.Permit(b"jobs", 1, 1)], 3_600_000) * 2)
            counterd.wait_for_stats(waiters=2)
            counterd.send_signal(signal.SIGTERM)
            found = peers.responses(peers.receive(holder, 2 * SHORTAGE_SIZE))
            assert [wire.decode_shortage(response.body).text for response in found] == ["Draining"] * 2
        assert counterd.ended() == 0
    assert not counterd.lines("ready:|WARN|ERROR|Traceback")


@BOTH
def test_a_second_signal_ends_the_daemon_at_once(
    number: signal.Signals, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    path = short_path / "s"
    counterd = start({"drain.timeout": 60, "counter.socket": str(path)}, status=1)
    with counterd.connect() as holder, counterd.connect(receive_buffer=8192) as connection:
        many_counters(holder, 20_000)
        connection.sendall(wire.dump(1) * 50)
        counterd.wait_for_stats(stuck_outputs=1)
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("stopping")
        assert counterd.process.poll() is None
        assert counterd.stop(number) == 1
    assert counterd.lines("second signal")
    assert not path.exists()


def test_other_signals_during_a_drain(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 60}, status=1)
    with counterd.connect() as holder, counterd.connect(receive_buffer=8192) as connection:
        many_counters(holder, 20_000)
        connection.sendall(wire.dump(1) * 50)
        counterd.wait_for_stats(stuck_outputs=1)
        counterd.send_signal(signal.SIGTERM)
        assert holder.recv(1) == b""
        counterd.config.write_text(counterd.config.read_text() + "counter.max_connections = 7\n")
        counterd.send_signal(signal.SIGHUP)
        counterd.send_signal(signal.SIGUSR1)
        counterd.wait_for_log("stats of")
        assert counterd.stop() == 1
    assert not counterd.lines("ERROR|Traceback")
