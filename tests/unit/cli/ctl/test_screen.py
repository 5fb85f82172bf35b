"""The model and the screen of `counterctl top`: rates from samples, keys, and the drawing at any size."""

from __future__ import annotations

import io
import re
from collections import deque
from typing import Any

import pytest
from rich.console import Console

from counterd.cli.ctl import screen
from counterd.cli.ctl.admin import WHO, Table, columns_of
from counterd.cli.ctl.common import shown
from counterd.cli.ctl.output import RIGHT, Column, Kind
from counterd.cli.ctl.screen import (
    HISTORY_WIDTH_MAX,
    KEPT_MAX,
    Sample,
    Shown,
    Told,
    draw,
    rates,
    remember,
    sparkline,
    summary,
)
from counterd.cli.ctl.top_state import CONNECTIONS, HOLDERS, HOLDINGS, QUEUE, SORTS, WAITS, Order, TopState
from counterd.control import inspector
from counterd.protocols.counter._tables import TABLES
from unit.cli.ctl.test_top_state import ENTRIES, Entry, names, pressed

FIGURES = {
    "objects": "4", "curr_connections": "3", "total_connections": "1200", "command:noop": "0",
    "command:acquire": "100", "command:dump": "1", "version": "0.1.0", "uptime": "93784", "connections_max": "1024",
    "rejected:max_connections": "7", "bytes_in": "1000", "bytes_out": "500", "buckets": "1000", "records": "850",
    "holdings": "5", "holdings_max": "2000000", "refused:not_found": "0", "refused:not_available": "40",
}  # fmt: skip
LATER = FIGURES | {"command:acquire": "300", "refused:not_available": "60", "bytes_in": "21000"}


# ---- samples ----


def test_rates_are_since_the_last_sample() -> None:
    found = rates(Sample(10.0, FIGURES), Sample(12.0, LATER), "command:")
    assert found == {"noop": 0.0, "acquire": 100.0, "dump": 0.0}


def test_no_rates_without_an_earlier_sample_or_across_a_restart() -> None:
    assert rates(None, Sample(12.0, LATER), "command:") == {}
    assert rates(Sample(12.0, LATER), Sample(14.0, FIGURES), "command:") == {}
    assert rates(Sample(12.0, FIGURES), Sample(12.0, LATER), "command:") == {}
    assert rates(Sample(12.0, {}), Sample(14.0, LATER), "command:") == {}


def test_few_counters_are_all_kept() -> None:
    found = summary(ENTRIES, Order(filter="l"), 1.0, 0.5)  # type: ignore[arg-type]
    assert (found.total, found.matching, found.filter, found.entries) == (4, 2, "l", ENTRIES)


def test_of_many_counters_the_first_in_order_are_kept() -> None:
    many = [Entry(b"%d" % number, number, number) for number in range(3 * KEPT_MAX)]
    found = summary(many, Order(), 1.0, 0.5)  # type: ignore[arg-type]
    assert (found.total, found.matching, len(found.entries)) == (3 * KEPT_MAX, 3 * KEPT_MAX, KEPT_MAX)
    assert found.entries[0].consumption == 3 * KEPT_MAX - 1
    found = summary(many, Order(filter="77"), 1.0, 0.5)  # type: ignore[arg-type]
    assert found.matching == sum(b"77" in entry.name for entry in many) < KEPT_MAX
    assert len(names(Order(filter="77").choose(found.entries, KEPT_MAX))) == found.matching  # type: ignore[arg-type]
    assert names(Order().choose(found.entries, 1)) == [b"%d" % (3 * KEPT_MAX - 1)], "and what the filter hides"  # type: ignore[arg-type]
    assert len(set(names(found.entries))) == len(found.entries)  # type: ignore[arg-type]


# ---- drawing ----


def drawn(what: Shown, columns: int = 80, rows: int = 24, *, plain: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, height=rows)
    console.print(draw(what, columns, rows, plain=plain))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == rows
    assert all(len(line) <= columns for line in lines)
    return [line.rstrip() for line in lines]


