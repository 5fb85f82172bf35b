"""The rooms: one folder per protocol, found by looking, so that deleting the folder removes the protocol.

Floor 2. A room's package exports ROOM, the one thing the floors above read of it. Rooms never import each other.
Nothing here needs what is compiled: whoever only shows what a room registers can import it anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from counterd.settings import choice, integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.settings import Reader

_T = TypeVar("_T")

Figures = Callable[[], Mapping[str, object]]

ROWS_MAX = 1000  # of an answer
ROWS = 100  # unless more are asked for


@dataclass(frozen=True)
class Figure:
    """One of the figures of a room's `Store.snapshot()`, for the metrics.

    key: in the snapshot.
    name: of the metric, without the prefix `counterd_`, with its unit; of a counter it ends in `_total`.
    kind: a gauge goes up and down, a counter only rises.
    labels: what tells it from others of the same name.
    over: the key of another figure that this one is shown as a part of, from 0 to 1, or "".
    """

    key: str
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    over: str = ""

    def value(self, snapshot: Mapping[str, float]) -> float:
        """What the metric says, from a snapshot."""
        return snapshot[self.key] / snapshot[self.over] if self.over else snapshot[self.key]


@dataclass(frozen=True)
class Column:
    """A column of a table, and what is in it:

    name        bytes that a client chose
    integer
    text        of a few words
    connection  the engine's number of a connection, which may have gone meanwhile (int)
    since       a moment, in tenths of a second on the monotonic clock (int)
    seconds     how long (float)
    """

    name: str
    kind: Literal["name", "integer", "text", "connection", "since", "seconds"]
    help: str


class Walk(Protocol):
    """A walk through a store, in steps between which the store serves others; one of a store at a time.

    A row was true in itself when it was taken, in one of the steps. What comes, goes or changes between two steps may
    be among the rows or not.
    """

    @property
    def total(self) -> int:
        """How many matched, whether or not they are among the rows; final once step() has returned True."""

    def step(self) -> bool:
        """Goes on for 250 us at most. True once the rows are there."""

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows, in order, each in the order of the table's columns."""


class Windowed(Protocol):
    """What a store can do whose room names a `window`."""

    def begin_window(self, number: int) -> None:
        """Starts the stats window of that number; numbers only rise."""


@dataclass(frozen=True)
class Table:
    """What a room can list for people.

    name: of letters, unique among the rooms.
    sorts: the orders that the parameter `sort` knows, largest first, the default first of all; empty if it has none.
    open: begins a walk through a store. Parameters are text, a character for each byte of a name (latin-1). Raises
        ValueError, with a text for whoever asked, for one that is unknown, missing or wrong.
    """

    name: str
    help: str
    columns: tuple[Column, ...]
    sorts: tuple[str, ...]
    open: Callable[[Any, Mapping[str, str]], Walk]


class Busy(Exception):
    """What comes of an errand that was not taken: too many wait already, or too many threads are stuck."""


@dataclass(frozen=True)
class Context:
    """The one argument that an extension is made with.

    default: what would do its work if it were not there, for it to delegate to; of the same type as the extension.
    timeout: seconds after which nobody waits for an answer any more.
    """

    default: Any
    timeout: float


class Hand(Protocol):
    """An extension, something of somebody else's that a setting names, and the thread that its methods run in."""

    @property
    def extension(self) -> Any:
        """What was made of the name."""

    def ask(self, call: str, errand: Callable[[], _T], then: Callable[[_T | Exception, int], None]) -> None:
        """Has errand() run in the thread, and then(outcome, now_ns) on the loop's: what it returned; Busy; or another
        error, that says in words what it raised.

        Errands run one after the other. What waits for longer than the time limit is not begun and nobody is told;
        what runs for longer may have another beside it. call: the method's name, for the log, where errors are.
        """

    def refresh(self, call: str, errand: Callable[[], _T], take: Callable[[_T], None], interval: str) -> None:
        """Has errand() run at the start, at each reload, and every so many seconds as the setting `interval` says.

        What it returns goes to take() on the loop's thread. If one of them raises at the start, that is a mistake in
        the configuration; later it is logged, a line for each of the error's `problems`, and what was taken stays.
        """


