"""A gatekeeper for the tests of a smockron master: two sockets that use `wire`."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, SocketType, Status
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.daemon import Address, Daemon

RULES = {"api": {"rate": "1/day", "burst": 2}, "login": {"rate": "1/day", "burst": 0}}
DAY_MS = 86_400_000
SETTINGS = {
    "counter.enable": "false",
    "smockron.enable": "true",
    "smockron.bind": "127.0.0.1",
    "smockron.port": "0",
    "smockron.control_port": "0",
}


def write_rules(directory: Path, rules: Any = RULES) -> Path:
    """Writes the rules to a file. Returns its path."""
    path = directory / "rules.json"
    path.write_text(rules if isinstance(rules, str) else json.dumps(rules))
    return path


def addresses(daemon: Daemon) -> tuple[Address, Address]:
    """Returns the addresses of the two ports of smockron."""
    return daemon.address_of("smockron"), daemon.address_of("smockron-control")


class Peer:
    """A connection to one of the ports, after the handshake."""

    def __init__(self, connected: socket.socket, kind: SocketType) -> None:
        self.socket = connected
        self.parser = wire.Parser()
        self.found: list[Command | tuple[bytes, ...]] = []
        connected.settimeout(PATIENCE)
        connected.sendall(wire.greeting() + wire.ready(kind))
        answer = self.next()
        assert isinstance(answer, Command)
        assert answer.name == b"READY", answer
        if kind is SocketType.PUB:
            assert self.next() == Command(b"SUBSCRIBE", b"")

    def next(self) -> Command | tuple[bytes, ...]:
        """Returns the next command or message."""
        while not self.found:
            data = self.socket.recv(1 << 16)
            assert data, "the connection was closed"
            self.found += self.parser.feed(data)
        return self.found.pop(0)

    def settle(self) -> None:
        """Returns when the master has taken everything that was sent."""
        self.socket.sendall(wire.ping(0, b"settled?"))
        assert self.next() == Command(b"PONG", b"settled?")


class Gate:
    """Both connections of a gatekeeper."""

    def __init__(self, accounting: socket.socket, control: socket.socket, *topics: bytes) -> None:
        self.accounting = Peer(accounting, SocketType.PUB)
        self.control = Peer(control, SocketType.SUB)
        control.sendall(b"".join(map(wire.subscribe, topics or (b"",))))
        self.control.settle()

    def account(self, domain: bytes, identifier: bytes, count: int = 1, status: Status = Status.ACCEPTED) -> None:
        """Reports `count` requests with time 0, so that the master uses its own. Returns when it has taken them."""
        self.accounting.socket.sendall(count * wire.accounting(domain, status, identifier, 0))
        self.accounting.settle()

    def told(self) -> wire.Control:
        """Returns the next control message."""
        found = self.control.next()
        assert isinstance(found, tuple)
        control = wire.control(found)
        assert control is not None, found
        return control


@contextlib.contextmanager
def gate(daemon: Daemon, *topics: bytes) -> Iterator[Gate]:
    """Runs a gatekeeper of the master during the block."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(each, PATIENCE)) for each in addresses(daemon)]
        yield Gate(*sockets, *topics)
