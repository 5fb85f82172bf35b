"""The contract: what `net` and `control` may call on a protocol, and what a protocol may call on them.

Floor 0: declarations, to which a type checker holds both sides. A protocol registers itself as a Room. What it
may have and need not have is an ability (Windows, Files, tables, Extensions, Journal, drain mode); it has those its
Room names.

- Time is an argument: nanoseconds on the caller's monotonic clock. No protocol reads a clock, a file or a socket.
- Calls of one store and its sessions do not nest.
- A peer can cause replies and closes, never an exception. An exception is a bug: that connection is closed.
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
    """What the sessions of a protocol share: one for each protocol, whichever listener a connection came by.

    A subclass of `_core.Store`. `net` also reads its C field `stirred`: tick() or take_dirty() may be due earlier than
    next_deadline() said last.
    """

    def session(self, now_ns: int, port: int) -> Session:
        """A session for a new connection by that port, 0 being the first. Raises MemoryError if there is no room."""

    def next_deadline(self) -> int:
        """When tick() or take_dirty() is due; 0 is now, -1 is never as things are."""

    def tick(self, now_ns: int) -> None:
        """Does due work, half a millisecond of it at most."""

    def take_dirty(self) -> Sequence[Session]:
        """The sessions that got output by another's request or by tick(), or were dropped, since the last call."""

    def set_wall(self, unix_ns: int, now_ns: int) -> None:
        """Both clocks at one instant, at least once a second, for protocols that show Unix time."""

    def snapshot(self) -> Mapping[str, int]:
        """The figures as of now."""

    def outcomes(self) -> Sequence[tuple[str, str, int]]:
        """What came of requests: (operation, status, count) for each combination that there has been."""

    def begin_drain(self) -> None:
        """With drain.mode = wait: from now on nothing is handed out, and no request waits for it; all else goes on."""

    def held(self) -> int:
        """How many holdings a drain waits for, those included that are yet to be given back after a connection."""

    def leases(self, limit: int) -> Sequence[tuple[int, bytes, int, int]]:
        """The first `limit` of what held() counts: (connection, name, amount, since in tenths of a second)."""

    def holdings_of(self, connection: int) -> int:
        """How many holdings a connection has, by its number; 0 for a number that no connection ever had."""


class Session(Protocol):
    """The machine of one connection: bytes in, replies out. A subclass of `_core.Session`.

    Its state says what the caller does (`_core.STATE_NAMES`, `_core.TRANSITIONS`):

    reading    reads, and gives what arrives to receive()
    streaming  reads nothing; calls take_output() when the last output has gone out and others have had their turn
    parked     reads nothing and calls nothing until the session is dirty; watches for the peer's end
    ended      as streaming; nothing more arrives
    closing    sends what it was given, then closes
    """

    state: int
    owner: Peer | None  # the connection; net sets it
    number: int  # of the connection in the store; 0 once what it held was queued to be given back
    requests: int  # executed so far
    awaited: int  # replies that will be posted; until then it does not close, and is not to be ended
    dropped: bool  # close at once, and throw away what waits

    def receive(self, data: bytes, now_ns: int) -> bytes:
        """What arrived, for its replies: 256 KiB and one reply at most, then the rest of the input waits."""

    def take_output(self, now_ns: int) -> bytes:
        """The next piece of a long reply, then what was posted, then replies to the requests that were kept."""

    def wait(self) -> None:
        """In place of take_output(): the last output has not gone out. Bounds what others may leave from here on."""

    def eof(self, now_ns: int) -> bytes:
        """The peer's last byte was received: answers what it asked before, gives back, then closes."""

    def hang_up(self, now_ns: int) -> None:
        """From now on no request waits, nor does one that is yet to be received: the connection is about to end."""

    def closed(self, now_ns: int) -> None:
        """The connection is gone. What it held is queued, and given back by tick()."""


# ---- what a protocol may call ----------------------------------------------------------------------------------------


class Peer(Protocol):
    """The owner of a session: its connection. Asked while a call is under way, so it must call no session or store."""

    def peer(self) -> tuple[str, int]:
        """Where the connection comes from: an IP address as text and a port, or ("", 0) on a Unix socket."""

    def origin(self) -> str:
        """The same for people: 127.0.0.1:5432, [::1]:5432 or unix uid=0 pid=12."""


class Busy(Exception):
    """A job was rejected: the queue is full, or every thread is stuck."""


