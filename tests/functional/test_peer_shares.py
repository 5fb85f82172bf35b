"""One address, or one user of the Unix socket, gets its share of the waiting Takes; the others get the rest."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire
from kit import peers
from kit.daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.daemon import Daemon

WAITERS = 100
SETTINGS = {"counter.waiters": str(WAITERS), "counter.local_share": "50"}
PER_CONNECTION = 25
CONNECTIONS = 4


def dial(counterd: Daemon, address: str) -> socket.socket:
    return socket.create_connection(counterd.address, timeout=60, source_address=(address, 0))


def refused(connection: socket.socket) -> int:
    """Sends Takes that would have to wait. Returns how many were refused."""
    takes = b"".join(
        wire.take(1 + number, [wire.Permit(b"p", 1, 1)], wait_ms=600_000) for number in range(PER_CONNECTION)
    )
    connection.sendall(takes + wire.noop(0))
    parser, found = wire.ResponseParser(), []
    while not any(response.opcode == wire.Opcode.NOOP for response in found):
        found += parser.feed(connection.recv(65536))
    assert {response.status for response in found} <= {wire.Status.NO_ERROR, wire.Status.OUT_OF_MEMORY}
    return sum(response.status == wire.Status.OUT_OF_MEMORY for response in found)


def holder(stack: contextlib.ExitStack, counterd: Daemon) -> None:
    holding = stack.enter_context(counterd.connect())
    assert peers.ask(holding, wire.acquire(0, b"p", 1, 1)).status == wire.Status.NO_ERROR


def test_each_address_has_a_share_of_the_waiting_takes(start: Callable[..., Daemon]) -> None:
    counterd = start(SETTINGS)
    with contextlib.ExitStack() as stack:
        holder(stack, counterd)
        mine = [stack.enter_context(dial(counterd, "127.0.0.1")) for _ in range(CONNECTIONS)]
        assert sum(map(refused, mine)) == CONNECTIONS * PER_CONNECTION - WAITERS // 2
        other = stack.enter_context(dial(counterd, "127.0.0.2"))
        assert refused(other) == 0
        for connection in mine:
            connection.close()
        again = stack.enter_context(dial(counterd, "127.0.0.1"))
        wait_until(lambda: waiting(counterd) == PER_CONNECTION, "the Takes of connections that ended are removed")
        assert refused(again) == 0


def waiting(counterd: Daemon) -> int:
    with counterd.client() as client:
        return int(client.stats()["waiters"])


def test_each_user_of_the_unix_socket_has_one_share(start: Callable[..., Daemon], short_path: Path) -> None:
    counterd = start({**SETTINGS, "counter.socket": str(short_path / "counterd")})
    with contextlib.ExitStack() as stack:
        holder(stack, counterd)
        mine = [stack.enter_context(counterd.connect(unix=True)) for _ in range(CONNECTIONS)]
        assert sum(map(refused, mine)) == CONNECTIONS * PER_CONNECTION - WAITERS // 2
        assert refused(stack.enter_context(dial(counterd, "127.0.0.1"))) == 0


def test_by_default_a_local_address_may_use_all_places(start: Callable[..., Daemon]) -> None:
    counterd = start({"counter.waiters": str(WAITERS)})
    with contextlib.ExitStack() as stack:
        holder(stack, counterd)
        assert sum(refused(stack.enter_context(dial(counterd, "127.0.0.1"))) for _ in range(CONNECTIONS)) == 0
        assert refused(stack.enter_context(dial(counterd, "127.0.0.1"))) == PER_CONNECTION
