"""Hosts on one machine: network namespaces, two joined by a pair of virtual interfaces, or many by a switch.

Needs the permission to create them, which root has outside most containers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE, THERE = "198.51.100.1", "198.51.100.2"  # TEST-NET-2, visible in the two namespaces only
INTERFACES = ("counterd0", "counterd1")
# Settings with which a daemon notices a dead peer within seconds.
PATIENCE = {
    "counter.keepalive_idle": 1,
    "counter.keepalive_interval": 1,
    "counter.keepalive_count": 2,
    "counter.user_timeout": 3,
}
CLONE_NEWNET = 0x40000000  # of sched.h
NOBODY = ("lladdr", "02:00:00:00:00:99")
NETWORK = "203.0.113"  # TEST-NET-3: the hosts of a switch
BRIDGE, CABLE = "bridge", "eth0"  # in the namespace of the switch, and at each host


class Net(NamedTuple):
    """Two namespaces. here, there: the beginnings of commands that run in them."""

    here: tuple[str, ...]
    there: tuple[str, ...]
    names: tuple[str, str]

    def lose_answers(self) -> None:
        """Loses all packets to the other host, without an error that it is unreachable."""
        ip("-n", self.names[0], "neigh", "replace", THERE, *NOBODY, "dev", INTERFACES[0], "nud", "permanent")

    def lose(self) -> None:
        """Loses all packets from the other host."""
        ip("-n", self.names[1], "neigh", "replace", HERE, *NOBODY, "dev", INTERFACES[1], "nud", "permanent")

    def vanish(self) -> None:
        """Loses all packets in both directions, until come_back()."""
        self.lose_answers()
        self.lose()

    def come_back(self) -> None:
        for name, address, interface in zip(self.names, (THERE, HERE), INTERFACES, strict=True):
            ip("-n", name, "neigh", "del", address, "dev", interface)

    def cut(self) -> None:
        """Takes the other host's link down, as if it lost its power."""
        ip("-n", self.names[1], "link", "set", INTERFACES[1], "down")


def ip(*arguments: str, program: str = "ip") -> None:
    """Runs the program `ip`. Raises OSError with its error message."""
    result = subprocess.run(
        [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    if result.returncode:
        raise OSError(f"{program} {' '.join(arguments)}: {result.stderr.strip()}")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is in a namespace while the block runs: so are the sockets and the threads that it makes."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        with Path(path).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")

    with Path("/proc/thread-self/ns/net").open() as before:
        enter(f"/run/netns/{name}")
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{before.fileno()}")


@contextlib.contextmanager
def joined() -> Iterator[Net]:
    """Makes the two namespaces for the block. Raises OSError, also if it is not permitted."""
    names = (f"counterd-{os.getpid()}-0", f"counterd-{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        one, other = INTERFACES
        ip("-n", names[0], "link", "add", one, "type", "veth", "peer", "name", other, "netns", names[1])
        for name, interface, address in zip(names, INTERFACES, (HERE, THERE), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
        yield Net(("ip", "netns", "exec", names[0]), ("ip", "netns", "exec", names[1]), names)


class Host(NamedTuple):
    """A host. name: of its namespace. port: of the switch. inside: the beginning of commands that run in it."""

    name: str
    address: str
    port: str

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


class Switch(NamedTuple):
    """name: of its namespace."""

    name: str
    hosts: tuple[Host, ...]

    def isolate(self, host: Host) -> None:
        """Loses all packets from and to a host, without an error at either end, until join()."""
        ip("-n", self.name, "link", "set", host.port, "nomaster")

    def join(self, host: Host) -> None:
        ip("-n", self.name, "link", "set", host.port, "master", BRIDGE)


def part(one: Host, other: Host) -> None:
    """Loses all packets between two hosts, until reunite()."""
    for here, there in ((one, other), (other, one)):
        ip("-n", here.name, "neigh", "replace", there.address, *NOBODY, "dev", CABLE, "nud", "permanent")


def reunite(one: Host, other: Host) -> None:
    for here, there in ((one, other), (other, one)):
        ip("-n", here.name, "neigh", "del", there.address, "dev", CABLE)


@contextlib.contextmanager
def switched(count: int) -> Iterator[Switch]:
    """Makes hosts that reach each other through a switch, for the block. Raises OSError if it is not permitted."""
    switch = f"counterd-{os.getpid()}-s"
    with contextlib.ExitStack() as stack:

        def add(name: str) -> None:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)

        add(switch)
        ip("-n", switch, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", switch, "link", "set", BRIDGE, "up")
        hosts = tuple(
            Host(f"counterd-{os.getpid()}-h{number}", f"{NETWORK}.{number + 1}", f"port{number}")
            for number in range(count)
        )
        for host in hosts:
            add(host.name)
            ip("-n", switch, "link", "add", host.port, "type", "veth", "peer", "name", CABLE, "netns", host.name)
            ip("-n", switch, "link", "set", host.port, "master", BRIDGE, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", CABLE)
            ip("-n", host.name, "link", "set", CABLE, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield Switch(switch, hosts)
