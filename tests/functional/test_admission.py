"""Admission over real sockets: allowed addresses, limits per address, request rates, and idle connections."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from counterd.net.access import Access
from counterd.protocols.counter import wire
from kit import peers
from kit.certificates import client_context, server_context
from kit.daemon import wait_until
from kit.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)


def secured(connected: socket.socket, tls: bool = True) -> socket.socket:
    return client_context().wrap_socket(connected, server_hostname="127.0.0.1") if tls else connected


@pytest.mark.parametrize("tls", [False, True])
def test_refused_addresses_get_no_bytes(tls: bool) -> None:
    access = Access((ipaddress.ip_network("127.0.0.2/32"),))
    with serving(context=server_context() if tls else None, access=access) as server:
        with server.connect() as refused:
            assert peers.ends(refused)
        with secured(server.connect("127.0.0.2"), tls) as connection:
            assert peers.ask(connection, NOOP).opaque == 1
            (known,) = server.call(lambda: list(server.server.connections.values()))
            assert known.origin() == f"127.0.0.2:{connection.getsockname()[1]}"
        figures = server.figures()
        assert (figures["rejected:allow"], figures["handshakes_failed:protocol"]) == (1, 0)
        assert server.reports == [("rejected:allow", "connection refused: 127.0.0.1 is not an allowed address")]


def test_connections_of_an_address_are_limited() -> None:
    with (
        serving(max_per_address=2) as server,
        server.connect() as first,
        server.connect(),
        server.connect() as third,
        server.connect("127.0.0.2") as other,
    ):
        assert peers.ends(third)
        assert peers.ask(other, NOOP).opaque == 1
        first.close()
        server.wait_for(connections=2)
        with server.connect() as fourth:
            assert peers.ask(fourth, NOOP).opaque == 1


@pytest.mark.parametrize("allowed", [True, False])
def test_only_some_users_may_use_the_unix_socket(short_path: Path, allowed: bool) -> None:
    access = Access(users=frozenset({os.geteuid() + (0 if allowed else 1)}))
    with serving(str(short_path / "s"), access=access) as server, server.connect_unix() as unix:
        if allowed:
            assert peers.ask(unix, NOOP).opaque == 1
        else:
            assert peers.ends(unix)
        with server.connect() as tcp:
            assert peers.ask(tcp, NOOP).opaque == 1
        assert server.figures()["rejected:allow"] == (not allowed)


@pytest.mark.parametrize("tls", [False, True])
def test_a_connection_over_its_rate_gets_every_answer_later(tls: bool) -> None:
    """A second's worth at once, and then no more than the rate."""
    with (
        serving(context=server_context() if tls else None, requests_per_second=1000) as server,
        secured(server.connect(), tls) as connection,
    ):
        began = time.monotonic()
        connection.sendall(NOOP * 1400)
        assert peers.receive(connection, 1400 * len(REPLY)) == REPLY * 1400
        connection.sendall(NOOP)
        assert peers.receive(connection, len(REPLY)) == REPLY
        assert time.monotonic() - began > 0.39
        assert 1 <= server.figures()["slowed"] < 100
        assert server.reports[0][0] == "slowed"


HOLDER = """
import socket, ssl, sys
host, port, tls, request = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", bytes.fromhex(sys.argv[4])
connected = socket.create_connection((host, port))
if tls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connected = context.wrap_socket(connected)
connected.sendall(request)
left = int(input())
while left:
    left -= len(connected.recv(left))
print("read", flush=True)
input()
"""


@pytest.mark.parametrize("tls", [False, True])
def test_holdings_of_a_killed_throttled_process_come_back(tls: bool) -> None:
    """Under its limit, reading its waiting requests would take most of an hour."""
    request = wire.acquire(1, b"held", 1, 1) + NOOP * 3000
    with serving(context=server_context() if tls else None, requests_per_second=1) as server:
        arguments = (*map(str, server.address[:2]), str(tls), request.hex())
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            server.wait_for(slowed=1)
            (connection,) = server.call(lambda: list(server.server.connections.values()))
            assert 1 < connection.requests < 2000
            # All its answers, or else the kernel would send RST when it is killed.
            holder.stdin.write(f"{wire.HEADER_SIZE + 4 + (connection.requests - 1) * len(REPLY)}\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "read\n"
            assert server.in_use(b"held") == 1
            holder.kill()
            wait_until(lambda: server.in_use(b"held") == 0, "it comes back")
            server.wait_for(connections=0)


@pytest.mark.parametrize("tls", [False, True])
def test_a_half_closed_throttled_connection_gets_all_answers_at_once(tls: bool) -> None:
    """It can cause no more work than it has already sent, which the kernel's buffers bound."""
    with (
        serving(context=server_context() if tls else None, requests_per_second=1) as server,
        server.connect() as plain,
        secured(plain, tls) as connection,
    ):
        connection.sendall(NOOP * 3000)
        server.wait_for(slowed=1)
        socket.socket.shutdown(connection, socket.SHUT_WR)  # without a word of TLS
        assert peers.receive_all(connection) == REPLY * 3000


def test_an_idle_connection_is_closed_and_its_holdings_come_back() -> None:
    with (
        serving(context=server_context(), idle_timeout=1) as server,
        secured(server.connect()) as idle,
        secured(server.connect()) as busy,
    ):
        assert peers.ask(idle, wire.acquire(1, b"held", 1, 1)).status == 0
        while server.in_use(b"held"):
            assert peers.ask(busy, NOOP).opaque == 1
            time.sleep(0.05)
        assert idle.recv(1) == b""
        assert peers.ask(busy, NOOP).opaque == 1
        assert server.figures()["idle_closed"] == 1


def test_holdings_of_a_killed_connection_come_back(short_path: Path) -> None:
    with serving(str(short_path / "s")) as server, server.connect() as killed, server.connect_unix() as other:
        assert peers.ask(killed, wire.acquire(1, b"held", 1, 1)).status == 0
        assert peers.ask(other, NOOP).opaque == 1
        ids = server.call(lambda: {each.origin()[:4]: each.id for each in server.server.connections.values()})
        server.call(lambda: server.server.kill(server.server.find(ids["127."])))
        assert peers.ends(killed)
        wait_until(lambda: server.in_use(b"held") == 0, "it comes back")
        assert peers.ask(other, NOOP).opaque == 1
        assert server.call(server.server.find, ids["127."]) is None
