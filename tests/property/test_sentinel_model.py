"""The sentinel protocol against the plain-dict model: whatever is asked, by whom and when, both say the same.

Several connections on one store, streams cut anywhere, rules that change, and time that goes on when it is told to:
often to the very moment at which a lease is over, or a nanosecond before. After each step each flow has as many calls
as its tokens stand for, and each token that there ever was is there, or has been given back once.
COUNTERD_EXAMPLES=50 looks fifty times as long.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance import vectors
from conformance.sentinel.dialect import MAX_ALLOWED_QPS
from conformance.sentinel.engine import MS, SECOND, SWEEP_NS, Pump, make_store
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules
from counterd.protocols.sentinel.wire import MessageType, Status
from kit.machine import examples
from property.sentinel_model import TICK_NS, Model, ModelSession, frames_of

SESSIONS_MAX = 4
AUDIT_EVERY = 4  # steps: it looks at the whole region
QPS_MAX = 25

ONE, TWO = "one", "two"
RATES, PARAMS, TOKENS = (1, 2, 3), (21, 22), (11, 12, 13)
FLOWS = (*RATES, *TOKENS, *PARAMS)


def limit(flow_id: int, namespace: str, count: float, kind: int, shape: tuple[int, int]) -> FlowRule:
    """shape: of the window, in samples and ms."""
    return FlowRule(namespace, flow_id, "rate", 1, count, kind, *shape, 2000, 2000, 0)


def held(flow_id: int, namespace: str, count: float, kind: int, lease: tuple[int, int, int]) -> FlowRule:
    """lease: resourceTimeout and clientOfflineTime in ms, and the strategy."""
    return FlowRule(namespace, flow_id, "calls", 0, count, kind, 10, 1000, *lease)


def values(flow_id: int, namespace: str, count: float, kind: int, shape: tuple[int, int]) -> ParamRule:
    return ParamRule(namespace, flow_id, "values", count, kind, *shape)


def hot(rule: ParamRule, items: dict[wire.Value, int]) -> ParamRule:
    return replace(rule, items={wire.encode_value(value): limit for value, limit in items.items()})


LEASES = {11: (500, 200, 0), 12: (1000, 1500, 1), 13: (400, 3000, 2)}
VARIANTS = [
    Rules(
        (
            limit(1, ONE, 5, 1, (10, 1000)),
            limit(2, ONE, 3, 0, (4, 2000)),
            limit(3, TWO, 2.5, 1, (1, 500)),
            held(11, ONE, 4, 1, LEASES[11]),
            held(12, ONE, 2, 0, LEASES[12]),
            held(13, TWO, 6, 1, LEASES[13]),
        ),
        (hot(values(21, ONE, 3, 1, (10, 1000)), {"hot": 6, True: 1}), values(22, TWO, 2, 0, (5, 500))),
    ),
    # Some have gone, others have less.
    Rules(
        (limit(2, ONE, 2, 0, (4, 2000)), limit(3, TWO, 1, 1, (1, 500)), held(11, ONE, 2, 1, LEASES[11])),
        (hot(values(21, ONE, 2, 1, (10, 1000)), {"cold": 0}),),
    ),
    # Other windows, and elsewhere.
    Rules(
        (
            limit(1, TWO, 8, 1, (5, 1000)),
            limit(2, TWO, 3, 0, (4, 1000)),
            limit(3, TWO, 2.5, 1, (1, 500)),
            held(11, TWO, 9, 1, LEASES[11]),
            held(12, ONE, 3.5, 0, LEASES[12]),
            held(13, ONE, 3, 1, LEASES[13]),
        ),
        (hot(values(21, TWO, 3, 1, (2, 1000)), {"hot": 6}), hot(values(22, TWO, 3, 0, (5, 500)), {7: 9})),
    ),
]

counts = st.one_of(st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, -1, 7, 2**31 - 1]))
value = st.sampled_from(["hot", "cold", "", 7, True, False, wire.Typed(wire.Tag.LONG, 7), float("nan"), "v" * 200])
xids = st.sampled_from([0, 1, -1, 2**31 - 1])
# Which of all tokens, from the last one back; -1 is one that never was.
which = st.integers(-1, 8)
numbers = st.integers(0, SESSIONS_MAX - 1)
rates = st.one_of(
    st.tuples(st.just("flow"), xids, st.sampled_from(RATES), st.integers(1, 3), st.booleans()),
    st.tuples(
        st.just("param"), xids, st.sampled_from(PARAMS), st.integers(1, 2), st.lists(value, min_size=1, max_size=3)
    ),
)
calls = st.one_of(
    st.tuples(st.just("acquire"), xids, st.sampled_from(TOKENS), st.integers(1, 2)),
    st.tuples(st.sampled_from(["release", "keep", "keep"]), xids, which),
)
requests = st.one_of(
    st.tuples(st.just("ping"), xids, st.sampled_from([ONE, ONE, TWO, TWO, "three", " "])),
    st.tuples(st.just("flow"), xids, st.sampled_from(RATES), counts, st.booleans()),
    st.tuples(st.just("flow"), xids, st.sampled_from(RATES), counts, st.booleans()),
    st.tuples(st.just("param"), xids, st.sampled_from(PARAMS), counts, st.lists(value, max_size=4)),
    st.tuples(st.just("acquire"), xids, st.sampled_from(TOKENS), counts),
    st.tuples(st.just("acquire"), xids, st.sampled_from(TOKENS), counts),
    st.tuples(st.sampled_from(["release", "keep", "keep"]), xids, which),
    st.tuples(st.sampled_from(["flow", "acquire"]), xids, st.sampled_from([0, -5, 99, *FLOWS]), counts),
)
# What is none, but has a length.
mistakes = st.one_of(
    st.binary(max_size=7),
    st.builds(
        lambda xid, type, body: wire.frame(xid, type, body)[2:], xids, st.integers(-128, 127), st.binary(max_size=30)
    ),
    st.builds(
        lambda type, size: wire.frame(1, type, bytes(size))[2:], st.integers(-1, 7), st.sampled_from([1017, 1018, 9000])
    ),
)
batches = st.lists(st.one_of(requests, requests, requests, mistakes), min_size=1, max_size=8)
cuts = st.lists(st.integers(1, 1 << 12), max_size=5)
rarely = st.integers(0, 9)


def test_the_model_does_what_the_vectors_say() -> None:
    """So that what is compared with the engine is what the document says, wherever a vector says it."""

    def play(case: vectors.Case) -> None:
        bench = Pump(Model(MAX_ALLOWED_QPS))
        bench.happen("first")
        vectors.run_case(case, bench.connect, advance=bench.advance, happen=bench.happen)

    vectors.run_cases(vectors.load("sentinel"), play)


class Pair:
    """A connection of the store, its model, and what its peer has not sent yet."""

    def __init__(self, session: Any, model: ModelSession) -> None:
        self.session, self.model = session, model
        self.unsent = bytearray()
        self.heard = bytearray()  # of which no whole frame has come


class SentinelMachine(RuleBasedStateMachine):
    """One store and its model, side by side."""

    @initialize()
    def make(self) -> None:
        self.bench = Pump(make_store(VARIANTS[0], max_allowed_qps=QPS_MAX))
        self.store = self.bench.store
        self.model = Model(QPS_MAX)
        self.model.load_rules(VARIANTS[0])
        self.pairs: list[Pair] = []
        self.ids: list[int] = []
        self.agreed = True
        self.audits = 0

    @property
    def now_ns(self) -> int:
        return self.bench.now_ns

    def connected(self) -> Pair:
        pair = Pair(self.store.session(self.now_ns), self.model.session(self.now_ns))
        self.pairs.append(pair)
        return pair

    def pair(self, number: int) -> Pair:
        return self.pairs[number] if number < len(self.pairs) else self.connected()

    def encoded(self, request: Any) -> bytes:
        if isinstance(request, bytes):
            return len(request).to_bytes(2, "big") + request
        kind, xid, *fields = request
        if kind == "ping":
            return wire.ping(xid, fields[0].encode())
        if kind == "param":
            return wire.param_flow(xid, *fields)
        if kind in ("flow", "acquire"):
            return getattr(wire, kind)(xid, *fields)  # type: ignore[no-any-return]
        return getattr(wire, kind)(xid, self.token(fields[0]))  # type: ignore[no-any-return]

    def token(self, number: int) -> int:
        return self.ids[-1 - number] if 0 <= number < len(self.ids) else 12345

    # -- comparing --

    def learn_of_sweeps(self) -> None:
        """What the store has freed, the model has to have seen coming."""
        self.model.now_ns = self.now_ns
        for flow_id in TOKENS:
            told = self.store.flow(flow_id)
            self.model.sweep(flow_id, told["tokens"] if told else 0)
            assert (told["now_calls"] if told else 0) == self.model.now_calls(flow_id), flow_id

    def tell(self, pair: Pair, data: bytes, positions: list[int]) -> None:
        """Both hear it, the store's in pieces; then both must have said the same."""
        self.learn_of_sweeps()
        self.agreed = False
        said = bytearray()
        borders = sorted({0, len(data), *(position % len(data) for position in positions if data)})
        for start, end in itertools.pairwise(borders):
            said += pair.session.receive(data[start:end], self.now_ns)
            assert not pair.session.more
        pair.heard += data
        for frame in frames_of(pair.heard):
            self.compare(pair, frame, said)
        assert not said
        assert not pair.session.closing
        self.agreed = True

    def compare(self, pair: Pair, frame: bytes, said: bytearray) -> None:
        size = 2 + int.from_bytes(said[:2], "big")
        told = bytes(said[:size])
        del said[:size]
        granted = 0
        if len(told) == 16 and told[6:8] == bytes([MessageType.ACQUIRE, Status.OK]):
            granted = int.from_bytes(told[8:], "big", signed=True)
            assert granted != 0
            self.ids.append(granted)
        assert told == self.model.answer(pair.model, frame, granted), frame

    def forget(self, pair: Pair) -> None:
        """It is gone: closed twice, it says nothing any more."""
        self.learn_of_sweeps()
        self.pairs.remove(pair)
        for _ in range(2):
            pair.session.closed(self.now_ns)
        pair.model.closed(self.now_ns)
        assert pair.session.receive(wire.flow(1, 1, 1), self.now_ns) == b""
        self.bench.settle()

    # -- what peers do --

    @rule(number=numbers, batch=batches, held_back=st.integers(-20, 20), positions=cuts)
    def send(self, number: int, batch: list[Any], held_back: int, positions: list[int]) -> None:
        """Several requests at once; the last bytes may come only with the next."""
        pair = self.pair(number)
        pair.unsent += b"".join(map(self.encoded, batch))
        size = len(pair.unsent) - max(0, min(held_back, len(pair.unsent)))
        data = bytes(pair.unsent[:size])
        del pair.unsent[:size]
        self.tell(pair, data, positions)

    @rule(number=numbers, asked=st.lists(rates, min_size=4, max_size=12))
    def ask_for_rates(self, number: int, asked: list[Any]) -> None:
        self.send(number, [("ping", 1, ONE), *asked], 0, [])

    @rule(number=numbers, asked=st.lists(calls, min_size=4, max_size=12))
    def ask_for_tokens(self, number: int, asked: list[Any]) -> None:
        self.send(number, [("ping", 1, ONE), *asked], 0, [])

    @precondition(lambda self: self.pairs)
    @rule(number=numbers, last=st.booleans())
    def close(self, number: int, last: bool) -> None:
        """last: its peer has sent its last byte, and the other end closes."""
        pair = self.pair(number % len(self.pairs))
        if last:
            assert pair.session.eof(self.now_ns) == b""
            assert pair.session.closing
        self.forget(pair)

    # -- what extensions do --

    @rule(asked=st.sampled_from(["request", "release", "keep"]), which=which)
    def ask_for_nobody(self, asked: str, which: int) -> None:
        """Who never goes."""
        self.learn_of_sweeps()
        id = self.token(which)
        if asked == "request":
            flow_id = (*TOKENS, 1, 99)[which % 5]
            status, id = self.store.request_token(flow_id, 1, False, 0, self.now_ns)
            assert (status, id) == (*self.model.acquire(None, flow_id, 1, id), 0)[:2]
            self.ids += [id] if id else []
        elif asked == "keep":
            assert self.store.keep_token(id, 0, self.now_ns) == (*self.model.keep(None, id), 0)[:2]
        else:
            assert (self.store.release_token(id, self.now_ns),) == self.model.release(id)

    # -- what happens to the store --

    @rule(duration_ns=st.sampled_from([1, MS, 99 * MS, 100 * MS, 250 * MS, 500 * MS, SECOND]), ticking=st.booleans())
    def advance(self, duration_ns: int, ticking: bool) -> None:
        self.go(duration_ns, ticking)

    @rule(number=st.integers(0, 9), before=st.integers(0, 1), ticking=st.booleans())
    def advance_to_the_end_of_a_lease(self, number: int, before: int, ticking: bool) -> None:
        """Then whoever has it asks for it."""
        ends = {id: token.ends_ns(self.now_ns) for id, token in self.model.tokens.items()}
        coming = sorted((moment, id) for id, moment in ends.items() if moment > self.now_ns)
        if coming:
            moment, id = coming[number % len(coming)]
            self.go(moment - before - self.now_ns, ticking)
            last = self.ids.index(id) - len(self.ids)
            self.send(number % SESSIONS_MAX, [("keep" if number % 3 else "release", 1, -1 - last)], 0, [])

    def go(self, duration_ns: int, ticking: bool) -> None:
        self.bench.ticking = ticking
        self.bench.advance(duration_ns)
        self.bench.ticking = True

    @rule()
    def tick(self) -> None:
        """All that is due: what has been over for a sweep's interval is gone."""
        self.bench.settle()
        self.learn_of_sweeps()
        assert not self.model.overdue(self.now_ns - SWEEP_NS - 2 * TICK_NS)

    @rule(variant=st.integers(0, len(VARIANTS) - 1))
    def load_rules(self, variant: int) -> None:
        self.learn_of_sweeps()
        self.store.load_rules(VARIANTS[variant])
        self.model.load_rules(VARIANTS[variant])

    @rule(chance=rarely)
    def drain(self, chance: int) -> None:
        assume(chance == 0)
        self.store.begin_drain()
        self.model.begin_drain()

    # -- what is always so --

    @invariant()
    def is_sound(self) -> None:
        if not self.agreed:
            return
        self.learn_of_sweeps()
        self.audits += 1
        if self.audits % AUDIT_EVERY == 0:
            self.store.audit()
        figures = self.store.snapshot()
        assert figures["tokens"] == self.store.held() == len(self.model.tokens)
        gone = figures["released"] + figures["expired_offline"] + figures["expired_lease"]
        assert figures["granted"] == figures["tokens"] + gone == len(self.ids) == len(set(self.ids))
        assert self.store.sessions_open == len(self.pairs) == len(self.model.sessions)
        held = [sum(token.owner is pair.model for token in self.model.tokens.values()) for pair in self.pairs]
        assert sorted(number for number in held if number) == self.holdings()

    def holdings(self) -> list[int]:
        """How many tokens each connection that is there has."""
        by_connection = itertools.groupby(sorted(connection for connection, *_ in self.store.leases(10_000)))
        return sorted(len(list(tokens)) for connection, tokens in by_connection if connection)

    def teardown(self) -> None:
        """Everybody goes, and so does what they had."""
        if not hasattr(self, "pairs") or not self.agreed:
            return
        told = sorted((*key, count) for key, count in self.model.outcomes.items())
        assert sorted(outcome for outcome in self.store.outcomes() if outcome[2]) == told
        for pair in list(self.pairs):
            self.forget(pair)
        for id in self.ids:
            self.ask_for_nobody_at_last(id)
        self.bench.advance(10 * SECOND)
        self.store.audit()
        figures = self.store.snapshot()
        assert figures["tokens"] == figures["param_values"] == figures["namespaces"] == self.store.sessions_open == 0

    def ask_for_nobody_at_last(self, id: int) -> None:
        """Those that a client has go by themselves; who is nobody never does where the server renews."""
        token = self.model.tokens.get(id)
        if token is not None and token.owner is None:
            self.store.release_token(id, self.now_ns)


SentinelMachine.TestCase.settings = settings(
    max_examples=examples(50),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestSentinelProtocol = SentinelMachine.TestCase
