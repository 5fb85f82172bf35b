"""The tables of the counter protocol against models, while counters and holdings come, go and change between slices.

What was there throughout and ranks high enough is told of, once; every row is what a counter was at one of the moments.
Names of 64 KiB make slices of single counters. Likewise those of the smockron protocol, where long names make slices of
some identifiers. COUNTERD_EXAMPLES=50 looks fifty times as long.
"""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.smockron.engine import make_store as make_smockron_store
from counterd.protocols import find_protocols
from counterd.protocols.counter import wire
from counterd.protocols.smockron import wire as smockron
from counterd.protocols.smockron.rules import parse_rules
from kit.counters import holders_of, make_store, settle
from kit.machine import examples
from kit.pump import START_NS, UNIX_NS
from property import smockron_model
from property.counter_model import Model

STEPS_MAX = 1000
TABLES = {table.name: table for spec in find_protocols() for table in spec.tables()}

GIANT = [b"%d" % digit * 65534 + b"x" for digit in range(5)]
LONG = [b"long" + b"%d" % digit * 40000 + b"y" for digit in range(3)]
SHORT = [b"short-%d" % digit for digit in range(5)]
NAMES = [*GIANT, *LONG, *SHORT]
SIZES = {"buckets": 9, "holdings": 32, "holdings_per_connection": 0, "name_memory": 6 * 1092 * 64}

# Drawn by number, so that a failing example can be read.
names = st.integers(0, len(NAMES) - 1)
MATCHES = ["x", "x", "x", "", "", "y", "1", "o", "3" * 65534, "none"]


def walked(walk: Any) -> list[tuple[Any, ...]]:
    """Without anything between its steps."""
    for _ in range(STEPS_MAX):
        if walk.step():
            return walk.rows()
    raise AssertionError("it never comes to its end")


def rank(sort: str, row: tuple[Any, ...]) -> int:
    _, consumption, limit, peak = row
    usage = (consumption << 32) // limit
    return {"consumption": consumption, "usage": usage, "peak": peak, "limit": limit, "waiters": 0}[sort]


class Rig:
    """One store and its model; a walk, and what there was at each moment since it began."""

    def __init__(self) -> None:
        self.store = make_store(**SIZES)
        self.model = Model(**SIZES)
        self.pairs = [(self.store.session(), self.model.session()) for _ in range(2)]
        self.now_ns = 0
        self.walk: Any = None

    def send(self, number: int, data: bytes) -> None:
        session, model = self.pairs[number]
        self.now_ns += 10_000_000
        said = session.receive(data, self.now_ns)
        self.model.receive(model, said, session.more, data)
        assert not session.more

    def acquire(self, number: int, name: int, resources: int, more: int) -> None:
        self.send(number, wire.acquire(0, NAMES[name], resources, resources + more))

    def release(self, number: int, name: int) -> None:
        self.send(number, wire.release(0, NAMES[name], 1))

    def replace(self, number: int, name: int, other: int) -> None:
        """What frees a record, and likely takes it again."""
        self.release(number, name)
        self.acquire(number, other, 1, 3)

    def leave(self, number: int) -> None:
        session, model = self.pairs[number]
        session.closed(self.now_ns)
        self.model.closed(model)
        self.pairs[number] = (self.store.session(), self.model.session())
        self.store.tick(self.now_ns)
        self.model.tick()

    def window(self) -> None:
        number = self.model.window + 1
        self.store.begin_window(number)
        self.model.begin_window(number)
        self.store.tick(self.now_ns)
        self.model.tick()

    def do(self, work: list[tuple[Any, ...]]) -> None:
        for method, *arguments in work:
            getattr(self, method)(*arguments)
            self.remember()

    def begin(self, match: str, sort: str, limit: int) -> None:
        self.match, self.sort, self.limit = match, sort, limit
        self.walk = TABLES["counters"].open(self.store, {"match": match, "sort": sort, "limit": str(limit)})
        self.moments: list[dict[int, Any]] = []
        self.seen: list[Any] = []  # kept, so that no other gets its id
        self.remember()

    def remember(self) -> None:
        """What there is now, by who it is: another counter of the same name is another one."""
        if self.walk is None:
            return
        moment = {}
        for counter in self.model.counters.values():
            if self.model.exists(counter) and self.match.encode() in counter.name:
                self.seen.append(counter)
                peak = counter.peak if counter.window == self.model.window else counter.consumption
                moment[id(counter)] = (counter.number, (counter.name, counter.consumption, counter.limit, peak))
        self.moments.append(moment)

    def check(self, cells: list[tuple[Any, ...]]) -> None:
        """Checks the columns that the model knows: name, consumption, limit and peak."""
        rows = [row[:4] for row in cells]
        ranks = [rank(self.sort, row) for row in rows]
        ever: dict[int, list[Any]] = {}
        for moment in self.moments:
            for counter, (_, row) in moment.items():
                ever.setdefault(counter, []).append(row)
        throughout = {counter for counter in ever if all(counter in moment for moment in self.moments)}
        assert ranks == sorted(ranks, reverse=True)
        assert len(rows) <= self.limit
        assert len(throughout) <= self.walk.total <= len(ever)
        assert {*rows} <= {row for moments in ever.values() for row in moments}
        assert Tally(row[0] for row in rows) <= Tally(moments[0][0] for moments in ever.values())
        told = {row[0] for row in rows}
        highest = {counter: max(rank(self.sort, row) for row in moments) for counter, moments in ever.items()}
        for counter in throughout:
            lowest = min(rank(self.sort, row) for row in ever[counter])
            ahead = [other for other in ever if other != counter and highest[other] >= lowest]
            assert ever[counter][0][0] in told or len(ahead) >= self.limit
        if len(self.moments) == 1:
            (moment,) = self.moments
            ordered = sorted(moment.values(), key=lambda found: (-rank(self.sort, found[1]), found[0]))
            assert rows == [row for _, row in ordered[: self.limit]]


