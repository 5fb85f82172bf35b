"""Decides which peers may connect: networks over TCP, users and groups over a Unix socket.

Floor 3 (ARCHITECTURE.md). Each connection is checked once, before anything else. The caller converts names of users and
groups to numbers.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Access:
    """The peers that may connect. Without networks, every address may connect. Without users and groups, every process
    may connect.

    users and groups are numbers. A process may connect if its user or one of its groups is listed.
    """

    networks: tuple[Network, ...] = ()
    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()
    # Prefixes of networks by (bits of an address, bits after it). A check takes a few lookups, however many they are.
    _prefixes: dict[tuple[int, int], set[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for network in self.networks:
            rest = network.max_prefixlen - network.prefixlen
            number = int(network.network_address) >> rest
            self._prefixes.setdefault((network.max_prefixlen, rest), set()).add(number)

    def allows_address(self, address: bytes) -> bool:
        """Returns whether an IP address of 4 or 16 bytes may connect."""
        if not self.networks:
            return True
        bits, number = len(address) * 8, int.from_bytes(address, "big")
        return any(number >> rest in known for (length, rest), known in self._prefixes.items() if length == bits)

    def allows_process(self, uid: int, gids: Iterable[int]) -> bool:
        """Returns whether a process with this user and these groups may connect."""
        return not (self.users or self.groups) or uid in self.users or not self.groups.isdisjoint(gids)


EVERYONE = Access()


def address_text(address: bytes) -> str:
    """Formats an IP address of 4 or 16 bytes."""
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)
