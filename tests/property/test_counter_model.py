"""The counter protocol against the plain-dict model: whatever is asked, in whatever order, both say the same.

Several connections on one small store, names that get in each other's way, and everything that can happen to a
connection or a store in between. COUNTERD_EXAMPLES=50 looks fifty times as long.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from counterd._core import siphash
from counterd.protocols.counter import wire
from kit.counters import KEY, TURNS_MAX, holders_of, make_store
from kit.machine import examples
from property.counter_model import UNMODELLED, Model

U32_MAX = 0xFFFFFFFF
SESSIONS_MAX = 4
NS_PER_CALL = 30_000_000


def names_with(top: int, count: int) -> list[bytes]:
    """Names whose hash begins with these four bits: they share a slot in every index of up to sixteen."""
    found = (name for name in map(b"%d".__mod__, itertools.count()) if siphash(KEY, name) >> 60 == top)
    return list(itertools.islice(found, count))


def twins(template: bytes) -> tuple[bytes, bytes]:
    """Two names with the same 32-bit tag."""
    tags: dict[int, bytes] = {}
    for number in itertools.count():
        name = template % number
        other = tags.setdefault(siphash(KEY, name) >> 32, name)
        if other is not name:
            return other, name
    raise AssertionError


COLLIDING = [*names_with(15, 4), *names_with(14, 2), *names_with(0, 2)]
SHORT = [*COLLIDING, *twins(b"twin-%d"), b"\0", b"a" * 36]
LONG = [b"a" * 37, b"a" * 88, b"a" * 87 + b"b", b"a" * 89, b"a" * 149, *twins(b"%053d")]
GIANT = [b"%d" % digit * 65535 for digit in range(6)]
BURST = [b"burst-%d" % number for number in range(150)]
NAMES = [*SHORT, *LONG, *GIANT]

# A request is drawn as a tuple, with a number for its name, so that a failing example can be read.
opaques = st.sampled_from([0, 1, 0xDEADBEEF, U32_MAX])
resources = st.sampled_from([1, 1, 1, 2, 3, 5, 0, 1 << 31, U32_MAX - 1, U32_MAX])
maximums = st.sampled_from([1, 2, 3, 5, 5, U32_MAX, U32_MAX - 1])
short = st.integers(0, len(SHORT) - 1)
names = st.one_of(
    st.integers(0, 3), short, st.integers(len(SHORT), len(SHORT + LONG) - 1), st.integers(0, len(NAMES) - 1)
)
acquires = st.tuples(st.just("acquire"), opaques, names, resources, maximums)
releases = st.tuples(st.just("release"), opaques, names, resources)
few = st.integers(0, 2)
contended = st.one_of(
    st.tuples(
        st.just("acquire"), opaques, few, st.sampled_from([1, 1, 2, U32_MAX - 2]), st.sampled_from([3, 4, U32_MAX])
    ),
    st.tuples(st.just("release"), opaques, few, st.sampled_from([0, 1, 1, 2])),
    st.tuples(st.just("get"), opaques, few),
)
opcodes = st.integers(0, 255).filter(lambda opcode: opcode not in UNMODELLED)
# Frames that do not fit: those of the last kind break the framing, the others leave the connection as it is.
misfits = st.one_of(
    st.builds(wire.frame, st.sampled_from([0, 1, 2, 3, 0x10, 0x11]), opaques, st.binary(min_size=1, max_size=20)),
    st.builds(
        wire.frame,
        opcodes.filter(lambda opcode: opcode >= 0x12),
        opaques,
        st.binary(max_size=20),
        flags=st.integers(0, 255),
    ),
    st.builds(wire.frame, opcodes, opaques, magic=st.integers(0, 255), body_length=st.just(65546)),
)
dumps = st.builds(wire.frame, st.just(wire.Opcode.DUMP), opaques, flags=st.sampled_from([0, 1, 1, 0xFE, 0xFF]))
requests = st.one_of(
    acquires,
    acquires,
    acquires,
    releases,
    releases,
    st.tuples(st.just("get"), opaques, names),
    st.tuples(st.just("raw"), dumps),
    st.tuples(st.sampled_from(["noop", "noop", "stats"]), opaques),
    st.tuples(st.just("raw"), st.integers(0, 7).flatmap(lambda rarely: misfits if rarely == 0 else st.just(b""))),
)
batches = st.one_of(
    st.lists(requests, min_size=1, max_size=10),
    st.lists(requests, min_size=1, max_size=10),
    st.lists(contended, min_size=3, max_size=10),
)


def encoded(request: tuple[Any, ...]) -> bytes:
    kind, *arguments = request
    if kind == "raw":
        return arguments[0]
    if len(arguments) > 1:
        arguments[1] = NAMES[arguments[1]]
    return getattr(wire, kind)(*arguments)


class CounterMachine(RuleBasedStateMachine):
    """One store and its model, side by side."""

    @initialize(
        sizes=st.one_of(
            st.fixed_dictionaries(
                {
                    "buckets": st.integers(1, 8),
                    "holdings": st.sampled_from([3, 8, 16, 16]),
                    "holdings_per_connection": st.sampled_from([0, 0, 2, 5]),
                    "name_memory": st.sampled_from([0, 3 * 64, 5 * 64, 10 * 64, 10 * 64]),
                }
            ),
            st.just({"buckets": 8, "holdings": 64, "holdings_per_connection": 0, "name_memory": 5 * 1092 * 64}),
            st.just({"buckets": 100, "holdings": 300, "holdings_per_connection": 0, "name_memory": 300 * 64}),
        )
    )
    def make(self, sizes: dict[str, int]) -> None:
        self.store = make_store(**sizes)
        self.model = Model(**sizes)
        self.now_ns = 0
        self.pairs = []

    def pair(self, number: int, *, waiting: bool = False):
        """A connection that is not closing: the session, its model, and what its peer has not sent yet."""
        usable = [pair for pair in self.pairs if not pair[0].closing and (pair[0].more or not waiting)]
        if not usable:
            usable = [(self.store.session(), self.model.session(), bytearray())]
            self.pairs += usable
        return usable[number % len(usable)]

    def compare(self, pair, method: str, *data: bytes) -> None:
        """The session is told something; the model checks what it says."""
        session, model, _ = pair
        self.now_ns += NS_PER_CALL
        self.model.follow(model, session, method, getattr(session, method)(*data, self.now_ns), *data)

    def drain(self, pair) -> None:
        for _ in range(TURNS_MAX):
            if not pair[0].more:
                return
            self.compare(pair, "take_output")
        raise AssertionError("it never comes to its end")

    # -- what peers do --

    @precondition(lambda self: len(self.pairs) < SESSIONS_MAX)
    @rule(number=st.integers(0, 3), batch=batches)
    def connect(self, number: int, batch: list[tuple[Any, ...]]) -> None:
        self.pairs.append((self.store.session(), self.model.session(), bytearray()))
        self.send(number, batch, 0)

    @rule(number=st.integers(0, 3), batch=batches, held_back=st.integers(-20, 20))
    def send(self, number: int, batch: list[tuple[Any, ...]], held_back: int) -> None:
        """Several requests at once; the last bytes may come only with the next."""
        pair = self.pair(number)
        unsent = pair[2]
        unsent += b"".join(map(encoded, batch))
        size = len(unsent) - max(0, min(held_back, len(unsent)))
        data = bytes(unsent[:size])
        del unsent[:size]
        self.compare(pair, "receive", data)

    @rule(
        number=st.integers(0, 3),
        start=st.sampled_from([0, 0, 0, 20, 70]),
        count=st.sampled_from([5, 64, 65, 70, 100]),
        release=st.booleans(),
    )
    def burst(self, number: int, start: int, count: int, release: bool) -> None:
        """Many counters are acquired, and perhaps released: idle ones, and stale entries of the ring."""
        pair = self.pair(number)
        assume(not pair[2])
        chosen = BURST[start : start + count]
        self.compare(pair, "receive", b"".join(wire.acquire(0, name, 1, U32_MAX) for name in chosen))
        if release:
            self.compare(pair, "receive", b"".join(wire.release(0, name, 1) for name in chosen))

    @precondition(lambda self: self.model.blocks_max > 1092)
    @rule(number=st.integers(0, 3), chosen=st.permutations(range(6)), dump=dumps, behind=st.lists(requests, max_size=8))
    def dump_giants(self, number: int, chosen: list[int], dump: bytes, behind: list[tuple[Any, ...]]) -> None:
        """Names so long that each is a piece of a Dump of its own."""
        pair = self.pair(number)
        assume(not pair[2])
        asked = [("acquire", 0, NAMES.index(GIANT[digit]), 1, U32_MAX) for digit in chosen]
        self.compare(pair, "receive", b"".join(map(encoded, [*asked, ("raw", dump), *behind])))

    @precondition(lambda self: any(pair[0].more for pair in self.pairs))
    @rule(number=st.integers(0, 3), once=st.booleans())
    def take_output(self, number: int, once: bool) -> None:
        pair = self.pair(number, waiting=True)
        self.compare(pair, "take_output")
        if not once:
            self.drain(pair)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 3), times=st.integers(1, 2), batch=st.lists(requests, max_size=3))
    def end(self, number: int, times: int, batch: list[tuple[Any, ...]]) -> None:
        """The peer sends its last; whatever it sends after that is not looked at."""
        pair = self.pair(number)
        assume(not pair[2])
        self.compare(pair, "receive", b"".join(map(encoded, batch)))
        for _ in range(times):
            self.compare(pair, "eof")
        self.compare(pair, "receive", wire.noop(1))

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(number=st.integers(0, 3), times=st.integers(1, 2))
    def closed(self, number: int, times: int) -> None:
        """Those that are closing go first."""
        pair = next((pair for pair in self.pairs if pair[0].closing), self.pairs[number % len(self.pairs)])
        for _ in range(times):
            pair[0].closed(self.now_ns)
            self.model.closed(pair[1])
        self.compare(pair, "receive", wire.noop(1))
        self.compare(pair, "take_output")
        self.pairs.remove(pair)

    # -- what happens to the store --

    @rule()
    def tick(self) -> None:
        self.store.tick(self.now_ns)
        self.model.tick()

    @rule(step=st.integers(-1, 3))
    def begin_window(self, step: int) -> None:
        number = max(0, self.model.window + step)
        self.store.begin_window(number)
        self.model.begin_window(number)

    @rule(rarely=st.integers(0, 30))
    def begin_drain(self, rarely: int) -> None:
        if rarely == 30:
            self.store.begin_drain()
            self.model.begin_drain()

    @rule(rarely=st.integers(0, 30))
    def part(self, rarely: int) -> None:
        if rarely == 30:
            self.store.part()
            self.model.part()

    @rule(holdings=st.sampled_from([0, 1, 2, 5, 100]))
    def limit_holdings(self, holdings: int) -> None:
        self.store.limit_holdings(holdings)
        self.model.limit_holdings(holdings)

    # -- what is always so --

    @invariant()
    def agrees(self) -> None:
        self.store.audit()
        self.model.agrees(self.store)
        holding = {*self.model.sessions, *self.model.leaving}
        for name in COLLIDING:
            amounts = sorted(amount for _, amount, _ in holders_of(self.store, name))
            assert amounts == sorted(held.holdings[name] for held in holding if name in held.holdings)

    def teardown(self) -> None:
        """Closes all connections, then ticks until nothing is due: everything must be given back exactly once."""
        if not hasattr(self, "pairs"):
            return
        while self.pairs:
            self.closed(0, 1)
        while self.store.next_deadline() >= 0:
            self.tick()
            self.agrees()
        snapshot = self.store.snapshot()
        assert (snapshot["busy"], snapshot["holdings"], snapshot["holdings_leaving"]) == (0, 0, 0)


CounterMachine.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestCounterProtocol = CounterMachine.TestCase
