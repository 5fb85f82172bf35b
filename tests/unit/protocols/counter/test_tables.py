"""The columns of the counter protocol's tables.

Order, slices and changes in between are tested in tests/unit/engine/test_walk.py and
tests/property/test_tables.py."""

from __future__ import annotations

import random
from typing import Any

import pytest

from counterd.protocols.counter import PROTOCOL, wire
from kit.counters import OK, Client, holders_of, make_store, settle
from kit.pump import START_NS
from kit.takes import MS, Desk

TABLES = {table.name: table for table in PROTOCOL.tables()}
MINUTE_US = 60_000_000


def listed(store: Any, table: str, **parameters: str) -> tuple[list[dict[str, Any]], int]:
    """The rows by column, and the total number of rows."""
    walk = TABLES[table].open(store, parameters)
    while not walk.step():
        pass
    columns = [column.name for column in TABLES[table].columns]
    return [dict(zip(columns, row, strict=True)) for row in walk.rows()], walk.total


@pytest.fixture
def client() -> Client:
    """Holds a: 1 of 10, at most 6; b: 4 of 5; c: nothing of 3, at most 2; d: 2 of 100, the same name as before."""
    client = Client(make_store())
    for name, resources, maximum in ((b"a", 6, 10), (b"b", 4, 5), (b"c", 2, 3), (b"d\xff", 2, 100)):
        assert client.acquire(name, resources, maximum) == OK
    assert client.release(b"a", 5) == OK
    assert client.release(b"c", 2) == OK
    return client


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("consumption", [b"b", b"d\xff", b"a", b"c"]),
        ("usage", [b"b", b"a", b"d\xff", b"c"]),
        ("peak", [b"a", b"b", b"c", b"d\xff"]),
        ("limit", [b"d\xff", b"a", b"b", b"c"]),
    ],
)
def test_counters_are_sorted_and_filtered(client: Client, sort: str, names: list[bytes]) -> None:
    rows, total = listed(client.store, "counters", sort=sort)
    assert [row["name"] for row in rows] == names
    assert total == 4
    rows, total = listed(client.store, "counters", sort=sort, limit="2", match="d\xff")
    assert ([row["name"] for row in rows], total) == ([b"d\xff"], 1)


def test_counters_show_the_values_of_a_dump(client: Client) -> None:
    for _ in range(2):
        rows, _ = listed(client.store, "counters")
        assert {row["name"]: (row["consumption"], row["peak"]) for row in rows} == client.dump()
        assert {row["name"]: row["limit"] for row in rows} == client.limits()
        client.store.begin_window(1)
    assert {row["name"] for row in rows} == {b"a", b"b", b"d\xff"}
    assert rows[-1] == {"name": b"a", "consumption": 1, "limit": 10, "peak": 1, "waiters": 0, "everywhere": None}


def test_holders_are_listed_latest_first() -> None:
    store = make_store()
    clients = [Client(store) for _ in range(3)]
    for number, client in enumerate(clients):
        client.now_ns = number * 1_000_000_000
        assert client.acquire(b"\xe4", number + 1) == OK
    rows, total = listed(store, "holders", name="\xe4")
    assert rows == [
        {"connection": connection, "amount": amount, "since": since, "name": "", "grace": None}
        for connection, amount, since in holders_of(store, b"\xe4")
    ]
    assert [(row["amount"], row["since"]) for row in rows] == [(3, 20), (2, 10), (1, 0)]
    assert listed(store, "holders", name="\xe4", limit="2") == (rows[:2], 3)
    clients[1].close()
    settle(store)
    assert listed(store, "holders", name="\xe4") == ([rows[0], rows[2]], 2)
    assert listed(store, "holders", name="none") == listed(store, "holders", name="") == ([], 0)
    assert total == 3


def test_a_holder_in_its_grace_time_keeps_its_name() -> None:
    store = make_store()
    store.limit_resumptions(60)
    client = Client(store)
    assert client.acquire(b"a") == OK
    client.raw(wire.who(0, "billing-3") + wire.resume(0, 7_000))
    ((row,), _) = listed(store, "holders", name="a")
    assert (row["name"], row["grace"]) == ("billing-3", None)
    client.close()
    assert listed(store, "holders", name="a") == ([{**row, "grace": 70}], 1)