def full(*keys: str) -> Shown:
    listing = summary(ENTRIES, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    before, sample = Sample(9.0, FIGURES), Sample(11.0, LATER)
    history = {b"jobs": deque([0, 1, 5, 10]), b"calls": deque([5] * HISTORY_WIDTH_MAX)}
    return Shown("127.0.0.1:11215", pressed(*keys), 11.5, before, sample, listing, history)


def test_the_whole_screen() -> None:
    assert drawn(full()) == [
        "counterd 0.1.0 at 127.0.0.1:11215   up 1 d 02:03:04                    every 1 s",
        "",
        "requests     all          100/s   acquire      100/s   dump           0/s",
        "refused      not available       10.0/s",
        "connections  3 of 1,024   rejected: max connections 7   1,200 since the start",
        "records      ━━━━━━━━━━━━━━━━━───  85 %   850 of 1,000",
        "holdings     ━───────────────────  <1 %   5 of 2,000,000",
        "bytes        in        10,000/s   out            0/s",
        "",
        "name                in use ▼      limit       peak  share              lately",
        "calls                      5          -          5  ┅┅┅┅┅┅┅┅┅  ~100 %  █████████",
        "jobs                       5         10          9  ━━━━─────    50 %       ▁▂▄█",
        "seats                      3          3         40  ━━━━━━━━━   100 %",
        "idle                       0          -          0  ─────────    ~0 %",
        *[""] * 9,
        "4 counters; list 1.5 s old        Enter holders  Tab connections  h help  q quit",
    ]


@pytest.mark.parametrize("columns", [1, 5, 20, 40, 60, 79, 132, 200, 300])
@pytest.mark.parametrize("rows", [1, 2, 5, 10, 25, 60])
@pytest.mark.parametrize("key", ["", "h", "/", " ", "tab"])
def test_the_drawing_fills_any_size_exactly(columns: int, rows: int, key: str) -> None:
    for plain in (False, True):
        drawn(full(key), columns, rows, plain=plain)
        drawn(connected(30), columns, rows, plain=plain)
    drawn(Shown("127.0.0.1:11215", pressed(key)), columns, rows)


BUSY = LATER | {f"command:{name}": "5" for name in ("noop", "get", "release", "stats", "take", "cancel", "who")}
ALL = "requests refused connections records holdings bytes"


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize(
    ("size", "labels", "figures", "titles"),
    [
        ((40, 16), "requests refused connections", 3, "name in use ▼ share"),
        ((40, 24), ALL, 7, "name in use ▼ share"),
        ((60, 20), "requests refused connections records holdings", 5, "name in use ▼ limit share"),
        ((80, 24), ALL, 7, "name in use ▼ limit peak share lately"),
        ((160, 50), ALL, 7, "name in use ▼ limit peak share lately"),
    ],
)
def test_the_list_has_at_least_half_of_the_rows(
    size: tuple[int, int], labels: str, figures: int, titles: str, count: int
) -> None:
    what = full()
    entries = [Entry(b"c%04d" % number, 5, 9, 10) for number in range(count)]
    what.sample = Sample(11.0, BUSY)
    what.listing = summary(entries, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    lines = drawn(what, *size)
    heading = next(at for at, line in enumerate(lines) if line.startswith("name"))
    assert " ".join(lines[heading].split()) == titles
    assert " ".join(line.split()[0] for line in lines[2 : heading - 1] if not line.startswith(" ")) == labels
    assert heading == 2 + figures + 1
    room = size[1] - 2 - heading
    assert room >= size[1] / 2
    names = [line.split()[0] for line in lines[heading + 1 : -2] if line]
    assert names == [f"c{number:04}" for number in range(min(count, room - 1))]
    what.state.press("tab")
    what.told = connected(30).told
    assert drawn(what, *size)[heading] == "connections"


def test_a_small_screen() -> None:
    assert drawn(full(), 40, 16) == [
        "127.0.0.1:11215                every 1 s",
        "",
        "requests     all          100/s",
        "refused      not available       10.0/s",
        "connections  3 of 1,024",
        "",
        "name                    in use ▼   share",
        "calls                          5  ~100 %",
        "jobs                           5    50 %",
        "seats                          3   100 %",
        "idle                           0    ~0 %",
        *[""] * 4,
        "4 counters; list 1.5 s …  h help  q quit",
    ]


def test_the_title_leaves_out_the_uptime_first_then_the_version() -> None:
    title = "counterd 0.1.0 at 127.0.0.1:11215"
    assert drawn(full(), 62)[0] == f"{title}   up 1 d 02:03:04  every 1 s"
    assert drawn(full(), 61)[0] == f"{title}                   every 1 s"
    assert drawn(full(), 43)[0] == "127.0.0.1:11215                   every 1 s"
    assert drawn(full(" "), 40)[0].endswith("paused")


def test_a_very_narrow_screen_shows_names_and_consumption() -> None:
    assert any(line.split() == ["jobs", "5"] for line in drawn(full(), 34))


def test_sixty_columns_show_the_share_and_the_keys() -> None:
    lines = drawn(full(), 60)
    assert "name                   in use ▼      limit  share" in lines
    assert any(line.split() == ["jobs", "5", "10", "━━━━────", "50", "%"] for line in lines)
    assert lines[-1].endswith("h help  q quit")
    assert drawn(full(), 30)[-1].endswith("h help  q quit")
    assert drawn(full(), 100)[-1].endswith("Enter holders  Tab connections  / filter  s sort  h help  q quit")


# ---- the cursor, and what was lately --------------------------------------------------------------------------------


def reversed_lines(what: Shown, rows: int = 24) -> list[str]:
    """The highlighted lines: the heading, and the row of the cursor."""
    console = Console(file=io.StringIO(), width=80, height=rows, force_terminal=True, color_system="standard")
    console.print(draw(what, 80, rows))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    found = (line for line in lines if re.search(r"\x1b\[[0-9;]*\b7[;m]", line))
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).split()[0] for line in found]


