"""Sessions of the counter protocol agree with the dict model, byte by byte, and the store passes its audit.

Several connections on one small store: requests well formed or raw bytes, cut anywhere; connections that half-
close or end; ticks, windows and a clock between them. At the end all connections end, and everything is given
back.

Input: which store, then operations: a byte whose low half selects the operation, whose next two bits select the
connection, and whose last two a variant; and the operation's arguments."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from counterd._core import siphash
from counterd.protocols.counter import wire
from fuzz.stream import Source, fenced
from kit.counters import KEY, TURNS_MAX, make_store
from property.counter_model import Model, ModelSession, Unmodelled

SESSIONS_MAX = 4
OPERATIONS_MAX = 200
FRAMES_MAX = 400  # of one input: a model of lists takes its time
AUDIT_EVERY = 8  # operations: it looks at the whole region
U32_MAX = 0xFFFFFFFF


def names_with(top: int, count: int) -> list[bytes]:
    """Names whose hash begins with these four bits: they share a slot in every index of up to sixteen."""
    found = (name for name in map(b"%d".__mod__, itertools.count()) if siphash(KEY, name) >> 60 == top)
    return list(itertools.islice(found, count))


# Two names with the same 32-bit tag, short and long.
TWINS = [b"twin-10354", b"twin-92235"]
LONG_TWINS = [b"%053d" % 101198, b"%053d" % 128814]
SHORT = [*names_with(15, 4), *names_with(14, 2), *names_with(0, 2), b"\0", b"a" * 36, *TWINS]
LONG = [b"a" * 37, b"a" * 88, b"a" * 87 + b"b", b"a" * 89, b"a" * 149, *LONG_TWINS]
GIANT = [b"0" * 65535, b"1" * 65535]
NAMES = [*SHORT, *LONG, *GIANT]
RESOURCES = [1, 1, 2, 3, 0, 1 << 31, U32_MAX - 1, U32_MAX]
MAXIMUMS = [5, 3, 1, U32_MAX, U32_MAX - 1, 1 << 31, 0, 2]
STORES: list[dict[str, int]] = [
    {"buckets": 8, "holdings": 16, "holdings_per_connection": 0, "name_memory": 10 * 64},
    {"buckets": 3, "holdings": 8, "holdings_per_connection": 2, "name_memory": 3 * 64},
    {"buckets": 1, "holdings": 3, "holdings_per_connection": 0, "name_memory": 0},
    {"buckets": 100, "holdings": 300, "holdings_per_connection": 0, "name_memory": 300 * 64},
    {"buckets": 8, "holdings": 64, "holdings_per_connection": 0, "name_memory": 2 * 1092 * 64},
    {"buckets": 5, "holdings": 16, "holdings_per_connection": 5, "name_memory": 5 * 64},
]
STEPS_NS = [1, 1_000_000, 100_000_000, 3_600_000_000_000]

# What a request is called where it is drawn by its bytes; libFuzzer mixes these in.
TOKENS = [
    wire.noop(0),
    wire.get(1, b"a"),
    wire.acquire(2, b"a", 1, 2),
    wire.acquire(2, b"a", U32_MAX, U32_MAX),
    wire.release(3, b"a", 1),
    wire.stats(4),
    wire.dump(5),
    wire.dump(6, limits=True),
    wire.frame(wire.Opcode.NOOP, 7, body_length=65546),
]


class Pair:
    """A connection: the session, its model, and the bytes that its peer has not sent yet."""

    def __init__(self, session: Any, model: ModelSession) -> None:
        self.session = session
        self.model = model
        self.unsent = b""


class Rig:
    """One store and its model."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.store = make_store(**sizes)
        self.model = Model(**sizes)
        self.pairs: list[Pair | None] = [None] * SESSIONS_MAX
        self.now_ns = 0
        self.frames = 0

    def pair(self, number: int) -> Pair:
        """The connection in that slot; a new one, if it was closing."""
        pair = self.pairs[number]
        if pair is not None and pair.session.closing:
            self.close(number)
        if self.pairs[number] is None:
            self.pairs[number] = Pair(self.store.session(), self.model.session())
        pair = self.pairs[number]
        assert pair is not None
        return pair

    def compare(self, pair: Pair, method: str, *data: bytes) -> None:
        """Gives input to the session; the model checks its output."""
        said = getattr(pair.session, method)(*map(fenced, data), self.now_ns)
        self.model.follow(pair.model, pair.session, method, said, *data)

    def send(self, pair: Pair, source: Source, how: int) -> None:
        """Sends the unsent bytes: at once, later, all but the last, or in pieces."""
        if how == 1:
            return
        data, pair.unsent = pair.unsent, b""
        if how == 2:
            kept = min(source.byte(), len(data))
            data, pair.unsent = data[: len(data) - kept], data[len(data) - kept :]
        for piece in source.pieces(data) if how == 3 else (data,):
            self.compare(pair, "receive", piece)

    def drain(self, pair: Pair) -> None:
        for _ in range(TURNS_MAX):
            if not pair.session.more:
                return
            self.compare(pair, "take_output")
        raise AssertionError("it never comes to its end")

    def close(self, number: int) -> None:
        """Closes twice; the session must produce no more output."""
        pair = self.pairs[number]
        if pair is None:
            return
        for _ in range(2):
            pair.session.closed(self.now_ns)
            self.model.closed(pair.model)
        self.compare(pair, "receive", wire.noop(1))
        self.compare(pair, "take_output")
        self.pairs[number] = None

    # -- operations: each takes the connection's place, how, and the rest of the input --

    def raw(self, number: int, how: int, source: Source) -> None:
        pair = self.pair(number)
        pair.unsent += source.take(source.byte())
        self.send(pair, source, how)

    def ask(self, number: int, how: int, source: Source, frame: bytes) -> None:
        pair = self.pair(number)
        self.frames += 1
        if self.frames <= FRAMES_MAX:
            pair.unsent += frame
        self.send(pair, source, how)

    def acquire(self, number: int, how: int, source: Source) -> None:
        name, resources, maximum = source.choice(NAMES), source.choice(RESOURCES), source.choice(MAXIMUMS)
        self.ask(number, how, source, wire.acquire(1, name, resources, maximum))

    def release(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, wire.release(2, source.choice(NAMES), source.choice(RESOURCES)))

    def get(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, wire.get(3, source.choice(NAMES)))

    def dump(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, wire.frame(wire.Opcode.DUMP, 4, flags=source.byte()))

    def others(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, source.choice(TOKENS))

    def burst(self, number: int, how: int, source: Source) -> None:
        """Acquires many counters, and perhaps releases them: idle ones, and stale entries of the ring."""
        first, count = source.byte(), source.byte() % 129
        self.frames += 2 * count
        if self.frames > FRAMES_MAX:
            return
        names = [b"burst-%d" % each for each in range(first, first + count)]
        pair = self.pair(number)
        pair.unsent += b"".join(wire.acquire(5, name, 1, U32_MAX) for name in names)
        if how & 1:
            pair.unsent += b"".join(wire.release(6, name, 1) for name in names)
        self.send(pair, source, how & 2)

    def take_output(self, number: int, how: int, source: Source) -> None:
        pair = self.pair(number)
        if how == 3:
            pair.session.wait()
        elif how == 0:
            self.drain(pair)
        self.compare(pair, "take_output")

    def eof(self, number: int, how: int, source: Source) -> None:
        self.compare(self.pair(number), "eof")

    def closed(self, number: int, how: int, source: Source) -> None:
        self.close(number)

    def tick(self, number: int, how: int, source: Source) -> None:
        self.store.tick(self.now_ns)
        self.model.tick()

    def begin_window(self, number: int, how: int, source: Source) -> None:
        window = max(0, self.model.window + how - 1)
        self.store.begin_window(window)
        self.model.begin_window(window)

    def advance(self, number: int, how: int, source: Source) -> None:
        self.now_ns += STEPS_NS[how]

    def limit_holdings(self, number: int, how: int, source: Source) -> None:
        holdings = source.byte()
        self.store.limit_holdings(holdings)
        self.model.limit_holdings(holdings)

    def begin_drain(self, number: int, how: int, source: Source) -> None:
        if how == 3 and number == 3:
            self.store.begin_drain()
            self.model.begin_drain()
        elif how == 2 and number == 3:
            self.store.part()
            self.model.part()

    # -- what is always so --

    def agrees(self) -> None:
        self.store.audit()
        self.model.agrees(self.store)

    def end(self) -> None:
        """Ends all connections; everything must be given back, once."""
        self.agrees()
        for number in range(SESSIONS_MAX):
            self.close(number)
        while self.store.next_deadline() >= 0:
            self.tick(0, 0, Source(b""))
            self.agrees()
        snapshot = self.store.snapshot()
        assert (snapshot["busy"], snapshot["holdings"], snapshot["holdings_leaving"]) == (0, 0, 0)


OPERATIONS = [
    Rig.raw,
    Rig.acquire,
    Rig.release,
    Rig.get,
    Rig.dump,
    Rig.others,
    Rig.burst,
    Rig.take_output,
    Rig.eof,
    Rig.closed,
    Rig.tick,
    Rig.begin_window,
    Rig.advance,
    Rig.limit_holdings,
    Rig.begin_drain,
    Rig.acquire,
]


def one_input(data: bytes) -> None:
    with contextlib.suppress(Unmodelled):
        play(data)


def play(data: bytes) -> None:
    source = Source(data)
    rig = Rig(source.choice(STORES))
    for number in range(OPERATIONS_MAX):
        if not source:
            break
        operation = source.byte()
        OPERATIONS[operation & 15](rig, operation >> 4 & 3, operation >> 6, source)
        if number % AUDIT_EVERY == 0:
            rig.agrees()
    rig.end()
