"""Measures, with a periodic timer, how late the event loop runs its timers.

Floor 4 (ARCHITECTURE.md). The same timer notifies systemd's watchdog, because an event loop that does not reach its
timers serves no requests.
"""

from __future__ import annotations

import bisect
import time
from typing import TYPE_CHECKING

from counterd.net.server import Histogram

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

PERIOD_S = 0.1
PERIOD_MIN_S = 0.01  # a shorter watchdog period would take much CPU, and fail at the first long turn of the loop
# Seconds. The loop's timers have a resolution of 1 ms, so the beats of an idle loop are in the first two buckets.
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class LoopLagMonitor:
    """Runs its timer every PERIOD_S from start() to stop(), or more often if the watchdog needs that.

    feed: called every feed_s seconds, or every PERIOD_MIN_S if feed_s is less; never called if feed_s is 0. last: how
    many seconds late the timer last ran. max: the largest such delay.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, feed: Callable[[], object], feed_s: float = 0.0) -> None:
        self.last = self.max = 0.0
        self._loop = loop
        self._feed = feed
        self._feed_ns = int(feed_s * 1e9)
        self._period_s = max(min(PERIOD_S, feed_s), PERIOD_MIN_S) if feed_s else PERIOD_S
        self._fed_ns = 0
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Calls feed, and starts the timer."""
        self._wait(time.monotonic_ns())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def histogram(self) -> Histogram:
        """Returns the histogram of how late the timer ran, in seconds."""
        return Histogram(BOUNDS, tuple(self._counts), self._sum)

    def _beat(self) -> None:
        now = time.monotonic_ns()
        late = self.last = max(0, now - self._due_ns) / 1e9
        self.max = max(self.max, late)
        self._counts[bisect.bisect_left(BOUNDS, late)] += 1
        self._sum += late
        self._wait(now)

    def _wait(self, now: int) -> None:
        if self._feed_ns and now - self._fed_ns >= self._feed_ns:
            self._fed_ns = now
            self._feed()
        self._due_ns = now + int(self._period_s * 1e9)
        self._timer = self._loop.call_later(self._period_s, self._beat)
