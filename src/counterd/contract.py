"""The contract: which methods of a protocol `net` and `control` may call, and which of theirs a protocol may call.

Floor 0 (ARCHITECTURE.md): declarations, which a type checker enforces on both sides. A protocol registers itself with a
ProtocolSpec. The ProtocolSpec lists the optional abilities of the protocol (Windows, Files, tables, Extensions,
Journal, Shared, drain mode).

- Time is an argument: nanoseconds on the caller's monotonic clock. No protocol reads a clock, a file or a socket.
- Calls of one store and its sessions do not nest.
- A peer can make a session reply or close, but never raise an exception. An exception is a bug: the connection that
  caused it is closed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from counterd.settings import Setting
    from counterd.tables import Figure, Table

_T = TypeVar("_T")

Figures = Callable[[], Mapping[str, object]]


# ---- what net and control may call -----------------------------------------------------------------------------------


class Store(Protocol):
    """The state that all sessions of a protocol share. Each protocol has one store for all its listeners.

    A store is a subclass of `_core.Store`. `net` also reads the store's C field `has_work`. If this field is set,
    tick() or take_dirty() may be due earlier than next_deadline() last returned.

    sessions_dropped: so far, because their peers did not read the messages of others.
    """

    sessions_dropped: int

    def session(self, now_ns: int, port: int) -> Session:
        """Makes the session of a new connection.

        port: the number of the protocol's port, from 0. Raises MemoryError.
        """

    def next_deadline(self) -> int:
        """Returns when tick() or take_dirty() is due. 0 means now, -1 means never."""

    def tick(self, now_ns: int) -> None:
        """Does the work that is due, for at most half a millisecond."""

    def take_dirty(self) -> Sequence[Session]:
        """Returns the sessions that were dropped, or that got output from another session or from tick(), since the
        last call."""

    def set_wall(self, unix_ns: int, now_ns: int) -> None:
        """Gets the time of both clocks at least once a second, for protocols that show Unix time."""

    def snapshot(self) -> Mapping[str, float]:
        """Returns the current figures by name."""

    def outcomes(self) -> Sequence[tuple[str, str, int]]:
        """Returns (operation, status, count) for each combination of operation and status that has occurred."""

    def begin_drain(self) -> None:
        """Called for a drain with drain.mode = wait: the store grants nothing more, and lets no request wait.

        All other requests are still served.
        """

    def part(self) -> None:
        """Called before all connections end: no request waits for an event any more, and what waits is answered.

        Requests that need not wait are still granted.
        """

    def held(self) -> int:
        """Returns how many holdings a drain waits for.

        The holdings of ended connections count until they are given back.
        """

    def about(self, connection: int) -> tuple[str, int | None]:
        """Returns the name that a connection has stated, or "", and None. connection: its number.

        If the connection has ended and has a grace time, returns the end of the grace time in place of None, in 1/10 s.
        """

    def evict(self, connection: int, now_ns: int) -> bool:
        """Gives back everything that a connection leaves behind, because a person ends it. connection: its number.

        Returns True if the connection has ended and has left something behind; tick() then gives that back.
        """

    def leases(self, limit: int) -> Sequence[tuple[int, bytes, int, int]]:
        """Returns at most `limit` of the holdings that held() counts, as (connection, name, amount, since in 1/10
        s)."""

    def holdings_of(self, connection: int) -> int:
        """Returns how many holdings a connection has.

        connection: its number; for a number that was never assigned, returns 0.
        """


class Session(Protocol):
    """The state machine of one connection: it gets bytes, and returns replies. A session is a subclass of
    `_core.Session`.

    The session's state tells the caller what to do (`_core.STATE_NAMES`, `_core.TRANSITIONS`):

    reading    read, and pass the input to receive()
    streaming  read nothing; call take_output() when the last output has been sent and other connections were served
    parked     read nothing, and call nothing until the session is dirty; watch for the end of the connection
    ended      do as in streaming; the peer sends nothing more
    closing    send the last output, then close
    """

    state: int
    owner: Peer | None  # the connection; set by net
    number: int  # of the connection in the store; 0 once that has ended there; a request can change it
    requests: int  # executed so far
    awaited: int  # replies that will be posted later; until then the session does not close, and must not be ended
    dropped: bool  # close immediately and discard pending output

    def receive(self, data: bytes, now_ns: int) -> bytes:
        """Executes requests in the input.

        Returns at most 256 KiB of replies and one more reply. Beyond that, the rest of the input waits.
        """

    def take_output(self, now_ns: int) -> bytes:
        """Returns the next output: first of a long reply, then posted messages, then replies to input that waited."""

    def wait(self) -> None:
        """Called in place of take_output() if the last output was not sent yet.

        From now on, the number of waiting posted messages is limited.
        """

    def eof(self, now_ns: int) -> bytes:
        """Called when the peer has sent its last byte.

        The session answers all requests, gives its holdings back, and then closes.
        """

    def hang_up(self, now_ns: int) -> None:
        """Called before the connection ends. Ends the wait of a parked request, and lets no later request wait."""

    def closed(self, now_ns: int) -> None:
        """Called when the connection has ended. The session's holdings are queued, and tick() gives them back."""


