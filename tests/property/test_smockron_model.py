"""The smockron protocol against the plain-dict model: whatever is sent, by whom and when, both say the same.

Several connections on both ports of one store, streams cut anywhere, subscribers that do not read, rules that change,
somebody else who decides for a while, and time that goes on when it is told to: often to the very tick at which
something is forgotten, or a nanosecond before. There is room for a few identifiers only. COUNTERD_EXAMPLES=50 looks
fifty times as long.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance import vectors
from conformance.smockron.engine import RULES, Pump, make_store
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.rules import parse_rules
from counterd.protocols.smockron.wire import COMMAND, MORE, SocketType
from kit.machine import examples
from kit.pump import START_NS, TURNS_MAX, UNIX_NS
from property.smockron_model import ACCOUNTING, CALLS_AHEAD, CONTROL, TICK_NS, Model, ModelSession, tick_of
from property.test_tables import TABLES, walked

if TYPE_CHECKING:
    from counterd._core import Session

SESSIONS_MAX = 5
AUDIT_EVERY = 4  # steps: it looks at the whole region
MESSAGE_MAX, POSTED_MAX = 1 << 13, 1 << 14
MS, SECOND, HOUR = 1_000_000, 1_000_000_000, 3600 * 1_000_000_000


class Filled(NamedTuple):
    """Bytes that are drawn as this, so that a failing example can be read."""

    letter: bytes
    size: int

    def bytes(self) -> bytes:
        return self.letter * self.size


LONG = "d" * 255
VARIANTS = [
    parse_rules(json.dumps(document))
    for document in (
        {
            "a": {"rate": "1/sec", "burst": 3},
            "ab": {"rate": "7/sec", "burst": 2},
            "": {"rate": "3000/sec", "burst": "2 ms"},
            LONG: {"interval": "1 day", "burst": 0},
        },
        {
            "a": {"rate": "11/sec", "burst": 5},
            "ab": {"rate": "3 per 2 min", "burst": 0},
            "": {"interval": 0.25, "burst": 1.5},
            "e" * 41: {"interval": 3650 * 86_400_000, "burst": 1},
        },
        {"ab": {"rate": "999/hour", "burst": "1 hour"}, LONG: {"rate": "10/sec", "burst": 1}},
        {},
    )
]
DOMAINS = [Filled(b"a", 1), Filled(b"", 0), Filled(b"d", 255), Filled(b"e", 41), Filled(b"d", 256), Filled(b"x", 1)]
NAMES = [*(Filled(bytes([letter]), 1) for letter in b"abcdef"), *(Filled(b"n", size) for size in (0, 24, 25, 255, 256))]
LONG_NAMES = [Filled(b"l", 4096), Filled(b"m", 4096), Filled(b"l", 4097)]

domains = st.one_of(st.just(Filled(b"a", 1)), st.just(Filled(b"ab", 1)), st.sampled_from(DOMAINS))
names = st.one_of(st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from(NAMES + LONG_NAMES))
large = st.sampled_from([*NAMES[-2:], LONG_NAMES[0]])
# Of a request, after the store's time; or what is no time, or none that is taken.
offsets_ms = st.one_of(
    st.integers(-3000, 3000), st.sampled_from([-(10**9), 0, 0, 0, 1, 366 * 86_400_000, 366 * 86_400_000 + 1])
)
odd_times = st.sampled_from([b"", b"x", b"-1", b"1e3", b" 1", b"1.", b"1.x", b"7.25", b"0" * 40, b"9" * 30, b"nan"])
times = st.one_of(offsets_ms, offsets_ms, offsets_ms, odd_times)
statuses = st.sampled_from([b"ACCEPTED"] * 6 + [b"DELAYED"] * 2 + [b"REJECTED", b"FORGET", b"accepted", b"", b"OK\0"])
accounts = st.tuples(st.just("account"), domains, st.booleans(), statuses, names, times, times, st.integers(0, 2))
prefixes = st.sampled_from([b"", b"a", b"a\0", b"ab", b"ab\0", b"d" * 200, b"\0", b"x", b"e" * 256, b"e" * 257])
contexts = st.sampled_from([b"", b"c", b"c" * 16, b"c" * 17])
ttls = st.sampled_from([0, 1, 10, 65535])
pings = st.tuples(st.just("ping"), ttls, contexts)
subscriptions = st.tuples(
    st.sampled_from(["subscribe", "subscribe", "cancel", "subscribe by message", "cancel by message"]), prefixes
)
oddities = st.sampled_from(
    [
        wire.command(b"READY"),
        wire.command(b"PONG", b"x"),
        wire.command(b"PING", b"\0"),
        wire.command(b""),
        wire.frame(b"", COMMAND),
        wire.frame(b"\5PI", COMMAND),
        wire.message(b""),
        wire.message(b"a\0", b"ACCEPTED", b"x", b"1"),
        wire.message(*[b"a"] * 64),
        wire.frame(b"x", MORE) + wire.ping(0, b"between") + wire.frame(b"y"),
        bytes([2]) + (3).to_bytes(8, "big") + b"\1ab",
    ]
)
requests = st.one_of(accounts, accounts, accounts, pings, subscriptions, subscriptions, oddities)
batches = st.lists(requests, min_size=1, max_size=8)
mistakes = st.sampled_from(
    [
        wire.command(b"ERROR", b"\3why"),
        wire.greeting(),
        wire.frame(b"a", MORE) * 64 + wire.frame(b"a"),
        wire.frame(bytes(MESSAGE_MAX - 9)),
        wire.frame(bytes(MESSAGE_MAX - 8)),
        wire.frame(bytes(5000), MORE) + wire.frame(bytes(5000)),
        bytes([5, 0]),
        bytes([8]),
        wire.frame(b"a", MORE) + b"\xff",
        b"\xff" + bytes(9),
    ]
)
beginnings = st.sampled_from(
    [
        wire.ready(SocketType.PUB),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\3\1",
        wire.greeting()[:10] + b"\2" + wire.greeting()[11:],
        wire.greeting().replace(b"NULL", b"PLAI"),
        wire.greeting()[:63],
        wire.greeting()[:10] + b"\4\0" + wire.greeting()[12:] + wire.command(b"READY", b"\x0bsocket-TYPE\0\0\0\4XPUB"),
        wire.greeting()[:11] + b"\0" + wire.greeting()[12:] + wire.ready(SocketType.PUB) + wire.ping(1),
        wire.greeting() + wire.command(b"READY"),
        wire.greeting() + wire.command(b"READY", b"\x0bSocket-Type\0\0\0\4XSUB") + wire.subscribe(b""),
        wire.greeting() + wire.command(b"READY", b"\x01I\0\0\0\0\x0bSocket-Type\0\0\0\4SUB"),
        wire.greeting() + wire.ping(0),
        wire.greeting() + wire.message(b"\1"),
        wire.greeting() + wire.greeting(),
    ]
)
cuts = st.lists(st.integers(1, 1 << 16), max_size=6)
rarely = st.integers(0, 9)


def test_the_model_does_what_the_vectors_say() -> None:
    """So that what is compared with the engine is what the document says, wherever a vector says it."""

    def play(case: vectors.Case) -> None:
        model = Model()
        model.load_rules(RULES["first"])
        bench = Pump(model)
        vectors.run_case(case, bench.connect_by_name, by_name=True, advance=bench.advance, happen=bench.happen)

    vectors.run_cases(vectors.load("smockron"), play)


class Pair:
    """A connection of the store, its model, what its peer has not sent yet, and what it has been told since."""

    def __init__(self, session: Session, model: ModelSession) -> None:
        self.session, self.model = session, model
        self.unsent = bytearray()
        self.said = bytearray()
        session.owner = self

    @property
    def deaf(self) -> bool:
        return self.model.deaf


class SmockronMachine(RuleBasedStateMachine):
    """One store and its model, side by side. bytes_in, bytes_out: of all connections."""

    @initialize(variant=st.integers(0, len(VARIANTS) - 1), identifiers=st.sampled_from([1, 2, 5, 20]))
    def make(self, variant: int, identifiers: int) -> None:
        self.now_ns = START_NS
        limits = {"identifiers": identifiers, "message_max": MESSAGE_MAX, "posted_max": POSTED_MAX}
        self.store, self.model = make_store(VARIANTS[variant], **limits), Model(**limits)
        self.model.load_rules(VARIANTS[variant])
        for store in (self.store, self.model):
            store.set_wall(UNIX_NS, START_NS)
        self.pairs: list[Pair] = []
        self.bytes_in = self.bytes_out = self.audits = 0
        self.agreed = True
        for port in (ACCOUNTING, CONTROL):
            self.opened(port)

    def connected(self, port: int) -> Pair:
        pair = Pair(self.store.session(self.now_ns, port), self.model.session(self.now_ns, port))
        self.pairs.append(pair)
        self.compare()
        return pair

    def pair(self, number: int) -> Pair:
        """One that takes what it is sent."""
        hearing = [pair for pair in self.pairs if not pair.deaf]
        return hearing[number % len(hearing)] if hearing else self.opened(number % 2)

    def opened(self, port: int) -> Pair:
        pair = self.connected(port)
        begin = wire.subscribe(b"") if port == CONTROL else b""
        self.tell(pair, wire.greeting() + wire.ready(SocketType.SUB if port else SocketType.PUB) + begin, [])
        return pair

    # -- what is sent --

    def encoded(self, request: Any) -> bytes:
        if isinstance(request, bytes):
            return request
        kind, *fields = request
        if kind == "account":
            return self.accounting(*fields)
        if kind == "ping":
            return wire.command(b"PING", fields[0].to_bytes(2, "big") + fields[1])
        encoders = {
            "subscribe": wire.subscribe,
            "cancel": wire.cancel,
            "subscribe by message": lambda prefix: wire.message(b"\1" + prefix),
            "cancel by message": lambda prefix: wire.message(b"\0" + prefix),
        }
        return encoders[kind](fields[0])

    def accounting(self, domain: Filled, ends: bool, status: bytes, name: Filled, *rest: Any) -> bytes:
        """rest: when it was received, until when it was delayed, and how many frames are behind that."""
        received, until, more = rest
        topic = domain.bytes() + (b"\0" if ends else b"")
        moments = [self.time(received), self.time(until) if status == b"DELAYED" else b""]
        return wire.message(topic, status, name.bytes(), *moments, *[b"log"] * more)

    def time(self, moment: Any) -> bytes:
        return moment if isinstance(moment, bytes) else b"%d" % max(0, self.model.now_ms + moment)

    # -- comparing --

    def tell(self, pair: Pair, data: bytes, positions: list[int]) -> None:
        """Both hear it, the store's in pieces; then both must have said the same."""
        self.agreed = False
        borders = sorted({0, len(data), *(position % len(data) for position in positions if data)})
        for start, end in itertools.pairwise(borders):
            pair.said += pair.session.receive(data[start:end], self.now_ns)
            self.drain(pair)
        self.bytes_in += len(data)
        pair.model.hear(data, self.now_ns)
        self.compare()

    def drain(self, pair: Pair) -> None:
        """Others have their turn between: it may have to wait for them."""
        for _ in range(TURNS_MAX):
            if not pair.session.more:
                return
            self.fetch(pair)
            pair.said += pair.session.take_output(self.now_ns)
        raise AssertionError("it never comes to its end")

    def fetch(self, but: Pair | None = None) -> None:
        """The store's turns, and the output that others have caused. What is to be decided elsewhere is always due."""
        for _ in range(TURNS_MAX):
            due = 0 <= self.store.next_deadline() <= self.now_ns
            if due:
                self.store.tick(self.now_ns)
            dirty = [session.owner for session in self.store.take_dirty() if session.owner not in (None, but)]
            for pair in dirty:
                self.pull(pair)
            if not dirty and (not due or self.store.snapshot()["asking"]):
                return
        raise AssertionError("it is always due")

    def pull(self, pair: Pair) -> None:
        if pair.deaf:
            pair.session.wait()
        else:
            pair.said += pair.session.take_output(self.now_ns)
            self.drain(pair)

    def compare(self) -> None:
        self.agreed = False
        self.fetch()
        self.model.tick(self.now_ns)
        for pair in self.pairs:
            if pair.deaf and pair.model.said:
                pair.model.wait()
            elif not pair.deaf:
                said = pair.model.take_output(self.now_ns)
                self.bytes_out += len(said)
                assert bytes(pair.said) == said
                pair.said.clear()
            assert pair.session.closing == pair.model.closing
        for pair in [pair for pair in self.pairs if pair.session.closing]:
            self.forget(pair)
        figures = self.store.snapshot()
        expected = self.model.snapshot() | {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out}
        assert {name: figures[name] for name in expected} == expected
        self.agreed = True

    def forget(self, pair: Pair) -> None:
        """It is gone: closed twice, it says nothing any more."""
        self.pairs.remove(pair)
        pair.session.owner = None
        for _ in range(2):
            pair.session.closed(self.now_ns)
        pair.model.closed(self.now_ns)
        assert pair.session.take_output(self.now_ns) == b""
        assert not pair.session.more

    # -- what peers do --

    @precondition(lambda self: len(self.pairs) < SESSIONS_MAX)
    @rule(port=st.sampled_from([ACCOUNTING, CONTROL, CONTROL]))
    def open(self, port: int) -> None:
        self.opened(port)

    @precondition(lambda self: len(self.pairs) < SESSIONS_MAX)
    @rule(port=st.sampled_from([ACCOUNTING, CONTROL]), beginning=beginnings, behind=batches, positions=cuts)
    def begin(self, port: int, beginning: bytes, behind: list[Any], positions: list[int]) -> None:
        """A handshake that is odd, wrong, or does not end."""
        self.tell(self.connected(port), beginning + b"".join(map(self.encoded, behind)), positions)

    @rule(number=st.integers(0, 4), batch=batches, held_back=st.integers(-20, 20), positions=cuts)
    def send(self, number: int, batch: list[Any], held_back: int, positions: list[int]) -> None:
        """Several messages at once; the last bytes may come only with the next."""
        pair = self.pair(number)
        pair.unsent += b"".join(map(self.encoded, batch))
        size = len(pair.unsent) - max(0, min(held_back, len(pair.unsent)))
        data = bytes(pair.unsent[:size])
        del pair.unsent[:size]
        self.tell(pair, data, positions)

    @precondition(lambda self: not self.model.is_shared)
    @rule(number=st.integers(0, 4), domain=domains, name=large, count=st.integers(1, 100), positions=cuts)
    def account_much(self, number: int, domain: Filled, name: Filled, count: int, positions: list[int]) -> None:
        """So much that a subscriber that does not read loses some."""
        pair = self.pair(number)
        if pair.unsent:
            return
        one = self.accounting(domain, True, b"ACCEPTED", name, 0, 0, 1)
        self.tell(pair, one * count, positions)

    @rule(number=st.integers(0, 4), order=st.lists(st.integers(0, 5), min_size=4, max_size=20))
    def account_by_turns(self, number: int, order: list[int]) -> None:
        """More identifiers than there is room for: each answer shows who was forgotten."""
        pair = self.pair(number)
        if not pair.unsent:
            ones = (self.accounting(DOMAINS[2], True, b"ACCEPTED", NAMES[each], 0, 0, 1) for each in order)
            self.tell(pair, b"".join(ones), [])

    @rule(number=st.integers(0, 4), chance=rarely, mistake=mistakes, behind=batches, positions=cuts)
    def blunder(self, number: int, chance: int, mistake: bytes, behind: list[Any], positions: list[int]) -> None:
        """What is behind is not looked at, if it is one."""
        pair = self.pair(number)
        if chance == 0 and not pair.unsent:
            self.tell(pair, mistake + b"".join(map(self.encoded, behind)), positions)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 4), chance=rarely)
    def end(self, number: int, chance: int) -> None:
        """The peer has sent its last."""
        if chance > 1:
            return
        pair = self.pair(number)
        pair.said += pair.session.eof(self.now_ns)
        pair.model.said += pair.model.eof(self.now_ns)
        self.compare()

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 4), chance=rarely)
    def close(self, number: int, chance: int) -> None:
        if chance < 2:
            self.forget(self.pairs[number % len(self.pairs)])
            self.compare()

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 4))
    def stop_reading(self, number: int) -> None:
        self.pair(number).model.deaf = True

    @precondition(lambda self: any(pair.deaf for pair in self.pairs))
    @rule(number=st.integers(0, 4))
    def read_again(self, number: int) -> None:
        deaf = [pair for pair in self.pairs if pair.deaf]
        pair = deaf[number % len(deaf)]
        pair.model.deaf = False
        self.pull(pair)
        self.compare()

    # -- what happens to the store --

    @rule(duration_ns=st.sampled_from([1, 1000, MS, 100 * MS, SECOND, 31 * SECOND, HOUR, 24 * HOUR]))
    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.compare()

    @rule(number=st.integers(0, 9), before=st.integers(0, 1))
    def advance_to_what_is_due(self, number: int, before: int) -> None:
        """The end of an identifier or of somebody's patience."""
        silences = [pair.model.due_ns for pair in self.pairs if pair.model.due_ns is not None]
        moments = [each.due_ns for each in self.model.identifiers.values()]
        coming = sorted(tick_of(due_ns) * TICK_NS for due_ns in silences + moments)
        if coming:
            self.now_ns = max(self.now_ns, coming[number % len(coming)] - before)
        self.compare()

    @rule(step_ns=st.sampled_from([-HOUR, -SECOND, -10 * MS, 1 - 10 * MS, 0, 9 * MS, 10 * MS, SECOND, 24 * HOUR]))
    def set_wall(self, step_ns: int) -> None:
        unix_ns = self.now_ns + self.model.wall_ns + step_ns
        for store in (self.store, self.model):
            store.set_wall(unix_ns, self.now_ns)
        self.compare()

    @rule(variant=st.integers(0, len(VARIANTS) - 1))
    def change_rules(self, variant: int) -> None:
        self.store.load_rules(VARIANTS[variant])
        self.model.load_rules(VARIANTS[variant])
        self.compare()

    @rule(chance=rarely)
    def share(self, chance: int) -> None:
        """Somebody else decides; or cannot be asked any more."""
        is_shared = not self.model.is_shared
        if chance > 5:
            return
        for store in (self.store, self.model):
            store.share(is_shared, self.now_ns)
        self.compare()

    @precondition(lambda self: self.model.is_shared)
    @rule()
    def take_questions(self) -> None:
        assert self.store.take_questions(self.now_ns) == self.model.take_questions(self.now_ns)
        self.compare()

    @precondition(lambda self: self.model.is_shared)
    @rule(number=st.integers(0, 4), requests=st.lists(st.tuples(domains, names, offsets_ms), min_size=2, max_size=6))
    def ask_ahead(self, number: int, requests: list[tuple[Filled, Filled, int]]) -> None:
        """As many calls as can be made before the first is answered: for several domains, and one too many."""
        pair = self.pair(number)
        if pair.unsent:
            return
        ones = (self.accounting(domain, True, b"ACCEPTED", name, at, 0, 0) for domain, name, at in requests)
        self.tell(pair, b"".join(ones), [])
        for _ in range(CALLS_AHEAD + 1):
            self.take_questions()

    @precondition(lambda self: self.model.asked)
    @rule(offsets=st.lists(st.one_of(st.integers(-9000, 9000), st.integers(-(10**12), 10**14)), min_size=1, max_size=9))
    def settle_questions(self, offsets: list[int]) -> None:
        _, asked = self.model.asked[0]
        found = [one.moment_ms + offset for one, offset in zip(asked, itertools.cycle(offsets), strict=False)]
        for store in (self.store, self.model):
            store.settle_questions(found, self.now_ns)
        self.compare()

    # -- what is always so --

    @invariant()
    def is_sound(self) -> None:
        self.audits += 1
        if self.audits % AUDIT_EVERY == 0:
            self.store.audit()
        assert self.store.sessions_open == len(self.pairs) == len(self.model.sessions)

    def compare_tables(self) -> None:
        """They are of the moment of the store's last call."""
        self.store.tick(self.now_ns)
        waiting = [
            (name, domain, float(each.ns - self.now_ns) / SECOND)
            for (domain, name), each in self.model.identifiers.items()
            if each.ns > self.now_ns
        ]
        assert sorted(walked(TABLES["throttled"].open(self.store, {}))) == sorted(waiting)
        domains = []
        for name, domain in self.model.domains.items():
            spans = (domain.rule.interval.ns, domain.rule.burst.ns) if domain.ruled else (0, 0)
            tallied = (domain.tally[figure] for figure in ("accepted", "delayed", "rejected", "told"))
            domains.append((name, *(float(span) / SECOND for span in spans), domain.identifiers, *tallied))
        assert sorted(walked(TABLES["domains"].open(self.store, {}))) == sorted(domains)

    def teardown(self) -> None:
        """All that is left is told of, and then everybody goes."""
        if not hasattr(self, "pairs") or not self.agreed:
            return
        counted = [(*key, count) for key, count in self.model.outcomes.items() if count]
        assert sorted(self.store.outcomes()) == sorted(counted)
        self.compare_tables()
        for pair in list(self.pairs):
            self.forget(pair)
        self.fetch()
        self.store.audit()
        assert self.store.sessions_open == 0


SmockronMachine.TestCase.settings = settings(
    max_examples=examples(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSmockronProtocol = SmockronMachine.TestCase
