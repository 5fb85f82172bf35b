"""Clients for the throttr protocol, blocking and for asyncio: counterd's own, and good for the reference as well.

Replies tell nothing of what they answer, so a connection that got out of step is closed and never used again. Events,
which the server sends unasked, are kept until they are taken, up to a bound.

Stands beside the floors: needs the wire module and counterd.errors only, and works where nothing is compiled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar, cast

from counterd.client._addresses import read_addresses
from counterd.client._command import Awaiting, Blocking
from counterd.client._connection import (
    CLOSED,
    Connection,
    DeadlinePassed,
    cannot_connect,
    closed_by_server,
    lost,
    no_connection,
    not_accepted,
    not_answered,
    open_transport,
    too_late,
)
from counterd.client._events import EVENTS_MAX, Events
from counterd.client._keys import Commands
from counterd.errors import ConnectionLost, CounterdError, ProtocolError
from counterd.protocols.throttr import wire
from counterd.protocols.throttr.wire import (
    Attribute,
    Change,
    ChannelEntry,
    ConnectionInfo,
    Encoder,
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
    import os
    import ssl
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from types import TracebackType

    from counterd.client._addresses import Address
    from counterd.client._command import Request

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

PORT = 9000
# Seconds that taking what is there already may take: poll() counts milliseconds, and a deadline of now is over at once.
_AT_ONCE = 0.001

T = TypeVar("T")


def _address(host: str, port: int, path: str | os.PathLike[str] | None, tls: bool | ssl.SSLContext) -> Address:
    return read_addresses(host, port, path, "throttr", tls)[0]


class Client(Commands, Connection, Blocking):
    """One connection to a server, and its subscriptions. Not thread-safe: one Client for each thread.

    Connects at once; use it in a `with`, or close() it.
    host: a host, throttr://HOST[:PORT], throttrs://HOST[:PORT] (with TLS) or throttr+unix:///PATH.
    port: for a host without one.
    path: of a Unix socket, instead of host and port.
    tls: True or an ssl.SSLContext, as with counterd.client.Client, and so is what may follow in a URL.
    timeout: seconds that connecting to an address may take, TLS's handshake, and then each call as a whole.
    value_size: "uint8", "uint16", "uint32" or "uint64", as the server is set. Nothing on the wire tells, so with
    another than the server's everything goes wrong in ways that need not look like it. Where the first request with
    numbers is not answered, the error asks whether that is why.
    value_max: bytes of the largest value or payload that the server may send; more is a ProtocolError.
    events_max: bytes of events (channel, payload, and 150 for each) that are kept until they are taken, or one event of
    any size. Beyond that further ones are left out, until those kept were taken and next_event() has raised EventsLost;
    calls are not affected. Every connection is subscribed to `*` and to its own id, in hex.

    Keys, channels, values and payloads are bytes, or text that is sent as UTF-8. Keys and channels have up to 255
    bytes; quotas, TTLs and the sizes of values and payloads are 0 to the largest number of value_size. TTLs are whole
    units of a TTLType, seconds unless told. Anything else is a ValueError, before anything is sent.

    Every call may raise Timeout, ProtocolError or ConnectionLost. After each of these, or if it is interrupted, the
    connection is closed, and later calls raise ConnectionLost. A refusal (00) is a result, False or None.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        timeout: float = 5.0,
        value_size: str | ValueSize = ValueSize.UINT16,
        value_max: int = wire.VALUE_MAX,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self.encoder = Encoder(ValueSize.named(value_size))  # for event()
        self._parser = wire.Parser(self.encoder.size, value_max)
        self._events = Events(events_max)
        self._results: list[Any] = []  # of replies that were received; at most one, as one call is under way
        super().__init__(_address(host, port, path, tls), timeout)

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event (EVENT), or None if none comes within timeout seconds. 0: only if it is here; None: waits.

        Events that came during calls are next; EventsLost is raised where some are missing, and calling again goes on
        after them. When the connection is lost those that came before are still told, then it is ConnectionLost.
        """
        deadline = math.inf if timeout is None else time.monotonic() + max(timeout, _AT_ONCE)
        while (event := self._events.take()) is None:
            with self._exchange():
                try:
                    self._receive(deadline)
                except DeadlinePassed:
                    return None
        return event

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events as they come, until none comes within timeout seconds, or close(). Raises what next_event() does."""
        while True:
            try:
                event = self.next_event(timeout)
            except ConnectionLost:
                if self._closed == CLOSED:
                    return
                raise
            if event is None:
                return
            yield event

    def _run_command(self, request: Request[Any]) -> Any:
        with self._exchange() as deadline:
            self._parser.expect(request.frame)
            self._send(request.frame, deadline)
            while not self._results:
                self._receive(deadline)
            results, self._results = self._results, []
            return request.read(results)

    def _doubt(self) -> str:
        return self._parser.doubt

    def _received(self, data: bytes) -> None:
        for item in self._parser.feed(data):
            if isinstance(item, Event):
                self._events.put(item)
            else:
                self._results.append(item.result)


# ---- asyncio ----


