"""What the throttr protocol does, said a second time: with dicts and lists, nothing clever, and no bound on memory.

`Model` predicts every answer and every event, in order, for each connection. What it cannot know, as the order of a
listing or how many bytes had been read by then, it leaves open: an `Answer` takes what it recognises as itself from the
bytes that came. It is a store by the contract too, so that the vectors can be played to it: then both say the same.
The simulation's world (simulation/throttr.py) has the same model; it says where the store's bounds refuse a request.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from conformance.throttr import replies
from conformance.throttr.dialect import UNIT_NS
from conformance.throttr.replies import CHANNEL, CHANNELS, CONNECTION, CONNECTIONS, INFO, LIST, NUMBER, STATS, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

INSERT, QUERY, UPDATE, PURGE, SET, GET, STAT = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x09
SUBSCRIBE, UNSUBSCRIBE, PUBLISH, WHOAMI, EVENT = 0x11, 0x12, 0x13, 0x18, 0x19
QUOTA, TTL = 0, 1
PATCH, INCREASE, DECREASE = 0, 1, 2
COUNTER, BUFFER = 0, 1
MINUTE_NS = 60_000_000_000
WHEEL_NS = 1 << 20  # for so long after it has gone a key may be counted
SUBSCRIBED_MAX = 16  # times of one connection to one channel
# Where 64 bits of Unix nanoseconds end, in the year 2262; an hour of grace has to fit behind it.
TOLD_MAX_NS = (1 << 63) - 1
END_NS = TOLD_MAX_NS - 3600 * 1_000_000_000

# After the opcode: n is a number of N bytes, b one of 1, i an id; k and v are the sizes, in 1 and N bytes, of the name
# and of the value that follow at the end.
LAYOUT = {
    **dict.fromkeys((QUERY, PURGE, GET, STAT, SUBSCRIBE, UNSUBSCRIBE, CHANNEL), "k"),
    **dict.fromkeys((LIST, INFO, STATS, CONNECTIONS, CHANNELS, WHOAMI), ""),
    **dict.fromkeys((PUBLISH, EVENT), "kv"),
    INSERT: "nbnk",
    UPDATE: "bbnk",
    SET: "bnkv",
    CONNECTION: "i",
}
NAMES = {
    INSERT: "insert",
    QUERY: "query",
    UPDATE: "update",
    PURGE: "purge",
    SET: "set",
    GET: "get",
    LIST: "list",
    INFO: "info",
    STAT: "stat",
    STATS: "stats",
    SUBSCRIBE: "subscribe",
    UNSUBSCRIBE: "unsubscribe",
    PUBLISH: "publish",
    CONNECTIONS: "connections",
    CONNECTION: "connection",
    CHANNELS: "channels",
    CHANNEL: "channel",
    WHOAMI: "whoami",
    EVENT: "event",
}
OPCODES = {name: opcode for opcode, name in NAMES.items()}
FAILED, DONE = b"\0", b"\1"


# ---- requests -------------------------------------------------------------------------------------------------------


def head(width: int, opcode: int) -> struct.Struct:
    """What is before the names and values."""
    kinds = {"n": NUMBER[width], "b": "B", "k": "B", "v": NUMBER[width], "i": "16s"}
    return struct.Struct("<B" + "".join(kinds[kind] for kind in LAYOUT[opcode]))


HEADS = {(width, opcode): head(width, opcode).pack for width in NUMBER for opcode in LAYOUT}
TEXTS = {opcode: sum(kind in "kv" for kind in kinds) for opcode, kinds in LAYOUT.items()}  # names and values


def encode(width: int, opcode: int, *fields: Any) -> bytes:
    """A request. width: bytes of N. fields: numbers, ids, names and values in the order of LAYOUT."""
    texts = TEXTS[opcode]
    if texts == 0:
        return HEADS[width, opcode](opcode, *fields)
    if texts == 1:
        *numbers, name = fields
        return b"".join((HEADS[width, opcode](opcode, *numbers, len(name)), name))
    *numbers, name, value = fields
    return b"".join((HEADS[width, opcode](opcode, *numbers, len(name), len(value)), name, value))


class Request(NamedTuple):
    """The first request of a stream. breaks: it is none, or too long, and what comes after it cannot be found."""

    size: int
    opcode: int
    fields: tuple[Any, ...] = ()
    breaks: bool = False


def parse(data: bytes, width: int, max_message: int) -> Request | None:
    """The first request of data, or None if more bytes are needed."""
    if not data:
        return None
    if data[0] not in LAYOUT:
        return Request(1, data[0], breaks=True)
    widths = {"n": width, "b": 1, "k": 1, "v": width, "i": 16}
    position = 1
    fields: list[Any] = []
    for kind in LAYOUT[data[0]]:
        raw = data[position : position + widths[kind]]
        position += widths[kind]
        fields.append(raw if kind == "i" else int.from_bytes(raw, "little"))
    if len(data) < position:
        return None
    sizes = [(index, fields[index]) for index, kind in enumerate(LAYOUT[data[0]]) if kind in "kv"]
    size = position + sum(length for _, length in sizes)
    if size > max_message:
        return Request(position, data[0], breaks=True)
    if len(data) < size:
        return None
    for index, length in sizes:
        fields[index] = data[position : position + length]
        position += length
    return Request(size, data[0], tuple(fields))


# ---- answers --------------------------------------------------------------------------------------------------------


class Reader:
    """Takes bytes from the front."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position = data, position

    def take(self, size: int) -> bytes:
        taken = self.data[self.position : self.position + size]
        assert len(taken) == size, f"{size} bytes are wanted, {len(taken)} are left: {self.data!r}"
        self.position += size
        return taken


