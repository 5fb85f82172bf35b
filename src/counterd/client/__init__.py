"""A small blocking client for the counter protocol: counterd's own, and good for the reference server as well.

Stands beside the floors: needs the wire module and counterd.errors only, and works where nothing is compiled.
One request is under way at a time. Whatever interrupts one closes the connection, because the answer may still come:
a connection out of step is never used again, and the server takes back everything that was acquired through it.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from counterd.errors import ConnectionLost, ProtocolError, ServerError, Timeout, server_error
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import DumpEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

__all__ = ["Client", "DumpEntry"]

_RECEIVE_SIZE = 65536

T = TypeVar("T")


class Client:
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
        self._where = f"{host}:{port}" if path is None else os.fspath(path)
        self._timeout = timeout
        self._opaque = 0
        self._parser = wire.ResponseParser()
        self._responses: list[wire.Response] = []  # received and not looked at yet, the next one last
        self._closed = ""  # why the connection is closed
        try:
            self._socket = _connected_socket((host, port) if path is None else os.fspath(path), timeout)
        except TimeoutError:
            raise Timeout(f"{self._where} did not accept a connection within {timeout:g} s") from None
        except OSError as error:
            raise ConnectionLost(f"cannot connect to {self._where}: {error}") from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the server gives back what was acquired through it. Doing it again does nothing."""
        self._close("close() was called")

    def noop(self) -> None:
        """Makes the server answer (section "Noop")."""
        self._call(wire.noop(self._next_opaque()), _decode_nothing)

    def get(self, name: str | bytes) -> int:
        """How much of a counter is consumed (section "Get"). NotFound if there is none of that name."""
        return self._call(wire.get(self._next_opaque(), _bytes(name)), wire.decode_consumption)

    def acquire(self, name: str | bytes, resources: int = 1, *, maximum: int) -> int:
        """Acquires resources, if no more than maximum of the counter are consumed then (section "Acquire").

        Returns how many were granted. NotAvailable if the maximum leaves no room, InvalidArguments if resources are
        0 or above maximum, OutOfMemory if the server has no room for another counter or holding.
        """
        request = wire.acquire(self._next_opaque(), _bytes(name), resources, maximum)
        return self._call(request, wire.decode_consumption)

    def release(self, name: str | bytes, resources: int = 1) -> None:
        """Gives resources back (section "Release").

        NotFound if there is no such counter, NotAcquired if this connection holds less; nothing is released then.
        """
        self._call(wire.release(self._next_opaque(), _bytes(name), resources), _decode_nothing)

    def stats(self) -> dict[str, str]:
        """The server's statistics by name, in its order, as the texts it sends (section "Stats")."""
        return self._call(wire.stats(self._next_opaque()), wire.decode_stats)

    def dump(self) -> list[DumpEntry]:
        """Every counter, in no particular order (section "Dump"). All of them are in memory at once."""
        request = wire.dump(self._next_opaque())
        entries = []
        with self._exchange(request) as deadline:
            while body := self._receive(request, deadline):
                entries.append(wire.decode_dump_entry(body))
        return entries

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & wire.U32_MAX
        return self._opaque

    def _call(self, request: bytes, decode: Callable[[bytes], T]) -> T:
        with self._exchange(request) as deadline:
            return decode(self._receive(request, deadline))

    @contextmanager
    def _exchange(self, request: bytes) -> Iterator[float]:
        """Sends the request and yields the deadline for its responses; closes the connection if they go wrong."""
        if self._closed:
            raise ConnectionLost(f"there is no connection to {self._where} any more: {self._closed}")
        deadline = time.monotonic() + self._timeout
        try:
            self._socket.settimeout(self._timeout)
            self._socket.sendall(request)
            yield deadline
        except ServerError:
            raise
        except TimeoutError:
            self._close(f"a call took more than {self._timeout:g} s")
            raise Timeout(f"{self._where} did not answer within {self._timeout:g} s") from None
        except OSError as error:
            self._close(str(error))
            raise ConnectionLost(f"lost the connection to {self._where}: {error}") from error
        except BaseException as error:
            self._close(str(error) or f"{type(error).__name__} interrupted a call")
            raise

    def _receive(self, request: bytes, deadline: float) -> bytes:
        """The body of the next response, which must be a success and belong to the request."""
        while not self._responses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data = self._socket.recv(_RECEIVE_SIZE)
            if not data:
                raise ConnectionLost(f"{self._where} closed the connection")
            self._responses = self._parser.feed(data)[::-1]
        response = self._responses.pop()
        opcode, opaque = request[1], int.from_bytes(request[8:12], "big")
        if (response.opcode, response.opaque) != (opcode, opaque):
            raise ProtocolError(
                f"expected a response with opcode {opcode:02x} and opaque {opaque:08x}, "
                f"not {response.opcode:02x} and {response.opaque:08x}"
            )
        if response.status:
            raise server_error(response.status, response.body.decode("utf-8", "backslashreplace"))
        return response.body

    def _close(self, why: str) -> None:
        if not self._closed:
            self._closed = why
            self._socket.close()


def _connected_socket(address: tuple[str, int] | str, timeout: float) -> socket.socket:
    if isinstance(address, tuple):
        connected = socket.create_connection(address, timeout)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout)
        connected.connect(address)
    except BaseException:
        connected.close()
        raise
    return connected


def _bytes(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name


def _decode_nothing(body: bytes) -> None:
    if body:
        raise ProtocolError(f"expected no body, not {body[:16].hex(' ')}")
