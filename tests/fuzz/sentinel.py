"""Sessions of the sentinel protocol agree with the dict model, byte by byte, and the store passes its audit.

Several connections on one store: requests well formed or raw bytes, cut anywhere; rules and bounds that change,
late ticks, and a clock that often stops exactly when a lease or a part of a window ends, or the nanosecond
before. A token ends when its lease does, not before, and not long after; at the end all have ended.

Input: which store, then operations: a byte whose low half selects the operation, whose next two bits select the
connection, and whose last two a variant; and the operation's arguments."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel._session import SentinelSession
from counterd.protocols.sentinel._store import SentinelStore
from counterd.protocols.sentinel._tables import TABLES
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules
from counterd.protocols.sentinel.wire import MessageType, Status
from fuzz.stream import Source, fenced
from property.sentinel_model import MS, TICK_NS, Model, ModelSession, frames_of

SESSIONS_MAX = 4
OPERATIONS_MAX = 150
AUDIT_ONE_IN = 4  # inputs, by their checksum
RULES_MAX, ITEMS_MAX, VALUES_MAX = 16, 16, 1024
START_NS = 10**13
SWEEP_NS = 100 * MS
SECOND = 1000 * MS
SLOWEST_NS = 6 * SECOND  # of the leases of those who have gone
TURNS_MAX = 10_000

ONE, TWO = "one", "two" * 300
NAMESPACES = [b"one", TWO.encode(), b"three", b"", b" \t\r\n\x1c", b"n" * 1013]
RATES, CALLS, PARAMS = (1, 2, 3), (11, 12, 13), (21, 22)
FLOWS = [*RATES, *CALLS, *PARAMS, 99, 0, -1, -(1 << 63), (1 << 63) - 1]
COUNTS = [1, 1, 2, 3, 7, 0, -1, (1 << 31) - 1]
VALUES = [
    wire.encode_value(value) for value in ("hot", "", 7, wire.Typed(wire.Tag.LONG, 7), True, float("nan"), "v" * 200)
]
VALUES += [b"\6\2", b"\3\xff\xf0\0\0\0\0\0\1", b"\4\x7f\xff\xff\xff", b"\4\x7f\x80\0\0", b"\2\0", b"\5\0\0"]
STEPS_NS = [1, MS, 99 * MS, 100 * MS, 250 * MS, SECOND, 3600 * SECOND, 10**17]
LEASES = {11: (500, 200, 0), 12: (1000, 1500, 1), 13: (400, 3000, 2)}
END_NS = 1 << 61
TOKENS_TABLE, _ = TABLES


def rate(flow_id: int, namespace: str, count: float, kind: int, shape: tuple[int, int]) -> FlowRule:
    return FlowRule(namespace, flow_id, "rate", 1, count, kind, *shape, 2000, 2000, 0)


def calls(flow_id: int, namespace: str, count: float, kind: int, grade: int = 0) -> FlowRule:
    return FlowRule(namespace, flow_id, "calls", grade, count, kind, 10, 1000, *LEASES[flow_id])


def values(flow_id: int, namespace: str, count: float, samples: int, items: dict[wire.Value, int]) -> ParamRule:
    encoded = {wire.encode_value(item): limit for item, limit in items.items()}
    return ParamRule(namespace, flow_id, "values", count, flow_id & 1, samples, 1000, encoded)


VARIANTS = [
    Rules(
        (
            rate(1, ONE, 5, 1, (10, 1000)), rate(2, ONE, 3, 0, (4, 2000)), rate(3, TWO, 2.5, 1, (1, 500)),
            calls(11, ONE, 4, 1), calls(12, ONE, 2, 0), calls(13, TWO, 6, 1),
        ),
        (values(21, ONE, 3, 10, {"hot": 6, True: 1}), values(22, TWO, 2, 50, {})),
    ),
    Rules(
        (rate(2, ONE, 2, 0, (4, 2000)), rate(3, TWO, 1e300, 1, (1, 500)), calls(11, ONE, 1e9, 1)),
        (values(21, ONE, 2, 10, {"": 0, "v" * 200: 4}),),
    ),
    Rules(
        (
            rate(1, TWO, 8, 1, (5, 1000)), rate(2, TWO, 3, 0, (128, 1280)), calls(11, TWO, 9, 1),
            calls(12, ONE, 3.5, 0, grade=1), calls(13, ONE, 3, 1),
        ),
        (values(21, TWO, 3, 2, {"hot": 6, float("nan"): 1}), values(22, TWO, 1e9, 50, {7: 9})),
    ),
    Rules(),
]  # fmt: skip

TOKENS = [
    wire.ping(1, b"one"),
    wire.flow(2, 1, 1, True),
    wire.param_flow(3, 21, 1, ["hot", 7]),
    wire.acquire(4, 11, 1),
    wire.release(5, 1),
    wire.keep(6, 1),
    *VALUES,
]


def make_store(tokens: int) -> SentinelStore:
    """A small store, without rules and bounds."""
    return SentinelStore(
        namespaces=64, holdings=64, holdings_per_connection=64, name_memory=1 << 18, hash_key=bytes(16),
        token_key=bytes(16), reply_max=16, posted_max=65536, tokens=tokens, param_values=VALUES_MAX, rules=RULES_MAX,
        items=ITEMS_MAX, make_session=SentinelSession,
    )  # fmt: skip


class BoundedModel(Model):
    """The model, with a bound for tokens."""

    def __init__(self, max_allowed_qps: int, tokens_max: int) -> None:
        super().__init__(max_allowed_qps)
        self.tokens_max = tokens_max

    def acquire(self, *asked: Any) -> tuple[int, ...]:
        draining = self.draining
        self.draining = draining or len(self.tokens) == self.tokens_max
        told = super().acquire(*asked)
        self.draining = draining
        return told


class Pair:
    """A connection: session, model, unsent bytes of its peer, and output that is no whole frame yet."""

    def __init__(self, session: Any, model: ModelSession) -> None:
        self.session = session
        self.model = model
        self.unsent = b""
        self.heard = bytearray()


class Rig:
    """One store and its model."""

    def __init__(self, kind: int) -> None:
        tokens = (400, 6)[kind & 1]
        qps = (1_000_000, 9)[kind >> 1 & 1]
        self.now_ns = START_NS
        self.bounded = False  # a sweep may leave something for the next
        self.store = make_store(tokens)
        self.qps = qps
        self.set_limits(0)
        self.model = BoundedModel(qps, tokens)
        self.load(VARIANTS[kind >> 2 & 3])
        self.pairs: list[Pair | None] = [None] * SESSIONS_MAX
        self.ids: list[int] = []

    def load(self, rules: Rules) -> None:
        self.store.load_rules(rules)
        self.model.load_rules(rules)

    def set_limits(self, most: int) -> None:
        self.bounded = self.bounded or most != 0
        self.store.set_limits(
            max_allowed_qps=self.qps, sweep_interval_ns=SWEEP_NS, sweep_max_tokens=most, sweep_max_duration_ns=50 * MS
        )

    @property
    def connected(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair is not None]

    def pair(self, number: int) -> Pair:
        found = self.pairs[number]
        if found is None:
            found = self.pairs[number] = Pair(self.store.session(self.now_ns), self.model.session(self.now_ns))
        return found

    # -- comparing --

    def learn(self) -> None:
        """Learns which tokens the store's sweeps have freed; their leases must have ended."""
        model = self.model
        model.now_ns = self.now_ns
        if self.store.held() == len(model.tokens):
            return
        walk = TOKENS_TABLE.open(self.store, {"limit": "1000"})
        while not walk.step():
            pass
        there = {int(row[0]) for row in walk.rows()}
        assert there <= model.tokens.keys()
        for id in model.tokens.keys() - there:
            assert model.tokens[id].ends_ns(self.now_ns) <= self.now_ns
            del model.tokens[id]

    def send(self, pair: Pair, source: Source, how: int) -> None:
        """Sends the unsent bytes: at once, later, all but the last, or in pieces. Then both outputs must be equal."""
        if how == 1:
            return
        data, pair.unsent = pair.unsent, b""
        if how == 2:
            kept = min(source.byte(), len(data))
            data, pair.unsent = data[: len(data) - kept], data[len(data) - kept :]
        self.learn()
        said = bytearray()
        for piece in source.pieces(data) if how == 3 else (data,):
            said += pair.session.receive(fenced(piece), self.now_ns)
            for _ in range(TURNS_MAX):
                if not pair.session.more:
                    break
                said += pair.session.take_output(self.now_ns)
        pair.heard += data
        for frame in frames_of(pair.heard):
            self.compare(pair, frame, said)
        assert not said
        assert not pair.session.closing
        assert not pair.session.more

    def compare(self, pair: Pair, frame: bytes, said: bytearray) -> None:
        size = 2 + int.from_bytes(said[:2], "big")
        told = bytes(said[:size])
        del said[:size]
        granted = 0
        if told[6:8] == bytes([MessageType.ACQUIRE, Status.OK]):
            granted = int.from_bytes(told[8:], "big", signed=True)
            assert granted != 0
            self.ids.append(granted)
        assert told == self.model.answer(pair.model, frame, granted)

    def fetch(self) -> None:
        """Gives the store ticks until nothing is due."""
        for _ in range(TURNS_MAX):
            if not 0 <= self.store.next_deadline() <= self.now_ns:
                break
            self.store.tick(self.now_ns)
        else:
            raise AssertionError("it is always due")
        self.learn()
        if not self.bounded:
            assert not self.model.overdue(self.now_ns - SWEEP_NS - 2 * TICK_NS)

    def forget(self, number: int) -> None:
        """Ends the connection: closed twice, it must produce no more output. Gives ticks, as only they remove it from
        its namespaces.
        """
        pair = self.pairs[number]
        assert pair is not None
        self.learn()
        self.pairs[number] = None
        for _ in range(2):
            pair.session.closed(self.now_ns)
        pair.model.closed(self.now_ns)
        assert pair.session.receive(wire.flow(1, 1, 1), self.now_ns) == b""
        self.fetch()

    # -- operations: each takes the connection's place, how, and the rest of the input --

    def ask(self, number: int, how: int, source: Source, request: bytes) -> None:
        pair = self.pair(number)
        pair.unsent += request
        self.send(pair, source, how)

    def raw(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, source.take(source.byte()))

    def frame(self, number: int, how: int, source: Source) -> None:
        """A frame of any type with any data. Its length is true, or close to the largest one."""
        kind, size = source.byte(), source.byte()
        data = source.take(size) if size < 250 else bytes(1007 + 4 * size - 1000)
        self.ask(number, how, source, wire.frame(number, kind if kind < 128 else kind - 256, data))

    def ping(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, wire.ping(source.byte(), source.choice(NAMESPACES)))

    def flow(self, number: int, how: int, source: Source) -> None:
        flow_id, what = source.choice(FLOWS), source.byte()
        self.ask(number, how, source, wire.flow(1, flow_id, COUNTS[what & 7], what >> 3 & 1 == 1) * (1 + (what >> 5)))

    def param(self, number: int, how: int, source: Source) -> None:
        flow_id, what = source.choice(FLOWS), source.byte()
        data = b"".join(source.choice(VALUES) for _ in range(what >> 3 & 3))
        count = (what >> 3 & 3) + (what >> 7)  # one too many, perhaps
        body = struct.pack(">qii", flow_id, COUNTS[what & 7], count) + data
        self.ask(number, how, source, wire.frame(2, MessageType.PARAM, body))

    def acquire(self, number: int, how: int, source: Source) -> None:
        flow_id, what = source.choice(FLOWS), source.byte()
        self.ask(
            number, how, source, wire.acquire(3, flow_id, COUNTS[what & 7], what >> 3 & 1 == 1) * (1 + (what >> 5))
        )

    def token(self, source: Source) -> int:
        """One of the last granted tokens, or an unknown one."""
        which = source.byte()
        return self.ids[-1 - which] if which < len(self.ids) else which - 128

    def release(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, wire.release(4, self.token(source)))

    def keep(self, number: int, how: int, source: Source) -> None:
        self.ask(number, how, source, wire.keep(5, self.token(source)))

    def eof(self, number: int, how: int, source: Source) -> None:
        """The peer half-closes."""
        pair = self.pairs[number]
        if pair is not None:
            assert pair.session.eof(self.now_ns) == b""
            assert pair.session.closing
            self.forget(number)

    def closed(self, number: int, how: int, source: Source) -> None:
        if self.pairs[number] is not None:
            self.forget(number)

    def tick(self, number: int, how: int, source: Source) -> None:
        if how & 1:
            self.fetch()
        else:
            self.store.tick(self.now_ns)
        self.learn()

    def advance(self, number: int, how: int, source: Source) -> None:
        """Advances the clock by a step; or to a moment at which a lease or a part of a window ends, or the nanosecond
        before.
        """
        if how == 0:
            self.now_ns = min(self.now_ns + source.choice(STEPS_NS), END_NS)
            return
        self.learn()
        lengths = {window.length_ns for window in self.model.windows.values()}
        moments = {(self.now_ns // length + 1) * length for length in lengths}
        moments |= {token.ends_ns(self.now_ns) for token in self.model.tokens.values()}
        coming = sorted(moment for moment in moments if moment > self.now_ns)
        if coming:
            self.now_ns = max(self.now_ns, source.choice(coming) - (how & 1))

    def rules(self, number: int, how: int, source: Source) -> None:
        """Loads other rules; sometimes, other bounds of the sweep."""
        self.learn()
        if how == 3:
            self.set_limits(source.byte() % 3)
        else:
            self.load(VARIANTS[number])

    def nobody(self, number: int, how: int, source: Source) -> None:
        """A request of an extension, for an owner that never ends."""
        self.learn()
        id = self.token(source)
        if how == 0:
            flow_id, count = FLOWS[id % len(FLOWS)], COUNTS[number]
            status, id = self.store.request_token(flow_id, count, False, 0, self.now_ns)
            assert (status, id) == ((*self.model.acquire(None, flow_id, count, id), 0)[:2] if flow_id > 0 else (-4, 0))
            self.ids += [id] if id else []
        elif how == 1:
            assert self.store.keep_token(id, 0, self.now_ns) == (*self.model.keep(None, id), 0)[:2]
        else:
            assert (self.store.release_token(id, self.now_ns),) == self.model.release(id)

    # -- what is always so --

    def agrees(self, audited: bool) -> None:
        self.learn()
        if audited:
            self.store.audit()
        assert self.store.sessions_open == len(self.connected) == len(self.model.sessions)
        for flow_id in CALLS:
            told = self.store.flow(flow_id)
            assert (told["now_calls"] if told else 0) == self.model.now_calls(flow_id)

    def end(self, audited: bool) -> None:
        """Ends all connections, whose tokens must end; tokens without an owner are released."""
        self.agrees(audited)
        told = sorted((*key, count) for key, count in self.model.outcomes.items())
        assert sorted(self.store.outcomes()) == told
        for number in range(SESSIONS_MAX):
            if self.pairs[number] is not None:
                self.forget(number)
        for id, token in list(self.model.tokens.items()):
            if token.owner is None:
                assert (self.store.release_token(id, self.now_ns),) == self.model.release(id)
        self.now_ns += SLOWEST_NS
        for _ in range(TURNS_MAX):
            self.fetch()
            if (due := self.store.next_deadline()) < 0:
                break
            self.now_ns = max(self.now_ns, due)
        self.agrees(audited)
        figures = self.store.snapshot()
        assert not any(figures[name] for name in ("tokens", "param_values", "namespaces", "holdings"))
        assert figures["granted"] == figures["released"] + figures["expired_offline"] + figures["expired_lease"]


OPERATIONS = [
    "raw", "frame", "ping", "flow", "flow", "param", "acquire", "acquire", "release", "keep", "eof", "closed", "tick",
    "advance", "rules", "nobody",
]  # fmt: skip


def one_input(data: bytes) -> None:
    source = Source(data)
    rig = Rig(source.byte())
    for _ in range(OPERATIONS_MAX):
        if not source:
            break
        operation = source.byte()
        getattr(rig, OPERATIONS[operation & 15])(operation >> 4 & 3, operation >> 6, source)
        rig.agrees(audited=False)
    rig.end(zlib.crc32(data) % AUDIT_ONE_IN == 0)
