"""The journal of the beanstalk protocol: jobs as rows of an SQLite database.

Floor 2 (ARCHITECTURE.md). This file runs in the process that has opened the database: the journal process or `counterd
journal`. Each row has the checksum of its body, because SQLite would not notice damage in a body.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import itertools
import zlib
from typing import TYPE_CHECKING, Any

from counterd.protocols.beanstalk._journal import CONSTANTS, packed, packed_keys, packed_limits, rows, split  # noqa: F401 - split belongs to the Ledger
from counterd.protocols.beanstalk._journal import growth as growth_of

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Sequence

LAYOUT = 2
ADDED = {1: {"jobs": ("permits TEXT", "maximum INTEGER")}}
SCHEMA = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    tube TEXT NOT NULL,
    state INTEGER NOT NULL,     -- 1 ready, 2 reserved, 3 delayed, 4 buried
    priority INTEGER NOT NULL,
    delay INTEGER NOT NULL,     -- seconds
    ttr INTEGER NOT NULL,       -- seconds
    created INTEGER NOT NULL,   -- Unix time in nanoseconds, as the next two
    since INTEGER NOT NULL,     -- when it came into its state
    due INTEGER NOT NULL,       -- when its delay or its time to run ends; 0: it has none
    reserves INTEGER NOT NULL,
    timeouts INTEGER NOT NULL,
    releases INTEGER NOT NULL,
    buries INTEGER NOT NULL,
    kicks INTEGER NOT NULL,
    key TEXT,
    keep INTEGER NOT NULL,      -- seconds for which the key is taken after the end of the job
    checksum INTEGER NOT NULL,  -- CRC-32 of the body
    body BLOB,                  -- NULL: it is long, and among the bodies
    permits TEXT,               -- the counter of which it takes a permit when it is reserved
    maximum INTEGER             -- of that counter
);
CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE keys ( -- of jobs that have ended
    key TEXT PRIMARY KEY,
    id INTEGER NOT NULL,
    until INTEGER NOT NULL,     -- Unix time in nanoseconds
    keep INTEGER NOT NULL       -- seconds for which it is taken after the end of the job
) WITHOUT ROWID;
CREATE INDEX keys_until ON keys (until);
CREATE TABLE limits (   -- jobs of a tube that were reserved so often go to another, or are buried
    tube TEXT PRIMARY KEY,
    reserves INTEGER NOT NULL,
    target TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO numbers VALUES ('id_limit', 0);     -- the last id that may have been given
"""

STATES = ("ready", "reserved", "delayed", "buried")

# Longer bodies are in their own table, because a change of state writes a job's row again, including its body.
BODY_INLINE_MAX = 1000
ROWS_AT_ONCE = 512
BYTES_AT_ONCE = 1 << 18  # bytes of bodies that are restored in a turn; one more body may exceed this
KEYS_AT_ONCE = 10_000  # how many free keys are deleted with one piece at most
HALVED_MAX = 20_000  # how many ranges of ids are divided, which takes some seconds: all ids may be damaged
KEY, BODY = 14, 18  # the positions of these columns in a row of JOBS

AT_ONCE = 16  # jobs per INSERT: takes two thirds of the time of one job per INSERT
WHOLE = f"INSERT OR REPLACE INTO jobs VALUES ({', '.join('?' * 20)})"
SEVERAL = WHOLE + f", ({', '.join('?' * 20)})" * (AT_ONCE - 1)
CHANGED = """
UPDATE jobs SET tube = ?, state = ?, priority = ?, delay = ?, ttr = ?, created = ?, since = ?, due = ?, reserves = ?,
    timeouts = ?, releases = ?, buries = ?, kicks = ?
WHERE id = ?
"""
JOBS = """
SELECT jobs.id, tube, state, priority, delay, ttr, created, since, due, reserves, timeouts, releases, buries, kicks,
    key, keep, permits, ifnull(maximum, 0) AS maximum, ifnull(jobs.body, bodies.body), checksum
FROM jobs LEFT JOIN bodies ON bodies.id = jobs.id AND jobs.body IS NULL
"""


def packed_last_id(rows: list[tuple[Any]]) -> bytes:
    """Makes a piece that contains only the last id that may have been used. Raises ValueError if the id is invalid."""
    ((last_id,),) = rows
    try:
        return packed([], last_id)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the last id cannot be {last_id!r}: {error}") from None


