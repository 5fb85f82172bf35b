"""The screen of `counterctl top`: statistics and a list of counters, drawn as a rich renderable.

Floor 5 (ARCHITECTURE.md). This file uses no terminal, clock or server: the caller passes all data. Colour is never the
only sign of anything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.text import Text

from counterd.cli.ctl.admin import listed
from counterd.cli.ctl.common import shown
from counterd.cli.ctl.output import RIGHT, cell
from counterd.cli.ctl.output import Column as Field
from counterd.cli.ctl.top_state import (
    CONNECTIONS,
    COUNTERS,
    HOLDERS,
    HOLDINGS,
    QUEUE,
    WAITS,
    Order,
    TopState,
    limit_of,
    share,
)
from counterd.units import COUNTS, count, digits, rate, scaled, several

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from counterd.cli.ctl.admin import Table
    from counterd.client import DumpEntry

KEPT_MAX = 1000  # counters of a Dump: more than fits on any screen, and enough to sort them in another order
GAP = 2
NAME_WIDTH_MIN = 16
BAR_WIDTH_MIN, BAR_WIDTH_MAX = 8, 50
HISTORY_WIDTH_MIN, HISTORY_WIDTH_MAX = 8, 40
PERCENT_WIDTH = 6
LETTER_MAX = 4  # bytes of UTF-8
NEARLY_FULL = 0.8
LABEL_WIDTH = 13
LOAD_WIDTH = 20
ROWS_BESIDE = 5  # those that are neither for figures nor for the list: the title, the problem, the foot, and two blanks
HELP = (
    ("up, down", "move the cursor, also PgUp, PgDn, Home and End"),
    ("Enter, w", "show who holds the counter, or who waits for it; show what a connection holds, or waits for"),
    ("Tab", "show the connections, then other tables, then the counters; Esc goes back"),
    ("k", "close the selected connection, after y confirms that"),
    ("s, left, right", "sort by the previous or the next column"),
    ("r", "reverse the order"),
    ("/", "show only names with this text: Enter applies it, Esc cancels"),
    ("space, Ctrl-L", "pause or continue; draw the whole screen again"),
    ("+ -", "make the interval longer or shorter"),
    ("h ?", "show this help; any key closes it"),
    ("q", "quit"),
)
EXPLAINED = (
    "limit: the maximum of the last acquire",
    "peak:  the most permits in use in the server's statistics window",
    "share: permits in use in percent of the limit; with ~ in percent of the peak",
    "lately: the share at each of the last updates",
    "Holders, holdings, connections and other tables come from the admin endpoint",
    "(--admin); k needs its token.",
)
HINTS = {
    COUNTERS: (
        "Enter holders  w waiters  Tab connections  / filter  s sort  h help  q quit",
        "Enter holders  Tab connections  / filter  s sort  h help  q quit",
        "Enter holders  Tab connections  h help  q quit",
        "h help  q quit",
    ),
    CONNECTIONS: (
        "Enter holdings  k kill  Tab next  h help  q quit",
        "k kill  Tab next  h help  q quit",
        "h help  q quit",
    ),
    HOLDINGS: (
        "w waits  k kill  Esc counters  Tab connections  h help  q quit",
        "k kill  Esc counters  h help",
        "h help  q quit",
    ),
    WAITS: (
        "w holdings  k kill  Esc counters  Tab connections  h help  q quit",
        "k kill  Esc counters  h help",
        "h help  q quit",
    ),
    QUEUE: (
        "Enter holdings  w holders  k kill  Esc counters  h help  q quit",
        "k kill  Esc counters  h help",
        "h help  q quit",
    ),
    HOLDERS: (
        "Enter holdings  w waiters  k kill  Esc counters  Tab connections  h help  q quit",
        "k kill  Esc counters  Tab connections  h help  q quit",
        "k kill  Esc counters  h help",
        "h help  q quit",
    ),
}
TABLE_HINTS = ("s sort  Tab next  Esc counters  h help  q quit", "s sort  Tab next  h help", "h help  q quit")


# ---- samples ----


class Sample(NamedTuple):
    """A reply to Stats, and the time of the reply on a monotonic clock."""

    at: float
    figures: Mapping[str, str]

    def number(self, name: str) -> int | None:
        text = self.figures.get(name, "")
        return int(text) if text.isdecimal() else None


def rates(before: Sample | None, now: Sample, prefix: str) -> dict[str, float]:
    """Returns the rates per second of the figures whose names begin with this prefix.

    Returns no rates if there is no earlier sample of the same server process.
    """
    if before is None or now.at <= before.at:
        return {}
    found = {}
    for name in now.figures:
        if name.startswith(prefix):
            new, old = now.number(name), before.number(name)
            if new is None or old is None or new < old:  # the server was restarted
                return {}
            found[name[len(prefix) :]] = (new - old) / (now.at - before.at)
    return found


class Listing(NamedTuple):
    """The counters of a Dump that are kept: all of them, or the first ones in the order that was chosen then."""

    at: float
    seconds: float  # how long the Dump took
    total: int
    filter: str
    matching: int
    entries: list[DumpEntry]

    def is_complete(self) -> bool:
        return len(self.entries) == self.total


def summary(entries: list[DumpEntry], order: Order, at: float, seconds: float) -> Listing:
    """Selects the counters that are kept until the next Dump."""
    matching = sum(order.matches(entry.name) for entry in entries)
    kept = entries
    if len(entries) > KEPT_MAX:
        kept = order.choose(entries, KEPT_MAX)
        if matching < KEPT_MAX:  # to be shown as soon as the filter is removed
            names = {entry.name for entry in kept}
            first = order._replace(filter="").choose(entries, KEPT_MAX)
            kept = kept + [entry for entry in first if entry.name not in names]
    return Listing(at, seconds, len(entries), order.filter, matching, kept)


class Told(NamedTuple):
    """The reply of the admin endpoint for a page. total: the number of rows; None if there are more rows than these.

    columns: the columns of the rows. tables: the tables of other protocols, if the page asked for them.
    """

    page: str
    name: bytes
    rows: list[dict[str, Any]]
    total: int | None = 0
    problem: str = ""
    columns: Sequence[Field] = ()
    tables: tuple[Table, ...] | None = None


def remember(history: Mapping[bytes, deque[int]], listing: Listing) -> dict[bytes, deque[int]]:
    """Adds the permits in use to the history of each listed counter. The history of all other counters is dropped."""
    found = {}
    for entry in listing.entries:
        found[entry.name] = history.get(entry.name) or deque(maxlen=HISTORY_WIDTH_MAX)
        found[entry.name].append(entry.consumption)
    return found


# ---- drawing ----


@dataclass
class Shown:
    """All data from which a screen is drawn."""

    where: str
    state: TopState
    now: float = 0.0
    before: Sample | None = None
    sample: Sample | None = None
    listing: Listing | None = None
    history: Mapping[bytes, deque[int]] = field(default_factory=dict)
    told: Told | None = None  # for other pages than the counters
    problem: str = ""  # why there are no new data


def draw(what: Shown, columns: int, rows: int, *, plain: bool = False) -> RenderableType:
    """Draws the whole screen with exactly this many columns and rows. From 8 rows on, at least half are for the list.

    plain: draws for a terminal that has only ASCII.
    """
    problem = f"no answer: {what.problem}" if what.problem else ""
    head = [_title(what, columns), Text(problem, "bold red")]
    if what.sample is not None and not what.state.helping:  # the help needs the room
        figures = _figures(what.before, what.sample, columns, plain=plain)
        head += _most_important(figures, max(rows // 2 - ROWS_BESIDE, 0))
    foot = _foot(what, columns)
    room = max(rows - len(head) - 2, 0)
    if what.state.helping:
        body = _help()
    elif what.state.page == COUNTERS:
        body = _table(what, columns, room, plain=plain)
    else:
        body = _page(what, columns, room, plain=plain)
    blank = [Text()] * max(room - len(body), 0)
    lines = [*head, *body[:room], *blank, Text(), foot][:rows]
    for line in lines:
        line.no_wrap = True
        line.truncate(columns, overflow="crop" if plain else "ellipsis")
    return Group(*lines)


def _title(what: Shown, columns: int) -> Text:
    """Draws the first line. If there is too little room, the uptime is left out first, then the version."""
    texts = [what.where]
    if what.sample and (version := what.sample.figures.get("version")):
        texts.insert(0, f"counterd {version} at {what.where}")
    if what.sample and (uptime := what.sample.number("uptime")) is not None:
        texts.insert(0, f"{texts[0]}   up {_uptime(uptime)}")
    right = Text("paused", style="reverse") if what.state.paused else Text(f"every {what.state.interval:g} s", "dim")
    lefts = [Text(text, "bold") for text in texts]
    fits = next((left for left in lefts if left.cell_len + right.cell_len + 1 < columns), lefts[-1])
    return _both_ends(fits, right, columns)


def _uptime(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days:,} d {clock}" if days else clock


def _both_ends(left: Text, right: Text, columns: int) -> Text:
    """Returns a line with one text at each end. If there is no room for both, returns only the left text."""
    room = columns - left.cell_len - right.cell_len
    return left.copy().append(" " * room).append_text(right) if room > 1 else left.copy()


def _figures(before: Sample | None, sample: Sample, columns: int, *, plain: bool) -> list[list[Text]]:
    """Draws the figures of Stats that this server reports, as the lines of each kind of figures."""
    operations = rates(before, sample, "command:")
    names = [name[len("command:") :] for name in sample.figures if name.startswith("command:")]
    cells = [_cell(name, _rate(operations.get(name))) for name in names if sample.number(f"command:{name}")]
    total = sum(operations.values()) if operations else None
    found = [_lines("requests", [_cell("all", _rate(total)), *cells], columns)]
    if any(name.startswith("refused:") for name in sample.figures):
        refused = rates(before, sample, "refused:")
        kinds = [name[len("refused:") :] for name in sample.figures if name.startswith("refused:")]
        ever = [kind for kind in kinds if sample.number(f"refused:{kind}")]
        cells = [_cell(kind.replace("_", " "), _rate(refused.get(kind)), 28) for kind in ever]
        found.append(_lines("refused", cells or [Text("none", "dim")], columns))
    found += [_lines("connections", _connections(sample), columns), *_load(sample, columns, plain=plain)]
    traffic = rates(before, sample, "bytes_")
    if "bytes_in" in sample.figures:
        cells = [_cell(name, _bytes(traffic.get(name))) for name in ("in", "out")]
        found.append(_lines("bytes", cells, columns))
    return found


def _most_important(kinds: list[list[Text]], room: int) -> list[Text]:
    """Returns the lines that fit, and a blank line. The first lines of all kinds fit first, from top to bottom."""
    places = [(line, kind) for kind, lines in enumerate(kinds) for line in range(len(lines))]
    fitting = sorted(places)[:room]
    return [kinds[kind][line] for line, kind in places if (line, kind) in fitting] + [Text()] * bool(fitting)


def _cell(name: str, value: str, width: int = 20) -> Text:
    """Draws a name and a value of fixed width."""
    return Text().append(f"{name} ", "dim").append(value.rjust(width - 3 - len(name))).append("   ")


def _rate(value: float | None) -> str:
    return "-" if value is None else rate(value)


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{_number(round(value))}/s"


def _lines(label: str, cells: list[Text], columns: int) -> list[Text]:
    """Draws a label and several cells side by side, on as many lines as they need."""
    found = [Text().append(label.ljust(LABEL_WIDTH), "bold")]
    for each in cells:
        if found[-1].cell_len > LABEL_WIDTH and found[-1].cell_len + len(each.plain.rstrip()) > columns:
            found.append(Text(" " * LABEL_WIDTH))
        found[-1].append_text(each)
    for line in found:
        line.rstrip()
    return found


def _connections(sample: Sample) -> list[Text]:
    now, most = sample.number("curr_connections"), sample.number("connections_max")
    cells = [Text(f"{now or 0:,}" + (f" of {most:,}" if most else "") + "   ")]
    causes = {name[len("rejected:") :]: sample.number(name) for name in sample.figures if name.startswith("rejected:")}
    if rejected := ", ".join(f"{cause.replace('_', ' ')} {number:,}" for cause, number in causes.items() if number):
        cells.append(Text(f"rejected: {rejected}   ", "bold red"))
    if (total := sample.number("total_connections")) is not None:
        cells.append(Text(f"{total:,} since the start"))
    return cells


def _load(sample: Sample, columns: int, *, plain: bool) -> list[list[Text]]:
    """Draws how full the tables are. If the server does not report their sizes, draws the number of objects."""
    found = []
    for label, name, most in (("records", "records", "buckets"), ("holdings", "holdings", "holdings_max")):
        used, size = sample.number(name), sample.number(most)
        if used is not None and size:
            style = _heat(used / size)
            cell = _bar(used / size, LOAD_WIDTH, style, plain=plain)
            cell.append(_percent(used / size).rjust(PERCENT_WIDTH), style).append("   ")
            found.append(_lines(label, [cell, Text(f"{used:,} of {size:,}")], columns))
    return found or [_lines("objects", [Text(count(sample.number("objects") or 0))], columns)]


def _foot(what: Shown, columns: int) -> Text:
    state = what.state
    if state.typed is not None:
        return Text().append("filter: ", "bold").append(state.typed).append(" ", "reverse")
    if state.doomed:
        question = f"close {state.doomed} and give back what it holds? y: yes; any other key: no"
        return Text(question, "bold red")
    left = _counted(what) if state.page == COUNTERS else _told(what)
    return _with_hints(Text(state.note, "bold") if state.note else left, HINTS.get(state.page, TABLE_HINTS), columns)


def _with_hints(left: Text, hints: Sequence[str], columns: int) -> Text:
    """Draws a line with the longest hint that fits.

    If there is no room for both, the shortest hint is shown and the text on the left is cut.
    """
    fits = next((hint for hint in hints if left.cell_len + len(hint) < columns), hints[-1])
    left = left.copy()
    if len(fits) + 2 < columns:
        left.truncate(columns - len(fits) - 2, overflow="ellipsis")
    return _both_ends(left, Text(fits, "dim"), columns)


def _told(what: Shown) -> Text:
    told = what.told
    if told is None or (told.page, told.name) != (what.state.page, what.state.name):
        return Text("waiting for the reply of the admin endpoint", "dim")
    kind = {QUEUE: "waiter", WAITS: "wait"}.get(told.page, told.page.removesuffix("s"))
    return Text(f"the first {len(told.rows):,} {kind}s" if told.total is None else several(told.total, kind))


def _counted(what: Shown) -> Text:
    listing, chosen = what.listing, what.state.order.filter
    if listing is None:
        return Text("no list of counters yet", "dim")
    text = several(listing.total, "counter")
    if chosen:
        matching = listing.matching if chosen == listing.filter else None
        if listing.is_complete():
            matching = sum(what.state.order.matches(entry.name) for entry in listing.entries)
        text += f", {'those' if matching is None else f'{matching:,}'} with {chosen!r}"
    text += f"; list {_age(what.now - listing.at)} old"
    if listing.seconds >= 0.5:
        text += f", took {_age(listing.seconds)}"
    return Text(text)


def _age(seconds: float) -> str:
    return f"{max(seconds, 0):.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _help() -> list[Text]:
    lines = [Text().append(f"  {keys:<16}", "bold").append(text) for keys, text in HELP]
    return [Text(), *lines, Text(), *(Text(f"  {each}", "dim") for each in EXPLAINED)]


# ---- the list ----


class Column(NamedTuple):
    """A column of the list: its title, its width, and the order that sorts by this column, if there is one."""

    title: str
    width: int
    sort: str | None = None


class Layout(NamedTuple):
    """The columns that fit on a terminal, with their widths."""

    name: int
    numbers: tuple[Column, ...]
    bar: int
    history: int

    @classmethod
    def of(cls, columns: int) -> Layout:
        """Chooses the columns that fit.

        If there is too little room, the history is left out first, then the peak, the limit, the bar and the share.
        """
        in_use, limit, peak = Column("in use", 9, "in use"), Column("limit", 9), Column("peak", 9, "peak")
        percent = Column("share", PERCENT_WIDTH, "share")  # beside a bar it belongs to the bar
        for numbers, bars in (
            ((in_use, limit, peak), 2),
            ((in_use, limit, peak), 1),
            ((in_use, limit), 1),
            ((in_use,), 1),
            ((in_use, percent), 0),
        ):
            left = columns - sum(each.width + GAP for each in numbers) - (percent.width + GAP if bars else 0)
            widths = [max(left // 4, least) for least in (BAR_WIDTH_MIN, HISTORY_WIDTH_MIN)[:bars]]
            widths = [min(width, most) for width, most in zip(widths, (BAR_WIDTH_MAX, HISTORY_WIDTH_MAX), strict=False)]
            name = left - sum(width + GAP for width in widths)
            if name >= NAME_WIDTH_MIN:
                return cls(name, numbers, *(*widths, 0, 0)[:2])
        return cls(max(columns - in_use.width - GAP, 1), (in_use,), 0, 0)


def _table(what: Shown, columns: int, room: int, *, plain: bool) -> list[Text]:
    """Draws the heading, and the counters around the cursor that fit."""
    layout = Layout.of(columns)
    order, cursor = what.state.listed(), what.state.cursor
    if what.listing is None:
        return []
    entries = order.choose(what.listing.entries, len(what.listing.entries))
    cursor.settle([entry.name for entry in entries], room - 1)
    lines = []
    for at, entry in enumerate(entries[cursor.top : cursor.top + cursor.room], cursor.top):
        lines.append(_entry(entry, what.history.get(entry.name, ()), layout, plain=plain))
        if at == cursor.index:
            lines[-1].stylize("reverse")
    if not lines:
        lines = [Text("no counters" if not order.filter else f"no counter whose name contains {order.filter!r}", "dim")]
    return [_heading(layout, order, columns, plain=plain), *lines]


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
    if layout.history:
        line.append(" " * GAP + "lately")
    line.pad_right(columns - line.cell_len)
    return line


def _entry(entry: DumpEntry, history: Sequence[int] | deque[int], layout: Layout, *, plain: bool) -> Text:
    line = Text(_beginning(entry.name, layout.name))
    line.truncate(layout.name, overflow="crop" if plain else "ellipsis", pad=True)
    limit, filled = limit_of(entry), share(entry)
    values = {"in use": _number(entry.consumption), "limit": "-" if limit is None else _number(limit)}
    values["peak"] = _number(entry.peak)
    values["share"] = f"{'' if limit else '~'}{_percent(filled)}"
    heat = "cyan" if limit is None else _heat(filled)
    styles = {"in use": "bold", "share": heat}
    for column in layout.numbers:
        style = "dim" if values[column.title] == "-" else styles.get(column.title, "none")
        line.append(values[column.title].rjust(column.width + GAP), style)
    if layout.bar:
        line.append(" " * GAP).append_text(_bar(filled, layout.bar, heat, plain=plain, known=limit is not None))
        line.append(values["share"].rjust(PERCENT_WIDTH + GAP), heat)
    if layout.history:
        drawn = sparkline(history, limit or entry.peak, layout.history, plain=plain)
        line.append(" " * GAP).append(drawn.rjust(layout.history), "cyan")
    return line


def sparkline(values: Sequence[int] | deque[int], full: int, width: int, *, plain: bool) -> str:
    """Draws the last values as bars, relative to the value full. Only the value 0 has the lowest bar."""
    levels = "_.-=+*#" if plain else "▁▂▃▄▅▆▇█"
    most = len(levels) - 1
    return "".join(
        levels[min(max(value * most // max(full, 1), 1 if value else 0), most)] for value in list(values)[-width:]
    )


# ---- other pages ----

WIDTHS = {
    "id": 16, "connection": 16, "flow": 19, "job": 20, "type": 6, "limits": 11, "protocol": 9,
    "tls": 7,
    # Of who waits: with these, all but the peer fits on 120 columns.
    "position": 8, "amount": 7, "age_seconds": 6, "left": 7, "client": 12, "key": 10, "priority": 8, "weight": 6,
    "kind": 7, "items": 5,
}  # fmt: skip
NUMBER_WIDTH = 9
EMPTY = {
    CONNECTIONS: "no connections",
    HOLDERS: "no holders",
    HOLDINGS: "the connection holds nothing",
    QUEUE: "nobody waits",
    WAITS: "the connection waits for nothing",
}


def _page(what: Shown, columns: int, room: int, *, plain: bool) -> list[Text]:
    """Draws the rows of any page except the counters: those around the cursor that fit."""
    state, told = what.state, what.told
    link = "of" if state.table is None else "by"
    about = Text(f"{state.page} {link} {_beginning(state.name, columns)}" if state.name else state.page, "bold")
    if told is None or (told.page, told.name) != (state.page, state.name):
        return [about]
    chosen = [each for each in told.columns if not each.detail]
    if any(each.name == "client" for each in chosen):  # the name of a client says more than its address
        chosen.sort(key=lambda each: each.name == "peer")
    fields, flexible = _fitting(chosen, columns, state.name.decode() if state.table else None)
    selected = "connection" if state.page in (HOLDERS, QUEUE) else next((each.name for each in told.columns), "")
    state.cursor.settle([str(row[selected]) for row in told.rows], room - 2)
    heading = _row([each.title or each.name for each in fields], fields, flexible, plain=plain)
    heading.stylize("reverse")
    heading.pad_right(columns - heading.cell_len)
    if not told.rows:
        empty = told.problem or EMPTY.get(state.page, "the table is empty")
        return [about, heading, Text(empty, "bold red" if told.problem else "dim")]
    lines = []
    for at, row in enumerate(told.rows[state.cursor.top : state.cursor.top + state.cursor.room], state.cursor.top):
        texts = [cell(each, value, 0) for each, value in zip(fields, listed(fields, row), strict=True)]
        lines.append(_row(texts, fields, flexible, plain=plain))
        if at == state.cursor.index:
            lines[-1].stylize("reverse")
    return [about, heading, *lines]


def _fitting(fields: Sequence[Field], columns: int, order: str | None) -> tuple[Sequence[Field], int]:
    """Returns the fields that fit, and the width for fields without a fixed width, such as the peer or a name.

    The last fields are left out first, but not the field by which the rows are sorted.
    """
    while True:
        widths = [_width(each) for each in fields]
        left = columns - sum(widths) - GAP * (len(fields) - 1)
        if left >= NAME_WIDTH_MIN * widths.count(0) or len(fields) <= 2:
            return fields, max(left // max(widths.count(0), 1), 1)
        last = next(each for each in reversed(fields) if order not in (each.name, each.title))
        fields = [each for each in fields if each is not last]


def _width(field: Field) -> int:
    """Returns the width of a field, or 0 if the field shares the remaining width with others."""
    return WIDTHS.get(field.name, NUMBER_WIDTH if field.kind in RIGHT else 0)


def _row(texts: Sequence[str], fields: Sequence[Field], flexible: int, *, plain: bool) -> Text:
    line = Text()
    for at, (text, each) in enumerate(zip(texts, fields, strict=True)):
        part = Text(text)
        width = _width(each) or flexible
        part.truncate(width, overflow="crop" if plain else "ellipsis")
        room = " " * (width - part.cell_len)
        right = each.kind in RIGHT
        line.append(" " * GAP if at else "").append_text(Text(room) + part if right else part + Text(room))
    return line


# ---- parts of both ----


def _beginning(name: bytes, width: int) -> str:
    """Cuts a name to little more than a column shows. rich would take 0.2 s to cut a name of 65,535 bytes."""
    return shown(name[: LETTER_MAX * (width + 1)])


def _bar(filled: float, width: int, style: str, *, plain: bool, known: bool = True) -> Text:
    """Draws a bar. A share of a known limit and a share of a peak differ in their characters, not only in colour."""
    signs = ("#", "=", "-") if plain else ("━", "┅", "─")
    length = min(round(filled * width), width)
    if filled > 0 and not length:
        length = 1
    if filled < 1 and length == width:
        length = width - 1  # a full bar means that nothing is left
    return Text((signs[0] if known else signs[1]) * length, style).append(signs[2] * (width - length), "bright_black")


def _heat(filled: float) -> str:
    return "red" if filled >= 1 else "yellow" if filled >= NEARLY_FULL else "green"


def _percent(filled: float) -> str:
    """Formats a share of 0 to 1 as a percentage.

    The text is 100 % only if the share is 1, and 0 % only if the share is 0.
    """
    whole = round(filled * 100)
    if filled and not whole:
        return "<1 %"
    return ">99 %" if whole == 100 and filled < 1 else f"{whole:,} %"


def _number(value: int) -> str:
    """Formats a number in at most 9 characters."""
    if value < 10_000_000:
        return count(value)
    number, unit = scaled(value, COUNTS)
    return f"{digits(number)}{unit}"
