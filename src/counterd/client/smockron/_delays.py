"""Counts the requests that a gatekeeper currently delays. This file uses no clock.

Floor: side (ARCHITECTURE.md). A request counts as delayed until its delay is over, or until remove() is called.
"""

from __future__ import annotations

import heapq

from counterd.client.smockron._told import STALE_MAX


class Delays:
    """The requests that wait. Each request has a number, from 1."""

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
