"""Until when identifiers have to wait, as masters have announced it, and which requests wait now. No I/O, no clock.

Floor: side (ARCHITECTURE.md). A decision reads the dict of a domain directly, so for a request without a limit it needs
only one look-up. A time in the dict may have passed already; expire() removes such times.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

STALE_MAX = 64  # a heap is rebuilt when it has so many more outdated entries than valid ones
AHEAD_MAX_NS = 11 * 366 * 86_400 * 1_000_000_000  # no master lets anybody wait longer: ten years, and 366 days


class _Time(NamedTuple):
    until_ns: int
    number: int  # unique, so that the heap never compares what follows
    times: dict[bytes, int]
    identifier: bytes


class DelayCache:
    """The waiting times of all domains.

    limit: how many times are remembered at most. If there are more, the one that passes first is forgotten.
    """

    def __init__(self, limit: int) -> None:
        self.count = 0  # identifiers that have a time
        self.evicted = 0
        self._limit = limit
        self._heap: list[_Time] = []
        self._domains: list[dict[bytes, int]] = []
        self._number = 0

    def new_domain(self) -> dict[bytes, int]:
        """Returns the waiting times of a new domain by identifier, in ns of the monotonic clock.

        The caller must not change them.
        """
        self._domains.append({})
        return self._domains[-1]

    def remember(self, times: dict[bytes, int], identifier: bytes, until_ns: int, now_ns: int) -> None:
        """Notes until when an identifier has to wait, if that is later than before. Ignores impossible times."""
        self.expire(now_ns)
        if not max(now_ns, times.get(identifier, 0)) < until_ns <= now_ns + AHEAD_MAX_NS:
            return
        self.count += identifier not in times
        times[identifier] = until_ns
        self._push(times, identifier, until_ns)
        while self.count > self._limit:
            self.evicted += self._pop()
        if len(self._heap) > 2 * self.count + STALE_MAX:
            self.rebuild()

    def forget(self, times: dict[bytes, int], identifier: bytes) -> None:
        """Called when the identifier no longer has to wait."""
        self.count -= times.pop(identifier, None) is not None

    def expire(self, now_ns: int) -> None:
        """Removes the times that have passed."""
        while self._heap and self._heap[0].until_ns <= now_ns:
            self._pop()

    def rebuild(self) -> None:
        """Makes the heap and the count again from the times of the domains."""
        self._heap = []
        for times in self._domains:
            for identifier, until_ns in times.items():
                self._push(times, identifier, until_ns)
        self.count = len(self._heap)

    def _push(self, times: dict[bytes, int], identifier: bytes, until_ns: int) -> None:
        self._number += 1
        heapq.heappush(self._heap, _Time(until_ns, self._number, times, identifier))

    def _pop(self) -> bool:
        """Removes the earliest entry of the heap. Returns whether the entry was still valid."""
        until_ns, _, times, identifier = heapq.heappop(self._heap)
        if times.get(identifier) != until_ns:
            return False
        del times[identifier]
        self.count -= 1
        return True


class DelayedRequests:
    """The requests that wait. Each has a number, from 1. A request waits until its delay is over, or until remove()."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # times and numbers, also of removed requests
        self._waiting: set[int] = set()
        self._last = 0

    def count(self, now_ns: int) -> int:
        """Returns how many requests wait now."""
        while self._heap and self._heap[0][0] <= now_ns:
            self._waiting.discard(heapq.heappop(self._heap)[1])
        return len(self._waiting)

    def add(self, until_ns: int) -> int:
        """Adds a request that waits until this time. Returns the number of the request."""
        self._last += 1
        heapq.heappush(self._heap, (until_ns, self._last))  # first: a signal may come in between
        self._waiting.add(self._last)
        return self._last

    def remove(self, number: int) -> None:
        """Removes a request that no longer waits. A second call does nothing."""
        self._waiting.discard(number)
        if len(self._heap) > 2 * len(self._waiting) + STALE_MAX:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
