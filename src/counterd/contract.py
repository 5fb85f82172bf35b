"""The contract: what `net` and `control` may call on a protocol, and what a protocol may call on them.

Floor 0: declarations, which a type checker enforces on both sides. A protocol registers itself as a Room. The Room
lists the optional abilities of the protocol (Windows, Files, tables, Extensions, Journal, Shared, drain mode).

- Time is an argument: nanoseconds on the caller's monotonic clock. No protocol reads a clock, a file or a socket.
- Calls of one store and its sessions do not nest.
- A peer can make a session reply or close, but never raise an exception. An exception is a bug: its connection is
  closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from counterd.listing import Figure, Table

_T = TypeVar("_T")

Figures = Callable[[], Mapping[str, object]]


# ---- what net and control may call -----------------------------------------------------------------------------------


class Store(Protocol):
    """The state that a protocol's sessions share. Each protocol has one store for all its listeners.

    A subclass of `_core.Store`. `net` also reads its C field `stirred`: if it is set, tick() or take_dirty() may be due
    earlier than next_deadline() last returned.
    """

    def session(self, now_ns: int, port: int) -> Session:
        """Makes the session of a new connection. port: its port's number, from 0. Raises MemoryError."""

    def next_deadline(self) -> int:
        """Returns when tick() or take_dirty() is due. 0 means now, -1 means never."""

    def tick(self, now_ns: int) -> None:
        """Does the work that is due, for half a millisecond at most."""

    def take_dirty(self) -> Sequence[Session]:
        """Returns sessions that were dropped or got output from another session or tick(), since the last call."""

    def set_wall(self, unix_ns: int, now_ns: int) -> None:
        """Called at least once a second with the time of both clocks, for protocols that show Unix time."""

    def snapshot(self) -> Mapping[str, float]:
        """Returns the current figures by name."""

    def outcomes(self) -> Sequence[tuple[str, str, int]]:
        """Returns (operation, status, count) for each combination that has occurred."""

    def begin_drain(self) -> None:
        """With drain.mode = wait: hands out nothing more, and lets no request wait. Serves all other requests."""

    def held(self) -> int:
        """Returns how many holdings a drain waits for. Those of ended connections count until they are given back."""

    def about(self, connection: int) -> tuple[str, int | None]:
        """Returns the name that a connection has stated, by its number, or ""; and None.

        If the connection has ended, and what it holds stays for a grace time: when this ends, in 1/10 s.
        """

    def evict(self, connection: int, now_ns: int) -> bool:
        """Lets nothing of a connection outlast it, by its number: a person ends it.

        Returns True if the connection has ended, and something has outlasted it: tick() gives that back.
        """

    def leases(self, limit: int) -> Sequence[tuple[int, bytes, int, int]]:
        """Returns at most `limit` of the holdings of held(): (connection, name, amount, since in 1/10 s)."""

    def holdings_of(self, connection: int) -> int:
        """Returns how many holdings a connection has, by its number; 0 if the number was never assigned."""


class Session(Protocol):
    """The state machine of one connection: gets bytes, returns replies. A subclass of `_core.Session`.

    The state tells the caller what to do (`_core.STATE_NAMES`, `_core.TRANSITIONS`):

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
        """Executes input. Returns at most 256 KiB of replies and one reply more; then the rest of the input waits."""

    def take_output(self, now_ns: int) -> bytes:
        """Returns the next output: first of a long reply, then posted messages, then replies to input that waited."""

    def wait(self) -> None:
        """Called instead of take_output() if the last output was not sent. From now on, posted messages are limited."""

    def eof(self, now_ns: int) -> bytes:
        """Called when the peer has sent its last byte. Answers its requests, gives its holdings back, then closes."""

    def hang_up(self, now_ns: int) -> None:
        """Called before the connection is ended. Ends the wait of a parked request, and lets no later request wait."""

    def closed(self, now_ns: int) -> None:
        """Called when the connection has ended. Its holdings are queued, and tick() gives them back."""


# ---- what a protocol may call ----------------------------------------------------------------------------------------


class Peer(Protocol):
    """The owner of a session: its connection. Called during a store's call, so it must not call a session or store."""

    def peer(self) -> tuple[str, int]:
        """Returns the peer's IP address as text and its port, or ("", 0) on a Unix socket."""

    def origin(self) -> str:
        """Returns the peer in a form for people: 127.0.0.1:5432, [::1]:5432 or unix uid=0 pid=12."""


