"""What `counterctl top` shows: samples, the choice of what is listed, and both drawn as a rich renderable.

Floor 5. Without a terminal, a clock and a server, which are top.py's: everything is given. Nothing that matters is said
by colour alone.
"""

from __future__ import annotations

import codecs
import heapq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rich.console import Group
from rich.text import Text

from counterd.cli.ctl.common import shown
from counterd.units import COUNTS, count, digits, rate, scaled, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.console import RenderableType

    from counterd.client import DumpEntry

SORTS = ("in use", "share", "peak", "name")
INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
KEPT_MAX = 1000  # of a million: more than fits on any screen, and enough to sort in another way at once
GAP = 2
NAME_WIDTH_MIN = 12
BAR_WIDTH_MIN, BAR_WIDTH_MAX = 8, 50
PERCENT_WIDTH = 6
LETTER_MAX = 4  # bytes of UTF-8
NEARLY_FULL = 0.8
LABEL_WIDTH = 13
LOAD_WIDTH = 20
HELP = (
    ("s, arrows", "sort by the next column, or the one before"),
    ("r", "turn the order round"),
    ("/", "only names with a text in them: Enter keeps it, Esc takes it back"),
    ("space", "pause, and go on"),
    ("+ -", "a longer interval, a shorter one"),
    ("h ?", "this help; any key leaves it"),
    ("q", "quit"),
)
EXPLAINED = (
    "limit: the last maximum that was asked for",
    "peak:  the most that was in use in this window of the server's statistics",
    "share: what is in use of the limit; with ~ of the peak, no limit being known",
)


# ---- samples ----


class Sample(NamedTuple):
    """What Stats said, and when on a clock that never goes back."""

    at: float
    figures: Mapping[str, str]

    def number(self, name: str) -> int | None:
        text = self.figures.get(name, "")
        return int(text) if text.isdecimal() else None


def rates(before: Sample | None, now: Sample, prefix: str) -> dict[str, float]:
    """Of the figures that begin so, a second. Nothing without a sample before, of the same run of the server."""
    if before is None or now.at <= before.at:
        return {}
    found = {}
    for name in now.figures:
        if name.startswith(prefix):
            new, old = now.number(name), before.number(name)
            if new is None or old is None or new < old:  # it has started again
                return {}
            found[name[len(prefix) :]] = (new - old) / (now.at - before.at)
    return found


class Listing(NamedTuple):
    """What was kept of a Dump: all of it, or those that come first in the order that was wanted then."""

    at: float
    seconds: float  # that the Dump took
    total: int
    filter: str
    matching: int
    entries: list[DumpEntry]

    def is_complete(self) -> bool:
        return len(self.entries) == self.total


def summary(entries: list[DumpEntry], order: Order, at: float, seconds: float) -> Listing:
    """What is kept of a Dump until the next one."""
    matching = sum(order.matches(entry.name) for entry in entries)
    kept = entries
    if len(entries) > KEPT_MAX:
        kept = order.choose(entries, KEPT_MAX)
        if matching < KEPT_MAX:  # something to see as soon as the filter is taken back
            names = {entry.name for entry in kept}
            first = order._replace(filter="").choose(entries, KEPT_MAX)
            kept = kept + [entry for entry in first if entry.name not in names]
    return Listing(at, seconds, len(entries), order.filter, matching, kept)


class Order(NamedTuple):
    """Which counters are listed, and how they are sorted."""

    sort: str = SORTS[0]
    reverse: bool = False
    filter: str = ""

    def choose(self, entries: Iterable[DumpEntry], most: int) -> list[DumpEntry]:
        """The first in this order, of those that match. Equal ones are in the order of their names, and stay so."""
        wanted = (entry for entry in entries if self.matches(entry.name))
        if self.sort == "name":
            return (heapq.nlargest if self.reverse else heapq.nsmallest)(most, wanted, key=itemgetter(0))
        sign = 1 if self.reverse else -1
        value = VALUES[self.sort]
        return heapq.nsmallest(most, wanted, key=lambda entry: (sign * value(entry), entry.name))

    def matches(self, name: bytes) -> bool:
        return self.filter.encode("utf-8", "surrogateescape") in name


def limit_of(entry: DumpEntry) -> int | None:
    """The last maximum that was asked for, if the server tells."""
    limit: int | None = getattr(entry, "limit", None)
    return limit or None


def share(entry: DumpEntry) -> float:
    """What is in use, of the limit, or where that is not known of the most that was in use in this interval."""
    return entry.consumption / (limit_of(entry) or entry.maximum or 1)


