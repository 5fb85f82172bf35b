"""The beanstalk protocol's keys in the journal: what is written of them, and which are in use after a restart."""

from __future__ import annotations

import pytest

from counterd.protocols.beanstalk import _journal, journal, wire
from kit.journaled import Journaled
from kit.pump import UNIX_NS
from unit.protocols.beanstalk.asking import SECOND, TICK, ask, restore, said, told

DAY = 86400 * SECOND
ID_MAX = _journal.CONSTANTS["ID_MAX"]


def test_a_key_freed_before_the_clock_was_set_back(kept: Journaled):
    bench = kept.bench
    bench.store.set_wall(UNIX_NS + DAY, bench.now_ns)
    peer = kept.connect()
    told(kept, peer, wire.put_unique(b"1", b"k", 5), wire.delete(1))
    bench.advance(6 * SECOND)
    assert told(kept, peer, wire.put_unique(b"2", b"k")) == b"INSERTED 2\r\n"
    assert kept.database.execute("SELECT id FROM keys").fetchall() == [(1,)]
    kept.crash()
    assert ask(kept.connect(), wire.put_unique(b"3", b"k")) == b"EXISTS 2\r\n"


def test_a_restored_key_is_in_use_no_longer_than_was_asked_for(kept: Journaled):
    kept.bench.store.set_wall(UNIX_NS + DAY, kept.bench.now_ns)
    told(kept, kept.connect(), wire.put_unique(b"1", b"k", 5), wire.delete(1))
    kept.crash()
    peer = kept.connect()
    assert ask(peer, wire.put_unique(b"2", b"k")) == b"EXISTS 1\r\n"
    kept.bench.advance(5 * SECOND + TICK)
    assert told(kept, peer, wire.put_unique(b"2", b"k")).startswith(b"INSERTED")


@pytest.mark.parametrize(("count", "size"), [(90, 3), (60, 180)], ids=["short", "long"])
def test_restoring_with_a_memory_limit_too_small_for_keys(kept: Journaled, count: int, size: int):
    for number in range(count):
        key = b"%d" % number
        told(kept, kept.connect(), wire.put_unique(b"", key.zfill(size), 1000), wire.delete(number + 1))
    with pytest.raises(MemoryError, match=r"more keys than beanstalk\.memory_limit allows"):
        restore(kept, Journaled(memory_limit=8_000))


def test_old_keys_are_removed_a_few_at_a_time(kept: Journaled, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(journal, "FREE_KEYS", journal.FREE_KEYS.replace(str(journal.KEYS_AT_ONCE), "2"))
    peer = kept.connect()
    for number in range(1, 6):
        told(kept, peer, wire.put_unique(b"", b"%d" % number, 1), wire.delete(number))
    kept.bench.advance(9 * SECOND)
    left = []
    for number in range(6, 9):
        told(kept, peer, wire.put_unique(b"", b"%d" % number, 1000), wire.delete(number))
        ((count,),) = kept.database.execute("SELECT count(*) FROM keys WHERE id < 6")
        left.append(count)
    assert left == [3, 1, 0]


def test_keys_are_restored(kept: Journaled):
    peer = kept.connect()
    told(
        kept, peer, wire.put_unique(b"1", b"alive"), wire.put_unique(b"2", b"kept", 100), wire.put_unique(b"3", b"b", 5)
    )
    told(kept, peer, wire.delete(2), wire.delete(3))
    peer.send(wire.put_unique(b"4", b"came-and-went", 100) + wire.delete(4))  # between two pieces
    kept.commit()
    for _ in range(2):
        kept.crash(SECOND)
        peer = kept.connect()
        for number, key in enumerate((b"alive", b"kept", b"b", b"came-and-went"), 1):
            assert ask(peer, wire.put_unique(b"x", key)) == b"EXISTS %d\r\n" % number  # that is on disk
    assert b'key: "alive"\n' in ask(peer, wire.stats_job(1))
    kept.crash(4 * SECOND)
    peer = kept.connect()
    assert kept.bench.store.snapshot()["keys"] == 3
    assert told(kept, peer, wire.put_unique(b"new", b"b", 1)).startswith(b"INSERTED")
    assert told(kept, peer, wire.delete(1)) == b"DELETED\r\n"
    kept.crash()
    assert told(kept, kept.connect(), wire.put_unique(b"new", b"alive")).startswith(b"INSERTED")


def test_old_keys_are_removed_from_the_journal(kept: Journaled):
    peer = kept.connect()
    for number in range(1, 6):
        told(kept, peer, wire.put_unique(b"x", b"key-%d" % number, 1), wire.delete(number))
        kept.bench.advance(2 * SECOND)
    assert kept.database.execute("SELECT key FROM keys").fetchall() == [("key-5",)]


def test_the_reply_exists_waits_until_the_job_is_on_disk(kept: Journaled):
    peer, other = kept.connect(), kept.connect()
    peer.send(wire.put_unique(b"1", b"k"))
    assert ask(other, wire.put_unique(b"1", b"k")) == b""
    assert kept.take()
    kept.refuse()
    assert (said(peer), said(other)) == (b"INTERNAL_ERROR\r\n", b"INTERNAL_ERROR\r\n")
    kept.write()
    kept.reach()
    assert told(kept, peer, wire.put_unique(b"1", b"k")) == b"INSERTED 2\r\n"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("'', 1, 1, 1", ""), ("'a b', 1, 1, 1", "a b"), ("'k', 0, 1, 1", "k"), ("'k', -1, 1, 1", "k"),
        (f"'k', {ID_MAX + 1}, 1, 1", "k"), ("'k', 1, -1, 1", "k"), ("'k', 'x', 1, 1", "k"), ("'k', 1, 1, -1", "k"),
        ("'k', 1, 1, 'x'", "k"),
    ],
)  # fmt: skip
def test_an_invalid_key_is_named(kept: Journaled, row: str, named: str):
    kept.database.execute(f"INSERT INTO keys VALUES ({row})")
    with pytest.raises(ValueError, match=f"key {named}: ") as raised:
        list(journal.read(kept.database))
    assert list(journal.problems(kept.database)) == [str(raised.value)]
