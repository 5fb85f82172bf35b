"""A beanstalk store with a journal in a database in memory, which tests write, lose and read again."""

from __future__ import annotations

import sqlite3
import weakref
from typing import TYPE_CHECKING, Any

from conformance.beanstalk.engine import make_store
from counterd.journal.database import transaction
from counterd.protocols.beanstalk import _journal, journal
from kit.permits import LentPump, Permits
from kit.pump import START_NS, Pump

if TYPE_CHECKING:
    from kit.pump import Peer


IDLE_TURNS = 5  # more than are needed to give back all jobs that the tests reserve


def empty_journal(owner: object) -> sqlite3.Connection:
    """Makes a journal in memory, which is closed when its owner is collected, in any thread."""
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    weakref.finalize(owner, database.close)
    database.executescript(journal.SCHEMA)
    return database


class Journaled:
    """A pump and its database. piece: taken from the store, and not known to be on disk. lends: there are permits.

    The store may stay due, because its journal is written only when a test asks for it.
    """

    def __init__(self, *, lends: bool = False, **sizes: Any) -> None:
        self._sizes = sizes
        self._lends = lends
        self.permits: Permits
        self.database = empty_journal(self)
        self.piece: tuple[int, bytes] | None = None
        self.bench = self._pump(START_NS)
        self.restored = self._restore()

    def connect(self) -> Peer:
        return self.bench.connect()

    def take(self) -> bool:
        """Takes the next piece, if there is none. Returns True if there is an unwritten piece."""
        if self.piece is None:
            self.piece = _journal.take(self.bench.store, self.bench.now_ns)
        return self.piece is not None

    def write(self) -> None:
        """Writes the piece, without notifying the store."""
        assert self.piece is not None
        with transaction(self.database):
            journal.write(self.database, self.piece[1])

    def reach(self) -> None:
        """Notifies the store that the piece is on disk."""
        assert self.piece is not None
        position, self.piece = self.piece[0], None
        self.bench.store.reach(position, self.bench.now_ns)
        self.bench.settle()

    def refuse(self) -> None:
        """Notifies the store that the journal cannot be written."""
        _journal.refuse(self.bench.store, self.bench.now_ns)
        self.bench.settle()

    def fill(self, *, is_full: bool) -> None:
        """Notifies the store that the journal has no room, or has room again."""
        _journal.fill(self.bench.store, is_full, self.bench.now_ns)
        self.bench.settle()

    def renew(self) -> None:
        """Leaves out of the piece what need not be written any more, if that is known by now."""
        assert self.piece is not None
        renewed = _journal.renew(self.bench.store, self.piece[1], self.bench.now_ns)
        if renewed is not None:
            self.piece = self.piece[0], renewed

    def commit(self) -> None:
        """Writes all changes, and notifies the store, which answers the clients."""
        while self.take():
            self.write()
            self.reach()

    def crash(self, pause_ns: int = 0) -> None:
        """Replaces the store by one that is restored from the database, pause_ns later."""
        self.piece = None
        self.bench = self._pump(self.bench.now_ns + pause_ns)
        self.restored = self._restore()

    def _pump(self, now_ns: int) -> Pump:
        store = make_store(**self._sizes)
        if not self._lends:
            return Pump(store, now_ns=now_ns, idle_max=IDLE_TURNS)
        pump = LentPump(store, now_ns=now_ns, idle_max=IDLE_TURNS)
        self.permits = pump.permits
        return pump

    def _restore(self) -> int:
        store = self.bench.store
        count = sum(_journal.restore(store, piece, self.bench.now_ns) for piece in journal.read(self.database))
        with transaction(self.database):
            _journal.begin(store, **journal.reserve(self.database))
        self.bench.settle()
        store.audit()
        return count
