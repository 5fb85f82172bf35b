"""A small blocking client for the counter protocol: counterd's own, and good for the reference server as well.

Stands beside the floors: needs the wire module and counterd.errors only, and works where nothing is compiled.
One request is under way at a time. Whatever interrupts one closes the connection, because the answer may still come:
a connection out of step is never used again, and the server takes back everything that was acquired through it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from counterd.client._connection import Connection, as_bytes
from counterd.errors import ProtocolError, server_error
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import DumpEntry

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["Client", "DumpEntry"]

T = TypeVar("T")


class Client(Connection):
    """One connection to a server, and whatever is acquired through it. Not thread-safe: one Client for each thread.

    Connects at once, to host and port or to the unix socket at path; use it in a `with`, or close() it.
    timeout: seconds that connecting to an address may take, and then each call as a whole.
    Names are bytes, or text that is sent as UTF-8, of 1 to 65,535 bytes; numbers are 0 to 2^32-1. Anything else is a
    ValueError, before anything is sent.

    Every call may raise a ServerError (the server refused; the connection stays), Timeout, ProtocolError or
    ConnectionLost. After the latter three the connection is closed, and later calls raise ConnectionLost.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 11215,
        *,
        path: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
    ) -> None:
        super().__init__(host, port, path, timeout)
        self._opaque = 0
        self._parser = wire.ResponseParser()
        self._responses: deque[wire.Response] = deque()  # received and not looked at yet

    def noop(self) -> None:
        """Makes the server answer (section "Noop")."""
        self._call(wire.noop(self._next_opaque()), _decode_nothing)

    def get(self, name: str | bytes) -> int:
        """How much of a counter is consumed (section "Get"). NotFound if there is none of that name."""
        return self._call(wire.get(self._next_opaque(), as_bytes(name)), wire.decode_consumption)

    def acquire(self, name: str | bytes, resources: int = 1, *, maximum: int) -> int:
        """Acquires resources, if no more than maximum of the counter are consumed then (section "Acquire").

        Returns how many were granted. NotAvailable if the maximum leaves no room, InvalidArguments if resources are
        0 or above maximum, OutOfMemory if the server has no room for another counter or holding.
        """
        request = wire.acquire(self._next_opaque(), as_bytes(name), resources, maximum)
        return self._call(request, wire.decode_consumption)

    def release(self, name: str | bytes, resources: int = 1) -> None:
        """Gives resources back (section "Release").

        NotFound if there is no such counter, NotAcquired if this connection holds less; nothing is released then.
        """
        self._call(wire.release(self._next_opaque(), as_bytes(name), resources), _decode_nothing)

    def stats(self) -> dict[str, str]:
        """The server's statistics by name, in its order, as the texts it sends (section "Stats")."""
        return self._call(wire.stats(self._next_opaque()), wire.decode_stats)

    def dump(self) -> list[DumpEntry]:
        """Every counter, in no particular order (section "Dump"). All of them are in memory at once."""
        request = wire.dump(self._next_opaque())
        entries = []
        with self._exchange() as deadline:
            self._send(request, deadline)
            while body := self._response(request, deadline):
                entries.append(wire.decode_dump_entry(body))
        return entries

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & wire.U32_MAX
        return self._opaque

    def _call(self, request: bytes, decode: Callable[[bytes], T]) -> T:
        with self._exchange() as deadline:
            self._send(request, deadline)
            return decode(self._response(request, deadline))

    def _received(self, data: bytes) -> None:
        self._responses.extend(self._parser.feed(data))

    def _response(self, request: bytes, deadline: float) -> bytes:
        """The body of the next response, which must be a success and belong to the request."""
        while not self._responses:
            self._receive(deadline)
        response = self._responses.popleft()
        opcode, opaque = request[1], int.from_bytes(request[8:12], "big")
        if (response.opcode, response.opaque) != (opcode, opaque):
            raise ProtocolError(
                f"expected a response with opcode {opcode:02x} and opaque {opaque:08x}, "
                f"not {response.opcode:02x} and {response.opaque:08x}"
            )
        if response.status:
            raise server_error(response.status, response.body.decode("utf-8", "backslashreplace"))
        return response.body


def _decode_nothing(body: bytes) -> None:
    if body:
        raise ProtocolError(f"expected no body, not {body[:16].hex(' ')}")
