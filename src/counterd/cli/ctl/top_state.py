"""The choices of the user of `counterctl top`: the page, the row, the filter and the order of the counters.

Floor 5 (ARCHITECTURE.md). This file uses no terminal, clock or server. The input of this code is the keys that the user
presses. The output of this code says what to show, and which connections to close.
"""

from __future__ import annotations

import codecs
import heapq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from counterd.cli.ctl.admin import Table
    from counterd.client import DumpEntry

SORTS = ("in use", "share", "peak", "name")
INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
COUNTERS, CONNECTIONS, HOLDERS, HOLDINGS, QUEUE, WAITS = (
    "counters", "connections", "holders", "holdings", "queue", "waits",
)  # fmt: skip
OTHERS = {HOLDERS: QUEUE, QUEUE: HOLDERS, HOLDINGS: WAITS, WAITS: HOLDINGS}  # the page that `w` turns to


class Order(NamedTuple):
    """Which counters are listed, and how they are sorted."""

    sort: str = SORTS[0]
    reverse: bool = False
    filter: str = ""

    def choose(self, entries: Iterable[DumpEntry], most: int) -> list[DumpEntry]:
        """Returns the first entries that match the filter, in this order.

        Entries with equal values are sorted by name.
        """
        wanted = (entry for entry in entries if self.matches(entry.name))
        if self.sort == "name":
            return (heapq.nlargest if self.reverse else heapq.nsmallest)(most, wanted, key=itemgetter(0))
        sign = 1 if self.reverse else -1
        value = VALUES[self.sort]
        return heapq.nsmallest(most, wanted, key=lambda entry: (sign * value(entry), entry.name))

    def matches(self, name: bytes) -> bool:
        return self.filter.encode("utf-8", "surrogateescape") in name


def limit_of(entry: DumpEntry) -> int | None:
    """Returns the maximum of the last acquire, if the server reports it."""
    limit: int | None = getattr(entry, "limit", None)
    return limit or None


def share(entry: DumpEntry) -> float:
    """Returns the permits in use divided by the limit, or by the peak if the limit is not known."""
    return entry.consumption / (limit_of(entry) or entry.peak or 1)


VALUES: dict[str, Callable[[Any], float]] = {
    "in use": lambda entry: entry.consumption,
    "share": share,
    "peak": lambda entry: entry.peak,
}


# ---- keys ----


class Keys:
    """Converts bytes from a terminal to keys.

    A key is a letter, or a word such as "left", "escape", "enter" or "page up".
    """

    _named: ClassVar = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}
    _sequences: ClassVar = {
        "A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end",
        "1~": "home", "4~": "end", "5~": "page up", "6~": "page down",
    }  # fmt: skip

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def waits(self) -> bool:
        """Whether the last byte was an escape character, which may be the Esc key or the beginning of another key."""
        return bool(self._rest)

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """Returns the keys that are complete with these bytes. final: whether no more bytes came for some time."""
        text = self._rest + self._decoder.decode(data)
        self._rest = ""
        found: list[str] = []
        while text:
            letter, rest = text[0], text[1:]
            if letter == "\x1b":
                if rest[:1] in ("[", "O"):
                    end = next((at for at, each in enumerate(rest[1:], 1) if "@" <= each <= "~"), None)
                    if end is None:
                        if not final:
                            self._rest = text
                        return found
                    sequence = rest[1 : end + 1] if rest[end] == "~" else rest[end]
                    if sequence in self._sequences:
                        found.append(self._sequences[sequence])
                    text = rest[end + 1 :]
                    continue
                if not rest and not final:
                    self._rest = text
                    return found
                letter = "escape"
            found.append(self._named.get(letter, letter))
            text = rest
        return found


# ---- the choices ----


@dataclass
class Cursor:
    """The selected row of a list that changes.

    After the user has moved the cursor, the cursor stays on the same item. If the cursor is on the first row, it stays
    on the first row. Among rows with the same name or id, such as the waits of one connection, the cursor keeps its
    position.
    """

    index: int = 0
    top: int = 0  # the first visible row
    room: int = 1  # the number of visible rows
    follows: bool = False
    rows: Sequence[bytes | str] = ()  # names or ids, as they were last shown

    @property
    def on(self) -> bytes | str | None:
        """The name or id of the selected row."""
        return self.rows[self.index] if self.rows else None

    def press(self, key: str) -> bool:
        """Moves the cursor if the key does that. Returns whether the key moves the cursor."""
        page = max(self.room - 1, 1)
        steps = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -self.index, "end": 1 << 60}
        if key not in steps:
            return False
        self.index = max(min(self.index + steps[key], len(self.rows) - 1), 0)
        self.follows = self.index > 0
        return True

    def settle(self, rows: Sequence[bytes | str], room: int) -> None:
        """Places the cursor on one of these rows, and moves the window so that it shows the cursor.

        room: the rows of the window.
        """
        same = [at for at, row in enumerate(rows) if row == self.on] if self.follows else []
        if same:
            before = self.rows[: self.index].count(self.on)
            self.index = same[min(before, len(same) - 1)]
        self.index = max(min(self.index, len(rows) - 1), 0)
        self.rows = rows
        self.room = max(room, 1)
        lowest = max(len(rows) - self.room, 0)
        self.top = min(max(min(self.top, self.index), self.index - self.room + 1, 0), lowest)


