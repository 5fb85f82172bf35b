"""A journal's file: creating, locking, and clear refusals. Its contents are tested with the protocol."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from counterd.journal.database import (
    JournalError,
    check_layout,
    explained,
    find_ledger,
    lock,
    open_database,
    protocol_of,
    transaction,
)  # fmt: skip
from counterd.protocols.beanstalk import PROTOCOL

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def opened(path: str) -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(open_database(path, PROTOCOL.name, is_synced=True))


def test_a_new_journal_can_be_opened_again(path: str) -> None:
    for _ in range(2):
        with opened(path) as database:
            assert protocol_of(database, path) == PROTOCOL.name
            assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert database.execute("PRAGMA synchronous").fetchone() == (2,)
            assert find_ledger(PROTOCOL.name).count(database) == 0


def test_a_journal_without_sync(path: str) -> None:
    with contextlib.closing(open_database(path, PROTOCOL.name, is_synced=False)) as database:
        assert database.execute("PRAGMA synchronous").fetchone() == (0,)


@pytest.mark.parametrize("protocol", ["counter", "nothing"])
def test_a_protocol_without_a_journal_is_refused(path: str, protocol: str) -> None:
    with pytest.raises(JournalError, match=f"no installed protocol with the name {protocol} has a journal"):
        open_database(path, protocol, is_synced=True)


def test_the_journal_of_another_protocol_is_refused(path: str) -> None:
    with opened(path) as database:
        database.execute("UPDATE journal SET room = 'smockron'")
    with pytest.raises(JournalError, match="is the journal of smockron, not of beanstalk"):
        open_database(path, PROTOCOL.name, is_synced=True)


def test_another_layout_is_refused(path: str) -> None:
    with opened(path) as database:
        database.execute("PRAGMA user_version = 7")
        with pytest.raises(JournalError, match="has layout 7, but this version of counterd reads and writes layout 2"):
            check_layout(database, path, find_ledger(PROTOCOL.name))


def test_a_journal_without_its_protocols_name_is_refused(path: str) -> None:
    with opened(path) as database:
        database.execute("DELETE FROM journal")
    with pytest.raises(JournalError, match="does not say which protocol the journal belongs to"):
        open_database(path, PROTOCOL.name, is_synced=True)


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        ("DROP TABLE limits", "limits is"),
        ("ALTER TABLE jobs DROP COLUMN keep", "jobs is"),
        ("DROP TABLE keys; CREATE VIEW keys AS SELECT 'k' AS key, 1 AS id, 1 AS until", "keys, keys_until are"),
        ("DROP INDEX keys_until", "keys_until is"),
    ],
)
def test_changed_tables_are_refused(path: str, statements: str, named: str) -> None:
    with opened(path) as database:
        database.executescript(statements)
    with pytest.raises(JournalError, match=f"^{path}: differs from what .* creates: {named} missing or different$"):
        open_database(path, PROTOCOL.name, is_synced=True)


def test_triggers_are_refused(path: str) -> None:
    with opened(path) as database:
        database.execute("CREATE TABLE other (a)")
        database.execute("CREATE INDEX more ON jobs (tube)")
    with opened(path) as database:  # which do no harm
        database.execute("CREATE TRIGGER t AFTER INSERT ON jobs BEGIN DELETE FROM jobs; END")
    with pytest.raises(JournalError, match="has triggers that counterd did not create: t"):
        open_database(path, PROTOCOL.name, is_synced=True)


def test_a_foreign_database_is_refused_and_left_unchanged(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE other (a)")
        with pytest.raises(JournalError, match="is a database, but not a journal of counterd"):
            open_database(path, PROTOCOL.name, is_synced=True)
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_transaction_is_all_or_nothing(path: str) -> None:
    with opened(path) as database:
        with contextlib.suppress(KeyError), transaction(database):
            database.execute("UPDATE numbers SET value = 7")
            raise KeyError
        assert database.execute("SELECT value FROM numbers").fetchone() == (0,)
        with transaction(database):
            database.execute("UPDATE numbers SET value = 7")
        assert database.execute("SELECT value FROM numbers").fetchone() == (7,)


def test_a_journal_is_locked_by_one_process(path: str) -> None:
    code = (
        f"import sys; from counterd.journal.database import lock; lock({path!r}); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"\n"
        with pytest.raises(JournalError, match="another process is writing this journal"):
            lock(path, 0)
        holder.stdin.close()
        os.close(lock(path))


def test_errors_name_the_file(path: str) -> None:
    with pytest.raises(JournalError, match=f"^{path}: No such file or directory$"), explained(path):
        raise FileNotFoundError(2, "No such file or directory")
    with pytest.raises(JournalError, match=f"`counterd journal repair {path}`"), explained(path):
        raise sqlite3.DatabaseError("database disk image is malformed")
    with pytest.raises(JournalError, match=f"^{path}: disk I/O error$"), explained(path):
        raise sqlite3.OperationalError("disk I/O error")
    with pytest.raises(JournalError, match="`counterd journal repair"), explained(path):
        raise ValueError("job 1: its body is damaged")
    with pytest.raises(JournalError, match="`counterd journal repair"), explained(path):
        raise sqlite3.OperationalError("Could not decode to UTF-8 column 'tube' with text 'x'")
    with pytest.raises(JournalError, match=f"^{path}: file is not a database$"), explained(path, repairs=True):
        raise sqlite3.DatabaseError("file is not a database")
    with pytest.raises(BrokenPipeError), explained(path):  # of a socket, not of the file
        raise BrokenPipeError
