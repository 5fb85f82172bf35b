"""Writes the data of counterctl as a table for people, or as JSON or CSV for programs.

Floor 5 (ARCHITECTURE.md). On a terminal, rich draws the table, and large numbers are shortened. In a pipe the same
columns are plain lines, so that a table can have a million rows. A long cell widens its column to at most PADDED_MAX.
JSON and CSV have exact numbers, which are not shortened. stdout has only data.

Names and values are bytes. Tables and CSV show names and values as common.shown() formats them. In JSON, names and
values are strings. If a value is not UTF-8, a second field, whose name ends in `_base64`, has its bytes. No format
writes characters that are not printable. JSON escapes unprintable characters, so the value stays the same and a
terminal does not interpret it.
"""

from __future__ import annotations

import base64
import csv
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from enum import Enum, auto
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import click

from counterd.cli.ctl.common import has_output, shown
from counterd.units import COUNTS, digits, duration, scaled

FORMS = ("table", "json", "csv")
RICH_ROWS_MAX = 1000  # rich takes 0.2 ms for a row; longer tables are written as plain lines
AT_ONCE = 4096  # rows that are written and aligned together
PADDED_MAX = 100  # places on the screen: a longer cell makes only its own row longer
FOLDED_MAX = 400  # characters: longer cells are cut on a terminal (five lines of 80), but not in a pipe
LARGE = 1_000_000  # numbers from here on are shown with three digits
NOTHING = "-"
GAP = "  "

SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
MANY = (*COUNTS, ("T", 10**12), ("P", 10**15), ("E", 10**18))
SPANS = (("d", 86_400), ("h", 3_600), ("min", 60))

Row = Sequence[Any]
F = TypeVar("F", bound=Callable[..., Any])


class Kind(Enum):
    """The kind of a value, which decides how tables show it.

    The value None is shown as - in tables, as null in JSON, and as an empty cell in CSV.
    """

    BYTES = auto()  # a name or a stored value
    TEXT = auto()
    NUMBER = auto()
    SIZE = auto()  # a number of bytes
    SPAN = auto()  # seconds
    WHEN = auto()  # Unix nanoseconds
    CLOCK = auto()  # a datetime


RIGHT = frozenset((Kind.NUMBER, Kind.SIZE, Kind.SPAN, Kind.WHEN))


class Column(NamedTuple):
    """A field of the output.

    title: the title in tables, if it differs from the name. nothing: what tables show for None. detail: whether only
    JSON and CSV have the field.
    """

    name: str
    kind: Kind = Kind.TEXT
    title: str = ""
    nothing: str = NOTHING
    detail: bool = False


# ---- for people ----


def number(value: int) -> str:
    """Formats a number, such as 999,999 or 1.23M."""
    if abs(value) < LARGE:
        return f"{value:,}"
    of_unit, unit = scaled(value, MANY)
    return f"{digits(of_unit)}{unit}"


def size(value: int) -> str:
    """Formats a size, such as 812 B or 1.23 KiB."""
    unit, length = next(each for each in SIZES if value >= each[1] or each[1] == 1)
    return f"{value:,} B" if length == 1 else f"{digits(value / length)} {unit}"


def span(seconds: float) -> str:
    """Formats a duration, such as 0 s, 143 µs, 3.20 s, 59 s, 5 min, 3 h or 12 d.

    A negative duration has a minus sign.
    """
    if seconds < 0:
        return f"-{span(-seconds)}"
    for unit, length in SPANS:
        if seconds >= length:
            return f"{int(seconds // length):,} {unit}"
    return f"{seconds:.0f} s" if seconds == int(seconds) else duration(seconds * 1e9)


def when(unix_ns: int, now_ns: int) -> str:
    """Formats a point in time, such as "3 s ago" or "in 5 min"."""
    seconds = abs(now_ns - unix_ns) // 1_000_000_000
    return f"{span(seconds)} ago" if unix_ns <= now_ns else f"in {span(seconds)}"


