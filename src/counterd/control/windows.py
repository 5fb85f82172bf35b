"""Gives a store the wall-clock time, and begins the store's stats windows at multiples of an interval.

Floor 4 (ARCHITECTURE.md). Each window gets the next number, so the numbers rise even if the clock or the interval
changes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from counterd.control.parts import Part

if TYPE_CHECKING:
    import asyncio

    from counterd.contract import WindowedStore
    from counterd.control.parts import Ready
    from counterd.net.server import Server

# How often the wall clock is read. It can be set at any time.
CHECK_S = 1.0


class Windows(Part):
    """The wall clock of one store.

    interval: the length of the store's stats windows in seconds; 0 for a store without windows.
    """

    def __init__(self, server: Server, interval: int) -> None:
        self._server = server
        self._number = 0
        self._interval = interval
        self._period = self._period_at(time.time())
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self.check()

    def apply(self, ready: Ready) -> None:
        """Changes the interval of the windows. The current window ends at the next multiple of the new interval."""
        if ready.window != self._interval:
            self.stop()
            self._interval = ready.window
            self._period = self._period_at(time.time())
            self.check()

    def check(self) -> None:
        """Gives the store the time, begins a window if a multiple of the interval has passed, and sets the timer for
        the next window."""
        now = time.time()
        self._server.store.set_wall(time.time_ns(), time.monotonic_ns())
        period = self._period_at(now)
        if self._interval and (period > self._period or self._number == 0):
            self._number += 1
            cast("WindowedStore", self._server.store).begin_window(self._number)
            self._server.driver.wake()
        self._period = period  # smaller if the clock was set back. The next multiple still begins a window.
        wait = min(CHECK_S, max(0.001, (period + 1) * self._interval - now)) if self._interval else CHECK_S
        self._timer = self._server.loop.call_later(wait, self.check)

    def _period_at(self, now: float) -> int:
        return int(now // self._interval) if self._interval else 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
