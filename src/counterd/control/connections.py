"""The table of connections: its columns, and the cells of each connection.

Floor 4 (ARCHITECTURE.md). No other file names the columns. A reply of the admin endpoint describes the columns. The
dashboard and counterctl (`connections` and `top`) show all columns of this description.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.tables import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.control.service import Service
    from counterd.net.connection import Connection


class Tls(NamedTuple):
    """The TLS details of a connection. None means a connection without TLS."""

    version: str | None = None
    cipher: str | None = None
    subject: str | None = None  # of the client's certificate


class Seen(NamedTuple):
    """A connection, its service, and the time of the view."""

    service: Service
    connection: Connection
    now_ns: int
    tls: Tls


# In the order in which people see them: a narrow screen leaves out the last ones.
CELLS: Mapping[Column, Callable[[Seen], Any]] = {
    Column("id", "text", "the ID of the connection, which is never used again"):
        lambda seen: f"{seen.service.spec.name}-{seen.connection.id}",
    Column("peer", "text", "the client's address, or its uid and pid"):
        lambda seen: seen.connection.origin(),
    Column("holdings", "integer", "the number of names of which the connection holds something"):
        lambda seen: seen.service.store.holdings_of(seen.connection.number),
    Column("requests", "integer", "the number of requests since the connection was opened"):
        lambda seen: seen.connection.requests,
    Column("age_seconds", "seconds", "how long ago the connection was opened"):
        lambda seen: (seen.now_ns - seen.connection.since_ns) / 1e9,
    Column("idle_seconds", "seconds", "how long ago the client last sent something"):
        lambda seen: (seen.now_ns - seen.connection.active_ns) / 1e9,
    Column("protocol", "text", "the protocol of the connection"):
        lambda seen: seen.service.spec.name,
    Column("name", "text", "the name that the client gave itself"):
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
    """Returns the cells of a connection by the names of their columns. A missing value is None."""
    seen = Seen(service, connection, now_ns, Tls(*(connection.tls() or ())))
    return {column.name: cell(seen) for column, cell in CELLS.items()}