class Busy(Exception):
    """A job was rejected, because the queue is full or every thread is stuck."""


@dataclass(frozen=True)
class Context:
    """The only argument with which an extension is created.

    default: the built-in implementation, to which the extension can delegate. It has the same methods.
    timeout: the time limit for a call, in seconds.
    """

    default: Any
    timeout: float


class Plugin(Protocol):
    """An extension (other people's code, named by a setting) and the thread that runs its methods."""

    extension: Any  # the object that was created from the name

    def ask(self, call: str, job: Callable[[], _T], then: Callable[[_T | Exception, int], None]) -> None:
        """Runs job() in the thread, then then(outcome, now_ns) on the loop's thread.

        The outcome is the job's result, Busy, or another error with the message of the exception that the job raised.
        Jobs run one after the other. A job that waits longer than the time limit is not started, and then() is not
        called. While a job runs longer than the limit, another job may run. call: the method's name, for the log.
        """

    def refresh(self, call: str, job: Callable[[], _T], take: Callable[[_T], None], interval: str) -> None:
        """Runs job() at the start, at each reload, and every N seconds; N is the value of the setting `interval`.

        take() gets the result, on the loop's thread. If job() or take() raises at the start, the configuration is
        refused. Later, the error is logged, one line for each of its `problems`, and the old result stays in force.
        """


class PluginHost(Protocol):
    """Creates and runs the extensions of a protocol, so that the protocol needs no threads and files."""

    def make(self, key: str, default: object, timeout: float) -> Plugin | None:
        """Creates the extension that a setting names, with a Context (timeout in s). Returns None if it names none."""

    def on_loop(self, function: Callable[[int], _T], timeout: float) -> _T:
        """Called by other threads: runs function(now_ns) on the loop's thread. Raises its error, or TimeoutError."""

    def read(self, key: str) -> bytes:
        """Reads the file that a setting names; b"" if it names none. Raises ValueError with a message for people."""


class Lender(Protocol):
    """Permits of a protocol's store, for the store of another protocol in this process.

    To clients of the lending protocol, the borrower is one connection that holds permits and waits for permits like any
    other. The borrower makes these calls while a call of its own store is under way.
    """

    number: int  # of that connection in the lending store

    def acquire(self, name: bytes, maximum: int, now_ns: int) -> bool:
        """Takes a permit, unless `maximum` of that name are held, or somebody waits for one."""

    def retake(self, name: bytes, maximum: int, now_ns: int) -> bool:
        """Takes a permit that the borrower had before a restart, even above the maximum. False: there is no room."""

    def release(self, name: bytes, now_ns: int) -> None:
        """Gives back a permit."""

    def enqueue(self, name: bytes, maximum: int, ticket: int, now_ns: int) -> int:
        """Waits for a permit, in the queue of all that wait for that name. Returns its place; 0: there is no room.

        ticket: below 2^32; the borrower's settled() is called with it when the wait ends.
        """

    def amend(self, place: int, maximum: int, now_ns: int) -> None:
        """Changes the maximum of a wait, which keeps its place."""

    def cancel(self, place: int, now_ns: int) -> None:
        """Ends a wait. settled() is not called for it."""


# ---- how a protocol registers itself ---------------------------------------------------------------------------------


class WindowedStore(Store, Protocol):
    """The store of a protocol that has Windows."""

    def begin_window(self, number: int) -> None:
        """Begins a stats window. number: higher than the number of the last window."""