# ---- what a protocol may call ----------------------------------------------------------------------------------------


class Peer(Protocol):
    """The connection of a session, as the session sees it.

    These methods are called during a call of the store, so they must not call a session or the store.
    """

    def peer(self) -> tuple[str, int]:
        """Returns the peer's IP address as text and its port, or ("", 0) on a Unix socket."""

    def origin(self) -> str:
        """Returns the peer's address for people: 127.0.0.1:5432, [::1]:5432 or unix uid=0 pid=12."""

    def whom(self) -> tuple[bytes, bool]:
        """Returns with whom the peer shares what one peer can have, and whether that is on this machine.

        The bytes are an IPv4 address, the first 64 bits of an IPv6 address, or a user on a Unix socket. They differ for
        all of these.
        """


class Busy(Exception):
    """A job was rejected, because the queue is full or every thread is stuck."""


@dataclass(frozen=True)
class Context:
    """The only argument of an extension's constructor.

    default: the built-in implementation, which has the same methods; the extension can call it.
    timeout: the time limit for a call, in seconds.
    """

    default: Any
    timeout: float


class Plugin(Protocol):
    """An extension and the thread that runs its methods. An extension is other people's code that a setting names."""

    extension: Any  # the object that was created from the name

    def ask(self, call: str, job: Callable[[], _T], then: Callable[[_T | Exception, int], None]) -> None:
        """Runs job() in the thread, and then then(outcome, now_ns) in the event loop's thread.

        The outcome is the result of the job, Busy, or another error with the message of the exception that the job
        raised. Jobs run one after the other. A job that has waited longer than the time limit is not started, and
        then() is not called. While a job runs longer than the limit, another job may run. call: the name of the method,
        for the log.
        """

    def refresh(self, call: str, job: Callable[[], _T], take: Callable[[_T], None], interval: str) -> None:
        """Runs job() at the start, at each reload, and every N seconds. N is the value of the setting `interval`.

        take() gets the result, in the event loop's thread. If job() or take() raises an exception at the start, the
        configuration is refused. Later exceptions are logged, one line for each of the exception's `problems`, and the
        old result stays in force.
        """


class PluginHost(Protocol):
    """Creates and runs the extensions of a protocol, so that the protocol itself uses no threads and files."""

    def make(self, key: str, default: object, timeout: float) -> Plugin | None:
        """Creates the extension that a setting names, with a Context (timeout in s).

        Returns None if the setting names no extension.
        """

    def on_loop(self, function: Callable[[int], _T], timeout: float) -> _T:
        """Called by other threads.

        Runs function(now_ns) in the event loop's thread. Raises the error of the function, or TimeoutError.
        """

    def read(self, key: str) -> bytes:
        """Reads the file that a setting names.

        Returns b"" if the setting names no file. Raises ValueError with a message for people.
        """


