"""The journal of the beanstalk protocol: jobs as rows of an SQLite database.

Floor 2. All of this runs in the process that has the database open, which hands it in: the writer, or
`counterd journal`. A row has the checksum of its body, as SQLite would not notice that it was damaged.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import itertools
import zlib
from typing import TYPE_CHECKING, Any

from counterd.protocols.beanstalk._journal import CONSTANTS, packed, packed_keys, packed_limits, rows

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Sequence

LAYOUT = 1
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
    body BLOB                   -- NULL: it is long, and among the bodies
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

# A job whose state changes is written anew, with a body of up to so many bytes.
BODY_INLINE_MAX = 1000
ROWS_AT_ONCE = 512
BYTES_AT_ONCE = 1 << 18  # of bodies, and one more: how much is restored in a turn
KEYS_AT_ONCE = 10_000  # keys that are free by now, which are taken out with a piece
HALVED_MAX = 20_000  # ranges of ids, some seconds: what is damaged may be as wide as all ids
KEY, BODY = 14, 16  # their places in a row of JOBS

AT_ONCE = 16  # jobs that a statement inserts, which takes two thirds of the time of one at a time
WHOLE = f"INSERT OR REPLACE INTO jobs VALUES ({', '.join('?' * 18)})"
SEVERAL = WHOLE + f", ({', '.join('?' * 18)})" * (AT_ONCE - 1)
CHANGED = """
UPDATE jobs SET tube = ?, state = ?, priority = ?, delay = ?, ttr = ?, created = ?, since = ?, due = ?, reserves = ?,
    timeouts = ?, releases = ?, buries = ?, kicks = ?
WHERE id = ?
"""
JOBS = """
SELECT jobs.id, tube, state, priority, delay, ttr, created, since, due, reserves, timeouts, releases, buries, kicks,
    key, keep, ifnull(jobs.body, bodies.body), checksum
FROM jobs LEFT JOIN bodies ON bodies.id = jobs.id AND jobs.body IS NULL
"""


def packed_last_id(rows: list[tuple[Any]]) -> bytes:
    """A piece of the last id that may have been given. Raises ValueError if it makes no sense."""
    ((last_id,),) = rows
    try:
        return packed([], last_id)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the last id cannot be {last_id!r}: {error}") from None


RANGE = f"{JOBS} WHERE jobs.id BETWEEN ? AND ? ORDER BY jobs.id"
LAST_ID = "(SELECT value FROM numbers WHERE name = 'id_limit')"

FREE_KEYS = f"DELETE FROM keys WHERE key IN (SELECT key FROM keys WHERE until <= ? LIMIT {KEYS_AT_ONCE})"

# What there is besides jobs, and what makes a piece of rows of it.
OTHERS: tuple[tuple[str, Callable[[list[Any]], bytes]], ...] = (
    (f"SELECT {LAST_ID}", packed_last_id),
    ("SELECT * FROM limits", packed_limits),
    ("SELECT * FROM keys", packed_keys),
)


def write(database: sqlite3.Connection, piece: bytes) -> None:
    """Writes what a piece says, in a transaction of the caller's. Doing it twice is the same as once."""
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


def insert(database: sqlite3.Connection, jobs: Sequence[tuple[object, ...]]) -> None:
    """Writes rows of the table of jobs."""
    few = len(jobs) % AT_ONCE
    database.executemany(WHOLE, jobs[:few])
    blocks = (jobs[first : first + AT_ONCE] for first in range(few, len(jobs), AT_ONCE))
    database.executemany(SEVERAL, (list(itertools.chain.from_iterable(block)) for block in blocks))


def reserve(database: sqlite3.Connection) -> dict[str, int]:
    """Reserves ids that no job has had, for begin(), in a transaction of the caller's."""
    ((last_id, newest),) = database.execute(f"SELECT {LAST_ID}, (SELECT ifnull(max(id), 0) FROM jobs)")
    packed_last_id([(last_id,)])
    last_id = max(last_id, newest)
    database.execute("UPDATE numbers SET value = ? WHERE name = 'id_limit'", (last_id + CONSTANTS["ID_BLOCK"],))
    return {"last_id": last_id, "id_limit": last_id + CONSTANTS["ID_BLOCK"]}


def release(database: sqlite3.Connection, last_id: int) -> None:
    """Takes back the ids that were reserved and not given."""
    database.execute("UPDATE numbers SET value = ? WHERE name = 'id_limit'", (last_id,))


def count(database: sqlite3.Connection) -> int:
    """How many jobs there are."""
    ((jobs,),) = database.execute("SELECT count(*) FROM jobs")
    return int(jobs)


def read(database: sqlite3.Connection) -> Iterator[bytes]:
    """Pieces of all jobs, by when they came into their states. Raises ValueError for one that is wrong."""
    if limits := database.execute("SELECT * FROM limits").fetchall():
        yield packed_limits(limits)
    some: list[tuple[object, ...]] = []
    size = 0
    # Only ids are sorted, not the bodies with them. With a LIMIT the order of a subquery counts.
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
    """A row of JOBS without its checksum. Raises ValueError if that is wrong."""
    *job, checksum = row
    if not isinstance(job[16], bytes) or zlib.crc32(job[16]) != checksum:
        raise ValueError(f"job {job[0]}: its body is damaged")
    return tuple(job)


# ---- for `counterd journal` ----------------------------------------------------------------------------------------


def problems(database: sqlite3.Connection) -> Iterator[str]:
    """What is wrong with the records, a sentence each."""
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
                yield f"job {row[0]}: another has the key {row[KEY]} too"
            keys |= {row[KEY]} - {None}


def dump(database: sqlite3.Connection) -> Iterator[dict[str, object]]:
    """The records as people may read them, by id."""
    found = database.execute(f"{JOBS} ORDER BY jobs.id")
    names = [*(column[0] for column in found.description[:16]), "body"]
    for row in found:
        job: dict[str, Any] = dict(zip(names, row, strict=False))
        job["state"] = dict(enumerate(STATES, 1)).get(job["state"], job["state"])
        yield dict(shown(*each) for each in job.items())


def shown(name: str, value: Any) -> tuple[str, Any]:
    """As `counterctl` shows bytes: what is no UTF-8 is in Base64, and its name says so."""
    if not isinstance(value, bytes):
        return name, value
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        return f"{name}_base64", base64.b64encode(value).decode()


def rescue(database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[bytes]:
    """Pieces of all records that can be read and make sense, and b"" for each place where something cannot.

    damaged: what reading raises there.
    """
    for query, pack in OTHERS:
        try:
            for row in database.execute(query):
                try:
                    yield pack([row])
                except ValueError:
                    yield b""
        except damaged:  # of the last id: ids go on behind those of the jobs that are left
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
        if row[KEY] in keys:  # of two jobs with a key, one keeps it
            piece = packed([(*job[:KEY], None, *job[KEY + 1 :])])
            yield b""
        keys |= {row[KEY]} - {None}
        yield piece


def readable(database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[tuple[Any, ...] | None]:
    """The jobs that can be read, and None for each place where none can.

    A range of ids is read from both its ends up to what is damaged; then the halves of what is between are.
    """
    ranges = [(0, -1 << 63, (1 << 63) - 1)]  # the widest is first
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
