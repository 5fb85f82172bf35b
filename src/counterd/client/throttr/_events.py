"""Events that arrived and that nobody has taken yet: a bounded queue, which marks where events were lost.

Floor: side (ARCHITECTURE.md). Events must not delay the replies behind them, so events that do not fit into the queue
are dropped. The caller that takes events learns where events are missing, and how many. Events are never reordered.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from counterd.errors import ConnectionLost, EventsLost

if TYPE_CHECKING:
    from counterd.protocols.throttr.wire import Event

EVENTS_MAX = 16 << 20  # bytes of events that a client keeps by default
EVENT_OVERHEAD = 150  # bytes that Python's objects for an event take besides its channel and payload


class Events:
    """Events that arrived and that nobody has taken yet, in order: up to limit bytes, or one event of any size.

    When there are too many, later events are dropped until all kept events were taken. Then take() raises EventsLost.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock: Any = threading.RLock()  # reentrant: a signal handler may have interrupted its thread
        self._kept: deque[Event | ConnectionLost] = deque()
        self._bytes = 0
        self._lost = 0

    def __bool__(self) -> bool:
        return bool(self._kept or self._lost)

    def put(self, event: Event) -> None:
        size = _event_bytes(event)
        with self._lock:
            if self._lost or (self._bytes and self._bytes + size > self._limit):
                self._lost += 1
            else:
                self._kept.append(event)
                self._bytes += size

    def put_loss(self, loss: ConnectionLost) -> None:
        """Notes that the connection was lost, and that events may be lost.

        If several losses follow each other, only one is kept.
        """
        with self._lock:
            if not self._lost and not (self._kept and isinstance(self._kept[-1], ConnectionLost)):
                self._kept.append(loss)

    def take(self) -> Event | None:
        """Returns the next event, or None.

        Raises EventsLost or ConnectionLost once at each place where events are missing.
        """
        with self._lock:
            if self._kept:
                event = self._kept.popleft()
                if isinstance(event, ConnectionLost):
                    raise event
                self._bytes -= _event_bytes(event)
                return event
            if self._lost:
                count, self._lost = self._lost, 0
                raise EventsLost(count)
            return None

    def clear(self) -> None:
        """Forgets events and losses.

        Called in the child of a fork. A thread of the parent may hold the old lock, so this makes a new lock.
        """
        self._lock = threading.RLock()
        self._kept.clear()
        self._bytes = self._lost = 0


def _event_bytes(event: Event) -> int:
    return len(event.channel) + len(event.payload) + EVENT_OVERHEAD
