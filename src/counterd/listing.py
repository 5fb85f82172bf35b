"""What a protocol shows to people: the figures of its store as metrics, and tables, which a walk fills in steps.

Floor 0: declarations, and readers of a table's parameters. Nothing here knows a protocol, or needs what is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from counterd.settings import choice, integer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from counterd.settings import Reader

ROWS_MAX = 1000  # of an answer
ROWS = 100  # unless more are asked for

CONNECTION = integer(1, (1 << 32) - 1)  # the reader of a parameter that is the engine's number of a connection


@dataclass(frozen=True)
class Figure:
    """One of the figures of `Store.snapshot()`, for the metrics.

    key: in the snapshot.
    name: of the metric, without the prefix `counterd_`, with its unit; it ends in `_total` if the figure only rises.
    kind: as Prometheus has them.
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
    """A column of a table. Its kind says what its cells are:

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

    Each row was true at one moment, in one of the steps. An entry that exists throughout and ranks high enough is a
    row, exactly once. An entry that comes, goes or changes between two steps may be among the rows or not.
    """

    total: int  # how many matched, whether or not they are among the rows; final once step() has returned True

    def step(self) -> bool:
        """Goes on for 250 us at most, by work that is counted and not timed. True once the rows are there."""

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows, in order, each in the order of the table's columns."""


@dataclass(frozen=True)
class Table:
    """What a protocol can list.

    name: of letters, unique among the protocols.
    sorts: the orders that the parameter `sort` knows, largest first, the default first of all; empty if it has none.
    parameters: those that it knows besides `match`, `sort` and `limit`, of which the first is needed where it has no
        order. One that is called `connection` is an id to people, of which control makes the engine's number.
    open: begins a walk through a store. Parameters are text, a character for each byte of a name (latin-1). Raises
        ValueError, with a text for people, for a parameter that is unknown, missing or wrong.
    metrics: of each of its first ROWS_MAX rows, in the default order. A figure's key is a column; the first column,
        which is a name that no other row has, becomes a label.
    """

    name: str
    help: str
    columns: tuple[Column, ...]
    sorts: tuple[str, ...]
    open: Callable[[Any, Mapping[str, str]], Walk]
    parameters: tuple[str, ...] = ()
    metrics: tuple[Figure, ...] = ()


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
