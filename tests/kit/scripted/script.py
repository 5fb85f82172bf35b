"""A server that executes steps, whatever the protocol: a test defines the bytes that it exchanges with its client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kit import scripted
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from kit.scripted import Peer

# Either (bytes to receive, bytes to send; None closes the connection), or a function that does anything else.
Step = tuple[bytes, bytes | None] | Callable[[socket.socket], object]


class Script(scripted.Server):
    """Executes its steps, then waits for the client to close. again: the steps of the next connections.

    Later connections are not answered. rest: the bytes after the steps.
    """

    def __init__(self, *steps: Step, again: Iterable[tuple[Step, ...]] = (), **options: Any) -> None:
        super().__init__(**options)
        self._connections = [steps, *again]
        self._wrong: list[str] = []  # requests that differ from those of the steps
        self.rest = b"nothing was read"

    def serve(self, peer: Peer) -> None:
        for step in self._connections.pop(0) if self._connections else ():
            if callable(step):
                step(peer.socket)
                continue
            expected, answer = step
            received = peer.received(len(expected))
            if received != expected:
                self._wrong.append(f"{received[:20]!r} of {len(received)}, not {expected[:20]!r} of {len(expected)}")
                return
            if answer is None:
                return
            peer.socket.sendall(answer)
        self.rest = peer.socket.recv(scripted.RECEIVE_SIZE)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self._wrong == []


def gate() -> tuple[Callable[[socket.socket], object], Callable[[], None]]:
    """Returns (a step that waits, a function that ends its wait)."""
    opened = threading.Event()
    return lambda _: opened.wait(PATIENCE), opened.set
