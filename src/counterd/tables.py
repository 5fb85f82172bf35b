"""The data that a protocol shows to people: figures of its store, as metrics, and tables. A walk fills a table in
steps.

Floor 0 (ARCHITECTURE.md): declarations, and readers for a table's parameters. This file needs no protocol and no
compiled module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from counterd.settings import choice, integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.settings import Reader

ROWS_MAX = 1000  # the most rows of an answer
ROWS = 100  # the default

CONNECTION = integer(1, (1 << 32) - 1)  # reads a parameter that is the engine's number of a connection


@dataclass(frozen=True)
class Figure:
    """A figure of `Store.snapshot()` that becomes a metric.

    key: the key of the figure in the snapshot.
    name: the metric's name with its unit, without the prefix `counterd_`; it ends in `_total` if the figure only rises.
    kind: the Prometheus type.
    labels: these distinguish the figure from others with the same name.
    over: the key of the figure to divide by, so that the metric is a ratio from 0 to 1; "" if the metric is not a
    ratio.
    """

    key: str
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    over: str = ""

    def value(self, snapshot: Mapping[str, float]) -> float:
        """Computes the value of the metric from a snapshot."""
        return snapshot[self.key] / snapshot[self.over] if self.over else snapshot[self.key]


@dataclass(frozen=True)
class Column:
    """A column of a table. The kind of a column is the type of its cells:

    name        bytes that a client chose
    integer
    text        a few words
    connection  the engine's number of a connection, which may have ended (int)
    since       a point in time, in tenths of a second on the monotonic clock (int)
    until       likewise, one that is yet to come; or None
    seconds     a duration (float)

    A column with `detail` is for programs, and for people who look at a single row. A table for people leaves it out.
    """

    name: str
    kind: Literal["name", "integer", "text", "connection", "since", "until", "seconds"]
    help: str
    detail: bool = False


class Walk(Protocol):
    """A walk through a store, in steps. The store serves requests between two steps. A store has at most one walk at a
    time.

    Each row shows its entry at one moment, during one of the steps. If an entry exists throughout the walk and ranks
    high enough, it becomes a row exactly once. An entry that is added, removed or changed during the walk may become a
    row.
    """

    total: int  # how many entries match, including those that are not rows; final once step() has returned True

    def step(self) -> bool:
        """Continues for at most 250 us.

        The time is estimated from the work done. Returns True when the rows are ready.
        """

    def rows(self) -> list[tuple[Any, ...]]:
        """Returns the rows in order. The cells are in the order of the table's columns."""


@dataclass(frozen=True)
class Table:
    """A list that a protocol can show.

    name: only letters; no other protocol may have a table with this name.
    sorts: the values of the parameter `sort`. Each sorts the largest value first. The first value is the default. If it
        is empty, the table has no order.
    walk: begins a walk through a store. Its further arguments are the parameters, by name, without those that are not
        given. `sort` is the index of an order.
    parameters: readers of further parameters besides `match`, `sort` and `limit`, by name. If sorts is empty, the first
        parameter is required, unless it is `match`. For the parameter `connection`, people write the ID of a
        connection. `control` converts it to the engine's number.
    has_match: whether a table with sorts has the parameter `match`.
    metrics: the figures of each of the first ROWS_MAX rows, in the default order. The key of a figure is the name of a
        column. The first column becomes a label: it has a name that no other row has.
    """

    name: str
    help: str
    columns: tuple[Column, ...]
    sorts: tuple[str, ...]
    walk: Callable[..., Walk]
    parameters: Mapping[str, Reader] = field(default_factory=dict)
    has_match: bool = True
    metrics: tuple[Figure, ...] = ()

    def open(self, store: Any, parameters: Mapping[str, str]) -> Walk:
        """Begins a walk through a store.

        parameters: as strings, with one character for each byte of a name (latin-1). Raises ValueError, with a message
        for people, if a parameter is unknown, missing or wrong.
        """
        readers: dict[str, Reader] = {"match": name_of_bytes} if self.sorts and self.has_match else {}
        readers |= self.parameters
        if self.sorts:
            readers["sort"] = lambda text: self.sorts.index(choice(*self.sorts)(text))
        readers["limit"] = integer(1, ROWS_MAX)
        is_detail = not self.sorts and "match" not in readers
        defaults = {"limit": ROWS_MAX} if is_detail else {**dict.fromkeys(readers), "limit": ROWS}
        values = read_parameters(parameters, readers, defaults)
        return self.walk(store, **{name: value for name, value in values.items() if value is not None})


def name_of_bytes(text: str) -> bytes:
    """Reads a parameter that is a name or a part of a name."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("expected bytes, percent-encoded") from None


def read_parameters(
    parameters: Mapping[str, str], readers: Mapping[str, Reader], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads the parameters of a table.

    Raises ValueError if a parameter has no reader, or if a parameter without a default is missing.
    """
    values = dict(defaults)
    for name, text in parameters.items():
        if name not in readers:
            raise ValueError(f"unknown parameter {name!r}, expected {', '.join(readers)}")
        try:
            values[name] = readers[name](text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name in readers:
        if name not in values:
            raise ValueError(f"the parameter {name} is missing")
    return values
