"""The file of a journal: opened, made, locked, and what is wrong with it said in a sentence.

A side: nothing of the daemon is needed to look into its journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING

from counterd.protocols import find_rooms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from counterd.contract import Ledger

APPLICATION_ID = 0x63746A31  # "ctj1", in the file's header
MODE = 0o600
LOCK_S = 10.0  # for the writer of a daemon that was killed to end
BUSY_MS = 10_000  # for somebody else who has the file open
CHECKPOINT_PAGES = 2000  # 8 MB: the log beside the file is about as large
LOG_SIZE_MAX = 16 << 20
CACHE_KIB = 32 << 10
OWN_SCHEMA = "CREATE TABLE journal (room TEXT NOT NULL);"  # beside the protocol's
SHAPE = """
SELECT objects.type, objects.name, columns.name, columns.type, columns."notnull", columns.pk
FROM sqlite_master AS objects LEFT JOIN pragma_table_info(objects.name) AS columns
"""


class JournalError(Exception):
    """What is wrong with a journal, for people."""


@contextlib.contextmanager
def explained(path: str, *, repairs: bool = False) -> Iterator[None]:
    """Raises JournalError for whatever SQLite or the system says of the file. repairs: it is being repaired already."""
    advice = "" if repairs else f"; `counterd journal repair {path}` keeps what can be read"
    try:
        yield
    except sqlite3.DatabaseError as error:
        damaged = "malformed" in str(error) or "Could not decode" in str(error)
        raise JournalError(f"{path}: {error}{advice if damaged else ''}") from None
    except (BrokenPipeError, ConnectionResetError):  # of a socket
        raise
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise JournalError(f"{path}: {error}{advice}") from None


def lock(path: str, patience: float = LOCK_S) -> int:
    """Has this process alone write the file, which is made if need be, until it ends. Raises JournalError or OSError.

    The descriptor must stay open: closing it would take SQLite's own locks of this file away.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise JournalError(f"{path}: another process writes this journal") from None
            time.sleep(0.02)
        else:
            return descriptor


def room_of(database: sqlite3.Connection, path: str) -> str:
    """The protocol whose journal it is. Raises JournalError if it is none."""
    ((application,),) = database.execute("PRAGMA application_id")
    if application != APPLICATION_ID:
        raise JournalError(f"{path}: is a database, and no journal of counterd")
    rooms = database.execute("SELECT room FROM journal").fetchmany(2)
    if len(rooms) != 1:
        raise JournalError(f"{path}: does not say which protocol's journal it is")
    return str(rooms[0][0])


def check_layout(database: sqlite3.Connection, path: str, ledger: Ledger) -> None:
    """Raises JournalError if this version does not understand the journal."""
    ((layout,),) = database.execute("PRAGMA user_version")
    if layout != ledger.LAYOUT:
        raise JournalError(
            f"{path}: has layout {layout}, and this version of counterd writes and reads layout {ledger.LAYOUT}"
        )
    with contextlib.closing(sqlite3.connect(":memory:")) as whole:
        whole.executescript(ledger.SCHEMA + OWN_SCHEMA)
        wrong = sorted({row[1] for row in set(whole.execute(SHAPE)) - set(database.execute(SHAPE))})
    if wrong:
        those = f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing, or another"
        raise JournalError(f"{path}: is not as counterd made it: {those}")
    triggers = sorted(name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"))
    if triggers:
        raise JournalError(f"{path}: has triggers, which counterd has not made: {', '.join(triggers)}")


def lenient(database: sqlite3.Connection) -> sqlite3.Connection:
    """The database, where text that is no UTF-8 can be read, as something that no name can be."""
    database.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    return database


def find_ledger(room: str) -> Ledger:
    """What a protocol's journal has in it. Raises JournalError if there is no such protocol here, or it has none."""
    for one in find_rooms():
        if one.name == room and one.journal is not None:
            return importlib.import_module(one.journal.ledger)
    raise JournalError(f"no protocol {room} is installed that has a journal")


def ledger_of(database: sqlite3.Connection, path: str) -> Ledger:
    """What a journal has in it. Raises JournalError if it is none that this version understands."""
    ledger = find_ledger(room_of(database, path))
    check_layout(database, path, ledger)
    return ledger


def open_database(path: str, room: str, *, is_synced: bool) -> sqlite3.Connection:
    """The journal of a protocol, in a file that is locked; its tables are made if it is empty. Raises JournalError.

    is_synced: a transaction that has ended is on disk.
    """
    ledger = find_ledger(room)
    with explained(path), contextlib.ExitStack() as undo:
        database = sqlite3.connect(path, isolation_level=None, timeout=BUSY_MS / 1000)
        undo.callback(database.close)
        ((tables,),) = database.execute("SELECT count(*) FROM sqlite_master")
        if tables:  # what is somebody else's is left as it is
            if (found := room_of(database, path)) != room:
                raise JournalError(f"{path}: is the journal of {found}, not of {room}")
            check_layout(database, path, ledger)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'OFF'}")
        database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        database.execute(f"PRAGMA journal_size_limit = {LOG_SIZE_MAX}")
        database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        database.execute("PRAGMA temp_store = MEMORY")
        if not tables:
            database.executescript(
                f"BEGIN; {ledger.SCHEMA} {OWN_SCHEMA}"
                f" INSERT INTO journal VALUES ('{room}'); PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {ledger.LAYOUT}; COMMIT;"
            )
        undo.pop_all()
        return database


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All of it, or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
