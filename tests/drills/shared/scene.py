"""Daemons, servers and the network between them, and what can happen to these. Each fault is over when it returns.

With a switch each of them is a host of its own; without one all are on loopback, and nothing is cut off. Workers reach
their daemon, and the drill the servers, through Unix sockets, which no fault of the network concerns.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drills.shared.verdict import Facts, Failover, Lapse, Split
from drills.shared.workers import Worker
from kit import daemon, namespaces
from kit.cluster import TIMEOUT_MS
from kit.daemon import wait_until

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from kit.cluster import Server, Servers
    from kit.daemon import Daemon
    from kit.namespaces import Host, Switch

LONGER = 1.5  # than a lease
LAG_S = 0.4  # of a replica: a part of a lease, and many grants
SETTLED = 2  # leases after two masters may have answered until the limits are kept again, see docs/cluster.md


@dataclass
class Sidecar:
    """A daemon, its host and its workers. start: starts it again."""

    number: int
    host: Host | None
    start: Callable[[], Daemon]
    daemon: Daemon
    workers: list[Worker]

    def path(self) -> str:
        assert self.daemon.path is not None
        return self.daemon.path

    def failed_calls(self) -> int:
        """Returns how many calls to the servers had no answer."""
        (count,) = re.findall(r" cluster_failed=(\d+)", self.daemon.logged_stats(["counter"])["counter"])
        return int(count)


@dataclass
class Options:
    daemons: int
    workers: int
    lease: int
    on_loss: str
    node_timeout: int
    seed: int


class Scene:
    """facts: what has happened so far, for verdict.py. faults: a function for each fault. demands: the servers replace
    no master by themselves, so the drill demands failovers.
    """

    def __init__(self, servers: Servers, sidecars: list[Sidecar], switch: Switch | None, options: Options) -> None:
        self.servers = servers
        self.sidecars = sidecars
        self.switch = switch
        self.lease = options.lease
        self.keeps = options.on_loss == "keep"
        self.demands = options.node_timeout == TIMEOUT_MS
        self.facts = Facts(len(sidecars), servers.index_of)
        self.faults: dict[str, Callable[[random.Random], None]] = {
            "kill_master": self.kill_master,
            "stop_master": self.stop_master,
            "kill_daemon": self.kill_daemon,
            "stop_daemon": self.stop_daemon,
        }
        if switch is not None:
            self.faults |= {
                "cut_master": self.cut_master, "cut_daemon": self.cut_daemon, "part": self.part, "split": self.split,
            }  # fmt: skip

    @property
    def workers(self) -> list[Worker]:
        return [worker for sidecar in self.sidecars for worker in sidecar.workers]

    # ---- faults ----

    def kill_master(self, draw: random.Random) -> None:
        self._replace(draw, lambda old: old.kill(), lambda old: old.start())

    def stop_master(self, draw: random.Random) -> None:
        self._replace(draw, lambda old: old.stop(), lambda old: old.go_on())

    def cut_master(self, draw: random.Random) -> None:
        """Cuts a master off from everything; it goes on running."""
        switch = self.switch
        assert switch is not None
        self._replace(draw, lambda old: switch.isolate(_host(old)), lambda old: switch.join(_host(old)))

    def split(self, draw: random.Random) -> None:
        """Cuts a master off from the other servers and one daemon. The other daemons reach it, and it answers them like
        its replica.
        """
        sidecar = draw.choice(self.sidecars)

        def parted_from(old: Server) -> list[Host]:
            return [_host(sidecar), *(_host(each) for each in self.servers.all if each is not old)]

        def fail(old: Server) -> None:
            for host in parted_from(old):
                namespaces.part(_host(old), host)

        def go_on(old: Server) -> None:
            for host in parted_from(old):
                namespaces.reunite(_host(old), host)

        self._replace(draw, fail, go_on, goes_on=True)

    def kill_daemon(self, draw: random.Random) -> None:
        sidecar = draw.choice(self.sidecars)
        sidecar.daemon.kill()
        sidecar.daemon = sidecar.start()

    def stop_daemon(self, draw: random.Random) -> None:
        """Stops a daemon for longer than its lease, so that others get its permits."""
        sidecar = draw.choice(self.sidecars)
        since_ns = time.monotonic_ns()
        sidecar.daemon.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{sidecar.daemon.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the daemon has stopped")
        # What it grants from now on, it grants after it went on.
        self.facts.lapses.append(Lapse(sidecar.number, None, since_ns, time.monotonic_ns()))
        time.sleep(LONGER * self.lease)
        sidecar.daemon.send_signal(signal.SIGCONT)

    def cut_daemon(self, draw: random.Random) -> None:
        """Cuts a daemon off from all servers for longer than its lease. Its clients go on."""
        sidecar = draw.choice(self.sidecars)
        failed = sidecar.failed_calls()
        with self._isolated(sidecar):
            time.sleep(LONGER * self.lease)
            wait_until(lambda: sidecar.failed_calls() > failed, "calls fail")

    def part(self, draw: random.Random) -> None:
        """Cuts one daemon off from one master, for longer than a lease; all others reach each other."""
        sidecar, index = draw.choice(self.sidecars), draw.randrange(len(self.servers.masters))
        ends = _host(sidecar), _host(self.servers.masters[index])
        since_ns, failed = time.monotonic_ns(), sidecar.failed_calls()
        namespaces.part(*ends)
        time.sleep(LONGER * self.lease)
        wait_until(lambda: sidecar.failed_calls() > failed, "calls fail")
        namespaces.reunite(*ends)
        self._lapse(sidecar.number, index, since_ns)

    # ---- inside ----

    def _replace(
        self,
        draw: random.Random,
        fail: Callable[[Server], None],
        go_on: Callable[[Server], None],
        *,
        goes_on: bool = False,
    ) -> None:
        """Makes a master fail, its replica take over, and the old one come back after more than a lease.

        Usually the replica lacks the last writes. Then, if there is a network, one daemon often reaches no server for
        up to a lease, so it reports its rights to the new master later than others. goes_on: the old master still
        answers some daemons meanwhile.
        """
        index = draw.randrange(len(self.servers.masters))
        old, since_ns = self.servers.masters[index], time.monotonic_ns()
        lags, late = draw.choice([(False, None), (True, None), (True, draw.choice(self.sidecars))])
        with self._isolated(late if self.switch else None):
            self._fail_over(index, fail, lags=lags)
            time.sleep(draw.random() * self.lease)
        time.sleep(LONGER * self.lease)
        back_ns = since_ns if goes_on else time.monotonic_ns()
        go_on(old)
        wait_until(lambda: old.role() == "slave", "the old master has heard of the new one")
        self.facts.splits.append(Split(index, back_ns, time.monotonic_ns() + int(SETTLED * self.lease * 1e9)))
        self._lapse(None, index, since_ns)

    def _fail_over(self, index: int, fail: Callable[[Server], None], *, lags: bool) -> None:
        old, replica = self.servers.masters[index], self.servers.replicas[index]
        if lags:
            replica.stop()  # so it cannot connect again
            old.client.client_kill_filter(_type="replica")
            time.sleep(LAG_S)
        fail(old)
        if lags:
            replica.go_on()
        self.facts.failovers.append(Failover(index, time.monotonic_ns(), lags))
        if self.demands:
            self.servers.promote(index)
        else:
            self.servers.replaced(index)

    @contextlib.contextmanager
    def _isolated(self, sidecar: Sidecar | None) -> Iterator[None]:
        """Cuts a daemon off from all servers."""
        if sidecar is None:
            yield
            return
        assert self.switch is not None
        since_ns = time.monotonic_ns()
        self.switch.isolate(_host(sidecar))
        yield
        self.switch.join(_host(sidecar))
        self._lapse(sidecar.number, None, since_ns)

    def _lapse(self, sidecar: int | None, server: int | None, since_ns: int) -> None:
        """Notes that a lease may have ended: with on_loss = drop clients lose their permits, with keep none does."""
        if self.keeps:
            self.facts.lapses.append(Lapse(sidecar, server, since_ns, time.monotonic_ns() + int(self.lease * 1e9)))


def _host(of: Sidecar | Server) -> Host:
    assert of.host is not None
    return of.host


def sidecars(
    directory: Path, url: str, hosts: list[Host], options: Options, stack: contextlib.ExitStack
) -> list[Sidecar]:
    """Starts the daemons, and makes their workers. hosts: one for each daemon; none: all run here. The workers'
    histories are in `directory`, too.
    """
    found = []
    for number in range(options.daemons):
        host = hosts[number] if hosts else None
        starts, connections = itertools.count(), itertools.count(number, options.daemons)

        def start(number: int = number, host: Host | None = host, starts: Iterator[int] = starts) -> Daemon:
            place = directory / f"daemon{number}-{next(starts)}"
            settings = {
                "counter.socket": str(place / "socket"), "cluster.url": url, "cluster.lease": options.lease,
                "cluster.on_loss": options.on_loss,
            }  # fmt: skip
            program = daemon.MODULE if host is None else (*host.inside, *daemon.MODULE)
            return stack.enter_context(daemon.running(place, settings, program=program))

        sidecar = Sidecar(number, host, start, start(), [])
        sidecar.workers = [
            Worker(
                sidecar.path,
                directory / f"history-{number}-{each}",
                connections,
                options.seed * 1000 + number * 100 + each,
            )
            for each in range(options.workers)
        ]
        found.append(sidecar)
    return found
