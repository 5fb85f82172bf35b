"""Hosts on one machine: network namespaces, two joined by a pair of virtual interfaces, or many by a switch.

Needs the permission to create them, which root has outside most containers. Each namespace has a process that keeps it,
and ends with this one, instead of a name: the mounts of `ip netns add` would stay.
"""

from __future__ import annotations

import contextlib
import ctypes
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

    keepers: tuple[int, int]

    @property
    def here(self) -> tuple[str, ...]:
        return within(self.keepers[0])

    @property
    def there(self) -> tuple[str, ...]:
        return within(self.keepers[1])

    def lose_answers(self) -> None:
        """Loses all packets to the other host, without an error that it is unreachable."""
        ip(self.keepers[0], "neigh", "replace", THERE, *NOBODY, "dev", INTERFACES[0], "nud", "permanent")

    def lose(self) -> None:
        """Loses all packets from the other host."""
        ip(self.keepers[1], "neigh", "replace", HERE, *NOBODY, "dev", INTERFACES[1], "nud", "permanent")

    def vanish(self) -> None:
        """Loses all packets in both directions, until come_back()."""
        self.lose_answers()
        self.lose()

    def come_back(self) -> None:
        for keeper, address, interface in zip(self.keepers, (THERE, HERE), INTERFACES, strict=True):
            ip(keeper, "neigh", "del", address, "dev", interface)

    def cut(self) -> None:
        """Takes the other host's link down, as if it lost its power."""
        ip(self.keepers[1], "link", "set", INTERFACES[1], "down")


@contextlib.contextmanager
def made() -> Iterator[int]:
    """Makes a namespace for the block, and returns the number of the process that keeps it. Raises OSError."""
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]  # until its input ends
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with keeper:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        if not keeper.stdout.readline():
            raise OSError(keeper.stderr.read().decode().strip())
        yield keeper.pid


def within(keeper: int) -> tuple[str, ...]:
    """Returns the beginning of commands that run in a namespace."""
    return ("nsenter", f"--net=/proc/{keeper}/ns/net", "--")


def ip(keeper: int, *arguments: str, program: str = "ip") -> None:
    """Runs the program `ip` in a namespace. Raises OSError with its error message."""
    result = subprocess.run(
        [*within(keeper), program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if result.returncode:
        raise OSError(f"{program} {' '.join(arguments)}: {result.stderr.strip()}")


@contextlib.contextmanager
def inside(keeper: int) -> Iterator[None]:
    """Moves this thread into a namespace during the block: its sockets and new threads are there too."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        with Path(path).open() as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")

    with Path("/proc/thread-self/ns/net").open() as before:
        enter(f"/proc/{keeper}/ns/net")
        try:
            yield
        finally:
            enter(f"/proc/self/fd/{before.fileno()}")


@contextlib.contextmanager
def joined() -> Iterator[Net]:
    """Makes the two namespaces for the block. Raises OSError, also if it is not permitted."""
    with made() as here, made() as there:
        one, other = INTERFACES
        ip(here, "link", "add", one, "type", "veth", "peer", "name", other, "netns", str(there))
        for keeper, interface, address in zip((here, there), INTERFACES, (HERE, THERE), strict=True):
            ip(keeper, "addr", "add", f"{address}/24", "dev", interface)
            ip(keeper, "link", "set", interface, "up")
        yield Net((here, there))


class Host(NamedTuple):
    """A host. keeper: of its namespace. port: of the switch. inside: the beginning of commands that run in it."""

    keeper: int
    address: str
    port: str

    @property
    def inside(self) -> tuple[str, ...]:
        return within(self.keeper)


class Switch(NamedTuple):
    """keeper: of its namespace."""

    keeper: int
    hosts: tuple[Host, ...]

    def isolate(self, host: Host) -> None:
        """Loses all packets from and to a host, without an error at either end, until join()."""
        ip(self.keeper, "link", "set", host.port, "nomaster")

    def join(self, host: Host) -> None:
        ip(self.keeper, "link", "set", host.port, "master", BRIDGE)


def part(one: Host, other: Host) -> None:
    """Loses all packets between two hosts, until reunite()."""
    for here, there in ((one, other), (other, one)):
        ip(here.keeper, "neigh", "replace", there.address, *NOBODY, "dev", CABLE, "nud", "permanent")


def reunite(one: Host, other: Host) -> None:
    for here, there in ((one, other), (other, one)):
        ip(here.keeper, "neigh", "del", there.address, "dev", CABLE)


@contextlib.contextmanager
def switched(count: int) -> Iterator[Switch]:
    """Makes hosts that reach each other through a switch, for the block. Raises OSError if it is not permitted."""
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(made())
        ip(switch, "link", "add", BRIDGE, "type", "bridge")
        ip(switch, "link", "set", BRIDGE, "up")
        hosts = tuple(
            Host(stack.enter_context(made()), f"{NETWORK}.{number + 1}", f"port{number}") for number in range(count)
        )
        for host in hosts:
            peer = ("type", "veth", "peer", "name", CABLE, "netns", str(host.keeper))
            ip(switch, "link", "add", host.port, *peer)
            ip(switch, "link", "set", host.port, "master", BRIDGE, "up")
            ip(host.keeper, "addr", "add", f"{host.address}/24", "dev", CABLE)
            ip(host.keeper, "link", "set", CABLE, "up")
            ip(host.keeper, "link", "set", "lo", "up")
        yield Switch(switch, hosts)