class Workshop(Protocol):
    """Where a room's extensions are made and work; the room sees nothing of threads and files else."""

    def make(self, key: str, default: object, timeout: float) -> Hand | None:
        """What a setting names, made with a Context of default and timeout, in seconds; None if it names nothing."""

    def on_loop(self, function: Callable[[int], _T], timeout: float) -> _T:
        """From any other thread: function(now_ns), called on the loop's. Raises what it raises, or TimeoutError."""

    def read(self, key: str) -> bytes:
        """What is in the file that a setting names, b"" if it names none. Raises ValueError with a text for people."""


@dataclass(frozen=True)
class Room:
    """How a protocol registers itself.

    settings: a frozen dataclass whose fields are the room's own keys, without `name.` (see counterd.settings); those
        every listener has are added by control.
    aliases: other spellings of keys, `{accepted: real}`.
    window: the key that holds the length of the store's wall-clock windows in seconds, or None.
    make_store: makes the store from an object of that class, a function that returns the figures of the floors above,
        for protocols whose clients can ask for statistics, and the time on the caller's monotonic clock, in ns. May
        raise ValueError or MemoryError.
    reload: hands a running store its settings, some of which may have changed.
    figures: what the metrics tell of its snapshot.
    tables: what it can list for people.
    files: readers of files, by the key whose value is the path, "" for none. Control reads the files, at the start and
        at each reload; a reader makes of the bytes what load() takes, or raises ValueError, whose `problems`, if it has
        some, are lines.
    load: gives a store, new or running, what the readers made of the files that there are, by key: all of it, or it
        raises ValueError or MemoryError and nothing has changed.
    extensions: the methods that a replacement has to have, by the key whose value names it: `package.module:name`, or
        an entry point of the group `counterd.<room>`, of something to be called with a Context; "" is none.
    extend: joins a new store to those extensions that are named; called once, if any is.
    """

    name: str
    default_port: int
    settings: type[Any]
    make_store: Callable[[Any, Figures, int], Any]
    reload: Callable[[Any, Any], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    window: str | None = None
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    files: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    load: Callable[[Any, Any, Mapping[str, Any]], None] = lambda _store, _settings, _files: None
    extensions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extend: Callable[[Any, Any, Workshop], None] = lambda _store, _settings, _workshop: None


def name_of_bytes(text: str) -> bytes:
    """The reader of a parameter that is a name, or a part of one."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("expected bytes, percent-encoded") from None


def ranked_parameters(parameters: Mapping[str, str], sorts: Sequence[str]) -> tuple[bytes, str, int]:
    """(match, sort, limit) of a table that has an order. Raises ValueError."""
    values = read_parameters(
        parameters,
        {"match": name_of_bytes, "sort": choice(*sorts), "limit": integer(1, ROWS_MAX)},
        {"match": b"", "sort": sorts[0], "limit": ROWS},
    )
    return values["match"], values["sort"], values["limit"]


def read_parameters(
    parameters: Mapping[str, str], readers: Mapping[str, Reader], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a table's parameters. Raises ValueError for one that has no reader, or neither text nor default."""
    values = dict(defaults)
    for name, text in parameters.items():
        if name not in readers:
            raise ValueError(f"there is no parameter {name!r}, only {', '.join(readers)}")
        try:
            values[name] = readers[name](text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name in readers:
        if name not in values:
            raise ValueError(f"the parameter {name} is missing")
    return values


def find_rooms() -> tuple[Room, ...]:
    """Every room that is installed, by name. Raises ValueError if two have a table of the same name."""
    packages = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    rooms = tuple(importlib.import_module(f"{__name__}.{name}").ROOM for name in packages)
    check_tables(rooms)
    return rooms


def check_tables(rooms: tuple[Room, ...]) -> None:
    """Raises ValueError if two tables have the same name."""
    owners: dict[str, str] = {}
    for room in rooms:
        for table in room.tables:
            if table.name in owners:
                raise ValueError(f"both {owners[table.name]} and {room.name} have a table {table.name}")
            owners[table.name] = room.name