def test_only_the_latest_walk_along_holders_continues() -> None:
    """The earlier one ends: it has the holders that it has reached, and their count."""
    store = make_store(4, 4000)
    clients = [Client(store) for _ in range(2)]
    sessions = [store.session() for _ in range(3000)]
    for session in sessions:
        session.receive(bytes.fromhex("90020000 0000000b 00000000 00000001 00010000 0001 61"), 0)
    told = holders_of(store, b"a")[:5]
    first, second = (TABLES["holders"].open(store, {"name": "a", "limit": "5"}) for _ in range(2))
    assert not first.step()
    assert not second.step()
    for _ in range(2):
        assert not first.step() or first.total == 1024
    assert ([row[:3] for row in first.rows()], first.total) == (told, 1024)
    while not second.step():
        pass
    assert ([row[:3] for row in second.rows()], second.total) == (told, 3000)
    assert clients[0].get(b"a") == 3000


def test_a_walk_ends_if_the_record_gets_another_counter() -> None:
    store = make_store(1, 4000)
    sessions = [store.session() for _ in range(2000)]
    for session in sessions:
        session.receive(bytes.fromhex("90020000 0000000b 00000000 00000001 00010000 0001 61"), 0)
    walk = TABLES["holders"].open(store, {"name": "a", "limit": "5"})
    assert not walk.step()
    for session in sessions:
        session.closed(0)
    settle(store)
    other = Client(store)
    assert other.acquire(b"b", 7) == OK
    while not walk.step():
        pass
    assert walk.rows() == []


def test_a_holder_that_comes_during_the_walk_is_counted_if_listed() -> None:
    client = Client(make_store())
    walk = TABLES["holders"].open(client.store, {"name": "a", "limit": "5"})
    assert not walk.step()
    assert client.acquire(b"a") == OK
    assert walk.step()
    assert (len(walk.rows()), walk.total) == (1, 1)


# ---- what a connection holds ----


def test_holdings_of_a_connection_are_listed_latest_first() -> None:
    client, other = Client(store := make_store()), Client(store)
    number = client.session.number
    for now, (name, amount) in enumerate([(b"a", 3), (b"\xff", 1), (b"c", 2)]):
        client.now_ns = now * 1_000_000_000
        assert client.acquire(name, amount) == OK
    assert other.acquire(b"a", 9) == OK
    assert client.acquire(b"a", 1) == OK
    rows, total = listed(store, "holdings", connection=str(number))
    assert [tuple(row.values()) for row in rows] == [(b"c", 2, 20), (b"\xff", 1, 10), (b"a", 4, 0)]
    assert total == 3
    assert listed(store, "holdings", connection=str(number), limit="2") == (rows[:2], 3)
    assert client.release(b"c", 2) == OK
    assert listed(store, "holdings", connection=str(number)) == (rows[1:], 2)
    client.close()
    settle(store)
    assert listed(store, "holdings", connection=str(number)) == ([], 0)


def test_holdings_are_listed_in_slices_and_bounded() -> None:
    client = Client(store := make_store(4000, 4000, name_memory=8 << 20))
    for number in range(3000):
        client.acquire(b"%d" % number)
    walk = TABLES["holdings"].open(store, {"connection": str(client.session.number)})
    steps = 1
    while not walk.step():
        assert client.release(b"%d" % (2000 + steps)) == OK  # of those that are noted, the last
        assert client.acquire(b"new %d" % steps) == OK  # under the number that this set free
        steps += 1
    assert 3 < steps < 10
    assert (len(walk.rows()), walk.total) == (1000, 3000)
    assert len({name for name, _, _ in walk.rows()}) == 1000
    store.audit()