who = st.integers(0, 1)
acquires = st.tuples(st.just("acquire"), who, names, st.integers(1, 3), st.integers(0, 6))
work = st.one_of(
    acquires,
    st.tuples(st.just("release"), who, names),
    st.tuples(st.just("replace"), who, names, names),
    st.tuples(st.just("leave"), who),
    st.just(("window",)),
)


@settings(max_examples=examples(120), deadline=None)
@given(
    before=st.lists(st.one_of(acquires, acquires, acquires, work), min_size=15, max_size=25),
    match=st.integers(0, len(MATCHES) - 1),
    sort=st.sampled_from(TABLES["counters"].sorts),
    limit=st.sampled_from([1, 2, 3, 4, 100]),
    between=st.lists(st.lists(work, min_size=1, max_size=4), min_size=4, max_size=12),
)
def test_counters(
    before: list[tuple[Any, ...]], match: int, sort: str, limit: int, between: list[list[tuple[Any, ...]]]
) -> None:
    rig = Rig()
    rig.do(before)
    rig.begin(MATCHES[match], sort, limit)
    done = False
    for turn in between:
        done = rig.walk.step()
        if done:
            break
        rig.do(turn)
    rig.check(rig.walk.rows() if done else walked(rig.walk))
    rig.store.audit()


@settings(max_examples=examples(25), deadline=None)
@given(
    holders=st.sampled_from([0, 1, 1023, 1024, 1025, 2600]),
    turns=st.lists(
        st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.sampled_from([1, 30, 700, 1100, 3000])), max_size=3),
        max_size=5,
    ),
    limit=st.sampled_from([1, 10, 1000]),
)
def test_holders_that_stay_are_counted_and_those_at_the_end_are_told(
    holders: int, turns: list[list[tuple[bool, float, int]]], limit: int
) -> None:
    """Between two steps some come, and some go: from anywhere in the list on, where the walk is as well."""
    store = make_store(4, 20_000)
    present = [store.session() for _ in range(holders)]
    for number, session in enumerate(present):
        session.receive(wire.acquire(0, b"held", 1, 100_000), number * 100_000_000)
    stayed, came = len(present), 0
    walk = TABLES["holders"].open(store, {"name": "held", "limit": str(limit)})
    done = False
    for turn in turns:
        done = walk.step()
        if done:
            break
        for arrives, place, count in turn:
            if arrives:
                new = [store.session() for _ in range(count)]
                for session in new:
                    session.receive(wire.acquire(0, b"held", 1, 100_000), 0)
                present += new
                came += count
            else:
                start = int(place * len(present))
                for session in present[start : start + count]:
                    session.closed(0)
                stayed -= max(0, min(start + count, stayed) - start)
                del present[start : start + count]
                settle(store)
        store.audit()
    rows = walk.rows() if done else walked(walk)
    assert [row[:3] for row in rows] == holders_of(store, b"held")[:limit]
    assert stayed <= walk.total <= holders + came
    assert store.held() == len(present)


