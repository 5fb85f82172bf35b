"""Delays before another attempt. Delays grow up to a bound, and are random, so that clients do not all retry at the
same time.

Floor: side (ARCHITECTURE.md); this file uses no clock.
"""

from __future__ import annotations

from random import SystemRandom
from typing import TYPE_CHECKING

from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from counterd.errors import CounterdError


RANDOM = SystemRandom()  # not that of a program that has seeded its own; and another one after a fork


class Backoff:
    """Delays in seconds.

    The first delay is `first`; each later delay is twice the previous one, up to `longest`. Each delay is shortened at
    random, by up to half.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._next = first
        self._longest = longest

    def delay(self) -> float:
        """Returns the next delay."""
        delay = self._next
        self._next = min(2 * delay, self._longest)
        return delay * RANDOM.uniform(0.5, 1)

    def reset(self) -> None:
        """Called after a success: the next delay is the shortest delay again."""
        self._next = self._first


# Asking for permits again. A permit that another program gives back is found after 0.125 s at most. However many wait
# for a counter in one program, it asks some ten times a second.
ASK_FIRST_S, ASK_LONGEST_S = 0.005, 0.125
# Connecting again.
CONNECT_FIRST_S, CONNECT_LONGEST_S = 0.05, 2.0


class Attempts:
    """When a client may connect again, and the error that its calls raise until then.

    The first attempt after a good connection begins immediately. A connection is good if the server answered something
    on it. A server without room for a connection accepts it and then closes it, so an accepted connection is not good
    enough.
    """

    def __init__(self) -> None:
        self.retry_at = 0.0  # when the next attempt may begin
        self.failure: CounterdError | None = None  # of the last attempt
        self._backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
        self._good: object = None  # the last connection that was good and has ended

    def begin(self, now: float, ended: object, was_good: bool, why: CounterdError) -> None:
        """Called before an attempt, with the connection that has ended and the reason.

        Raises ConnectionLost if the next attempt is not due yet.
        """
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
