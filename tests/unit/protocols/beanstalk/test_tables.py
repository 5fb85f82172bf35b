"""The beanstalk protocol's tables of tubes and of what a connection has reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance.beanstalk.engine import make_store
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk._tables import TABLES
from kit.pump import START_NS, Pump
from unit.protocols.beanstalk.asking import SECOND, ask, fill

if TYPE_CHECKING:
    from counterd.tables import Table

TUBES, RESERVED = TABLES
SINCE = START_NS // 100_000_000


def listed(bench: Pump, table: Table = TUBES, **parameters: str) -> tuple[list[Any], int]:
    bench.store.set_wall(0, bench.now_ns)
    walk = table.open(bench.store, parameters)
    while not walk.step():
        bench.store.audit()
    return walk.rows(), walk.total


def test_tubes_are_sorted_by_each_column(bench: Pump):
    fill(bench, 3, tube=b"a")
    bench.advance(SECOND)
    fill(bench, 2, tube=b"b", delay=100)
    fill(bench, 1, tube=b"c")
    peer, waiting = bench.connect(), bench.connect()
    ask(peer, wire.reserve_job(1), wire.bury(1, 0), wire.reserve_job(4))
    ask(waiting, wire.watch(b"d"), wire.reserve())
    bench.advance(SECOND)
    rows = {row[0]: row[1:] for row in listed(bench)[0]}
    assert rows == {
        b"a": (2, 0, 0, 1, 0, 2.0, 1.0), b"b": (0, 1, 1, 0, 0, 0.0, 0.0), b"c": (1, 0, 0, 0, 0, 1.0, 0.0),
        b"d": (0, 0, 0, 0, 1, 0.0, 0.0), b"default": (0, 0, 0, 0, 1, 0.0, 0.0),
    }  # fmt: skip
    firsts = [listed(bench, sort=sort)[0][0][0] for sort in ("ready", "reserved", "delayed", "buried", "oldest")]
    assert firsts == [b"a", b"b", b"b", b"a", b"a"]
    assert {row[0] for row in listed(bench, sort="waiting", limit="2")[0]} == {b"default", b"d"}
    assert listed(bench, match="fau") == ([(b"default", *rows[b"default"])], 1)


def test_many_tubes_are_walked_in_slices():
    bench = Pump(make_store(memory_limit=1 << 24, tubes=30_000))
    peer = bench.connect()
    for number in range(4000):
        ask(peer, wire.watch(b"tube-number-%d" % number))
    rows, total = listed(bench, match="number", limit="1000")
    assert (len(rows), total) == (1000, 4000)
    walk = TUBES.open(bench.store, {"match": "number"})
    assert not walk.step()


def test_the_jobs_that_a_connection_has_reserved(bench: Pump):
    fill(bench, 2, tube=b"a", ttr=10)
    fill(bench, 1, ttr=60)
    peer, other = bench.connect(), bench.connect()
    ask(peer, wire.reserve_job(1), wire.reserve_job(3))
    ask(other, wire.reserve_job(2))
    bench.advance(SECOND)
    number = str(peer.session.number)
    rows, total = listed(bench, RESERVED, connection=number)
    assert sorted(rows) == [("1", b"a", SINCE, 9.0), ("3", b"default", SINCE, 59.0)]
    assert total == 2
    assert len(listed(bench, RESERVED, connection=number, limit="1")[0]) == 1
    assert listed(bench, RESERVED, connection="99") == ([], 0)


def test_jobs_released_during_the_walk_are_no_rows(bench: Pump):
    fill(bench, 900)
    peer = bench.connect()
    for number in range(1, 901):
        ask(peer, wire.reserve_job(number))
    walk = RESERVED.open(bench.store, {"connection": str(peer.session.number)})
    assert not walk.step()
    assert not walk.step()
    for number in range(1, 901, 2):
        ask(peer, wire.delete(number))
    while not walk.step():
        pass
    found = [row[0] for row in walk.rows()]
    assert len(found) == len(set(found))
    assert set(map(str, range(2, 901, 2))) <= set(found)
    assert len(found) <= 450 + 100