@dataclass(frozen=True)
class Windows:
    """Stats windows on the wall clock, for a WindowedStore. key: the setting for their length in seconds."""

    key: str


@dataclass(frozen=True)
class Files:
    """Files that settings name. Control reads them at the start, for `--check`, and at each reload.

    readers: by the setting that holds the path ("" = no file). A reader parses the bytes, or raises ValueError, with
        one line per mistake in `problems` if it has that attribute.
    load: called with a new or running store, its settings, and the parsed files by key. It applies all of them, or
        raises ValueError or MemoryError and changes nothing.
    """

    readers: Mapping[str, Callable[[bytes], Any]]
    load: Callable[[Any, Any, Mapping[str, Any]], None]


class JournaledStore(Store, Protocol):
    """The store of a protocol that has a Journal."""

    def reach(self, position: int, now_ns: int) -> None:
        """Releases replies that waited for the journal, which is now on disk up to `position`."""


class JournalSource(Protocol):
    """The module that journals a store's changes and restores them. It runs in the daemon.

    For a new store, control calls restore() with each piece of the journal, then begin(). From then on it calls take()
    in each turn, and the store's reach() when the piece is on disk. A piece may be due when the store's next_deadline()
    has passed.
    """

    def restore(self, store: Any, piece: bytes, now_ns: int) -> int:
        """Restores a piece. Returns its number of records. Raises ValueError or MemoryError."""

    def begin(self, store: Any, **reserved: int) -> None:
        """Records changes from now on. reserved: the result of Ledger.reserve()."""

    def take(self, store: Any, now_ns: int) -> tuple[int, bytes] | None:
        """Returns a position and a piece with the changes up to it; None if no piece is due."""

    def hurry(self, store: Any) -> None:
        """Makes each change due immediately from now on, because the daemon is about to stop."""

    def refuse(self, store: Any, now_ns: int) -> None:
        """Called when the journal cannot be written. Refuses requests until the next reach()."""

    def end(self, store: Any) -> Mapping[str, int]:
        """Called when all changes are written and no more may follow. Returns the arguments of Ledger.release()."""


