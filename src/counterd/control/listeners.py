"""The listening sockets of one port of a protocol. The daemon opens them itself, or the process that starts the daemon
passes them.

Floor 4 (ARCHITECTURE.md). A protocol has one or more ports (ProtocolSpec.ports). Each port has a number and a Unix
socket. The other settings of a listener (addresses, permissions, TLS, limits) apply to all ports of the protocol.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

from counterd.control.config.keys import account_number, shown
from counterd.control.parts import Part
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp, set_keepalive

if TYPE_CHECKING:
    from counterd.control.config.keys import Listener, Port
    from counterd.control.config.loading import Config
    from counterd.control.parts import Ready


def keepalive_of(settings: Listener) -> Keepalive:
    """Returns the keepalive settings for TCP sockets."""
    return Keepalive(
        settings.keepalive_idle, settings.keepalive_interval, settings.keepalive_count, settings.user_timeout
    )


class PortListeners(Part):
    """The listening sockets of one port."""

    def __init__(self, port: Port, config: Config) -> None:
        self.port = port
        self.tcp: list[socket.socket] = []
        self.unix: UnixSocket | None = None
        self._config = config
        self._settings = config.listener(port.protocol)
        self._path: str = config.values[port.key("socket")]
        self._passed_unix: list[socket.socket] = []

    @property
    def listening(self) -> list[socket.socket]:
        return [*self.tcp, *([self.unix.socket] if self.unix else []), *self._passed_unix]

    def open(self) -> tuple[list[str], list[str]]:
        """Opens the sockets of the port.

        Returns a line for each error, and a line for each address that this machine does not have.
        """
        problems: list[str] = []
        missing: list[str] = []
        if self.port.name in self._config.sockets:
            self._take(self._config.sockets[self.port.name])
            return problems, missing
        number = self._config.values[self.port.key("port")]
        for address in self._settings.bind:
            try:
                self.tcp.append(open_tcp(address, number, keepalive_of(self._settings)))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                why = "address already in use" if taken else (error.strerror or str(error))
                key = self.port.key("port") if taken else f"{self.port.protocol}.bind"
                line = f"{self._config.place(key)}: cannot listen on {shown(address, number)}: {why}"
                absent = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and address in ("::1", "::")
                (missing if absent else problems).append(line)
            else:
                number = self.tcp[-1].getsockname()[1]  # port 0: all addresses get the port of the first one
        if self._path:
            try:
                self.unix = UnixSocket(self._path, self._settings.socket_mode)
                self._own(-1, -1)
            except OSError as error:
                place = self._config.place(self.port.key("socket"))
                problems.append(f"{place}: cannot listen on {self._path}: {error.strerror or error}")
        if not self.tcp and not self.unix and not problems:
            problems, missing = missing, []
        return problems, missing

    def hand_over(self, uid: int, gid: int) -> None:
        """Gives the file of the Unix socket to the user that the daemon will run as. Raises OSError."""
        if self.unix and (uid, gid) != (os.geteuid(), os.getegid()):
            self._own(uid, gid)

    def apply(self, ready: Ready) -> None:
        """Sets the keepalive of TCP connections that are accepted after this call."""
        for listening in self.tcp:
            set_keepalive(listening, keepalive_of(ready.listener))

    def addresses(self) -> list[str]:
        """Returns the addresses of the sockets, for people."""
        places = [shown(*listening.getsockname()[:2]) for listening in self.tcp]
        return [*places, f"unix:{self._path}"] if self.unix or self._passed_unix else places

    def stop(self) -> None:
        if self.unix:
            self.unix.unlink()
        for listening in self.listening:
            listening.close()

    def _take(self, passed: tuple[socket.socket, ...]) -> None:
        """Takes listening sockets that another process has opened.

        The socket files belong to that process, so the daemon does not change them.
        """
        for listening in passed:
            if listening.family == socket.AF_UNIX:
                self._passed_unix.append(listening)
            else:
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                set_keepalive(listening, keepalive_of(self._settings))
                self.tcp.append(listening)

    def _own(self, uid: int, gid: int) -> None:
        """Gives the socket's file to the configured user and group.

        If none is configured, gives it to uid and gid (-1: no change).
        """
        user, group = self._settings.socket_user, self._settings.socket_group
        uid = account_number("user", user) if user else uid
        gid = account_number("group", group) if group else gid
        if self.unix and (uid, gid) != (-1, -1):
            self.unix.chown(uid, gid)