class Lender(Protocol):
    """Lets the store of another protocol in this process use the permits of a protocol's store.

    The clients of the lending protocol see the borrower as one connection, which holds permits and waits for permits
    like any other. The borrower makes these calls during a call of its own store.
    """

    number: int  # of that connection in the lending store

    def acquire(self, name: bytes, maximum: int, now_ns: int) -> bool:
        """Takes a permit, unless `maximum` permits of that name are held, or somebody already waits for a permit."""

    def retake(self, name: bytes, maximum: int, now_ns: int) -> bool:
        """Takes a permit that the borrower had before a restart, even above the maximum.

        Returns False if there is no room.
        """

    def release(self, name: bytes, now_ns: int) -> None:
        """Gives back a permit."""

    def enqueue(self, name: bytes, maximum: int, ticket: int, now_ns: int) -> int:
        """Waits for a permit, in the queue of all waiters for that name. Returns the number of the wait, or 0 if there
        is no room.

        ticket: below 2^32. When the wait ends, the borrower's settled() is called with the ticket.
        """

    def amend(self, place: int, maximum: int, now_ns: int) -> None:
        """Changes the maximum of a wait. The wait keeps its place in the queue."""

    def cancel(self, place: int, now_ns: int) -> None:
        """Ends a wait. settled() is not called for this wait."""


# Bytes of names after which a list of changes ends: 400 names of 655 bytes. A call has at most three times this and a
# name of 64 KiB, less than 1 MiB. For that a server needs no longer than for 400 short names; without the bound a call
# can have 26 MB, for which it needs a hundred times as long, and answers nobody meanwhile.
CHANGES_BYTES_MAX = 1 << 18


class Scope(enum.IntEnum):
    """What changes() returns besides those that cannot wait."""

    BLOCKING = 0  # nothing
    BACKGROUND = 1  # in turn, what the authority does not know yet
    REPORT = 2  # a full report begins: in turn, everything
    REST = 3  # the rest of the full report that has begun


class CounterChange(NamedTuple):
    """One of the counters about which the next call has to be. Amounts are permits."""

    number: int  # for apply()
    name: bytes
    maximum: int  # of the first request that waits; if none waits, of the rights
    first: int  # what the first request that waits needs; 0: none waits
    waiting: int  # what all requests that wait need, roughly
    used: int  # what is in use
    peak: int  # the most that was in use since the last call about it
    rights: int  # what may be in use
    stays: bool  # the first request waits on if it is refused


class RateChange(NamedTuple):
    """One of the rates about which the next call has to be. Amounts are units."""

    number: int  # for apply()
    name: bytes
    limit: int  # of the first request that waits, or of the last grant; so are the next two
    period_us: int
    burst: int
    first: int  # what the first request that waits needs; 0: none waits
    waiting: int  # what all requests that wait need, roughly
    units: int  # what may be taken; negative: more was used than there was
    taken: int  # since the last call about it


class Changes(NamedTuple):
    """What the next call has to be about."""

    blocking: list[CounterChange]  # requests wait for rights, or other daemons wait for rights that are idle here
    background: list[CounterChange]  # others, as the scope says
    rates: list[RateChange]
    is_complete: bool  # nothing is left of the full report


class CounterUpdate(NamedTuple):
    """The answer about one of the counters. Amounts are permits."""

    number: int  # as in the CounterChange
    rights: int  # what may be in use here
    maximum: int  # of all rights: only requests with at least this maximum are granted from them
    all_used: int  # by all daemons
    yields: bool  # what becomes free is not granted again here, but is a change that cannot wait
    is_refused: bool  # the first request that waits still has no rights


class RateUpdate(NamedTuple):
    """The answer about one of the rates. Amounts are units."""

    number: int  # as in the RateChange
    units: int  # to be added to those that may be taken
    first: int  # what was asked for the first request that waits
    wait_us: int  # the time until so many are there, or 0


class Update(NamedTuple):
    """What a store has to do before a call, or after its answer or failure. The rest stays as it is."""

    kept: Sequence[tuple[int, int, bool]] = ()  # number, the most rights or units to use until the answer, yields
    unchanged: Sequence[int] = ()  # numbers of changes about which no call is made
    forgotten: Sequence[int] = ()  # numbers of changes in a call without an answer
    lease_ns: int = -1  # when the rights of the partition end; 0: they end now; -1: as before
    is_reachable: bool | None = None  # whether the authority answers; if not, requests are decided as set_policy() says
    daemons: int = 0  # how many share the limits; 0: as before
    counters: Sequence[CounterUpdate] = ()
    rates: Sequence[RateUpdate] = ()
    wanted: Sequence[bytes] = ()  # names for which other daemons wait: their idle rights become changes


