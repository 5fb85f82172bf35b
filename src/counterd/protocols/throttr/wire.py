"""The client's side of the throttr protocol: encodes requests, and parses replies and events.

Floor 2 (ARCHITECTURE.md), pure Python: this file needs only the standard library and counterd.errors. The file uses no
sockets, and works without compiled modules. Names of requests are those of the protocol document;
docs/protocols/throttr.md has every layout. All integers on the wire are unsigned and little-endian. N is the width of
quotas, TTLs and sizes, in bytes. N is not sent, so both sides must be configured with the same N. Encoders raise
ValueError for invalid arguments; the parser raises ProtocolError.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from counterd.errors import ProtocolError

PORT = 9000  # TCP, by default
KEY_MAX = 255  # bytes of a key or of a channel's name
ID_SIZE = 16  # bytes of a connection's id
# The default limit for bytes of a value or payload: bounds the memory that a faulty server can make a client use.
VALUE_MAX = 64 << 20
# The most entries in one fragment, and the highest count. Servers send some hundred entries in a fragment, and no
# server has 2^32 keys: a larger number means that other bytes were read as a count.
FRAGMENT_ENTRIES_MAX = 1 << 16
COUNT_MAX = 1 << 32
_SHOWN = 12  # bytes of a reply that an error shows
_BLOCK_ENTRIES = 1 << 10  # entries without names that are parsed together

_U64 = struct.Struct("<Q")
_FRAGMENT = struct.Struct("<QQ")
_STAT = struct.Struct("<4Q")
_STATS_ENTRY = struct.Struct("<B4Q")
_CHANNELS_ENTRY = struct.Struct("<B3Q")
_SUBSCRIBER = struct.Struct("<16s3Q")
_CONNECTION = struct.Struct("<16sBBB16sH25Q")
_INFO = struct.Struct("<52Q16s")

T_co = TypeVar("T_co", covariant=True)


class ValueSize(IntEnum):
    """N, the bytes of every quota, TTL and size (section "Dynamic Value Size").

    The names are those of the server's setting.
    """

    UINT8 = 1
    UINT16 = 2
    UINT32 = 4
    UINT64 = 8

    @classmethod
    def named(cls, name: str | ValueSize) -> ValueSize:
        """Converts "uint8", "uint16", "uint32", "uint64" or a ValueSize to a ValueSize. Raises ValueError."""
        for size in cls:
            if name == size or name == size.name.lower():
                return size
        raise ValueError(f"value_size must be uint8, uint16, uint32 or uint64, not {name!r}")

    @property
    def maximum(self) -> int:
        """The largest number that N bytes can hold."""
        return (1 << 8 * self) - 1


class Opcode(IntEnum):
    """The opcodes of requests (section "Request types"). EVENT is also the first byte of an event from the server."""

    INSERT = 0x01
    QUERY = 0x02
    UPDATE = 0x03
    PURGE = 0x04
    SET = 0x05
    GET = 0x06
    LIST = 0x07
    INFO = 0x08
    STAT = 0x09
    STATS = 0x10
    SUBSCRIBE = 0x11
    UNSUBSCRIBE = 0x12
    PUBLISH = 0x13
    CONNECTIONS = 0x14
    CONNECTION = 0x15
    CHANNELS = 0x16
    CHANNEL = 0x17
    WHOAMI = 0x18
    EVENT = 0x19


class TTLType(IntEnum):
    """The units of a TTL (section "TTL Types")."""

    NANOSECONDS = 1
    MICROSECONDS = 2
    MILLISECONDS = 3
    SECONDS = 4
    MINUTES = 5
    HOURS = 6


TTL_UNITS_NS: dict[int, int] = {  # the longest first
    TTLType.HOURS: 3_600_000_000_000,
    TTLType.MINUTES: 60_000_000_000,
    TTLType.SECONDS: 1_000_000_000,
    TTLType.MILLISECONDS: 1_000_000,
    TTLType.MICROSECONDS: 1_000,
    TTLType.NANOSECONDS: 1,
}


def ttl_units(ttl: float, most: int) -> tuple[int, int]:
    """Converts seconds to a TTL type and a number of its units, at most `most`. Raises ValueError if no unit fits."""
    ttl_ns = round(ttl * 1e9)
    for ttl_type, unit_ns in TTL_UNITS_NS.items():
        if ttl_ns % unit_ns == 0 and 0 < ttl_ns // unit_ns <= most:
            return ttl_type, ttl_ns // unit_ns
    raise ValueError(f"a TTL of {ttl:g} s is not 1 to {most:,} units of any TTL type")


class Attribute(IntEnum):
    """The attributes that an UPDATE can change."""

    QUOTA = 0
    TTL = 1


class Change(IntEnum):
    """How an UPDATE changes an attribute. PATCH replaces its value."""

    PATCH = 0
    INCREASE = 1
    DECREASE = 2


class KeyType(IntEnum):
    """The type of a key in LIST."""

    COUNTER = 0
    BUFFER = 1


class ConnectionType(IntEnum):
    """The type of a connection in CONNECTION. The original Throttr server also has agents, counterd does not."""

    CLIENT = 0
    AGENT = 1


class ConnectionKind(IntEnum):
    """The transport of a connection in CONNECTION."""

    TCP = 0
    UNIX = 1


# ---- results of replies ----
# A server may send unknown types (ttl_type, key_type, type, kind). Known ones are enum members, others plain numbers.


class Query(NamedTuple):
    """The result of QUERY: the quota, and the remaining TTL in whole units of ttl_type. The quota of a buffer is 0."""

    quota: int
    ttl_type: int
    ttl: int


class Get(NamedTuple):
    """The result of GET: the remaining TTL in whole units of ttl_type, and the value. The value of a quota is empty."""

    ttl_type: int
    ttl: int
    value: bytes


class Stat(NamedTuple):
    """The result of STAT: how many requests read and wrote a key, in a minute and since the key was made."""

    reads_per_minute: int
    writes_per_minute: int
    reads: int
    writes: int


class ListEntry(NamedTuple):
    """One key in the result of LIST. expires_at: Unix nanoseconds. bytes_used: N for a quota, the size of a buffer."""

    key: bytes
    key_type: int
    ttl_type: int
    expires_at: int
    bytes_used: int


class StatsEntry(NamedTuple):
    """One key in the result of STATS, with the figures of STAT."""

    key: bytes
    reads_per_minute: int
    writes_per_minute: int
    reads: int
    writes: int


class ChannelEntry(NamedTuple):
    """One channel in the result of CHANNELS, with the bytes delivered to its subscribers (read) and published to it
    (write)."""

    channel: bytes
    read_bytes: int
    write_bytes: int
    subscriptions: int


class Subscriber(NamedTuple):
    """One subscription in the result of CHANNEL. id: 16 bytes, as from WHOAMI. subscribed_at: Unix nanoseconds.

    read_bytes: bytes that the subscriber got from the channel. write_bytes: bytes that it published to the channel.
    """

    id: bytes
    subscribed_at: int
    read_bytes: int
    write_bytes: int


class ConnectionInfo(NamedTuple):
    """One connection in the result of CONNECTION and CONNECTIONS. id: 16 bytes. ip: empty for a Unix socket, cut at 16
    characters.

    connected_at: Unix nanoseconds. *_requests: requests by name. *_bytes: bytes.
    """

    id: bytes
    type: int
    kind: int
    ip_version: int
    ip: str
    port: int
    connected_at: int
    read_bytes: int
    write_bytes: int
    published_bytes: int
    received_bytes: int
    allocated_bytes: int
    consumed_bytes: int
    insert_requests: int
    set_requests: int
    query_requests: int
    get_requests: int
    update_requests: int
    purge_requests: int
    list_requests: int
    info_requests: int
    stat_requests: int
    stats_requests: int
    publish_requests: int
    subscribe_requests: int
    unsubscribe_requests: int
    connections_requests: int
    connection_requests: int
    channels_requests: int
    channel_requests: int
    whoami_requests: int


class Info(NamedTuple):
    """The result of INFO: 52 numbers and the server's version, in the order of the document.

    timestamp: Unix seconds. running_since: Unix nanoseconds. *_requests: totals by the name of the request. Where the
    document has a name twice ("TOTAL CHANNELS", "TOTAL CONNECTIONS"), the field without "requests" is the current
    number.
    """

    timestamp: int
    requests: int
    requests_per_minute: int
    insert_requests: int
    insert_per_minute: int
    query_requests: int
    query_per_minute: int
    update_requests: int
    update_per_minute: int
    purge_requests: int
    purge_per_minute: int
    get_requests: int
    get_per_minute: int
    set_requests: int
    set_per_minute: int
    list_requests: int
    list_per_minute: int
    info_requests: int
    info_per_minute: int
    stats_requests: int
    stats_per_minute: int
    stat_requests: int
    stat_per_minute: int
    subscribe_requests: int
    subscribe_per_minute: int
    unsubscribe_requests: int
    unsubscribe_per_minute: int
    publish_requests: int
    publish_per_minute: int
    channel_requests: int
    channel_per_minute: int
    channels_requests: int
    channels_per_minute: int
    whoami_requests: int
    whoami_per_minute: int
    connection_requests: int
    connection_per_minute: int
    connections_requests: int
    connections_per_minute: int
    read_bytes: int
    read_bytes_per_minute: int
    write_bytes: int
    write_bytes_per_minute: int
    keys: int
    counters: int
    buffers: int
    counter_bytes: int
    buffer_bytes: int
    subscriptions: int
    channels: int
    running_since: int
    connections: int
    version: str


@dataclass(frozen=True)
class Executed(Generic[T_co]):
    """The result of an EVENT that was executed as a request. result: the result of the request inside the EVENT."""

    result: T_co


class Event(NamedTuple):
    """An EVENT from the server: a payload that was published to a channel to which this connection is subscribed."""

    channel: bytes
    payload: bytes


class Reply(NamedTuple):
    """The reply to the next request in order. result: an object of the type in its Request."""

    opcode: Opcode
    result: Any


# The results of listings. They have names because the method `list` of the encoder hides the type.
Keys = list[ListEntry]
KeyStats = list[StatsEntry]
Connections = list[ConnectionInfo]
Channels = list[ChannelEntry]
Subscribers = list[Subscriber]


# ---- requests ----


class Request(bytes, Generic[T_co]):
    """The bytes of a request.

    T is the type of the result: bool, or a type from above. A reply of 00 has the result None.
    """

    __slots__ = ()


class Encoder:
    """Encodes requests for a server with this value size. Raises ValueError for arguments that do not fit, and
    TypeError for a number that is not whole.

    Keys and channels have 0 to 255 bytes. Quotas, TTLs and sizes of values are 0 to the largest number of N bytes.
    ttl_type is 0 to 255; servers treat unknown types as seconds.
    """

    def __init__(self, size: ValueSize) -> None:
        self.size = size
        letter = _LETTERS[size]
        self._insert = struct.Struct(f"<B{letter}B{letter}B")
        self._update = struct.Struct(f"<BBB{letter}B")
        self._set = struct.Struct(f"<BB{letter}B{letter}")
        self._message = struct.Struct(f"<BB{letter}")

    def insert(self, key: bytes, quota: int, ttl: int, ttl_type: int = TTLType.SECONDS) -> Request[bool]:
        """Encodes an INSERT, which creates a key with a quota."""
        self._check("quota", quota)
        self._check("ttl", ttl)
        _check_byte("ttl_type", ttl_type)
        return Request(self._insert.pack(Opcode.INSERT, quota, ttl_type, ttl, _key_length(key)) + key)

    def query(self, key: bytes) -> Request[Query | None]:
        """Encodes a QUERY, which asks for the quota and the TTL of a key."""
        return Request(_named(Opcode.QUERY, key))

    def update(self, key: bytes, attribute: int, change: int, value: int) -> Request[bool]:
        """Encodes an UPDATE, which changes the quota or the TTL of a key. value: 0 to the largest number of N bytes."""
        _check_byte("attribute", attribute)
        _check_byte("change", change)
        self._check("value", value)
        return Request(self._update.pack(Opcode.UPDATE, attribute, change, value, _key_length(key)) + key)

    def purge(self, key: bytes) -> Request[bool]:
        """Encodes a PURGE, which removes a key."""
        return Request(_named(Opcode.PURGE, key))

    def set(self, key: bytes, value: bytes, ttl: int, ttl_type: int = TTLType.SECONDS) -> Request[bool]:
        """Encodes a SET, which creates or replaces a buffer."""
        self._check("ttl", ttl)
        _check_byte("ttl_type", ttl_type)
        self._check("the size of the value", len(value))
        return Request(self._set.pack(Opcode.SET, ttl_type, ttl, _key_length(key), len(value)) + key + value)

    def get(self, key: bytes) -> Request[Get | None]:
        """Encodes a GET, which asks for the value and the TTL of a buffer."""
        return Request(_named(Opcode.GET, key))

    def list(self) -> Request[Keys]:
        """Encodes a LIST, which asks for all keys."""
        return Request((Opcode.LIST,))

    def info(self) -> Request[Info]:
        """Encodes an INFO, which asks for the server's statistics."""
        return Request((Opcode.INFO,))

    def stat(self, key: bytes) -> Request[Stat | None]:
        """Encodes a STAT, which asks how often a key was read and written."""
        return Request(_named(Opcode.STAT, key))

    def stats(self) -> Request[KeyStats]:
        """Encodes a STATS, which asks how often each key was read and written."""
        return Request((Opcode.STATS,))

    def subscribe(self, channel: bytes) -> Request[bool]:
        """Encodes a SUBSCRIBE, which subscribes to a channel."""
        return Request(_named(Opcode.SUBSCRIBE, channel, "channel"))

    def unsubscribe(self, channel: bytes) -> Request[bool]:
        """Encodes an UNSUBSCRIBE, which ends all of this connection's subscriptions to a channel."""
        return Request(_named(Opcode.UNSUBSCRIBE, channel, "channel"))

    def publish(self, channel: bytes, payload: bytes) -> Request[bool]:
        """Encodes a PUBLISH, which sends a payload to all subscribers of a channel."""
        return Request(self.message(Opcode.PUBLISH, channel, payload))

    def connections(self) -> Request[Connections]:
        """Encodes a CONNECTIONS, which asks for all connections."""
        return Request((Opcode.CONNECTIONS,))

    def connection(self, id: bytes) -> Request[ConnectionInfo | None]:
        """Encodes a CONNECTION, which asks for one connection. id: 16 bytes, as from WHOAMI."""
        if len(id) != ID_SIZE:
            raise ValueError(f"id must have {ID_SIZE} bytes, not {len(id)}")
        return Request(bytes((Opcode.CONNECTION,)) + id)

    def channels(self) -> Request[Channels]:
        """Encodes a CHANNELS, which asks for all channels."""
        return Request((Opcode.CHANNELS,))

    def channel(self, channel: bytes) -> Request[Subscribers | None]:
        """Encodes a CHANNEL, which asks for the subscribers of a channel."""
        return Request(_named(Opcode.CHANNEL, channel, "channel"))

    def whoami(self) -> Request[bytes]:
        """Encodes a WHOAMI, which asks for this connection's id, 16 bytes."""
        return Request((Opcode.WHOAMI,))

    def event(self, channel: bytes, request: Request[T_co]) -> Request[Executed[T_co] | None]:
        """Encodes an EVENT around a request, which the server executes.

        Raises ValueError if `request` is not a request.
        """
        innermost(request, self.size)
        return Request(self.message(Opcode.EVENT, channel, request))

    def message(self, opcode: int, channel: bytes, payload: bytes) -> bytes:
        """Encodes a PUBLISH or an EVENT, from a client or a server, with any payload."""
        self._check("the size of the payload", len(payload))
        return self._message.pack(opcode, _key_length(channel, "channel"), len(payload)) + channel + payload

    def _check(self, what: str, value: int) -> None:
        _check_whole(what, value)
        if not 0 <= value <= self.size.maximum:
            width = f"value_size is {self.size.name.lower()}"
            raise ValueError(f"{what} must be 0 to {self.size.maximum}, not {value}: {width}")


