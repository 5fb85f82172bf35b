"""Sessions of the throttr protocol agree with the dict model, in order, and the store passes its audit.

Several connections on one store, at every value size: requests well formed or raw bytes, cut anywhere; events
that are fetched at once, or late; keys that expire, by a clock that often stops exactly at their expiry. Slow
readers use another store, with little room, where only the form of the output is checked, and how much of it may
wait.

Input: which store, then operations: a byte whose low half selects the operation, whose next two bits select the
connection, and whose last two a variant; and the operation's arguments."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

from conformance.throttr.dialect import MAX_MESSAGE
from conformance.throttr.engine import make_store
from conformance.throttr.replies import CHANNEL, CHANNELS, CONNECTION, CONNECTIONS, INFO, LIST, STATS
from counterd.protocols.throttr import wire
from fuzz.stream import Source, fenced
from kit.pump import MINUTE_NS, START_NS, TURNS_MAX, UNIX_NS
from property.throttr_model import (
    DONE,
    END_NS,
    EVENT,
    FAILED,
    GET,
    INSERT,
    PUBLISH,
    PURGE,
    QUERY,
    SET,
    STAT,
    SUBSCRIBE,
    UNSUBSCRIBE,
    UPDATE,
    WHOAMI,
    Answer,
    Exact,
    Model,
    ModelSession,
    check_answers,
    check_reordered,
    encode,
    parse,
)

SESSIONS_MAX = 4
OPERATIONS_MAX = 150
AUDIT_ONE_IN = 16  # inputs, by their checksum: it looks at the whole region, which is made for 65,536 channels
MEMORY_LIMIT = 1 << 20  # more than any input can fill
SAID_MAX = 4 << 20  # of one input: what is published is multiplied
EVENTS_DEEP = 16
GRACE_NS = 10_000_000_000
# Of the store whose clients may be slow to read: small enough to be full at times, and for somebody to be dropped.
SLOW_MEMORY, SLOW_MESSAGE, SLOW_QUEUED = 1 << 16, 700, 1000
EVENT_HEAD_MAX = 2 + 8 + 255  # bytes of an event besides its payload

KEYS = [b"a", b"b", b"c", b"", b"k" * 24, b"k" * 25, b"k" * 84, b"k" * 85, b"k" * 255]
CHANNEL_NAMES = [b"a", b"b", b"*", b"", b"n" * 255]
VALUE_SIZES = [0, 1, 35, 36, 60, 61, 120, 121, 255, 256, 1021, 15_000]
STEPS_NS = [1, 1_000, 1_000_000, 1_000_000_000, MINUTE_NS // 2, MINUTE_NS, 3600 * 10**9, 10**17]
NAMED = [QUERY, GET, PURGE, STAT]
LISTED = [LIST, STATS, INFO, WHOAMI, CHANNELS, CONNECTIONS]

TOKENS = [
    encode(2, INSERT, 5, 4, 1, b"a"),
    encode(2, UPDATE, 0, 1, 1, b"a"),
    encode(2, UPDATE, 1, 2, 1, b"a"),
    encode(2, SET, 3, 1, b"a", b"value"),
    encode(2, PUBLISH, b"*", b"all"),
    encode(2, EVENT, b"", encode(2, LIST)),
    encode(2, EVENT, b"*", encode(2, PUBLISH, b"*", b"x")),
    encode(2, SUBSCRIBE, b"a"),
]


class DeepModel(Model):
    """The model, with the engine's bound for EVENTs within EVENTs."""

    depth = 0

    def _event(self, session: ModelSession, channel: bytes, payload: bytes) -> list[Answer]:
        request = parse(payload, self.width, self.max_message)
        if request is None or request.breaks or self.depth == EVENTS_DEEP:
            return [Exact(FAILED)]
        self.depth += 1
        try:
            return [Exact(DONE), *self.execute(session, request.opcode, request.fields)]
        finally:
            self.depth -= 1


