"""The tables of the counter room against models, while counters and holdings come, go and change between the slices.

What was there throughout and ranks high enough is told of, once; every row is what a counter was at one of the moments.
Names of 64 KiB make slices of single counters. COUNTERD_EXAMPLES=50 looks fifty times as long.
"""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.protocols import find_rooms
from counterd.protocols.counter import wire
from machine import examples
from property.model import Model, holders_of, make_store, settle

STEPS_MAX = 1000
TABLES = {table.name: table for room in find_rooms() for table in room.tables}

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
    return {"consumption": consumption, "usage": usage, "peak": peak, "limit": limit}[sort]


class Room:
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

    def check(self, rows: list[tuple[Any, ...]]) -> None:
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
    room = Room()
    room.do(before)
    room.begin(MATCHES[match], sort, limit)
    done = False
    for turn in between:
        done = room.walk.step()
        if done:
            break
        room.do(turn)
    room.check(room.walk.rows() if done else walked(room.walk))
    room.store.audit()


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
    assert rows == holders_of(store, b"held")[:limit]
    assert stayed <= walk.total <= holders + came
    assert store.held() == len(present)


class Holders(Room):
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
    room = Holders()
    room.do(before)
    room.held = room.held[-1:]
    session = room.pairs[0][0]
    walk = TABLES["holdings"].open(room.store, {"connection": str(session.number), "limit": str(limit)})
    done = False
    for turn in between:
        done = walk.step()
        if done:
            break
        room.do(turn)
    rows = [row[:2] for row in (walk.rows() if done else walked(walk))]
    noted = [*room.held[0]][::-1][:limit]
    told = Tally(name for name, _ in rows)
    assert all(told[name] == 1 for name in noted if all(name in moment for moment in room.held))
    assert {*rows} <= {held for moment in room.held for held in moment.items()}
    assert len(rows) <= len(noted)
    assert walk.total == max(len(room.held[-1]), len(rows))
    if len(room.held) == 1:
        assert rows == [(name, room.held[0][name]) for name in noted]
    room.store.audit()
