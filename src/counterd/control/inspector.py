"""Answers the admin process's questions with data of the daemon, its servers and the registered tables.

Floor 4 (ARCHITECTURE.md). Answers are JSON, in ASCII, as HTTP clients get them: names are percent-encoded. If the size
of an answer depends on a store or on the number of connections, the answer is made in steps of SLICE_NS. Between two
steps the event loop serves requests. Figures are computed at most ten times a second.
"""

from __future__ import annotations

import json
import os
import re
import resource
import time
import weakref
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from counterd.control.connections import COLUMNS, row_of
from counterd.engine.walk import percent_encoded
from counterd.ipc import Refused
from counterd.settings import choice, integer
from counterd.tables import ROWS, ROWS_MAX, Column, read_parameters
from counterd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from counterd.control.daemon_status import DaemonStatus
    from counterd.control.service import Service
    from counterd.net.connection import Connection
    from counterd.settings import Setting
    from counterd.tables import Table

log = structlog.get_logger()

Steps = Generator[None, None, bytes]

SLICE_NS = 250_000
FIGURES_PERIOD_NS = 100_000_000
ROWS_BYTES_MAX = 4 << 20  # bytes of the rows in an answer: a thousand names of 64 KiB would not fit into a frame
PROBES = 512  # connection numbers that are checked, at 40 ns each, before the clock is read again
MASKED = "***"
ENDED_ID = re.compile(r"([1-9][0-9]{0,8})-0")  # see Ended
DESCRIPTORS = Path("/proc/self/fd")
MEMORY = "/proc/self/statm"
PAGE_SIZE = resource.getpagesize()


