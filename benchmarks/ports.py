"""TCP ports for servers that cannot be asked which one they were given."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST = 10_000  # below are those of well-known servers
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of those that whoever asks for any is given


def free_ports(count: int, hosts: tuple[str, ...] = ("127.0.0.1",)) -> list[int]:
    """Different ports on which nobody listens at any of `hosts`.

    None is of those that the kernel gives to who asks for any, a client's connection for one: until the server has it,
    only somebody who names it could take it.
    """
    end = int(RANGE.read_text().split()[0])
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            port = random.randrange(FIRST, end)
            with contextlib.suppress(OSError):
                for host in hosts:
                    stack.enter_context(socket.socket()).bind((host, port))
                ports.append(port)
        return ports