def cell(column: Column, value: Any, now_ns: int) -> str:
    """Formats a value for a table."""
    kind = column.kind
    if value is None:
        return column.nothing
    if kind is Kind.WHEN:
        return when(value, now_ns)
    if kind is Kind.BYTES:
        return shown(value)
    if kind is Kind.TEXT:
        return shown_text(value)
    if kind is Kind.CLOCK:
        local: datetime = value.astimezone()
        return f"{local:%H:%M:%S}.{local.microsecond // 1000:03d}"
    return {Kind.NUMBER: number, Kind.SIZE: size, Kind.SPAN: span}[kind](value)


def shown_text(value: object) -> str:
    """Formats a string in the same way as shown() formats bytes."""
    return shown(str(value).encode("utf-8", "surrogateescape"))


# ---- for programs ----


def fields(columns: Sequence[Column], row: Row) -> dict[str, Any]:
    """Returns a row as a JSON object."""
    found: dict[str, Any] = {}
    for column, value in zip(columns, row, strict=True):
        if column.kind is Kind.BYTES and value is not None:
            try:
                found[column.name] = value.decode()
            except UnicodeDecodeError:
                found[column.name] = shown(value)
                found[f"{column.name}_base64"] = base64.b64encode(value).decode()
        else:
            found[column.name] = exact(column.kind, value)
    return found


def exact(kind: Kind, value: Any) -> Any:
    """Returns a value for JSON, unless it is bytes."""
    return value.astimezone(timezone.utc).isoformat() if kind is Kind.CLOCK else value