def innermost(request: bytes, size: ValueSize) -> tuple[Opcode, int]:
    """Returns the opcode of the request inside all EVENTs, and the number of these EVENTs.

    Raises ValueError if there is no request inside.
    """
    at = events = 0
    while request[at : at + 1] == b"\x19" and len(request) > at + 1:
        at += 2 + size + request[at + 1]
        events += 1
    opcode = request[at] if at < len(request) else None
    if opcode == Opcode.EVENT or opcode not in _OPCODES:
        raise ValueError(f"this is not a request: {_shown(request[at:])}")
    return Opcode(opcode), events


def _named(opcode: Opcode, name: bytes, what: str = "key") -> bytes:
    return bytes((opcode, _key_length(name, what))) + name


def _key_length(key: bytes, what: str = "key") -> int:
    if len(key) > KEY_MAX:
        raise ValueError(f"{what} must have 0 to {KEY_MAX} bytes, not {len(key)}")
    return len(key)


def _check_whole(what: str, value: int) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {value!r}")


def _check_byte(what: str, value: int) -> None:
    _check_whole(what, value)
    if not 0 <= value <= 255:
        raise ValueError(f"{what} must be 0 to 255, not {value}")


# ---- replies ----

# A part of the parser: yields how many bytes it needs next, is sent exactly these, and returns the parsed result.
_Part = Generator[int, bytes, Any]

