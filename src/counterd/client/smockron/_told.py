"""What masters have announced to a gatekeeper: until when each identifier has to wait. The size is bounded. No I/O, no
clock.

Floor: side (ARCHITECTURE.md). A decision reads the dict of a domain directly, so for a request without a limit it needs
only one look-up. A time in the dict may have passed already; expire() removes such times.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

# The heap is rebuilt when it has so many more outdated entries than valid ones.
STALE_MAX = 64
AHEAD_MAX_NS = 11 * 366 * 86_400 * 1_000_000_000  # no master lets anybody wait longer: ten years, and 366 days


class _Time(NamedTuple):
    until_ns: int
    number: int  # unique, so that the heap never compares what follows
    times: dict[bytes, int]
    identifier: bytes


class Told:
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