class LeasedLimits(Protocol):
    """The rights of a store to things whose limit holds for several daemons together (`counterd.cluster`).

    The store grants from its rights without asking. The caller makes calls to the authority, one at a time for each
    partition: changes(), then apply() before the call if the store may use less until the answer, and apply() with the
    answer. Each change is answered, unchanged or forgotten before it can be returned again.
    """

    def changes(self, partition: int, most: int, scope: Scope) -> Changes:
        """Returns what the next call has to be about: at most `most` counters and `most` rates that cannot wait, and at
        most `most` of each in the background. A list ends when its names have CHANGES_BYTES_MAX bytes: the others stay
        where they are."""

    def apply(self, partition: int, update: Update, now_ns: int) -> None:
        """Applies an update, in the order of its fields."""

    def has_urgent(self) -> tuple[int, int]:
        """Returns the partitions with changes that cannot wait, as bits: all of them; and those in which not all such
        changes are requests that were refused before. The caller looks after each turn of the store."""

    def set_policy(self, unreachable: str, drops: bool) -> None:
        """Sets what is granted without rights while the authority cannot be reached, and whether connections that hold
        permits are dropped when a lease ends.

        unreachable: "closed" (nothing), "share" (the maximum divided by the number of daemons) or "open" (the maximum).
        """

    def figures(self) -> Mapping[str, float]:
        """Returns the current figures by name."""


# ---- how a protocol registers itself ---------------------------------------------------------------------------------


class WindowedStore(Store, Protocol):
    """The store of a protocol that has Windows."""

    def begin_window(self, number: int) -> None:
        """Begins a stats window. number: higher than the number of the last window."""


@dataclass(frozen=True)
class Windows:
    """The stats windows of a WindowedStore, on the wall clock. key: the setting for their length in seconds."""

    key: str


@dataclass(frozen=True)
class Files:
    """Files that settings name. `control` reads them at the start, for `--check`, and at each reload.

    readers: the readers of the files, by the setting that holds the path ("" means no file). A reader parses the bytes,
        or raises ValueError. If the exception has the attribute `problems`, this has one line for each mistake.
    load: called with a new or running store, its settings, and the parsed files by key. It applies all files, or raises
        ValueError or MemoryError and changes nothing.
    """

    readers: Mapping[str, Callable[[bytes], Any]]
    load: Callable[[Any, Any, Mapping[str, Any]], None]


@dataclass(frozen=True)
class ForeignFile:
    """The configuration file of another server of the protocol, which counterd can use unchanged.

    server: the name of that server.
    keys: the keys by which its files are recognised, and the setting that each means. None: counterd ignores the key.
    settings: the settings that only such a file can have.
    translate: called with the values of all settings, the places of those that are set, both by key, and a function
        that returns the addresses on which everybody could use the protocol. It changes values, removes those of
        `settings`, and yields warnings.
    """

    server: str
    keys: Mapping[str, str | None]
    settings: tuple[Setting, ...]
    translate: Callable[[dict[str, Any], dict[str, Any], Callable[[], Sequence[str]]], Iterator[str]]


class JournaledStore(Store, Protocol):
    """The store of a protocol that has a Journal."""

    def reach(self, position: int, now_ns: int) -> None:
        """Releases the replies that waited for the journal, which is now on disk up to `position`."""


