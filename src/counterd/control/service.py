"""One enabled room: its sockets, its store, its server, and the settings they are given.

Floor 4.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from counterd.control.limits import effective_connections
from counterd.control.windows import Windows
from counterd.net.server import Limits, Server
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp, set_keepalive

if TYPE_CHECKING:
    import asyncio
    import socket

    from counterd._core import Store
    from counterd.control.config import Config
    from counterd.net.server import Report
    from counterd.protocols import Figures, Room


class Service:
    """A room on its way through the life of the process: open(), make_store(), listen(), apply() and close().

    descriptors: how many its connections may use.
    """

    def __init__(self, room: Room, config: Config, descriptors: int) -> None:
        self.room = room
        self.tcp: list[socket.socket] = []
        self.unix: UnixSocket | None = None
        self.store: Store
        self.server: Server
        self.windows: Windows
        self._config = config
        self._descriptors = descriptors

    def open(self) -> tuple[list[str], list[str]]:
        """Opens all its sockets; returns what is wrong and what is merely missing, a line each."""
        problems: list[str] = []
        missing: list[str] = []
        port = self._setting("port")
        for address in self._setting("bind"):
            try:
                self.tcp.append(open_tcp(address, port, self._keepalive()))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                why = "it is in use" if taken else (error.strerror or str(error))
                line = f"{self._where('port' if taken else 'bind')}: cannot listen on {shown(address, port)}: {why}"
                absent = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and address in ("::1", "::")
                (missing if absent else problems).append(line)
            else:
                port = self.tcp[-1].getsockname()[1]  # if any would do, all addresses share the one that was found
        path = self._setting("socket")
        if path:
            try:
                self.unix = UnixSocket(path, self._setting("socket_mode"))
            except OSError as error:
                problems.append(f"{self._where('socket')}: cannot listen on {path}: {error.strerror or error}")
        if not self.tcp and not self.unix and not problems:
            problems, missing = missing, []
        return problems, missing

    def make_store(self, figures: Figures) -> None:
        """Raises ValueError or MemoryError."""
        self.store = self.room.make_store(self._config.values, figures)

    def listen(self, loop: asyncio.AbstractEventLoop, report: Report) -> None:
        """Begins to accept connections."""
        self.server = Server(loop, self.store, self._limits(), report)
        self.windows = Windows(self.server, self._window())
        self.apply(self._config)
        self.windows.turn()
        for listening in self.tcp:
            self.server.listen(listening)
        if self.unix:
            self.server.listen(self.unix.socket)

    def apply(self, config: Config) -> None:
        """Takes over the settings that may change while running."""
        self._config = config
        self.server.limits = self._limits()
        for listening in self.tcp:
            set_keepalive(listening, self._keepalive())
        self.room.reload(self.store, config.values)
        self.windows.set_interval(self._window())

    def addresses(self) -> str:
        """Where it listens, for people."""
        places = [shown(*listening.getsockname()[:2]) for listening in self.tcp]
        if self.unix:
            places.append(f"unix:{self.unix.path}")
        return ", ".join(places)

    def part(self) -> None:
        """Begins the end: see Server.part."""
        self.server.part()
        self.windows.stop()

    def close(self) -> None:
        for listening in self.tcp:
            listening.close()
        if self.unix:
            self.unix.unlink()
            self.unix.socket.close()

    def _setting(self, name: str) -> Any:
        return self._config.values[f"{self.room.name}.{name}"]

    def _window(self) -> int:
        return self._config.values[self.room.window] if self.room.window else 0

    def _where(self, name: str) -> str:
        key = f"{self.room.name}.{name}"
        return f"{self._config.where(key)}: {key}"

    def _limits(self) -> Limits:
        connections = effective_connections(self._setting("max_connections"), self._descriptors)
        return Limits(connections, self._setting("user_timeout"), self._setting("write_timeout"))

    def _keepalive(self) -> Keepalive:
        names = ("keepalive_idle", "keepalive_interval", "keepalive_count", "user_timeout")
        return Keepalive(*map(self._setting, names))


def shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
