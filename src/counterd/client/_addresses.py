"""Where a server is: host and port, the path of a Unix socket, or a URL that says either.

Stands beside the floors, shared by the clients. Nothing here touches a socket.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence

PORT = 11215  # of the counter protocol
PORT_MAX = 65535


class Address(NamedTuple):
    """host and port of a TCP address, or the path of a Unix socket; the others are then "", 0 and ""."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_addresses(
    hosts: str | Sequence[str], port: int, path: str | os.PathLike[str] | None, scheme: str = "counter"
) -> list[Address]:
    """What a client is given, as addresses of one server: path alone if there is one, else each host or URL.

    Raises ValueError for a URL of another kind, a port that cannot be, and where nothing is left to connect to.
    """
    if isinstance(port, int) and not 0 <= port <= PORT_MAX:  # getaddrinfo() would take it modulo 65536
        raise ValueError(f"port must be 0 to {PORT_MAX}, not {port}")
    if path is not None:
        found = [Address(path=os.fsdecode(path))] if os.fsdecode(path) else []
    else:
        found = [read_address(host, port, scheme) for host in ([hosts] if isinstance(hosts, str) else hosts)]
    if not found:
        raise ValueError("no address to connect to")
    return found


def read_address(text: str, port: int, scheme: str = "counter") -> Address:
    """A host, SCHEME://HOST[:PORT] or SCHEME+unix:///PATH. port is for where none is said.

    Raises ValueError, which shows the text.
    """
    if "://" not in text:
        if text.count(":") == 1 or text.startswith("["):  # an IPv6 address has two colons at least
            raise ValueError(f"{text!r}: expected a host, or with a port {scheme}://{text}")
        return Address(text, port)
    try:
        url = urlsplit(text)
        said = url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    rest = url.query or url.fragment or url.username or url.password
    if url.scheme == f"{scheme}s":
        raise ValueError(f"{text!r}: this release has no TLS")
    if url.scheme == f"{scheme}+unix":
        if url.netloc or rest or len(url.path) < 2:
            raise ValueError(f"{text!r}: expected {scheme}+unix:///PATH")
        return Address(path=os.fsdecode(unquote_to_bytes(url.path)))
    if url.scheme != scheme or not url.hostname or rest or url.path not in ("", "/"):
        raise ValueError(f"{text!r}: expected {scheme}://HOST:PORT or {scheme}+unix:///PATH")
    return Address(url.hostname, port if said is None else said)
