#!/usr/bin/env python3
"""How long does a daemon with many clients take to stop?

    python benchmarks/load/stops.py [--connections N] [--waiting N] [--takes N] [--mode close|wait] [--most S] [--smoke]

Starts a counterd, opens connections to it, and lets some of them wait with several Takes each, for units of a rate that
will not come. Then sends SIGTERM. The clients do what clients do: they read all that comes, and close their side at the
end of the connection. Prints, for each drain.mode, when the last Take was answered, when the last connection was
closed, when the process had ended, and how much processor time that took it: on a busy machine, this is what remains
of the time.

Ends with status 1 if a Take was not answered `Draining`, or if a process took more than --most seconds to end. The
clients run in this process, on the same machine: with fewer than two free cores the time is partly theirs.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from counterd.protocols.counter import wire

START_S = 30.0
HOUR_MS = 3_600_000
RATE = wire.Rate(b"stops", 1, 1, 3_600_000_000, 1)
DESCRIPTORS = 100  # for everything but connections


class Stop(NamedTuple):
    """Seconds after the signal. answered: the last Take. closed: the last connection. ended: the process.

    processor: seconds of the process. draining: how many Takes were answered so.
    """

    answered: float
    closed: float
    ended: float
    processor: float
    draining: int


class Crowd:
    """The clients: connections to one address."""

    def __init__(self, address: tuple[str, int], connections: int, waiting: int, takes: int) -> None:
        self.poller = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        self.received: dict[int, bytearray] = {}
        asked = b"".join(wire.take(1 + number, [RATE], HOUR_MS) for number in range(takes))
        for number in range(connections):
            connected = socket.create_connection(address)
            connected.sendall(asked if number < waiting else wire.noop(1))
            self.poller.register(connected, select.EPOLLIN)
            self.sockets[connected.fileno()] = connected
            self.received[connected.fileno()] = bytearray()

    def settle(self, observer: socket.socket, waiting: int) -> None:
        """Returns when all requests have been received."""
        deadline = time.monotonic() + START_S
        while int(wire.decode_stats(ask(observer, wire.stats(1)).body)["waiters"]) < waiting:
            if time.monotonic() > deadline:
                raise SystemExit("the Takes do not wait")
            time.sleep(0.05)
        for descriptor, _ in self.poller.poll(0, len(self.sockets)):
            self.sockets[descriptor].recv(1 << 16)  # the replies to Noop

    def part(self) -> tuple[float, float]:
        """Reads until the end of all connections. Returns when the last reply and the last end came."""
        answered = closed = time.monotonic()
        while self.sockets:
            for descriptor, _ in self.poller.poll():
                try:
                    data = self.sockets[descriptor].recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                if data:
                    self.received[descriptor] += data
                    answered = time.monotonic()
                else:
                    self.sockets.pop(descriptor).close()
                    closed = time.monotonic()
        return answered, closed

    def draining(self) -> int:
        """Returns how many Takes were told that the daemon drains."""
        found = [response for data in self.received.values() for response in wire.ResponseParser().feed(bytes(data))]
        return sum(wire.decode_shortage(response.body).text == "Draining" for response in found if response.status)


def ask(connection: socket.socket, request: bytes) -> wire.Response:
    parser = wire.ResponseParser()
    connection.sendall(request)
    while not (found := parser.feed(connection.recv(1 << 16))):
        pass
    return found[0]


def settings(port: int, mode: str, connections: int, takes: int) -> str:
    return "".join(
        f"{key} = {value}\n"
        for key, value in {
            "counter.enable": "true",
            "counter.bind": "127.0.0.1",
            "counter.port": port,
            "counter.max_connections": connections + DESCRIPTORS,
            "counter.waiters": max(connections * takes, 100),
            "drain.mode": mode,
            "drain.timeout": 60,
        }.items()
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connect(address: tuple[str, int]) -> socket.socket:
    """Connects as soon as the daemon listens."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def processor_seconds(pid: int) -> float:
    """Returns the processor time of all threads of a process."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def measure(mode: str, connections: int, waiting: int, takes: int) -> Stop:
    """Runs a daemon, and stops it."""
    address = ("127.0.0.1", free_port())
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "counterd.conf"
        config.write_text(settings(address[1], mode, connections, takes))
        process = subprocess.Popen([sys.executable, "-m", "counterd", "-c", str(config)], stderr=subprocess.PIPE)
        try:
            with connect(address) as observer:
                ask(observer, wire.take(0, [RATE]))
                crowd = Crowd(address, connections, waiting, takes)
                crowd.settle(observer, waiting * takes)
            began, before = time.monotonic(), processor_seconds(process.pid)
            process.send_signal(signal.SIGTERM)
            answered, closed = crowd.part()
            _, process.returncode, usage = os.wait4(process.pid, 0)
            ended = time.monotonic()
        finally:
            if process.returncode is None:
                process.kill()
            process.communicate()
    used = usage.ru_utime + usage.ru_stime - before
    return Stop(answered - began, closed - began, ended - began, used, crowd.draining())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--waiting", type=int, default=1_000, help="how many of them have Takes that wait")
    parser.add_argument("--takes", type=int, default=5, help="that wait on each of these")
    parser.add_argument("--mode", choices=("close", "wait"), help="default: both")
    parser.add_argument("--most", type=float, default=1.0, help="seconds that a stop may take")
    parser.add_argument("--smoke", action="store_true", help="few connections, and no limit on the time")
    options = parser.parse_args()
    if options.smoke:
        options.connections, options.waiting, options.most = 20, 10, START_S
    needed = options.connections + DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard) if hard >= 0 else needed, hard))
    print(f"{options.connections} connections, {options.waiting} of them with {options.takes} Takes that wait")
    print("mode   last answer  last end  process ended  processor time")
    status = 0
    for mode in (options.mode,) if options.mode else ("close", "wait"):
        stop = measure(mode, options.connections, options.waiting, options.takes)
        print(f"{mode:5}  {stop.answered:9.3f} s  {stop.closed:6.3f} s  {stop.ended:11.3f} s  {stop.processor:12.3f} s")
        if stop.draining != options.waiting * options.takes:
            print(f"only {stop.draining} Takes were answered Draining")
            status = 1
        if stop.ended > options.most:
            print(f"the process took more than {options.most:g} s to end")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