@dataclass(frozen=True)
class Context:
    """The one argument that an extension is made with.

    default: does the same work where there is no extension, for it to delegate to; of the same type as the extension.
    timeout: seconds after which nobody waits for an answer any more.
    """

    default: Any
    timeout: float


class Plugin(Protocol):
    """An extension, which is other people's code that a setting names, with the thread that its methods run in."""

    extension: Any  # what was made of the name

    def ask(self, call: str, job: Callable[[], _T], then: Callable[[_T | Exception, int], None]) -> None:
        """Runs job() in the thread, then then(outcome, now_ns) on the loop's. The outcome is what the job returned,
        Busy, or another error whose text says what the job raised.

        Jobs run one after the other. A job that waits for longer than the time limit is not begun, and then() is not
        called; beside a job that runs for longer another may run. call: the method's name, for the log, where errors
        are.
        """

    def refresh(self, call: str, job: Callable[[], _T], take: Callable[[_T], None], interval: str) -> None:
        """Runs job() at the start, at each reload, and every N seconds as the setting `interval` says.

        take() gets what it returned, on the loop's thread. If either raises at the start, that is a mistake in the
        configuration. Later it is logged, a line for each of the error's `problems`, and what was taken stays.
        """


class PluginHost(Protocol):
    """Makes the extensions of a protocol, and runs them; the protocol sees nothing else of threads and files."""

    def make(self, key: str, default: object, timeout: float) -> Plugin | None:
        """What a setting names, made with a Context of default and timeout, in seconds; None if it names nothing."""

    def on_loop(self, function: Callable[[int], _T], timeout: float) -> _T:
        """From any other thread: function(now_ns), called on the loop's. Raises what it raises, or TimeoutError."""

    def read(self, key: str) -> bytes:
        """What is in the file that a setting names, b"" if it names none. Raises ValueError with a text for people."""


# ---- how a protocol registers itself ---------------------------------------------------------------------------------


class WindowedStore(Store, Protocol):
    """The store of a protocol that has Windows."""

    def begin_window(self, number: int) -> None:
        """Begins the stats window of that number; numbers only rise."""


@dataclass(frozen=True)
class Windows:
    """Stats windows on the wall clock, with a WindowedStore. key: of the setting that is their length in seconds."""

    key: str


@dataclass(frozen=True)
class Files:
    """Files that settings name. Control reads them at the start, for `--check`, and at each reload.

    readers: by the key whose value is the path, "" for none. A reader makes of the bytes what load() takes, or raises
        ValueError, whose `problems`, if it has some, are lines.
    load: gives a store, new or running, with its settings, what the readers made of the files that there are, by key.
        It takes over all of it, or raises ValueError or MemoryError and changes nothing.
    """

    readers: Mapping[str, Callable[[bytes], Any]]
    load: Callable[[Any, Any, Mapping[str, Any]], None]


class JournaledStore(Store, Protocol):
    """The store of a protocol that has a Journal."""

    def reach(self, position: int, now_ns: int) -> None:
        """The journal is on disk up to that position: replies that waited for it may go out."""


class JournalSource(Protocol):
    """The module that knows what a protocol's journal has to be told of its store: in the daemon.

    For a new store, restore() is called with each piece, then begin(); from then on take() is called in each turn, and
    reach() of the store when what it gave is on disk. If next_deadline() of the store is over, there may be something.
    """

    def restore(self, store: Any, piece: bytes, now_ns: int) -> int:
        """Takes up a piece; returns how many records that were. Raises ValueError or MemoryError."""

    def begin(self, store: Any, **reserved: int) -> None:
        """From now on changes are told. reserved: what Ledger.reserve() said."""

    def take(self, store: Any, now_ns: int) -> tuple[int, bytes] | None:
        """A position, and a piece of what has changed up to there; None if it is not due."""

    def hurry(self, store: Any) -> None:
        """The daemon is about to stop: from now on, changes are due at once."""

    def refuse(self, store: Any, now_ns: int) -> None:
        """The journal cannot be written, until reach() is called."""

    def end(self, store: Any) -> Mapping[str, int]:
        """All is written, and nothing may change any more. Returns what Ledger.release() is to be told."""