class JournalSource(Protocol):
    """The module that writes the changes of a store to a journal, and restores the store from it. The daemon runs this
    module.

    For a new store, `control` calls restore() with each piece of the journal, and then begin(). After that it calls
    take() in each turn, and the store's reach() when a piece is on disk. A piece may be due when the store's
    next_deadline() has passed.
    """

    def restore(self, store: Any, piece: bytes, now_ns: int) -> int:
        """Restores the records in a piece. Returns the number of its records. Raises ValueError or MemoryError."""

    def begin(self, store: Any, **reserved: int) -> None:
        """Records all changes from now on. reserved: the result of Ledger.reserve()."""

    def take(self, store: Any, now_ns: int) -> tuple[int, bytes] | None:
        """Returns a position, and a piece with all changes up to this position.

        Returns None if nothing has to be written to the journal yet.
        """

    def hurry(self, store: Any) -> None:
        """From now on, makes each change due immediately, because the daemon is about to stop."""

    def refuse(self, store: Any, now_ns: int) -> None:
        """Called when the journal cannot be written. Refuses requests until the next call of reach()."""

    def fill(self, store: Any, is_full: bool, now_ns: int) -> None:
        """Called when the journal has no room for new records, and when it has room again.

        Until then, refuses requests that make new records, also those whose replies wait.
        """

    def renew(self, store: Any, piece: bytes, now_ns: int) -> bytes | None:
        """Returns a piece that could not be written, without the records that need not be written any more.

        Returns None as long as fill() or refuse() has still replies to change, which the store does in its ticks.
        """

    def end(self, store: Any) -> Mapping[str, int]:
        """Called when all changes are written and no change may follow. Returns the arguments for Ledger.release()."""


