#!/usr/bin/env python3
"""A demonstration of limits that daemons share: three daemons, a Redis Cluster, a load, a failover and a killed daemon.

    python tests/drills/cluster.py [--seconds 8]

Everything runs on this machine, on loopback: three masters with a replica each, three daemons, and clients of each. The
clients count what all of them hold. What happens is printed in plain words. Exit status: 1 if more was held than a
limit allows, or if a daemon that lived was of no use at the end. --seconds: between two events.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.errors import CounterdError
from kit import cluster, needs
from kit.daemon import SCRIPT, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.client import Client
    from kit.daemon import Daemon

NAMES = [f"pool-{number}" for number in range(6)]
MAXIMUM = 4
CLIENTS = 12  # of each daemon, two of each pool: all together want six permits of a pool
HOLD_S = 0.005
TIMEOUT_S = 1.0  # of a hold
LEASE_S = 6
NODE_TIMEOUT_MS = 2000  # after so long without an answer a master is replaced
LETTERS = "ABC"


class Load:
    """The clients of all daemons, and what they hold of each pool. grants: by daemon and pool. most: the largest
    number held of one pool at once.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: Counter[str] = Counter()
        self.grants: Counter[tuple[str, str]] = Counter()
        self.most = 0
        self.is_over = threading.Event()

    def work(self, letter: str, daemon: Daemon, name: str) -> None:
        """Holds one permit after the other, until the demonstration is over or the daemon has ended."""
        while not self.is_over.is_set() and daemon.process.poll() is None:
            with contextlib.suppress(CounterdError, OSError), daemon.client() as client:
                while not self.is_over.is_set():
                    self.hold(letter, client, name)

    def hold(self, letter: str, client: Client, name: str) -> None:
        with client.hold(name, maximum=MAXIMUM, timeout=TIMEOUT_S):
            with self.lock:
                self.held[name] += 1
                self.grants[letter, name] += 1
                self.most = max(self.most, self.held[name])
            time.sleep(HOLD_S)
            with self.lock:
                self.held[name] -= 1

    def watch(self, seconds: int, pools: Sequence[str] = ()) -> Counter[str]:
        """Prints a line for each second, with the grants of some pools. Returns the grants of daemons in this time."""
        begun = Counter(self.grants)
        for _ in range(seconds):
            before = Counter(self.grants)
            time.sleep(1)
            new = self.grants - before
            each = ", ".join(f"{letter} {sum_of(new, letter):5,}" for letter in LETTERS)
            of_pools = sum(count for (_, name), count in new.items() if name in pools)
            of = f"; of pools of the killed master {of_pools:5,}" if pools else ""
            print(f"  permits granted in this second: {each}{of}; most of one pool at once: {self.most} of {MAXIMUM}")
        new = self.grants - begun
        return Counter({letter: sum_of(new, letter) for letter in LETTERS})


def sum_of(grants: Counter[tuple[str, str]], letter: str) -> int:
    return sum(count for (each, _), count in grants.items() if each == letter)


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


def told(daemons: dict[str, Daemon], since: dict[str, int]) -> None:
    """Prints the new lines in the logs of the daemons."""
    for letter, daemon in daemons.items():
        for line in daemon.log[since.get(letter, 0) :]:
            if "cluster" in line:
                print(f"  {letter} says: {line.split(' ', 2)[-1].partition(' protocol=')[0].strip()}")
        since[letter] = len(daemon.log)


def play(directory: Path, seconds: int) -> bool:
    """Runs the demonstration. Returns whether all promises were kept."""
    say("Starting a Redis Cluster on this machine: three masters, each with a replica.")
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(cluster.cluster(directory, NODE_TIMEOUT_MS))
        print(f"  {servers.url}")
        say(f"Starting three daemons, {', '.join(LETTERS)}, as if on three machines. They share all limits.")
        settings = {"cluster.url": servers.url, "cluster.lease": LEASE_S}
        daemons = {letter: stack.enter_context(running(directory / f"daemon-{letter}", settings)) for letter in LETTERS}
        since: dict[str, int] = {}
        for daemon in daemons.values():
            daemon.wait_for_log("the cluster is reachable")
        told(daemons, since)
        say(f"{CLIENTS} clients of each daemon use {len(NAMES)} pools. All together may use {MAXIMUM} permits of each.")
        print(f"  The servers are new: for one lease, {LEASE_S} s, they lend nothing: somebody may have permits.")
        load = Load()
        threads = [
            threading.Thread(target=load.work, args=(letter, daemon, NAMES[number % len(NAMES)]), daemon=True)
            for letter, daemon in daemons.items()
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        load.watch(seconds + LEASE_S)
        show(directory)

        index = servers.index_of(NAMES[0].encode())
        pools = [name for name in NAMES if servers.index_of(name.encode()) == index]
        say(f"Killing the master of {' and '.join(pools)}, with SIGKILL. Its replica takes over when the others agree.")
        killed = time.monotonic()
        servers.masters[index].kill()
        wait_until(lambda: servers.replicas[index].role() == "master", "the replica is the master")
        print(f"  After {time.monotonic() - killed:.1f} s the replica is the master.")
        print(f"  For one lease, {LEASE_S} s, it lends nothing more: who waits for its pools has to wait for so long.")
        load.watch(LEASE_S + seconds, pools)
        told(daemons, since)

        say("Killing daemon C, with SIGKILL. Its permits come back when its lease is over.")
        daemons["C"].kill()
        load.watch(LEASE_S + 1)
        last = load.watch(seconds)
        show(directory)

        say("Stopping the clients and the daemons.")
        load.is_over.set()
        for thread in threads:
            thread.join()
    held = load.most <= MAXIMUM
    useful = all(last[letter] > 0 for letter in "AB")
    say(f"{sum(load.grants.values()):,} permits were granted. At most {load.most} of one pool were in use at once.")
    print("  No limit was exceeded." if held else "  A LIMIT WAS EXCEEDED.")
    print("  The daemons A and B served clients to the end." if useful else "  A DAEMON SERVED NOBODY AT THE END.")
    return held and useful


def show(directory: Path) -> None:
    for words in (["cluster"], ["cluster", NAMES[0]]):
        print(f"  $ counterctl {' '.join(words)}")
        command = [SCRIPT.with_name("counterctl"), *words, "-c", directory / "daemon-A" / "counterd.conf"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print("".join(f"    {line}\n" for line in done.stdout.splitlines()), end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=8)
    options = parser.parse_args()
    needs.declare("redis-server")
    with tempfile.TemporaryDirectory() as name:
        return not play(Path(name), options.seconds)


if __name__ == "__main__":
    sys.exit(main())