def test_long_names_of_holdings_are_bounded_together() -> None:
    client = Client(store := make_store(100, 100, name_memory=8 << 20))
    for number in range(100):
        assert client.acquire(b"%05d" % number * 13_107) == OK
    rows, total = listed(store, "holdings", connection=str(client.session.number))
    assert (len(rows), total) == ((4 << 20) // 65_535, 100)


@pytest.mark.parametrize("number", [0, 1 << 32, "x", -1, (1 << 20) + 1])
def test_invalid_connection_numbers_are_refused(number: object) -> None:
    with pytest.raises(ValueError, match="connection"):
        listed(make_store(), "holdings", connection=str(number))
    assert listed(make_store(), "holdings", connection=str(1 << 20)) == ([], 0)
    with pytest.raises(ValueError, match="the parameter connection is missing"):
        listed(make_store(), "holdings")


def hog(desk: Desk, name: bytes = b"a", maximum: int = 1) -> None:
    """Holds all of a counter."""
    taker = desk.taker()
    assert taker.has(taker.take(wire.Permit(name, maximum, maximum)))


# ---- rates ----


def test_rates_show_the_units_left_and_the_waiters() -> None:
    desk = Desk()
    one, other = desk.some(2)
    assert one.has(one.take(wire.Rate(b"a", 3, 60, MINUTE_US, 10)))
    assert one.has(one.take(wire.Rate(b"b\xff", 4, 120, MINUTE_US, 4)))
    other.take(wire.Rate(b"b\xff", 2, 120, MINUTE_US, 4), wait_ms=60_000)
    assert one.acquire(b"a", 1, 5) == 0  # a counter of the same name is none of them
    desk.wait(250)
    desk.store.set_wall(0, desk.pump.now_ns)
    rows, total = listed(desk.store, "rates")
    assert total == 2
    assert rows[0]["name"] == b"b\xff"
    assert rows[0]["full"] == pytest.approx(2 - 0.25)
    assert {**rows[0], "full": 0} == {
        "name": b"b\xff", "left": 0, "burst": 4, "limit": 120, "period": 60.0, "full": 0, "waiters": 1,
    }  # fmt: skip
    assert (rows[1]["left"], rows[1]["burst"], rows[1]["waiters"]) == (7, 10, 0)
    assert rows[1]["full"] == pytest.approx(3 - 0.25)
    desk.wait(60_000)
    assert listed(desk.store, "rates") == ([], 0)


@pytest.mark.parametrize(("sort", "first"), [("usage", b"used"), ("limit", b"large"), ("waiters", b"wanted")])
def test_rates_are_sorted(sort: str, first: bytes) -> None:
    desk = Desk()
    one, other = desk.some(2)
    one.take(wire.Rate(b"used", 10, 1, MINUTE_US, 10))
    one.take(wire.Rate(b"large", 1, 1_000, MINUTE_US, 1_000))
    one.take(wire.Rate(b"wanted", 1, 1, MINUTE_US, 2))
    other.take(wire.Rate(b"wanted", 2, 1, MINUTE_US, 2), wait_ms=1000)
    rows, total = listed(desk.store, "rates", sort=sort, limit="1")
    assert ([row["name"] for row in rows], total) == ([first], 3)
    assert listed(desk.store, "rates", match="use")[1] == 1


def test_a_dump_has_no_rates() -> None:
    """A client of the reference expects only counters."""
    desk = Desk()
    taker = desk.taker()
    taker.take(wire.Rate(b"a", 1, 1, MINUTE_US, 2), wire.Permit(b"b", 1, 2))
    taker.send(wire.dump(0))
    assert [wire.decode_dump_entry(each.body).name for each in taker.answers.others[:-1]] == [b"b"]


# ---- who waits ----


def test_counters_show_their_number_of_waiters() -> None:
    desk = Desk()
    hog(desk)
    hog(desk, b"b", 5)
    for taker in desk.some(3):
        taker.take(wire.Permit(b"a", 1, 1), wait_ms=1000)
    rows, _ = listed(desk.store, "counters", sort="waiters")
    assert [(row["name"], row["waiters"]) for row in rows] == [(b"a", 3), (b"b", 0)]


def test_waiters_are_listed_longest_wait_first() -> None:
    desk = Desk()
    hog(desk)
    hog(desk, b"b", 5)
    first, second = desk.some(2)
    assert first.status(wire.who(0, "billing")) == OK
    first.take(wire.Permit(b"b", 4, 5), wire.Permit(b"c", 1, 1), wait_ms=60_000, key=b"key " * 10, weight=7, priority=3)
    desk.wait(1500)
    second.take(wire.Rate(b"r", 1, 1, MINUTE_US, 1), wait_ms=0)
    second.take(wire.Rate(b"r", 1, 1, MINUTE_US, 1), wait_ms=9_000)
    desk.store.set_wall(0, desk.pump.now_ns)
    rows, total = listed(desk.store, "waiters")
    assert total == 2
    assert rows == [
        {
            "number": 1, "name": b"b", "kind": "permits", "amount": 4, "connection": first.session.number,
            "key": (b"key " * 10)[:31], "priority": 3, "weight": 7, "items": 2, "since": START_NS // (100 * MS),
            "left": 58.5, "client": "billing",
        },
        {
            "number": 2, "name": b"r", "kind": "rate", "amount": 1, "connection": second.session.number,
            "key": b"", "priority": 0, "weight": 1, "items": 1, "since": START_NS // (100 * MS) + 15, "left": 9.0,
            "client": "",
        },
    ]  # fmt: skip
    assert [row["number"] for row in listed(desk.store, "waiters", sort="amount")[0]] == [1, 2]
    assert [row["number"] for row in listed(desk.store, "waiters", match="r")[0]] == [2]
    assert listed(desk.store, "waiters", limit="1") == (rows[:1], 2)


@pytest.mark.parametrize("keys", [1, 3, 10])
def test_a_queue_is_listed_in_the_order_in_which_it_is_served(keys: int) -> None:
    """With priorities, weights and keys in a random order, and some that left: the grants come in the listed order."""
    chance = random.Random(5)
    desk = Desk(waiters=300)
    holder = desk.taker()
    assert holder.has(holder.take(wire.Permit(b"a", 4, 4)))
    takers = desk.some(60)
    waiting = [
        taker.take(
            wire.Permit(b"a", chance.randint(1, 4), 4),
            wait_ms=60_000,
            key=b"%d" % chance.randrange(keys),
            weight=chance.randint(1, 9),
            priority=chance.choice([0, 0, 0, 1, 2]),
        )
        for taker in takers
    ]
    for at in chance.sample(range(60), 20):
        assert takers[at].cancel(waiting[at]) == 0
    rows, total = listed(desk.store, "queue", name="a")
    assert (len(rows), total) == (40, 40)
    assert [row["position"] for row in rows] == [*range(1, 41)]
    told = [row["connection"] for row in rows]
    assert listed(desk.store, "queue", name="a", limit="7") == (rows[:7], 40)
    assert holder.release(b"a", 4) == 0
    served: list[int] = []
    by_number = {taker.session.number: (taker, opaque) for taker, opaque in zip(takers, waiting, strict=True)}
    while len(served) < 40:
        granted = [number for number in told if by_number[number][0].has(by_number[number][1]) and number not in served]
        assert granted, "nobody is served"
        served += granted
        for number in granted:
            amount = next(row["amount"] for row in rows if row["connection"] == number)
            assert by_number[number][0].release(b"a", amount) == 0
    grants = sorted(told, key=lambda number: by_number[number][0].of(by_number[number][1]).number)  # type: ignore[union-attr]
    assert grants == told


def test_a_queue_of_a_counter_and_a_rate_of_the_same_name() -> None:
    desk = Desk()
    hog(desk)
    one, other = desk.some(2)
    one.take(wire.Rate(b"a", 2, 1, MINUTE_US, 2))
    one.take(wire.Rate(b"a", 2, 1, MINUTE_US, 2), wait_ms=1000)
    for _ in range(2):
        other.take(wire.Permit(b"a", 1, 1), wait_ms=1000)
    rows, total = listed(desk.store, "queue", name="a")
    assert [(row["kind"], row["position"], row["amount"]) for row in rows] == [
        ("permits", 1, 1), ("permits", 2, 1), ("rate", 1, 2),
    ]  # fmt: skip
    assert total == 3
    assert listed(desk.store, "queue", name="none") == listed(desk.store, "queue", name="") == ([], 0)


def test_the_waits_of_a_connection() -> None:
    desk = Desk()
    hog(desk)
    hog(desk, b"b", 2)
    one, other = desk.some(2)
    one.take(wire.Permit(b"a", 1, 1), wait_ms=1000, priority=9)
    last = one.take(wire.Permit(b"b", 2, 2), wait_ms=1000)
    other.take(wire.Permit(b"a", 1, 1), wait_ms=1000)
    number = str(one.session.number)
    rows, total = listed(desk.store, "waits", connection=number)
    assert [(row["name"], row["kind"], row["amount"], row["priority"]) for row in rows] == [
        (b"b", "permits", 2, 0), (b"a", "permits", 1, 9),
    ]  # fmt: skip
    assert total == 2
    assert listed(desk.store, "waits", connection=number, limit="1") == (rows[:1], 2)
    assert one.cancel(last) == 0
    assert listed(desk.store, "waits", connection=number) == (rows[1:], 1)
    one.close()
    assert listed(desk.store, "waits", connection=number) == ([], 0)


def test_a_take_that_changes_its_queue_keeps_its_key() -> None:
    """It waits for b first, then for a: its key and its amounts are listed there."""
    desk = Desk()
    hog(desk, b"a", 3)
    first, taker = desk.taker(), desk.taker()
    assert first.has(first.take(wire.Permit(b"b", 1, 1)))
    taker.take(wire.Permit(b"b", 1, 1), wire.Permit(b"a", 2, 3), wait_ms=1000, key=b"k")
    assert listed(desk.store, "waiters")[0][0]["name"] == b"b"
    assert first.release(b"b") == 0
    (row,), _ = listed(desk.store, "waiters")
    assert (row["name"], row["amount"], row["key"], row["number"]) == (b"a", 2, b"k", 1)


def test_waiters_are_listed_in_slices() -> None:
    """Those that wait throughout appear once; those that are gone do not."""
    desk = Desk(waiters=4000, waiters_per_connection=0)
    hog(desk)
    (taker,) = desk.some(1)
    waiting = [taker.session.receive(wire.take(at, [wire.Permit(b"a", 1, 1)], 60_000), START_NS) for at in range(3000)]
    assert not any(waiting)
    walks = (
        TABLES["waiters"].open(desk.store, {"limit": "1000"}),
        TABLES["queue"].open(desk.store, {"name": "a"}),
        TABLES["waits"].open(desk.store, {"connection": str(taker.session.number)}),
    )
    for walk in walks:
        steps = 1
        while not walk.step():
            steps += 1
            if steps < 4:
                taker.session.receive(wire.cancel(0, 2999 - steps), START_NS)  # the latest, which "waits" tells first
        assert steps > 3
        assert 2_990 < walk.total <= 3000
        assert 995 <= len(walk.rows()) <= 1000
        assert len(set(walk.rows())) == len(walk.rows()) or walk is not walks[0]
    desk.store.audit()


def test_long_names_of_waits_are_bounded_together() -> None:
    desk = Desk(buckets=100, holdings=100, name_memory=16 << 20, waiters=200)
    holder, taker = desk.some(2)
    for number in range(99):
        name = b"%05d" % number * 13_107
        assert holder.acquire(name) == 0
        taker.session.receive(wire.take(number, [wire.Permit(name, 1, 1)], 60_000), START_NS)
    most = (4 << 20) // 65_535
    rows, total = listed(desk.store, "waits", connection=str(taker.session.number))
    assert (len(rows), total) == (most, 99)
    rows, total = listed(desk.store, "waiters")
    assert (len(rows), total) == (most, 99)


@pytest.mark.parametrize("number", [0, 1 << 32, "x", -1, (1 << 20) + 1])
def test_invalid_connection_numbers_of_waits_are_refused(number: object) -> None:
    with pytest.raises(ValueError, match="connection"):
        listed(make_store(waiters=1), "waits", connection=str(number))
    assert listed(make_store(waiters=1), "waits", connection=str(1 << 20)) == ([], 0)


# ---- figures ----


def test_outcomes_of_waits_are_counted() -> None:
    desk = Desk(waiters=2)
    holder, taker = desk.some(2)
    assert holder.acquire(b"a") == 0
    taker.take(wire.Permit(b"a", 1, 1), wait_ms=50)
    taker.take(wire.Permit(b"a", 1, 1), wait_ms=5000)
    assert taker.of(taker.take(wire.Permit(b"a", 1, 1), wait_ms=50)) == wire.Status.OUT_OF_MEMORY
    desk.wait(1_250)
    assert holder.release(b"a") == 0
    figures = desk.store.snapshot()
    assert {
        key: figures[key] for key in ("waits", "granted_later", "granted_later_seconds", "timed_out", "not_queued")
    } == {"waits": 2, "granted_later": 1, "granted_later_seconds": 1.25, "timed_out": 1, "not_queued": 1}
    assert (figures["rates_max"], figures["charges_max"], figures["charges_dropped"]) == (4, 64, 0)


def test_dropped_charges_are_counted() -> None:
    desk = Desk(holdings=2)
    taker = desk.taker()
    for number in range(3):
        taker.take(wire.Rate(b"%d" % number, 1, 1, MINUTE_US, 2, wire.OnDeath.CHARGED))
    assert (desk.store.snapshot()["charges"], desk.store.snapshot()["charges_dropped"]) == (2, 1)
