"""Opens, creates and locks the file of a journal, and explains errors to people.

Floor: side (ARCHITECTURE.md). This file works without the rest of the daemon, so a journal can always be inspected.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING

from counterd.protocols import find_protocols

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from counterd.contract import Ledger

APPLICATION_ID = 0x63746A31  # "ctj1", in the file's header
MODE = 0o600
LOCK_S = 10.0  # how long to wait for the lock: the writer process of a killed daemon may still have it
BUSY_MS = 10_000  # how long to wait while another process uses the database
CHECKPOINT_PAGES = 2000  # 8 MB: about the size of the write-ahead log
LOG_SIZE_MAX = 16 << 20
CACHE_KIB = 32 << 10
OWN_SCHEMA = "CREATE TABLE journal (room TEXT NOT NULL);"  # in addition to the protocol's
SHAPE = """
SELECT objects.type, objects.name, columns.name, columns.type, columns."notnull", columns.pk
FROM sqlite_master AS objects LEFT JOIN pragma_table_info(objects.name) AS columns
"""


class JournalError(Exception):
    """An error in a journal, with a text for people."""


@contextlib.contextmanager
def explained(path: str, *, repairs: bool = False) -> Iterator[None]:
    """Turns errors of SQLite and the system into JournalError.

    repairs: whether to omit the advice to repair the journal.
    """
    advice = "" if repairs else f"; `counterd journal repair {path}` keeps the records that can be read"
    try:
        yield
    except sqlite3.DatabaseError as error:
        damaged = "malformed" in str(error) or "Could not decode" in str(error)
        raise JournalError(f"{path}: {error}{advice if damaged else ''}") from None
    except (BrokenPipeError, ConnectionResetError):  # an error of the socket, not of the file
        raise
    except PermissionError as error:
        needed = f"uid {os.geteuid()} must be able to write to the file and to its folder"
        raise JournalError(f"{path}: {error.strerror}: {needed}") from None
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise JournalError(f"{path}: {error}{advice}") from None


def lock(path: str, patience: float = LOCK_S) -> int:
    """Locks the file for this process until the process ends. Creates the file if it does not exist.

    patience: how many seconds to wait for the lock. Raises OSError, or JournalError if another process keeps the lock.
    The descriptor must stay open, because closing it would release SQLite's own locks of the same file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise JournalError(f"{path}: another process is writing this journal") from None
            time.sleep(0.02)
        else:
            return descriptor


def protocol_of(database: sqlite3.Connection, path: str) -> str:
    """Returns the name of the protocol that a journal belongs to.

    Raises JournalError if the database is not a journal.
    """
    ((application,),) = database.execute("PRAGMA application_id")
    if application != APPLICATION_ID:
        raise JournalError(f"{path}: is a database, but not a journal of counterd")
    protocols = database.execute("SELECT room FROM journal").fetchmany(2)
    if len(protocols) != 1:
        raise JournalError(f"{path}: does not say which protocol the journal belongs to")
    return str(protocols[0][0])


def check_layout(database: sqlite3.Connection, path: str, ledger: Ledger) -> int:
    """Returns the layout of a journal. Raises JournalError if this version of counterd cannot read the journal."""
    ((layout,),) = database.execute("PRAGMA user_version")
    if layout != ledger.LAYOUT and layout not in ledger.ADDED:
        raise JournalError(
            f"{path}: has layout {layout}, but this version of counterd reads and writes layout {ledger.LAYOUT}"
        )
    added = {(table, column.split()[0]) for table, columns in added_since(ledger, layout) for column in columns}
    with contextlib.closing(sqlite3.connect(":memory:")) as whole:
        whole.executescript(ledger.SCHEMA + OWN_SCHEMA)
        shape = {row for row in whole.execute(SHAPE) if row[1:3] not in added}
    wrong = sorted({row[1] for row in shape - set(database.execute(SHAPE))})
    if wrong:
        those = f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or different"
        raise JournalError(f"{path}: differs from what counterd creates: {those}")
    triggers = sorted(name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
    if triggers:
        raise JournalError(f"{path}: has triggers that counterd did not create: {', '.join(triggers)}")
    return int(layout)


def added_since(ledger: Ledger, layout: int) -> Iterable[tuple[str, Sequence[str]]]:
    """Returns (table, columns) for the columns that newer layouts have added to each table since a layout."""
    return ledger.ADDED.get(layout, {}).items()


def read_as_new(database: sqlite3.Connection, ledger: Ledger, layout: int) -> None:
    """Makes the journal of an older layout readable like a new one, without a change of the file."""
    for table, columns in added_since(ledger, layout):
        values = ", ".join(f"NULL AS {column.split()[0]}" for column in columns)
        database.execute(f"CREATE TEMP VIEW {table} AS SELECT *, {values} FROM main.{table}")


def upgrade(database: sqlite3.Connection, ledger: Ledger, layout: int) -> None:
    """Converts a journal of an older layout to the current layout."""
    if layout == ledger.LAYOUT:
        return
    with transaction(database):
        for table, columns in added_since(ledger, layout):
            for column in columns:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
        database.execute(f"PRAGMA user_version = {ledger.LAYOUT}")


def lenient(database: sqlite3.Connection) -> sqlite3.Connection:
    """Makes text that is not UTF-8 readable. Such text becomes a string that is not a valid name."""
    database.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    return database


def find_ledger(protocol: str) -> Ledger:
    """Returns the Ledger of a protocol, which reads and writes its journals.

    Raises JournalError if the protocol is not installed or has no journal.
    """
    for one in find_protocols():
        if one.name == protocol and one.journal is not None:
            return importlib.import_module(one.journal.ledger)
    raise JournalError(f"no installed protocol with the name {protocol} has a journal")


def ledger_of(database: sqlite3.Connection, path: str) -> Ledger:
    """Returns the Ledger of a journal. Raises JournalError if this version of counterd cannot read the journal."""
    ledger = find_ledger(protocol_of(database, path))
    read_as_new(database, ledger, check_layout(database, path, ledger))
    return ledger


def open_database(
    path: str, protocol: str, *, is_synced: bool, checkpoint_pages: int = CHECKPOINT_PAGES
) -> sqlite3.Connection:
    """Opens the journal of a protocol. The file must be locked. Creates the tables if the file is empty, and converts a
    journal of an older layout. Raises JournalError.

    is_synced: whether each commit waits until it is on disk. checkpoint_pages: about the size of the write-ahead log.
    """
    ledger = find_ledger(protocol)
    with explained(path), contextlib.ExitStack() as undo:
        database = sqlite3.connect(path, isolation_level=None, timeout=BUSY_MS / 1000)
        undo.callback(database.close)
        ((tables,),) = database.execute("SELECT count(*) FROM sqlite_master")
        if tables:  # checked first, because another program's database must not be changed
            if (found := protocol_of(database, path)) != protocol:
                raise JournalError(f"{path}: is the journal of {found}, not of {protocol}")
            upgrade(database, ledger, check_layout(database, path, ledger))
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'OFF'}")
        database.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
        database.execute(f"PRAGMA journal_size_limit = {LOG_SIZE_MAX}")
        database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        database.execute("PRAGMA temp_store = MEMORY")
        database.execute("PRAGMA secure_delete = OFF")  # a deleted body need not be written again
        if not tables:
            database.executescript(
                f"BEGIN; {ledger.SCHEMA} {OWN_SCHEMA}"
                f" INSERT INTO journal VALUES ('{protocol}'); PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {ledger.LAYOUT}; COMMIT;"
            )
        undo.pop_all()
        return database


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Runs the block in a transaction. If the block raises an exception, the transaction is rolled back."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
