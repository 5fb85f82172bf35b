"""The counter room's tables: what their columns say. Order, slices and what happens between them is tested elsewhere:
tests/unit/engine/test_walk.py and tests/property/test_tables.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from counterd.protocols.counter import ROOM, wire
from counterd.protocols.counter._tables import HeldWalk, HoldersWalk
from property.model import OK, Client, holders_of, make_store, settle

TABLES = {table.name: table for table in ROOM.tables()}


def listed(store: Any, table: str, **parameters: str) -> tuple[list[dict[str, Any]], int]:
    """The rows by column, and how many there would be."""
    walk = TABLES[table].open(store, parameters)
    while not walk.step():
        pass
    columns = [column.name for column in TABLES[table].columns]
    return [dict(zip(columns, row, strict=True)) for row in walk.rows()], walk.total


@pytest.fixture
def client() -> Client:
    """a: 1 of 10, at most 6; b: 4 of 5; c: nothing of 3, at most 2; d: 2 of 100, the same name as before."""
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
def test_counters_by(client: Client, sort: str, names: list[bytes]) -> None:
    rows, total = listed(client.store, "counters", sort=sort)
    assert [row["name"] for row in rows] == names
    assert total == 4
    rows, total = listed(client.store, "counters", sort=sort, limit="2", match="d\xff")
    assert ([row["name"] for row in rows], total) == ([b"d\xff"], 1)


def test_counters_tell_what_a_dump_tells(client: Client) -> None:
    for _ in range(2):
        rows, _ = listed(client.store, "counters")
        assert {row["name"]: (row["consumption"], row["peak"]) for row in rows} == client.dump()
        assert {row["name"]: row["limit"] for row in rows} == client.limits()
        client.store.begin_window(1)
    assert {row["name"] for row in rows} == {b"a", b"b", b"d\xff"}
    assert rows[-1] == {"name": b"a", "consumption": 1, "limit": 10, "peak": 1}


def test_holders_who_came_last_first() -> None:
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


def test_a_holder_that_has_a_name_and_then_has_ended() -> None:
    store = make_store()
    store.limit_stays(60)
    client = Client(store)
    assert client.acquire(b"a") == OK
    client.raw(wire.who(0, "billing-3") + wire.resume(0, 7_000))
    ((row,), _) = listed(store, "holders", name="a")
    assert (row["name"], row["grace"]) == ("billing-3", None)
    client.close()
    assert listed(store, "holders", name="a") == ([{**row, "grace": 70}], 1)


def test_the_last_walk_along_holders_has_the_cursor() -> None:
    """The other one ends: it tells of those that there are, and has counted as far as it came."""
    store = make_store(4, 4000)
    clients = [Client(store) for _ in range(2)]
    sessions = [store.session() for _ in range(3000)]
    for session in sessions:
        session.receive(bytes.fromhex("90020000 0000000b 00000000 00000001 00010000 0001 61"), 0)
    told = holders_of(store, b"a")[:5]
    first, second = (HoldersWalk(store, b"a", 5) for _ in range(2))
    assert not first.step()
    assert not second.step()
    for _ in range(2):
        assert not first.step() or first.total == 1024
    assert ([row[:3] for row in first.rows()], first.total) == (told, 1024)
    while not second.step():
        pass
    assert ([row[:3] for row in second.rows()], second.total) == (told, 3000)
    assert clients[0].get(b"a") == 3000


def test_a_counter_that_takes_the_place_of_the_one_that_is_walked_is_another() -> None:
    store = make_store(1, 4000)
    sessions = [store.session() for _ in range(2000)]
    for session in sessions:
        session.receive(bytes.fromhex("90020000 0000000b 00000000 00000001 00010000 0001 61"), 0)
    walk = HoldersWalk(store, b"a", 5)
    assert not walk.step()
    for session in sessions:
        session.closed(0)
    settle(store)
    other = Client(store)
    assert other.acquire(b"b", 7) == OK
    while not walk.step():
        pass
    assert walk.rows() == []


def test_who_comes_behind_the_count_is_counted_if_told_of() -> None:
    client = Client(make_store())
    walk = HoldersWalk(client.store, b"a", 5)
    assert not walk.step()
    assert client.acquire(b"a") == OK
    assert walk.step()
    assert (len(walk.rows()), walk.total) == (1, 1)


# ---- what a connection holds ----


def test_what_a_connection_holds_what_came_last_first() -> None:
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


def test_holdings_are_told_in_slices_and_bounded() -> None:
    client = Client(store := make_store(4000, 4000, name_memory=8 << 20))
    for number in range(3000):
        client.acquire(b"%d" % number)
    walk = HeldWalk(store, client.session.number, 1000)
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
def test_numbers_that_no_connection_has(number: object) -> None:
    with pytest.raises(ValueError, match="connection"):
        listed(make_store(), "holdings", connection=str(number))
    assert listed(make_store(), "holdings", connection=str(1 << 20)) == ([], 0)
    with pytest.raises(ValueError, match="missing parameter connection"):
        listed(make_store(), "holdings")
