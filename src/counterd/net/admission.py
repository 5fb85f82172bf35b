"""Whom the limits of a server let in: a decision, without a socket.

Floor 3. Asked once for each connection, before anything else is done for it; in one order, so that who is refused for
several reasons is always told the same one.
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
    """What may change while the server runs. Timeouts are in seconds; 0 is no limit, except of max_connections.

    max_per_address: connections of one IP address. requests_per_second: of one connection, which is read more slowly
    then. idle_timeout: how long a connection may send nothing. handshake_timeout: for TLS, from being accepted on.
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
        """Whether everybody is let in as long as there is room."""
        return self.access == EVERYONE and not self.max_per_address


def refusal(
    limits: Limits,
    address: bytes | None,
    process: Callable[[], tuple[int, int, frozenset[int]]],
    count: int,
    of_address: int,
) -> tuple[str, str] | None:
    """Why one more connection is not let in: a cause and a sentence; or None.

    address: of its peer, None on a Unix socket. process: gives the number, user and groups of a peer there. count: how
    many connections there are; of_address: how many of them have that address.
    """
    access = limits.access
    if address is None:
        if access.users or access.groups:
            pid, uid, gids = process()
            if not access.allows_process(uid, gids):
                return "allow", f"user {uid} (process {pid}) is not among those allowed"
    elif not access.allows_address(address):
        return "allow", f"{address_text(address)} is not among the addresses allowed"
    if count >= limits.max_connections:
        return "max_connections", f"{count} connections are open, the limit"
    if address is not None and limits.max_per_address and of_address >= limits.max_per_address:
        return "per_address", f"{address_text(address)} has {of_address} open, the limit of one address"
    return None
