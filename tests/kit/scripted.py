"""A counter server for the tests of counterbench. It keeps every request, and a test controls its answers.

It uses plain sockets and a thread for each connection. A test overrides `reply` (the answer to a request) or `serve`
(the handling of a connection). The rest is a small, correct counter server.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Opcode, Status
from kit.daemon import Address, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

RECEIVE_SIZE = 1 << 18
HEADER = struct.Struct(">BBBBII")


class Request(NamedTuple):
    """A request as received."""

    connection: int  # counted from 0, in the order they were accepted
    opcode: int
    opaque: int
    name: bytes
    resources: int
    maximum: int
    seconds: float  # of the monotonic clock


class Peer:
    """One connection."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.socket = connection
        self.held: Counter[bytes] = Counter()
        self.requests = 0
        self.batches: list[int] = []  # requests that came in one piece


class Hangup(Exception):
    """Raised by a test's `reply` to close the connection after the answers so far."""


class Server:
    """Serves during the block. requests: all so far. ends: how connections ended, "closed" or "reset"."""

    BACKLOG = 512

    def __init__(self, family: int = socket.AF_INET, path: str | None = None) -> None:
        self.lock = threading.RLock()
        self.requests: list[Request] = []
        self.peers: list[Peer] = []
        self.ends: list[str] = []
        self.used: Counter[bytes] = Counter()
        self.most: Counter[bytes] = Counter()
        self.path = path
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX if path else family)
        self._listener.bind(path or ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        self._listener.listen(self.BACKLOG)

    @property
    def address(self) -> Address:
        return Address(*self._listener.getsockname()[:2])

    # ---- what a test overrides ----

    def serve(self, peer: Peer) -> None:
        """Serves a connection from its beginning to its end."""
        buffer = b""
        while data := peer.socket.recv(RECEIVE_SIZE):
            requests, buffer = self.parse(peer, buffer + data)
            peer.batches.append(len(requests))
            self.send(peer, self.replies(peer, requests))

    def reply(self, peer: Peer, request: Request) -> bytes:
        """Executes a request. Returns the answer."""
        return self.right(peer, request)

    def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
        """Sends the answers to the requests of one piece."""
        sent = []
        try:
            sent.extend(replies)
        except Hangup:
            peer.socket.sendall(b"".join(sent))
            raise
        peer.socket.sendall(b"".join(sent))

    def give_back(self, peer: Peer) -> None:
        """Gives back what a connection held when it is gone."""
        with self.lock:
            self.used.subtract(peer.held)

    def limit(self, request: Request) -> int:
        """Returns the limit of a counter."""
        return request.maximum

    # ---- a correct counter server ----

    def parse(self, peer: Peer, data: bytes) -> tuple[list[Request], bytes]:
        """Parses requests. Returns (the requests, the rest)."""
        found, at = [], 0
        while len(data) - at >= wire.HEADER_SIZE:
            magic, opcode, _, _, length, opaque = HEADER.unpack_from(data, at)
            assert magic == wire.REQUEST_MAGIC
            body = data[at + wire.HEADER_SIZE : at + wire.HEADER_SIZE + length]
            if len(body) < length:
                break
            at += wire.HEADER_SIZE + length
            numbers = {Opcode.ACQUIRE: 2, Opcode.RELEASE: 1}.get(opcode, 0)  # type: ignore[call-overload]
            resources, maximum = (*struct.unpack_from(f">{numbers}I", body), 0, 0)[:2]
            name = body[4 * numbers + 2 :]
            assert not body or struct.unpack_from(">H", body, 4 * numbers) == (len(name),)
            found.append(Request(peer.number, opcode, opaque, name, resources, maximum, time.monotonic()))
        peer.requests += len(found)
        with self.lock:
            self.requests.extend(found)
        return found, data[at:]

    def replies(self, peer: Peer, requests: list[Request]) -> Iterator[bytes]:
        for request in requests:
            yield self.right(peer, request) if request.opcode >= Opcode.STATS else self.reply(peer, request)

    def right(self, peer: Peer, request: Request) -> bytes:
        with self.lock:
            return self._right(peer, request)

    def _right(self, peer: Peer, request: Request) -> bytes:
        name, resources = request.name, request.resources
        if request.opcode == Opcode.GET:
            return response(request, struct.pack(">I", self.used[name]))
        if request.opcode == Opcode.ACQUIRE:
            if self.used[name] + resources > self.limit(request):
                return refusal(request, Status.RESOURCE_NOT_AVAILABLE)
            self.used[name] += resources
            self.most[name] = max(self.most[name], self.used[name])
            peer.held[name] += resources
            return response(request, struct.pack(">I", resources))
        if request.opcode == Opcode.RELEASE:
            if peer.held[name] < resources:
                return refusal(request, Status.NOT_ACQUIRED)
            self.used[name] -= resources
            peer.held[name] -= resources
        if request.opcode == Opcode.DUMP:
            entries = [struct.pack(">IIH", used, self.most[key], len(key)) + key for key, used in self.used.items()]
            return b"".join(response(request, body) for body in [*entries, b""])
        return response(request)

    # ---- for tests ----

    def asked(self, *opcodes: int) -> list[Request]:
        """Returns the requests with these opcodes, or all of the load."""
        return [each for each in list(self.requests) if each.opcode in (opcodes or range(4))]

    def wait_for_ends(self, count: int) -> list[str]:
        wait_until(lambda: len(self.ends) >= count, f"{count} connections ended")
        return self.ends

    # ---- inside ----

    def __enter__(self) -> Server:
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
        self._threads[0].join()
        self._listener.close()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self.path:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(len(self.peers), connection)
            self.peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer: Peer) -> None:
        end = "closed"
        with peer.socket:
            try:
                self.serve(peer)
            except Hangup:
                pass
            except OSError:
                end = "reset"
            self.give_back(peer)
        self.ends.append(end)


class SecureServer(Server):
    """A server with TLS. failed: failed handshakes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context
        self.failed: list[ssl.SSLError] = []

    def serve(self, peer: Peer) -> None:
        try:
            connection = self._context.wrap_socket(peer.socket, server_side=True)
        except ssl.SSLError as error:
            self.failed.append(error)
            raise
        with connection:
            peer.socket = connection
            super().serve(peer)


def response(request: Request, body: bytes = b"") -> bytes:
    """Makes a successful response to a request."""
    return wire.frame(request.opcode, request.opaque, body, magic=wire.RESPONSE_MAGIC)


def refusal(request: Request, status: int) -> bytes:
    """Makes a response that refuses a request."""
    text = wire.ERROR_TEXTS[Status(status)].encode()
    return wire.frame(request.opcode, request.opaque, text, magic=wire.RESPONSE_MAGIC, flags=status)