class _Link(asyncio.Protocol):
    """The connection of an AsyncClient: calls that wait for their turn or for their reply, in order."""

    def __init__(self, where: str, parser: wire.Parser, timeout: float, events_max: int) -> None:
        self.where = where
        self.closed = ""  # why there is no connection any more
        self.events = Events(events_max)
        self._parser = parser
        self._timeout = timeout
        self._transport: asyncio.Transport | None = None
        self._gone: asyncio.Future[None] | None = None
        self._paused = False
        self._unsent: deque[tuple[bytes, asyncio.Future[Any]]] = deque()
        self._unanswered: deque[asyncio.Future[Any]] = deque()  # those of cancelled calls too: their replies come
        self._waiting: set[asyncio.Future[None]] = set()  # for events, or for the end

    def check(self) -> None:
        if self.closed:
            raise no_connection(self.where, self.closed)
        if self._transport is None:
            raise ConnectionLost(f"there is no connection to {self.where} yet: connect() makes it")

    async def call(self, request: bytes) -> Any:
        """Sends the request when those before have gone out, and waits for the result."""
        self.check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        timer = loop.call_later(self._timeout, self._expire, future)
        self._unsent.append((request, future))
        self._flush()
        try:
            return await future
        finally:
            timer.cancel()

    async def next_event(self, timeout: float | None) -> Event | None:
        loop = asyncio.get_running_loop()
        deadline = math.inf if timeout is None else loop.time() + timeout
        while (event := self.events.take()) is None:
            self.check()
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.add(waiter)
            left = deadline - loop.time()
            try:
                await asyncio.wait((waiter,), timeout=None if left == math.inf else max(left, 0))
            finally:
                self._waiting.discard(waiter)
            if not waiter.done():
                return None
        return event

    def drop(self, why: str, error: Callable[[], CounterdError] | None = None) -> None:
        """Ends the connection. Calls that have no reply yet raise error, or ConnectionLost."""
        if self.closed:
            return
        self.closed = why
        futures = [future for _, future in self._unsent] + list(self._unanswered)
        for future in futures:
            if not future.done():
                future.set_exception(error() if error else lost(self.where, why))
        self._unsent.clear()
        self._unanswered.clear()
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    async def gone(self) -> None:
        """Returns when the socket is closed."""
        if self._gone is not None:
            await asyncio.shield(self._gone)

    # ---- what the loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not of its class
        self._gone = asyncio.get_running_loop().create_future()
        if self.closed:  # while it was connecting
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            items = self._parser.feed(data)
        except ProtocolError as error:
            why = str(error)
            self.drop(why, lambda: ProtocolError(why))
            return
        for item in items:
            if isinstance(item, Event):
                self.events.put(item)
                self._wake()
            else:
                future = self._unanswered.popleft()
                if not future.done():
                    future.set_result(item.result)

    def eof_received(self) -> None:
        doubt = self._parser.doubt
        self.drop("the server closed it", lambda: closed_by_server(self.where, doubt))

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(str(error or "it was closed"))
        assert self._gone is not None
        self._gone.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    # ---- inside ----

    def _flush(self) -> None:
        assert self._transport is not None
        while self._unsent and not self._paused:
            request, future = self._unsent.popleft()
            if not future.done():  # what was cancelled before its turn is not sent
                self._parser.expect(request)
                self._unanswered.append(future)
                self._transport.write(request)

    def _expire(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(not_answered(self.where, self._timeout, self._parser.doubt))
            self.drop(too_late(self._timeout))

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


class _EventIterator:
    """What AsyncClient.events() returns: it holds nothing, so it may be left at any time."""

    def __init__(self, link: _Link) -> None:
        self._link = link

    def __aiter__(self) -> _EventIterator:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._link.next_event(None)
        except ConnectionLost:
            if self._link.closed == CLOSED:
                raise StopAsyncIteration from None
            raise
        assert event is not None
        return event


class AsyncClient(Commands, Awaiting):
    """What Client is, for asyncio: `async with AsyncClient(...) as client`, or connect() and close().

    The arguments and results are those of Client, and so are the errors. Calls may run side by side on one connection:
    each is sent at once, and replies come in order, so a call's timeout covers those before it too. A call that is
    cancelled before it was sent is not sent; after that its reply is still awaited in its turn, and the connection
    goes on. A call that is not answered in time closes the connection: all others under way raise ConnectionLost.
    Not thread-safe: it belongs to the loop it was connected in.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = PORT,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        timeout: float = 5.0,
        value_size: str | ValueSize = ValueSize.UINT16,
        value_max: int = wire.VALUE_MAX,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self.encoder = Encoder(ValueSize.named(value_size))  # for event()
        self._address = _address(host, port, path, tls)
        self._timeout = timeout
        parser = wire.Parser(self.encoder.size, value_max)
        self._link = _Link(str(self._address), parser, timeout, events_max)
        self._connecting = False

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Makes the connection, once: a client that was closed is not opened again. Timeout or ConnectionLost."""
        if self._connecting:
            self._link.check()
            return
        self._connecting = True
        link = self._link
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(open_transport(loop, link, self._address), self._timeout)
        except (TimeoutError, asyncio.TimeoutError):
            link.drop("it was not accepted")
            raise not_accepted(link.where, self._timeout) from None
        except OSError as error:
            link.drop(str(error))
            raise cannot_connect(link.where, error) from error
        except BaseException:
            link.drop("connecting was interrupted")
            raise
        link.check()

    async def close(self) -> None:
        """Ends the connection and its subscriptions; calls under way raise ConnectionLost. May be done again."""
        self._link.drop(CLOSED)
        await self._link.gone()

    def _run_command(self, request: Request[Any]) -> Coroutine[Any, Any, Any]:
        return self._link.call(request.frame)

    async def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event (EVENT), as Client.next_event() tells it. Several may wait; each event goes to one of them.

        Cancelling it loses none.
        """
        return await self._link.next_event(timeout)

    def events(self) -> AsyncIterator[Event]:
        """Events as they come, until close(): `async for event in client.events()`. Raises what next_event() does.

        After EventsLost it goes on, or another does.
        """
        return _EventIterator(self._link)
