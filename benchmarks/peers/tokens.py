"""What the sentinel protocol costs at its edges: memory of a token that is held, and a million that end at once.

Each function takes a server that runs and gives {figure: number}, its unit last in the name. How many flows there are,
and when a client that has gone loses its tokens, is in the rules of servers.py.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from counterd.bench.connection import Place
from counterd.bench.dialects.redis_lua import LEASE_MS, TOKEN, install, requests_of
from counterd.bench.dialects.sentinel import FIRST_SEMAPHORE
from counterd.bench.plan import Plan
from counterd.protocols.sentinel import wire
from peers.edges import Bystander, connected, receive
from peers.servers import FLOWS, LIMIT, OFFLINE_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers.servers import Server

GRANTED = 16  # bytes of an answer
NAME = b"n" * 16
LEAD_S = 0.2
WATCHED_S = 0.5  # time that another client is measured after all tokens are due
WATCHED_EACH_S = 3e-6  # added for each token


def memory(server: Server, count: int) -> dict[str, float]:
    """Measures the memory of a permit with a lease that a client holds."""
    before = server.resident()
    with connected(server) as connection:
        _hold(server, connection, count)
        return {"bytes each": (server.resident() - before) / count}


def expire(server: Server, count: int) -> dict[str, float]:
    """Measures another client's latency from the disconnect of the client with all tokens until they have ended.

    Also measures it on the idle server for as long, because a busy machine delays clients as well.
    """
    watched_s = WATCHED_S + WATCHED_EACH_S * count
    with Bystander(server) as bystander:
        time.sleep(watched_s)
    idle = bystander.figures("max ms")
    with connected(server) as connection:
        _hold(server, connection, count)
        with Bystander(server) as bystander:
            time.sleep(LEAD_S)
            connection.shutdown(socket.SHUT_RDWR)  # the other process has a copy of this descriptor
            time.sleep(OFFLINE_MS / 1e3 + watched_s)
    for flow in (FIRST_SEMAPHORE, FIRST_SEMAPHORE + FLOWS - 1):
        if not _is_free(server, flow):
            raise RuntimeError(f"{server.name}: there are tokens of flow {flow} that have not ended")
    return bystander.figures("max ms", "p99 ms") | {"idle max ms": idle["others max ms"]}


def _hold(server: Server, connection: socket.socket, count: int) -> None:
    """Acquires `count` permits, one of each flow in turn."""
    answer = 4 if server.protocol == "redis-lua" else GRANTED
    for batch in _acquires(server, count):
        connection.sendall(b"".join(batch))
        receive(connection, answer * len(batch))


def _acquires(server: Server, count: int) -> Iterator[list[bytes]]:
    plan = Plan(protocol=server.protocol, maximum=LIMIT)
    if server.protocol == "sentinel":
        batch = [wire.acquire(0, FIRST_SEMAPHORE + number, 1) for number in range(FLOWS)]
        for start in range(0, count, FLOWS):
            yield batch[: count - start]
        return
    install(Place(socket.AF_INET, ("127.0.0.1", server.port), "", None))
    ask = requests_of(plan, NAME)["acquire"].replace(b"$4\r\n%d\r\n" % LEASE_MS, b"$8\r\n36000000\r\n")
    batch = [ask.replace(NAME, b"%016x" % number) for number in range(FLOWS)]
    for start in range(0, count, FLOWS):
        yield [each.replace(TOKEN, b"%016x" % start) for each in batch[: count - start]]


def _is_free(server: Server, flow: int) -> bool:
    """Returns True if all permits of the flow are available."""
    with connected(server) as connection:
        connection.sendall(wire.acquire(1, flow, LIMIT))
        (response,) = wire.ResponseParser().feed(connection.recv(100))
        return response.status == wire.Status.OK
