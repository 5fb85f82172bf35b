"""How long to wait before trying again: longer each time up to a bound, and never in step with others.

Stands beside the floors; knows no clock.
"""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds: first, then twice the last, up to the longest; each is drawn from its upper half."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._next = first
        self._longest = longest

    def delay(self) -> float:
        """The next one."""
        delay = self._next
        self._next = min(2 * delay, self._longest)
        return delay * random.uniform(0.5, 1)

    def reset(self) -> None:
        """It went well: the next delay is the first again."""
        self._next = self._first

    def lengthen(self) -> None:
        """Others go first: the next delay is the longest."""
        self._next = self._longest


# Asking for permits again. A permit that another program gives back is found after 0.25 s at most. However many wait
# for a counter in one program, it asks some five times a second, and ten times after LONG_WAIT_S.
ASK_FIRST_S, ASK_LONGEST_S = 0.005, 0.25
# Connecting again.
CONNECT_FIRST_S, CONNECT_LONGEST_S = 0.05, 2.0
