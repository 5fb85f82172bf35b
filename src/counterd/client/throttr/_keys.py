"""Code that both clients for the throttr protocol share: commands, the calls of a connection, and subscriptions.

Floor: side (ARCHITECTURE.md). No I/O and no clock. Words in capitals are requests in docs/protocols/throttr.md.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._addresses import read_addresses
from counterd.client._calls import Ordered
from counterd.client._command import Request as Made
from counterd.client._command import command
from counterd.client._connecting import Connecting
from counterd.client._connection import CLOSED, as_bytes, lost
from counterd.client.throttr._events import EVENTS_MAX, Events
from counterd.errors import OutOfMemory
from counterd.protocols.throttr import wire
from counterd.protocols.throttr.wire import Attribute, Change, Encoder, Event, TTLType, ValueSize

if TYPE_CHECKING:
    import os
    import ssl
    from collections.abc import Sequence

    from counterd.client._calls import Call
    from counterd.protocols.throttr.wire import ConnectionInfo, Executed, Get, Info, Query, Request, Stat

T = TypeVar("T")


def asked(request: Request[T]) -> Made[T]:
    """Makes a request that changes something. The result of the request is what the parser makes of the reply."""
    return Made(request, _only)


def looked(request: Request[T]) -> Made[T]:
    """Makes a request that changes nothing, or that can be repeated without another change."""
    return Made(request, _only, is_repeatable=True)


def _only(results: list[Any]) -> Any:
    (result,) = results
    return result


def _id(id: bytes | str) -> bytes:
    return bytes.fromhex(id) if isinstance(id, str) else id


class Exchange:
    """The data that a client keeps when its connection is lost: the size of numbers, events, channels, and limits."""

    def __init__(self, value_size: str | ValueSize, value_max: int, events_max: int) -> None:
        self.encoder = Encoder(ValueSize.named(value_size))
        self.value_max = value_max
        self.events = Events(events_max)
        self.channels: Counter[bytes] = Counter()  # channels that the client is subscribed to, and how often

    def calls(self) -> KeyCalls:
        """Returns the object for the calls of a new connection."""
        return KeyCalls(wire.Parser(self.encoder.size, self.value_max), self.events)

    def lost(self, where: str, why: str) -> None:
        """Called when a connection has ended. Notes the loss, unless the client was closed."""
        if why != CLOSED:
            self.events.put_loss(lost(where, f"{why}; events may be missing"))

    def greeting(self) -> list[tuple[Made[None]]]:
        """Returns the requests that subscribe a new connection."""
        return [(self._subscription(channel),) for channel in self.channels.elements()]

    def _subscription(self, channel: bytes) -> Made[None]:
        def read(results: list[Any]) -> None:
            if not _only(results):
                raise OutOfMemory(0, f"the server's memory has no room any more for the subscription to {channel!r}")

        return Made(self.encoder.subscribe(channel), read)


class KeyCalls(Ordered):
    """The calls of one connection of the throttr protocol, and the queue for its events."""

    def __init__(self, parser: wire.Parser, events: Events) -> None:
        super().__init__()
        self._parser = parser
        self._events = events

    @property
    def doubt(self) -> str:
        return self._parser.doubt

    def has_unasked(self) -> bool:
        return bool(self._events)

    def add(self, call: Call, request: Any, *_: Any) -> bytes:
        self._parser.expect(request.frame)
        return super().add(call, request)

    def feed(self, data: bytes) -> None:
        for item in self._parser.feed(data):
            self.answered = True
            if isinstance(item, Event):
                self._events.put(item)
                self.wake_listeners()
            elif self.pending:  # else a signal handler has closed the connection meanwhile
                call, result, error = self._read([item.result])
                call.settle(result, error)


class Commands(Connecting):
    """The methods of a client, blocking or for asyncio.

    Keys, channels, values and payloads are bytes, or text, which is encoded as UTF-8.
    """

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = wire.PORT,
        *,
        path: str | os.PathLike[str] | None = None,
        tls: bool | ssl.SSLContext = False,
        timeout: float = 5.0,
        connect_timeout: float | None = None,
        value_size: str | ValueSize = ValueSize.UINT16,
        value_max: int = wire.VALUE_MAX,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self._exchange = Exchange(value_size, value_max, events_max)
        addresses = read_addresses(host, port, path, "throttr", tls)
        super().__init__(addresses, timeout, connect_timeout)

    @property
    def encoder(self) -> Encoder:
        """Encodes requests for event()."""
        return self._exchange.encoder

    @command
    def insert(self, key: str | bytes, quota: int, ttl: int, ttl_type: int = TTLType.SECONDS) -> Made[bool]:
        """Creates a key with a quota (INSERT).

        Returns False if the key exists already, or if the server's memory is full.
        """
        return asked(self.encoder.insert(as_bytes(key), quota, ttl, ttl_type))

    @command
    def query(self, key: str | bytes) -> Made[Query | None]:
        """Returns the quota and the remaining TTL of a key (QUERY), or None if the key does not exist.

        The quota of a buffer is 0.
        """
        return looked(self.encoder.query(as_bytes(key)))

    @command
    def update(self, key: str | bytes, attribute: int, change: int, value: int) -> Made[bool]:
        """Changes the quota or the TTL of a key (UPDATE), as the methods from set_quota() to shorten_ttl() do."""
        return asked(self.encoder.update(as_bytes(key), attribute, change, value))

    @command
    def set_quota(self, key: str | bytes, quota: int) -> Made[bool]:
        """Replaces the quota of a key (UPDATE). Returns False if the key does not exist, or if it is a buffer."""
        return asked(self.encoder.update(as_bytes(key), Attribute.QUOTA, Change.PATCH, quota))

    @command
    def increase_quota(self, key: str | bytes, by: int) -> Made[bool]:
        """Adds to the quota of a key (UPDATE).

        Returns False if the quota does not exist. On overflow, counterd returns False, but the original Throttr server
        wraps around.
        """
        return asked(self.encoder.update(as_bytes(key), Attribute.QUOTA, Change.INCREASE, by))

    @command
    def decrease_quota(self, key: str | bytes, by: int) -> Made[bool]:
        """Subtracts from the quota of a key (UPDATE).

        Returns False and changes nothing if the quota does not exist, or if it is too small.
        """
        return asked(self.encoder.update(as_bytes(key), Attribute.QUOTA, Change.DECREASE, by))

    @command
    def set_ttl(self, key: str | bytes, ttl: int) -> Made[bool]:
        """Lets a key expire ttl units from now (UPDATE).

        The unit is the unit of the key. Returns False if the key does not exist.
        """
        return asked(self.encoder.update(as_bytes(key), Attribute.TTL, Change.PATCH, ttl))

    @command
    def extend_ttl(self, key: str | bytes, by: int) -> Made[bool]:
        """Lets a key expire later (UPDATE). The unit is that of the key. Returns False if the key does not exist."""
        return asked(self.encoder.update(as_bytes(key), Attribute.TTL, Change.INCREASE, by))

    @command
    def shorten_ttl(self, key: str | bytes, by: int) -> Made[bool]:
        """Lets a key expire earlier (UPDATE). The unit is that of the key. Returns False if the key does not exist."""
        return asked(self.encoder.update(as_bytes(key), Attribute.TTL, Change.DECREASE, by))

    @command
    def purge(self, key: str | bytes) -> Made[bool]:
        """Removes a key (PURGE). Returns False if the key does not exist."""
        return asked(self.encoder.purge(as_bytes(key)))

    @command
    def set(self, key: str | bytes, value: str | bytes, ttl: int, ttl_type: int = TTLType.SECONDS) -> Made[bool]:
        """Creates or replaces a buffer and its TTL (SET).

        Returns False if the key has a quota, or if the server's memory is full.
        """
        return asked(self.encoder.set(as_bytes(key), as_bytes(value), ttl, ttl_type))

    @command
    def get(self, key: str | bytes) -> Made[Get | None]:
        """Returns the value and the remaining TTL of a key (GET), or None if the key does not exist.

        The value of a quota is b"".
        """
        return looked(self.encoder.get(as_bytes(key)))

    @command
    def list(self) -> Made[wire.Keys]:
        """Returns all keys (LIST), in no particular order. The whole list is kept in memory."""
        return looked(self.encoder.list())

    @command
    def info(self) -> Made[Info]:
        """Returns the server's statistics (INFO)."""
        return looked(self.encoder.info())

    @command
    def stat(self, key: str | bytes) -> Made[Stat | None]:
        """Returns how often a key was read and written (STAT), or None if the key does not exist."""
        return looked(self.encoder.stat(as_bytes(key)))

    @command
    def stats(self) -> Made[wire.KeyStats]:
        """Returns how often each key was read and written (STATS), in no particular order."""
        return looked(self.encoder.stats())

    @command
    def subscribe(self, channel: str | bytes) -> Made[bool]:
        """Subscribes to a channel (SUBSCRIBE). Returns False if the server's memory is full.

        With two subscriptions to a channel, each event arrives twice. A client that reconnects subscribes again.
        """
        name = as_bytes(channel)

        def read(results: list[Any]) -> bool:
            if is_subscribed := bool(_only(results)):
                self._exchange.channels[name] += 1
            return is_subscribed

        return Made(self.encoder.subscribe(name), read, is_repeatable=True)

    @command
    def unsubscribe(self, channel: str | bytes) -> Made[bool]:
        """Ends all subscriptions of this client to a channel (UNSUBSCRIBE).

        Returns False if there was no subscription.
        """
        name = as_bytes(channel)

        def read(results: list[Any]) -> bool:
            self._exchange.channels.pop(name, None)
            return bool(_only(results))

        return Made(self.encoder.unsubscribe(name), read, is_repeatable=True)

    @command
    def publish(self, channel: str | bytes, payload: str | bytes) -> Made[bool]:
        """Sends an event to all subscribers of a channel (PUBLISH).

        This client can be one of the subscribers. Returns False if the channel has no subscribers.
        """
        return asked(self.encoder.publish(as_bytes(channel), as_bytes(payload)))

    @command
    def connections(self) -> Made[wire.Connections]:
        """Returns all connections of the server (CONNECTIONS)."""
        return looked(self.encoder.connections())

    @command
    def connection(self, id: str | bytes) -> Made[ConnectionInfo | None]:
        """Returns a connection (CONNECTION), or None if the connection does not exist.

        id: 16 bytes, as whoami() returns, or the same in hex.
        """
        return looked(self.encoder.connection(_id(id)))

    @command
    def channels(self) -> Made[wire.Channels]:
        """Returns all channels that have subscribers (CHANNELS)."""
        return looked(self.encoder.channels())

    @command
    def channel(self, channel: str | bytes) -> Made[wire.Subscribers | None]:
        """Returns the subscribers of a channel (CHANNEL), or None if the channel has none."""
        return looked(self.encoder.channel(as_bytes(channel)))

    @command
    def whoami(self) -> Made[bytes]:
        """Returns the id of this connection, 16 bytes (WHOAMI).

        In hex, this id is the name of the connection's own channel.
        """
        return looked(self.encoder.whoami())

    @command
    def event(self, channel: str | bytes, request: Request[T]) -> Made[Executed[T] | None]:
        """Makes the server execute a request of client.encoder as the payload of an event (EVENT).

        Returns None if the server refused the request.
        """
        return asked(self.encoder.event(as_bytes(channel), request))

    # ---- connections ----

    def _make_calls(self) -> KeyCalls:
        return self._exchange.calls()

    def _first_requests(self) -> Sequence[tuple[Made[None]]]:
        return self._exchange.greeting()

    def _on_end(self, link: Any) -> None:
        if link is self._link:  # else no call has used it
            self._exchange.lost(link.where, link.closed)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._exchange.events.clear()  # they belong to the parent