class Pair:
    """A connection: session, model, unsent bytes of its peer, and its output since then."""

    def __init__(self, session: Any, model: ModelSession) -> None:
        self.session = session
        self.model = model
        self.unsent = b""
        self.said = bytearray()
        self.replies: list[Answer] = []
        self.events: dict[bytes, list[Answer]] = defaultdict(list)
        session.owner = self

    def peer(self) -> tuple[str, int]:
        """What a protocol asks the owner of a session for: here that of a Unix socket."""
        return "", 0


class Rig:
    """One store and its model. eager: events are fetched at once; otherwise only the events of one channel are in
    order.
    """

    def __init__(self, kind: int) -> None:
        self.width = 1 << (kind & 3)
        self.eager = not kind & 4
        grace_ns = GRACE_NS if kind & 8 else 0
        self.now_ns = START_NS
        self.store = make_store(self.width, MEMORY_LIMIT, expiry_grace_ns=grace_ns)
        self.model = DeepModel(self.width, MAX_MESSAGE, grace_ns)
        for store in (self.store, self.model):
            store.set_wall(UNIX_NS, START_NS)
        self.pairs: list[Pair | None] = [None] * SESSIONS_MAX
        self.said = 0

    @property
    def connected(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair is not None]

    def pair(self, number: int) -> Pair:
        """The connection in that slot. The id of a new one is learned from the store."""
        found = self.pairs[number]
        if found is not None:
            return found
        session = self.store.session(self.now_ns)
        identity = session.receive(encode(self.width, WHOAMI), self.now_ns)[1:]
        assert len(identity) == wire.ID_SIZE
        pair = self.pairs[number] = Pair(session, self.model.session(self.now_ns, identity))
        pair.model.hear(encode(self.width, WHOAMI), self.now_ns)
        pair.model.take_answers()
        return pair

    def identity(self, number: int) -> bytes:
        pair = self.pairs[number % SESSIONS_MAX]
        return pair.model.identity if pair else bytes(wire.ID_SIZE)

    # -- comparing --

    def send(self, pair: Pair, source: Source, how: int) -> None:
        """Sends the unsent bytes: at once, later, all but the last, or in pieces. Then both outputs must be equal."""
        if how == 1 or self.said > SAID_MAX:
            return
        data, pair.unsent = pair.unsent, b""
        if how == 2:
            kept = min(source.byte(), len(data))
            data, pair.unsent = data[: len(data) - kept], data[len(data) - kept :]
        for piece in source.pieces(data) if how == 3 else (data,):
            pair.said += pair.session.receive(fenced(piece), self.now_ns)
            self.drain(pair)
        pair.model.hear(data, self.now_ns)
        self.compare()

    def drain(self, pair: Pair) -> None:
        for _ in range(TURNS_MAX):
            if not pair.session.more:
                return
            said = pair.session.take_output(self.now_ns)
            pair.said += said
            if not said and self.is_due():
                self.store.tick(self.now_ns)
        raise AssertionError("it never comes to its end")

    def is_due(self) -> bool:
        return 0 <= self.store.next_deadline() <= self.now_ns

    def fetch(self) -> None:
        """Gives the store ticks, and fetches the output that other connections have caused."""
        for _ in range(TURNS_MAX):
            due = self.is_due()
            if due:
                self.store.tick(self.now_ns)
            dirty = [session for session in self.store.take_dirty() if session.owner is not None]
            for session in dirty:
                session.owner.said += session.take_output(self.now_ns)
                self.drain(session.owner)
            if not due and not dirty:
                return
        raise AssertionError("it is always due")

    def compare(self, *, fetched: bool = False) -> None:
        if self.eager or fetched:
            self.fetch()
        for number, pair in enumerate(self.pairs):
            if pair is None:
                continue
            self.said += len(pair.said)
            self.check(pair, fetched)
            assert pair.session.closing == pair.model.closing
            if pair.session.closing:
                self.forget(number)

    def check(self, pair: Pair, fetched: bool) -> None:
        answers = pair.model.take_answers()
        if self.eager:
            check_answers(bytes(pair.said), answers)
        else:
            for answer in answers:
                (pair.replies if answer.channel is None else pair.events[answer.channel]).append(answer)
            check_reordered(bytes(pair.said), pair.replies, pair.events, self.width)
            assert not pair.replies
            assert not fetched or not any(pair.events.values())
        pair.said.clear()

    def forget(self, number: int) -> None:
        """Ends the connection: closed twice, it must produce no more output. Gives a tick, as only that removes its
        channel.
        """
        pair = self.pairs[number]
        assert pair is not None
        self.pairs[number] = None
        pair.session.owner = None
        for _ in range(2):
            pair.session.closed(self.now_ns)
        pair.model.closed(self.now_ns)
        assert pair.session.receive(encode(self.width, WHOAMI), self.now_ns) == b""
        assert pair.session.take_output(self.now_ns) == b""
        assert not pair.session.more
        self.store.tick(self.now_ns)

    # -- operations: each takes the connection's place, how, and the rest of the input --

    def number(self, source: Source) -> int:
        """A number: small, or counted down from the largest of N bytes."""
        value = source.byte()
        return value if value < 192 else min(256**self.width - 256 + value, 256**self.width - 1)

    def ask(self, number: int, how: int, source: Source, request: bytes) -> None:
        pair = self.pair(number)
        pair.unsent += request
        self.send(pair, source, how)

    def raw(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, source.take(source.byte()))

    def insert(self, number: int, how: int, source: Source) -> None:
        quota, ttl_type, ttl = self.number(source), source.byte() % 8, self.number(source)
        self.ask(number, how, source, encode(self.width, INSERT, quota, ttl_type, ttl, source.choice(KEYS)))

    def set(self, number: int, how: int, source: Source) -> None:
        ttl_type, ttl, key = source.byte() % 8, self.number(source), source.choice(KEYS)
        self.ask(number, how, source, encode(self.width, SET, ttl_type, ttl, key, self.value(source)))

    def update(self, number: int, how: int, source: Source) -> None:
        what = source.byte()
        amount, key = self.number(source), source.choice(KEYS)
        self.ask(number, how, source, encode(self.width, UPDATE, what & 3, what >> 2 & 3, amount, key))

    def named(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, encode(self.width, source.choice(NAMED), source.choice(KEYS)))

    def listed(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, encode(self.width, source.choice(LISTED)))

    def channel(self, number: int, how: int, source: Source) -> None:
        opcode = source.choice([SUBSCRIBE, SUBSCRIBE, UNSUBSCRIBE, CHANNEL])
        self.ask(number, how, source, encode(self.width, opcode, self.channel_name(source)))

    def publish(self, number: int, how: int, source: Source) -> None:
        channel, value, times = self.channel_name(source), self.value(source), source.byte() % 64 + 1
        if len(value) > 255:
            times = 1
        self.ask(number, how, source, encode(self.width, PUBLISH, channel, value) * times)

    def event(self, number: int, how: int, source: Source) -> None:
        """Wraps the unsent request in EVENTs within EVENTs."""
        pair = self.pair(number)
        for _ in range(source.byte() % 20 + 1):
            if len(pair.unsent) < 256**self.width:
                pair.unsent = encode(self.width, EVENT, b"", pair.unsent)
        self.send(pair, source, how)

    def connection(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, encode(self.width, CONNECTION, self.identity(source.byte())))

    def channel_name(self, source: Source) -> bytes:
        """One of a few channels, or a connection's own."""
        which = source.byte()
        if which < 64:
            return CHANNEL_NAMES[which % len(CHANNEL_NAMES)]
        return self.identity(which).hex().encode()

    def value(self, source: Source) -> bytes:
        return bytes([source.byte()]) * min(source.choice(VALUE_SIZES), 256**self.width - 1)

    def eof(self, number: int, how: int, source: Source) -> None:
        """The peer half-closes."""
        self.compare(fetched=True)
        pair = self.pairs[number]
        if pair is not None:
            pair.said += pair.session.eof(self.now_ns)
            self.drain(pair)
            pair.model.eof(self.now_ns)
            self.compare()

    def closed(self, number: int, how: int, source: Source) -> None:
        if self.pairs[number] is not None:
            self.forget(number)
            self.compare()

    def tick(self, number: int, how: int, source: Source) -> None:
        if how & 1:
            self.compare(fetched=True)
        else:
            self.store.tick(self.now_ns)

    def advance(self, number: int, how: int, source: Source) -> None:
        """Advances the clock by a step; or to a moment at which a key expires, or its grace time ends, or the
        nanosecond before.
        """
        if how == 0:
            self.now_ns = min(self.now_ns + source.choice(STEPS_NS), self.model.end_ns)
            return
        moments = {key.ends_ns + grace for key in self.model.keys.values() for grace in {0, self.model.grace_ns}}
        coming = sorted(moment for moment in moments if self.now_ns < moment < self.now_ns + 10**15)
        if coming:
            self.now_ns = max(self.now_ns, source.choice(coming) - how + 1)

    # -- what is always so --

    def agrees(self, audited: bool) -> None:
        if audited:
            self.store.audit()
        assert self.store.sessions_open == len(self.connected) == len(self.model.sessions)

    def end(self, audited: bool) -> None:
        """Compares everything in the store once more, and then ends all connections."""
        self.compare(fetched=True)
        self.agrees(audited)
        last = self.pair(0)
        last.unsent = b"" if last.model.kept else b"".join(encode(self.width, opcode) for opcode in LISTED)
        self.said = 0
        self.send(last, Source(b""), 0)
        self.compare(fetched=True)
        assert sorted(self.store.outcomes()) == sorted((*key, count) for key, count in self.model.outcomes.items())
        for number in range(SESSIONS_MAX):
            if self.pairs[number] is not None:
                self.forget(number)
        self.fetch()
        self.agrees(audited)