class Inspector:
    """Answers the questions of the admin process. Create the Inspector after the services have opened their
    sockets, because it reads their addresses only once.

    restarts: how often the admin process was restarted. control/admin.py counts the restarts.
    """

    def __init__(self, status: DaemonStatus, services: Sequence[Service]) -> None:
        self.restarts = 0
        self._status = status
        self._services = {service.spec.name: service for service in services}
        self._addresses = {
            service.spec.name: [
                address if name == service.spec.name else f"{name} {address}"
                for name, addresses in service.addresses().items()
                for address in addresses
            ]
            for service in services
        }
        self._tables = {table.name: (s, table) for s in services for table in s.spec.tables()}
        self._started = time.time() - (time.monotonic_ns() - status.started_ns) / 1e9
        # Kept open, so that figures are available even when no descriptor is left.
        self._memory = os.open(MEMORY, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._memory)
        self._other_descriptors = len(list(DESCRIPTORS.iterdir())) - self._connected()
        self._figures = b""
        self._figures_ns = -FIGURES_PERIOD_NS

    def answer(self, question: Mapping[str, Any]) -> bytes | Steps:
        """Returns the answer to a question, or the steps that make the answer.

        Raises Refused; so do the steps. Any other exception means that the question is invalid.
        """
        what = question["ask"]
        parameters = question.get("parameters", {})
        names = (question.get(name, "") for name in ("connection", "protocol", "table"))
        texts = (*names, *parameters, *parameters.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("expected strings as parameters")
        at_once: dict[str, Callable[[], Any]] = {
            "ping": lambda: {"state": self._state()},
            "config": self._config,
            "close": lambda: self._close(question["connection"]),
            "drain": lambda: self._drain(question["protocol"], on=bool(question["on"])),
        }
        if what in at_once:
            return encoded(at_once[what]())
        if what == "figures":
            return self.figures()
        if what == "table":
            return self._table(question["table"], parameters)
        if what == "connections":
            return self._connections(parameters)
        raise ValueError(f"unknown question {what!r}")

    def figures(self) -> bytes:
        """Returns all figures. The figures are at most a tenth of a second old."""
        now = time.monotonic_ns()
        if now - self._figures_ns >= FIGURES_PERIOD_NS:
            self._figures = encoded(self._count(now))
            self._figures_ns = now
        return self._figures

    def _state(self) -> str:
        """Returns the daemon's state. The state is "failing" if the daemon is ready but a journal cannot be written."""
        failing = any(service.failing for service in self._services.values())
        return "failing" if failing and self._status.state == "ready" else self._status.state

    # ---- figures ----

    def _count(self, now: int) -> dict[str, Any]:
        status = self._status
        lag = status.loop_lag
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_seconds": (now - status.started_ns) / 1e9,
            "state": self._state(),
            "loop": {"lag_seconds": lag.last, "lag_max_seconds": lag.max},
            "process": self._process(),
            "log": {"lines_lost": status.lines_lost()},
            "internal_errors": status.internal_errors,
            "memory_errors": status.memory_errors,
            "admin": {"restarts": self.restarts},
            "protocols": {name: self._protocol(name, service) for name, service in self._services.items()},
            "histograms": {"loop_lag_seconds": asdict(lag.histogram())},
            "tables": [shape(service, table) for service, table in self._tables.values()],
        }

    def _protocol(self, name: str, service: Service) -> dict[str, Any]:
        return {
            "addresses": self._addresses[name],
            "figures": {**service.server.figures(), **service.snapshot()},
            "outcomes": service.store.outcomes(),
            "histograms": {key: asdict(counted) for key, counted in service.server.histograms().items()},
        }

    def _process(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Since Linux 6.2 the size of the directory is the number of its entries. Counting them would take milliseconds.
        descriptors = DESCRIPTORS.stat().st_size or self._other_descriptors + self._connected()
        return {
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "resident_bytes": int(os.pread(self._memory, 256, 0).split()[1]) * PAGE_SIZE,
            "open_fds": descriptors,
            "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "start_time_seconds": self._started,
        }

    def _connected(self) -> int:
        servers = [service.server for service in self._services.values()]
        return sum(len(server.connections) + len(server.arriving) for server in servers)

    # ---- tables ----

    def _table(self, name: str, parameters: Mapping[str, str]) -> Steps:
        if name not in self._tables:
            raise Refused(404, f"no table {name!r}: is its protocol enabled?")
        service, table = self._tables[name]
        begun = time.monotonic_ns()
        connection_id = parameters.get("connection")
        if connection_id is not None:
            owner, connection = self._find(connection_id)
            if owner is not service:
                raise Refused(
                    400, f"connection: {connection_id} belongs to {owner.spec.name}, the table to {service.spec.name}"
                )
            parameters = {**parameters, "connection": str(connection.number)}
        try:
            walk = table.open(service.store, parameters)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        while not walk.step():
            yield
        if connection_id is not None:
            self._find(connection_id)  # the connection must still exist: its number may have been reused
        rows = [found(service, table, row, begun) for row in walk.rows()]
        yield
        rest = {"table": name, "protocol": service.spec.name, "columns": [column["name"] for column in columns(table)]}
        made = ({key: value for cells in map(shown, table.columns, row) for key, value in cells} for row in rows)
        return (yield from listed(made, {**rest, "total": walk.total}))

    # ---- connections ----

    def _connections(self, parameters: Mapping[str, str]) -> Steps:
        try:
            values = read_parameters(
                parameters,
                {"limit": integer(1, ROWS_MAX), "after": split_id, "protocol": choice(*self._services)},
                {"limit": ROWS, "after": ("", -1), "protocol": None},
            )
        except ValueError as error:
            raise Refused(400, str(error)) from None
        after_protocol, after = values["after"]
        limit: int = values["limit"]
        rows: list[dict[str, Any]] = []
        for name in sorted(self._services):
            if name < after_protocol or values["protocol"] not in (None, name):
                continue
            for connection in self._connected_beyond(name, after if name == after_protocol else -1):
                if connection is None:
                    yield
                    continue
                if len(rows) == limit:
                    return (yield from listed(rows, {"columns": COLUMNS, "next": rows[-1]["id"]}))
                rows.append(row_of(self._services[name], connection, time.monotonic_ns()))
        return (yield from listed(rows, {"columns": COLUMNS, "next": None}))

    def _connected_beyond(self, protocol: str, number: int) -> Iterator[Connection | None]:
        """Yields a protocol's connections whose numbers are larger than this one, in order.

        Yields None when a pause is due.
        """
        connections = self._services[protocol].server.connections
        last = max(connections, default=-1)  # the only step here that visits all connections: 15 ns each
        yield None
        begun = time.monotonic_ns()
        for probed in range(number + 1, last + 1):
            connection = connections.get(probed)
            if connection is not None:
                yield connection
            if (connection is not None or probed % PROBES == 0) and time.monotonic_ns() - begun > SLICE_NS:
                yield None
                begun = time.monotonic_ns()

    def _find(self, connection_id: str) -> tuple[Service, Connection | Ended]:
        """Returns the connection with this id and its service. Raises Refused."""
        protocol, _, own = connection_id.partition("-")
        service = self._services.get(protocol)
        connection: Connection | Ended | None = service.server.find(own) if service else None
        if service is not None and connection is None and (match := ENDED_ID.fullmatch(own)):
            connection = ended(service, int(match[1]))
        if service is None or connection is None:
            raise Refused(404, "this connection does not exist, or has ended")
        return service, connection

    def _close(self, connection_id: str) -> dict[str, Any]:
        service, connection = self._find(connection_id)
        log.info("connection closed through the admin endpoint", id=connection_id, peer=connection.origin())
        if isinstance(connection, Ended):
            service.server.evict(connection.number)
        else:
            service.server.kill(connection)
        return {"closed": connection_id}

    def _drain(self, protocol: str, *, on: bool) -> dict[str, Any]:
        service = self._services.get(protocol)
        if service is None or service.spec.drain_mode is None:
            raise Refused(404, f"no protocol {protocol!r} with a drain mode is enabled")
        service.set_drain_mode(on)
        return {"protocol": protocol, "drain_mode": on}

    # ---- configuration ----

    def _config(self) -> dict[str, Any]:
        config = self._status.config
        values = [
            {
                "key": key,
                "value": masked(setting, config.values[key]),
                "origin": config.origins[key],
                "default": masked(setting, setting.default),
                "unit": setting.unit,
                "reload": setting.reload,
            }
            for key, setting in self._status.settings.items()
        ]
        return {"path": str(config.path), "values": values}


def encoded(data: Any) -> bytes:
    return json.dumps(data).encode()


def listed(rows: Iterable[Mapping[str, Any]], rest: Mapping[str, Any]) -> Steps:
    """Makes a JSON object of the rows and the other members, in steps.

    Adds "truncated" if the rows are too long together.
    """
    texts: list[bytes] = []
    left = ROWS_BYTES_MAX
    begun = time.monotonic_ns()
    for row in rows:
        texts.append(encoded(row))
        left -= len(texts[-1])
        if left < 0:
            rest = {**rest, "truncated": True}
            texts.pop()
            break
        if time.monotonic_ns() - begun > SLICE_NS:
            yield
            begun = time.monotonic_ns()
    return b'{"rows": [' + b", ".join(texts) + b"], " + encoded(rest)[1:]


def columns(table: Table) -> list[dict[str, Any]]:
    """Returns the columns of an answer.

    An answer shows a connection as its id and its peer, and a point in time as its age.
    """
    made = []
    for column in table.columns:
        if column.kind == "since":
            made.append(Column("age_seconds", "seconds", f"{column.help}: how long ago", column.detail))
        elif column.kind == "until":
            made.append(Column(f"{column.name}_seconds", "seconds", column.help, column.detail))
        else:
            made.append(column)
        if column.kind == "connection":
            made.append(Column("peer", "text", "the address of the client", column.detail))
    return [asdict(column) for column in made]


def shape(service: Service, table: Table) -> dict[str, Any]:
    """Returns the description of a table for /stats."""
    return {
        "name": table.name,
        "protocol": service.spec.name,
        "help": table.help,
        "columns": columns(table),
        "sorts": list(table.sorts),
        "parameters": list(table.parameters),
    }


def found(service: Service, table: Table, row: tuple[Any, ...], begun: int) -> list[Any]:
    """Replaces the number of a connection in a row by the connection, or by None if the connection has ended and has no
    grace time. If another protocol's store holds something, the row has the number of that store. The number of the
    other store is replaced by the name of its protocol.

    begun: the time when the reading of the table began. A connection that was opened later may have the number of a
    connection that has ended.
    """
    cells = list(row)
    for place, column in enumerate(table.columns):
        if column.kind == "connection":
            connection = service.server.connections.get(cells[place])
            there = connection is not None and connection.entered_ns <= begun
            holder = connection if there else ended(service, cells[place])
            lent = service.borrowers.get(cells[place])
            cells[place] = lent if holder is None else (service.spec.name, holder)
    return cells


@dataclass(frozen=True)
class Ended:
    """A connection that has ended, but whose holdings stay for a grace time.

    number: the engine's number of the connection.
    """

    number: int

    @property
    def id(self) -> str:
        """The ID of the connection, in the form of Connection.id.

        The serial number in this ID is 0, which no open connection has.
        """
        return f"{self.number}-0"

    def origin(self) -> str:
        """The address of the client, which is no longer known."""
        return ""


def ended(service: Service, number: int) -> Ended | None:
    """Returns the connection with this number if the connection is in its grace time."""
    return None if service.store.about(number)[1] is None else Ended(number)


def shown(column: Column, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the JSON members for a cell of a row."""
    if column.kind == "connection":
        yield column.name, f"{value[0]}-{value[1].id}" if isinstance(value, tuple) else ""
        yield "peer", value[1].origin() if isinstance(value, tuple) else value or ""
    elif column.kind == "since":
        yield "age_seconds", max(0.0, time.monotonic_ns() // 100_000_000 - value) / 10
    elif column.kind == "until":
        left = None if value is None else max(0.0, value - time.monotonic_ns() // 100_000_000) / 10
        yield f"{column.name}_seconds", left
    elif column.kind == "name":
        yield column.name, percent_encoded(value)
    else:
        yield column.name, value


def split_id(text: str) -> tuple[str, int]:
    """Returns the protocol and the engine's number in the ID of a connection. Raises ValueError."""
    protocol, _, own = text.partition("-")
    number = own.partition("-")[0]
    if not number.isdecimal() or len(number) > 10:
        raise ValueError(f"expected a connection ID, not {text!r}")
    return protocol, int(number)


def masked(setting: Setting, value: Any) -> Any:
    """Formats a value as in the configuration file. The value of a secret is masked."""
    if setting.secret and value:
        return MASKED
    if "octal" in setting.unit:
        return f"{value:04o}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else value
