"""The methods of the clients for the throttr protocol, for both shapes.

Stands beside the floors. No I/O. Words in capitals are requests, as docs/protocols/throttr.md has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._command import Request as Made
from counterd.client._command import Shape, command
from counterd.client._connection import as_bytes
from counterd.protocols.throttr import wire  # noqa: TC001 - what its names stand for is written into the API page
from counterd.protocols.throttr.wire import Attribute, Change, TTLType

if TYPE_CHECKING:
    from counterd.protocols.throttr.wire import ConnectionInfo, Encoder, Executed, Get, Info, Query, Request, Stat

T = TypeVar("T")


def asked(request: Request[T]) -> Made[T]:
    """A request whose result is what its parser makes of the reply."""
    return Made(request, _only)


def _only(results: list[Any]) -> Any:
    (result,) = results
    return result


def _id(id: bytes | str) -> bytes:
    return bytes.fromhex(id) if isinstance(id, str) else id


class Commands(Shape):
    """The methods of a client. Keys, channels, values and payloads are bytes, or text, which is encoded as UTF-8."""

    encoder: Encoder  # for event()

    @command
    def insert(self, key: str | bytes, quota: int, ttl: int, ttl_type: int = TTLType.SECONDS) -> Made[bool]:
        """Makes a counter (INSERT). False if there is such a key already, or no room."""
        return asked(self.encoder.insert(as_bytes(key), quota, ttl, ttl_type))

    @command
    def query(self, key: str | bytes) -> Made[Query | None]:
        """A key's quota and what is left of its TTL (QUERY), or None if there is no such key. A buffer's quota is 0."""
        return asked(self.encoder.query(as_bytes(key)))

    @command
    def update(self, key: str | bytes, attribute: int, change: int, value: int) -> Made[bool]:
        """Changes the quota or the TTL of a key (UPDATE): what the six methods below do, with their results."""
        return asked(self.encoder.update(as_bytes(key), attribute, change, value))

    @command
    def set_quota(self, key: str | bytes, quota: int) -> Made[bool]:
        """Replaces a counter's quota (UPDATE). False if there is no such key or it is a buffer."""
        return asked(self.encoder.update(as_bytes(key), Attribute.QUOTA, Change.PATCH, quota))

    @command
    def increase_quota(self, key: str | bytes, by: int) -> Made[bool]:
        """Adds to a counter's quota (UPDATE). False if there is none, or it would not fit; the reference wraps then."""
        return asked(self.encoder.update(as_bytes(key), Attribute.QUOTA, Change.INCREASE, by))

    @command
    def decrease_quota(self, key: str | bytes, by: int) -> Made[bool]:
        """Takes from a counter's quota (UPDATE). False if there is none or not as much: nothing is taken then."""
        return asked(self.encoder.update(as_bytes(key), Attribute.QUOTA, Change.DECREASE, by))

    @command
    def set_ttl(self, key: str | bytes, ttl: int) -> Made[bool]:
        """Lets a key expire ttl from now (UPDATE), in the unit it was made with. False if there is no such key."""
        return asked(self.encoder.update(as_bytes(key), Attribute.TTL, Change.PATCH, ttl))

    @command
    def extend_ttl(self, key: str | bytes, by: int) -> Made[bool]:
        """Lets a key expire later (UPDATE), in the unit it was made with. False if there is no such key."""
        return asked(self.encoder.update(as_bytes(key), Attribute.TTL, Change.INCREASE, by))

    @command
    def shorten_ttl(self, key: str | bytes, by: int) -> Made[bool]:
        """Lets a key expire earlier (UPDATE), in the unit it was made with. False if there is no such key."""
        return asked(self.encoder.update(as_bytes(key), Attribute.TTL, Change.DECREASE, by))

    @command
    def purge(self, key: str | bytes) -> Made[bool]:
        """Removes a key (PURGE). False if there is no such key."""
        return asked(self.encoder.purge(as_bytes(key)))

    @command
    def set(self, key: str | bytes, value: str | bytes, ttl: int, ttl_type: int = TTLType.SECONDS) -> Made[bool]:
        """Makes or replaces a buffer and its TTL (SET). False if the key is a counter, or there is no room."""
        return asked(self.encoder.set(as_bytes(key), as_bytes(value), ttl, ttl_type))

    @command
    def get(self, key: str | bytes) -> Made[Get | None]:
        """A key's value and what is left of its TTL (GET), or None if there is no such key. A counter's is empty."""
        return asked(self.encoder.get(as_bytes(key)))

    @command
    def list(self) -> Made[wire.Keys]:
        """All keys (LIST), in no particular order. All of them are in memory at once."""
        return asked(self.encoder.list())

    @command
    def info(self) -> Made[Info]:
        """The server's figures (INFO)."""
        return asked(self.encoder.info())

    @command
    def stat(self, key: str | bytes) -> Made[Stat | None]:
        """How often a key was read and written (STAT), or None if there is no such key."""
        return asked(self.encoder.stat(as_bytes(key)))

    @command
    def stats(self) -> Made[wire.KeyStats]:
        """How often each key was read and written (STATS), in no particular order."""
        return asked(self.encoder.stats())

    @command
    def subscribe(self, channel: str | bytes) -> Made[bool]:
        """Asks for the events of a channel (SUBSCRIBE); twice brings each twice. False if there is no room."""
        return asked(self.encoder.subscribe(as_bytes(channel)))

    @command
    def unsubscribe(self, channel: str | bytes) -> Made[bool]:
        """Ends all subscriptions of this connection to a channel (UNSUBSCRIBE). False if there was none."""
        return asked(self.encoder.unsubscribe(as_bytes(channel)))

    @command
    def publish(self, channel: str | bytes, payload: str | bytes) -> Made[bool]:
        """Sends an event to all subscribers of a channel (PUBLISH), oneself included. False if there are none."""
        return asked(self.encoder.publish(as_bytes(channel), as_bytes(payload)))

    @command
    def connections(self) -> Made[wire.Connections]:
        """All connections of the server (CONNECTIONS)."""
        return asked(self.encoder.connections())

    @command
    def connection(self, id: str | bytes) -> Made[ConnectionInfo | None]:
        """One connection (CONNECTION), or None if there is none. id: 16 bytes as of whoami(), or these in hex."""
        return asked(self.encoder.connection(_id(id)))

    @command
    def channels(self) -> Made[wire.Channels]:
        """All channels that somebody is subscribed to (CHANNELS)."""
        return asked(self.encoder.channels())

    @command
    def channel(self, channel: str | bytes) -> Made[wire.Subscribers | None]:
        """Who is subscribed to a channel (CHANNEL), or None if nobody is."""
        return asked(self.encoder.channel(as_bytes(channel)))

    @command
    def whoami(self) -> Made[bytes]:
        """This connection's id, 16 bytes (WHOAMI). In hex it is the name of its own channel."""
        return asked(self.encoder.whoami())

    @command
    def event(self, channel: str | bytes, request: Request[T]) -> Made[Executed[T] | None]:
        """Has a request of self.encoder executed, as the payload of an event (EVENT). None if that was refused."""
        return asked(self.encoder.event(as_bytes(channel), request))
