"""A simulated disk with the journal of a store on it, and what stands between the two.

The database is SQLite's, in memory, written and read by the protocol's own code; the Disk plays its process and what
control/journal.py makes of it. Transactions are there or not, whole; what they were told may come late, or never:

    fine    written at once, nearly
    slow    some are written seconds later, when they have been given up already
    full    nothing new is written, and that is said; everything else is, at the second attempt
    spent   nothing at all is written, and that is said
    flaky   the process is killed, before it has written or before it has said so, and another one comes
    gone    like spent, for good: until the daemon is started again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.journal.database import transaction
from counterd.protocols.beanstalk import _journal, journal
from kit.journaled import empty_journal
from kit.promises import MS, SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.beanstalk import BeanstalkWorld

MOODS = ("fine", "fine", "fine", "slow", "full", "full", "spent", "flaky", "flaky", "gone")
UNIX_NS = 1_700_000_000 * SECOND  # when the world's clock was 0
PATIENCE_NS = 5 * SECOND
RETRY_NS = SECOND // 10, 10 * SECOND
STATES = ("", *journal.STATES)
CRASHES = 0.02  # of the transactions, at one of their ends


class Disk:
    """piece: what the store has told and does not know to be written. is_up: the process is there.

    is_failing, is_full: as the store was told. failures: how often it was. is_needed: the piece has to be written on a
    full disk.
    """

    def __init__(self, world: BeanstalkWorld) -> None:
        self.world = world
        self.random = world.random
        self.database = empty_journal(self)
        self.mood = self.random.choice(MOODS)
        self.failures = 0
        self.begin()

    def begin(self) -> None:
        """For another daemon; what was under way is void."""
        self.piece: tuple[int, bytes] | None = None
        self.is_up = True
        self.is_failing = self.is_full = self.is_needed = False
        if self.mood == "gone":
            self.mood = "fine"

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """An event, unless the daemon is another one by then."""
        self.world.push(delay, self.world.if_alive, (self.world.life, action))

    # ---- the daemon's end ----

    def turn(self) -> None:
        """As JournalWriter.turn."""
        if self.piece is not None:
            return
        self.piece = piece = _journal.take(self.world.store, self.world.now)
        if piece is not None:
            self.later(PATIENCE_NS, lambda: self.lose_patience(piece))
            self.world.on_take(len(piece[1]))
            self.send()

    def lose_patience(self, piece: tuple[int, bytes]) -> None:
        if self.piece is piece:
            self.fail()

    def fail(self) -> None:
        self.is_failing = True
        self.failures += 1
        _journal.refuse(self.world.store, self.world.now)
        self.world.on_refuse()

    def fill(self) -> None:
        """As JournalWriter.on_full, and the store takes back at once what it can."""
        assert self.piece is not None
        self.is_full = self.is_needed = True
        _journal.fill(self.world.store, True, self.world.now)
        self.world.on_fill()
        self.renew()
        self.later(self.random.randrange(*RETRY_NS), self.make_room)

    def renew(self) -> None:
        assert self.piece is not None
        renewed = _journal.renew(self.world.store, self.piece[1], self.world.now)
        assert renewed is not None
        self.piece = self.piece[0], renewed
        self.send()

    def make_room(self) -> None:
        """As JournalWriter.on_room."""
        if self.is_full and not self.is_needed:
            self.is_full = False
            _journal.fill(self.world.store, False, self.world.now)
            self.world.on_room()
        elif self.is_full:
            self.later(self.random.randrange(*RETRY_NS), self.make_room)

    def acknowledge(self) -> None:
        """As JournalWriter.on_written."""
        position, self.piece = self.piece[0] if self.piece is not None else 0, None
        self.is_failing = self.is_needed = False
        self.world.store.reach(position, self.world.now)
        self.world.on_reach()
        self.turn()

    # ---- the process, and the disk ----

    def send(self) -> None:
        if self.is_up:
            slow = self.mood == "slow" and self.random.random() < 0.3
            self.later(int(self.random.random() * (20 * SECOND if slow else 2 * MS)) + 1, self.write)

    def write(self) -> None:
        draw = self.random.random()
        if self.mood in ("spent", "gone"):
            self.die()
            self.fail()
        elif self.mood == "full" and not self.is_needed and self.piece and journal.growth(self.piece[1]):
            self.fill()
        elif self.mood == "flaky" and draw < 0.4:
            self.die()
        else:
            self.commit()
            if draw > 1 - CRASHES:
                self.world.crash()
            elif self.mood == "flaky" and draw < 0.8:
                self.die()
            else:
                self.later(int(self.random.random() * MS) + 1, self.acknowledge)

    def commit(self) -> None:
        assert self.piece is not None
        with transaction(self.database):
            journal.write(self.database, self.piece[1])

    def die(self) -> None:
        self.is_up = False
        self.later(self.random.randrange(*RETRY_NS), self.start)

    def start(self) -> None:
        """Another process: it can fail at once, or gets the piece again that was not acknowledged."""
        if self.mood == "gone" or (self.mood in ("spent", "flaky") and self.random.random() < 0.5):
            self.die()
            self.fail()
            return
        self.is_up = True
        if self.piece is not None:
            self.renew()
        elif self.is_failing:
            self.acknowledge()

    # ---- what is on it ----

    def version(self, name: Any) -> Any:
        """What it has of a job, or of the limit of a tube, as Books.version; or None."""
        if isinstance(name, str):
            return self.limits().get(name)
        rows = self.database.execute(f"{journal.JOBS} WHERE jobs.id = ?", (name,)).fetchall()
        return version_of(rows[0]) if rows else None

    def limits(self) -> dict[str, tuple[int, str]]:
        found = self.database.execute("SELECT tube, reserves, target FROM limits ORDER BY tube")
        return {tube: (reserves, target) for tube, reserves, target in found}

    def jobs(self) -> dict[int, Any]:
        """All, in the order in which they came into their states."""
        return {row[0]: version_of(row) for row in self.database.execute(f"{journal.JOBS} ORDER BY since, jobs.id")}

    def keys(self) -> dict[str, tuple[int, int]]:
        """Of jobs that have ended: their ids, and when the keys are free."""
        found = self.database.execute("SELECT key, id, until FROM keys ORDER BY key")
        return {key: (id_, until - UNIX_NS) for key, id_, until in found}

    def restore(self, store: Any) -> int:
        """Has a store take up all of it; the last id that may have been given."""
        for piece in journal.read(self.database):
            _journal.restore(store, piece, self.world.now)
        with transaction(self.database):
            begun = journal.reserve(self.database)
        _journal.begin(store, **begun)
        return begun["last_id"]


def version_of(row: Any) -> Any:
    _, tube, state, priority, delay, ttr, _, _, due, *counts, key, keep, _, _, body, _ = row
    return (
        tube, STATES[state], priority, delay, ttr, due - UNIX_NS if due else 0, *counts, key or "", keep, body
    )  # fmt: skip
