#!/usr/bin/env python3
"""A daemon at work for as long as told, and whether anything of it grows meanwhile.

    python tests/drills/soak.py [--seconds 3600] [--period 5] [--smoke]

Both protocols and the admin endpoint, at a part of what they can do: the clients of crowd.py, over TLS and over a Unix
socket, which acquire, hold, release, come and go, and record their grants; idle connections, a few of them replaced
each second; keys of the throttr protocol that expire, subscribers that leave; each second a Dump, a LIST, a scrape.

A line for each period; after the first fifth, which is to warm up, the medians of the first and the last tenth of what
is left are compared: resident memory of the daemon and of its admin process, descriptors, threads, and p99. Exit
status: 1 if one of them grew, a request failed, or anything is held when all clients have gone. --smoke: the shortest,
with no word about times and growth.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.client import throttr
from counterd.protocols.throttr.wire import TTLType
from drills.stage import Stage
from kit.machine import PATIENCE
from peers import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from drills.stage import Daemon

IDLE, REPLACED = 500, 5  # connections; of them in each second
MEMORY = "8M"  # of the throttr protocol: each page of its index is in use before long, however large it is
KEYS, TURN_S = 20, 0.05  # keys in each turn of the throttr clients
TTLS_MS = (100, 1000)
WARM = 5  # a part of the time: what is allocated once, is
TENTH = 10
MEMORY_MAX, MEMORY_SLACK_MB = 1.05, 4.0  # what the last tenth may have, beside the first
COUNT_SLACK = 8  # descriptors: visitors and scrapes are sampled in different numbers
P99_MAX, P99_SLACK_MS = 10.0, 200.0  # others use this machine too, and may stop it for a while


@dataclass(frozen=True)
class Sample:
    """Figures of one period, and at its end."""

    requests: float  # a second
    p50_ms: float
    p99_ms: float
    slowest_ms: float
    rss_mb: float
    admin_mb: float
    descriptors: int
    threads: int
    holdings: int
    keys: int


UNITS = ("/s", "ms", "ms", "ms", "MB", "MB", "", "", "", "")


class Chores:
    """The load besides the crowd, in a thread of its own. failed: requests with a wrong answer, or none."""

    def __init__(self, daemon: Daemon, idle: int) -> None:
        self.failed: list[str] = []
        self._daemon = daemon
        self._stopped = threading.Event()
        self._idle = collections.deque(self._connect() for _ in range(idle))
        self._serial = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()
        self._thread.join()
        for sock in self._idle:
            sock.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._daemon.ports["throttr"]))

    def _client(self) -> throttr.Client:
        return throttr.Client("127.0.0.1", self._daemon.ports["throttr"], timeout=PATIENCE)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            with self._client() as client:
                while not self._stopped.wait(TURN_S):
                    self._churn(client)
                    if time.monotonic() >= due:
                        due = time.monotonic() + 1
                        self._each_second(client)
        except Exception as error:  # noqa: BLE001  whatever it is, nothing goes on after it
            self.failed.append(f"{type(error).__name__}: {error}")

    def _churn(self, client: throttr.Client) -> None:
        """Inserts keys that expire; and subscribes, gets an event, and disconnects."""
        for _ in range(KEYS):
            self._serial += 1
            name, ttl = b"key %d" % self._serial, TTLS_MS[self._serial % 2]
            if self._serial % 3:
                client.insert(name, 10, ttl, TTLType.MILLISECONDS)
            else:
                client.set(name, bytes(self._serial % 2000), ttl, TTLType.MILLISECONDS)
            client.query(name)
        with self._client() as other:
            other.subscribe(b"channel %d" % (self._serial % 7))
            client.publish(b"channel %d" % (self._serial % 7), b"event")

    def _each_second(self, client: throttr.Client) -> None:
        self._daemon.control.dump()
        client.list()
        self._daemon.ask("/metrics")
        for _ in range(min(REPLACED, len(self._idle))):
            self._idle.popleft().close()
            self._idle.append(self._connect())


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def listed(pid: int, directory: str) -> int:
    return len(list(Path(f"/proc/{pid}/{directory}").iterdir()))


def sampled(daemon: Daemon, period: float, failed: list[str]) -> Sample:
    figures = daemon.crowd.measure(period)
    failed += figures.failed
    counter, keys = (daemon.stats()["protocols"][protocol]["figures"] for protocol in ("counter", "throttr"))
    pid, admin = daemon.process.pid, daemon.admin_pid()
    return Sample(
        figures.rate, figures.p50_ms, figures.p99_ms, figures.longest_ms,
        resident_mb(pid), resident_mb(admin) if admin else 0.0, listed(pid, "fd"), listed(pid, "task"),
        counter["holdings"], keys["keys"],
    )  # fmt: skip


def grown(samples: list[Sample]) -> list[tuple[str, float, float, bool]]:
    """Compares figures that may not grow: the medians of the first and the last tenth. Returns these, and whether they
    grew.
    """
    count = max(1, len(samples) // TENTH)

    def ends(figure: str) -> tuple[float, float]:
        values = [getattr(sample, figure) for sample in samples]
        return statistics.median(values[:count]), statistics.median(values[-count:])

    found = []
    for figure, factor, slack in (
        ("rss_mb", MEMORY_MAX, MEMORY_SLACK_MB),
        ("admin_mb", MEMORY_MAX, MEMORY_SLACK_MB),
        ("descriptors", 1.0, COUNT_SLACK),
        ("threads", 1.0, 0),
        ("p99_ms", P99_MAX, P99_SLACK_MS),
    ):
        first, last = ends(figure)
        found.append((figure, first, last, last > first * factor + slack))
    return found


@contextlib.contextmanager
def ending(chores: Chores) -> Iterator[Chores]:
    try:
        yield chores
    finally:
        chores.end()


def soak(stage: Stage, seconds: float, period: float, say: Callable[[str], None]) -> bool:
    report, failed, samples = stage.report, [], []
    with stage.daemon({"throttr.enable": "true", "throttr.memory_limit": MEMORY}) as daemon:
        with ending(Chores(daemon, IDLE // 10 if stage.is_smoke else IDLE)) as chores:
            begun = time.monotonic()
            while time.monotonic() - begun < seconds:
                samples.append(sampled(daemon, period, failed))
                shown = zip(fields(Sample), UNITS, strict=True)
                values = [f"{each.name} {getattr(samples[-1], each.name):,.1f} {unit}".strip() for each, unit in shown]
                say(f"{time.monotonic() - begun:8.0f} s  {'  '.join(values)}")
            failed += daemon.crowd.measure(0).failed  # since the last sample
            daemon.agrees("at the end")
        report.none("requests that failed", len(failed) + len(chores.failed))
        for text in [*failed, *chores.failed][:5]:
            say(f"    {text}")
        daemon.is_left_empty()
    compared = grown(samples[len(samples) // WARM :])
    has_grown = not stage.is_smoke and any(bad for *_, bad in compared)
    words = ", ".join(
        f"{name} {first:,.1f} -> {last:,.1f}{' GREW' if bad else ''}" for name, first, last, bad in compared
    )
    say(f"soak: {len(samples)} periods, {'broken' if has_grown or not report.kept else 'steady'}: {words}")
    return report.kept and not has_grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--period", type=float, default=5.0, help="seconds that a line is of")
    parser.add_argument("--smoke", action="store_true", help="two seconds, whatever grows")
    options = parser.parse_args()
    if options.smoke:
        options.seconds, options.period = 1.5, 0.5
    servers.allow_connections()
    with tempfile.TemporaryDirectory(prefix="counterd-soak-") as directory:
        stage = Stage(Path(directory), options)
        kept = soak(stage, options.seconds, options.period, lambda line: print(line, flush=True))
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
