"""Clients for the throttr protocol, blocking and for asyncio. They work with the reference server, too.

Client has a method for every request, and keeps the events that the server sends until they are taken, up to a bound.
AsyncClient is the same for asyncio.

Floor: side. Needs only the wire module and counterd.errors, and works where nothing is compiled.
"""

from __future__ import annotations

import time
from asyncio import get_running_loop
from typing import TYPE_CHECKING

from counterd.client._aiolink import LOOP_CLOSED
from counterd.client._aioshared import Commanded as AioCommanded
from counterd.client._shared import Commanded
from counterd.client.throttr._keys import Commands
from counterd.errors import ConnectionLost
from counterd.protocols.throttr.wire import (
    Attribute,
    Change,
    ChannelEntry,
    ConnectionInfo,
    Event,
    Executed,
    Get,
    Info,
    KeyType,
    ListEntry,
    Query,
    Stat,
    StatsEntry,
    Subscriber,
    TTLType,
    ValueSize,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

__all__ = [
    "AsyncClient",
    "Attribute",
    "Change",
    "ChannelEntry",
    "Client",
    "ConnectionInfo",
    "Event",
    "Executed",
    "Get",
    "Info",
    "KeyType",
    "ListEntry",
    "Query",
    "Stat",
    "StatsEntry",
    "Subscriber",
    "TTLType",
    "ValueSize",
]


class Client(Commands, Commanded):
    """A connection to a server and its subscriptions, which are made again when the connection is lost.

    It connects with the first call. Use it in a `with`, or close() it. Threads may share a client. After a fork the
    connection belongs to the parent; the child connects with its first call.

    host: a host, throttr://HOST[:PORT], throttrs://HOST[:PORT] (with TLS) or throttr+unix:///PATH, or several of
    these, which are tried in order. All of them have to lead to the same server.
    port: for hosts without a port.
    path: of a Unix socket, instead of host and port.
    tls: True or an ssl.SSLContext, as in counterd.client.Client, which also says what a URL may have.
    timeout: seconds that each call may take; then it raises Timeout.
    connect_timeout: seconds for connecting to one address, and for TLS's handshake. None: the same as timeout.
    value_size: "uint8", "uint16", "uint32" or "uint64", as the server is set. Nothing on the wire says so, and with
    another size than the server's everything goes wrong in ways that need not look like it. If the first request with
    numbers is not answered, the error asks whether that is why.
    value_max: bytes of the largest value or payload that the server may send; more is a ProtocolError.
    events_max: bytes of events (channel, payload, and 150 for each) that are kept until they are taken, or one event of
    any size. Later events are left out until the kept ones were taken and next_event() has raised EventsLost; calls are
    not affected. Every connection is subscribed to `*` and to its own id, in hex.

    Keys, channels, values and payloads are bytes, or text that is sent as UTF-8. Keys and channels have up to 255
    bytes; quotas, TTLs and the sizes of values and payloads are 0 to the largest number of value_size. TTLs are whole
    units of a TTLType, seconds by default. Anything else is a ValueError, before anything is sent.

    Every call may raise Timeout, ProtocolError or ConnectionLost. A refusal (00) is a result, False or None. A call
    whose connection is lost is repeated once on a new connection if that is safe; otherwise it raises ConnectionLost.
    After a failed attempt to connect, calls fail at once until the next attempt, 0.05 to 2 s later.
    """

    def next_event(self, timeout: float | None = None) -> Event | None:
        """Returns the next event (EVENT), or None if none comes within timeout seconds. timeout=None: waits for ever.

        Each event goes to one caller. EventsLost is raised where some are missing. When the connection was lost the
        events that came before are returned first; then one call raises ConnectionLost, because events may have been
        missed; the next one connects and subscribes again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (event := self._exchange.events.take()) is None:
            link = self._connected(hears=False)
            if not link.listen(None if end is None else end - time.monotonic()) and end is not None:
                return None
        return event

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Yields events until none comes within timeout seconds, or until close(). Raises what next_event() raises."""
        while True:
            try:
                event = self.next_event(timeout)
            except ConnectionLost:
                if self._closed:
                    return
                raise
            if event is None:
                return
            yield event


class AsyncClient(Commands, AioCommanded):
    """Client for the tasks of one event loop. Use it in an `async with`, or await close().

    It has the arguments, results and errors of Client. Calls may run side by side: each is sent at once, and replies
    come in order. The reply to a call that was cancelled is still awaited, in its turn.
    """

    async def next_event(self, timeout: float | None = None) -> Event | None:
        """As Client.next_event(). A call that is cancelled takes no event."""
        loop = get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while (event := self._exchange.events.take()) is None:
            link = await self._connected(hears=False)
            if not await link.listen(None if end is None else end - loop.time()) and end is not None:
                return None
        return event

    def events(self, timeout: float | None = None) -> AsyncIterator[Event]:
        """As Client.events(). Waiting for the next event may be cancelled, and done again."""
        return _AsyncEvents(self, timeout)

    def _start_anew(self) -> None:
        super()._start_anew()
        if self._link is not None and self._link.closed == LOOP_CLOSED:
            self._exchange.lost(self._link.where, LOOP_CLOSED)


class _AsyncEvents:
    """An iterator, not a generator, because a generator ends if it is cancelled."""

    def __init__(self, client: AsyncClient, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout

    def __aiter__(self) -> _AsyncEvents:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._client.next_event(self._timeout)
        except ConnectionLost:
            if self._client._closed:
                raise StopAsyncIteration from None
            raise
        if event is None:
            raise StopAsyncIteration
        return event
