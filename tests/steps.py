"""A server for the tests of clients: one connection, one thread, and steps that a test writes down, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

PATIENCE = 10  # seconds, longer than anything here takes

# Awaits these bytes of requests, then sends those; None instead of them closes the connection. Or does anything else.
Step = tuple[bytes, bytes | None] | Callable[[socket.socket], object]


class Script:
    """A server for one connection, in a thread: goes through its steps, then waits for the client to close."""

    def __init__(self, steps: tuple[Step, ...], listening: socket.socket) -> None:
        self.listening = listening
        self.steps = steps
        self.wrong: list[str] = []  # requests that are not those of the steps
        self.rest = b"nothing was read"  # what came after the steps
        self.ended = threading.Event()
        self.connection: socket.socket
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port

    def stop(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)  # ends a wait for a connection that never came
        self._thread.join(PATIENCE)
        self.listening.close()
        assert not self._thread.is_alive()
        assert self.wrong == []

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self.connection, _ = self.listening.accept()
            with self.connection:
                self.connection.settimeout(PATIENCE)
                self._serve()
        self.ended.set()

    def _serve(self) -> None:
        for step in self.steps:
            if callable(step):
                step(self.connection)
                continue
            expected, answer = step
            received = self._received(len(expected))
            if received != expected:
                self.wrong.append(f"{received[:20]!r} of {len(received)}, not {expected[:20]!r} of {len(expected)}")
                return
            if answer is None:
                return
            self.connection.sendall(answer)
        self.rest = self.connection.recv(65536)

    def _received(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size and (data := self.connection.recv(size - len(received))):
            received += data
        return bytes(received)


def gate() -> tuple[Callable[[socket.socket], object], Callable[[], None]]:
    """(a step that waits, what lets it go on)"""
    opened = threading.Event()
    return lambda _: opened.wait(PATIENCE), opened.set
