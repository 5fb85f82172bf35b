"""Servers for the tests of clients, with one connection and one thread. A test defines the bytes that they exchange."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

from counterd.protocols.counter import wire
from kit.machine import PATIENCE

# Either (bytes to receive, bytes to send; None closes the connection), or a function that does anything else.
Step = tuple[bytes, bytes | None] | Callable[[socket.socket], object]
# Called with the opcode, the opaque and the body of a counter request. Returns pieces to send; None closes.
Answer = Callable[[int, int, bytes], Iterable[bytes] | None]


class Server:
    """Serves CONNECTIONS connections one after the other, in a thread. A subclass defines serve()."""

    CONNECTIONS = 1

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.ended = threading.Event()  # the last connection is closed
        self.connection: socket.socket
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it is shut down already
            self.listening.shutdown(socket.SHUT_RDWR)  # ends a wait for a connection that never came
        self._thread.join(PATIENCE)
        self.listening.close()
        assert not self._thread.is_alive()

    def serve(self) -> None:
        """Serves a connection. The caller then closes it."""
        raise NotImplementedError

    def _run(self) -> None:
        for _ in range(self.CONNECTIONS):
            with contextlib.suppress(OSError):
                self.connection, _ = self.listening.accept()
                with self.connection:
                    self.connection.settimeout(PATIENCE)
                    self.serve()
        self.ended.set()

    def received(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size and (data := self.connection.recv(size - len(received))):
            received += data
        return bytes(received)


class Script(Server):
    """Executes its steps, then waits for the client to close. again: the steps of the next connections."""

    def __init__(
        self, steps: tuple[Step, ...], listening: socket.socket, again: Iterable[tuple[Step, ...]] = ()
    ) -> None:
        self._connections = [steps, *again]
        self.CONNECTIONS = len(self._connections)
        self.wrong: list[str] = []  # requests that differ from those of the steps
        self.rest = b"nothing was read"  # the bytes after the steps
        super().__init__(listening)

    def stop(self) -> None:
        super().stop()
        assert self.wrong == []

    def serve(self) -> None:
        for step in self._connections.pop(0):
            if callable(step):
                step(self.connection)
                continue
            expected, answer = step
            received = self.received(len(expected))
            if received != expected:
                self.wrong.append(f"{received[:20]!r} of {len(received)}, not {expected[:20]!r} of {len(expected)}")
                return
            if answer is None:
                return
            self.connection.sendall(answer)
        self.rest = self.connection.recv(65536)


class Answers(Server):
    """Gives the next answer to each request of the counter protocol, and closes when there are no more.

    The next connection continues where the last one ended.
    """

    CONNECTIONS = 4

    def __init__(self, answers: tuple[Answer, ...], listening: socket.socket) -> None:
        self.requests: list[tuple[int, bytes]] = []
        self.connections = 0
        self._answers = iter(answers)
        super().__init__(listening)

    def serve(self) -> None:
        self.connections += 1
        while header := self.received(wire.HEADER_SIZE):
            body = self.received(int.from_bytes(header[4:8], "big"))
            self.requests.append((header[1], body))
            answer = next(self._answers, None)
            pieces = answer and answer(header[1], int.from_bytes(header[8:12], "big"), body)
            if pieces is None:
                return
            for piece in pieces:
                self.connection.sendall(piece)


def response(opcode: int, opaque: int, body: bytes = b"", status: int = 0) -> bytes:
    return wire.frame(opcode, opaque, body, magic=wire.RESPONSE_MAGIC, flags=status)


def gate() -> tuple[Callable[[socket.socket], object], Callable[[], None]]:
    """Returns (a step that waits, a function that ends its wait)."""
    opened = threading.Event()
    return lambda _: opened.wait(PATIENCE), opened.set