_Entry = TypeVar("_Entry")

_LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_OPCODES = frozenset(map(int, Opcode))


def _members(kind: type[IntEnum]) -> tuple[int, ...]:
    """Makes a table from byte to enum member, or to the byte itself if it is unknown.

    The table is faster than the enum for listings.
    """
    known = {int(member): member for member in kind}
    return tuple(known.get(value, value) for value in range(256))


_TTL_TYPES = _members(TTLType)
_KEY_TYPES = _members(KeyType)
_CONNECTION_TYPES = _members(ConnectionType)
_CONNECTION_KINDS = _members(ConnectionKind)


class Parser:
    """Splits a stream into replies and events. The stream can arrive in any pieces; the time is linear.

    A reply does not say which request it answers, so call expect() with each request before sending it. Events can
    arrive at any time except inside a reply. A listing is parsed as it arrives, and no byte is parsed twice. value_max:
    the most bytes of a value or payload, even if N allows more.
    """

    def __init__(self, size: ValueSize, value_max: int = VALUE_MAX) -> None:
        letter = _LETTERS[size]
        self._size = size
        self._value_max = value_max
        self._query = struct.Struct(f"<{letter}B{letter}")
        self._get = struct.Struct(f"<B{letter}{letter}")
        self._message = struct.Struct(f"<B{letter}")
        self._list_entry = struct.Struct(f"<BBBQ{letter}")
        self._buffer = bytearray()
        self._expected: deque[tuple[Opcode, int]] = deque()
        self._parsed: list[Reply | Event] = []
        self._failed = ""
        self._agreed = False  # True once a request succeeded that has N in its layout or in its reply
        self._bodies: dict[Opcode, Callable[[], _Part]] = {
            Opcode.QUERY: self._parse_query,
            Opcode.GET: self._parse_get,
            Opcode.LIST: self._parse_list,
            Opcode.INFO: self._parse_info,
            Opcode.STAT: self._parse_stat,
            Opcode.STATS: self._parse_stats,
            Opcode.CONNECTIONS: self._parse_connections,
            Opcode.CONNECTION: self._parse_connection,
            Opcode.CHANNELS: self._parse_channels,
            Opcode.CHANNEL: self._parse_channel,
            Opcode.WHOAMI: self._parse_whoami,
        }
        self._parts = self._parse()
        self._wanted = next(self._parts)

    @property
    def doubt(self) -> str:
        """The end of an error message about a missing reply.

        The text mentions N as a possible reason, unless N is known to be right.
        """
        if self._agreed or not any(events or opcode in _SIZED for opcode, events in self._expected):
            return ""
        return f": is its value_size {self._size.name.lower()}, as this client's?"

    def expect(self, request: bytes) -> None:
        """Adds a request to the requests whose replies are expected.

        Raises ValueError if the bytes are not a request.
        """
        self._expected.append(innermost(request, self._size))

    def feed(self, data: bytes) -> list[Reply | Event]:
        """Takes the next bytes from the server. Returns the replies and events that are complete, in order.

        Raises ProtocolError for invalid bytes, at the first byte that shows it. After that the stream cannot be parsed,
        so the connection must be closed and the parser discarded.
        """
        if self._failed:
            raise ProtocolError(self._failed)
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while (end := start + self._wanted) <= len(buffer):
                self._wanted = self._parts.send(bytes(buffer[start:end]))
                start = end
        except ProtocolError as error:
            self._failed = f"{error}: {_shown(buffer[start:])}"
            raise ProtocolError(self._failed) from None
        del buffer[:start]
        parsed, self._parsed = self._parsed, []
        return parsed

    def _parse(self) -> Generator[int, bytes, None]:
        while True:
            first = yield 1
            if first == b"\x19":
                yield from self._parse_event()
            elif first not in _STATUSES:
                raise ProtocolError("this is not the start of a reply or an event")
            elif not self._expected:
                raise ProtocolError("a reply without a request")
            else:
                opcode, events = self._expected[0]
                if events:
                    result = yield from self._parse_executed(first, opcode, events)
                    opcode = Opcode.EVENT
                else:
                    result = yield from self._parse_result(first, opcode)
                inner, _ = self._expected.popleft()
                self._agreed |= first == b"\x01" and (events > 0 or inner in _SIZED)
                self._parsed.append(Reply(opcode, result))

    def _parse_executed(self, first: bytes, opcode: Opcode, events: int) -> _Part:
        """Parses a status for each EVENT around a request, then its reply. A status of 00 is the last byte of the
        reply.

        The document allows nothing between them. The parser still accepts events there, because it can tell events from
        a status, and some servers send a publisher its own event at that place.
        """
        executed = 0
        while executed < events and first == b"\x01":
            executed += 1
            while (first := (yield 1)) == b"\x19":
                yield from self._parse_event()
            if first not in _STATUSES:
                raise ProtocolError("this is not the start of the reply inside a reply to EVENT")
        result = (yield from self._parse_result(first, opcode)) if executed == events else None
        for _ in range(executed):
            result = Executed(result)
        return result

    def _parse_result(self, status: bytes, opcode: Opcode) -> _Part:
        body = self._bodies.get(opcode)
        if body is None:
            return status == b"\x01"
        if status == b"\x01":
            return (yield from body())
        if opcode in _ALWAYS:
            raise ProtocolError(f"a refused {opcode.name}")
        return None

    def _parse_event(self) -> Generator[int, bytes, None]:
        length, size = self._message.unpack((yield self._message.size))
        self._check_value(size)
        channel = yield length
        payload = yield size
        self._parsed.append(Event(channel, payload))

    def _parse_query(self) -> _Part:
        quota, ttl_type, ttl = self._query.unpack((yield self._query.size))
        return Query(quota, _TTL_TYPES[ttl_type], ttl)

    def _parse_get(self) -> _Part:
        ttl_type, ttl, size = self._get.unpack((yield self._get.size))
        self._check_value(size)
        value = yield size
        return Get(_TTL_TYPES[ttl_type], ttl, value)

    def _parse_info(self) -> _Part:
        fields = _INFO.unpack((yield _INFO.size))
        return Info._make((*fields[:-1], _text(fields[-1])))

    def _parse_stat(self) -> _Part:
        return Stat(*_STAT.unpack((yield _STAT.size)))

    def _parse_list(self) -> _Part:
        def entry(key: bytes, key_type: int, ttl_type: int, expires_at: int, bytes_used: int) -> ListEntry:
            return ListEntry(key, _KEY_TYPES[key_type], _TTL_TYPES[ttl_type], expires_at, bytes_used)

        return (yield from _parse_named(self._list_entry, entry))

    def _parse_stats(self) -> _Part:
        return (yield from _parse_named(_STATS_ENTRY, StatsEntry))

    def _parse_channels(self) -> _Part:
        return (yield from _parse_named(_CHANNELS_ENTRY, ChannelEntry))

    def _parse_connections(self) -> _Part:
        found: list[ConnectionInfo] = []
        fragments = yield from _parse_count(COUNT_MAX, "fragments")
        for number in range(1, fragments + 1):
            count = yield from _parse_fragment(number)
            yield from _parse_entries(count, _CONNECTION, _connection, found)
        return found

    def _parse_connection(self) -> _Part:
        return _connection(*_CONNECTION.unpack((yield _CONNECTION.size)))

    def _parse_channel(self) -> _Part:
        found: list[Subscriber] = []
        count = yield from _parse_count(COUNT_MAX, "subscribers")
        yield from _parse_entries(count, _SUBSCRIBER, Subscriber, found)
        return found

    def _parse_whoami(self) -> _Part:
        return (yield ID_SIZE)

    def _check_value(self, size: int) -> None:
        if size > self._value_max:
            raise ProtocolError(f"a value of {size} bytes is longer than {self._value_max}")