class SlowPair:
    """A connection of which only the form of its output is checked. deaf: it does not read now."""

    def __init__(self, session: Any, width: int) -> None:
        self.session = session
        self.unsent = b""
        self.kept = b""  # of what was sent, the request that is not complete
        self.parser: wire.Parser | None = wire.Parser(wire.ValueSize(width))  # None: out of step, and said so
        self.deaf = False
        session.owner = self

    def peer(self) -> tuple[str, int]:
        return "", 0

    def asked(self, data: bytes, width: int) -> None:
        """Notes the requests that these bytes complete."""
        self.kept += data
        while self.parser is not None and (request := parse(self.kept, width, SLOW_MESSAGE)):
            asked, self.kept = self.kept[: request.size], self.kept[request.size :]
            try:
                self.parser.expect(asked)
            except ValueError:  # it breaks the framing, or is an EVENT around what is no request
                self.parser = None

    def told(self, said: bytes) -> None:
        if self.parser is not None:
            self.parser.feed(said)


class SlowRig(Rig):
    """A store with little room, and clients that do not always read: a slow one is dropped, and others are not
    disturbed.
    """

    pairs: list[Any]

    def __init__(self, kind: int) -> None:
        self.width = 1 << (kind & 3)
        self.now_ns = START_NS
        grace_ns = GRACE_NS if kind & 8 else 0
        self.store = make_store(self.width, SLOW_MEMORY, SLOW_MESSAGE, SLOW_QUEUED, grace_ns)
        self.store.set_wall(UNIX_NS, START_NS)
        self.pairs = [None] * SESSIONS_MAX
        self.said = 0

    def pair(self, number: int) -> Any:
        if self.pairs[number] is None:
            self.pairs[number] = SlowPair(self.store.session(self.now_ns), self.width)
        return self.pairs[number]

    def identity(self, number: int) -> bytes:
        return b"%016d" % number

    def send(self, pair: Any, source: Source, how: int) -> None:
        if how == 1 or pair.deaf or self.said > SAID_MAX:
            return
        data, pair.unsent = pair.unsent, b""
        for piece in source.pieces(data) if how == 3 else (data,):
            pair.asked(piece, self.width)
            pair.told(pair.session.receive(fenced(piece), self.now_ns))
            self.compare()

    def compare(self, *, fetched: bool = False) -> None:
        """Gives the store ticks, and fetches all output for connections that read."""
        for _ in range(TURNS_MAX):
            due = self.is_due()
            if due:
                self.store.tick(self.now_ns)
            dirty = {session.owner for session in self.store.take_dirty() if session.owner is not None}
            reading = [pair for pair in self.connected if pair in dirty or (pair.session.more and not pair.deaf)]
            for pair in reading:
                self.pull(pair)
            if not due and not reading:
                break
        else:
            raise AssertionError("it is always due")
        for number, pair in enumerate(self.pairs):
            if pair is not None and pair.session.closing:
                self.forget(number)
            elif pair is not None and not pair.deaf and pair.parser is not None:
                assert not pair.parser._expected

    def pull(self, pair: Any) -> None:
        session = pair.session
        if session.dropped:  # or it is in the midst of a long reply, which is as bad
            assert session.closing
            assert session.take_output(self.now_ns) == b""
        elif pair.deaf:
            session.wait()
        else:
            said = session.take_output(self.now_ns)
            self.said += len(said)
            pair.told(said)

    def forget(self, number: int) -> None:
        session = self.pairs[number].session
        self.pairs[number] = session.owner = None
        for _ in range(2):
            session.closed(self.now_ns)
        assert session.take_output(self.now_ns) == b""
        self.store.tick(self.now_ns)

    def tick(self, number: int, how: int, source: Source) -> None:
        """Gives a tick; or a connection stops reading, or begins again."""
        pair = self.pairs[number]
        if how == 0 or pair is None:
            self.store.tick(self.now_ns)
        elif not pair.deaf:
            pair.deaf = True
            pair.session.wait()
        else:
            self.listen(pair)
        self.compare()

    def listen(self, pair: Any) -> None:
        """Reads the output: no more than was allowed to wait, as the requests have been answered before."""
        pair.deaf = False
        waited = 0
        for _ in range(TURNS_MAX):
            if not pair.session.more:
                break
            said = pair.session.take_output(self.now_ns)
            waited += len(said)
            pair.told(said)
        assert waited <= SLOW_QUEUED + SLOW_MESSAGE + EVENT_HEAD_MAX

    def eof(self, number: int, how: int, source: Source) -> None:
        pair = self.pairs[number]
        if pair is not None and not pair.deaf:
            pair.told(pair.session.eof(self.now_ns))
            self.compare()

    def advance(self, number: int, how: int, source: Source) -> None:
        self.now_ns = min(self.now_ns + source.choice(STEPS_NS), END_NS)

    def agrees(self, audited: bool) -> None:
        if audited:
            self.store.audit()
        assert self.store.sessions_open == len(self.connected)

    def end(self, audited: bool) -> None:
        self.agrees(audited)
        for number in range(SESSIONS_MAX):
            if self.pairs[number] is not None:
                self.forget(number)
        self.compare()
        self.agrees(audited)
        assert self.store.held() == 0


OPERATIONS = [
    "raw",
    "insert",
    "set",
    "update",
    "named",
    "listed",
    "channel",
    "publish",
    "event",
    "connection",
    "eof",
    "closed",
    "tick",
    "advance",
    "named",
    "insert",
]


def one_input(data: bytes) -> None:
    source = Source(data)
    kind = source.byte()
    rig = SlowRig(kind) if kind & 16 else Rig(kind)
    for _ in range(OPERATIONS_MAX):
        if not source:
            break
        operation = source.byte()
        getattr(rig, OPERATIONS[operation & 15])(operation >> 4 & 3, operation >> 6, source)
        rig.agrees(audited=False)
    rig.end(zlib.crc32(data) % AUDIT_ONE_IN == 0)
