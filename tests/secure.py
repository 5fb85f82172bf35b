"""Certificates of an authority that is made up for the tests, and servers that speak TLS with them."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import trustme

import scripted
from daemon import Address

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from scripted import Peer

RECEIVE_SIZE = 1 << 16


class Certificates:
    """In a directory: cacert, cert and key of a client, and other, which is of another authority."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self._server = authority.issue_cert("localhost", "127.0.0.1", "::1")
        self._authority = authority
        client = authority.issue_cert("client@example.org", common_name="client")
        self.cacert, self.cert, self.key, self.other, self.both = (
            str(directory / f"{name}.pem") for name in ("cacert", "cert", "key", "other", "both")
        )
        authority.cert_pem.write_to_path(self.cacert)
        client.cert_chain_pems[0].write_to_path(self.cert)
        client.private_key_pem.write_to_path(self.key)
        client.private_key_and_cert_chain_pem.write_to_path(self.both)
        trustme.CA().cert_pem.write_to_path(self.other)

    def server_context(self, *, asks: bool = False) -> ssl.SSLContext:
        """asks: for a certificate of the client, and takes nobody without."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.configure_cert(context)
        if asks:
            self._authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.cacert)


class Server(scripted.Server):
    """The scripted server, with TLS. failed: handshakes that were."""

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


class Relay:
    """TLS in front of a server that speaks none, while the block runs."""

    def __init__(self, behind: tuple[str, int], context: ssl.SSLContext) -> None:
        self._behind = behind
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._accepted: list[socket.socket] = []
        self._passing = threading.Event()
        self._passing.set()

    @property
    def address(self) -> Address:
        return Address(*self._listener.getsockname())

    def pause(self) -> None:
        """Passes nothing on until resume()."""
        self._passing.clear()

    def resume(self) -> None:
        self._passing.set()

    def drop(self) -> None:
        """Ends all connections."""
        for each in self._accepted:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._threads[0].join()
        self._listener.close()
        self.drop()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True) as near:
            self._accepted.append(near)
            with socket.create_connection(self._behind) as far:
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._passes(near, far):
                    pass

    def _passes(self, near: ssl.SSLSocket, far: socket.socket) -> bool:
        """What is there, in both directions. Whether there may be more."""
        readable = select.select([near, far], [], [])[0]
        self._passing.wait()
        for ready in readable:
            while True:
                data = ready.recv(RECEIVE_SIZE)
                if not data:
                    return False
                (far if ready is near else near).sendall(data)
                if ready is far or not near.pending():
                    break
        return True