_STATUSES = (b"\x00", b"\x01")
_SIZED = {Opcode.INSERT, Opcode.QUERY, Opcode.UPDATE, Opcode.SET, Opcode.GET, Opcode.PUBLISH}  # N is in their layouts
_ALWAYS = {Opcode.LIST, Opcode.INFO, Opcode.STATS, Opcode.CONNECTIONS, Opcode.CHANNELS, Opcode.WHOAMI}  # never refused


def _parse_count(most: int, what: str) -> Generator[int, bytes, int]:
    count: int = _U64.unpack((yield _U64.size))[0]
    if count > most:
        raise ProtocolError(f"{count} {what}, more than {most}")
    return count


def _parse_fragment(number: int) -> Generator[int, bytes, int]:
    """Parses the head of fragment `number`. Returns how many entries the fragment has."""
    told, count = _FRAGMENT.unpack((yield _FRAGMENT.size))
    if told != number:
        raise ProtocolError(f"fragment {told} instead of fragment {number}")
    if count > FRAGMENT_ENTRIES_MAX:
        raise ProtocolError(f"{count} entries in a fragment are more than {FRAGMENT_ENTRIES_MAX}")
    return int(count)


def _parse_named(layout: struct.Struct, make: Callable[..., _Entry]) -> Generator[int, bytes, list[_Entry]]:
    """Parses a listing whose entries begin with the size of a name. The names are at the end of each fragment."""
    found: list[_Entry] = []
    fragments = yield from _parse_count(COUNT_MAX, "fragments")
    for number in range(1, fragments + 1):
        count = yield from _parse_fragment(number)
        entries = yield count * layout.size
        names = yield sum(entries[:: layout.size])
        start = 0
        for length, *numbers in layout.iter_unpack(entries):
            found.append(make(names[start : start + length], *numbers))
            start += length
    return found


def _parse_entries(
    count: int, layout: struct.Struct, make: Callable[..., _Entry], found: list[_Entry]
) -> Generator[int, bytes, None]:
    """Parses entries without names, in blocks, so that a long fragment is parsed while it arrives."""
    while count:
        block = min(count, _BLOCK_ENTRIES)
        found.extend(make(*numbers) for numbers in layout.iter_unpack((yield block * layout.size)))
        count -= block


def _connection(id: bytes, type: int, kind: int, ip_version: int, ip: bytes, *numbers: int) -> ConnectionInfo:
    return ConnectionInfo(id, _CONNECTION_TYPES[type], _CONNECTION_KINDS[kind], ip_version, _text(ip), *numbers)


def _text(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode("ascii", "backslashreplace")


def _shown(data: bytes | bytearray) -> str:
    shown = data[:_SHOWN].hex(" ") or "nothing"
    return shown if len(data) <= _SHOWN else f"{shown} ... ({len(data)} bytes)"
