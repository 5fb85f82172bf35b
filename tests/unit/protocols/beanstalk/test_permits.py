"""Jobs with permits in the journal: their state after a restart, and journals of an older counterd."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from counterd.journal import database as files
from counterd.protocols.beanstalk import _journal, journal, wire
from kit.journaled import Journaled
from unit.protocols.beanstalk.asking import SECOND, TICK, ask, restore, said, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = b"n" * 60
OLD = (
    journal.SCHEMA[: journal.SCHEMA.index(",                  -- NULL: it is long")]
    + (journal.SCHEMA[journal.SCHEMA.index("\n);\nCREATE TABLE bodies") :])
)


@pytest.fixture
def kept() -> Iterator[Journaled]:
    """A store with a journal, which is audited after the test."""
    made = Journaled(lends=True)
    yield made
    made.bench.settle()
    made.bench.store.audit()
    assert sum(made.permits.lent.values()) == made.bench.store.snapshot()["permits"]


def put(name: bytes = b"n", maximum: int = 1, **more: int) -> bytes:
    return wire.put_limited(b"x", name, maximum, **more)


def test_needs_of_permits_are_restored(kept: Journaled) -> None:
    peer = kept.connect()
    told(kept, peer, put(), put(LONG, 7), wire.put_limited(b"x", b"n", 2, b"key", 9), put(delay=100), put())
    told(kept, peer, wire.reserve_job(5), wire.bury(5), wire.delete(1))
    for _ in range(2):
        kept.crash()
        peer = kept.connect()
        for number, name, maximum in ((2, LONG, 7), (3, b"n", 2), (4, b"n", 1), (5, b"n", 1)):
            assert b'counter: "%b"\nmaximum: %d\n' % (name, maximum) in ask(peer, wire.stats_job(number))
        assert kept.bench.store.snapshot()["gates"] == 2
        assert kept.permits.held.total() == 0
    assert ask(peer, wire.reserve(0)).startswith(b"RESERVED 2 ")
    assert kept.permits.held == {LONG: 1}


def test_reserved_jobs_get_their_permits_back_at_a_restart(kept: Journaled) -> None:
    worker = kept.connect()
    told(kept, worker, put(ttr=5) * 2, wire.reserve(0))
    kept.crash(SECOND)
    assert kept.permits.held == {b"n": 1}
    peer = kept.connect()
    assert ask(peer, wire.reserve()) == b""
    kept.bench.advance(4 * SECOND + TICK)
    assert said(peer).startswith(b"RESERVED 1 ")
    assert kept.permits.held == {b"n": 1}


def test_ending_a_job_reserved_before_a_restart_gives_its_permit_back(kept: Journaled) -> None:
    told(kept, kept.connect(), put() * 2, wire.reserve(0))
    kept.crash()
    peer, worker = kept.connect(), kept.connect()
    assert ask(worker, wire.reserve()) == b""
    assert told(kept, peer, wire.touch(1)) == b"TOUCHED\r\n"
    assert kept.permits.held == {b"n": 1}
    assert told(kept, peer, wire.delete(1)) == b"DELETED\r\n"
    assert said(worker).startswith(b"RESERVED 2 ")


def test_a_refused_put_leaves_no_gate(kept: Journaled) -> None:
    peer = kept.connect()
    peer.send(put())
    assert kept.take()
    kept.refuse()
    assert said(peer) == b"INTERNAL_ERROR\r\n"
    assert kept.bench.store.snapshot()["gates"] == 0
    assert ("put-limited", "internal_error", 1) in kept.bench.store.outcomes()
    kept.write()
    kept.reach()


def test_a_journal_with_permits_is_refused_without_a_lender(kept: Journaled) -> None:
    told(kept, kept.connect(), put())
    with pytest.raises(ValueError, match=r"job 1 needs a permit, .*counter\.enable"):
        restore(kept, Journaled())


def test_a_journal_whose_permits_find_no_room_is_refused(kept: Journaled, monkeypatch: pytest.MonkeyPatch) -> None:
    told(kept, kept.connect(), put(), wire.reserve(0))
    other = Journaled(lends=True)
    monkeypatch.setattr(other.permits, "retake", lambda *_: False)
    with pytest.raises(MemoryError, match="no room for the permit of job 1"):
        restore(kept, other)


def test_restoring_with_a_memory_limit_too_small_for_groups(kept: Journaled) -> None:
    for number in range(90):
        told(kept, kept.connect(), put(b"%050d" % number))
    with pytest.raises(MemoryError, match=r"beanstalk\.memory_limit allows"):
        restore(kept, Journaled(lends=True, memory_limit=8_000))


@pytest.mark.parametrize(("permits", "maximum"), [("''", 1), ("'a b'", 1), ("'n'", 0), ("'n'", -1), ("'n'", "'x'")])
def test_an_invalid_permit_is_named(kept: Journaled, permits: str, maximum: object) -> None:
    told(kept, kept.connect(), put())
    kept.database.execute(f"UPDATE jobs SET permits = {permits}, maximum = {maximum}")
    with pytest.raises(ValueError, match="job 1: ") as raised:
        list(journal.read(kept.database))
    assert list(journal.problems(kept.database)) == [str(raised.value)]


# ---- a journal of the layout before ---------------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> str:
    """The path of a journal of layout 1, with a job."""
    path = str(tmp_path / "old")
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.executescript(OLD + files.OWN_SCHEMA)
        database.execute("INSERT INTO journal VALUES ('beanstalk')")
        database.execute(f"PRAGMA application_id = {files.APPLICATION_ID}")
        database.execute("PRAGMA user_version = 1")
        (row,) = _journal.rows(a_piece(), 1000)[2]
        database.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * 18)})", row[:18])
    return path


def a_piece() -> bytes:
    """A piece with a job that has no requirement."""
    kept = Journaled()
    kept.connect().send(wire.put(b"x", 7, 0, 60))
    assert kept.take()
    assert kept.piece is not None
    return kept.piece[1]


def columns(path: str) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [row[1] for row in database.execute("PRAGMA table_info(jobs)")]


def test_an_old_journal_is_read_and_not_changed(old: str) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as database:
        ledger = files.ledger_of(database, old)
        assert [(job["id"], job["priority"], job["permits"]) for job in ledger.dump(database)] == [(1, 7, None)]
        assert list(ledger.problems(database)) == []
        assert len(list(ledger.rescue(database, sqlite3.DatabaseError))) == 2
    assert "permits" not in columns(old)


def test_an_old_journal_gets_the_new_layout(old: str) -> None:
    for _ in range(2):
        with closing(files.open_database(old, "beanstalk", is_synced=False)) as database:
            assert journal.count(database) == 1
            assert database.execute("PRAGMA user_version").fetchone() == (journal.LAYOUT,)
            assert len(list(journal.read(database))) == 1
    assert columns(old)[-2:] == ["permits", "maximum"]


@pytest.mark.parametrize("change", ["DROP TABLE keys", "ALTER TABLE jobs DROP COLUMN kicks", "PRAGMA user_version = 0"])
def test_a_damaged_old_journal_is_refused(old: str, change: str) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as database:
        database.execute(change)
    with pytest.raises(files.JournalError, match=r"missing or different|has layout 0"):
        files.open_database(old, "beanstalk", is_synced=False)
    assert "permits" not in columns(old)
