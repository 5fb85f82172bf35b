"""Serves /events: streams of figures and of a table, for pages in browsers. All pages that show the same data share one
question to the daemon.

Floor: side (ARCHITECTURE.md). There is no queue: a slow reader misses old states and gets only the latest state. At
most LISTENERS_MAX streams are open. When one more stream is opened, the oldest stream of the address with the most
streams is ended. So no address can keep other addresses from getting a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from counterd.ipc import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

LISTENERS_MAX = 16
STATS_PERIOD_S = 1.0
TABLE_PERIOD_S = 2.0
RETRY_MS = 2000  # the time after which a browser connects again


def event(name: str, data: bytes) -> bytes:
    """Formats an event of a stream. data: JSON, which has no raw line breaks, so each event has one line of data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class Feed:
    """A question that the daemon is asked in each period while somebody listens, and the latest answer."""

    def __init__(self, name: str, period: float, fetch: Callable[[], Awaitable[bytes]]) -> None:
        self.latest = b""
        self.listeners: set[Listener] = set()
        self._name = name
        self._period = period
        self._fetch = fetch
        self._task: asyncio.Task[None] | None = None

    def join(self, listener: Listener) -> None:
        self.listeners.add(listener)
        if self.latest:
            listener.tell(self)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def leave(self, listener: Listener) -> None:
        self.listeners.discard(listener)
        if not self.listeners and self._task is not None:
            self._task.cancel()
            self._task = None
            self.latest = b""

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(Refused):  # the daemon is busy or ending: try again after the period
                self.latest = event(self._name, await self._fetch())
                for listener in self.listeners:
                    listener.tell(self)
            await asyncio.sleep(self._period)


class Listener:
    """One stream, which knows which of its feeds have news.

    address: the address of the reader. cut: ends the connection.
    """

    def __init__(self, address: str, cut: Callable[[], None]) -> None:
        self.address = address
        self._cut = cut
        self._has_ended = False
        self._news: dict[Feed, None] = {}
        self._awake = asyncio.Event()

    def tell(self, feed: Feed) -> None:
        self._news[feed] = None
        self._awake.set()

    def end(self) -> None:
        """Ends the stream, because another stream needs its place.

        Closes the connection immediately, because the reader may have stopped reading.
        """
        self._has_ended = True
        self._awake.set()
        self._cut()

    async def next(self) -> bytes:
        """Waits for news. Returns the latest event of each feed that has a new answer.

        Raises ConnectionResetError if the stream was ended.
        """
        await self._awake.wait()
        if self._has_ended:
            raise ConnectionResetError("another stream took its place")
        self._awake.clear()
        news, self._news = self._news, {}
        return b"".join(feed.latest for feed in news)


class Hub:
    """All open streams.

    stats: asks the daemon for the figures. table: asks the daemon for a table, by its name and parameters.
    """

    def __init__(
        self, stats: Callable[[], Awaitable[bytes]], table: Callable[[str, Mapping[str, str]], Awaitable[bytes]]
    ) -> None:
        self.listeners: list[Listener] = []  # in the order of their beginning
        self._stats = Feed("stats", STATS_PERIOD_S, stats)
        self._table = table
        self._tables: dict[tuple[str, tuple[tuple[str, str], ...]], Feed] = {}

    def feeds(self, table: str | None, parameters: Mapping[str, str]) -> list[Feed]:
        """Returns the feeds of a stream: the figures, and the table if the stream has one."""
        if table is None:
            return [self._stats]
        key = (table, tuple(sorted(parameters.items())))
        if key not in self._tables:
            self._tables[key] = Feed("table", TABLE_PERIOD_S, lambda: self._table(table, parameters))
        return [self._stats, self._tables[key]]

    @contextlib.contextmanager
    def listen(
        self, table: str | None, parameters: Mapping[str, str], address: str, cut: Callable[[], None]
    ) -> Iterator[Listener]:
        """Adds a listener to its feeds while the block runs."""
        listener = Listener(address, cut)
        feeds = self.feeds(table, parameters)
        self.listeners.append(listener)
        if len(self.listeners) > LISTENERS_MAX:
            ((greediest, _),) = Counter(one.address for one in self.listeners).most_common(1)
            oldest = next(one for one in self.listeners if one.address == greediest)
            self.listeners.remove(oldest)
            oldest.end()
        try:
            for feed in feeds:
                feed.join(listener)
            yield listener
        finally:
            if listener in self.listeners:  # otherwise it was ended in favour of another one
                self.listeners.remove(listener)
            for feed in feeds:
                feed.leave(listener)
            self._tables = {key: feed for key, feed in self._tables.items() if feed.listeners}
