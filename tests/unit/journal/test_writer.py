"""Writing a journal to a full disk. tests/functional/test_full_disk.py has real disks."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.ipc import PIECE_MAX, frame
from counterd.journal import __main__ as process
from counterd.journal import writer as module
from counterd.journal.watch import Seen
from counterd.journal.writer import Writer
from counterd.protocols.beanstalk import _journal, journal, wire
from kit.journaled import Journaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Disk:
    """A disk on which the journal and its ballast share so many bytes. calls: the operations on the ballast."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.room = 1 << 30
        self.size = 64 << 10
        self.held = 0
        self.checkpoint_pages = 16
        self.calls: list[str] = []

    def __call__(self, _path: str) -> Disk:
        return self

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.path.parent.glob(f"{self.path.name}*"))

    def free(self) -> int:
        return max(0, self.room - self.used() - self.held)

    def take(self) -> None:
        self.calls.append("take")
        self.held = min(self.size, max(0, self.room - self.used()))

    def give_up(self) -> None:
        self.calls.append("give up")
        self.held = 0

    def rows_max(self) -> int:
        return 2


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path / "journal")
    monkeypatch.setattr(module, "Ballast", disk)
    return disk


@pytest.fixture
def writer(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """A writer whose transactions fail at their end, as SQLite's do, if they need more space than the disk has."""
    transaction = module.transaction

    @contextlib.contextmanager
    def limited(database: sqlite3.Connection) -> Iterator[None]:
        with transaction(database):
            yield
            database.execute("SAVEPOINT all_of_it")
            ((pages,),) = database.execute("PRAGMA page_count")
            changed = database.total_changes - before[0]
            before[0] = database.total_changes
            if min(changed, 4) * 4096 > disk.free() or pages * 4096 > disk.room:
                raise sqlite3.OperationalError("database or disk is full")

    before = [0]
    monkeypatch.setattr(module, "transaction", limited)
    writer = Writer(str(disk.path), "beanstalk", is_synced=True)
    before[0] = writer.database.total_changes
    yield writer
    writer.close()


def pieces(*steps: tuple[bytes, ...]) -> Iterator[bytes]:
    """The pieces that a store gives its journal for some commands, one for each group of them."""
    kept = Journaled()
    peer = kept.connect()
    for commands in steps:
        peer.send(b"".join(commands))
        assert kept.take()
        assert kept.piece is not None
        yield kept.piece[1]
        kept.write()
        kept.reach()


def ids(writer: Writer) -> list[int]:
    return [id_ for (id_,) in writer.database.execute("SELECT id FROM jobs ORDER BY id")]


BODY = b"x" * 3000


def test_on_a_full_disk_new_records_are_refused_and_others_use_the_ballast(writer: Writer, disk: Disk) -> None:
    puts, more, ends = pieces((wire.put(BODY),) * 6, (wire.put(BODY),), tuple(wire.delete(id_) for id_ in (1, 2, 3, 4)))
    assert writer.write(puts)
    disk.room = disk.used() + disk.held
    del disk.calls[:]
    assert not writer.write(more)
    assert (disk.calls, ids(writer)) == ([], [1, 2, 3, 4, 5, 6])
    assert writer.write(ends)
    assert (disk.calls, ids(writer)) == (["give up", "take"], [5, 6])
    assert disk.path.with_name("journal-wal").stat().st_size == 0
    assert disk.held > 0


def test_the_space_of_deleted_jobs_is_used_again(writer: Writer, disk: Disk) -> None:
    puts, ends, again = pieces(
        (wire.put(BODY),) * 30, tuple(wire.delete(id_) for id_ in range(1, 31)), (wire.put(BODY),)
    )
    assert writer.write(puts)
    disk.room = disk.used() + disk.held
    assert not writer.has_room()
    assert writer.write(ends)
    assert writer.has_room()
    assert writer.write(again)
    assert ids(writer) == [31]


def test_needed_pieces_are_written_if_there_is_any_room(writer: Writer, disk: Disk) -> None:
    (puts,) = pieces((wire.put(BODY),) * 3)
    writer.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    disk.room = disk.used() + disk.held
    assert not writer.write(puts)
    assert writer.write(puts, is_needed=True)
    assert ids(writer) == [1, 2, 3]


def test_without_the_ballast_the_error_is_raised(writer: Writer, disk: Disk) -> None:
    puts, ends = pieces((wire.put(BODY),), (wire.delete(1),))
    assert writer.write(puts)
    disk.room = 0
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        writer.write(ends)
    assert ids(writer) == [1]


def test_a_quota_is_a_full_disk_although_the_disk_has_room(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    (puts,) = pieces((wire.put(BODY),))
    write: Any = writer.ledger.write
    failures = [sqlite3.OperationalError("disk I/O error")]

    def failing(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        write(*arguments)

    monkeypatch.setattr(writer.ledger, "write", failing)
    assert not writer.write(puts)
    assert not writer.has_room()  # for some seconds
    assert writer.write(puts, is_needed=True)
    failures.append(sqlite3.OperationalError("no such table: jobs"))
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        writer.write(puts)


def test_numbers_are_written_with_the_ballast(writer: Writer, disk: Disk) -> None:
    disk.room = disk.used() + disk.held
    assert writer.update(writer.ledger.reserve)["last_id"] == 0
    writer.update(writer.ledger.release, last_id=7)
    assert writer.database.execute("SELECT value FROM numbers").fetchone() == (7,)


def test_split_pieces_have_the_same_changes_in_a_better_order() -> None:
    puts, mixed = pieces(
        (wire.put(b"1"), wire.put_unique(BODY, b"key", 9), wire.put(b"3"), wire.put(b"4")),
        (wire.put(b"5"), wire.limit_reserves(b"a", 1, b"b"), wire.delete(1), wire.delete(2), wire.put(b"6")),
    )
    assert _journal.split(puts, 100) == [puts]
    assert [len(_journal.rows(one, 1000)[2]) for one in _journal.split(puts, 3)] == [3, 1]
    ends, limit, more = (_journal.rows(one, 1000)[2:] for one in _journal.split(mixed, 2))
    assert [id_ for id_, _ in ends[3]] == [1, 2]
    assert [row[:2] for row in ends[5]] == [("key", 2)]
    assert limit == ([], [], [], [], [("a", 1, "b")], [])
    assert [row[0] for row in more[0]] == [5, 6]
    (empty,) = _journal.split(puts[:24], 2)
    assert empty == puts[:24]


def test_the_growth_of_a_piece_is_that_of_its_new_records() -> None:
    puts, ends = pieces((wire.put(b"x" * 10), wire.put(BODY)), (wire.delete(1),))
    assert 3010 < _journal.growth(puts, 1000) < 3010 + 2 * 128 + 2200
    assert _journal.growth(ends, 1000) == 0


# ---- the process around it, after the daemon was killed ----


class Told:
    """Stands for a Writer. has: whether there is room for new records. written: the pieces that were written."""

    def __init__(self, *, has: bool) -> None:
        self.has = has
        self.written: list[bytes] = []
        self.database = sqlite3.connect(":memory:")
        self.ledger = journal
        self.watch = SimpleNamespace(seen=Seen(1, 2, 3))
        self.path = "jobs"

    def look(self) -> str:
        return ""

    def write(self, piece: bytes, *, is_needed: bool = False) -> bool:
        if self.has or is_needed:
            self.written.append(piece)
        return self.has or is_needed

    def has_room(self) -> bool:
        return self.has

    def close(self) -> None:
        self.database.close()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("has_room", "pieces"), [(False, [b"1"]), (True, [b"1", b"2"])])
def test_received_pieces_are_written(
    monkeypatch: pytest.MonkeyPatch, has_room: bool, pieces: list[bytes], reads: bool
) -> None:
    """Also a refused one, because its new jobs are not undone any more. reads: the daemon has read all answers."""
    writer = Told(has=has_room)
    monkeypatch.setattr(process, "Writer", lambda *_told, **_more: writer)
    told = {"protocol": "beanstalk", "path": "jobs", "is_synced": True, "is_new": False, "is_full": True, "seen": None}
    daemon, child = socket.socketpair()
    with child:
        link = process.Link(child)
        say = link.say

        def say_and_kill(letter: bytes, body: bytes = b"") -> None:
            say(letter, body)
            if letter not in b"BS":
                if reads:
                    daemon.recv(1000)
                daemon.close()

        monkeypatch.setattr(link, "say", say_and_kill)
        daemon.sendall(b"".join(frame(body, PIECE_MAX) for body in (json.dumps(told).encode(), *pieces)))
        process.write_journal(link)
    assert writer.written == pieces
