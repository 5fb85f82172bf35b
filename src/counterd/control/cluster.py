"""Carries the calls of a daemon to the servers through which daemons share limits, and the answers back.

Floor 4 (ARCHITECTURE.md). cluster/lease_policy.py decides what a call says, and servers.py finds the server for it.
This file decides when a call is made: one call of a partition is under way at a time, and calls of different partitions
do not wait for each other. The store never waits for a server: it goes on with the rights that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import structlog

from counterd.cluster.lease_policy import LeasePolicy
from counterd.cluster.lease_protocol import PARTITIONS
from counterd.control.config.keys import split_servers
from counterd.control.config.loading import ConfigError
from counterd.control.files import FileError, read_file
from counterd.control.link import Login, Place
from counterd.control.parts import Part
from counterd.control.servers import Servers
from counterd.control.tls import TLSError, make_client_context
from counterd.units import several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from counterd.contract import LeasedLimits
    from counterd.control.config.keys import Cluster as Settings
    from counterd.control.parts import Ready
    from counterd.net.driver import Driver

log = structlog.get_logger()

SERVE_NS = 20_000_000  # so long requests may take to be decided; afterwards the rights for them count as idle
LEAST_WAIT_NS = 1_000_000  # before the policy is asked again
RELEASE_S = 1.0  # for giving everything back when the daemon stops
CREDENTIALS_MAX = 4096  # bytes
POLICIES = {
    "closed": "requests beyond the rights that this daemon still has are refused",
    "share": "this daemon grants its share of each limit, or nothing before it has reached a server for the first time",
    "open": "this daemon grants up to the whole of each limit",
}


def read_login(settings: Settings, place: Callable[[str], str]) -> Login:
    """Reads the files that the settings of the cluster name. Raises ConfigError with a line for each mistake.

    place: returns where a key is set.
    """
    servers = split_servers(settings.url)
    user, password, tls = servers.user, servers.password, None
    problems = []
    try:
        if settings.credentials:
            user, password = _credentials(read_file(settings.credentials, CREDENTIALS_MAX))
    except FileError as error:
        problems.append(f"{place('cluster.credentials')}: {error}")
    except ValueError as error:
        problems.append(f"{place('cluster.credentials')}: {settings.credentials}: {error}")
    try:
        tls = make_client_context(settings.ca_file) if servers.is_tls else None
    except TLSError as error:
        problems.append(f"{place('cluster.ca_file')}: {error}")
    if problems:
        raise ConfigError(problems)
    return Login(user, password, tls)


def _credentials(content: bytes) -> tuple[str, str]:
    """Returns the user and the password in a file. Raises ValueError, without the password in it."""
    try:
        user, colon, password = content.decode().removesuffix("\n").partition(":")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if not colon or not password or "\n" in password:
        raise ValueError("expected one line, USER:PASSWORD, or :PASSWORD for the default user")
    return user, password


def lease_names() -> Iterator[str]:
    """Yields names for leases that no daemon has used before. They say to people where this daemon runs."""
    host = re.sub(r"[^\w-]", "_", socket.gethostname())
    daemon = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
    return (f"{daemon}.{number}" for number in itertools.count(1))


def daemon_of(name: str) -> str:
    """Returns what the names of all leases of a daemon begin with."""
    return name.rpartition(".")[0]


class Cluster(Part):
    """Makes the calls to the servers. The order of calls is: start(), then turn() in each turn of the driver,
    then finish() and stop().

    ready: has the login. limits: those of the store that are shared. report: called with a cause and a sentence, as in
    net.server.
    """

    def __init__(
        self,
        ready: Ready,
        limits: LeasedLimits,
        driver: Driver,
        report: Callable[[str, str], None],
    ) -> None:
        assert ready.login is not None
        settings = ready.config.process.cluster
        self.failing = ""  # why some partitions cannot be reached, or ""
        self._was_reached = self._is_stopped = False
        self._limits = limits
        self._driver = driver
        self._report = report
        self._is_asked = [False] * PARTITIONS
        self._has_failed = [False] * PARTITIONS
        self._fresh: dict[int, int] = {}  # when the last call was answered, until requests have been decided with it
        self._due_ns = [0] * PARTITIONS
        self._timers: list[asyncio.TimerHandle | None] = [None] * PARTITIONS
        seeds = [Place(*each) for each in split_servers(settings.url).places]
        self._servers = Servers(seeds, ready.login, self._call, self._tell)
        self.policy = LeasePolicy(limits, lease_names().__next__, settings.lease * 1000)  # decides what calls say
        self.apply(ready)

    def apply(self, ready: Ready) -> None:
        """Applies the settings that can change while the daemon runs. Connections that exist keep their login."""
        assert ready.login is not None  # cluster.url cannot change
        settings = ready.config.process.cluster
        self._servers.login = ready.login
        self._unreachable = settings.unreachable
        self._limits.set_policy(settings.unreachable, drops=settings.on_loss == "drop")

    async def start(self) -> None:
        """Starts to look for the servers. Until the first answer the store has no rights."""
        self._loop = asyncio.get_running_loop()
        self._servers.start()

    def turn(self, now_ns: int) -> None:
        """Makes those calls to the servers that cannot wait for a timer. The store's driver calls this in each turn."""
        for partition in [*self._fresh]:
            if not self._driver.is_busy or now_ns >= self._fresh[partition] + SERVE_NS:
                del self._fresh[partition]
                self._call(partition)
        _, urgent = self._limits.has_urgent()
        while urgent:
            partition = urgent.bit_length() - 1
            urgent ^= 1 << partition
            self._call(partition)

    async def finish(self, timeout: float) -> None:
        """Gives all rights back, because the daemon stops. Takes at most RELEASE_S."""
        self._stop()
        asked = []
        for partition, link in enumerate(self._servers.owners):
            if link is not None:
                keys, arguments = self.policy.release_all(partition)
                asked.append(link.ask(*link.command, len(keys), *keys, *arguments))
        answers: list[Any] = [asyncio.TimeoutError()]
        with contextlib.suppress(asyncio.TimeoutError):
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), RELEASE_S)
        if len(asked) < PARTITIONS or any(isinstance(each, Exception) for each in answers):
            log.warning("could not give back all rights: other daemons get them when the lease of this one is over")

    def stop(self) -> None:
        """Makes no more calls, and closes all connections."""
        self._stop()
        self._servers.close()

    def figures(self) -> Mapping[str, float]:
        """Returns the figures for the metrics."""
        unreachable = self._servers.owners.count(None)
        policies = {f"policy:{name}": int(unreachable > 0 and name == self._unreachable) for name in POLICIES}
        figures = {
            **self.policy.figures(time.monotonic_ns()),
            **self._limits.figures(),
            "unreachable": unreachable,
            **policies,
        }
        return {f"cluster_{name}": value for name, value in figures.items()}

    # ---- inside ----

    def _call(self, partition: int) -> None:
        """Makes a call if the policy has something to say. Comes back when it next may have."""
        if self._is_stopped or self._is_asked[partition] or partition in self._fresh:
            return
        link = self._servers.owners[partition]
        if link is None:
            return  # until a server is found
        self._has_failed[partition] = False
        now_ns = time.monotonic_ns()
        call = self.policy.call(partition, link.run, now_ns)
        if call is None:
            self._come_back(partition, now_ns)
            return
        keys, arguments = call
        self._is_asked[partition] = True
        link.send(functools.partial(self._answered, partition), *link.command, len(keys), *keys, *arguments)

    def _come_back(self, partition: int, now_ns: int) -> None:
        """Sets the timer for the next call, unless it is set for the same time."""
        due_ns = max(self.policy.next_call_ns(partition), now_ns + LEAST_WAIT_NS)
        timer = self._timers[partition]
        if due_ns != self._due_ns[partition]:
            if timer is not None:
                timer.cancel()
            self._due_ns[partition] = due_ns
            self._timers[partition] = self._loop.call_later((due_ns - now_ns) / 1e9, self._on_timer, partition)

    def _on_timer(self, partition: int) -> None:
        self._due_ns[partition] = 0
        self._call(partition)

    def _answered(self, partition: int, found: Any) -> None:
        self._is_asked[partition] = False
        if self._is_stopped:  # everything was given back, and no answer is expected
            return
        self._fresh[partition] = time.monotonic_ns()
        if isinstance(found, Exception):
            place = self._servers.refused(partition, str(found))
            if place is not None:
                self._report("cluster_call", f"{place} has refused a call: {found}")
            self._fail(partition)
        else:
            try:
                self.policy.answered(partition, found, time.monotonic_ns())
            except ValueError as error:
                place = self._servers.leave(partition, f"an answer without sense: {error}")
                if place is not None:
                    self._report("cluster_call", f"{place} has sent an answer without sense: {error}")
        self._driver.wake()

    def _fail(self, partition: int) -> None:
        """Tells the policy, once until there is a server again, that the last call failed or none can be made."""
        if not self._has_failed[partition]:
            self._has_failed[partition] = True
            self.policy.failed(partition, time.monotonic_ns())

    def _stop(self) -> None:
        self._is_stopped = True
        self._servers.stop()
        for timer in filter(None, self._timers):
            timer.cancel()

    def _tell(self) -> None:
        """Called after each search. Says in the log when servers become unreachable, and when all are reachable."""
        owners = self._servers.owners
        for partition in (number for number, owner in enumerate(owners) if owner is None):
            self._fail(partition)
        self._driver.wake()
        missing = owners.count(None)
        if not missing:
            if self.failing or not self._was_reached:
                log.info(f"the cluster is reachable: limits are shared through {several(len(set(owners)), 'server')}")
            self.failing = ""
            self._was_reached = True
        elif not self.failing:
            self.failing = self._servers.why
            self._report(
                "cluster",
                f"cannot reach the cluster, for {missing} of {PARTITIONS} partitions of the names: {self.failing};"
                f" {POLICIES[self._unreachable]} (cluster.unreachable = {self._unreachable})",
            )