class Exact:
    """A reply, or an event, of which every byte is known."""

    __slots__ = ("channel", "data")

    def __init__(self, data: bytes, channel: bytes | None = None) -> None:
        self.data = data
        self.channel = channel  # of an event

    def encode(self) -> bytes:
        return self.data

    def check(self, reader: Reader) -> None:
        ends = reader.position + len(self.data)
        taken = reader.data[reader.position : ends]
        assert taken == self.data, f"{taken!r} instead of {self.data!r}"
        reader.position = ends


class Listing:
    """LIST, STATS, CHANNELS or CONNECTIONS, in any order. A field that is None is not known."""

    channel = None

    def __init__(self, opcode: int, width: int, rows: dict[bytes, tuple[int | bytes | None, ...]]) -> None:
        self.opcode, self.width, self.rows = opcode, width, rows

    def encode(self) -> bytes:
        rows = [Row(name, known(fields, self.opcode)) for name, fields in self.rows.items()]
        return replies.write_listing(rows, self.opcode, self.width)

    def check(self, reader: Reader, *, is_whole: bool = True) -> None:
        """is_whole: nothing has changed or gone while it was listed."""
        fragments = replies.read_listing(reader.take, self.opcode, self.width)
        rows = [row for fragment in fragments for row in fragment]
        names = {row.name for row in rows}
        assert len(names) == len(rows), "something is told of twice"
        assert names <= self.rows.keys(), f"there are no {names - self.rows.keys()}"
        if not is_whole:
            return
        assert len(names) == len(self.rows), f"there are {self.rows.keys() - names} too"
        for row in rows:
            if row.fields != self.rows[row.name]:
                compare(row.fields, self.rows[row.name], row.name)
        # Each fragment is as full as its next entry allows.
        assert [len(rows) for rows in fragments] == list(map(len, replies.in_fragments(rows, self.opcode, self.width)))


class Subscribers:
    """The reply to CHANNEL, in any order."""

    channel = None

    def __init__(self, rows: Sequence[tuple[bytes, tuple[int | None, ...]]]) -> None:
        self.rows = rows

    def encode(self) -> bytes:
        entries = b"".join(replies.SUBSCRIBER.pack(name, *known(fields, CHANNEL)) for name, fields in self.rows)
        return DONE + struct.pack("<Q", len(self.rows)) + entries

    def check(self, reader: Reader) -> None:
        rows = replies.read_subscribers(reader.take)
        assert rows is not None, "there is no such channel"
        assert sorted(row.name for row in rows) == sorted(name for name, _ in self.rows)
        for name in {name for name, _ in self.rows}:
            told = sorted(row.fields for row in rows if row.name == name)
            expected = sorted((fields for other, fields in self.rows if other == name), key=lambda row: row[0] or 0)
            for fields, wanted in zip(told, expected, strict=True):
                compare(fields, wanted, name)


