"""How counterctl shows what it was told: as a table for people, as JSON or CSV for programs.

Floor 5. On a terminal a table is rich's, with numbers that are short; in a pipe the same columns are plain lines, which
a million rows can have, and no text costs the other rows more than PADDED_MAX. JSON and CSV have every number exactly.
Nothing but data goes to stdout.

Names and values are bytes. In tables and CSV they are as common.shown() writes them; in JSON they are strings, and
where one is not UTF-8, a field with `_base64` after its name has the bytes. No form writes a character that is not
printable: JSON escapes those, so that the value stays the same and a terminal obeys none of them.
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
RICH_ROWS_MAX = 1000  # rich takes 0.2 ms for a row, and nobody looks at more than that one by one
AT_ONCE = 4096  # rows that are written together, and aligned with each other
PADDED_MAX = 100  # places: a longer text makes its own row longer, and no other; names that people give are shorter
FOLDED_MAX = 400  # characters: of a longer text a terminal shows so many, five lines of 80; a pipe gets all
LARGE = 1_000_000  # from here on numbers are shown with three digits
NOTHING = "-"
GAP = "  "

SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
MANY = (*COUNTS, ("T", 10**12), ("P", 10**15), ("E", 10**18))
SPANS = (("d", 86_400), ("h", 3_600), ("min", 60))

Row = Sequence[Any]
F = TypeVar("F", bound=Callable[..., Any])


class Kind(Enum):
    """What a value is, and so how it is shown to people. None of any kind is nothing: -, null, or empty in CSV."""

    BYTES = auto()  # a name, or what somebody has stored
    TEXT = auto()
    NUMBER = auto()
    SIZE = auto()  # of so many bytes
    SPAN = auto()  # seconds
    WHEN = auto()  # Unix nanoseconds
    CLOCK = auto()  # a datetime


RIGHT = frozenset((Kind.NUMBER, Kind.SIZE, Kind.SPAN, Kind.WHEN))


class Column(NamedTuple):
    """title: of the table, where it is not the field's name. nothing: None there. detail: not in the table at all."""

    name: str
    kind: Kind = Kind.TEXT
    title: str = ""
    nothing: str = NOTHING
    detail: bool = False


# ---- for people ----


def number(value: int) -> str:
    """999,999, then 1.23M."""
    if abs(value) < LARGE:
        return f"{value:,}"
    of_unit, unit = scaled(value, MANY)
    return f"{digits(of_unit)}{unit}"


def size(value: int) -> str:
    """812 B, 1.23 KiB."""
    unit, length = next(each for each in SIZES if value >= each[1] or each[1] == 1)
    return f"{value:,} B" if length == 1 else f"{digits(value / length)} {unit}"


def span(seconds: float) -> str:
    """0 s, 143 µs, 3.20 s, 59 s, 5 min, 3 h, 12 d: as exact as anybody asks. What is over since then is negative."""
    if seconds < 0:
        return f"-{span(-seconds)}"
    for unit, length in SPANS:
        if seconds >= length:
            return f"{int(seconds // length):,} {unit}"
    return f"{seconds:.0f} s" if seconds == int(seconds) else duration(seconds * 1e9)


def when(unix_ns: int, now_ns: int) -> str:
    """3 s ago, in 5 min."""
    seconds = abs(now_ns - unix_ns) // 1_000_000_000
    return f"{span(seconds)} ago" if unix_ns <= now_ns else f"in {span(seconds)}"


def cell(column: Column, value: Any, now_ns: int) -> str:
    """A value as a table has it."""
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
    """A text as shown() writes bytes."""
    return shown(str(value).encode("utf-8", "surrogateescape"))


# ---- for programs ----


def fields(columns: Sequence[Column], row: Row) -> dict[str, Any]:
    """A row as an object of JSON."""
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
    """A value as JSON has it, but for bytes."""
    return value.astimezone(timezone.utc).isoformat() if kind is Kind.CLOCK else value


class Output:
    """Writes to stdout in one form, of FORMS."""

    def __init__(self, form: str) -> None:
        self.form = form

    def rows(self, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        """All rows there are: a table, an array of objects, or CSV with a header."""
        _check_open()
        if self.form == "json":
            objects = (_json(fields(columns, row)) for row in rows)
            _write(chain(["["], _joined(objects), ["\n]\n"]))
        elif self.form == "csv":
            self._csv(columns, rows)
        else:
            _table(columns, rows)

    def record(self, columns: Sequence[Column], row: Row) -> None:
        """One thing with many fields: a table with a line for each, an object, or CSV with a header."""
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
        """What is called with each row as it comes: a line each, an object on a line, or CSV after its header.

        sentence: the line for people, where that is not the row's cells.
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
        """Bytes as they are, whatever the form."""
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
    """A row as CSV has it; None is empty there."""
    return [_exact_text(column.kind, value) for column, value in zip(columns, row, strict=True)]


def _exact_text(kind: Kind, value: Any) -> Any:
    if kind is Kind.BYTES and value is not None:
        return shown(value)
    return shown_text(value) if isinstance(value, str) else exact(kind, value)


def _json(what: object, indent: int | None = None) -> str:
    """Letters of any language as they are; the line ends of the layout are no part of a value."""
    text = json.dumps(what, ensure_ascii=False, indent=indent)
    return "\n".join(line if line.isprintable() else _printable_json(line) for line in text.split("\n"))


def _printable_json(line: str) -> str:
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def _joined(objects: Iterator[str]) -> Iterator[str]:
    for index, text in enumerate(objects):
        yield f",\n  {text}" if index else f"\n  {text}"


def _write(texts: Iterable[str]) -> None:
    """Many at once: a write for each of a million rows takes longer than making them."""
    left = iter(texts)
    while together := "".join(islice(left, AT_ONCE)):
        sys.stdout.write(together)


def _table(columns: Sequence[Column], rows: Iterable[Row], right: set[int] | None = None) -> None:
    """right: the columns that are aligned there, by their place; else those of numbers are."""
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
    """Columns are as wide as what was written so far needs: all of a million rows are never in memory together."""
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
    """Places on a screen: some characters take two, and some none."""
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
    """--output, whose last one counts: it may stand before the command and after it. Passes `output`, an Output."""
    return click.option(
        "--output", type=click.Choice(FORMS), callback=_chosen, help="The format of the data.  [default: table]"
    )(function)
