"""Writes the pieces of a journal, also when the disk is full.

Floor: side (ARCHITECTURE.md). Records that are new need room. If there is none for those of a piece, write() refuses
the piece, and the daemon takes back what it can. Everything else can be written as long as the ballast (space.py) is
there: the writer gives it up, writes in small transactions, each followed by a checkpoint that cuts the write-ahead log
to nothing, and takes the ballast again. The records of ended jobs come first, because they make room for others.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

from counterd.journal.database import BUSY_MS, JournalError, find_ledger, lock, open_database, transaction
from counterd.journal.space import PAGE_SIZE, Ballast
from counterd.journal.watch import GONE, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.journal.watch import Seen

LIVES_STEPS = 1_000_000  # instructions of SQLite's virtual machine, which take about 0.1 s
RETRY_S = 2.0  # after an error although the disk seems to have room: a quota may be used up
SQUEEZE_BUSY_MS = 500  # how long a checkpoint waits for other programs that read the database
FULL = ("database or disk is full", "disk I/O error")  # the second if a quota or a limit of the process is used up


class Writer:
    """The database of a journal, open for writing. ledger: the Ledger of its protocol. watch: looks at its files.

    before: what another process saw last of this journal, which then has to be there. live: called while SQLite works.
    Locks the file. Raises JournalError, sqlite3.Error or OSError.
    """

    def __init__(
        self,
        path: str,
        protocol: str,
        *,
        is_synced: bool,
        before: Seen | None = None,
        live: Callable[[], None] = lambda: None,
    ) -> None:
        self.ledger = find_ledger(protocol)
        self.path, self._protocol, self._is_synced, self._live = path, protocol, is_synced, live
        if before is not None and not Path(path).exists():  # lock() would create it
            raise JournalError(f"{path}: {GONE}; move it back")
        self.watch = Watch(path, lock(path), before)
        if loss := self.watch.loss():
            raise JournalError(loss)
        self._failed = -RETRY_S  # when a write failed for want of room
        self._ballast = Ballast(path)
        self._ballast.give_up()  # the files beside the database may need it
        self._open()
        self._ballast.take()

    def look(self) -> str:
        """Looks at the files. Returns why nothing may be acknowledged, for people, or "".

        If the log was lost, the database gets what the log had, and begins another one.
        """
        loss = self.watch.loss()
        if loss:
            if not self.watch.is_truncated:  # then whoever saves the database has all
                with contextlib.suppress(sqlite3.Error):
                    self.database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        elif self.watch.has_lost_log() and not self._renew_log():
            return f"{self.path}: the files beside it were deleted, and another program reads it: end that program"
        return loss

    def write(self, piece: bytes, *, is_needed: bool = False) -> bool:
        """Writes a piece. Returns False, and has written nothing, if there is no room for its new records.

        is_needed: the piece has to be written, with all space that there is.
        """
        growth = self.ledger.growth(piece)
        has_room = growth == 0 or self.has_room(growth)
        if not has_room and not is_needed:
            return False
        if has_room:
            try:
                with transaction(self.database):
                    self.ledger.write(self.database, piece)
            except sqlite3.OperationalError as error:
                if str(error) not in FULL:
                    raise
                if growth:
                    self._failed = time.monotonic()
            else:
                return True
            if growth > self._spare() and not is_needed:
                return False
        self._squeeze(piece)
        return True

    def update(self, change: Callable[..., Mapping[str, int] | None], **values: int) -> Mapping[str, int]:
        """Calls a function of the ledger that changes a few records, in a transaction. Returns its result."""
        try:
            with transaction(self.database):
                return change(self.database, **values) or {}
        except sqlite3.OperationalError as error:
            if str(error) not in FULL:
                raise
        self._begin_squeeze()
        with transaction(self.database):
            result = change(self.database, **values) or {}
        self._end_squeeze()
        return result

    def has_room(self, growth: int | None = None) -> bool:
        """Returns whether so many bytes of new records can be written, and what is in the ballast is left.

        growth: None means as many as it takes until it is worth to accept new records again.
        """
        if growth is None:
            if time.monotonic() - self._failed < RETRY_S:
                return False
            growth = self._ballast.size // 4
        free = self._ballast.free() + self._ballast.held - self._ballast.size
        if free >= 2 * growth:  # in the log, and then in the database
            return True
        spare = self._spare()
        if spare >= growth:  # the database does not grow, so that what the log takes comes back
            return growth <= max(free, 0) + self._ballast.size // 4
        return free >= 2 * growth - spare

    def close(self) -> None:
        self.database.close()

    def _open(self) -> None:
        pages = self._ballast.checkpoint_pages
        self.database = open_database(self.path, self._protocol, is_synced=self._is_synced, checkpoint_pages=pages)
        self.database.set_progress_handler(self._live, LIVES_STEPS)
        self.watch.begin()

    def _renew_log(self) -> bool:
        """Moves what the log has to the database, and begins another log. Returns False if that is not possible now."""
        self.database.execute(f"PRAGMA busy_timeout = {SQUEEZE_BUSY_MS}")
        try:
            ((is_busy, _, _),) = self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.OperationalError:
            is_busy = True
        if is_busy:
            self.database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
            return False
        self.database.close()
        self._open()
        return True

    def _spare(self) -> int:
        """Returns how many bytes of the database are free."""
        ((pages,),) = self.database.execute("PRAGMA freelist_count")
        return int(pages) * PAGE_SIZE

    def _squeeze(self, piece: bytes) -> None:
        """Writes a piece with the space of the ballast."""
        self._begin_squeeze()
        for part in self.ledger.split(piece, self._ballast.rows_max()):
            with transaction(self.database):
                self.ledger.write(self.database, part)
            self._checkpoint()
        self._end_squeeze()

    def _begin_squeeze(self) -> None:
        self._ballast.give_up()
        self.database.execute(f"PRAGMA busy_timeout = {SQUEEZE_BUSY_MS}")
        self._checkpoint()

    def _end_squeeze(self) -> None:
        self._checkpoint()
        self.database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        self._ballast.take()

    def _checkpoint(self) -> None:
        """Moves what the log has to the database, as far as other programs that read it allow, and cuts the log."""
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