class Fields:
    """A record of numbers of which some are known: CONNECTION and INFO."""

    channel = None

    def __init__(self, layout: struct.Struct, fields: tuple[int | bytes | None, ...]) -> None:
        self.layout, self.fields = layout, fields

    def encode(self) -> bytes:
        filler = b"0" if self.layout is replies.INFO_REPLY else b""
        return DONE + self.layout.pack(*known(self.fields, CONNECTION, filler))

    def check(self, reader: Reader) -> None:
        assert reader.take(1) == DONE
        compare(self.layout.unpack(reader.take(self.layout.size)), self.fields, b"the record")


PLAIN = {said: Exact(said) for said in (FAILED, DONE)}
Answer = Exact | Listing | Subscribers | Fields


def known(fields: Sequence[Any], opcode: int, filler: bytes = b"") -> tuple[Any, ...]:
    """With something in place of what is not known. The only text in a connection's row is its address."""
    text = {CONNECTIONS: 3, CONNECTION: 4}.get(opcode)
    last = len(fields) - 1
    return tuple(
        value if value is not None else filler if index == text or (filler and index == last) else 0
        for index, value in enumerate(fields)
    )


def compare(told: Sequence[Any], expected: Sequence[Any], name: bytes) -> None:
    wrong = [
        (index, value, wanted)
        for index, (value, wanted) in enumerate(zip(told, expected, strict=True))
        if wanted is not None and value != wanted
    ]
    assert not wrong, f"of {name!r}, field by field, what it says and should say: {wrong}"


# ---- what there is --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Meter:
    """Counts for ever, and by whole minutes."""

    total: int = 0
    minute: int = 0
    current: int = 0
    last: int = 0

    def add(self, minute: int, amount: int = 1) -> None:
        if minute != self.minute:
            self.per_minute(minute)
        self.total += amount
        self.current += amount

    def per_minute(self, minute: int) -> int:
        """In the minute before this one."""
        if minute != self.minute:
            self.last = self.current if minute == self.minute + 1 else 0
            self.current = 0
            self.minute = minute
        return self.last


@dataclass(slots=True)
class Key:
    """A counter or a buffer."""

    kind: int
    quota: int
    value: bytes
    ttl_type: int
    ends_ns: int
    reads: Meter = field(default_factory=Meter)
    writes: Meter = field(default_factory=Meter)


@dataclass(slots=True, eq=False)
class Subscription:
    """Of a connection to a channel; times: how often, of which the first is told each time."""

    since_ns: int
    times: int = 1
    read: int = 0
    written: int = 0


@dataclass(slots=True)
class Channel:
    """Exists while somebody is subscribed. read, written: by all there were since it does."""

    subscriptions: dict[ModelSession, Subscription] = field(default_factory=dict)
    read: int = 0
    written: int = 0


