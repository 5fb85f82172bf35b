"""Decides which HTTP requests are allowed. Checks the client's address, the host name, whether a page of another site
sent the request, and the token.

Floor: side (ARCHITECTURE.md), without I/O. A loopback address does not protect against browsers: any page in a browser
on this machine can send requests to it. An attacker's site can bind its own host name to the address of this endpoint.
Then the Host header has a name that this endpoint does not know. In all other cases, Origin and Sec-Fetch-Site show
that a page of another site sent the request.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.ipc import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCALHOST = "localhost"
BEARER = "bearer "
CHANGING = ("DELETE", "PUT")  # the methods that need the token


@dataclass(frozen=True)
class Guard:
    """The settings of the admin endpoint: the token, the networks that may connect (if empty, all may), and additional
    host names."""

    token: str = ""
    networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Guard:
        """Makes a Guard from the settings in the daemon's first message."""
        networks = tuple(map(ipaddress.ip_network, settings["allow"]))
        return cls(settings["token"], networks, frozenset(settings["hosts"]))

    def allows_peer(self, address: str) -> bool:
        """Returns whether an IP address may connect.

        The address "" means a Unix socket, where the permissions of the socket's file decide.
        """
        if not address or not self.networks:
            return True
        peer = ipaddress.ip_address(address.partition("%")[0])
        peer = getattr(peer, "ipv4_mapped", None) or peer  # on a socket for both families, which only systemd opens
        return any(peer in network for network in self.networks)

    def check(self, method: str, hosts: list[str], headers: Mapping[str, str]) -> None:
        """Raises Refused if the request is not allowed. hosts: the values of the request's Host headers."""
        if len(hosts) != 1:
            raise Refused(400, "expected exactly one Host header")
        if not self._knows(host_name(hosts[0])):
            raise Refused(403, "unknown host name; add it to admin.hosts")
        ours = (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}")
        if headers.get("Origin", ours[0]).lower() not in ours:
            raise Refused(403, "requests from pages of other sites are refused")
        site = headers.get("Sec-Fetch-Site", "none")
        visited = headers.get("Sec-Fetch-Mode") == "navigate" and method == "GET"  # the user followed a link
        if site not in ("none", "same-origin") and not visited:
            raise Refused(403, "requests from pages of other sites are refused")
        self._check_token(method, headers.get("Authorization"))

    def _check_token(self, method: str, given: str | None) -> None:
        """Checks the token.

        A request that only reads data needs no token, but a wrong token is refused in every request.
        """
        if method in CHANGING and not self.token:
            raise Refused(403, "read-only: admin.token is not set")
        if given is None:
            if method in CHANGING:
                raise Refused(401, "this request needs the token: Authorization: Bearer TOKEN")
            return
        if not self.token:
            return  # no token is set to compare it with; it may be meant for a proxy
        token = given[len(BEARER) :].strip() if given[: len(BEARER)].lower() == BEARER else ""
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.token.encode()):
            raise Refused(401, "wrong token")

    def _knows(self, name: str) -> bool:
        if name == LOCALHOST or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """Returns the name or address in a Host header, in lower case and without brackets.

    Returns "" if the header is invalid.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::[0-9]{0,5})?", host)
    return (match[1] or match[2]).lower().removesuffix(".") if match else ""
