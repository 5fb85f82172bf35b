"""Delays before trying again: longer each time up to a bound, and random, so that clients do not retry together.

Floor: side; uses no clock.
"""

from __future__ import annotations

from random import SystemRandom
from typing import TYPE_CHECKING

from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from counterd.errors import CounterdError


RANDOM = SystemRandom()  # not that of a program that has seeded its own; and another one after a fork


class Backoff:
    """Delays in seconds: first, then twice the last one, up to longest. Each is shortened by up to half at random."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._next = first
        self._longest = longest

    def delay(self) -> float:
        """Returns the next delay."""
        delay = self._next
        self._next = min(2 * delay, self._longest)
        return delay * RANDOM.uniform(0.5, 1)

    def reset(self) -> None:
        """Called after a success: the next delay is the shortest one again."""
        self._next = self._first

    def lengthen(self) -> None:
        """Called to let others go first: the next delay is the longest one."""
        self._next = self._longest


# Asking for permits again. A permit that another program gives back is found after 0.25 s at most. However many wait
# for a counter in one program, it asks some five times a second, and ten times after LONG_WAIT_S.
ASK_FIRST_S, ASK_LONGEST_S = 0.005, 0.25
# Connecting again.
CONNECT_FIRST_S, CONNECT_LONGEST_S = 0.05, 2.0


class Attempts:
    """When a client may connect again, and the error of its calls until then.

    The first attempt after a connection that was good begins at once. A connection is good if the server answered
    something through it: a server that has no room accepts connections and closes them.
    """

    def __init__(self) -> None:
        self.retry_at = 0.0  # when the next attempt may begin
        self.failure: CounterdError | None = None  # of the last attempt
        self._backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
        self._good: object = None  # the last connection that was good and has ended

    def begin(self, now: float, ended: object, was_good: bool, why: CounterdError) -> None:
        """Called before an attempt, with the connection that has ended and why. ConnectionLost if it is too early."""
        if was_good and ended is not self._good:
            self._good = ended
            self._backoff.reset()
            self.retry_at = 0.0
        if now < self.retry_at:
            raise ConnectionLost(f"{self.failure or why}; another attempt is due within {CONNECT_LONGEST_S:g} s")
        self.failure = None

    def failed(self, now: float, failure: CounterdError) -> None:
        """Called when the attempt has failed."""
        self.failure = failure
        self.retry_at = now + self._backoff.delay()

    def succeeded(self, now: float, ended: object) -> None:
        """Called when a new connection replaces the one that has ended."""
        self.failure = None
        if ended is not self._good:
            self.retry_at = now + self._backoff.delay()
