"""Code that all clients share: one connection, the deadline of a call, and the rule that a broken connection stays
broken.

Floor: side (ARCHITECTURE.md). The socket never blocks: a thread waits only in poll(), with a deadline. While the client
cannot send a request, it reads the bytes that arrive. So a server that stops reading until its own output has been sent
cannot block the client.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._addresses import Tls
from counterd.client._portable import set_tcp_option
from counterd.errors import ConnectionLost, ProtocolError, ServerError, Timeout

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator
    from types import TracebackType

    from counterd.client._addresses import Address
    from counterd.client._tls import SecureSocket

RECEIVE_SIZE = 65536  # bytes
POLL_MAX = 2**31 - 1  # ms
CLOSED = "close() was called"
PEER_CLOSED = "the server closed the connection"
NOT_YET = "the connection was not made yet"
FORKED = "the process forked: the connection belongs to the parent"
# A client gives up a host or network that has vanished after 10 to 12 s, the server after 25 s by default. So a client
# that loses permits knows it before another client can have them.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 4, 2, 3
USER_TIMEOUT_MS = 10_000
QUEUE_PAUSE_S = 0.01  # before connecting again to a Unix socket whose queue was full
# Clients whose _after_fork() is called in the child of a process that forks.
forked: weakref.WeakSet[Any] = weakref.WeakSet()
# The sockets of blocking clients. The child of a fork closes its copies, which would keep the connections open.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

Self = TypeVar("Self", bound="Connection")


class NotSent(ConnectionLost):
    """The connection ended before the request was sent."""


class DeadlinePassed(Exception):
    """The deadline of a call has passed. A TimeoutError means something else: the kernel has given up the peer."""


class Connection:
    """A blocking connection to an address. The constructor connects. Not thread-safe.

    timeout: how many seconds the client may take to connect to the address, and how many each call may take in all. A
    subclass overrides _received(), and uses the connection only within _exchange().
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._where = str(address)
        self._timeout = timeout
        self._closed = ""  # why the connection is closed
        try:
            self._socket = connected_socket(address, timeout)
        except OSError as error:
            raise not_connected(self._where, error, timeout) from error

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection.

        The server then gives up everything that it keeps for this connection. A second close() does nothing.
        """
        self._close(CLOSED)

    def _received(self, data: bytes) -> None:
        """Takes the next bytes from the server. Raises ProtocolError if the protocol does not allow these bytes."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[float]:
        """Yields the deadline of the block.

        Closes the connection if the block raises any exception except a ServerError.
        """
        if self._closed:
            raise no_connection(self._where, self._closed)
        try:
            yield time.monotonic() + self._timeout
        except ServerError:
            raise
        except DeadlinePassed:
            self._close(too_late(self._timeout))
            raise not_answered(self._where, self._timeout) from None
        except OSError as error:
            self._close(str(error))
            raise lost(self._where, str(error)) from error
        except BaseException as error:
            self._close(str(error) or f"{type(error).__name__} interrupted a call")
            raise

    def _send(self, request: bytes, deadline: float) -> None:
        """Sends the whole request.

        Call it within _exchange(). While the kernel accepts no more bytes, reads the bytes that arrive.
        """
        left = memoryview(request)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if self._wait(select.POLLIN | select.POLLOUT, deadline) & ~select.POLLOUT:
                    self._read()

    def _receive(self, deadline: float) -> None:
        """Waits for bytes until the deadline (of the monotonic clock), and takes them. Call it within _exchange()."""
        self._wait(select.POLLIN, deadline)
        self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_SIZE)
        except BlockingIOError:  # with TLS, if less than a record has come
            return
        if not data:
            raise closed_by_server(self._where)
        self._received(data)

    def _wait(self, events: int, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed
        poller = select.poll()
        poller.register(self._socket, events)
        ready = poller.poll(None if left == math.inf else min(math.ceil(left * 1000), POLL_MAX))
        if not ready:
            raise DeadlinePassed
        return ready[0][1]

    def _close(self, why: str) -> None:
        if not self._closed:
            self._closed = why
            self._socket.close()


def _after_fork() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()
    for client in list(forked):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def set_options(connected: socket.socket) -> None:
    """Sets TCP options: bytes are sent without delay, and the client notices a lost network sooner than the server.

    Keepalive is off for a server on this machine: the kernel reports its end, and loopback loses probes of many
    connections.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    set_tcp_option(connected, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS)
    with contextlib.suppress(OSError):  # the connection has ended already
        host = connected.getpeername()[0]
        if host == "::1" or host.startswith("127."):
            return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_tcp_option(connected, "TCP_KEEPIDLE", KEEPALIVE_IDLE_S)
    set_tcp_option(connected, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S)
    set_tcp_option(connected, "TCP_KEEPCNT", KEEPALIVE_COUNT)


def check_timeouts(timeout: float, connect_timeout: float | None) -> tuple[float, float]:
    """Returns both timeouts.

    If connect_timeout is None, it is the same as timeout. Raises ValueError or TypeError for an invalid value.
    """
    connect_timeout = timeout if connect_timeout is None else connect_timeout
    for what, seconds in (("timeout", timeout), ("connect_timeout", connect_timeout)):
        if not isinstance(seconds, (int, float)):
            raise TypeError(f"{what} must be a number of seconds, not {seconds!r}")
        if not seconds > 0:
            raise ValueError(f"{what} must be more than 0 seconds, not {seconds!r}")
    return timeout, connect_timeout


def refuse_itself(near: object, far: object) -> None:
    """Raises an exception if a socket is connected to itself.

    The kernel can choose the target port as the socket's own port.
    """
    if near == far:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def connected_socket(address: Address, timeout: float) -> socket.socket | SecureSocket:
    """Returns a connected socket.

    timeout: how many seconds connecting may take, and how many the TLS handshake may take after that.
    """
    timeout = min(timeout, POLL_MAX / 1000)  # the timeout of calls may be math.inf
    connected = _connected_unix(address.path, timeout) if address.path else _connected_tcp(address, timeout)
    try:
        if not address.path:
            refuse_itself(connected.getsockname(), connected.getpeername())
            set_options(connected)
        if address.tls is None:
            connected.setblocking(False)
            return connected
    except BaseException:
        connected.close()
        raise
    from counterd.client import _tls  # noqa: PLC0415 - ssl takes as long to import as all else

    return _tls.secured(connected, address.tls, address.host, timeout)


def _new_socket(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    _sockets.add(made)
    return made


def _connected_tcp(address: Address, timeout: float) -> socket.socket:
    """Does the same as socket.create_connection(), with sockets that a fork closes."""
    failure = OSError("the host name has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        connected = _new_socket(family, kind, protocol)
        try:
            connected.settimeout(timeout)
            connected.connect(where)
        except BaseException as error:
            connected.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return connected
    try:
        raise failure
    finally:
        del failure  # it refers to this frame


def _connected_unix(path: str, timeout: float) -> socket.socket:
    connected = _new_socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout)
        deadline = time.monotonic() + timeout
        while not _is_taken(connected, path):
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(QUEUE_PAUSE_S)
    except BaseException:
        connected.close()
        raise
    return connected


def _is_taken(connecting: socket.socket, path: str) -> bool:
    """Connects to a Unix socket.

    Returns False if the server's queue of connections is full. TCP would wait in this case.
    """
    try:
        connecting.connect(path)
    except BlockingIOError:
        return False
    return True


async def open_transport(loop: asyncio.AbstractEventLoop, protocol: Any, address: Address) -> None:
    """Connects an asyncio protocol, a Wire, to an address, without its own timeout. Raises OSError."""
    import asyncio  # noqa: PLC0415 - only the clients for asyncio need it, and they have it

    try:
        await _open_transport(loop, protocol, address)
    except asyncio.CancelledError:
        # After connection_made(), uvloop closes the socket and never calls connection_lost(), even if it was due.
        if protocol.transport is not None and not protocol.over.done():
            try:
                protocol.transport.set_write_buffer_limits()
            except RuntimeError:  # uvloop has closed the socket
                protocol.connection_lost(None)
        raise


async def _open_transport(loop: asyncio.AbstractEventLoop, protocol: asyncio.BaseProtocol, address: Address) -> None:
    if address.path:
        import asyncio  # noqa: PLC0415

        while True:
            try:
                await loop.create_unix_connection(lambda: protocol, address.path)
            except BlockingIOError:  # the server's queue of connections is full
                await asyncio.sleep(QUEUE_PAUSE_S)
            else:
                return
    try:
        if isinstance(address.tls, Tls):  # reading files takes milliseconds, those of the system tens
            context = await loop.run_in_executor(None, address.make_context)
        else:
            context = address.make_context()
        transport, _ = await loop.create_connection(lambda: protocol, address.host, address.port, ssl=context)
    except OSError as error:
        if address.tls is None:
            raise
        from counterd.client import _tls  # noqa: PLC0415

        raise _tls.handshake_error(error) from None
    refuse_itself(transport.get_extra_info("sockname"), transport.get_extra_info("peername"))


def as_bytes(text: str | bytes) -> bytes:
    """Returns the bytes of a name: text is encoded as UTF-8, bytes stay unchanged.

    Raises TypeError for any other type.
    """
    if isinstance(text, str):
        return text.encode()
    if not isinstance(text, bytes):
        raise TypeError(f"expected text or bytes, not {text!r}")
    return text


# ---- one wording for all clients ----


def not_connected(where: str, error: Exception, timeout: float) -> ConnectionLost | Timeout:
    """Returns the error for an attempt that has failed, with an OSError or the TimeoutError of asyncio."""
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return ConnectionLost(f"cannot connect to {where}: {error}")
    return Timeout(f"{where} did not accept a connection within {timeout:g} s")


def not_answered(where: str, timeout: float, doubt: str = "") -> Timeout:
    return Timeout(f"{where} did not answer within {timeout:g} s{doubt}")


def misunderstood(where: str, error: ProtocolError, data: bytes) -> str:
    """Returns the text of the error for bytes that the protocol does not allow."""
    hint = ": this is an HTTP server, perhaps the admin endpoint" if data.startswith(b"HTTP/1.") else ""
    return f"{where}: {error}{hint}"


def too_late(timeout: float) -> str:
    return f"a call took more than {timeout:g} s"


def closed_by_server(where: str, doubt: str = "", *, plain_and_new: bool = False) -> ConnectionLost:
    """Returns the error for a connection that the server has closed.

    plain_and_new: the connection is TCP without TLS, and the server has sent nothing yet.
    """
    hint = ": it may expect TLS, have no room, or not allow this address" if plain_and_new else doubt
    return ConnectionLost(f"{where} closed the connection{hint}")


def lost(where: str, why: str) -> ConnectionLost:
    return ConnectionLost(f"lost the connection to {where}: {why}")


def no_connection(where: str, why: str) -> ConnectionLost:
    return ConnectionLost(f"the connection to {where} has ended: {why}")