class Output:
    """Writes data to stdout in one of FORMS."""

    def __init__(self, form: str) -> None:
        self.form = form

    def rows(self, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        """Writes all rows as a table, as an array of objects, or as CSV with a header."""
        _check_open()
        if self.form == "json":
            objects = (_json(fields(columns, row)) for row in rows)
            _write(chain(["["], _joined(objects), ["\n]\n"]))
        elif self.form == "csv":
            self._csv(columns, rows)
        else:
            _table(columns, rows)

    def record(self, columns: Sequence[Column], row: Row) -> None:
        """Writes one row with many fields, as a table with a line for each field, as an object, or as CSV with a
        header."""
        _check_open()
        if self.form == "json":
            _write([_json(fields(columns, row), indent=2), "\n"])
        elif self.form == "csv":
            self._csv(columns, [row])
        else:
            now = time.time_ns()
            pairs = (pair for pair in zip(columns, row, strict=True) if not pair[0].detail)
            lines: list[Row] = [(column.title or column.name, cell(column, value, now)) for column, value in pairs]
            _table([Column("field"), Column("value")], lines, right={1})

    def stream(self, columns: Sequence[Column], sentence: Callable[[Row], str] | None = None) -> Callable[[Row], None]:
        """Returns a function that immediately writes a row, as a line, as an object on a line, or as CSV.

        sentence: makes the line for people from a row. Without sentence, the line has the cells of the row.
        """
        _check_open()
        if self.form == "csv":
            self._csv(columns, [])

        def add(row: Row) -> None:
            if self.form == "json":
                _write([_json(fields(columns, row)), "\n"])
            elif self.form == "csv":
                csv.writer(sys.stdout, lineterminator="\n").writerow(_exact(columns, row))
            else:
                pairs = zip(columns, row, strict=True)
                cells = (cell(column, value, 0) for column, value in pairs if not column.detail)
                _write([sentence(row) if sentence else GAP.join(cells), "\n"])
            sys.stdout.flush()

        return add

    def raw(self, data: bytes) -> None:
        """Writes bytes unchanged, with every --output."""
        _check_open()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()

    def _csv(self, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([column.name for column in columns])
        writer.writerows(_exact(columns, row) for row in rows)
        sys.stdout.flush()


def _check_open() -> None:
    if not has_output():
        raise OSError(errno.EBADF, f"standard output: {os.strerror(errno.EBADF)}")


def _exact(columns: Sequence[Column], row: Row) -> list[Any]:
    """Returns a row for CSV, in which None becomes an empty cell."""
    return [_exact_text(column.kind, value) for column, value in zip(columns, row, strict=True)]


def _exact_text(kind: Kind, value: Any) -> Any:
    if kind is Kind.BYTES and value is not None:
        return shown(value)
    return shown_text(value) if isinstance(value, str) else exact(kind, value)


def _json(what: object, indent: int | None = None) -> str:
    """Formats an object as JSON.

    Printable characters of all languages stay unchanged; all other characters are escaped.
    """
    text = json.dumps(what, ensure_ascii=False, indent=indent)
    return "\n".join(line if line.isprintable() else _printable_json(line) for line in text.split("\n"))


def _printable_json(line: str) -> str:
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def _joined(objects: Iterator[str]) -> Iterator[str]:
    for index, text in enumerate(objects):
        yield f",\n  {text}" if index else f"\n  {text}"


def _write(texts: Iterable[str]) -> None:
    """Joins many strings and writes them together, because one write for each of a million rows would be too slow."""
    left = iter(texts)
    while together := "".join(islice(left, AT_ONCE)):
        sys.stdout.write(together)


def _table(columns: Sequence[Column], rows: Iterable[Row], right: set[int] | None = None) -> None:
    """Writes a table. right: the indexes of the columns that are aligned right; by default the columns with numbers."""
    now = time.time_ns()
    places = [(place, column) for place, column in enumerate(columns) if not column.detail]
    titles = [column.title or column.name for _, column in places]
    cells = ([cell(column, row[place], now) for place, column in places] for row in rows)
    if right is None:
        right = {at for at, (_, column) in enumerate(places) if column.kind in RIGHT}
    if not sys.stdout.isatty():
        return _plain(titles, cells, right)
    few = list(islice(cells, RICH_ROWS_MAX + 1))
    if len(few) <= RICH_ROWS_MAX:
        return _rich(titles, few, right)
    return _plain(titles, map(_cut, chain(few, cells)), right)


def _cut(texts: list[str]) -> list[str]:
    return [text if len(text) <= FOLDED_MAX else f"{text[:FOLDED_MAX]}\N{HORIZONTAL ELLIPSIS}" for text in texts]


def _rich(titles: Sequence[str], cells: Iterable[list[str]], right: set[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for at, title in enumerate(titles):
        if at in right:
            table.add_column(title, justify="right", no_wrap=True)
        else:
            table.add_column(title, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, _cut(row)))
    Console().print(table)


def _plain(titles: list[str], cells: Iterable[list[str]], right: set[int]) -> None:
    """Writes a table as plain lines.

    Each column is as wide as the rows so far need, so that a million rows are never all in memory.
    """
    widths = [0] * len(titles)
    left = chain([titles], cells)
    while together := list(islice(left, AT_ONCE)):
        for at, texts in enumerate(zip(*together, strict=True)):
            widths[at] = max(widths[at], *(width for width in map(_width, texts) if width <= PADDED_MAX), 0)
        _write(_line(texts, widths, right) for texts in together)


def _line(texts: Sequence[str], widths: Sequence[int], right: set[int]) -> str:
    last = len(texts) - 1
    padded = []
    for at, text in enumerate(texts):
        room = " " * (widths[at] - _width(text))
        padded.append(room + text if at in right else text if at == last else text + room)
    return GAP.join(padded) + "\n"


def _width(text: str) -> int:
    """Returns how many places a string takes on a terminal: some characters take two places, and some take none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


# ---- the option ----

_KEY = "counterd.output"


def _chosen(context: click.Context, _: click.Parameter, value: str | None) -> Output:
    if value is not None:
        context.meta[_KEY] = value
    return Output(context.meta.get(_KEY, FORMS[0]))


def output_option(function: F) -> F:
    """Adds the option --output, and passes an Output to the command as `output`.

    The option can be before and after the command; the last one counts.
    """
    return click.option(
        "--output", type=click.Choice(FORMS), callback=_chosen, help="The format of the data.  [default: table]"
    )(function)