class Holders(Rig):
    """held: what the first connection had at each moment."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[dict[bytes, int]] = []

    def send(self, number: int, data: bytes) -> None:
        super().send(number, data)
        self.held.append(dict(self.pairs[0][1].holdings))


others_work = st.one_of(
    acquires,
    st.tuples(st.just("release"), who, names),
    st.tuples(st.just("replace"), who, names, names),
    st.just(("leave", 1)),
)


@settings(max_examples=examples(120), deadline=None)
@given(
    before=st.lists(acquires, min_size=5, max_size=25),
    limit=st.sampled_from([1, 2, 3, 100]),
    between=st.lists(st.lists(others_work, min_size=1, max_size=4), max_size=12),
)
def test_what_a_connection_holds(
    before: list[tuple[Any, ...]], limit: int, between: list[list[tuple[Any, ...]]]
) -> None:
    """What it has throughout is told of once, what it had last first; every row was true at one of the moments."""
    rig = Holders()
    rig.do(before)
    rig.held = rig.held[-1:]
    session = rig.pairs[0][0]
    walk = TABLES["holdings"].open(rig.store, {"connection": str(session.number), "limit": str(limit)})
    done = False
    for turn in between:
        done = walk.step()
        if done:
            break
        rig.do(turn)
    rows = [row[:2] for row in (walk.rows() if done else walked(walk))]
    noted = [*rig.held[0]][::-1][:limit]
    told = Tally(name for name, _ in rows)
    assert all(told[name] == 1 for name in noted if all(name in moment for moment in rig.held))
    assert {*rows} <= {held for moment in rig.held for held in moment.items()}
    assert len(rows) <= len(noted)
    assert walk.total == max(len(rig.held[-1]), len(rows))
    if len(rig.held) == 1:
        assert rows == [(name, rig.held[0][name]) for name in noted]
    rig.store.audit()


# ---- the smockron protocol ------------------------------------------------------------------------------------------

DOMAINS = parse_rules('{"day": {"rate": "1/day", "burst": 0}, "ten": {"rate": "1/hour", "burst": 10}}')
IDENTIFIERS = [b"%02d" % number + b"x" * (4094 if number % 5 else 8) for number in range(60)]


class Waiting:
    """One store and its model, at one moment; a walk, and who had to wait after each message since it began."""

    def __init__(self) -> None:
        limits = {"identifiers": 6000, "message_max": 1 << 13, "posted_max": 1 << 16}
        self.store, self.model = make_smockron_store(DOMAINS, **limits), smockron_model.Model(**limits)
        self.model.load_rules(DOMAINS)
        self.moments: list[dict[tuple[bytes, bytes], float]] = []
        for store in (self.store, self.model):
            store.set_wall(UNIX_NS, START_NS)
        self.gates = [store.session(START_NS) for store in (self.store, self.model)]
        self.send(smockron.greeting() + smockron.ready(smockron.SocketType.PUB))

    def send(self, data: bytes) -> None:
        for gate in self.gates:
            gate.take_output(START_NS)  # the greeting comes first
            gate.receive(data, START_NS)
            assert not gate.more

    def do(self, work: list[tuple[int, bool, bool]]) -> None:
        """work: of which identifier, whether in the first domain, and whether it is forgotten."""
        for number, first, forgets in work:
            status = smockron.Status.FORGET if forgets else smockron.Status.ACCEPTED
            self.send(smockron.accounting(b"day" if first else b"ten", status, IDENTIFIERS[number], 0))
            self.remember()

    def remember(self) -> None:
        waits = {key: (each.ns - START_NS) / 1e9 for key, each in self.model.identifiers.items()}
        self.moments.append({key: wait for key, wait in waits.items() if wait > 0})

    def check(self, cells: list[tuple[Any, ...]], match: bytes, limit: int) -> None:
        """Checks the columns that the model knows: identifier, domain and wait."""
        rows = [row[:3] for row in cells]
        moments = [{key: wait for key, wait in moment.items() if match in key[1]} for moment in self.moments]
        told = {(domain, name): wait for name, domain, wait in rows}
        assert len(told) == len(rows) <= limit
        assert [row[2] for row in rows] == sorted((row[2] for row in rows), reverse=True)
        assert all(any(moment.get(key) == wait for moment in moments) for key, wait in told.items())
        highest = Tally[Any]()
        for moment in moments:
            highest |= Tally(moment)  # type: ignore[arg-type]
        for key in moments[0]:
            lowest = min(moment.get(key, 0) for moment in moments)
            ahead = [other for other, wait in highest.items() if other != key and wait >= lowest]
            assert lowest == 0 or key in told or len(ahead) >= limit


throttling = st.tuples(st.integers(0, len(IDENTIFIERS) - 1), st.booleans(), st.integers(0, 5).map(lambda one: one == 0))


@settings(max_examples=examples(60), deadline=None)
@given(
    before=st.lists(throttling, max_size=80),
    all_before=st.booleans(),
    match=st.sampled_from([b"", b"x", b"1", b"0x", b"none"]),
    limit=st.sampled_from([1, 2, 10, 1000]),
    between=st.lists(st.lists(throttling, min_size=1, max_size=6), max_size=12),
)
def test_identifiers_that_have_to_wait(
    before: list[Any], all_before: bool, match: bytes, limit: int, between: list[list[Any]]
) -> None:
    waiting = Waiting()
    waiting.do([(number, True, False) for number in range(len(IDENTIFIERS) * all_before)] + before)
    waiting.moments.clear()
    waiting.remember()
    walk = TABLES["throttled"].open(waiting.store, {"match": match.decode(), "limit": str(limit)})
    done = False
    for turn in between:
        done = walk.step()
        if done:
            break
        waiting.do(turn)
    waiting.check(walk.rows() if done else walked(walk), match, limit)
    waiting.store.audit()
