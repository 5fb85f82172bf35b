"""Slots of a Redis Cluster that move to other masters while daemons grant permits of names in them."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from typing import TYPE_CHECKING

import pytest

from counterd.client import Permit, Rate
from counterd.cluster.lease_protocol import PARTITIONS, partition_of
from counterd.errors import NotAvailable
from functional.test_cluster import FAILOVER_LEASE_S, LEASE_S, LONG_S, MAXIMUM, NAME, acquire_all, acquired, figures
from kit import cluster
from kit.daemon import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.cluster import Servers
    from kit.daemon import Daemon

pytestmark = pytest.mark.needs("redis-server")

PARTITION = partition_of(NAME.encode())
RATE = next(name for name in map(str, itertools.count()) if partition_of(name.encode()) == PARTITION)
UNITS = 100
ROUNDS = 50  # of holds, that show that everything goes on


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with cluster.cluster(tmp_path) as found:
        yield found


@pytest.fixture
def share(start: Callable[..., Daemon], servers: Servers) -> Callable[..., Daemon]:
    def share(lease: int = LEASE_S) -> Daemon:
        daemon = start({"cluster.url": servers.url, "cluster.lease": lease})
        wait_until(lambda: servers.recover() >= PARTITIONS, "the daemon has called each partition")
        return daemon

    return share


def failures(daemons: list[Daemon]) -> int:
    """Returns how many calls were refused or without an answer."""
    return sum(int(re.findall(r"cluster_failed=(\d+)", figures(each))[0]) for each in daemons)


class Load:
    """Threads that hold permits of NAME at all daemons, and take units of RATE, until the end of the block.

    most: of the permits, at once. units: of the rate so far. rounds: holds so far.
    """

    def __init__(self, daemons: list[Daemon]) -> None:
        self.most = self.units = self.rounds = self._held = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        works = [(self._hold, daemons[number % len(daemons)], 1 + number % 4) for number in range(8)]
        works += [(self._take, each, 1) for each in daemons]
        self._threads = [threading.Thread(target=work, args=arguments) for work, *arguments in works]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()
        assert self._held == 0, "all have come to their end"

    def go_on(self) -> None:
        """Waits until permits are granted again."""
        begun = self.rounds
        wait_until(lambda: self.rounds >= begun + ROUNDS, "permits are granted")

    def _hold(self, daemon: Daemon, amount: int) -> None:
        with daemon.client() as client:
            while not self._is_over.is_set():
                with client.hold(NAME, amount, maximum=MAXIMUM):
                    with self._lock:
                        self._held += amount
                        self.most = max(self.most, self._held)
                    time.sleep(0.0005)  # others have to be refused
                    with self._lock:
                        self._held -= amount
                        self.rounds += 1

    def _take(self, daemon: Daemon, units: int) -> None:
        with daemon.client() as client:
            while not self._is_over.wait(0.02):
                taken = client.take(Permit(RATE, maximum=MAXIMUM), Rate(RATE, units, limit=UNITS, per=LONG_S))
                with contextlib.suppress(NotAvailable), taken, self._lock:
                    self.units += units


def test_permits_are_kept_while_a_slot_moves(share: Callable[..., Daemon], servers: Servers) -> None:
    daemons = [share(FAILOVER_LEASE_S), share(FAILOVER_LEASE_S)]
    with daemons[0].client() as one, daemons[1].client() as other:
        acquire_all(one, 6)
        acquire_all(other, 4)

        def halfway() -> None:
            """Checks that the server refuses calls, as it has only half of the keys."""
            failed = failures(daemons)
            one.release(NAME, 3)
            wait_until(lambda: failures(daemons) > failed, "a call is refused")
            assert not acquired(other)

        first = servers.owner(PARTITION)
        servers.move(PARTITION, next(each for each in servers.masters if each is not first), halfway)
        acquire_all(other, 3)
        assert not acquired(one)
        assert not acquired(other)
    refused = "has refused a call: (TRYAGAIN|ASK) "  # ASK before Redis 7
    assert any(re.search(refused, line) for each in daemons for line in each.log)


def test_a_slot_moves_back_and_forth_under_load(share: Callable[..., Daemon], servers: Servers) -> None:
    """Also to a master that had it before."""
    daemons = [share(), share()]
    with Load(daemons) as load:
        wait_until(lambda: load.units, "units are granted")

        def halfway() -> None:
            failed = failures(daemons)
            wait_until(lambda: failures(daemons) > failed, "a call is refused")

        first = servers.owner(PARTITION)
        for target in (*(each for each in servers.masters if each is not first), first):
            load.go_on()
            servers.move(PARTITION, target, halfway)
        load.go_on()
    assert MAXIMUM - 3 <= load.most <= MAXIMUM
    assert 0 < load.units <= UNITS


def test_a_cluster_gets_another_master(
    start: Callable[..., Daemon], share: Callable[..., Daemon], servers: Servers, tmp_path: Path
) -> None:
    """It gets a part of the slots, under load. A daemon that knew only the others finds it."""
    daemons = [share(), share()]
    with contextlib.closing(cluster.Server(tmp_path / "new", *cluster.CLUSTER)) as master:
        with Load(daemons) as load:
            servers.join(master)
            load.go_on()
            for partition in {PARTITION, *range(0, PARTITIONS, 4)}:
                servers.move(partition, master)
            load.go_on()
            third = start({"cluster.url": servers.url, "cluster.lease": LEASE_S})
            third.wait_for_log("limits are shared through 4 servers")
            with third.client() as client, client.hold(NAME, maximum=MAXIMUM):
                pass
        assert load.most <= MAXIMUM
        assert load.units <= UNITS
