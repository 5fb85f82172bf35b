#!/usr/bin/env python3
"""Daemons that share limits through a real Redis Cluster, while servers and daemons fail: is a limit ever exceeded?

    python tests/drills/shared.py [--seconds 60] [--seed 1] [--daemons 3] [--workers 4] [--lease 2]

Workers at each daemon acquire permits of a few names, with and without waiting, hold them for a moment, and give them
back. Each writes down when it certainly held what: from the answer to the request until it asked for the release, or
noticed that its connection had ended. Meanwhile, one after the other: a master is killed, or stopped and later
continued, and its replica takes over; a daemon is killed and started again, or stopped for longer than a lease.

Afterwards all are compared. At no moment more than the maximum may have been held of a name. Two kinds of moments are
told apart: for a lease after a failover of a name's server, which may have lost what it had just granted; and of the
clients of a stopped daemon, which cannot end their connections, only the time until it was stopped counts. At the end,
everything comes back: one client can have all permits of each name. Exit status: 1 if a promise is not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Permit, Status
from kit import cluster, daemon, needs
from kit.daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.cluster import Server, Servers
    from kit.daemon import Daemon

MAXIMA = {b"few": 2, b"some": 10, b"many": 100}
HOLD_S = 0.05  # at most
WAIT_MS = 500
ANSWER_S = 20.0  # more than the daemon lets a request wait for the authority
FAULT_S = 2.0  # from one fault to the next
RECEIVE_SIZE = 4096


class Held(NamedTuple):
    """What a worker certainly held, and from when until when."""

    name: bytes
    amount: int
    since: float
    until: float


class Doubtful(NamedTuple):
    """From when until when a name may have been held too often, because its server had just been replaced."""

    index: int  # of the master
    since: float
    until: float


class Gone(Exception):
    """The connection has ended."""


class Worker(threading.Thread):
    """A client of one daemon, which connects again whenever its connection has ended.

    address: returns where the daemon listens. held: what it held. asked, granted: how often.
    """

    def __init__(self, address: Callable[[], tuple[str, int]], seed: int) -> None:
        super().__init__()
        self._address = address
        self._draw = random.Random(seed)
        self._parser = wire.ResponseParser()
        self._is_over = threading.Event()
        self.held: list[Held] = []
        self.asked = self.granted = 0

    def end(self) -> None:
        self._is_over.set()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                with socket.create_connection(self._address(), timeout=ANSWER_S) as connection:
                    self._parser = wire.ResponseParser()
                    while not self._is_over.is_set():
                        self._hold(connection)
            except (OSError, Gone):
                self._is_over.wait(0.05)

    def _hold(self, connection: socket.socket) -> None:
        name = self._draw.choice(list(MAXIMA))
        maximum = MAXIMA[name]
        amount = self._draw.randint(1, max(1, maximum // 10))
        self.asked += 1
        if self._draw.random() < 0.5:
            request = wire.take(1, [Permit(name, amount, maximum)], self._draw.choice([0, WAIT_MS]))
        else:
            request = wire.acquire(1, name, amount, maximum)
        if self._call(connection, request) != Status.NO_ERROR:
            self._is_over.wait(self._draw.random() * HOLD_S)
            return
        self.granted += 1
        since = time.monotonic()
        readable, _, _ = select.select([connection], [], [], self._draw.random() * HOLD_S)
        self.held.append(Held(name, amount, since, time.monotonic()))
        if readable and not connection.recv(RECEIVE_SIZE):
            raise Gone
        self._call(connection, wire.release(2, name, amount))

    def _call(self, connection: socket.socket, request: bytes) -> int:
        connection.sendall(request)
        while True:
            data = connection.recv(RECEIVE_SIZE)
            if not data:
                raise Gone
            for response in self._parser.feed(data):
                return response.status


@dataclass
class Sidecar:
    """A daemon, its workers, and when it was stopped."""

    start: Callable[[], Daemon]
    daemon: Daemon
    workers: list[Worker]
    stopped: list[tuple[float, float]]

    def address(self) -> tuple[str, int]:
        return self.daemon.addresses[0]


class Play:
    """One run. doubtful: moments after a failover."""

    def __init__(self, servers: Servers, sidecars: list[Sidecar], lease: float, draw: random.Random) -> None:
        self.servers = servers
        self.sidecars = sidecars
        self.lease = lease
        self.draw = draw
        self.doubtful: list[Doubtful] = []
        self.faults: list[str] = []

    def fail(self) -> None:
        """Lets something fail, and lets all be well again."""
        fault = self.draw.choice([self.kill_master, self.stop_master, self.kill_daemon, self.stop_daemon])
        self.faults.append(fault.__name__)
        fault()

    def kill_master(self) -> None:
        with self._failover() as old:
            old.kill()
        old.start()

    def stop_master(self) -> None:
        """As if the network between it and everybody else were cut."""
        with self._failover() as old:
            old.stop()
        time.sleep(self.lease)
        old.go_on()

    @contextlib.contextmanager
    def _failover(self) -> Iterator[Server]:
        index = self.draw.randrange(len(self.servers.masters))
        old, since = self.servers.masters[index], time.monotonic()
        yield old
        self.servers.promote(index)
        # Sidecars find it within a lease, or lose theirs; from then on it learns for a lease.
        self.doubtful.append(Doubtful(index, since, time.monotonic() + 2 * self.lease))

    def kill_daemon(self) -> None:
        sidecar = self.draw.choice(self.sidecars)
        sidecar.daemon.exit_status = -signal.SIGKILL
        sidecar.daemon.process.kill()
        sidecar.daemon.process.wait()
        sidecar.daemon = sidecar.start()

    def stop_daemon(self) -> None:
        """For longer than its lease, so that others get its permits."""
        sidecar = self.draw.choice(self.sidecars)
        since = time.monotonic()
        sidecar.daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * self.lease)
        sidecar.daemon.process.send_signal(signal.SIGCONT)
        sidecar.stopped.append((since, time.monotonic() + self.lease))

    # ---- what became of it ----

    def held(self) -> Iterator[Held]:
        """What was certainly held."""
        for sidecar in self.sidecars:
            for held in (each for worker in sidecar.workers for each in worker.held):
                ends = [since for since, until in sidecar.stopped if held.since < until and since < held.until]
                until = min([held.until, *ends])
                if until > held.since:
                    yield held._replace(until=until)

    def exceeded(self) -> tuple[dict[bytes, int], dict[bytes, int], list[str]]:
        """Returns the most that was held of each name at other times, the most in doubtful moments, and violations."""
        events = sorted(
            [(held.until, 0, -held.amount, held.name) for held in self.held()]
            + [(held.since, 1, held.amount, held.name) for held in self.held()]
        )
        now, most, doubtful = dict.fromkeys(MAXIMA, 0), dict.fromkeys(MAXIMA, 0), dict.fromkeys(MAXIMA, 0)
        violations = []
        for moment, _, change, name in events:
            now[name] += change
            if any(each.index == self.servers.index_of(name) and each.since <= moment <= each.until
                   for each in self.doubtful):  # fmt: skip
                doubtful[name] = max(doubtful[name], now[name])
            elif now[name] > most[name]:
                most[name] = now[name]
                if now[name] > MAXIMA[name]:
                    violations.append(f"{now[name]} of {MAXIMA[name]} permits of {name.decode()} were held")
        return most, doubtful, violations


def everything_comes_back(sidecar: Sidecar) -> None:
    """One client can have all permits of all names. Raises AssertionError if it cannot."""
    with sidecar.daemon.client() as client:
        for name, maximum in MAXIMA.items():
            wait_until(lambda name=name, maximum=maximum: _takes(client, name, maximum), f"all permits of {name!r}")


def _takes(client: object, name: bytes, maximum: int) -> bool:
    from counterd.errors import NotAvailable

    try:
        client.acquire(name, maximum, maximum=maximum)  # type: ignore[attr-defined]
    except NotAvailable:
        return False
    return True


def play(options: argparse.Namespace, directory: Path) -> int:
    draw = random.Random(options.seed)
    with contextlib.ExitStack() as stack:
        (directory / "servers").mkdir()
        servers = stack.enter_context(cluster.cluster(directory / "servers"))
        settings = {"cluster.url": servers.url, "cluster.lease": options.lease, "cluster.on_loss": "drop"}
        sidecars = []
        for number in range(options.daemons):
            places = iter(range(1 << 30))

            def start(number: int = number, places: Iterator[int] = places) -> Daemon:
                place = directory / f"daemon{number}-{next(places)}"
                return stack.enter_context(daemon.running(place, settings))

            sidecar = Sidecar(start, start(), [], [])
            sidecar.workers = [
                Worker(sidecar.address, options.seed * 1000 + number * 100 + each) for each in range(options.workers)
            ]
            sidecars.append(sidecar)
        play = Play(servers, sidecars, options.lease, draw)
        workers = [worker for sidecar in sidecars for worker in sidecar.workers]
        for worker in workers:
            worker.start()
        end = time.monotonic() + options.seconds
        try:
            while time.monotonic() < end:
                time.sleep(min(FAULT_S, max(0.0, end - time.monotonic())))
                if time.monotonic() < end:
                    play.fail()
                    print(f"{play.faults[-1]}: {sum(worker.granted for worker in workers):,} grants so far", flush=True)
        finally:
            for worker in workers:
                worker.end()
            for worker in workers:
                worker.join()
        everything_comes_back(sidecars[0])
        most, doubtful, violations = play.exceeded()
    asked, granted = sum(worker.asked for worker in workers), sum(worker.granted for worker in workers)
    print(f"{asked:,} requests, {granted:,} grants, {len(play.faults)} faults, {len(play.doubtful)} of them failovers")
    for name, maximum in MAXIMA.items():
        print(f"{name.decode()}: at most {most[name]} of {maximum}; within 2 leases after failovers {doubtful[name]}")
    for text in violations:
        print(f"violation: {text}")
    return 1 if violations or not granted else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--daemons", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="of each daemon")
    parser.add_argument("--lease", type=int, default=2, help="seconds")
    needs.declare("redis-server")
    with tempfile.TemporaryDirectory(prefix="counterd-") as directory:
        return play(parser.parse_args(), Path(directory))


if __name__ == "__main__":
    sys.exit(main())
