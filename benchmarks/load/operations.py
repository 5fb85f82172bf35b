"""What operating counterd costs: everything on beside everything off, scrapes with many connections, memory that stays.

    python benchmarks/load/operations.py [--rounds 15] [--seconds 1] [--only TEXT] [--smoke]

on      the admin endpoint, /metrics scraped once a second, a dashboard open with the busiest counters, logs in JSON
off     the daemon alone

Both daemons are bound to one core and everything else to another; their rounds alternate, and a ratio is the median of
the rounds' ratios. Exit status: 0 if what is promised below holds, 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import os
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.bench.plan import Plan, read_work
from peers import servers
from peers.compare import load, lowest_peak
from peers.servers import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU_MAX = 1.03  # ratio of on to off
P99_MAX = 1.2
SCRAPE_MAX_MS = 50
GROWTH_MAX = 1.02  # factor of resident memory
NAMES = 100_000
CONNECTIONS = 50
IDLE = 15_000
SCRAPES = 50
SOAK_REQUESTS = 10_000_000
SOAK_CONNECTIONS = 200_000
SOAK_PARTS = 10
WATCH = "/events?table=counters&sort=consumption&limit=50"


@dataclasses.dataclass(frozen=True)
class Operated(Server):
    """A daemon whose admin endpoint listens on a Unix socket."""

    admin: Path | None = None

    def lives(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/livez") == b"ok\n"
        return False

    def get(self, path: str) -> bytes:
        with contextlib.closing(self._ask(path)) as response:
            return response.read()

    def watch(self, path: str, stop: threading.Event) -> None:
        """Reads the events that the server sends until `stop` is set."""
        with contextlib.closing(self._ask(path)) as response:
            while not stop.is_set() and response.readline():
                pass

    def _ask(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.admin))
        connection.request("GET", path)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{path}: {response.status} {response.reason}")
        return response


@contextlib.contextmanager
def operated(core: int, directory: Path) -> Iterator[Operated]:
    """Runs a daemon with JSON logs and the admin endpoint on."""
    admin = directory / "admin"
    settings = ["log.format=json", "admin.enable=true", f"admin.bind=unix:{admin}"]
    with servers.counterd(core, *settings) as server:
        found = Operated(**dataclasses.asdict(server), admin=admin)
        wait_for(found.lives, "the admin process answers")
        yield found


@contextlib.contextmanager
def looked_at(server: Operated) -> Iterator[None]:
    """Runs a scraper, with one scrape a second, and a dashboard that reads events."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(1):
            server.get("/metrics")

    threads = [threading.Thread(target=scrape), threading.Thread(target=server.watch, args=(WATCH, stop))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def plan_of(depth: int, seconds: float) -> Plan:
    return Plan(
        connections=CONNECTIONS, depth=depth, names=NAMES, work=read_work("acquire-release"), duration=seconds,
        warmup=0.2,
    )  # fmt: skip


def say(promise: str, measured: float, limit: float, unit: str = "") -> bool:
    kept = measured <= limit
    print(f"{promise:62}{measured:9.3f}{unit}  at most {limit}{unit}  {'' if kept else 'NOT KEPT'}", flush=True)
    return kept


def beside(running: dict[str, Server], plan: Plan, figure: str, rounds: int) -> float:
    """Returns the median of the ratios on / off. Each round measures both, in alternating order."""
    ratios = []
    for number in range(rounds):
        order = ("off", "on") if number % 2 else ("on", "off")
        found = {name: load(running[name], dataclasses.replace(plan, seed=number + 1)) for name in order}
        ratios.append(found["on"][figure] / found["off"][figure])
    return statistics.median(ratios)


def overhead(options: argparse.Namespace) -> bool:
    """Compares CPU per request in a closed loop, and p99 at half of the peak rate."""
    kept = True
    core, _ = servers.two_cores()
    with (
        tempfile.TemporaryDirectory() as directory,
        servers.counterd(core) as off,
        operated(core, Path(directory)) as on,
        looked_at(on),
    ):
        running = {"off": off, "on": on}
        for depth in (1, 64):
            plan = plan_of(depth, options.seconds)
            for server in running.values():
                load(server, dataclasses.replace(plan, prefill=True))
            half = dataclasses.replace(plan, rate=lowest_peak(running, plan, {}) / 2)
            for name, figure, chosen, limit in (
                ("CPU of the daemon a request", "server CPU us", plan, CPU_MAX),
                ("p99 at half of the peak", "p99 ms", half, P99_MAX),
            ):
                ratio = beside(running, chosen, figure, options.rounds)
                kept &= say(f"{name}, {depth} in flight, on / off", ratio, limit)
    return kept


def connected(server: Operated) -> float:
    """Returns the number of connections in the server's metrics."""
    found = re.search(rb'counterd_connections\{protocol="counter"\} (\S+)', server.get("/metrics"))
    return float(found[1]) if found else 0.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Waits until the condition is true. Raises RuntimeError after START_S seconds."""
    end = time.monotonic() + servers.START_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {servers.START_S:g} s: {what}")
        time.sleep(0.05)


def scrapes(options: argparse.Namespace) -> bool:
    """Measures the slowest scrape of /metrics while many connections are open."""
    core, _ = servers.two_cores()
    idle = 500 if options.smoke else IDLE
    with (
        tempfile.TemporaryDirectory() as directory,
        operated(core, Path(directory)) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(idle):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_for(lambda: connected(server) >= idle, "all connections are there")
        taken = []
        for _ in range(SCRAPES):
            before = time.perf_counter()
            server.get("/metrics")
            taken.append((time.perf_counter() - before) * 1e3)
    return say(f"a scrape with {idle:,} idle connections, slowest of {SCRAPES}", max(taken), SCRAPE_MAX_MS, " ms")


def soak(options: argparse.Namespace) -> bool:
    """Compares resident memory after many requests and connections with that after the first tenth of them."""
    core, _ = servers.two_cores()
    parts, scale = (2, 1000) if options.smoke else (SOAK_PARTS, 1)
    sizes = []
    with tempfile.TemporaryDirectory() as directory, operated(core, Path(directory)) as server, looked_at(server):
        for part in range(parts):
            common = {"duration": None, "warmup": 0, "seed": part + 1}
            requests = SOAK_REQUESTS // SOAK_PARTS // scale
            load(server, dataclasses.replace(plan_of(64, 1), requests=requests, prefill=True, **common))
            connections = SOAK_CONNECTIONS // SOAK_PARTS // scale
            load(server, dataclasses.replace(plan_of(1, 1), requests=connections, keep_alive=False, **common))
            sizes.append(server.resident())
            print(f"  {part + 1} of {parts}: {sizes[-1] / 1e6:.1f} MB", flush=True)
    return say("resident memory at the end, beside that after a tenth", sizes[-1] / sizes[0], GROWTH_MAX)


PARTS: dict[str, Callable[[argparse.Namespace], bool]] = {"overhead": overhead, "scrapes": scrapes, "soak": soak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument("--only", default="", help=f"only those of {', '.join(PARTS)} that contain this")
    parser.add_argument("--smoke", action="store_true", help="tiny counts, whatever comes out: only that it runs")
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.seconds = 1, 0.3
    servers.allow_connections()
    os.sched_setaffinity(0, {servers.two_cores()[1]})
    kept = [part(options) for name, part in PARTS.items() if options.only in name]
    sys.exit(0 if options.smoke or all(kept) else 1)


if __name__ == "__main__":
    main()
