"""A journal of any rows: a store restores exactly what the check accepts, and a rescue keeps all valid rows.

Input: the number of rows of each table, then their columns: mostly valid values, or a byte above ODD_FROM, which
is followed by an invalid one. The restored jobs are used for a while, written, and restored again."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from typing import TYPE_CHECKING, Any

from counterd.protocols.beanstalk import _journal, journal, wire
from fuzz.stream import Source
from kit.journaled import Journaled
from kit.pump import UNIX_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

ODD_FROM = 240
BODY = 17  # the position in a row of the table of jobs
ID_MAX = _journal.CONSTANTS["ID_MAX"]
ID_LATE = ID_MAX - 4 * _journal.CONSTANTS["ID_BLOCK"]  # after which there are some left
SECOND = 10**9
NAMES = ("default", "a", "t" * 200)
KEYS = (None, None, "k", "l", "k" * 200)
COUNTERS = (None, None, None, "c", "c" * 200)
MAXIMUMS = (1, 2, (1 << 32) - 1)
TIMES = (0, UNIX_NS - 10**6 * SECOND, UNIX_NS - SECOND, UNIX_NS, UNIX_NS + SECOND, UNIX_NS + 10**9 * SECOND)
NUMBERS = (0, 1, 2, 1023, 1024, (1 << 32) - 1)
SIZES = (0, 1, 60, 61, journal.BODY_INLINE_MAX, journal.BODY_INLINE_MAX + 1)
ODD = (
    None, -1, 0, 5, 1 << 32, ID_LATE, ID_MAX + 1, (1 << 63) - 1, -1 << 63, float("inf"), "", "x", "-", "a b", "\xe9",
    "t" * 201, "\0", b"", b"x", b"\xff",
)  # fmt: skip

TOKENS = [bytes(17), b"\0\2", b"\xf0"]  # a job; its tube and its state; what is odd


class Rows:
    """The rows that an input describes."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def value(self, options: Sequence[Any]) -> Any:
        """One of the valid values, or perhaps an invalid one."""
        which = self.source.byte()
        return self.source.choice(ODD) if which >= ODD_FROM else options[which % len(options)]

    def job(self) -> list[Any]:
        """A row of the table of jobs, with a valid or damaged body."""
        row = [self.value(range(1, 9)), self.value(NAMES), self.value((1, 2, 3, 4))]
        row += [self.value(NUMBERS), self.value(NUMBERS), self.value((60, 1, (1 << 32) - 1))]
        row += [self.value(TIMES) for _ in range(3)]
        row += [self.value(NUMBERS) for _ in range(5)]
        row += [self.value(KEYS), self.value(NUMBERS)]
        body = self.value([b"x" * size for size in SIZES])
        whole = body if isinstance(body, bytes) else b""
        row += [self.value((zlib.crc32(whole),)), body, self.value(COUNTERS)]
        return [*row, None if row[-1] is None else self.value(MAXIMUMS)]

    def fill(self, database: sqlite3.Connection) -> None:
        """Writes the rows, except those that the table refuses."""
        for _ in range(self.source.byte() % 8):
            job = self.job()
            if isinstance(job[BODY], bytes) and len(job[BODY]) > journal.BODY_INLINE_MAX:
                insert(database, "bodies", [job[0], job[BODY]])
                job[BODY] = None
            insert(database, "jobs", job)
        for _ in range(self.source.byte() % 4):
            insert(database, "keys", [self.value(KEYS[2:]), self.value(range(1, 9)), self.value(TIMES), 0])
        for _ in range(self.source.byte() % 4):
            names = self.value(NAMES), self.value((*NAMES, ""))
            insert(database, "limits", [names[0], self.value((1, 2, (1 << 32) - 1)), names[1]])
        last_id = self.value((0, 5, 100, ID_LATE))
        database.execute("UPDATE OR IGNORE numbers SET value = ?", (last_id,))


def insert(database: sqlite3.Connection, table: str, row: list[Any]) -> None:
    with contextlib.suppress(sqlite3.IntegrityError):
        database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def right(database: sqlite3.Connection) -> dict[int, tuple[Any, ...]]:
    """The jobs that are valid by themselves, without their keys, by id."""
    found = {}
    for row in database.execute(journal.JOBS):
        with contextlib.suppress(ValueError):
            _journal.packed([journal.checked(row)])
            found[row[0]] = row[: journal.KEY] + row[journal.KEY + 1 :]
    return found


def live(kept: Journaled, source: Source) -> None:
    """Uses the restored jobs; then writes and restores them once more."""
    kept.bench.store.audit()
    assert kept.bench.store.snapshot()["jobs"] == kept.restored == journal.count(kept.database)
    peer = kept.connect()
    while source:
        number, name = source.byte() % 9, source.choice(NAMES).encode()
        peer.send(
            source.choice(
                (
                    wire.watch(name), wire.reserve(0), wire.reserve_job(number), wire.delete(number),
                    wire.release(number, 1, 2), wire.bury(number, 1), wire.kick_job(number), wire.stats_job(number),
                    wire.list_jobs(name), wire.put_unique(b"x", b"k", number), wire.stats_tube(name),
                )
            )
        )  # fmt: skip
        kept.commit()
        kept.bench.advance(source.choice((0, SECOND, 10**6 * SECOND)))
    peer.close()
    kept.commit()
    kept.bench.store.audit()
    assert list(journal.problems(kept.database)) == []
    kept.crash()


def told(database: sqlite3.Connection) -> list[list[Any]]:
    """Everything in the store except free keys, which are not written."""
    what = ("jobs", "keys WHERE until > 0", "limits", "numbers")
    return [database.execute(f"SELECT * FROM {table}").fetchall() for table in what]


def one_input(data: bytes) -> None:
    source = Source(data)
    kept = Journaled(lends=True, memory_limit=1 << 17, tubes=20)
    Rows(source).fill(kept.database)
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as rescued:
        rescued.executescript(journal.SCHEMA)
        for piece in filter(None, journal.rescue(kept.database, sqlite3.DatabaseError)):
            journal.write(rescued, piece)
        assert list(journal.problems(rescued)) == []
        assert right(rescued) == right(kept.database)
        if any(journal.problems(kept.database)):
            with contextlib.suppress(ValueError):
                kept.crash()
                raise AssertionError("a store has taken up what makes no sense")
            kept.database = rescued
        else:
            assert told(rescued) == told(kept.database)
        kept.crash()
        live(kept, source)
