"""TCP ports for servers that cannot be asked which one they were given."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

PORTS = range(10_000, 65_536)  # lower ports belong to well-known servers
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the range of ephemeral ports
ENOUGH, TRIES = 1000, 1000


def free_ports(count: int, hosts: tuple[str, ...] = ("127.0.0.1",)) -> list[int]:
    """Returns `count` different ports that are free at all of `hosts`. Raises OSError if there are not enough.

    Avoids ephemeral ports if possible, because the kernel may give those to a client before the server binds them.
    """
    first, last = map(int, RANGE.read_text().split())
    named = [port for port in PORTS if not first <= port <= last]
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(named if len(named) >= ENOUGH else PORTS, TRIES):
            with contextlib.suppress(OSError):
                for host in hosts:
                    stack.enter_context(socket.socket()).bind((host, port))
                found.append(port)
            if len(found) == count:
                return found
        raise OSError(f"no {count} ports are free at {' and '.join(hosts)}")