RANGE = f"{JOBS} WHERE jobs.id BETWEEN ? AND ? ORDER BY jobs.id"
LAST_ID = "(SELECT value FROM numbers WHERE name = 'id_limit')"

FREE_KEYS = f"DELETE FROM keys WHERE key IN (SELECT key FROM keys WHERE until <= ? LIMIT {KEYS_AT_ONCE})"

# Queries for all records except jobs, each with the function that packs their rows into a piece.
OTHERS: tuple[tuple[str, Callable[[list[Any]], bytes]], ...] = (
    (f"SELECT {LAST_ID}", packed_last_id),
    ("SELECT * FROM limits", packed_limits),
    ("SELECT * FROM keys", packed_keys),
)


def write(database: sqlite3.Connection, piece: bytes) -> None:
    """Writes a piece, in the caller's transaction. Writing a piece twice is the same as writing it once."""
    now, id_limit, whole, bodies, changed, gone, limits, keys = rows(piece, BODY_INLINE_MAX)
    insert(database, whole)
    if bodies:
        database.executemany("INSERT OR REPLACE INTO bodies VALUES (?, ?)", bodies)
    if changed:
        database.executemany(CHANGED, changed)
    if gone:
        database.executemany("DELETE FROM jobs WHERE id = ?", [(id_,) for id_, _ in gone])
        if long_gone := [(id_,) for id_, size in gone if size > BODY_INLINE_MAX]:
            database.executemany("DELETE FROM bodies WHERE id = ?", long_gone)
    if keys:
        database.executemany("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)", keys)
        database.execute(FREE_KEYS, (now,))
    if limits:
        database.executemany("INSERT OR REPLACE INTO limits VALUES (?, ?, ?)", limits)
        database.execute("DELETE FROM limits WHERE reserves = 0")
    database.execute("UPDATE numbers SET value = ? WHERE name = 'id_limit' AND value < ?", (id_limit, id_limit))


def growth(piece: bytes) -> int:
    """Returns how many bytes the new records of a piece add to the database at most."""
    return growth_of(piece, BODY_INLINE_MAX)


def insert(database: sqlite3.Connection, jobs: Sequence[tuple[object, ...]]) -> None:
    """Writes rows to the table of jobs."""
    few = len(jobs) % AT_ONCE
    database.executemany(WHOLE, jobs[:few])
    blocks = (jobs[first : first + AT_ONCE] for first in range(few, len(jobs), AT_ONCE))
    database.executemany(SEVERAL, (list(itertools.chain.from_iterable(block)) for block in blocks))


def reserve(database: sqlite3.Connection) -> dict[str, int]:
    """Reserves ids that no job has had, in the caller's transaction. Returns the arguments for begin()."""
    ((last_id, newest),) = database.execute(f"SELECT {LAST_ID}, (SELECT ifnull(max(id), 0) FROM jobs)")
    packed_last_id([(last_id,)])
    last_id = max(last_id, newest)
    database.execute("UPDATE numbers SET value = ? WHERE name = 'id_limit'", (last_id + CONSTANTS["ID_BLOCK"],))
    return {"last_id": last_id, "id_limit": last_id + CONSTANTS["ID_BLOCK"]}


def release(database: sqlite3.Connection, last_id: int) -> None:
    """Takes back the reserved ids that were not used."""
    database.execute("UPDATE numbers SET value = ? WHERE name = 'id_limit'", (last_id,))


def count(database: sqlite3.Connection) -> int:
    """Returns the number of jobs."""
    ((jobs,),) = database.execute("SELECT count(*) FROM jobs")
    return int(jobs)


def read(database: sqlite3.Connection) -> Iterator[bytes]:
    """Yields all records in pieces. Jobs are ordered by the time of their last change of state. Raises ValueError."""
    if limits := database.execute("SELECT * FROM limits").fetchall():
        yield packed_limits(limits)
    some: list[tuple[object, ...]] = []
    size = 0
    # Sorts ids only, without the bodies. The LIMIT makes SQLite keep the order of the subquery.
    in_order = "(SELECT id AS at FROM jobs ORDER BY since, id LIMIT -1) CROSS JOIN jobs ON jobs.id = at"
    for row in database.execute(JOBS.replace("FROM jobs", f"FROM {in_order}")):
        some.append(checked(row))
        size += len(row[BODY])
        if len(some) == ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield packed(some)
            some, size = [], 0
    if some:
        yield packed(some)
    found = database.execute("SELECT * FROM keys")
    while keys := list(itertools.islice(found, ROWS_AT_ONCE)):
        yield packed_keys(keys)


