"""Decides when a client that has had permits of a contended name lets other clients go first.

A client that gives a permit back and immediately asks again would always win, because waiting clients ask only from
time to time. So a client may continue to ask immediately only for a slice of time. After the slice, the client checks
whether other clients wait. If other clients wait, this client does not ask until each of them has had a chance to ask.
If nobody took anything meanwhile, the next slice is twice as long.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio. The tenure is a step machine:
it has no clock, sends nothing and never waits. All times are seconds of the same monotonic clock.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from counterd.client._backoff import ASK_LONGEST_S

# How long a client goes on. If it is shorter, most of the time is lost to handing over, because a permit is idle until
# somebody asks. If it is longer, the others wait longer.
SLICE_S = 0.1
# A client goes on for longer while others are refused less often than this in a second. Then one client waits, and has
# waited long: to hand over to one client takes longer than to hand over to any of many.
FEW_REFUSALS_PER_S, SLICE_AMONG_FEW_S = 12, 0.25
# A slice grows up to this if nobody wants what the client leaves. Then the client is away for 5 % of the time.
SLICE_LONGEST_S = 6.4
# Every waiter asks within ASK_LONGEST_S. There is jitter, so that clients that stay away do not come back together.
AWAY_S, AWAY_LONGEST_S = ASK_LONGEST_S, 1.5 * ASK_LONGEST_S
LOOK_S = SLICE_S / 2  # between two looks of a client that stays away: it sees a client that has a permit for a slice
LONG_WAIT_S = 0.5  # a waiter that has waited so long asks twice as often, and so goes before those that begin to wait


class Seen(NamedTuple):
    """The result of a check of the server.

    room: how many requests like the caller's could be granted. refused: how many requests of other clients the server
    has refused, for any name; None if the server does not say.
    """

    room: int
    refused: int | None


class Tenure:
    """What one client has recently held of one name, and what it knows of other clients that want this name."""

    def __init__(self) -> None:
        self._holding: set[object] = set()  # the holds of this client that have permits now
        self._since: float | None = None  # the first grant of this tenure
        self._released_at: float | None = None
        self._waited = False  # this client was refused before the tenure began
        self._refused: int | None = None  # refusals of others, as seen at the last look of this tenure
        self._looked_at = 0.0
        self._slice = self._next_slice = SLICE_S
        self._away_until: float | None = None

    def granted(self, hold: object, now: float) -> None:
        self._holding.add(hold)
        self._since = now if self._since is None else self._since

    def released(self, hold: object, now: float) -> None:
        self._holding.discard(hold)
        self._released_at = now

    def refused(self) -> None:
        """Called when other clients have the permits.

        Then the client's tenure ends, unless the client still has permits.
        """
        if not self._holding:
            self._since = None
            self._waited = True

    def may_ask(self, now: float) -> bool:
        """Returns whether to ask immediately.

        If it returns False, the client checks the server, and passes the result to looked().
        """
        if self._away_until is not None:
            if now - self._away_until < AWAY_S:
                return False
            self._away_until = self._since = None  # those who waited gave up, before they could ask
        if self._since is None or self._released_at is None:
            return True
        if not self._holding and now - self._released_at > AWAY_S:  # it was away already
            self._since = self._refused = None
            self._waited = False
            return True
        return now - self._since < self._slice

    def looked(self, now: float, seen: Seen) -> float | None:
        """Takes the result of a check. Returns how many seconds to wait before the next check, or None to ask now."""
        knew, self._refused = self._refused, seen.refused
        since, self._looked_at = now - self._looked_at, now
        if seen.room < 1:  # others have taken it
            self._end(self._next_slice)
            return None
        if self._away_until is not None:
            if now < self._away_until:
                return min(LOOK_S, self._away_until - now)
            self._end(min(2 * self._slice, SLICE_LONGEST_S))
            return None
        # seen.room includes the room that this client has just left: without it there would be room for one less.
        is_full = seen.room < 2
        others_wait = self._waited if knew is None or seen.refused is None else seen.refused > knew
        self._waited = False
        if is_full and others_wait:
            is_few = knew is not None and seen.refused is not None and seen.refused - knew < FEW_REFUSALS_PER_S * since
            self._next_slice = SLICE_AMONG_FEW_S if is_few else SLICE_S
            self._away_until = now + random.uniform(AWAY_S, AWAY_LONGEST_S)
            return min(LOOK_S, self._away_until - now)
        # If there was room, another client may have given back at the same moment: the next look comes at another one.
        self._since = now if is_full else now - random.uniform(0, self._slice)
        return None

    def _end(self, next_slice: float) -> None:
        self._away_until = self._since = None
        self._slice = next_slice