class Model:
    """A store and its sessions. end_ns: the last moment, wall_ns: what is added to its clock for Unix nanoseconds."""

    def __init__(
        self,
        value_size: int = 2,
        max_message: int = 1 << 20,
        expiry_grace_ns: int = 0,
        end_ns: int = END_NS,
        wall_ns: int = 0,
        **others: Any,
    ) -> None:
        self.width = value_size
        self.mask = 256**value_size - 1
        self.max_message = max_message
        self.grace_ns = expiry_grace_ns
        self.end_ns = end_ns
        self.wall_ns = wall_ns
        self.now_ns = 0
        self.keys: dict[bytes, Key] = {}
        self.channels: dict[bytes, Channel] = {}
        self.sessions: dict[bytes, ModelSession] = {}
        self.sessions_total = 0
        self.requests: dict[int, Meter] = {opcode: Meter() for opcode in NAMES}
        self.refusals = dict.fromkeys(NAMES, 0)
        self.broken = 0
        self.ways = {opcode: getattr(self, f"_{name}") for opcode, name in NAMES.items()}

    @property
    def outcomes(self) -> dict[tuple[str, str], int]:
        """How requests ended, and how often."""
        found = {("unknown", "framing_lost"): self.broken}
        for opcode, name in NAMES.items():
            found[name, "refused"] = self.refusals[opcode]
            found[name, "ok"] = self.requests[opcode].total - self.refusals[opcode]
        return {key: count for key, count in found.items() if count}

    @property
    def minute(self) -> int:
        return self.now_ns // MINUTE_NS

    @property
    def sessions_open(self) -> int:
        return len(self.sessions)

    # -- sessions --

    def session(self, now_ns: int = 0, identity: bytes | None = None) -> ModelSession:
        self.now_ns = now_ns
        self.sessions_total += 1
        session = ModelSession(self, identity or struct.pack("<QQ", self.sessions_total, ~self.sessions_total & END_NS))
        self.sessions[session.identity] = session
        for channel in (b"*", session.identity.hex().encode()):
            self.subscribe(session, channel)
        return session

    def leave(self, session: ModelSession) -> None:
        if self.sessions.pop(session.identity, None) is not None:
            for channel in list(session.channels):
                self.unsubscribe(session, channel)

    def subscribe(self, session: ModelSession, name: bytes) -> bool:
        times = self.channels[name].subscriptions[session].times if name in session.channels else 0
        if times == SUBSCRIBED_MAX or not self.has_place():
            return False
        if times:
            self.channels[name].subscriptions[session].times += 1
        else:
            self.channels.setdefault(name, Channel()).subscriptions[session] = Subscription(self.now_ns)
            session.channels[name] = None
        return True

    def unsubscribe(self, session: ModelSession, name: bytes) -> bool:
        if name not in session.channels:
            return False
        del session.channels[name]
        del self.channels[name].subscriptions[session]
        if not self.channels[name].subscriptions:
            del self.channels[name]
        return True

    # -- bounds, of which there are none here --

    def has_place(self) -> bool:
        """For another subscription."""
        return True

    def has_room(self, name: bytes, key: Key | None, value: bytes | None) -> bool:
        """For a new key, or for another value of this one. value: of a buffer."""
        return True

    # -- the contract of a store; nothing waits here --

    def set_wall(self, unix_ns: int, now_ns: int) -> None:
        self.wall_ns = unix_ns - now_ns

    def next_deadline(self) -> int:
        return -1

    def tick(self, now_ns: int) -> None: ...

    def audit(self) -> None: ...

    def take_dirty(self) -> list[ModelSession]:
        return [session for session in self.sessions.values() if session.answers]

    # -- keys --

    def find(self, name: bytes) -> Key | None:
        """The key, if it has not expired."""
        key = self.keys.get(name)
        return key if key is not None and self.now_ns < key.ends_ns else None

    def is_taken(self, name: bytes) -> bool:
        """Whether no key can be made of that name: it exists, or its grace goes on."""
        key = self.keys.get(name)
        return key is not None and self.now_ns < key.ends_ns + self.grace_ns

    def counted(self) -> list[Key] | None:
        """Those that INFO counts: in their grace too. None if the wheel may have yet to turn."""
        ends = [key.ends_ns + self.grace_ns for key in self.keys.values()]
        if any(end <= self.now_ns < end + WHEEL_NS for end in ends):
            return None
        return [key for key, end in zip(self.keys.values(), ends, strict=True) if self.now_ns < end]

    def living(self) -> dict[bytes, Key]:
        return {name: key for name, key in self.keys.items() if self.now_ns < key.ends_ns}

    def moment(self, ttl_type: int, ttl: int) -> int:
        return min(self.now_ns + ttl * UNIT_NS.get(ttl_type, UNIT_NS[4]), self.end_ns)

    def left(self, key: Key) -> bytes:
        """TTL type and TTL, as replies have them: a nanosecond has passed at least."""
        left = (key.ends_ns - self.now_ns - 1) // UNIT_NS.get(key.ttl_type, UNIT_NS[4])
        return bytes([key.ttl_type]) + self.number(left & self.mask)

    def number(self, value: int) -> bytes:
        return value.to_bytes(self.width, "little")

    # -- requests --

    def execute(self, session: ModelSession, opcode: int, fields: tuple[Any, ...]) -> list[Answer]:
        """The reply to a whole request. Events go to their connections, that one's own too: before the reply."""
        self.requests[opcode].add(self.now_ns // MINUTE_NS)
        session.counts[opcode] += 1
        said = self.ways[opcode](session, *fields)
        if isinstance(said, bytes):
            self.refusals[opcode] += said == FAILED
            return [PLAIN.get(said) or Exact(said)]
        if not isinstance(said, list):
            return [said]
        self.refusals[opcode] += len(said) == 1
        return said

    def _insert(self, session: ModelSession, quota: int, ttl_type: int, ttl: int, name: bytes) -> bytes:
        if self.is_taken(name) or not self.has_room(name, None, None):
            return FAILED
        self.keys[name] = Key(COUNTER, quota, b"", ttl_type, self.moment(ttl_type, ttl))
        session.sizes["allocated"] += self.width
        return DONE

    def _query(self, session: ModelSession, name: bytes) -> bytes:
        key = self.find(name)
        if key is None:
            return FAILED
        key.reads.add(self.minute)
        session.sizes["consumed"] += self.width
        return DONE + self.number(key.quota) + self.left(key)

    def _get(self, session: ModelSession, name: bytes) -> bytes:
        key = self.find(name)
        if key is None:
            return FAILED
        key.reads.add(self.minute)
        session.sizes["consumed"] += len(key.value)
        return DONE + self.left(key) + self.number(len(key.value)) + key.value

    def _update(self, session: ModelSession, attribute: int, change: int, value: int, name: bytes) -> bytes:
        key = self.find(name)
        if key is None:
            return FAILED
        key.reads.add(self.minute)
        done = False
        if attribute == QUOTA and key.kind == COUNTER:
            done = self._update_quota(key, change, value)
        if attribute == TTL:
            done = True
            self._update_ttl(key, change, value)
        if done:
            key.writes.add(self.minute)
        return DONE if done else FAILED

    def _update_quota(self, key: Key, change: int, value: int) -> bool:
        changed = value if change == PATCH else key.quota
        if change in (INCREASE, DECREASE):
            changed += value if change == INCREASE else -value
        if not 0 <= changed <= self.mask:
            return False
        key.quota = changed
        return True

    def _update_ttl(self, key: Key, change: int, value: int) -> None:
        duration = value * UNIT_NS.get(key.ttl_type, UNIT_NS[4])
        moments = {PATCH: self.now_ns + duration, INCREASE: key.ends_ns + duration, DECREASE: key.ends_ns - duration}
        key.ends_ns = max(0, min(moments.get(change, key.ends_ns), self.end_ns))

    def _purge(self, session: ModelSession, name: bytes) -> bytes:
        if self.find(name) is None:
            return FAILED
        del self.keys[name]
        return DONE

    def _set(self, session: ModelSession, ttl_type: int, ttl: int, name: bytes, value: bytes) -> bytes:
        key = self.keys.get(name) if self.is_taken(name) else None
        if key is not None and key.kind == COUNTER:
            return FAILED
        if key is not None and key.ends_ns <= self.now_ns:
            return DONE  # and lost
        if not self.has_room(name, key, value):
            return FAILED
        if key is None:
            self.keys[name] = Key(BUFFER, 0, value, ttl_type, self.moment(ttl_type, ttl))
        else:
            key.value, key.ttl_type, key.ends_ns = value, ttl_type, self.moment(ttl_type, ttl)
            key.writes.add(self.minute)
        session.sizes["allocated"] += len(value)
        return DONE

    def _stat(self, session: ModelSession, name: bytes) -> bytes:
        key = self.find(name)
        if key is None:
            return FAILED
        figures = struct.pack("<QQQQ", *self._figures(key))
        key.reads.add(self.minute)
        return DONE + figures

    def _figures(self, key: Key) -> tuple[int, ...]:
        minute = self.minute
        return (key.reads.per_minute(minute), key.writes.per_minute(minute), key.reads.total, key.writes.total)

    def _list(self, session: ModelSession) -> Listing:
        rows: dict[bytes, tuple[int | bytes | None, ...]] = {
            name: (key.kind, key.ttl_type, min(key.ends_ns + self.wall_ns, TOLD_MAX_NS), self._used(key))
            for name, key in self.living().items()
        }
        return Listing(LIST, self.width, rows)

    def _used(self, key: Key) -> int:
        return self.width if key.kind == COUNTER else len(key.value)

    def _stats(self, session: ModelSession) -> Listing:
        return Listing(STATS, self.width, {name: self._figures(key) for name, key in self.living().items()})

    def _info(self, session: ModelSession) -> Fields:
        fields: dict[str, int | None] = dict.fromkeys(replies.INFO_FIELDS)
        for name in replies.REQUESTS:
            meter = self.requests[OPCODES[name]]
            fields[name], fields[f"{name}_per_minute"] = meter.total, meter.per_minute(self.minute)
        meters = self.requests.values()
        fields |= {
            "timestamp": (self.now_ns + self.wall_ns) // 1_000_000_000,
            "requests": sum(meter.total for meter in meters),
            "requests_per_minute": sum(meter.per_minute(self.minute) for meter in meters),
            "subscriptions": sum(map(self._times, self.channels.values())),
            "open_channels": len(self.channels),
            "open_connections": self.sessions_open,
        }
        return Fields(replies.INFO_REPLY, (*(fields | self._counts()).values(), None))

    def _counts(self) -> dict[str, int]:
        """What INFO says of keys, as far as it is known."""
        keys = self.counted()
        if keys is None:
            return {}
        counters = [key for key in keys if key.kind == COUNTER]
        buffers = [key for key in keys if key.kind == BUFFER]
        return {
            "keys": len(keys),
            "counters": len(counters),
            "buffers": len(buffers),
            "counter_bytes": self.width * len(counters),
            "buffer_bytes": sum(len(key.value) for key in buffers),
        }

    # -- channels and connections --

    def _times(self, channel: Channel) -> int:
        return sum(each.times for each in channel.subscriptions.values())

    def _subscribe(self, session: ModelSession, channel: bytes) -> bytes:
        return DONE if self.subscribe(session, channel) else FAILED

    def _unsubscribe(self, session: ModelSession, channel: bytes) -> bytes:
        return DONE if self.unsubscribe(session, channel) else FAILED

    def _publish(self, session: ModelSession, name: bytes, payload: bytes) -> bytes:
        channel = self.channels.get(name)
        if channel is None:
            return FAILED
        size = len(payload)
        event = Exact(encode(self.width, EVENT, name, payload), name)
        session.sizes["published"] += size
        channel.written += size
        channel.read += self._times(channel) * size
        for subscriber, subscription in channel.subscriptions.items():
            subscription.read += size
            if subscriber is session:
                subscription.written += size
            else:
                subscriber.sizes["received"] += subscription.times * size
            subscriber.answers += [event] * subscription.times
        return DONE

    def _event(self, session: ModelSession, channel: bytes, payload: bytes) -> list[Answer]:
        request = parse(payload, self.width, self.max_message)
        if request is None or request.breaks:
            return [Exact(FAILED)]
        return [Exact(DONE), *self.execute(session, request.opcode, request.fields)]

    def _whoami(self, session: ModelSession) -> bytes:
        return DONE + session.identity

    def _connection(self, session: ModelSession, identity: bytes) -> bytes | Fields:
        if identity not in self.sessions:
            return FAILED
        return Fields(replies.RECORD, (identity, *self.sessions[identity].fields()))

    def _connections(self, session: ModelSession) -> Listing:
        rows = {identity: connection.fields() for identity, connection in self.sessions.items()}
        return Listing(CONNECTIONS, self.width, rows)

    def _channels(self, session: ModelSession) -> Listing:
        rows: dict[bytes, tuple[int | bytes | None, ...]] = {
            name: (channel.read, channel.written, self._times(channel)) for name, channel in self.channels.items()
        }
        return Listing(CHANNELS, self.width, rows)

    def _channel(self, session: ModelSession, name: bytes) -> bytes | Subscribers:
        if name not in self.channels:
            return FAILED
        rows: list[tuple[bytes, tuple[int | None, ...]]] = []
        for subscriber, each in self.channels[name].subscriptions.items():
            rows += [(subscriber.identity, (each.since_ns + self.wall_ns, each.read, each.written))] * each.times
        return Subscribers(rows)


class ModelSession:
    """A connection. answers: what it has been given and nobody has taken yet."""

    def __init__(self, store: Model, identity: bytes) -> None:
        self.store = store
        self.identity = identity
        self.owner: Any = None
        self.more = False
        self.closing = False
        self.kept = b""
        self.since_ns = store.now_ns
        self.answers: list[Answer] = []
        self.channels: dict[bytes, None] = {}  # to which it is subscribed
        self.counts = [0] * (EVENT + 1)  # requests by opcode
        self.sizes: dict[str, int] = defaultdict(int)

    def fields(self) -> tuple[int | bytes | None, ...]:
        """Its record without the id, and without what depends on its socket and on how the stream was cut."""
        bytes_of = [self.sizes[name] for name in ("published", "received", "allocated", "consumed")]
        return (
            *(0, None, None, None, None, self.since_ns + self.store.wall_ns),
            *(None, None, *bytes_of),
            *(self.counts[OPCODES[name]] for name in replies.COUNTED),
        )

    def hear(self, data: bytes, now_ns: int) -> None:
        """Executes what is whole; the answers are kept."""
        self.store.now_ns = now_ns
        self.kept += data
        while not self.closing and (request := parse(self.kept, self.store.width, self.store.max_message)):
            self.kept = self.kept[request.size :]
            said = self.break_off() if request.breaks else self.store.execute(self, request.opcode, request.fields)
            self.answers += said

    def break_off(self) -> list[Answer]:
        """Framing is lost."""
        self.store.broken += 1
        self.closing = True
        self.store.leave(self)
        return [Exact(FAILED)]

    def take_answers(self) -> list[Answer]:
        taken, self.answers = self.answers, []
        return taken

    # -- the contract of a session --

    def receive(self, data: bytes, now_ns: int) -> bytes:
        self.hear(data, now_ns)
        return self.take_output(now_ns)

    def take_output(self, now_ns: int) -> bytes:
        return b"".join(answer.encode() for answer in self.take_answers())

    def eof(self, now_ns: int) -> bytes:
        self.store.now_ns = now_ns
        self.closing = True
        self.store.leave(self)
        return b""

    def closed(self, now_ns: int) -> None:
        self.eof(now_ns)


def check_answers(said: bytes, answers: Sequence[Answer]) -> None:
    """These bytes are these answers, in order, and nothing else."""
    reader = Reader(said)
    for answer in answers:
        answer.check(reader)
    assert reader.position == len(said), f"nobody expects {said[reader.position :]!r}"


def check_reordered(
    said: bytes, replies_left: list[Answer], events_left: dict[bytes, list[Answer]], width: int
) -> None:
    """As check_answers, where events may have waited: replies are in order, and so are events of one channel.

    What has come is taken from what is left.
    """
    reader = Reader(said)
    while reader.position < len(said):
        if said[reader.position] == EVENT:
            event = parse(said[reader.position :], width, len(said))
            assert event is not None, f"part of an event: {said[reader.position :]!r}"
            waiting = events_left.get(event.fields[0], [])
            assert waiting, f"nobody expects {event}"
            waiting.pop(0).check(reader)
        else:
            assert replies_left, f"nobody expects {said[reader.position :]!r}"
            replies_left.pop(0).check(reader)
