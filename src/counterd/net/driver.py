"""Gives a store its turns: tick() when it is due, and output that is not the answer to a read fetched and sent.

Floor 3. Each turn is one slice, well below a millisecond; between two turns the loop serves requests. However many
connections stream a Dump or are published to, another client's request waits for one turn.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import asyncio

    from counterd._core import Store
    from counterd.net._connection import Connection

# A turn ends with the connection that exceeds it. Short, because each turn of the loop accepts only a few connections.
SLICE_NS = 250_000


class Driver:
    """The turns of one store on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store) -> None:
        self._loop = loop
        self._store = store
        self._handle: asyncio.Handle | None = None
        self._due_ns = -1
        self._waiting: deque[Connection] = deque()

    def enqueue(self, connection: Connection) -> None:
        """Has connection.pull() called in one of the next turns."""
        self._waiting.append(connection)
        self.wake()

    def wake(self) -> None:
        """Looks whether there is something to do, now or later; called after anything that may have brought it."""
        due_ns = 0 if self._waiting else self._store.next_deadline()
        if due_ns < 0 or (self._handle is not None and self._due_ns <= due_ns):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._due_ns = due_ns
        wait_ns = due_ns - time.monotonic_ns()
        if wait_ns <= 0:
            self._handle = self._loop.call_soon(self._turn)
        else:
            self._handle = self._loop.call_later(wait_ns / 1e9, self._turn)

    def _turn(self) -> None:
        self._handle = None
        now_ns = time.monotonic_ns()
        if self._store.next_deadline() >= 0:
            self._store.tick(now_ns)
        self._waiting.extend(cast("Connection", session.owner) for session in self._store.take_dirty() if session.owner)
        while self._waiting:
            self._waiting.popleft().pull()
            if time.monotonic_ns() - now_ns >= SLICE_NS:
                break
        self.wake()
