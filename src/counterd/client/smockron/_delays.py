"""The requests that a gatekeeper delays at the moment: how many there are. No clock.

Stands beside the floors. A request is delayed until its time, or until it is said that it went away before.
"""

from __future__ import annotations

import heapq

from counterd.client.smockron._told import STALE_MAX


class Delays:
    """Each has a number, from 1."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # times and numbers, also of those that went away
        self._waiting: set[int] = set()
        self._last = 0

    def count(self, now_ns: int) -> int:
        """How many wait now."""
        while self._heap and self._heap[0][0] <= now_ns:
            self._waiting.discard(heapq.heappop(self._heap)[1])
        return len(self._waiting)

    def add(self, until_ns: int) -> int:
        """One more. Returns its number."""
        self._last += 1
        self._waiting.add(self._last)
        heapq.heappush(self._heap, (until_ns, self._last))
        return self._last

    def remove(self, number: int) -> None:
        """It does not wait any more. Doing it again does nothing."""
        self._waiting.discard(number)
        if len(self._heap) > 2 * len(self._waiting) + STALE_MAX:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