def test_the_list_scrolls_with_the_cursor() -> None:
    what = full()
    many = [Entry(b"c%02d" % number, 100 - number, 100) for number in range(60)]
    what.listing = summary(many, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    assert reversed_lines(what) == ["name", "c00"]
    for _ in range(30):
        what.state.press("down")
    assert reversed_lines(what) == ["name", "c30"]
    names = [line.split()[0] for line in drawn(what) if line.startswith("c") and line[1].isdigit()]
    assert names[-1] == "c30"
    what.state.press("end")
    assert reversed_lines(what) == ["name", "c59"]
    what.state.press("home")
    assert reversed_lines(what) == ["name", "c00"]


def test_a_sparkline_is_drawn_to_the_given_scale() -> None:
    assert sparkline([0, 1, 50, 99, 100, 250], 100, 9, plain=False) == "▁▂▄▇██"
    assert sparkline([0, 1, 50, 99, 100, 250], 100, 4, plain=True) == "=*##"
    assert sparkline([3, 0], 0, 9, plain=False) == "█▁"
    assert sparkline((), 5, 9, plain=False) == ""


def test_the_history_keeps_listed_counters_and_is_bounded() -> None:
    history: dict[bytes, deque[int]] = {}
    for number in range(HISTORY_WIDTH_MAX + 5):
        history = remember(history, summary([Entry(b"a", number, 9), Entry(b"b", 1, 1)], Order(), 1.0, 0.1))  # type: ignore[list-item]
    assert list(history[b"a"]) == list(range(5, HISTORY_WIDTH_MAX + 5))
    assert set(remember(history, summary([Entry(b"b", 1, 1)], Order(), 1.0, 0.1))) == {b"b"}  # type: ignore[list-item]


AMOUNT, AGE = Column("amount", Kind.NUMBER), Column("age_seconds", Kind.SPAN, "age")
CONNECTION, PEER = Column("connection", nothing="gone"), Column("peer")
HELD = [Column("name", Kind.BYTES), AMOUNT, AGE]
HOLDER = [CONNECTION, PEER, AMOUNT, AGE]
TUBE_COLUMNS = [
    Column("tube", Kind.BYTES),
    *(Column(name, Kind.NUMBER) for name in ("ready", "reserved", "delayed", "buried", "waiting")),
    *(Column(name, Kind.SPAN) for name in ("oldest", "queued")),
]
TOKEN_COLUMNS = [
    Column("token"),
    Column("flow"),
    Column("count", Kind.NUMBER),
    *(CONNECTION, PEER, Column("held", Kind.SPAN), Column("left", Kind.SPAN), Column("kept", Kind.NUMBER)),
]
PAGES = {"tubes": TUBE_COLUMNS, "tokens": TOKEN_COLUMNS}


# ---- other pages ----------------------------------------------------------------------------------------------------


CONNECTION_COLUMNS = [
    Column("id"), Column("peer"), Column("holdings", Kind.NUMBER), Column("requests", Kind.NUMBER), AGE,
    Column("secret", detail=True), Column("idle_seconds", Kind.SPAN, "idle"), Column("protocol"),
]  # fmt: skip


def connected(count: int, total: int | None = 30) -> Shown:
    what = full("tab")
    rows = [
        {"id": f"counter-{at}-12", "peer": "127.0.0.1:40530", "holdings": at, "requests": 1_234_567,
         "age_seconds": 59.0, "secret": "detail", "idle_seconds": 1.0, "protocol": "counter"}
        for at in range(count)
    ]  # fmt: skip
    what.told = Told(CONNECTIONS, b"", rows, total, columns=CONNECTION_COLUMNS)
    return what


def test_the_page_of_connections() -> None:
    what = connected(30)
    lines = drawn(what)
    at = lines.index("connections")
    assert lines[at + 1].split() == ["id", "peer", "holdings", "requests", "age", "idle"]
    assert lines[at + 2].split() == ["counter-0-12", "127.0.0.1:40530", "0", "1.23M", "59", "s", "1", "s"]
    hint = "Enter holdings  k kill  Tab next  h help  q quit"
    assert lines[-1] == "30 connections" + " " * (80 - 14 - len(hint)) + hint
    assert drawn(connected(30, None))[-1].startswith("the first 30 connections ")
    assert "protocol" in "\n".join(drawn(what, 120))
    assert drawn(connected(0, 0))[at + 2] == "no connections"
    what.state.press("down")
    assert reversed_lines(what) == ["id", "counter-1-12"]


def test_a_kill_needs_a_confirmation() -> None:
    what = connected(3)
    drawn(what)
    what.state.press("k")
    assert drawn(what)[-1] == "close counter-0-12 and give back what it holds? y: yes; any other key: no"
    what.state.press("y")
    assert what.state.kills == ["counter-0-12"]
    what.state.note = "ended counter-0-12"
    assert drawn(what)[-1].startswith("ended counter-0-12 ")


def test_the_page_of_holders() -> None:
    what = full()
    drawn(what)
    what.state.press("enter")
    assert drawn(what)[-1].startswith("waiting for the reply of the admin endpoint")
    rows = [
        {"connection": "counter-4-12", "peer": "uid 5, pid\x1b 7", "amount": 2, "age_seconds": 3.2},
        {"connection": "", "peer": "", "amount": 1, "age_seconds": 90},
    ]
    what.told = Told(HOLDERS, b"calls", rows, 2, columns=HOLDER)
    lines = drawn(what)
    at = lines.index("holders of calls")
    assert lines[at + 1].split() == ["connection", "peer", "amount", "age"]
    assert " ".join(lines[at + 2].split()) == r"counter-4-12 uid 5, pid\x1b 7 2 3.20 s"
    assert lines[at + 3].split() == ["gone", "-", "1", "1", "min"]
    assert lines[-1].startswith("2 holders ")
    what.told = Told(HOLDERS, b"jobs", rows, 2)
    assert drawn(what)[-1].startswith("waiting for the reply of the admin endpoint"), "those are of another counter"
    what.told = Told(HOLDERS, b"calls", [], problem="cannot connect to the admin endpoint")
    assert "cannot connect to the admin endpoint" in drawn(what)
    what.told = Told(HOLDERS, b"calls", [])
    assert "no holders" in drawn(what)


@pytest.mark.parametrize(
    ("columns", "row", "lines"),
    [
        (HELD, {"name": b"db\xff\x1b", "amount": 2, "age_seconds": 3.2}, ["name amount age", r"db\xff\x1b 2 3.20 s"]),
        ([column for column in TOKEN_COLUMNS if column not in (CONNECTION, PEER)],
         {"token": "-7", "flow": "103", "count": 3, "held": 1, "left": -1, "kept": 0},
         ["token flow count held left kept", "-7 103 3 1 s -1 s 0"]),
        ([Column("job"), Column("tube", Kind.BYTES), AGE, Column("left", Kind.SPAN)],
         {"job": "18446744073709551615", "tube": b"mail", "age_seconds": 1, "left": 59},
         ["job tube age left", "18446744073709551615 mail 1 s 59 s"]),
    ],
)  # fmt: skip
def test_the_page_of_holdings(columns: list[Column], row: dict[str, object], lines: list[str]) -> None:
    connection = "counter-4-12"
    what = connected(3)
    drawn(what)
    what.state.cursor.rows = [connection]
    what.state.press("enter")
    assert drawn(what)[-1].startswith("waiting for the reply of the admin endpoint")
    what.told = Told(HOLDINGS, connection.encode(), [row], 2, columns=columns)
    found = drawn(what)
    at = found.index(f"holdings of {connection}")
    assert [" ".join(line.split()) for line in found[at + 1 : at + 3]] == lines
    assert found[-1].startswith("2 holdings ")
    what.state.press("k")
    assert drawn(what)[-1].startswith(f"close {connection} and give back")
    what.state.press("n")
    what.told = Told(HOLDINGS, connection.encode(), [])
    assert "the connection holds nothing" in drawn(what)


def test_the_pages_of_waiters_and_waits() -> None:
    what = full()
    drawn(what)
    what.state.press("w")
    queue = [CONNECTION, PEER, Column("position", Kind.NUMBER), Column("left", Kind.SPAN)]
    rows: list[dict[str, Any]] = [
        {"connection": "counter-4-12", "peer": "a:1", "position": 1, "left": 2.5},
        {"connection": "", "peer": "", "position": 2, "left": 3},
    ]
    what.told = Told(QUEUE, what.state.name, rows, 2, columns=queue)
    found = drawn(what)
    at = found.index(f"queue of {what.state.name.decode()}")
    assert found[at + 1].split() == ["connection", "peer", "position", "left"]
    assert found[at + 2].split() == ["counter-4-12", "a:1", "1", "2.50", "s"]
    assert found[-1].startswith("2 waiters ")
    what.state.press("enter")
    what.state.press("w")
    what.told = Told(WAITS, b"counter-4-12", [], 0)
    found = drawn(what)
    assert "waits of counter-4-12" in found
    assert "the connection waits for nothing" in found
    assert found[-1].startswith("0 waits ")


@pytest.mark.parametrize(
    ("page", "columns", "titles"),
    [
        ("waiters", 80, "name amount age left connection client"),
        ("waiters", 120, "name amount age left connection client key priority weight kind items"),
        ("waiters", 140, "name amount age left connection client key priority weight kind items peer"),
        (QUEUE, 80, "position amount age left connection client key"),
        (QUEUE, 120, "position amount age left connection client key priority weight kind items"),
        (QUEUE, 140, "position amount age left connection client key priority weight kind items peer"),
        (WAITS, 80, "name amount age left key priority weight"),
        (WAITS, 120, "name amount age left key priority weight kind items"),
        (HOLDERS, 80, "connection peer amount age name grace"),
    ],
)
def test_the_most_important_columns_of_waiters_come_first(page: str, columns: int, titles: str) -> None:
    table = next(each for each in TABLES if each.name == page)
    asked = columns_of({"columns": inspector.columns(table)})
    row: dict[str, Any] = {each.name: 1 if each.kind in RIGHT else "" for each in asked}
    row.update(name=b"db:main", key=b"tenant", peer="beanstalk")
    what = full()
    what.state.page, what.state.name = page, b"age"
    if page == "waiters":
        what.state.tables = (Table(page, "counter", asked, ["age"], []),)
    if page == WAITS:
        asked = [each for each in asked if each.name not in WHO]
    what.told = Told(page, b"age", [row], 1, columns=asked)
    found = drawn(what, columns)
    at = next(at for at, line in enumerate(found) if line.startswith(page))
    assert found[at + 1].split() == titles.split()
    assert ("connection" in titles) == ("beanstalk" in found[at + 2]), "in place of the connection's id"


def test_plain_mode_uses_only_ascii() -> None:
    what = full("s", "r")
    lines = drawn(what, plain=True)
    assert all(line.isascii() for line in lines)
    assert any("share ^" in line for line in lines)
    assert any("####-----" in line for line in lines)
    assert any("=========" in line for line in lines)


@pytest.mark.parametrize("sort", SORTS)
def test_the_sorted_column_is_marked(sort: str) -> None:
    keys = ["s"] * SORTS.index(sort)
    assert f"{sort} {'▲' if sort == 'name' else '▼'}" in "\n".join(drawn(full(*keys)))
    assert f"{sort} {'▼' if sort == 'name' else '▲'}" in "\n".join(drawn(full(*keys, "r")))


def test_names_cannot_control_the_terminal() -> None:
    what = full()
    entries = [Entry(b"a\x1b[2J\n", 3, 3), Entry(b"[red]x[/nonsense]", 2, 2), Entry("日本".encode() * 30, 1, 1)]
    what.listing = summary(entries, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    text = "\n".join(drawn(what))
    assert r"a\x1b[2J\x0a " in text
    assert "[red]x[/nonsense] " in text
    assert "日 … " in text or "本… " in text, "cut at the end of a letter"


def test_only_the_beginning_of_long_names_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting one of 65,535 bytes took 0.2 s, so a screen full of them stood still for seconds and showed no list."""
    looked: list[int] = []

    def counting(name: bytes) -> str:
        looked.append(len(name))
        return shown(name)

    monkeypatch.setattr(screen, "shown", counting)
    what = full()
    entries = [Entry(b"\x00" * 65_535, 3, 3), Entry("日".encode() * 21_845, 2, 2), Entry(b"x" * 65_535, 1, 1)]
    what.listing = summary(entries, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    lines = drawn(what)
    assert max(looked) < 200
    assert [line[:4] for line in lines[10:13]] == [r"\x00", "日日日日", "xxxx"]
    assert all("…" in line for line in lines[10:13])


def test_the_filter_limits_the_list() -> None:
    assert drawn(full("/", "j"))[-1] == "filter: j"
    typed = drawn(full("/", "j", "enter"))
    assert typed[-1].startswith("4 counters, 1 with 'j'; list 1.5 s old")
    assert any(line.startswith("jobs") for line in typed)
    assert not any(line.startswith("seats") for line in typed)
    assert "no counter whose name contains 'zz'" in drawn(full("/", "z", "z", "enter"))


def test_an_outdated_count_is_not_shown() -> None:
    what = full("/", "7", "enter")
    many = [Entry(b"%d" % number, number, number) for number in range(2 * KEPT_MAX)]
    what.listing = summary(many, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    assert drawn(what)[-1].startswith("2,000 counters, those with '7'; list")
    what.listing = summary(many, Order(filter="7"), 10.0, 2.0)  # type: ignore[arg-type]
    assert drawn(what, 100)[-1].startswith("2,000 counters, 542 with '7'; list 1.5 s old, took 2.0 s")


def test_a_problem_is_shown_on_a_line_of_its_own() -> None:
    what = full()
    before = drawn(what)
    what.problem = "lost the connection"
    after = drawn(what)
    assert after[1] == "no answer: lost the connection"
    assert [*after[:1], *after[2:]] == [*before[:1], *before[2:]]


def test_the_screen_before_the_first_sample() -> None:
    lines = drawn(Shown("/run/counterd.sock", TopState()))
    assert lines[0].startswith("/run/counterd.sock ")
    assert lines[-1].startswith("no list of counters yet")


def test_rates_are_unknown_after_one_sample() -> None:
    what = full()
    what.before = None
    assert "requests     all              -   acquire          -   dump             -" in drawn(what)


def test_a_server_with_fewer_figures() -> None:
    """The reference's fifteen figures."""
    what = full()
    figures = {"objects": "1", "curr_connections": "1", "total_connections": "2", "command:noop": "1"}
    what.before, what.sample = None, Sample(11.0, figures)
    lines = drawn(what)
    assert lines[0].startswith("127.0.0.1:11215 ")
    assert "connections  1   2 since the start" in lines
    assert "objects      1" in lines
    assert not any(line.startswith(("refused", "bytes", "records")) for line in lines)


def test_pause_and_help_are_shown() -> None:
    assert drawn(full(" "))[0].endswith("paused")
    text = "\n".join(drawn(full("h")))
    assert "quit" in text
    assert "seats" not in text


def test_large_numbers_keep_to_their_columns() -> None:
    what = full()
    what.listing = summary([Entry(b"huge", 4_000_000_000, 9_999_999, 4_294_967_295)], Order(), 10.0, 0.1)  # type: ignore[arg-type]
    assert any("huge" in line and "    4.00G      4.29G  9,999,999  " in line for line in drawn(what))


def test_bars_show_full_and_nearly_empty_correctly() -> None:
    what = full()
    nearly = [Entry(b"a", 999, 999, 1000), Entry(b"b", 1, 1, 1000), Entry(b"c", 11, 11, 10)]
    what.listing = summary(nearly, Order("name"), 10.0, 0.1)  # type: ignore[arg-type]
    text = "\n".join(drawn(what))
    assert "━━━━━━━━─   >99 %" in text
    assert "━────────    <1 %" in text
    assert "━━━━━━━━━   110 %" in text


TUBE = {
    "tube": b"mail\xff", "ready": 1_234_567, "reserved": 2, "delayed": 3, "buried": 4, "waiting": 0, "oldest": 90,
    "queued": 2,
}  # fmt: skip
TOKEN = {
    "token": "-7", "flow": "103", "count": 3, "connection": "", "peer": "", "held": 1, "left": -1, "kept": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("page", "order", "rows", "columns", "lines"),
    [
        ("tubes", "ready", [TUBE], 120,
         ["tubes by ready", "tube ready reserved delayed buried waiting oldest queued",
          r"mail\xff 1.23M 2 3 4 0 1 min 2 s"]),
        ("tubes", "oldest", [TUBE], 60,
         ["tubes by oldest", "tube ready reserved delayed oldest", r"mail\xff 1.23M 2 3 1 min"]),
        ("tubes", "ready", [], 80,
         ["tubes by ready", "tube ready reserved delayed buried waiting", "the table is empty"]),
        ("tokens", "held", [TOKEN], 120,
         ["tokens by held", "token flow count connection peer held left kept", "-7 103 3 gone - 1 s -1 s 0"]),
    ],
)  # fmt: skip
def test_the_pages_of_other_protocols(
    page: str, order: str, rows: list[dict[str, object]], columns: int, lines: list[str]
) -> None:
    what = full()
    what.state.tables = (Table(page, "other", PAGES[page], ["ready", "oldest", "held"], []),)
    what.state.page, what.state.name = page, order.encode()
    assert drawn(what, columns)[-1].startswith("waiting for the reply of the admin endpoint")
    what.told = Told(page, order.encode(), rows, len(rows), columns=PAGES[page])
    found = drawn(what, columns)
    at = found.index(lines[0])
    assert [" ".join(line.split()) for line in found[at : at + 3]] == lines
    assert found[-1].startswith(f"{len(rows)} {page if not rows else page[:-1]} ")
    assert "s sort  Tab next" in found[-1]
    what.told = Told(page, order.encode(), [], problem="there is no such table")
    assert drawn(what, columns)[at + 2] == "there is no such table"
