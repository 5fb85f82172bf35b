"""Who waits for which counter in this program, in order: only the first of them asks the server.

Stands beside the floors, shared by the blocking client and that for asyncio. A waiter is an Event of either kind; this
module only sets it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Any, Protocol

from counterd.client._backoff import ASK_FIRST_S, ASK_LONGEST_S, Backoff
from counterd.client._tenure import LONG_WAIT_S, Tenure

COUNTED_FOR_S = 0.1  # how long a consumption may be told to others who give up
TENURES_MAX = 256  # names whose use a client remembers: some 40 KiB. One that was forgotten begins anew


class Waiter(Protocol):
    """What is set when a waiter has become the first, or something was given back here while it was."""

    def set(self) -> object: ...


class Queue:
    """Those who wait for one name. Asking grows slower with each refusal, whoever is the first."""

    def __init__(self) -> None:
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.backoff = Backoff(ASK_FIRST_S, ASK_LONGEST_S)
        self.consumption: int | None = None  # as it was when somebody gave up last
        self.counted_at = -math.inf
        self.counting: Any = None  # whom the others who give up meanwhile wait for

    def delay(self, waited: float) -> float:
        """How long the first waits before it asks again, when it has waited so many seconds."""
        delay = self.backoff.delay()
        return delay / 2 if waited > LONG_WAIT_S else delay

    def wake(self) -> None:
        """The first may ask again; there may be none yet."""
        for first in self.waiters:
            first.set()
            return


class Turns:
    """The queues of a client by name, and what it has had of each name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a generator, and a hold in it, anywhere
        self._queues: dict[bytes, Queue] = {}
        self._tenures: dict[bytes, Tenure] = {}

    def tenure(self, name: bytes) -> Tenure:
        """What this client has had of a name."""
        tenure = self._tenures.get(name)
        if tenure is None:
            with self._lock:
                while len(self._tenures) >= TENURES_MAX:
                    del self._tenures[next(iter(self._tenures))]
                tenure = self._tenures.setdefault(name, Tenure())
        return tenure

    def is_first(self, name: bytes, waiter: Waiter) -> bool:
        with self._lock:
            return next(iter(self._queues[name].waiters)) is waiter

    def join(self, name: bytes, waiter: Waiter) -> Queue:
        """At the end of the queue, until leave()."""
        with self._lock:
            queue = self._queues.setdefault(name, Queue())
            queue.waiters[waiter] = None
            return queue

    def leave(self, name: bytes, waiter: Waiter) -> None:
        """Whether it has joined or not. Who stayed in a queue without being there would block it for ever."""
        try:
            self._leave(name, waiter)
        except BaseException:  # a signal's, while this waited for a lock
            self._leave(name, waiter)
            raise

    def wake_all(self) -> None:
        """Whatever they wait for, it is over."""
        with self._lock:
            for queue in self._queues.values():
                queue.wake()

    def wake(self, name: bytes) -> None:
        """Something was given back: the first asks again at once."""
        if name in self._queues:  # else nobody has joined who has not yet to ask
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