class Ledger(Protocol):
    """The module for a protocol's tables in the journal, an SQLite database. It runs in the writer process.

    A piece contains records: JournalSource.take() returns pieces, and restore() gets pieces after a restart.
    """

    LAYOUT: int  # the version of SCHEMA
    ADDED: Mapping[int, Mapping[str, Sequence[str]]]  # by older layout that can be read: columns, by table, added since
    SCHEMA: str  # SQL that creates the tables of a new journal

    def write(self, database: sqlite3.Connection, piece: bytes) -> None:
        """Writes a piece, in the caller's transaction. Writing it twice is the same as writing it once."""

    def reserve(self, database: sqlite3.Connection) -> Mapping[str, int]:
        """Returns the arguments of JournalSource.begin(). Runs in the caller's transaction."""

    def release(self, database: sqlite3.Connection, **left: int) -> None:
        """Undoes reserve(), in the caller's transaction. left: the result of JournalSource.end()."""

    def count(self, database: sqlite3.Connection) -> int:
        """Returns the number of records."""

    def read(self, database: sqlite3.Connection) -> Iterator[bytes]:
        """Yields all records, in pieces. Raises ValueError for an invalid record."""

    def problems(self, database: sqlite3.Connection) -> Iterator[str]:
        """Yields one sentence for each mistake in the records."""

    def dump(self, database: sqlite3.Connection) -> Iterator[Mapping[str, object]]:
        """Yields the records as JSON objects, for people."""

    def rescue(self, database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[bytes]:
        """Yields the readable, valid records in pieces, and b"" for each place that is unreadable or invalid.

        damaged: the exception that reading such a place raises.
        """


@dataclass(frozen=True)
class Journal:
    """A journal of each change of a store, from which a new process restores the store.

    path: the setting for the journal's file, "" = no journal.
    sync: the setting that says when a change is on disk: `always` before its reply, `never` when the kernel writes it,
        or a number of milliseconds.
    source, ledger: the names of modules that are a JournalSource and a Ledger.
    """

    path: str
    sync: str
    source: str
    ledger: str


class BorrowingStore(Store, Protocol):
    """The store of a protocol that borrows permits from another one."""

    def borrow(self, lender: Lender) -> None:
        """Gives the store its lender, before anything is restored. Not called if no lending protocol is enabled."""

    def settled(self, ticket: int, granted: bool) -> None:
        """Ends a wait of Lender.enqueue(): with a permit, or without because the lending store drains or is full.

        Called within a tick of the lending store, so the lender must not be called from here.
        """


class SharedSource(Protocol):
    """The module that makes the Redis calls of a protocol's store.

    Control calls alone() first and whenever Redis becomes unavailable, and begin() when Redis is available.
    """

    SCRIPT: str  # the Lua script that each call runs

    def begin(self, store: Any, now_ns: int) -> None:
        """Lets Redis decide from now on."""

    def take(self, store: Any, now_ns: int) -> tuple[list[bytes], list[bytes | int]] | None:
        """Returns keys and arguments of the next call; None if there is none, or the last call is not settled yet."""

    def settle(self, store: Any, answer: object, now_ns: int) -> None:
        """Applies the answer to the call that was taken last. Raises ValueError if the answer is invalid."""

    def alone(self, store: Any, now_ns: int) -> None:
        """Lets the store decide from now on, also about requests that were taken but not settled."""


@dataclass(frozen=True)
class Shared:
    """State that several daemons' stores share in a Redis.

    address: the setting for the address of Redis, "" = not shared. source: the name of a module that is a SharedSource.
    """

    address: str
    source: str


@dataclass(frozen=True)
class Extensions:
    """Other people's code that replaces a protocol's own. Control imports it after it has given up privileges.

    methods: the methods that an extension must have, by setting. The setting names a callable that takes a Context:
        `package.module:name`, or an entry point of the group `counterd.<protocol>`; "" = no extension.
    extend: connects a new store, with its settings, to its extensions. Called once, if an extension is named.
    """

    methods: Mapping[str, tuple[str, ...]]
    extend: Callable[[Any, Any, PluginHost], None]


@dataclass(frozen=True)
class Room:
    """A protocol. Its package exports one as ROOM.

    settings: a frozen dataclass whose fields are the protocol's own settings, without `name.` (see counterd.settings).
        Control adds the settings that every listener has.
    make_store: makes the store. Its arguments are the settings, a function that returns the figures of the floors above
        (for protocols that serve statistics to clients), and the time. May raise ValueError or MemoryError.
    reload: applies settings that have changed to a running store.
    aliases: other spellings of settings, `{accepted: real}`.
    figures: the figures of its snapshot that the metrics show.
    windows, files, extensions, journal, shared: its abilities, if it has them.
    tables: returns the tables that people can request. Unlike the other fields it may import compiled modules.
    drain_mode: makes a running store refuse new work (True) or accept it again (False). Other requests are served.
    lend: lends permits of its store to another protocol's: called with the store, a function that is called with the
        ticket and the outcome of each wait, and a function that is called when the lending store has something to do.
    borrows: its store is a BorrowingStore.
    ports: names of its ports after the first, in order. `NAME_port` and `NAME_socket` are settings of the protocol. All
        other settings of such a port are those of the first port.
    """

    name: str
    default_port: int
    settings: type[Any]
    make_store: Callable[[Any, Figures, int], Store]
    reload: Callable[[Any, Any], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    windows: Windows | None = None
    files: Files | None = None
    tables: Callable[[], tuple[Table, ...]] = tuple
    extensions: Extensions | None = None
    journal: Journal | None = None
    shared: Shared | None = None
    drain_mode: Callable[[Any, bool], None] | None = None
    lend: Callable[[Any, Callable[[int, bool], None], Callable[[], None]], Lender] | None = None
    borrows: bool = False
    ports: tuple[str, ...] = ()