class Ledger(Protocol):
    """The module for a protocol's tables in the journal, which is an SQLite database. The journal process runs this
    module.

    A piece contains records. JournalSource.take() returns pieces, and restore() gets pieces after a restart.
    """

    LAYOUT: int  # the version of SCHEMA
    ADDED: Mapping[int, Mapping[str, Sequence[str]]]  # by older layout that can be read: columns, by table, added since
    SCHEMA: str  # SQL that creates the tables of a new journal

    def write(self, database: sqlite3.Connection, piece: bytes) -> None:
        """Writes a piece, in the caller's transaction. Writing a piece twice is the same as writing it once."""

    def growth(self, piece: bytes) -> int:
        """Returns how many bytes the new records of a piece add to the database at most; 0: it has none."""

    def split(self, piece: bytes, rows_max: int) -> Sequence[bytes]:
        """Splits a piece into pieces with so many records at most, in an order in which each can be written alone.

        Records that make room come first.
        """

    def reserve(self, database: sqlite3.Connection) -> Mapping[str, int]:
        """Returns the arguments for JournalSource.begin(). Runs in the caller's transaction."""

    def release(self, database: sqlite3.Connection, **left: int) -> None:
        """Undoes reserve(), in the caller's transaction. left: the result of JournalSource.end()."""

    def count(self, database: sqlite3.Connection) -> int:
        """Returns the number of records in the journal."""

    def read(self, database: sqlite3.Connection) -> Iterator[bytes]:
        """Yields all records, in pieces. Raises ValueError for an invalid record."""

    def problems(self, database: sqlite3.Connection) -> Iterator[str]:
        """Yields one sentence for each mistake in the records."""

    def dump(self, database: sqlite3.Connection) -> Iterator[Mapping[str, object]]:
        """Yields the records as JSON objects, for people."""

    def rescue(self, database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[bytes]:
        """Yields the valid records, many in each value, and b"" for each place where a record is unreadable or invalid.

        damaged: the exception that reading an unreadable place raises.
        """


@dataclass(frozen=True)
class Journal:
    """The journal of a store. A journal has each change, so that a new process can restore the store.

    path: the setting for the journal's file; "" means no journal.
    sync: the setting that says when a change is on disk. `always`: before its reply. `never`: when the kernel writes
        it. A number: within that many milliseconds.
    source, ledger: the names of modules that are a JournalSource and a Ledger.
    most: the highest values of other settings that are possible with a journal.
    """

    path: str
    sync: str
    source: str
    ledger: str
    most: Mapping[str, int] = field(default_factory=dict)


class BorrowingStore(Store, Protocol):
    """The store of a protocol that borrows permits from another protocol."""

    def borrow(self, lender: Lender) -> None:
        """Gives the store its lender, before anything is restored.

        Not called if no lending protocol is enabled.
        """

    def settled(self, ticket: int, granted: bool) -> None:
        """Ends a wait of Lender.enqueue(): with a permit, or without one because the lending store drains or is full.

        Called within a tick of the lending store, so this method must not call the lender.
        """


class SharedSource(Protocol):
    """The module that makes the Redis calls of a protocol's store.

    `control` calls alone() at first and whenever Redis becomes unavailable. `control` calls begin() when Redis is
    available.
    """

    SCRIPT: str  # the Lua script that each call runs
    ANSWER_MAX: int  # bytes of an answer to a call

    def begin(self, store: Any, now_ns: int) -> None:
        """Lets Redis decide from now on."""

    def take(self, store: Any, now_ns: int) -> tuple[list[bytes], list[bytes | int]] | None:
        """Returns the keys and arguments of the next call.

        Returns None if there is no call to make, or if the last call is not settled yet.
        """

    def settle(self, store: Any, answer: object, now_ns: int) -> None:
        """Applies the answer to the call that take() returned last. Raises ValueError if the answer is invalid."""

    def alone(self, store: Any, now_ns: int) -> None:
        """Lets the store decide from now on, including requests that were taken but not settled."""


@dataclass(frozen=True)
class Shared:
    """State that the stores of several daemons share in a Redis.

    address: the setting for the address of Redis; "" means that the state is not shared. source: the name of a module
    that is a SharedSource.
    """

    address: str
    source: str


@dataclass(frozen=True)
class Extensions:
    """Other people's code that replaces parts of a protocol. `control` imports this code after it has given up
    privileges.

    methods: the methods that an extension must have, by setting. The setting names a callable that takes a Context:
        `package.module:name`, or an entry point of the group `counterd.<protocol>`; "" means no extension.
    extend: connects a new store, with its settings, to its extensions. This is called once, if an extension is named.
    """

    methods: Mapping[str, tuple[str, ...]]
    extend: Callable[[Any, Any, PluginHost], None]


@dataclass(frozen=True)
class ProtocolSpec:
    """A protocol. The package of a protocol exports a ProtocolSpec as PROTOCOL.

    settings: a frozen dataclass whose fields are the protocol's own settings, without the prefix `name.` (see
        counterd.settings). `control` adds the settings that every listener has.
    make_store: makes the store. Its arguments are the settings, a function that returns the figures of the daemon (for
        protocols that serve statistics to clients), and the time. It may raise ValueError or MemoryError.
    reload: applies changed settings to a running store.
    aliases: other spellings of settings, `{accepted: real}`.
    foreign_file: the configuration file of another server that can be used.
    figures: the figures of the store's snapshot that the metrics show.
    windows, files, extensions, journal, shared: the protocol's abilities, if it has them.
    tables: returns the tables that people can request. Unlike the other fields, it may import compiled modules.
    drain_mode: makes a running store refuse new work (True) or accept it again (False). Other requests are still
        served.
    usr1: the setting that says whether the signal SIGUSR1 begins the drain mode: if its value is `drain`.
    lend: lends permits of its store to another protocol's store. It is called with the store, a function that is called
        with the ticket and the outcome of each wait, and a function that is called when the lending store has work to
        do.
    borrows: whether its store is a BorrowingStore.
    leased_limits: lets names of its store that begin with a prefix share their limits with other daemons.
    ports: the names of its ports after the first port, in order. `NAME_port` and `NAME_socket` are settings of the
        protocol. All other settings of such a port are the settings of the first port.
    """

    name: str
    default_port: int
    settings: type[Any]
    make_store: Callable[[Any, Figures, int], Store]
    reload: Callable[[Any, Any], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    foreign_file: ForeignFile | None = None
    figures: tuple[Figure, ...] = ()
    windows: Windows | None = None
    files: Files | None = None
    tables: Callable[[], tuple[Table, ...]] = tuple
    extensions: Extensions | None = None
    journal: Journal | None = None
    shared: Shared | None = None
    drain_mode: Callable[[Any, bool], None] | None = None
    usr1: str = ""
    lend: Callable[[Any, Callable[[int, bool], None], Callable[[], None]], Lender] | None = None
    borrows: bool = False
    leased_limits: Callable[[Any, bytes], LeasedLimits] | None = None
    ports: tuple[str, ...] = ()
