"""A network that fails: a relay between clients and a server that a test cuts, mutes and closes."""

from __future__ import annotations

import contextlib
import socket
import threading

from kit.daemon import Address, wait_until
from kit.machine import PATIENCE

HOST = "127.0.0.1"
CUTS = 20  # of a test
GRACE_S = 60  # for which a server keeps what was held: no test takes so long


class Relay:
    """Passes bytes on, during the block or until close(). is_open: whether it accepts connections.

    muted: a reply of the server is thrown away, and the connection is cut then. lost: how many replies were.
    accepted: connections so far. asked: pieces that clients have sent.
    """

    def __init__(self, server: tuple[str, int] | str, path: str = "") -> None:
        """server: its address, or the path of its Unix socket. path: a Unix socket for clients, in place of a port."""
        self.is_open = True
        self.muted = False
        self.lost = self.accepted = self.asked = 0
        self._server = server
        self._pairs: list[tuple[socket.socket, socket.socket, list[threading.Thread]]] = []
        self._lock = threading.Lock()
        self._flows = threading.Event()  # what the server says
        self._flows.set()
        self._listening = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._listening.bind(path or (HOST, 0))
        self._listening.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> Address:
        """The TCP address for clients."""
        return Address(*self._listening.getsockname())

    @property
    def port(self) -> int:
        return self.address.port

    def cut(self) -> None:
        """Ends all connections."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for client, server, _ in pairs:
            end(client, server)
        self.go_on()
        for client, server, threads in pairs:
            for thread in threads:
                thread.join()
            client.close()
            server.close()

    def drain(self) -> None:
        """Waits until all clients have ended their connections, and what they said before is passed on."""
        with self._lock:
            pairs = list(self._pairs)
        for _, _, (from_client, _) in pairs:
            from_client.join(PATIENCE)
            assert not from_client.is_alive(), "a client has not ended its connection"

    def hold_back(self) -> None:
        """Keeps the server's data from now on, until go_on()."""
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

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
                server = self._connected() if self.is_open else None
                if server is None:
                    client.close()
                    continue
                threads = [
                    threading.Thread(target=self._pass_on, args=(source, target, server), daemon=True)
                    for source, target in ((client, server), (server, client))
                ]
                with self._lock:  # cut() has to end each connection through which a reply can have come
                    self._pairs.append((client, server, threads))
                    for thread in threads:
                        thread.start()
                self.accepted += 1

    def _connected(self) -> socket.socket | None:
        connected = socket.socket(socket.AF_UNIX if isinstance(self._server, str) else socket.AF_INET)
        try:
            connected.connect(self._server)
        except OSError:
            connected.close()
            return None
        return connected

    def _pass_on(self, source: socket.socket, target: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source is not server:
                    self.asked += 1
                elif self.muted:
                    self.muted = False
                    self.lost += 1
                    break
                else:
                    self._flows.wait()
                target.sendall(data)
        end(source, target)


def end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
