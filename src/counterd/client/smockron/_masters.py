"""The masters of a gatekeeper, by domain: the addresses of both ports of each master.

Floor: side (ARCHITECTURE.md). This file touches no socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Union

from counterd.client._addresses import PORT_MAX, Address, read_address, with_tls
from counterd.client._connection import as_bytes
from counterd.protocols.smockron.wire import PORT

if TYPE_CHECKING:
    import ssl

SCHEME = "smockron"

Where = Union[str, tuple[str, str]]  # noqa: UP007 - is evaluated, by Python 3.10 too
Masters = Union[Where, Mapping[str, Where], Mapping[bytes, Where]]  # noqa: UP007


class Pair(NamedTuple):
    """The two addresses of one master."""

    accounting: Address
    control: Address


def read_masters(masters: Masters, tls: bool | ssl.SSLContext) -> tuple[Pair | None, dict[bytes, Pair]]:
    """Returns the master for all domains, or None, and the masters by domain. Raises ValueError or TypeError."""
    if not isinstance(masters, Mapping):
        return _read_master(masters, tls), {}
    if not masters:
        raise ValueError("the gatekeeper needs at least one master")
    return None, {as_bytes(domain): _read_master(where, tls) for domain, where in masters.items()}


def _read_master(where: Where, tls: bool | ssl.SSLContext) -> Pair:
    if isinstance(where, str):
        accounting = _read(where, PORT, tls)
        if accounting.path:
            raise ValueError(f"{where!r}: a master on Unix sockets needs two addresses, (ACCOUNTING, CONTROL)")
        if accounting.port >= PORT_MAX:
            raise ValueError(f"{where!r}: there is no next port for control; use two addresses, (ACCOUNTING, CONTROL)")
        return Pair(accounting, accounting._replace(port=accounting.port + 1))
    if len(where) != len(Pair._fields):
        raise ValueError(f"{where!r}: a master is one address or a pair (ACCOUNTING, CONTROL)")
    return Pair(_read(where[0], PORT, tls), _read(where[1], PORT + 1, tls))


def _read(text: str, port: int, tls: bool | ssl.SSLContext) -> Address:
    if "://" not in text and (text.count(":") == 1 or text.startswith("[")):
        text = f"{SCHEME}://{text}"
    address = read_address(text, port, SCHEME)
    return with_tls(address, tls) if tls else address
