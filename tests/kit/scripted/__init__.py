"""A server for tests: it keeps every request, and a test controls its answers. It uses plain sockets and threads.

Each module beside this one is a protocol: how its requests are cut out of the stream, and a small, correct server. A
test overrides `answer` (what a request is answered), `send` (how the answers to one piece are sent), `serve` (the whole
handling of a connection) or `give_back` (what happens when a connection has ended).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from kit.daemon import Address, wait_until
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

RECEIVE_SIZE = 1 << 18


class Peer:
    """One connection. held: what it holds, by name."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number  # counted from 0, in the order in which they were accepted
        self.socket = connection
        self.held: Counter[bytes] = Counter()
        self.requests = 0
        self.batches: list[int] = []  # requests that came in one piece

    def is_there(self) -> bool:
        """Returns False if it has closed the connection."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True

    def received(self, size: int) -> bytes:
        """Receives so many bytes; fewer if the connection ends."""
        found = bytearray()
        while len(found) < size and (data := self.socket.recv(size - len(found))):
            found += data
        return bytes(found)


class Hangup(Exception):
    """Raised by a test to close a connection after the answers so far."""


class Server:
    """Serves during the block, each connection in a thread. A request has the number of its connection.

    seen: all requests so far. ends: how connections ended, "closed" or "reset". lock: is held while a request is
    answered. context: for TLS. failed: failed handshakes. listening: a socket to listen on, in place of one of its own.
    """

    BACKLOG = 512

    def __init__(
        self,
        *,
        family: int = socket.AF_INET,
        path: str | None = None,
        context: ssl.SSLContext | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.seen: list[Any] = []
        self.peers: list[Peer] = []
        self.ends: list[str] = []
        self.path = path
        self.context = context
        self.failed: list[ssl.SSLError] = []
        self._threads: list[threading.Thread] = []
        if listening is None:
            listening = socket.socket(socket.AF_UNIX if path else family)
            listening.bind(path or ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
            listening.listen(self.BACKLOG)
        self._listener = listening

    @property
    def address(self) -> Address:
        return Address(*self._listener.getsockname()[:2])

    @property
    def port(self) -> int:
        return self.address.port

    # ---- what a protocol defines, and a test overrides ----

    def cut(self, peer: Peer, data: bytes) -> tuple[list[Any], bytes]:
        """Cuts requests out of the stream. Returns (the requests, the rest)."""
        raise NotImplementedError

    def right_answer(self, request: Any) -> bytes:
        """Executes a request as a correct server does. Returns the answer."""
        raise NotImplementedError

    def answer(self, request: Any) -> bytes:
        """Executes a request. Returns the answer; b"" if there is none now."""
        return self.right_answer(request)

    def reply(self, request: Any) -> bytes:
        """Calls answer(). A protocol overrides it if some answers wait."""
        with self.lock:
            return self.answer(request)

    def serve(self, peer: Peer) -> None:
        """Serves a connection from its beginning to its end."""
        buffer = b""
        while data := peer.socket.recv(RECEIVE_SIZE):
            requests, buffer = self.cut(peer, buffer + data)
            peer.requests += len(requests)
            peer.batches.append(len(requests))
            with self.lock:
                self.seen += requests
            self.send(peer, map(self.reply, requests))

    def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
        """Sends the answers to the requests of one piece."""
        sent = []
        try:
            sent.extend(replies)
        finally:
            if any(sent):
                peer.socket.sendall(b"".join(sent))

    def secure(self, peer: Peer, context: ssl.SSLContext) -> None:
        """Begins TLS on a new connection."""
        try:
            peer.socket = context.wrap_socket(peer.socket, server_side=True)
        except ssl.SSLError as error:
            self.failed.append(error)
            raise

    def give_back(self, peer: Peer) -> None:
        """Takes back what a connection held when it has ended."""

    # ---- for tests ----

    def peer_of(self, request: Any) -> Peer:
        return self.peers[request.connection]

    def wait_for_ends(self, count: int) -> list[str]:
        wait_until(lambda: len(self.ends) >= count, f"{count} connections ended")
        return self.ends

    def hang_up(self) -> None:
        """Ends all connections, and still listens."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    # ---- inside ----

    def __enter__(self) -> Any:
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
        self._threads[0].join()
        self._listener.close()
        self.hang_up()
        for thread in self._threads[1:]:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(len(self.peers), connection)
            self.peers.append(peer)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer: Peer) -> None:
        end = "closed"
        try:
            if self.context is not None:
                self.secure(peer, self.context)
            self.serve(peer)
        except Hangup:
            pass
        except OSError:
            end = "reset"
        finally:
            peer.socket.close()
        self.give_back(peer)
        self.ends.append(end)
