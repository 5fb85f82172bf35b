"""What the smockron protocol costs at its edges: memory of an identifier that has to wait.

Each function takes a server that runs and gives {figure: number}, its unit last in the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, SocketType, Status
from peers.edges import connected
from peers.servers import THROTTLED

if TYPE_CHECKING:
    from peers.servers import Server

BATCH = 1000
RECEIVE_SIZE = 4096


def memory(server: Server, count: int) -> dict[str, float]:
    """Of an identifier of 16 bytes that has to wait."""
    before = server.resident()
    with connected(server) as connection:
        connection.sendall(wire.greeting() + wire.ready(SocketType.PUB))
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            connection.sendall(b"".join(_accepted(number) for number in numbers))
        connection.sendall(wire.ping(0))
        parser = wire.Parser()
        while Command(b"PONG", b"") not in parser.feed(connection.recv(RECEIVE_SIZE)):
            pass
    return {"bytes each": (server.resident() - before) / count}


def _accepted(number: int) -> bytes:
    return wire.accounting(THROTTLED.encode(), Status.ACCEPTED, b"%016x" % number, 0)
