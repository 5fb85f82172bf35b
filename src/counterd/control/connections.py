"""The table of connections: its columns, and the cells of a connection.

Floor 4. Only this file names the columns. An answer of the admin endpoint describes them, and the dashboard and
counterctl (`connections` and `top`) show what the answer describes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.listing import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.control.service import Service
    from counterd.net.connection import Connection


class Tls(NamedTuple):
    """What is known of a connection's encryption; None for a connection without TLS."""

    version: str | None = None
    cipher: str | None = None
    subject: str | None = None  # of the client's certificate


class Seen(NamedTuple):
    """A connection, its service, and the time at which it is looked at."""

    service: Service
    connection: Connection
    now_ns: int
    tls: Tls


# In the order in which people see them: a narrow screen leaves out the last ones.
CELLS: Mapping[Column, Callable[[Seen], Any]] = {
    Column("id", "text", "its id, which is never used again"):
        lambda seen: f"{seen.service.room.name}-{seen.connection.id}",
    Column("peer", "text", "the client's address, or its uid and pid"):
        lambda seen: seen.connection.origin(),
    Column("holdings", "integer", "how many names it holds something of"):
        lambda seen: seen.service.store.holdings_of(seen.connection.number),
    Column("requests", "integer", "requests since it was opened"):
        lambda seen: seen.connection.requests,
    Column("age_seconds", "seconds", "how long ago it was opened"):
        lambda seen: (seen.now_ns - seen.connection.since_ns) / 1e9,
    Column("idle_seconds", "seconds", "how long ago it last sent something"):
        lambda seen: (seen.now_ns - seen.connection.active_ns) / 1e9,
    Column("protocol", "text", "its protocol"):
        lambda seen: seen.service.room.name,
    Column("name", "text", "the name that it has stated"):
        lambda seen: seen.service.store.about(seen.connection.number)[0],
    Column("tls", "text", "the version of TLS"):
        lambda seen: seen.tls.version,
    Column("tls_cipher", "text", "the cipher of TLS", detail=True):
        lambda seen: seen.tls.cipher,
    Column("tls_subject", "text", "the subject of the client's certificate", detail=True):
        lambda seen: seen.tls.subject or None,
}  # fmt: skip
COLUMNS = [asdict(column) for column in CELLS]  # as answers describe them


def row_of(service: Service, connection: Connection, now_ns: int) -> dict[str, Any]:
    """Returns the cells of a connection by the names of their columns; None for what it does not have."""
    seen = Seen(service, connection, now_ns, Tls(*(connection.tls() or ())))
    return {column.name: cell(seen) for column, cell in CELLS.items()}