def checked(row: tuple[object, ...]) -> tuple[object, ...]:
    """Returns a row of JOBS without its checksum. Raises ValueError if the checksum is wrong."""
    *job, checksum = row
    body = job[BODY]
    if not isinstance(body, bytes) or zlib.crc32(body) != checksum:
        raise ValueError(f"job {job[0]}: its body is damaged")
    return tuple(job)


# ---- for `counterd journal` ----------------------------------------------------------------------------------------


def problems(database: sqlite3.Connection) -> Iterator[str]:
    """Yields one sentence for each mistake in the records."""
    for query, pack in OTHERS:
        for row in database.execute(query):
            try:
                pack([row])
            except ValueError as error:
                yield str(error)
    keys: set[object] = set()
    for row in database.execute(f"{JOBS} ORDER BY jobs.id"):
        try:
            packed([checked(row)])
        except ValueError as error:
            yield str(error)
        else:
            if row[KEY] in keys:
                yield f"job {row[0]}: another job has the same key {row[KEY]}"
            keys |= {row[KEY]} - {None}


def dump(database: sqlite3.Connection) -> Iterator[dict[str, object]]:
    """Yields the jobs as JSON objects, by id."""
    found = database.execute(f"{JOBS} ORDER BY jobs.id")
    names = [*(column[0] for column in found.description[:BODY]), "body"]
    for row in found:
        job: dict[str, Any] = dict(zip(names, row, strict=False))
        job["state"] = dict(enumerate(STATES, 1)).get(job["state"], job["state"])
        yield dict(shown(*each) for each in job.items())


def shown(name: str, value: Any) -> tuple[str, Any]:
    """Converts bytes to text as `counterctl` does: bytes that are not UTF-8 become Base64, and the name of the field
    says so."""
    if not isinstance(value, bytes):
        return name, value
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        return f"{name}_base64", base64.b64encode(value).decode()


def rescue(database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[bytes]:
    """Yields the readable, valid records in pieces, and b"" for each place that is unreadable or invalid.

    damaged: the exception that reading an unreadable place raises.
    """
    for query, pack in OTHERS:
        try:
            for row in database.execute(query):
                try:
                    yield pack([row])
                except ValueError:
                    yield b""
        except damaged:  # if the last id is lost, new ids begin after those of the jobs that remain
            yield b""
    keys: set[object] = set()
    for row in readable(database, damaged):
        if row is None:
            yield b""
            continue
        try:
            job = checked(row)
            piece = packed([job])
        except ValueError:
            yield b""
            continue
        if row[KEY] in keys:  # of two jobs with the same key, the first keeps it
            piece = packed([(*job[:KEY], None, *job[KEY + 1 :])])
            yield b""
        keys |= {row[KEY]} - {None}
        yield piece


def readable(database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[tuple[Any, ...] | None]:
    """Yields the readable jobs, and None for each unreadable place.

    Reads a range of ids from both ends up to the damage. Then divides the rest of the range in half, and so on.
    """
    ranges = [(0, -1 << 63, (1 << 63) - 1)]  # a heap, the widest range first
    lost = []
    halved = 0
    while ranges:
        _, first, last = heapq.heappop(ranges)
        try:
            for row in database.execute(f"{RANGE} ASC", (first, last)):
                first = row[0] + 1
                yield row
            continue
        except damaged:
            pass
        with contextlib.suppress(damaged):
            for row in database.execute(f"{RANGE} DESC", (first, last)):
                last = row[0] - 1
                yield row
        if first >= last or halved == HALVED_MAX:
            lost.append((first, last))
            continue
        halved += 1
        middle = (first + last) // 2
        for half in ((first, middle), (middle + 1, last)):
            heapq.heappush(ranges, (half[0] - half[1], *half))
    end = None
    for first, last in sorted(lost):
        if first != end:
            yield None
        end = last + 1
