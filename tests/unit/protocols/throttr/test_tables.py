"""The throttr protocol's tables of keys and subscriptions."""

from __future__ import annotations

from typing import Any

from counterd.protocols.throttr._session import open_store
from counterd.protocols.throttr._tables import TABLES
from counterd.protocols.throttr.wire import Encoder, TTLType, ValueSize

KEYS, SUBSCRIPTIONS = TABLES
SECOND = 1_000_000_000
START = 1000 * SECOND
NEVER_S = 9_000_000_000


def make_store(grace_ns: int = 0) -> tuple[Any, Any, Encoder]:
    store = open_store(
        value_size=8,
        memory_limit=16 << 20,
        max_message=1 << 20,
        max_queued=1 << 20,
        expiry_grace_ns=grace_ns,
        hash_key=bytes(16),
        now_ns=START,
    )
    store.set_wall(START, START)
    return store, store.session(START), Encoder(ValueSize.UINT64)


def listed(store: Any, table: Any = KEYS, **parameters: str) -> tuple[list[Any], int]:
    walk = table.open(store, parameters)
    while not walk.step():
        pass
    return walk.rows(), walk.total


def test_keys_are_sorted_by_value_and_ttl() -> None:
    store, session, encoder = make_store()
    requests = [
        encoder.insert(b"small", 7, 60, TTLType.SECONDS),
        encoder.insert(b"large", 2**64 - 1, 1500, TTLType.MILLISECONDS),
        encoder.set(b"text\xff", b"x" * 5000, 2, TTLType.HOURS),
        encoder.set(b"empty" * 20, b"", 2**64 - 1, TTLType.HOURS),
    ]
    assert session.receive(b"".join(requests), START) == b"\1" * 4
    rows, total = listed(store)
    (empty,) = (row for row in rows if row[0] == b"empty" * 20)
    assert empty[1:3] == ("buffer", 0)
    assert empty[3] > NEVER_S
    assert [row for row in rows if row is not empty] == [
        (b"large", "quota", 2**64 - 1, 1.5),
        (b"text\xff", "buffer", 5000, 7200.0),
        (b"small", "quota", 7, 60.0),
    ]
    assert (rows[-1], total) == (empty, 4)
    assert [row[0] for row in listed(store, sort="ttl")[0]] == [b"empty" * 20, b"text\xff", b"small", b"large"]
    assert listed(store, match="t\xff") == ([rows[1]], 1)
    assert [row[0] for row in listed(store, match="a", limit="1")[0]] == [b"large"]


def test_expired_keys_are_not_listed_before_their_sweep_either() -> None:
    """The time is that of the last call; set_wall(), which comes once a second, is one."""
    store, session, encoder = make_store(grace_ns=10 * SECOND)
    session.receive(encoder.insert(b"a", 1, 2, TTLType.SECONDS) + encoder.insert(b"b", 1, 5, TTLType.SECONDS), START)
    store.set_wall(START + SECOND, START + SECOND)
    assert [row[3] for row in listed(store, sort="ttl")[0]] == [4.0, 1.0]
    store.set_wall(START + 2 * SECOND, START + 2 * SECOND)
    assert listed(store) == ([(b"b", "quota", 1, 3.0)], 1)
    assert store.snapshot()["keys"] == 2


def test_a_walk_ends_while_keys_come_and_go() -> None:
    store, session, encoder = make_store()
    for first in range(0, 40_000, 1000):
        session.receive(
            b"".join(encoder.insert(b"%d" % n, n, 60, TTLType.SECONDS) for n in range(first, first + 1000)), START
        )
        while session.more:
            session.take_output(START + first * SECOND // 1000)
    walk = KEYS.open(store, {"limit": "3"})
    steps = 0
    while not walk.step():
        purge = encoder.purge(b"%d" % (39_999 - steps))
        insert = encoder.insert(b"%d" % (50_000 + steps), 5, 60, TTLType.SECONDS)
        assert session.receive(purge + insert, START) == b"\1\1"
        steps += 1
    assert steps > 2
    assert [row[2] for row in walk.rows()] == [39_999 - steps - n for n in range(3)]
    store.audit()


def test_the_subscriptions_of_a_connection() -> None:
    """The two channels of every connection are there from the start."""
    store, session, encoder = make_store()
    other = store.session(START)
    later = START + 3 * SECOND
    for channel in (b"news\xff", b"news\xff", b"jobs"):
        assert session.receive(bytes(encoder.subscribe(channel)), later) == b"\1"
    rows, total = listed(store, SUBSCRIPTIONS, connection=str(session.number))
    assert rows[:2] == [(b"jobs", 1, later // (SECOND // 10)), (b"news\xff", 2, later // (SECOND // 10))]
    assert [row[1:] for row in rows[2:]] == [(1, START // (SECOND // 10))] * 2
    assert {len(row[0]) for row in rows[2:]} == {1, 32}
    assert (total, listed(store, SUBSCRIPTIONS, connection=str(other.number))[1]) == (4, 2)
    number = str(session.number)
    session.closed(later)
    store.tick(later)
    assert listed(store, SUBSCRIPTIONS, connection=number) == ([], 0)
