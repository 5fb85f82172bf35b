"""What masters have told a gatekeeper: until when an identifier has to wait. Bounded; no I/O, no clock.

Stands beside the floors. A decision looks into the dict of a domain itself: a request without a limit costs no more.
A time there may have passed already; expire() removes such times.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

# Entries of the heap that no identifier has any more, beyond as many as those that one has.
STALE_MAX = 64
AHEAD_MAX_NS = 11 * 366 * 86_400 * 1_000_000_000  # no master has anybody wait for longer: ten years, and 366 days


class _Time(NamedTuple):
    until_ns: int
    number: int  # so that nothing behind it is compared
    times: dict[bytes, int]
    identifier: bytes


class Told:
    """The times of all domains, limit at most: beyond that the one that passes first is forgotten."""

    def __init__(self, limit: int) -> None:
        self.count = 0  # identifiers that have a time
        self.evicted = 0
        self._limit = limit
        self._heap: list[_Time] = []
        self._domains: list[dict[bytes, int]] = []
        self._number = 0

    def new_domain(self) -> dict[bytes, int]:
        """The times of one more domain by identifier, in ns of a clock that nobody sets; for reading."""
        self._domains.append({})
        return self._domains[-1]

    def remember(self, times: dict[bytes, int], identifier: bytes, until_ns: int, now_ns: int) -> None:
        """The largest time that an identifier was told is what counts. One that cannot be counts for nothing."""
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
        """It was told nothing."""
        self.count -= times.pop(identifier, None) is not None

    def expire(self, now_ns: int) -> None:
        """Removes the times that have passed."""
        while self._heap and self._heap[0].until_ns <= now_ns:
            self._pop()

    def rebuild(self) -> None:
        """Makes everything else anew from the times of the domains."""
        self._heap = []
        for times in self._domains:
            for identifier, until_ns in times.items():
                self._push(times, identifier, until_ns)
        self.count = len(self._heap)

    def _push(self, times: dict[bytes, int], identifier: bytes, until_ns: int) -> None:
        self._number += 1
        heapq.heappush(self._heap, _Time(until_ns, self._number, times, identifier))

    def _pop(self) -> bool:
        """Whether an identifier had that time still."""
        until_ns, _, times, identifier = heapq.heappop(self._heap)
        if times.get(identifier) != until_ns:
            return False
        del times[identifier]
        self.count -= 1
        return True
