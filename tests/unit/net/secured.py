"""A TLS server on a fake loop, and its peers. The sockets and OpenSSL are real; batches run when a test says so."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Any

from counterd.net.sockets import Keepalive, open_tcp
from kit.certificates import client_context, server_context
from kit.counters import TURNS_MAX
from unit.net.fakes import Net, nets
from unit.net.polled import ENDLESS_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd.net.connection import Connection


class Site:
    """A TCP server with TLS, on a fake loop."""

    def __init__(self, net: Net, listening: socket.socket, **options: Any) -> None:
        self.net = net
        self.loop, self.server = net.loop, net.server
        self.listening = listening
        self.server.context = server_context(**options)
        self.server.listen(listening)
        self.poller = self.server._poller
        self.poller.batch_ns = ENDLESS_NS
        self.batch = self.poller.run
        self._stack = contextlib.ExitStack()

    def turn(self) -> None:
        """Runs a batch, and the calls that it scheduled."""
        self.batch()
        self.loop.run()

    def peer(self, context: ssl.SSLContext | None = None, **options: Any) -> Peer:
        """Connects a peer, which sends nothing yet."""
        before = set(self.server.arriving)
        connected = self._stack.enter_context(socket.create_connection(self.listening.getsockname()))
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.turn()
        came = self.server.arriving - before
        return Peer(self, connected, context or client_context(**options), came.pop() if came else None)

    def connect(self, **options: Any) -> Peer:
        """Connects a peer, and completes its handshake."""
        peer = self.peer(**options)
        peer.shake()
        return peer

    def there(self) -> int:
        """How many connections there are, whether or not their handshakes are complete."""
        return len(self.server.connections) + len(self.server.arriving)

    def failed(self) -> dict[str, int]:
        """The numbers of failed handshakes, by cause."""
        return {
            key.partition(":")[2]: value
            for key, value in self.server.figures().items()
            if key.startswith("handshakes_failed:") and value
        }

    def close(self) -> None:
        self._stack.close()
        for connection in [*self.server.connections.values(), *self.server.arriving]:
            connection.abort()
        self.loop.run()
        self.server.part()
        assert self.there() == 0
        assert self.server.handshakes == 0
        assert self.loop.errors == []


class Peer:
    """The client's side: OpenSSL without a socket of its own. connection: the server's side; None if the server refused
    it.
    """

    def __init__(
        self, site: Site, connected: socket.socket, context: ssl.SSLContext, connection: Connection | None
    ) -> None:
        self.site = site
        self.connection: Any = connection
        self.socket = connected
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")

    def flush(self) -> None:
        """Sends the pending output of OpenSSL to the server."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(self.outgoing.read())

    def fetch(self) -> bool:
        """Receives what the server has sent; returns whether there was anything."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return False
        if not data:
            self.incoming.write_eof()
            return False
        self.incoming.write(data)
        return True

    def shake(self) -> None:
        for _ in range(TURNS_MAX):
            try:
                self.ssl.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                self.site.turn()
                self.fetch()
                continue
            self.flush()
            self.site.turn()
            return
        raise AssertionError("no end of the handshake")

    def send(self, data: bytes) -> None:
        while data:
            data = data[self.ssl.write(data) :]
        self.flush()

    def read(self) -> bytes:
        """Returns the decrypted data that has arrived; what follows close_notify does not count."""
        self.fetch()
        received = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            while piece := self.ssl.read(1 << 20):
                received += piece
        return received

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        self.site.turn()
        return self.read()

    def at_end(self) -> bool:
        """Whether close_notify has arrived."""
        try:
            return self.ssl.read(1) == b""
        except ssl.SSLWantReadError:
            return False

    def alert(self) -> str:
        """The alert that the server sent."""
        while self.fetch():
            pass
        try:
            self.ssl.read(1)
        except ssl.SSLError as error:
            return error.reason or str(error)
        return ""

    def closed(self) -> bool:
        """Whether the server has closed the socket."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        return True


@contextlib.contextmanager
def sites() -> Iterator[Callable[..., Site]]:
    """Makes servers, and closes what they have open after the test."""
    with contextlib.ExitStack() as stack:
        make = stack.enter_context(nets())

        def made(*, clients: ssl.VerifyMode = ssl.CERT_NONE, **limits: Any) -> Site:
            listening = open_tcp("127.0.0.1", 0, Keepalive(60, 30, 3, 25))
            site = Site(make(**limits), listening, clients=clients)
            stack.callback(site.close)
            return site

        yield made
