"""Gives a store its turns: tick() when it is due, and the output it made for other connections delivered.

Floor 3. Each turn is one slice of at most about a millisecond; between two turns the loop serves requests.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import asyncio

    from counterd._core import Session, Store
    from counterd.net._connection import Connection

# Sessions that one turn delivers to: some microseconds each for a system call.
DELIVERIES = 128


class Driver:
    """The turns of one store on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store) -> None:
        self._loop = loop
        self._store = store
        self._handle: asyncio.Handle | None = None
        self._due_ns = -1
        self._dirty: deque[Session] = deque()

    def wake(self) -> None:
        """Looks whether the store is due, now or later; cheap, and called after anything that may have made it so."""
        self._dirty.extend(self._store.take_dirty())
        due_ns = 0 if self._dirty else self._store.next_deadline()
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
        if self._store.next_deadline() >= 0:
            self._store.tick(time.monotonic_ns())
        for _ in range(min(DELIVERIES, len(self._dirty))):
            connection = cast("Connection | None", self._dirty.popleft().owner)
            if connection is not None:
                connection.pull()
        self.wake()