@dataclass
class TopState:
    """All choices of the user."""

    interval: float = 1.0
    order: Order = field(default_factory=Order)
    paused: bool = False
    helping: bool = False
    typed: str | None = None  # the filter that the user is typing
    quits: bool = False
    page: str = COUNTERS
    # The counter that is held or waited for, the connection that holds or waits, or the order of a table.
    name: bytes = b""
    tables: tuple[Table, ...] = ()  # the known tables of other protocols; each is a page
    cursor: Cursor = field(default_factory=Cursor)
    doomed: str = ""  # the connection that is closed if the user confirms it
    kills: list[str] = field(default_factory=list)  # confirmed connections, which are to be closed
    note: str = ""  # the result of the last key

    def press(self, key: str) -> None:
        """Changes the choices as the key demands."""
        self.note = ""
        if self.typed is not None:
            self._type(key)
        elif self.doomed:
            if key == "y":
                self.kills.append(self.doomed)
            self.doomed = ""
        elif self.helping:
            self.helping = False
        elif self.cursor.press(key) or self._press_always(key):
            pass
        elif self.page == COUNTERS:
            self._press_counters(key)
        elif self.table is not None:
            self._press_table(self.table, key)
        else:
            self._press_connections(key)

    @property
    def table(self) -> Table | None:
        """Returns the table that is the current page. Returns None if another page is shown."""
        return next((table for table in self.tables if table.name == self.page), None)

    def _press_always(self, key: str) -> bool:
        if key == " ":
            self.paused = not self.paused
        elif key in ("+", "="):
            self.interval = min((each for each in INTERVALS_S if each > self.interval), default=self.interval)
        elif key in ("-", "_"):
            self.interval = max((each for each in INTERVALS_S if each < self.interval), default=self.interval)
        elif key in ("h", "?"):
            self.helping = True
        elif key == "tab":
            self._turn_on()
        elif key == "q":
            self.quits = True
        else:
            return False
        return True

    def _press_counters(self, key: str) -> None:
        if key in ("s", "right", "left"):
            step = -1 if key == "left" else 1
            sort = SORTS[(SORTS.index(self.order.sort) + step) % len(SORTS)]
            self._sort(self.order._replace(sort=sort))
        elif key == "r":
            self._sort(self.order._replace(reverse=not self.order.reverse))
        elif key == "/":
            self.typed = self.order.filter
        elif key == "enter" and isinstance(self.cursor.on, bytes):
            self._turn_to(HOLDERS, self.cursor.on)
        elif key == "w" and isinstance(self.cursor.on, bytes):
            self._turn_to(QUEUE, self.cursor.on)
        elif key == "k":
            self.note = "press Enter to show the holders; on that page, k closes a connection"

    def _press_connections(self, key: str) -> None:
        if key in ("escape", "left", "backspace"):
            self._turn_to(COUNTERS)
            return
        is_of_one = self.page in (HOLDINGS, WAITS)
        connection = self.name.decode() if is_of_one else self.cursor.on
        if key == "w" and self.page in OTHERS:
            self._turn_to(OTHERS[self.page], self.name)
        elif key == "k" and isinstance(connection, str):
            self.doomed = connection
        elif key == "enter" and not is_of_one and isinstance(connection, str) and connection:
            self._turn_to(HOLDINGS, connection.encode())

    def _press_table(self, table: Table, key: str) -> None:
        if key in ("escape", "backspace"):
            self._turn_to(COUNTERS)
        elif key in ("s", "right", "left"):
            at = table.sorts.index(self.name.decode()) + (-1 if key == "left" else 1)
            self._turn_to(table.name, table.sorts[at % len(table.sorts)].encode())

    def turn_to_table(self, table: Table) -> None:
        """Shows a table, sorted by the first of its orders."""
        self._turn_to(table.name, table.sorts[0].encode())

    def _turn_on(self) -> None:
        """Shows the next page: the counters, the connections, each table, then the counters again."""
        names = [COUNTERS, CONNECTIONS, *(table.name for table in self.tables)]
        at = (names.index(self.page) + 1) % len(names) if self.page in names else 1
        if at < 2:
            self._turn_to(names[at])
        else:
            self.turn_to_table(self.tables[at - 2])

    def _turn_to(self, page: str, name: bytes = b"") -> None:
        self.name, self.page, self.cursor = name, page, Cursor()  # another thread reads the page, then the name

    def _sort(self, order: Order) -> None:
        """Sets the order, and moves the cursor to the first row."""
        self.order, self.cursor = order, Cursor()

    def listed(self) -> Order:
        """Returns the order, with the filter that the user is currently typing."""
        return self.order if self.typed is None else self.order._replace(filter=self.typed)

    def _type(self, key: str) -> None:
        assert self.typed is not None
        if key == "enter":
            self._sort(self.order._replace(filter=self.typed))
        if key in ("enter", "escape"):
            self.typed = None
        elif key == "backspace":
            self.typed = self.typed[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed += key
