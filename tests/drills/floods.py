"""Connections that flood the daemon with requests, beside a client that asks for little.

A hundred connections send a burst of requests each, and come again, over Unix sockets and over TLS. Meanwhile a process
sends a NOOP of the counter protocol each millisecond. Each flood is played twice: at a second daemon, which shows how
much the machine itself adds, and at the daemon of the process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import struct
import time
from functools import partial
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire
from kit.machine import PATIENCE
from ports import free_ports

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

    from drills.stage import Daemon, Stage

CONNECTIONS = 100
BURST = 1 << 18  # bytes
ROUND_S = 0.1
PAUSE_S = 0.001
NICE = 19
MADE = 10  # different bursts of a flood
MINUTE_US = 60_000_000
FORKING = multiprocessing.get_context("fork")


def permits(choose: random.Random) -> bytes:
    names = [b"p%d" % number for number in choose.sample(range(1000), 16)]
    return wire.take(0, [wire.Permit(name, 1, 1 << 30) for name in names])


def rates(choose: random.Random) -> bytes:
    names = [b"r%d" % number for number in choose.sample(range(1000), 16)]
    return wire.take(0, [wire.Rate(name, 1, 1 << 30, 1 << 30, MINUTE_US) for name in names])


# The protocol of each flood, and what makes its requests.
FLOODS: dict[str, tuple[str, Callable[[random.Random], bytes]]] = {
    "put": ("beanstalk", lambda _: b"put 1 0 60 1\r\nx\r\n"),
    "put with delays": (
        "beanstalk",
        lambda choose: b"put %d %d 60 1\r\nx\r\n" % (choose.getrandbits(32), 1 + choose.getrandbits(30)),
    ),
    "put-limited": (
        "beanstalk",
        lambda choose: b"put-limited 1 0 60 1 c%d 1\r\nx\r\n" % choose.getrandbits(40),
    ),
    "limit-reserves": (
        "beanstalk",
        lambda choose: b"limit-reserves a%d 9 b%d\r\n" % (choose.randrange(100_000), choose.randrange(100_000)),
    ),
    "put and reserve": ("beanstalk", lambda _: b"put 1 0 60 1\r\nx\r\nreserve\r\n"),
    "Take of 16 permits": ("counter", permits),
    "Take of 16 rates": ("counter", rates),
    "Acquire of new names": ("counter", lambda choose: wire.acquire(0, b"n%d" % choose.getrandbits(40), 1, 1)),
    "NOOP": ("counter", lambda _: wire.noop(0)),
    "Dump": ("counter", lambda _: wire.dump(0)),
}


def burst(flood: str, number: int) -> bytes:
    choose = random.Random(number)
    request = FLOODS[flood][1]
    pieces, size = [], 0
    while size < BURST:
        pieces.append(request(choose))
        size += len(pieces[-1])
    return b"".join(pieces)


def play(
    bursts: list[bytes], connect: Callable[[], socket.socket], connections: int, nice: int, seconds: float
) -> None:
    """Runs the flood in a process of its own."""
    os.nice(nice)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.ExitStack() as stack:
            for number in range(connections):
                sock = connect()
                stack.callback(reset, sock)
                sock.setblocking(False)
                with contextlib.suppress(OSError):  # it takes no more
                    sock.send(bursts[number % MADE])
            time.sleep(ROUND_S)


def connect_plain(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE)
    sock.connect(path)
    return sock


def connect_secure(port: int, context: ssl.SSLContext) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
    return context.wrap_socket(sock, server_hostname="127.0.0.1")


def reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def probe(path: str, stop: Event, told: Connection) -> None:
    """Sends NOOPs until it is told to stop; then it sends how long each took, in ms."""
    took: list[float] = []
    with connect_plain(path) as sock:
        while not stop.is_set() or not took:
            begun = time.perf_counter()
            sock.sendall(wire.noop(0))
            left = wire.HEADER_SIZE
            while left:
                received = sock.recv(left)
                if not received:
                    raise ConnectionError("the daemon closed the connection")
                left -= len(received)
            took.append(1e3 * (time.perf_counter() - begun))
            time.sleep(PAUSE_S)
    told.send(sorted(took))


@contextlib.contextmanager
def probed(daemon: Daemon) -> Iterator[list[float]]:
    """Adds the durations of the NOOPs during the block to the list, in ms."""
    took: list[float] = []
    stop = FORKING.Event()
    hears, tells = FORKING.Pipe(duplex=False)
    process = FORKING.Process(target=probe, args=(daemon.path, stop, tells))
    process.start()
    try:
        yield took
    finally:
        stop.set()
        if hears.poll(PATIENCE):
            took += hears.recv()
        process.join()


def shape(took: list[float]) -> str:
    at = [took[int(share * (len(took) - 1))] for share in (0.5, 0.99, 0.999, 1)]
    return " ".join(f"{ms:8.2f}" for ms in at)


def floods(stage: Stage) -> None:
    connections, nice = (10, 0) if stage.is_smoke else (CONNECTIONS, NICE)
    stage.report.title(f"{connections} connections flood it: a NOOP takes, ms: p50, p99, p99.9, longest")
    with contextlib.ExitStack() as stack:
        daemon, other = (stack.enter_context(stage.daemon(settings(stage, name))) for name in ("flooded", "other"))
        for each in (daemon, other):
            each.crowd.call("hang_up")
        for flood, (protocol, _) in FLOODS.items():
            bursts = [burst(flood, number) for number in range(MADE)]
            for secure in (False, True):
                for where, target in (("at another daemon", other), ("at this daemon", daemon)):
                    connect = (
                        partial(connect_secure, int(target.settings[f"{protocol}.port"]), stage.context)
                        if secure else partial(connect_plain, target.settings[f"{protocol}.socket"])
                    )  # fmt: skip
                    name = f"{flood}{', over TLS' if secure else ''}, {where}"
                    with probed(daemon) as took:
                        process = FORKING.Process(target=play, args=(bursts, connect, connections, nice, stage.seconds))
                        process.start()
                        process.join()
                    stage.report.promise(
                        f"{name}: NOOPs that were answered", len(took), process.exitcode == 0 < len(took)
                    )
                    if took:
                        stage.report.figure(name, shape(took))
        daemon.is_left_empty()


def settings(stage: Stage, name: str) -> dict[str, str]:
    (port,) = free_ports(1)
    return {
        "beanstalk.port": str(port), "beanstalk.bind": "127.0.0.1", "beanstalk.tls.cert": str(stage.cert),
        "beanstalk.socket": str(stage.directory / f"{name}.beanstalk"), "beanstalk.enable": "true",
    }  # fmt: skip
