"""What the smockron protocol costs at its edges: memory of an identifier that has to wait, and how soon gatekeepers are
told that one has to.

Each function takes a server that runs and gives {figure: number}, its unit last in the name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import socket
import time
from typing import TYPE_CHECKING

from counterd.bench.dialects.smockron import DOMAIN
from counterd.bench.plan import Plan, read_work
from counterd.bench.run import run
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, SocketType, Status
from native import frames
from peers.edges import connected
from peers.servers import THROTTLED

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    from peers.servers import Server

BATCH = 1000
RECEIVE_SIZE = 4096
PEAK_S = 1.0  # time to measure the peak rate; the others send half of it
WARMUP_S = 0.5
BEGIN_S = 1.0  # time for the others to begin
PAUSE_S = 0.0005  # between two messages
GATEKEEPERS, DEPTH, NAMES = 10, 64, 100_000


def memory(server: Server, count: int) -> dict[str, float]:
    """Measures the memory of a waiting identifier of 16 bytes."""
    before = server.resident()
    with connected(server) as connection:
        _greet(connection)
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            connection.sendall(b"".join(_accepted(number) for number in numbers))
        _settled(connection)
    return {"bytes each": (server.resident() - before) / count}


def tell(server: Server, count: int) -> dict[str, float]:
    """Measures the time from an accounting message to its control message while ten gatekeepers send half of the peak.

    They send for `count` milliseconds, DEPTH messages at once, on the same core.
    """
    account = read_work("account")
    load = Plan(port=server.port, protocol="smockron", work=account, connections=GATEKEEPERS, depth=DEPTH, names=NAMES)
    peak = run(dataclasses.replace(load, duration=PEAK_S, warmup=WARMUP_S)).rate
    with connected(server) as gatekeeper, connected(server, control=True) as listener:
        _greet(gatekeeper)
        listener.sendall(wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(wire.topic(THROTTLED.encode())))
        parser = _settled(listener)
        reached = multiprocessing.Value("d")
        others = multiprocessing.Process(target=_pour, args=(server, peak / 2, count / 1000, reached))
        others.start()
        time.sleep(BEGIN_S)
        took = []
        while others.is_alive():
            took.append(_tell(gatekeeper, listener, parser, len(took)))
    if others.exitcode:
        raise RuntimeError(f"{server.name}: there was no load (exit status {others.exitcode})")
    took.sort()
    return {
        "p50 ms": took[len(took) // 2] * 1e3,
        "p99 ms": took[len(took) * 99 // 100] * 1e3,
        "max ms": took[-1] * 1e3,
        "load %": reached.value,
    }


def _tell(gatekeeper: socket.socket, listener: socket.socket, parser: wire.Parser, number: int) -> float:
    """Returns the seconds from an accounting message to its control message."""
    time.sleep(PAUSE_S)
    message = _accepted(number)
    start = time.perf_counter()
    gatekeeper.sendall(message)
    while not parser.feed(listener.recv(RECEIVE_SIZE)):
        pass
    return time.perf_counter() - start


def _pour(server: Server, rate: float, seconds: float, reached: Synchronized[float]) -> None:
    """Sends accounting messages at that rate, and writes down how much of it was reached, in percent."""
    identifiers = frames.make_names(NAMES)
    batches = [
        b"".join(wire.accounting(DOMAIN, Status.ACCEPTED, each, 0) for each in identifiers[first : first + DEPTH])
        for first in range(0, NAMES, DEPTH)
    ]
    with contextlib.ExitStack() as stack:
        gatekeepers = [stack.enter_context(connected(server)) for _ in range(GATEKEEPERS)]
        for gatekeeper in gatekeepers:
            _greet(gatekeeper)
        start, number = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            if number * DEPTH < elapsed * rate:
                gatekeepers[number % GATEKEEPERS].sendall(batches[number % len(batches)])
                number += 1
            else:
                time.sleep(PAUSE_S / 10)
    reached.value = 100 * number * DEPTH / (rate * seconds)


def _settled(connection: socket.socket) -> wire.Parser:
    """Waits until the server has handled all messages sent. Returns the parser for what it sends afterwards."""
    connection.sendall(wire.ping(0))
    parser = wire.Parser()
    while Command(b"PONG", b"") not in parser.feed(connection.recv(RECEIVE_SIZE)):
        pass
    return parser


def _greet(gatekeeper: socket.socket) -> None:
    gatekeeper.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gatekeeper.sendall(wire.greeting() + wire.ready(SocketType.PUB))


def _accepted(number: int) -> bytes:
    return wire.accounting(THROTTLED.encode(), Status.ACCEPTED, b"%016x" % number, 0)
