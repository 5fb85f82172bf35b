"""The throttr protocol against the plain-dict model: whatever is asked, by whom and when, both say the same.

Several connections on one store, at every value size, streams cut anywhere, and time that goes on when it is told to:
often to the very moment at which something expires, or a nanosecond before. COUNTERD_EXAMPLES=50 looks fifty times as
long.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance import vectors
from conformance.throttr.dialect import MAX_MESSAGE
from conformance.throttr.engine import make_store
from kit.machine import examples
from kit.pump import MINUTE_NS, START_NS, TURNS_MAX, UNIX_NS, Pump
from property.throttr_model import (
    CHANNEL,
    CHANNELS,
    CONNECTION,
    CONNECTIONS,
    EVENT,
    GET,
    INFO,
    INSERT,
    LIST,
    PUBLISH,
    PURGE,
    QUERY,
    SET,
    STAT,
    STATS,
    SUBSCRIBE,
    UNSUBSCRIBE,
    UPDATE,
    WHOAMI,
    Answer,
    Model,
    ModelSession,
    check_answers,
    check_reordered,
    encode,
)

if TYPE_CHECKING:
    from counterd._core import Session

SESSIONS_MAX = 4
AUDIT_EVERY = 8  # steps: it looks at the whole region
SIZES = (1, 2, 4, 8)


class Filled(NamedTuple):
    """Bytes that are drawn as this, so that a failing example can be read."""

    letter: bytes
    size: int

    def bytes(self, size_max: int = 255) -> bytes:
        return self.letter * min(self.size, size_max)


KEYS = [Filled(b"a", 1), Filled(b"b", 1), Filled(b"c", 1), *(Filled(b"k", size) for size in (0, 24, 25, 84, 85, 255))]
CHANNEL_NAMES = [Filled(b"a", 1), Filled(b"b", 1), Filled(b"*", 1), Filled(b"n", 0), Filled(b"n", 255)]
VALUE_SIZES = [0, 1, 35, 36, 60, 61, 120, 121, 255]
VALUE_SIZES_BIG = [256, 1021, 15_000]

# A number is drawn as an offset: from 0, or downwards from the largest of N bytes.
numbers = st.one_of(st.integers(0, 5), st.integers(0, 5), st.integers(0, 255), st.integers(-3, -1))
ttl_types = st.one_of(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.sampled_from([0, 7, 255]))
ttls = st.one_of(st.integers(0, 5), st.integers(50, 255), st.integers(50, 255), st.just(-1))
keys = st.one_of(st.integers(0, 3), st.integers(0, len(KEYS) - 1)).map(KEYS.__getitem__)
channels = st.one_of(st.integers(0, 1), st.integers(0, len(CHANNEL_NAMES) - 1)).map(CHANNEL_NAMES.__getitem__)
values = st.builds(Filled, st.sampled_from([b"x", b"y"]), st.sampled_from([*VALUE_SIZES * 3, *VALUE_SIZES_BIG]))
rarely = st.integers(0, 9)

plain = st.one_of(
    st.tuples(st.just(INSERT), numbers, ttl_types, ttls, keys),
    st.tuples(st.just(INSERT), numbers, ttl_types, ttls, keys),
    st.tuples(st.just(SET), ttl_types, ttls, keys, values),
    st.tuples(st.just(SET), ttl_types, ttls, keys, values),
    st.tuples(st.just(UPDATE), st.just(0), st.integers(0, 3), numbers, keys),
    st.tuples(st.just(UPDATE), st.just(1), st.integers(0, 3), ttls, keys),
    st.tuples(st.just(UPDATE), st.integers(0, 3), st.sampled_from([0, 1, 2, 3, 255]), numbers, keys),
    st.tuples(st.sampled_from([QUERY, QUERY, GET, GET, STAT, PURGE]), keys),
    st.tuples(st.sampled_from([LIST, STATS, INFO, WHOAMI])),
)
social = st.one_of(
    st.tuples(st.just(PUBLISH), channels, values),
    st.tuples(st.just(PUBLISH), channels, values),
    st.tuples(st.sampled_from([SUBSCRIBE, SUBSCRIBE, UNSUBSCRIBE, CHANNEL]), channels),
    st.tuples(st.sampled_from([CHANNELS, CONNECTIONS, WHOAMI])),
    # In place of an id, or of a channel, whose it is.
    st.tuples(st.just(CONNECTION), st.integers(0, SESSIONS_MAX)),
    st.tuples(st.just(PUBLISH), st.integers(0, SESSIONS_MAX), values),
    st.tuples(st.sampled_from([SUBSCRIBE, UNSUBSCRIBE, CHANNEL]), st.integers(0, SESSIONS_MAX)),
)


@st.composite
def drawn(draw: st.DrawFn, depth: int = 0) -> tuple[Any, ...] | bytes:
    """A request, or what is no request within an EVENT. A function, so that hypothesis need not spell it all out."""
    kind = draw(st.integers(0, 9))
    if kind == 0 and depth < 3:
        return (EVENT, draw(channels), draw(drawn(depth + 1)))
    if kind == 1 and depth > 0:
        return draw(st.binary(max_size=12))
    return draw(social if kind > 5 else plain)


requests = drawn()
mistakes = st.one_of(st.sampled_from([b"\0", b"\x0a", b"\x1a", b"\x20", b"\xff"]), st.just("too long"))
batches = st.lists(requests, min_size=1, max_size=8)
cuts = st.lists(st.integers(1, 1 << 16), max_size=6)


@pytest.mark.parametrize("size", SIZES)
def test_the_model_does_what_the_vectors_say(size: int) -> None:
    """So that what is compared with the engine is what the document says, wherever a vector says it."""

    def play(case: vectors.Case) -> None:
        bench = Pump(Model(size, MAX_MESSAGE))
        vectors.run_case(case, bench.connect, advance=bench.advance)

    vectors.run_cases(vectors.load("throttr", value_size=size), play)


class Pair:
    """A connection of the store, its model, what its peer has not sent yet, and what it has been told since."""

    def __init__(self, session: Session, model: ModelSession) -> None:
        self.session = session
        self.model = model
        self.unsent = bytearray()
        self.said = bytearray()
        self.replies: list[Answer] = []
        self.events: dict[bytes, list[Answer]] = defaultdict(list)
        session.owner = self

    def peer(self) -> tuple[str, int]:
        """What a protocol asks the owner of a session for: here that of a Unix socket."""
        return "", 0


class ThrottrMachine(RuleBasedStateMachine):
    """One store and its model, side by side."""

    @initialize(
        size=st.sampled_from(SIZES),
        grace_ns=st.sampled_from([0, 0, 0, 10_000_000_000]),
        eager=st.sampled_from([True, True, False]),
    )
    def make(self, size: int, grace_ns: int, eager: bool) -> None:
        self.size = size
        self.eager = (
            eager  # events are fetched at once; else when the rule says so, and then only channels are in order
        )
        self.now_ns = START_NS
        self.store = make_store(size, memory_limit=1 << 22, expiry_grace_ns=grace_ns)
        self.model = Model(size, MAX_MESSAGE, grace_ns)
        for store in (self.store, self.model):
            store.set_wall(UNIX_NS, START_NS)
        self.pairs: list[Pair] = []
        self.agreed = True
        self.audits = 0

    def connected(self) -> Pair:
        """Its id is learned from the store."""
        session = self.store.session(self.now_ns)
        identity = session.receive(encode(self.size, WHOAMI), self.now_ns)[1:]
        assert len(identity) == 16
        assert identity not in self.model.sessions
        pair = Pair(session, self.model.session(self.now_ns, identity))
        pair.model.hear(encode(self.size, WHOAMI), self.now_ns)
        pair.model.take_answers()
        self.pairs.append(pair)
        return pair

    def pair(self, number: int) -> Pair:
        return self.pairs[number % len(self.pairs)] if self.pairs else self.connected()

    def encoded(self, request: Any) -> bytes:
        """Numbers below 0 count down from the largest; where a name or an id belongs they say whose."""
        if isinstance(request, bytes):
            return request
        opcode, *fields = request
        if opcode == EVENT:
            payload = self.encoded(fields[1])
            return encode(self.size, EVENT, fields[0].bytes(), payload if len(payload) < 256**self.size else b"")
        for index, value in enumerate(fields):
            if isinstance(value, Filled):
                fields[index] = value.bytes(256**self.size - 1)
            elif opcode in (CONNECTION, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, CHANNEL):
                fields[index] = self.identity(value) if opcode == CONNECTION else self.identity(value).hex().encode()
            elif value < 0:
                fields[index] = 256**self.size + value
        return encode(self.size, opcode, *fields)

    def identity(self, number: int) -> bytes:
        return self.pairs[number].model.identity if number < len(self.pairs) else bytes(16)

    # -- comparing --

    def tell(self, pair: Pair, data: bytes, positions: list[int]) -> None:
        """Both hear it, the store's in pieces; then both must have said the same."""
        self.agreed = False
        borders = sorted({0, len(data), *(position % len(data) for position in positions if data)})
        for start, end in itertools.pairwise(borders):
            pair.said += pair.session.receive(data[start:end], self.now_ns)
            self.drain(pair)
        pair.model.hear(data, self.now_ns)
        self.compare()

    def drain(self, pair: Pair) -> None:
        for _ in range(TURNS_MAX):
            if not pair.session.more:
                return
            said = pair.session.take_output(self.now_ns)
            pair.said += said
            if not said and 0 <= self.store.next_deadline() <= self.now_ns:
                self.store.tick(self.now_ns)
        raise AssertionError("it never comes to its end")

    def fetch(self) -> None:
        """The store's turns, and the output that others have caused."""
        for _ in range(TURNS_MAX):
            due = 0 <= self.store.next_deadline() <= self.now_ns
            if due:
                self.store.tick(self.now_ns)
            dirty = self.store.take_dirty()
            for session in dirty:
                if session.owner is not None:
                    session.owner.said += session.take_output(self.now_ns)
                    self.drain(session.owner)
            if not due and not dirty:
                return
        raise AssertionError("it is always due")

    def compare(self, *, fetched: bool = False) -> None:
        self.agreed = False
        if self.eager or fetched:
            self.fetch()
        for pair in self.pairs:
            answers = pair.model.take_answers()
            if self.eager:
                check_answers(bytes(pair.said), answers)
            else:
                for answer in answers:
                    (pair.replies if answer.channel is None else pair.events[answer.channel]).append(answer)
                check_reordered(bytes(pair.said), pair.replies, pair.events, self.size)
                assert not pair.replies
                assert not fetched or not any(pair.events.values())
            pair.said.clear()
            assert pair.session.closing == pair.model.closing
        for pair in [pair for pair in self.pairs if pair.session.closing]:
            self.forget(pair)
        self.agreed = True

    def forget(self, pair: Pair) -> None:
        """It is gone: closed twice, it says nothing any more."""
        self.pairs.remove(pair)
        pair.session.owner = None
        for _ in range(2):
            pair.session.closed(self.now_ns)
        pair.model.closed(self.now_ns)
        assert pair.session.receive(encode(self.size, WHOAMI), self.now_ns) == b""
        assert pair.session.take_output(self.now_ns) == b""
        assert not pair.session.more

    # -- what peers do --

    @precondition(lambda self: len(self.pairs) < SESSIONS_MAX)
    @rule()
    def connect(self) -> None:
        self.connected()

    @rule(number=st.integers(0, 3), batch=batches, held_back=st.integers(-20, 20), positions=cuts)
    def send(self, number: int, batch: list[Any], held_back: int, positions: list[int]) -> None:
        """Several requests at once; the last bytes may come only with the next."""
        pair = self.pair(number)
        pair.unsent += b"".join(map(self.encoded, batch))
        size = len(pair.unsent) - max(0, min(held_back, len(pair.unsent)))
        data = bytes(pair.unsent[:size])
        del pair.unsent[:size]
        self.tell(pair, data, positions)

    @rule(number=st.integers(0, 3), channel=channels, count=st.integers(1, 60), positions=cuts)
    def publish_much(self, number: int, channel: Filled, count: int, positions: list[int]) -> None:
        pair = self.pair(number)
        assume(not pair.unsent)
        payloads = [b"%d" % each for each in range(count)]
        self.tell(pair, b"".join(encode(self.size, PUBLISH, channel.bytes(), each) for each in payloads), positions)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 3), chance=rarely, mistake=mistakes, behind=batches, positions=cuts)
    def blunder(self, number: int, chance: int, mistake: Any, behind: list[Any], positions: list[int]) -> None:
        """Framing is lost: one 00, and what is behind is not looked at."""
        pair = self.pair(number)
        assume(chance == 0 and not pair.unsent)
        if mistake == "too long":
            assume(self.size > 1)
            mistake = encode(self.size, PUBLISH, b"", b"")[:2] + (60_000).to_bytes(self.size, "little")
        self.tell(pair, mistake + b"".join(map(self.encoded, behind)), positions)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 3), chance=rarely, batch=st.lists(requests, max_size=3))
    def end(self, number: int, chance: int, batch: list[Any]) -> None:
        """The peer sends its last."""
        pair = self.pair(number)
        assume(chance < 3)
        if not pair.unsent and batch:
            self.tell(pair, b"".join(map(self.encoded, batch)), [])
        self.compare(fetched=True)
        if pair in self.pairs:
            pair.said += pair.session.eof(self.now_ns)
            self.drain(pair)
            pair.model.eof(self.now_ns)
            self.compare()

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 3), chance=rarely)
    def close(self, number: int, chance: int) -> None:
        assume(chance < 3)
        self.forget(self.pair(number))
        self.compare()

    # -- what happens to the store --

    @rule()
    def fetch_events(self) -> None:
        self.compare(fetched=True)

    @rule(duration_ns=st.sampled_from([1, 1_000, 1_000_000, 1_000_000_000, MINUTE_NS // 2, MINUTE_NS, 3600 * 10**9]))
    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    @rule(number=st.integers(0, 9), before=st.integers(0, 1))
    def advance_to_an_expiry(self, number: int, before: int) -> None:
        """Of a key that is there, or to the end of its grace."""
        moments = [key.ends_ns + grace for key in self.model.keys.values() for grace in {0, self.model.grace_ns}]
        coming = sorted(moment for moment in moments if self.now_ns < moment < self.now_ns + 10**15)
        assume(coming)
        self.now_ns = max(self.now_ns, coming[number % len(coming)] - before)

    @rule()
    def tick(self) -> None:
        self.store.tick(self.now_ns)

    # -- what is always so --

    @invariant()
    def is_sound(self) -> None:
        self.audits += 1
        if self.audits % AUDIT_EVERY == 0:
            self.store.audit()
        assert self.store.sessions_open == len(self.pairs) == len(self.model.sessions)

    def teardown(self) -> None:
        """Everything there is, told once more, and then everybody goes."""
        if not hasattr(self, "pairs") or not self.agreed:
            return
        self.compare(fetched=True)
        last = self.connected()
        overview = [LIST, STATS, CHANNELS, CONNECTIONS]
        self.tell(last, b"".join(encode(self.size, opcode) for opcode in overview), [])
        self.compare(fetched=True)
        assert sorted(self.store.outcomes()) == sorted((*key, count) for key, count in self.model.outcomes.items())
        for pair in list(self.pairs):
            self.forget(pair)
        self.fetch()
        self.store.audit()
        assert self.store.sessions_open == 0


ThrottrMachine.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestThrottrProtocol = ThrottrMachine.TestCase
