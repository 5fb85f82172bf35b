"""`counterd journal`: checks, shows or repairs the file of a journal.

Floor 5 (ARCHITECTURE.md). Exit status: 0 for success, 1 if the journal has a problem or a repair lost records, 2 for a
wrong command line.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from counterd.journal.database import (
    JournalError,
    explained,
    ledger_of,
    lenient,
    lock,
    open_database,
    protocol_of,
    transaction,
)  # fmt: skip
from counterd.units import several

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBLEMS_MAX = 20  # lines
LOCK_S = 0.2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = "Checks, shows or repairs the journal file of a daemon."
    parser = argparse.ArgumentParser(prog="counterd journal", description=description)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("check", "check that the journal can be read and is consistent; the daemon may be running"),
        ("dump", "print the records as JSON, one per line; the daemon may be running"),
        ("repair", "keep the records that can be read; the old file becomes FILE.damaged; stop the daemon first"),
    ):
        commands.add_parser(name, help=text, description=text).add_argument("file", metavar="FILE")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `counterd journal`. Returns its exit status."""
    options = parse(arguments)
    try:
        return {"check": check, "dump": dump, "repair": repair}[options.command](options.file)
    except JournalError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def read_only(path: str) -> sqlite3.Connection:
    """Opens the database of a journal for reading. Raises JournalError if the file does not exist."""
    if not Path(path).is_file():
        raise JournalError(f"{path}: this file does not exist")
    return lenient(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, isolation_level=None))


def check(path: str) -> int:
    with explained(path), closing(read_only(path)) as database:
        ledger = ledger_of(database, path)
        found = [text for (text,) in database.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})") if text != "ok"]
        found += ledger.problems(database)
        for text in found[:PROBLEMS_MAX]:
            print(f"{path}: {text}", file=sys.stderr)
        if len(found) > PROBLEMS_MAX:
            print(f"{path}: and {len(found) - PROBLEMS_MAX} more problems", file=sys.stderr)
        if not found:
            print(f"{path}: ok, {several(ledger.count(database), 'record')}")
        return 1 if found else 0


def dump(path: str) -> int:
    with explained(path), closing(read_only(path)) as database:
        ledger = ledger_of(database, path)
        for record in ledger.dump(database):
            print(json.dumps(record))
    return 0


def repair(path: str) -> int:
    if not Path(path).is_file():
        raise JournalError(f"{path}: this file does not exist")
    aside, repaired = Path(f"{path}.damaged"), Path(f"{path}.repaired")
    with explained(path, repairs=True):
        lock(path, LOCK_S)
        if aside.exists():
            raise JournalError(f"{aside} exists already: move this file away")
        make_like(repaired, path)
        with closing(lenient(sqlite3.connect(path, isolation_level=None))) as source:
            source.execute("PRAGMA writable_schema = ON")  # without it, nothing can be read of a truncated file
            ledger = ledger_of(source, path)
            lost = 0
            with (
                closing(open_database(str(repaired), protocol_of(source, path), is_synced=True)) as target,
                transaction(target),
            ):
                for piece in ledger.rescue(source, sqlite3.DatabaseError):
                    if piece:
                        ledger.write(target, piece)
                    else:
                        lost += 1
                kept = ledger.count(target)
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                Path(path + suffix).rename(f"{aside}{suffix}")
        repaired.rename(path)
    what = f"{several(kept, 'record')} kept, {several(lost, 'part')} of the file could not be read"
    print(f"{path}: {what}; the old file is now {aside}")
    return 1 if lost else 0


def make_like(new: Path, path: str) -> None:
    """Creates an empty file with the mode and the owner of another file."""
    new.unlink(missing_ok=True)
    like = Path(path).stat()
    new.touch(0o600)
    os.chown(new, like.st_uid, like.st_gid)
    new.chmod(like.st_mode)
