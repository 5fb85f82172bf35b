"""The queues of a client. A queue has the holds that wait for a name, in order. Only the first hold in a queue asks the
server.

A hold of the counter protocol waits in the server's queue. A hold waits in the client's queue if the server has no
queue, if the server's queue is full, or if the server cannot be reached.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio. A waiter is the
threading.Event, or the TaskEvent, of a hold. This module only sets the waiter.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Protocol

from counterd.client._backoff import ASK_FIRST_S, ASK_LONGEST_S, Backoff

PAUSES = b""  # no name: of those who wait until they may connect again


class Waiter(Protocol):
    """The event of a waiting hold: set when it becomes the first of its queue, or when something is given back while it
    is the first."""

    def set(self) -> object: ...
    def clear(self) -> object: ...


class Queue:
    """The waiters for one name.

    The pause before the next request grows each time that the server refuses a request of this queue.
    """

    def __init__(self) -> None:
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.backoff = Backoff(ASK_FIRST_S, ASK_LONGEST_S)
        self.draining = False  # so the server said when it last refused a request of this queue
        # When a hold gives up, it asks how much is in use, for all that give up at that time.
        self.consumption: int | None = None
        self.unreachable = ""  # why the server could not be asked for it
        self.counted_at = -math.inf
        self.counting = False
        self.told: list[Waiter] = []  # to be set when it is known
        self.is_full = False  # so is the queue of the server: only one waiter at a time may try to wait there

    def wake(self) -> None:
        """Lets the first waiter, if any, ask again."""
        for first in self.waiters:
            first.set()
            return


class WaitQueues:
    """The queues of a client by name. Threads may share a WaitQueues."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a hold at any moment
        self._queues: dict[bytes, Queue] = {}

    def has(self, name: bytes) -> bool:
        """Returns whether there is a queue for a name."""
        return name in self._queues

    def is_first(self, name: bytes, waiter: Waiter) -> bool:
        with self._lock:
            return next(iter(self._queues[name].waiters)) is waiter

    def join(self, name: bytes, waiter: Waiter) -> Queue:
        """Adds the waiter to the end of the queue, until leave()."""
        with self._lock:
            queue = self._queues.setdefault(name, Queue())
            queue.waiters[waiter] = None
            return queue

    def leave(self, name: bytes, waiter: Waiter) -> None:
        """Removes the waiter, if it has joined a queue. A waiter without a hold would block the queue for ever."""
        try:
            self._leave(name, waiter)
        except BaseException:  # from a signal handler, while this waited for the lock
            self._leave(name, waiter)
            raise

    def wake_all(self) -> None:
        """Called when the client is closed: wakes the first waiter of each queue."""
        with self._lock:
            for queue in self._queues.values():
                queue.wake()

    def wake(self, name: bytes) -> None:
        """Called when something was given back: the first waiter immediately asks again."""
        if name in self._queues:  # else there is no waiter; one that joins from now on asks anyway
            with self._lock:
                if queue := self._queues.get(name):
                    queue.wake()

    def _leave(self, name: bytes, waiter: Waiter) -> None:
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                return
            moves_on = waiter not in queue.waiters or next(iter(queue.waiters)) is waiter
            queue.waiters.pop(waiter, None)
            if not queue.waiters:
                del self._queues[name]
            elif moves_on:
                queue.wake()