VALUES: dict[str, Callable[[Any], float]] = {
    "in use": lambda entry: entry.consumption,
    "share": share,
    "peak": lambda entry: entry.maximum,
}


# ---- what the user chose ----


class Keys:
    """Bytes from a terminal to keys: a letter each, or "left", "right", "escape", "enter" and "backspace"."""

    _named: ClassVar = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}
    _arrows: ClassVar = {"C": "right", "D": "left", "A": "left", "B": "right"}

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def waits(self) -> bool:
        """Whether an escape came, of which nobody knows yet if it is the key or the beginning of another."""
        return bool(self._rest)

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The keys that are complete with these bytes. final: nothing more came for a while."""
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
                    if rest[end] in self._arrows:
                        found.append(self._arrows[rest[end]])
                    text = rest[end + 1 :]
                    continue
                if not rest and not final:
                    self._rest = text
                    return found
                letter = "escape"
            found.append(self._named.get(letter, letter))
            text = rest
        return found


@dataclass
class View:
    """What the user has chosen so far."""

    interval: float = 1.0
    order: Order = field(default_factory=Order)
    paused: bool = False
    helping: bool = False
    typed: str | None = None  # of a filter that is not finished
    quits: bool = False

    def press(self, key: str) -> None:
        """Does what a key says."""
        if self.typed is not None:
            self._type(key)
        elif self.helping:
            self.helping = False
        elif key in ("s", "right", "left"):
            step = -1 if key == "left" else 1
            sort = SORTS[(SORTS.index(self.order.sort) + step) % len(SORTS)]
            self.order = self.order._replace(sort=sort)
        elif key == "r":
            self.order = self.order._replace(reverse=not self.order.reverse)
        elif key == "/":
            self.typed = self.order.filter
        elif key == " ":
            self.paused = not self.paused
        elif key in ("+", "="):
            self.interval = min((each for each in INTERVALS_S if each > self.interval), default=self.interval)
        elif key in ("-", "_"):
            self.interval = max((each for each in INTERVALS_S if each < self.interval), default=self.interval)
        elif key in ("h", "?"):
            self.helping = True
        elif key == "q":
            self.quits = True

    def listed(self) -> Order:
        """The order with what is being typed, which is seen at once."""
        return self.order if self.typed is None else self.order._replace(filter=self.typed)

    def _type(self, key: str) -> None:
        assert self.typed is not None
        if key == "enter":
            self.order = self.order._replace(filter=self.typed)
        if key in ("enter", "escape"):
            self.typed = None
        elif key == "backspace":
            self.typed = self.typed[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed += key


# ---- drawing ----


@dataclass
class Shown:
    """All that a screen is drawn from."""

    where: str
    view: View
    now: float = 0.0
    before: Sample | None = None
    sample: Sample | None = None
    listing: Listing | None = None
    problem: str = ""  # why there is nothing new


def draw(what: Shown, columns: int, rows: int, *, plain: bool = False) -> RenderableType:
    """The whole screen, with exactly so many lines. plain: for a terminal that has ASCII only."""
    problem = f"no answer: {what.problem}" if what.problem else ""
    head = [_title(what, columns), Text(problem, "bold red")]
    if what.sample is not None:
        head += _figures(what.before, what.sample, columns, plain=plain)
    foot = _foot(what, columns)
    room = max(rows - len(head) - 2, 0)
    body = _help() if what.view.helping else _table(what, columns, room, plain=plain)
    blank = [Text()] * max(room - len(body), 0)
    lines = [*head, *body[:room], *blank, Text(), foot][:rows]
    for line in lines:
        line.no_wrap = True
        line.truncate(columns, overflow="crop" if plain else "ellipsis")
    return Group(*lines)


def _title(what: Shown, columns: int) -> Text:
    version = what.sample.figures.get("version") if what.sample else None
    left = Text().append(f"counterd {version} at {what.where}" if version else what.where, "bold")
    if what.sample and (uptime := what.sample.number("uptime")) is not None:
        left.append(f"   up {_uptime(uptime)}")
    right = Text("paused", style="reverse") if what.view.paused else Text(f"every {what.view.interval:g} s", "dim")
    return _both_ends(left, right, columns)


def _uptime(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days:,} d {clock}" if days else clock


def _both_ends(left: Text, right: Text, columns: int) -> Text:
    """A line; where there is no room for both, the right one goes first."""
    room = columns - left.cell_len - right.cell_len
    return left.copy().append(" " * room).append_text(right) if room > 1 else left.copy()


def _figures(before: Sample | None, sample: Sample, columns: int, *, plain: bool) -> list[Text]:
    """What Stats tells, as far as this server tells it."""
    operations = rates(before, sample, "command:")
    names = [name[len("command:") :] for name in sample.figures if name.startswith("command:")]
    cells = [_cell(name, _rate(operations.get(name))) for name in names]
    total = sum(operations.values()) if operations else None
    found = _lines("requests", [_cell("all", _rate(total)), *cells], columns)
    if any(name.startswith("refused:") for name in sample.figures):
        refused = rates(before, sample, "refused:")
        kinds = [name[len("refused:") :] for name in sample.figures if name.startswith("refused:")]
        ever = [kind for kind in kinds if sample.number(f"refused:{kind}")]
        cells = [_cell(kind.replace("_", " "), _rate(refused.get(kind)), 28) for kind in ever]
        found += _lines("refused", cells or [Text("none so far", "dim")], columns)
    traffic = rates(before, sample, "bytes_")
    if "bytes_in" in sample.figures:
        cells = [_cell(name, _bytes(traffic.get(name))) for name in ("in", "out")]
        found += _lines("bytes", cells, columns)
    return [*found, *_lines("connections", _connections(sample), columns), *_load(sample, columns, plain=plain)]


def _cell(name: str, value: str, width: int = 20) -> Text:
    """A name and a value that stays in its place while it changes."""
    return Text().append(f"{name} ", "dim").append(value.rjust(width - 3 - len(name))).append("   ")


def _rate(value: float | None) -> str:
    return "-" if value is None else rate(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{_number(round(value))}/s"


def _lines(label: str, cells: list[Text], columns: int) -> list[Text]:
    """Cells side by side, as many as there is room for, below a label."""
    found = [Text().append(label.ljust(LABEL_WIDTH), "bold")]
    for cell in cells:
        if found[-1].cell_len > LABEL_WIDTH and found[-1].cell_len + len(cell.plain.rstrip()) > columns:
            found.append(Text(" " * LABEL_WIDTH))
        found[-1].append_text(cell)
    return found


def _connections(sample: Sample) -> list[Text]:
    now, most = sample.number("curr_connections"), sample.number("connections_max")
    text = f"{now or 0:,}" + (f" of {most:,}" if most else "")
    if (total := sample.number("total_connections")) is not None:
        text += f", {total:,} since the start"
    causes = {name[len("rejected:") :]: sample.number(name) for name in sample.figures if name.startswith("rejected:")}
    cells = [Text(text)]
    if rejected := ", ".join(f"{cause.replace('_', ' ')} {number:,}" for cause, number in causes.items() if number):
        cells.append(Text(f"; rejected: {rejected}", "bold red"))
    return cells


def _load(sample: Sample, columns: int, *, plain: bool) -> list[Text]:
    """How full the tables are; of a server that does not tell their sizes, what is in it."""
    found = []
    for label, name, most in (("records", "records", "buckets"), ("holdings", "holdings", "holdings_max")):
        used, size = sample.number(name), sample.number(most)
        if used is not None and size:
            style = _heat(used / size)
            cells = [_bar(used / size, LOAD_WIDTH, style, plain=plain)]
            cells.append(Text(_percent(used / size).rjust(PERCENT_WIDTH), style))
            cells.append(Text(f"   {used:,} of {size:,}"))
            found += _lines(label, [Text().join(cells)], columns)
    return found or _lines("objects", [Text(count(sample.number("objects") or 0))], columns)


def _foot(what: Shown, columns: int) -> Text:
    if what.view.typed is not None:
        return Text().append("filter: ", "bold").append(what.view.typed).append(" ", "reverse")
    keys = Text("/ filter  s sort  h help  q quit", "dim")
    listing, chosen = what.listing, what.view.order.filter
    if listing is None:
        return _both_ends(Text("no list yet", "dim"), keys, columns)
    text = several(listing.total, "counter")
    if chosen:
        matching = listing.matching if chosen == listing.filter else None
        if listing.is_complete():
            matching = sum(what.view.order.matches(entry.name) for entry in listing.entries)
        text += f", {'those' if matching is None else f'{matching:,}'} with {chosen!r}"
    text += f"; list {_age(what.now - listing.at)} old"
    if listing.seconds >= 0.5:
        text += f", took {_age(listing.seconds)}"
    return _both_ends(Text(text), keys, columns)


def _age(seconds: float) -> str:
    return f"{max(seconds, 0):.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _help() -> list[Text]:
    lines = [Text().append(f"  {keys:<12}", "bold").append(text) for keys, text in HELP]
    return [Text(), *lines, Text(), *(Text(f"  {each}", "dim") for each in EXPLAINED)]


# ---- the list ----


class Column(NamedTuple):
    """Of the list: what it is sorted by, if it can be, and how wide it is."""

    title: str
    width: int
    sort: str | None = None


class Layout(NamedTuple):
    """The columns that a terminal has room for."""

    name: int
    numbers: tuple[Column, ...]
    bar: int

    @classmethod
    def of(cls, columns: int) -> Layout:
        """In a narrow one, names stay, and what is in use."""
        numbers = [Column("in use", 9, "in use"), Column("limit", 9), Column("peak", 9, "peak")]
        left = columns - sum(each.width + GAP for each in numbers)
        if left < NAME_WIDTH_MIN:
            return cls(max(columns - 9 - GAP, 1), tuple(numbers[:1]), 0)
        percent = PERCENT_WIDTH + GAP
        bar = min((left - percent) // 3, BAR_WIDTH_MAX)
        if bar < BAR_WIDTH_MIN or left - percent - bar - GAP < NAME_WIDTH_MIN:
            return cls(left, tuple(numbers), 0)
        return cls(left - percent - bar - GAP, tuple(numbers), bar)


def _table(what: Shown, columns: int, room: int, *, plain: bool) -> list[Text]:
    """Its title, and the first counters that there is room for."""
    layout = Layout.of(columns)
    order = what.view.listed()
    if what.listing is None or room < 2:
        return [Text()]
    entries = order.choose(what.listing.entries, room - 2)
    lines = [_entry(entry, layout, plain=plain) for entry in entries]
    if not lines:
        lines = [Text("no counters" if not order.filter else f"no counter with {order.filter!r}", "dim")]
    return [Text(), _heading(layout, order, columns, plain=plain), *lines]


def _heading(layout: Layout, order: Order, columns: int, *, plain: bool) -> Text:
    falls = order.reverse == (order.sort == "name")
    mark = (" v" if falls else " ^") if plain else (" ▼" if falls else " ▲")

    def title(text: str, sort: str | None) -> str:
        return text + mark if sort == order.sort else text

    line = Text(title("name", "name").ljust(layout.name), "reverse")
    for column in layout.numbers:
        line.append(title(column.title, column.sort).rjust(column.width + GAP))
    if layout.bar:
        line.append(" " * GAP + title("share", "share").ljust(layout.bar + GAP + PERCENT_WIDTH))
    line.pad_right(columns - line.cell_len)
    return line


def _entry(entry: DumpEntry, layout: Layout, *, plain: bool) -> Text:
    line = Text(_beginning(entry.name, layout.name))
    line.truncate(layout.name, overflow="crop" if plain else "ellipsis", pad=True)
    limit = limit_of(entry)
    values = {"in use": _number(entry.consumption), "limit": "-" if limit is None else _number(limit)}
    values["peak"] = _number(entry.maximum)
    for column in layout.numbers:
        style = "bold" if column.title == "in use" else "dim" if values[column.title] == "-" else "none"
        line.append(values[column.title].rjust(column.width + GAP), style)
    if layout.bar:
        filled = share(entry)
        style = "cyan" if limit is None else _heat(filled)
        line.append(" " * GAP).append_text(_bar(filled, layout.bar, style, plain=plain, known=limit is not None))
        line.append(f"{'' if limit else '~'}{_percent(filled)}".rjust(PERCENT_WIDTH + GAP), style)
    return line


def _beginning(name: bytes, width: int) -> str:
    """Of a name at least so much as a column shows: rich takes 0.2 s to cut a name of 65,535 bytes."""
    return shown(name[: LETTER_MAX * (width + 1)])


def _bar(filled: float, width: int, style: str, *, plain: bool, known: bool = True) -> Text:
    """Known and guessed ones have other signs, not only other colours."""
    signs = ("#", "=", "-") if plain else ("━", "┅", "─")
    length = min(round(filled * width), width)
    if filled > 0 and not length:
        length = 1
    if filled < 1 and length == width:
        length = width - 1  # a full one is one that nothing is left of
    return Text((signs[0] if known else signs[1]) * length, style).append(signs[2] * (width - length), "bright_black")


def _heat(filled: float) -> str:
    return "red" if filled >= 1 else "yellow" if filled >= NEARLY_FULL else "green"


def _percent(filled: float) -> str:
    """Not 100 % before it is, and not 0 % of something."""
    whole = round(filled * 100)
    if filled and not whole:
        return "<1 %"
    return ">99 %" if whole == 100 and filled < 1 else f"{whole:,} %"


def _number(value: int) -> str:
    """In 9 columns."""
    if value < 10_000_000:
        return count(value)
    number, unit = scaled(value, COUNTS)
    return f"{digits(number)}{unit}"
