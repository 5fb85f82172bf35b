#!/usr/bin/env python3
"""Daemons that share limits through a real Redis Cluster, while servers, daemons and the network fail.

    python tests/drills/shared [--seconds 60] [--seed 1] [--daemons 3] [--workers 4] [--lease 2] [--on-loss drop|keep]
                               [--faults NAME ...] [--node-timeout 600000]

Workers at each daemon acquire permits of a few names, hold them for a moment and release them, and take units of rates,
with and without waiting. Meanwhile, one after the other: a master is killed, stopped, or cut off from everybody, its
replica, which often lacks the last writes, takes over, and the master comes back; or some daemons still reach the old
master; a daemon is killed and started again, is stopped, or cut off from all servers or from one, for longer than a
lease. --faults: only these.

Afterwards the histories of all clients of all daemons are judged together (verdict.py). Then one client can have all
permits of each name. Exit status: 1 if a promise is not kept; then the histories are kept.

The drill demands each failover, so that a slow machine causes none. With --node-timeout 1500 the servers replace a
master by themselves when it is silent for so long; then --lease has to be 6 or more, see docs/cluster.md.

Without the right to make network namespaces nothing is cut off, and the last line says so.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from counterd.client import Client
from counterd.errors import NotAvailable
from drills.shared import verdict
from drills.shared.scene import Options, Scene, sidecars
from drills.shared.workers import MAXIMA, RATES, UNITS_MAX
from history import load
from kit import cluster, needs
from kit.cluster import MASTERS, TIMEOUT_MS
from kit.daemon import wait_until
from kit.namespaces import switched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from drills.shared.verdict import Facts
    from history import Operation

FAULT_S = 2.0  # from one fault to the next
HEADROOM = 8  # one part of a burst may be in stock at all daemons together: counterd.cluster.lease_policy


@contextlib.contextmanager
def staged(directory: Path, options: Options) -> Iterator[Scene]:
    """Starts everything except the workers."""
    with contextlib.ExitStack() as stack:
        switch = None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            switch = stack.enter_context(switched(2 * MASTERS + options.daemons))
        hosts = list(switch.hosts) if switch else []
        servers = stack.enter_context(cluster.cluster(directory, options.node_timeout, hosts[: 2 * MASTERS]))
        found = sidecars(directory, servers.url, hosts[2 * MASTERS :], options, stack)
        yield Scene(servers, found, switch, options)


def act(scene: Scene, seconds: float, draw: random.Random, wanted: list[str]) -> list[str]:
    """Injects faults while the workers run. Returns those that happened."""
    faults = []
    names = [name for name in wanted or scene.faults if name in scene.faults]
    if not names:
        raise SystemExit(f"none of these faults can happen here: {' '.join(wanted)}")
    for worker in scene.workers:
        worker.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(min(FAULT_S, max(0.0, end - time.monotonic())))
            if time.monotonic() < end:
                faults.append(draw.choice(names))
                scene.faults[faults[-1]](draw)
                granted = sum(worker.granted for worker in scene.workers)
                print(f"{faults[-1]}: {granted:,} grants so far", flush=True)
    finally:
        for worker in scene.workers:
            worker.end()
        for worker in scene.workers:
            worker.join()
    return faults


def everything_comes_back(path: str) -> None:
    """Checks that one client can have all permits of all names. Raises AssertionError if it cannot."""

    def takes(name: bytes, maximum: int) -> bool:
        try:
            client.acquire(name, maximum, maximum=maximum)
        except NotAvailable:
            return False
        return True

    with Client(path=path) as client:
        for name, maximum in MAXIMA.items():
            wait_until(lambda name=name, maximum=maximum: takes(name, maximum), f"all permits of {name!r}")


def judge(operations: list[Operation], facts: Facts, workers: int) -> list[str]:
    """Prints figures. Returns violations."""
    history = verdict.permits(operations, facts)
    violations, undecided = verdict.unexplained(history, facts)
    most, doubtful = verdict.most_held(history, facts)
    for name, maximum in MAXIMA.items():
        text = f"{name.decode()}: at most {most.get(name, 0)} of {maximum} permits were held"
        print(f"{text}, {doubtful.get(name, 0)} while two masters may have answered")
    print(f"{len(history):,} operations of {len(MAXIMA)} counters are explained, {undecided} counters are undecided")
    for rate in RATES.values():
        beyond = verdict.excess(rate, operations, facts)
        # Units that were for requests which had ended when they came, and Takes that were under way: see excess().
        may = rate.burst // HEADROOM + 2 * workers * UNITS_MAX
        name, units = rate.name.decode(), sum(amount for _, amount in verdict.grants_of(rate, operations, facts))
        print(f"{name}: {units:,} units, in any time at most {beyond:+.1f} beyond the limit and the burst, of {may}")
        if beyond > may:
            violations.append(f"{beyond:.1f} units of {name} were taken beyond the limit and the burst")
    return violations


def play(options: Options, seconds: float, wanted: list[str], directory: Path) -> int:
    draw = random.Random(options.seed)
    with staged(directory, options) as scene:
        faults = act(scene, seconds, draw, wanted)
        everything_comes_back(scene.sidecars[0].path())
    asked, granted = sum(each.asked for each in scene.workers), sum(each.granted for each in scene.workers)
    print(f"{asked:,} requests, {granted:,} grants, {len(faults)} faults")
    failovers = scene.facts.failovers
    print(f"{len(failovers)} failovers, {sum(each.lags for each in failovers)} of them lost writes")
    violations = judge(load(directory.glob("history-*")), scene.facts, len(scene.workers))
    for text in violations:
        print(f"violation: {text}")
    if violations:
        kept = tempfile.mkdtemp(prefix="counterd-histories-")
        for path in directory.glob("history-*"):
            shutil.copy(path, kept)
        print(f"what was recorded is in {kept}")
    if scene.switch is None:
        print("no network namespaces: nothing was cut off")
    return 1 if violations or not granted else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--daemons", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="of each daemon")
    parser.add_argument("--lease", type=int, default=2, help="seconds")
    parser.add_argument("--on-loss", choices=("drop", "keep"), default="drop")
    parser.add_argument("--faults", nargs="+", default=[], help="only these")
    parser.add_argument("--node-timeout", type=int, default=TIMEOUT_MS, help="of the servers, in milliseconds")
    given = parser.parse_args()
    needs.declare("redis-server")
    options = Options(given.daemons, given.workers, given.lease, given.on_loss, given.node_timeout, given.seed)
    with tempfile.TemporaryDirectory(prefix="counterd-") as directory:
        return play(options, given.seconds, given.faults, Path(directory))


if __name__ == "__main__":
    sys.exit(main())
