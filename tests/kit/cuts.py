"""A network that fails: a relay between clients and a server that a test cuts, mutes and closes."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from kit.daemon import wait_until

if TYPE_CHECKING:
    from kit.daemon import Address

HOST = "127.0.0.1"
CUTS = 20  # of a test
GRACE_S = 60  # for which a server keeps what was held: no test takes so long


class Relay:
    """Passes bytes on. port: for clients. is_open: whether it accepts connections.

    muted: a reply of the server is thrown away, and the connection is cut then. lost: how many replies were.
    """

    def __init__(self, server: Address) -> None:
        self.is_open = True
        self.muted = False
        self.lost = 0
        self._server = server
        self._pairs: list[tuple[socket.socket, socket.socket, list[threading.Thread]]] = []
        self._lock = threading.Lock()
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Ends all connections."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for client, server, threads in pairs:
            end(client, server)
            for thread in threads:
                thread.join()
            client.close()
            server.close()

    def close(self) -> None:
        end(self._listening)
        self._thread.join()
        self._listening.close()
        self.cut()

    def expect_loss(self, count: int = 1) -> None:
        """Waits until so many replies were thrown away."""
        wait_until(lambda: self.lost >= count, "a reply is lost")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if not self.is_open:
                    client.close()
                    continue
                server = socket.create_connection((self._server.host, self._server.port))
                threads = [
                    threading.Thread(target=self._pass_on, args=(source, target, server), daemon=True)
                    for source, target in ((client, server), (server, client))
                ]
                with self._lock:  # cut() has to end each connection through which a reply can have come
                    self._pairs.append((client, server, threads))
                    for thread in threads:
                        thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.muted and source is server:
                    self.muted = False
                    self.lost += 1
                    break
                target.sendall(data)
        end(source, target)


def end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
