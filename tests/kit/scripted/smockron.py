"""The smockron protocol for scripted servers: the two ports of a master, which sends what a test tells it to.

Attributes control the handling of connections. A test may change them at any time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, Parser, SocketType
from kit import scripted
from kit.daemon import wait_until

if TYPE_CHECKING:
    from kit.scripted import Peer

Item = Command | tuple[bytes, ...]


def unix_ms() -> int:
    """Returns Unix time in milliseconds, as in control messages."""
    return time.time_ns() // 1_000_000


class Port(scripted.Server):
    """One port. seen: everything received except READY, in order. says: sent to each connection after the handshake."""

    def __init__(self, kind: SocketType, says: bytes = b"", path: str | None = None) -> None:
        super().__init__(path=path)
        self.kind = kind
        self.says = says
        self.answers = True  # PINGs
        self.echoes = True  # the context of PINGs
        self.greets = True
        self.greeting = wire.greeting()

    def serve(self, peer: Peer) -> None:
        if self.greets:
            peer.socket.sendall(self.greeting)
        parser = Parser()
        while data := peer.socket.recv(scripted.RECEIVE_SIZE):
            for item in parser.feed(data):
                if answer := self.answer(item):  # to a client that has closed, sending fails
                    peer.socket.sendall(answer)

    def answer(self, item: Item) -> bytes:
        if isinstance(item, Command) and item.name == b"READY":
            return wire.ready(self.kind) + self.says
        self.seen.append(item)
        is_ping = isinstance(item, Command) and item.name == b"PING"
        if not is_ping or not self.answers:
            return b""
        return wire.pong(item.data) if self.echoes else wire.command(b"PONG")

    def tell(self, data: bytes) -> None:
        """Sends data through the last connection."""
        self.peers[-1].socket.sendall(data)

    def commands(self, name: bytes) -> list[bytes]:
        """Returns the data of the commands with this name."""
        return [item.data for item in list(self.seen) if isinstance(item, Command) and item.name == name]

    def messages(self) -> list[tuple[bytes, ...]]:
        return [item for item in list(self.seen) if not isinstance(item, Command)]


class Master:
    """Serves during the block. where: the arguments of a gatekeeper. By default it subscribes to everything."""

    def __init__(self, says: bytes = wire.subscribe(b""), paths: tuple[str, str] | None = None) -> None:
        self.accounting = Port(SocketType.SUB, says, paths and paths[0])
        self.control = Port(SocketType.PUB, path=paths and paths[1])
        self._paths = paths

    @property
    def where(self) -> tuple[str, str]:
        if self._paths:
            return f"smockron+unix://{self._paths[0]}", f"smockron+unix://{self._paths[1]}"
        first, second = (f"{host}:{port}" for host, port in (self.accounting.address, self.control.address))
        return first, second

    def tell(self, word: str, identifier: bytes, time_ms: int, domain: bytes = b"default") -> None:
        """Sends a control message to the gatekeeper that connected last."""
        self.control.tell(wire.message(wire.topic(domain), word.encode(), identifier, b"%d" % time_ms))

    def wait_for(self, count: int) -> list[tuple[bytes, ...]]:
        """Waits for `count` accounting messages. Returns all of them."""
        wait_until(lambda: len(self.accounting.messages()) >= count, f"{count} accounting messages")
        return self.accounting.messages()

    def __enter__(self) -> Master:
        self.accounting.__enter__()
        self.control.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.control.__exit__(*error)
        self.accounting.__exit__(*error)
