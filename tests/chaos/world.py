"""Where it happens: three daemons in a network namespace, the other host, the link between the two, and the clock.

Without the right to make namespaces there is one host, without libfaketime one time: the faults that need them are
left out, and the last line says so.
"""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from chaos import beanstalk_daemon, sentinel_rules, smockron_daemon
from chaos.dialect import JOBS
from kit import daemon
from kit.machine import LONG_S
from kit.namespaces import HERE, INTERFACES, PATIENCE, ip, joined

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.namespaces import Net

FAKETIME = "*/faketime/libfaketime.so.1"  # in /usr/lib
# The dialects of the daemon that all others are beside, and their protocols.
DIALECTS = {"counter": "counter", "throttr": "throttr", "sentinel": "sentinel", JOBS: "beanstalk"}
SIZE = 4096  # counters, and holdings: few enough for one client to take all
TOKENS = 2048  # and values, likewise
# How the kernel delays and loses. Without netem: a line so narrow that a queue builds up, or that has no queue.
NETEM = {"delay": "netem delay 60ms 40ms", "loss": "netem loss 25%"}
NARROW = {"delay": "tbf rate 400kbit burst 2kb latency 400ms", "loss": "tbf rate 400kbit burst 2kb limit 2500"}


class Link:
    """The link between the two hosts. means: how it is disturbed, None if it cannot be delayed."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.means: dict[str, str] | None = None
        for means in (NETEM, NARROW):
            with contextlib.suppress(OSError):
                self._shape(means["delay"])
                self._shape(None)
                self.means = means
                break

    def disturb(self, kind: str) -> None:
        """Delays or loses packets, in both directions, until it is healed."""
        assert self.means is not None
        self._shape(self.means[kind])

    def cut(self, loses_power: bool) -> None:
        """Drops all packets silently."""
        if loses_power:
            self.net.cut()
        else:
            self.net.lose()
            self.net.lose_answers()

    def heal(self) -> None:
        self._shape(None)
        for host, interface in zip(self.net.keepers, INTERFACES, strict=True):
            ip(host, "neigh", "flush", "all", "nud", "permanent", "dev", interface)
            ip(host, "link", "set", interface, "up")

    def _shape(self, how: str | None) -> None:
        for host, interface in zip(self.net.keepers, INTERFACES, strict=True):
            if how is None:
                with contextlib.suppress(OSError):  # there was none
                    ip(host, "qdisc", "del", "dev", interface, "root", program="tc")
            else:
                ip(host, "qdisc", "replace", "dev", interface, "root", *how.split(), program="tc")


class World:
    """The daemons and the network that faults are injected into. link, shift: None if this machine cannot have them.

    rules: the file of the sentinel protocol. words: the first words of a command, by host. counterd: the daemon that
    is not killed. beanstalk, smockron: the daemons that are killed.
    """

    def __init__(self, directory: Path, net: Net | None, shift: Path | None) -> None:
        self.directory = directory
        self.net = net
        self.shift = shift
        self.link = None if net is None else Link(net)
        self.rules = directory / "rules.json"
        self.missing: list[str] = []
        if net is None:
            self.missing.append("one host")
        elif self.link is not None and self.link.means is not NETEM:
            self.missing.append("no netem: a narrow line" if self.link.means else "no netem: no delays")
        if shift is None:
            self.missing.append("no libfaketime")
        self.counterd: daemon.Daemon
        self.beanstalk: beanstalk_daemon.BeanstalkDaemon
        self.smockron: smockron_daemon.SmockronDaemon
        self._tables: set[int] = set()  # their sizes
        self.addresses: dict[tuple[str, str], str | list[str | int]] = {}

    @property
    def settings(self) -> dict[str, object]:
        """Short timeouts for TCP; clients of Unix sockets cannot vanish."""
        chosen = [one for dialect, protocol in DIALECTS.items() for one in self.settings_of(dialect, protocol).items()]
        return {
            **dict(chosen),
            "counter.buckets": SIZE, "counter.holdings": SIZE, "counter.name_memory": "64K",
            "counter.stats_interval": 10, "throttr.memory_limit": "4M", "throttr.max_queued": "64K",
            "sentinel.max_tokens": TOKENS, "sentinel.max_param_values": TOKENS, "sentinel.rules": self.rules,
            "beanstalk.memory_limit": beanstalk_daemon.JOBS_MEMORY,
        }  # fmt: skip

    def settings_of(self, dialect: str, protocol: str = "") -> dict[str, object]:
        """The addresses and timeouts of a protocol."""
        bind = f"{HERE} 127.0.0.1" if self.net else "127.0.0.1"
        place = {"enable": "true", "port": 0, "bind": bind, "insecure": "true", "socket": self.directory / dialect}
        patience = {key.split(".")[1]: value for key, value in PATIENCE.items()}
        return {f"{protocol or dialect}.{key}": value for key, value in (place | patience).items()}

    def look_around(self) -> None:
        """Sets addresses: by protocol, and by the client's place: unix, loopback, or far, on the other host."""
        self._tables = {int(re.findall(r"\bregion=(\d+)", line)[0]) for line in self.logged_stats().values()}
        served = {dialect: (self.counterd, protocol) for dialect, protocol in DIALECTS.items()}
        others = {
            beanstalk_daemon.DIALECT: self.beanstalk.counterd,
            **dict.fromkeys(smockron_daemon.DIALECTS, self.smockron.counterd),
        }
        served |= {dialect: (counterd, dialect) for dialect, counterd in others.items()}
        for dialect, (counterd, protocol) in served.items():
            ports = {place.host: place.port for place in counterd.served(f"{protocol} listens on")}
            self.addresses[dialect, "unix"] = self.path_of(dialect)
            self.addresses[dialect, "loopback"] = ["127.0.0.1", ports["127.0.0.1"]]
            if HERE in ports:
                self.addresses[dialect, "far"] = [HERE, ports[HERE]]

    def logged_stats(self) -> dict[str, str]:
        """For each protocol, the line of statistics."""
        return self.counterd.logged_stats(list(DIALECTS.values()), LONG_S)

    def figure(self, protocol: str, name: str) -> int:
        """One figure of these lines."""
        (value,) = re.findall(rf" {name}=(\d+)", self.logged_stats()[protocol])
        return int(value)

    def path_of(self, dialect: str) -> str:
        """The path of its Unix socket."""
        return str(self.directory / dialect)

    def clear(self) -> None:
        """Deletes the jobs of the client that used all memory."""
        for dialect in (beanstalk_daemon.DIALECT, JOBS):
            beanstalk_daemon.clear(self.path_of(dialect))

    def memory(self) -> int:
        """The bytes that the daemon uses beside its protocols' tables, whose mappings become memory when used."""
        size = total = 0
        for line in Path(f"/proc/{self.counterd.pid}/smaps").read_text().splitlines():
            if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                size = int(mapping[2], 16) - int(mapping[1], 16)
            elif line.startswith("Rss:") and size not in self._tables:
                total += int(line.split()[1]) << 10
        return total

    def words(self, place: str) -> tuple[str, ...]:
        """The first words of a command that runs there."""
        if self.net is None:
            return ()
        return self.net.there if place == "far" else self.net.here

    def step_clock(self, seconds: int) -> None:
        """Steps the wall clock of the daemon; the monotonic clock, which decides all timeouts, goes on."""
        assert self.shift is not None
        new = self.shift.with_suffix(".new")
        new.write_text(f"{seconds:+d}")
        new.replace(self.shift)

    def starve(self, descriptors: int) -> tuple[int, int]:
        """Leaves the daemon so many descriptors beside those in use. Returns the previous limits."""
        limits = resource.prlimit(self.counterd.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(
            self.counterd.pid, resource.RLIMIT_NOFILE, (self.counterd.descriptors() + descriptors, limits[1])
        )
        return limits

    def feed(self, limits: tuple[int, int]) -> None:
        resource.prlimit(self.counterd.pid, resource.RLIMIT_NOFILE, limits)

    def intrude(self, count: int) -> list[socket.socket]:
        """Opens unused connections. Those for which the queue has no room are left out."""
        found = []
        for _ in range(count):
            intruder = socket.socket(socket.AF_UNIX)
            intruder.setblocking(False)
            found.append(intruder)
            with contextlib.suppress(BlockingIOError):
                intruder.connect(self.addresses["counter", "unix"])
        return found


@contextlib.contextmanager
def made(directory: Path) -> Iterator[World]:
    """Starts the daemons and everything around them."""
    with contextlib.ExitStack() as stack:
        net = None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            net = stack.enter_context(joined())
            ip(net.keepers[0], "link", "set", "lo", "up")
        library = next(Path("/usr/lib").glob(FAKETIME), None)
        shift = None if library is None else directory / "shift"
        world = World(directory, net, shift)
        world.rules.write_text(sentinel_rules.text())
        environment = {}
        if shift is not None:
            shift.write_text("+0")
            environment = {
                "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(shift), "FAKETIME_NO_CACHE": "1",
                "NO_FAKE_STAT": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
        program = (*world.words("unix"), *daemon.MODULE)
        # Its clock goes on: when delays and times to run end after a restart is a matter of the wall clock.
        world.beanstalk = stack.enter_context(
            beanstalk_daemon.BeanstalkDaemon(directory, world.settings_of(beanstalk_daemon.DIALECT), program)
        )
        world.smockron = stack.enter_context(
            smockron_daemon.SmockronDaemon(directory, world.settings_of(smockron_daemon.DIALECT), program)
        )
        world.counterd = stack.enter_context(
            daemon.running(directory / "daemon", world.settings, program=program, env=environment)
        )
        world.look_around()
        yield world
