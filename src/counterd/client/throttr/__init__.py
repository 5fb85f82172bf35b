"""Clients for the throttr protocol, blocking and for asyncio. The throttr clients also work with the original Throttr
server.

Client has a method for every request. Client keeps the events that the server sends until the program takes them, up to
a limit. AsyncClient has the same methods for asyncio.

Floor: side (ARCHITECTURE.md). The package needs only the wire module and counterd.errors, and works without any
compiled module.
"""

from __future__ import annotations

import time
from asyncio import get_running_loop
from typing import TYPE_CHECKING

from counterd.client._tasklink import LOOP_CLOSED
from counterd.client._tasks import Commanded as AioCommanded
from counterd.client._threads import Commanded
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
    """A connection to a server, and its subscriptions. If the connection is lost, the client connects and subscribes
    again.

    The client connects with its first call. Use the client in a `with`, or close() it. Threads may share a client.
    After a fork the connection belongs to the parent; the child connects with its first call.

    host: a host, throttr://HOST[:PORT], throttrs://HOST[:PORT] (with TLS) or throttr+unix:///PATH, or several of these,
    which are tried in order. All of them must lead to the same server.
    port: the port for hosts without a port.
    path: the path of a Unix socket, in place of host and port.
    tls: True or an ssl.SSLContext, as for counterd.client.Client, which also describes URLs.
    timeout: how many seconds each call may take; then the call raises Timeout.
    connect_timeout: how many seconds connecting to one address may take, and the TLS handshake. None means the same as
    timeout.
    value_size: the server's throttr.value_size: "uint8", "uint16", "uint32" or "uint64". The server does not send its
    value_size. If the client uses another one, replies are misread, and the errors can look unrelated. If the first
    request with numbers gets no reply, the error mentions value_size as a possible reason.
    value_max: how many bytes the largest value or payload from the server may have; a larger one raises ProtocolError.
    events_max: how many bytes of events (channel, payload, and 150 for each event) are kept until the program takes
    them. One event of any size is always kept. When the limit is reached, later events are dropped until the program
    has taken the kept events and next_event() has raised EventsLost. Calls are not affected. The server subscribes
    every connection to `*` and to the connection's own id, in hex.

    Keys, channels, values and payloads are bytes, or text that is sent as UTF-8. Keys and channels have up to 255
    bytes. Quotas, TTLs and the sizes of values and payloads are 0 to the largest number of value_size. A TTL is a whole
    number of a TTLType, which is seconds by default. Other arguments raise ValueError before anything is sent.

    Every call may raise Timeout, ProtocolError or ConnectionLost. If the server refuses a request (00), the result is
    False or None. If the connection is lost during a call, the call is repeated once on a new connection, if that is
    safe. Otherwise it raises ConnectionLost. After a failed attempt to connect, calls fail immediately until the next
    attempt, 0.05 to 2 s later.
    """

    def next_event(self, timeout: float | None = None) -> Event | None:
        """Returns the next event (EVENT), or None if there is no event within timeout seconds. timeout=None waits for
        ever.

        Each event is returned to one caller only. If events are missing at some point, EventsLost is raised there. When
        the connection was lost, the events that arrived before are returned first. Then one call raises ConnectionLost,
        because events may be missing. The next call connects and subscribes again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (event := self._exchange.events.take()) is None:
            link = self._connected(report_loss=False)
            if not link.listen(None if end is None else end - time.monotonic()) and end is not None:
                return None
        return event

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Yields events until there is no event within timeout seconds, or until close().

        Raises the exceptions of next_event().
        """
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
    """The Client for the tasks of one event loop. Use the client in an `async with`, or await close().

    AsyncClient has the same arguments, results and errors as Client. Calls may run at the same time: each request is
    sent immediately, and replies arrive in order. The client still waits for the reply to a cancelled call before it
    can answer later calls.
    """

    async def next_event(self, timeout: float | None = None) -> Event | None:
        """Does the same as Client.next_event(). A cancelled call takes no event."""
        loop = get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while (event := self._exchange.events.take()) is None:
            link = await self._connected(report_loss=False)
            if not await link.listen(None if end is None else end - loop.time()) and end is not None:
                return None
        return event

    def events(self, timeout: float | None = None) -> AsyncIterator[Event]:
        """Does the same as Client.events(). You can cancel the wait for the next event, and wait again."""
        return _AsyncEvents(self, timeout)

    def _start_anew(self) -> None:
        super()._start_anew()
        if self._link.closed == LOOP_CLOSED:
            self._exchange.lost(self._link.where, LOOP_CLOSED)


class _AsyncEvents:
    """An iterator over events. The iterator is not a generator, because a generator ends if it is cancelled."""

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