class Ledger(Protocol):
    """The module that knows what a protocol's journal has in its database, which SQLite opens: in the writer's process.

    A piece is what the store told at a time, or what it is to be told after a restart.
    """

    LAYOUT: int  # the version of SCHEMA
    SCHEMA: str  # makes the tables of a new journal

    def write(self, database: sqlite3.Connection, piece: bytes) -> None:
        """Writes a piece, in a transaction of the caller's. Doing it twice is the same as once."""

    def reserve(self, database: sqlite3.Connection) -> Mapping[str, int]:
        """What begin() is to be told, in a transaction of the caller's."""

    def release(self, database: sqlite3.Connection, **left: int) -> None:
        """Takes back what reserve() reserved, in a transaction of the caller's. left: what end() said."""

    def count(self, database: sqlite3.Connection) -> int:
        """How many records there are."""

    def read(self, database: sqlite3.Connection) -> Iterator[bytes]:
        """Pieces of all of them. Raises ValueError for a record that is wrong."""

    def problems(self, database: sqlite3.Connection) -> Iterator[str]:
        """What is wrong with records, a sentence each."""

    def dump(self, database: sqlite3.Connection) -> Iterator[Mapping[str, object]]:
        """The records, for people: what can go into JSON."""

    def rescue(self, database: sqlite3.Connection, damaged: type[Exception]) -> Iterator[bytes]:
        """Pieces of what can be read and makes sense; b"" for each place where something cannot, or does not.

        damaged: what reading raises at such a place.
        """


@dataclass(frozen=True)
class Journal:
    """What a store is told of itself when the process before has ended, because a journal was told of each change.

    path: key of the setting that is the journal's file, "" for none. sync: key of the setting that says how soon a
    change is on disk: `always`, before its reply; `never`, when the machine gets to it; or after so many milliseconds.
    source, ledger: names of modules that are a JournalSource and a Ledger.
    """

    path: str
    sync: str
    source: str
    ledger: str


class SharedSource(Protocol):
    """The module that knows what a Redis is to be asked for a protocol's store.

    alone() is called first, and whenever Redis becomes unavailable; begin() when it is available.
    """

    SCRIPT: str  # in Lua: what each call runs

    def begin(self, store: Any, now_ns: int) -> None:
        """Redis decides from now on."""

    def take(self, store: Any, now_ns: int) -> tuple[list[bytes], list[bytes | int]] | None:
        """Keys and arguments of the next call; None if there is none, or the last one has not been settled."""

    def settle(self, store: Any, answer: object, now_ns: int) -> None:
        """What the call that was taken last was answered. Raises ValueError if it is no answer."""

    def alone(self, store: Any, now_ns: int) -> None:
        """The store decides by itself from now on, also about what was taken and not settled."""


@dataclass(frozen=True)
class Shared:
    """State that a store shares with others, in a Redis.

    address: key of the setting that says where that is, "" for none. source: name of a module that is a SharedSource.
    """

    address: str
    source: str


@dataclass(frozen=True)
class Extensions:
    """Other people's code in the place of a protocol's own. Control imports it when privileges have been given up.

    methods: that an extension has to have, by the key whose value names it: `package.module:name`, or an entry point of
        the group `counterd.<protocol>`, of something to be called with a Context; "" for none.
    extend: joins a new store, with its settings, to the extensions that are named; called once, if any is.
    """

    methods: Mapping[str, tuple[str, ...]]
    extend: Callable[[Any, Any, PluginHost], None]


@dataclass(frozen=True)
class Room:
    """A protocol, as it registers itself: its package exports one as ROOM.

    settings: a frozen dataclass whose fields are the protocol's own keys, without `name.` (see counterd.settings);
        control adds those that every listener has.
    make_store: makes the store from an object of that class, a function that returns the figures of the floors above,
        for protocols whose clients can ask for statistics, and the time. May raise ValueError or MemoryError.
    reload: gives a running store its settings, some of which may have changed.
    aliases: other spellings of keys, `{accepted: real}`.
    figures: what the metrics tell of its snapshot.
    windows, files, tables, extensions, journal, shared: its abilities.
    drain_mode: likewise; has a running store refuse new work, or take it again, while everything else goes on.
    ports: names of the ports that it has besides the first, in their order: `NAME_port` and `NAME_socket` are keys of
        its own, and everything else about them is as for the first.
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
    tables: tuple[Table, ...] = ()
    extensions: Extensions | None = None
    journal: Journal | None = None
    shared: Shared | None = None
    drain_mode: Callable[[Any, bool], None] | None = None
    ports: tuple[str, ...] = ()
