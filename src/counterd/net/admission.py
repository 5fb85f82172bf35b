"""Decides which connections the limits of a server admit, without using a socket.

Floor 3 (ARCHITECTURE.md). The functions are called once for each connection, before anything else. The checks have a
fixed order: a connection that violates several limits is always counted under the same cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterd.net.access import EVERYONE, Access, address_text

if TYPE_CHECKING:
    from collections.abc import Callable

REJECTED = ("max_connections", "memory", "descriptors", "allow", "per_address")


@dataclass(frozen=True)
class Limits:
    """Limits that can change while the server runs. Timeouts are in seconds. 0 means no limit, except for
    max_connections.

    max_per_address: how many connections one IP address may have.
    requests_per_second: how many requests one connection may send in a second; if it sends more, the server reads it
    more slowly.
    idle_timeout: how long a connection may send nothing.
    handshake_timeout: how long a TLS handshake may take, from the moment when the connection was accepted.
    """

    max_connections: int
    user_timeout: int
    write_timeout: int
    max_per_address: int = 0
    requests_per_second: int = 0
    idle_timeout: int = 0
    handshake_timeout: int = 5
    access: Access = EVERYONE

    @property
    def is_open(self) -> bool:
        """Returns whether max_connections is the only limit on who may connect."""
        return self.access == EVERYONE and not self.max_per_address


def refusal(
    limits: Limits,
    address: bytes | None,
    process: Callable[[], tuple[int, int, frozenset[int]]],
    count: int,
    of_address: int,
) -> tuple[str, str] | None:
    """Returns the cause and a sentence if a new connection is refused, or else None.

    address: the IP address of the peer; None on a Unix socket.
    process: returns the pid, user and groups of a peer on a Unix socket.
    count: how many connections are open. of_address: how many of these connections have this address.
    """
    access = limits.access
    if address is None:
        if access.users or access.groups:
            pid, uid, gids = process()
            if not access.allows_process(uid, gids):
                return "allow", f"user {uid} (process {pid}) is not in socket_allow"
    elif not access.allows_address(address):
        return "allow", f"{address_text(address)} is not an allowed address"
    if count >= limits.max_connections:
        return "max_connections", f"{count} connections are open, which is the limit"
    if address is not None and limits.max_per_address and of_address >= limits.max_per_address:
        return "per_address", f"{address_text(address)} has {of_address} open connections, the limit for one address"
    return None
