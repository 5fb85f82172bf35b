#!/usr/bin/env python3
"""What TLS costs: round trips over plain TCP and over TLS, in turns, and the memory of connections that do nothing.

    python benchmarks/load/tls.py [--rounds N] [--seconds S] [--connections N]

One process serves both kinds from one store, another asks: one connection of each kind, so many requests in flight,
each batch sent when all of the last is answered. Rounds alternate between the two, and the median of each is what
counts, so a busier machine slows both. The CPU time of the server's process leaves out what TLS costs the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import socket
import ssl
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import trustme
import uvloop

from counterd.net.admission import Limits
from counterd.net.server import Server
from counterd.net.sockets import Keepalive, open_tcp
from counterd.protocols.counter._session import open_store
from native import frames

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTHS = (1, 16, 64)
MANY = 2048  # requests in a batch: more than fit into a TLS record
REPLY_SIZES = [16, 12]  # bytes of the reply to an Acquire and to a Release
PATIENCE = 30.0


def serve(pipe: Any, chain: bytes) -> None:
    """Runs in a process: sends its two ports, then serves until a message arrives on the pipe."""

    async def run(loop: asyncio.AbstractEventLoop) -> None:
        store = open_store(buckets=100_000, holdings=100_000, name_memory=1 << 20, hash_key=bytes(16), figures=dict)
        servers = [Server(loop, store, Limits(100_000, 25, 25), print) for _ in "pt"]
        servers[1].context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with trustme.Blob(chain).tempfile() as path:
            servers[1].context.load_cert_chain(path)
        for server in servers:
            listening = open_tcp("127.0.0.1", 0, Keepalive(60, 30, 3, 25))
            pipe.send(listening.getsockname()[1])
            server.listen(listening)
        done = asyncio.Event()
        loop.add_reader(pipe.fileno(), done.set)
        await done.wait()

    loop = uvloop.new_event_loop()
    loop.run_until_complete(run(loop))


class Process:
    """The process of the server. ports: for plain TCP and for TLS."""

    def __init__(self, pid: int, ports: list[int], context: ssl.SSLContext) -> None:
        self.pid = pid
        self.ports = ports
        self._context = context

    def connect(self, kind: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.ports[kind]), PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._context.wrap_socket(connection, server_hostname="127.0.0.1") if kind else connection

    def cpu_ns(self) -> int:
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0])

    def resident(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def running() -> Iterator[Process]:
    authority = trustme.CA()
    chain = authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    spawning = multiprocessing.get_context("spawn")  # the server's memory contains nothing of this process
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(theirs, chain))
    process.start()
    assert process.pid is not None
    try:
        yield Process(process.pid, [ours.recv(), ours.recv()], context)
    finally:
        ours.send("end")
        process.join(PATIENCE)


def ask(connection: socket.socket, batch: bytes, reply_size: int) -> None:
    """Sends a batch and waits for all replies."""
    connection.sendall(batch)
    while reply_size:
        reply_size -= len(connection.recv(reply_size))


def exchanges(depth: int) -> Iterator[tuple[bytes, int]]:
    """Yields (batch of `depth` requests, size of the replies) without end."""
    batches = frames.pair_batches(frames.make_names(1000), 1000, depth, seed=1)
    sizes = REPLY_SIZES if depth == 1 else [depth // 2 * sum(REPLY_SIZES)]
    return zip(itertools.cycle(batches), itertools.cycle(sizes))


def round_trips(server: Process, rounds: int, seconds: float) -> None:
    print(f"{'in flight':>9} {'plain':>14} {'TLS':>14} {'ratio':>6} {'server, plain':>17} {'server, TLS':>17}")
    for depth in DEPTHS:
        asking = exchanges(depth)
        rates: list[list[float]] = [[], []]
        spent: list[list[float]] = [[], []]
        with server.connect(0) as plain, server.connect(1) as tls:
            for _ in range(rounds):
                for kind, connection in enumerate((plain, tls)):
                    asked, cpu_ns, began = 0, server.cpu_ns(), time.perf_counter()
                    while time.perf_counter() - began < seconds:
                        for _ in range(100):
                            ask(connection, *next(asking))
                        asked += 100 * depth
                    rates[kind].append(asked / (time.perf_counter() - began))
                    spent[kind].append((server.cpu_ns() - cpu_ns) / asked)
        rate, cpu = [statistics.median(each) for each in rates], [statistics.median(each) for each in spent]
        print(
            f"{depth:>9} {rate[0]:>12,.0f}/s {rate[1]:>12,.0f}/s {rate[1] / rate[0]:>6.2f}"
            f" {cpu[0]:>14,.0f} ns {cpu[1]:>14,.0f} ns"
        )


def idle_memory(server: Process, count: int) -> None:
    """After the round trips: what is allocated once has been by then."""
    few, many = (next(exchanges(depth)) for depth in (2, MANY))
    for kind, name in enumerate(("plain", "TLS")):
        with contextlib.ExitStack() as stack:
            before = server.resident()
            connections = [stack.enter_context(server.connect(kind)) for _ in range(count)]
            each = []
            for exchange in (few, many):
                for connection in connections:
                    ask(connection, *exchange)
                each.append((server.resident() - before) / count / 1024)
        print(f"{name:>9} {each[0]:>12.1f} KiB {each[1]:>10.1f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="of each kind")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a round")
    parser.add_argument("--connections", type=int, default=1000, help="that do nothing")
    options = parser.parse_args()
    with running() as server:
        print("requests of one connection, and CPU time of the server for each")
        round_trips(server, options.rounds, options.seconds)
        print(
            f"\nmemory of each of {options.connections:,} connections that do nothing: "
            f"after 2 requests, and after {MANY:,} at once"
        )
        idle_memory(server, options.connections)


if __name__ == "__main__":
    main()
