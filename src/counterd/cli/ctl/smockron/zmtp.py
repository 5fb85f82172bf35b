"""A blocking ZMTP connection from counterctl to a master of the smockron protocol.

Floor 5 (ARCHITECTURE.md). Connecting includes the handshake. When a call returns, the master has read the message of
the call.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

from counterd.client._connection import Connection
from counterd.errors import ProtocolError, ServerError
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import PEERS, Command, Control, Parser, SocketType, Status

if TYPE_CHECKING:
    from counterd.client._addresses import Address

MESSAGE_MAX = 1 << 20  # bytes of a control message: other masters may have longer identifiers than counterd


class Refused(ServerError):
    """The peer does not accept this kind of connection. The exception's text has the reason."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Link(Connection):
    """A connection to one of a master's ports, with a ZMTP socket type.

    The methods raise Refused, Timeout, ConnectionLost and ProtocolError.
    """

    kind: SocketType

    def __init__(self, address: Address, timeout: float) -> None:
        self._parser = Parser(MESSAGE_MAX)
        self._found: list[Command | tuple[bytes, ...]] = []
        super().__init__(address, timeout)
        with self._exchange() as deadline:
            self._send(wire.greeting() + wire.ready(self.kind), deadline)
            answer = self._next(deadline)
            if isinstance(answer, Command) and answer.name == b"ERROR":
                raise Refused(f"{address} does not accept this kind of connection: {wire.error_reason(answer.data)}")
            if not isinstance(answer, Command) or answer.name != b"READY":
                raise ProtocolError(f"expected READY, not {answer!r}")
            peer = wire.metadata(answer.data).get("socket-type", b"")
            if peer not in PEERS[self.kind]:
                kind = peer.decode("latin-1")
                raise Refused(f"{address} does not accept this kind of connection: it is of type {kind}")

    def _say(self, data: bytes) -> None:
        """Sends frames, and returns when the peer has read them."""
        mark = os.urandom(wire.CONTEXT_MAX)
        with self._exchange() as deadline:
            self._send(data + wire.ping(0, mark), deadline)
            answer = self._next(deadline)
            while answer != Command(b"PONG", mark):  # control messages may come before it
                answer = self._next(deadline)

    def _next(self, deadline: float) -> Command | tuple[bytes, ...]:
        while not self._found:
            self._receive(deadline)
        return self._found.pop(0)

    def _received(self, data: bytes) -> None:
        self._found += self._parser.feed(data)


class Publisher(Link):
    """Sends accounting messages."""

    kind = SocketType.PUB

    def account(
        self, domain: bytes, status: str, identifier: bytes, received_ms: int | None = None, **more: Any
    ) -> None:
        """Reports a request, and returns when the master has read the message.

        received_ms: the time of the request; the default is now.
        """
        now_ms = time.time_ns() // 1_000_000
        moment_ms = now_ms if received_ms is None else received_ms
        self._say(wire.accounting(domain, Status(status), identifier, moment_ms, **more))


class Subscriber(Link):
    """Receives control messages."""

    kind = SocketType.SUB

    def subscribe(self, *domains: bytes) -> None:
        """Subscribes to the control messages of these domains.

        Without domains, subscribes to the messages of all domains.
        """
        self._say(b"".join(wire.subscribe(wire.topic(domain)) for domain in domains) or wire.subscribe(b""))

    def next_control(self) -> Control:
        """Returns the next control message. Waits for the message without a time limit."""
        with self._exchange():
            while True:
                answer = self._next(math.inf)
                if isinstance(answer, Command):
                    if answer.name == b"PING":
                        self._send(wire.pong(answer.data), time.monotonic() + self._timeout)
                elif (found := wire.control(answer)) is not None:
                    return found
