"""Peers that do not speak the protocol get an error and are closed, without harm to others."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.smockron import wire as smockron
from kit import daemon, gates, peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KINDS = pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
WRONG = wire.frame(0x00, 0xDEADBEEF, magic=0x55)
REFUSAL = wire.frame(0x00, 0xDEADBEEF, b"Invalid arguments", magic=0x91, flags=0x04)


@pytest.fixture
def counterd(start: Callable[..., daemon.Daemon], short_path: Path) -> daemon.Daemon:
    return start({"counter.socket": str(short_path / "s")})


@KINDS
@pytest.mark.parametrize("more", [0, 1, 100_000, 900_000])
def test_the_error_can_be_read_although_more_was_sent(more: int, unix: bool, counterd: daemon.Daemon) -> None:
    """Closing at once would make the kernel reset the connection and discard the error."""
    with counterd.connect(unix=unix) as connection:
        connection.sendall(wire.noop(1) + WRONG + b"\x90" * more)
        time.sleep(0.2)  # whatever could go wrong has gone wrong then
        assert peers.receive_all(connection) == wire.frame(0, 1, magic=0x91) + REFUSAL
        connection.close()
        counterd.wait_for_stats(curr_connections=1, internal_errors=0)
    assert counterd.stats()["command:noop"] == 1


@KINDS
def test_a_peer_that_goes_on_sending_is_closed(unix: bool, counterd: daemon.Daemon) -> None:
    with counterd.connect(unix=unix) as connection:
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 - which of the calls does not matter
            connection.sendall(WRONG)
            for _ in range(100):
                connection.sendall(bytes(1 << 18))
        counterd.wait_for_stats(curr_connections=1, internal_errors=0)


@KINDS
@pytest.mark.parametrize("sends", [False, True], ids=["silent", "trickling"])
def test_a_peer_that_never_closes_is_closed(sends: bool, unix: bool, counterd: daemon.Daemon) -> None:
    with counterd.connect(unix=unix) as connection, counterd.client() as other:
        assert peers.ask(connection, wire.acquire(0, b"jobs", 1, 1)).status == 0
        connection.sendall(WRONG)
        deadline = time.monotonic() + daemon.PATIENCE
        while other.stats()["curr_connections"] != "1":
            if sends:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(b"x")
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert other.acquire("jobs", maximum=1) == 1


@KINDS
def test_the_error_comes_after_long_replies(unix: bool, counterd: daemon.Daemon) -> None:
    with counterd.connect() as holder, counterd.connect(unix=unix, receive_buffer=8192) as connection:
        peers.acquire_many(holder, [b"counter %d" % number for number in range(10_000)])
        connection.sendall(wire.dump(1) * 20 + WRONG + wire.noop(2))
        counterd.wait_for_stats(stuck_outputs=1)
        connection.sendall(wire.noop(3))
        received = peers.receive_all(connection)
        assert received.endswith(wire.frame(0x11, 1, magic=0x91) + REFUSAL)
        assert len(peers.responses(received)) == 10_001 * 20 + 1


@KINDS
def test_peers_that_disconnect_during_long_replies(unix: bool, counterd: daemon.Daemon) -> None:
    """Also with requests behind them."""
    with counterd.connect() as holder:
        peers.acquire_many(holder, [b"counter %d" % number for number in range(10_000)])
        descriptors = counterd.descriptors()
        for number in range(100):
            with counterd.connect(unix=unix, receive_buffer=8192) as connection:
                connection.sendall(wire.acquire(0, b"jobs", 1, 1000) + wire.dump(1) * 10)
                peers.receive(connection, 16 + 5000 * (number % 20))
                if number % 2:
                    peers.reset(connection)
        counterd.wait_for_stats(curr_connections=2, holdings=10_000, stuck_outputs=0, slow_readers=0)
        daemon.wait_until(lambda: counterd.descriptors() == descriptors, "its descriptors are closed")
        assert counterd.stats()["internal_errors"] == 0
    assert not counterd.lines("ERROR|Traceback")


def test_a_browser_gets_an_error(counterd: daemon.Daemon) -> None:
    with counterd.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        (response,) = peers.responses(peers.receive_all(connection))
        assert (response.status, response.body) == (4, b"Invalid arguments")


def test_garbage_does_not_disturb_gatekeepers(start: Callable[..., daemon.Daemon], tmp_path: Path) -> None:
    chance = random.Random(7)
    counterd = start({**gates.SETTINGS, "smockron.rules": gates.write_rules(tmp_path)})
    whole = b"".join([
        smockron.greeting(),
        smockron.ready(smockron.SocketType.SUB),
        *(smockron.subscribe(b"login"[:size]) for size in range(6)),
        smockron.message(b"login\0", b"ACCEPTED", b"me", b"0", b""),
        smockron.ping(1, b"context"),
    ])  # fmt: skip
    with gates.gate(counterd) as steady:
        descriptors = counterd.descriptors()
        for _ in range(200):
            for address in gates.addresses(counterd):
                with socket.create_connection(address, daemon.PATIENCE) as connection:
                    kind = chance.randrange(3)
                    position = chance.randrange(len(whole))
                    flipped = whole[:position] + bytes([whole[position] ^ 1 << chance.randrange(8)])
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        connection.sendall(
                            (flipped + whole[position + 1 :], whole[:position], chance.randbytes(500))[kind]
                        )
                    if chance.randrange(2):
                        peers.reset(connection)
        steady.account(b"login", b"steady")
        while steady.told().identifier != b"steady":
            pass
        daemon.wait_until(lambda: counterd.descriptors() == descriptors, "its descriptors are closed")
    assert not counterd.lines("ERROR|Traceback")


def garbage(chance: random.Random) -> bytes:
    """Bytes that resemble requests more or less."""
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 5000))
    if kind == 1:  # the right magic, the rest at random
        return b"".join(b"\x90" + chance.randbytes(chance.randrange(11, 60)) for _ in range(20))
    if kind == 2:  # headers that claim anything
        header = wire.frame(chance.choice((0, 1, 2, 3, 16, 17, 99)), 1, body_length=chance.getrandbits(32) >> 16)
        return header + chance.randbytes(chance.randrange(3000))
    whole = b"".join(
        (
            wire.acquire(1, chance.randbytes(chance.randrange(1, 200)), 1, 5),
            wire.release(2, chance.randbytes(3), 1),
            wire.dump(3),
            wire.stats(4),
        )
    )
    if kind == 3:  # a flipped bit
        position = chance.randrange(len(whole))
        return whole[:position] + bytes([whole[position] ^ 1 << chance.randrange(8)]) + whole[position + 1 :]
    return whole[: chance.randrange(len(whole))]


@KINDS
def test_garbage_does_not_disturb_other_clients(unix: bool, counterd: daemon.Daemon) -> None:
    chance = random.Random(7)
    with counterd.client() as steady:
        steady.noop()
        descriptors = counterd.descriptors()
        for _ in range(15):
            with contextlib.ExitStack() as stack:
                connections = [stack.enter_context(counterd.connect(unix=unix)) for _ in range(40)]
                for connection in connections:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        for _ in range(3):
                            connection.sendall(garbage(chance))
                for connection in connections:
                    ending = chance.randrange(4)
                    if ending == 0:
                        peers.reset(connection)
                    elif ending == 1:
                        with contextlib.suppress(OSError):
                            connection.shutdown(socket.SHUT_WR)
                            peers.receive_all(connection)
            steady.acquire("steady", maximum=1)
            steady.release("steady")
        figures = counterd.wait_for_stats(curr_connections=2, holdings=0, busy=0, stuck_outputs=0)
        assert figures["internal_errors"] == 0
        assert figures["total_connections"] > 600
        assert figures["refused:invalid_arguments"] > 100
        daemon.wait_until(lambda: counterd.descriptors() == descriptors, "its descriptors are closed")
    assert not counterd.lines("ERROR|Traceback")
