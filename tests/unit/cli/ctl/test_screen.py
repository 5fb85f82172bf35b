"""What `counterctl top` makes of samples and keys, and what it draws at any size."""

from __future__ import annotations

import io
from typing import NamedTuple

import pytest
from rich.console import Console

from counterd.cli.ctl import screen
from counterd.cli.ctl.common import shown
from counterd.cli.ctl.screen import (
    INTERVALS_S,
    KEPT_MAX,
    SORTS,
    Keys,
    Order,
    Sample,
    Shown,
    View,
    draw,
    rates,
    share,
    summary,
)


class Entry(NamedTuple):
    """As that of a Dump, from a server that tells the limit or does not."""

    name: bytes
    consumption: int
    maximum: int
    limit: int | None = None


class OldEntry(NamedTuple):
    """Of a client that knows no limits."""

    name: bytes
    consumption: int
    maximum: int


ENTRIES = [Entry(b"jobs", 5, 9, 10), Entry(b"calls", 5, 5), Entry(b"seats", 3, 40, 3), Entry(b"idle", 0, 0)]

FIGURES = {
    "objects": "4", "curr_connections": "3", "total_connections": "1200", "command:noop": "0",
    "command:acquire": "100", "command:dump": "1", "version": "0.1.0", "uptime": "93784", "connections_max": "1024",
    "rejected:max_connections": "7", "bytes_in": "1000", "bytes_out": "500", "buckets": "1000", "records": "850",
    "holdings": "5", "holdings_max": "2000000", "refused:not_found": "0", "refused:not_available": "40",
}  # fmt: skip
LATER = FIGURES | {"command:acquire": "300", "refused:not_available": "60", "bytes_in": "21000"}


def names(entries: list[Entry]) -> list[bytes]:
    return [entry.name for entry in entries]


# ---- samples ----


def test_rates_are_since_the_last_sample() -> None:
    found = rates(Sample(10.0, FIGURES), Sample(12.0, LATER), "command:")
    assert found == {"noop": 0.0, "acquire": 100.0, "dump": 0.0}


def test_there_are_no_rates_without_one_before_or_over_a_new_start() -> None:
    assert rates(None, Sample(12.0, LATER), "command:") == {}
    assert rates(Sample(12.0, LATER), Sample(14.0, FIGURES), "command:") == {}
    assert rates(Sample(12.0, FIGURES), Sample(12.0, LATER), "command:") == {}
    assert rates(Sample(12.0, {}), Sample(14.0, LATER), "command:") == {}


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("in use", [b"calls", b"jobs", b"seats", b"idle"]),
        ("share", [b"calls", b"seats", b"jobs", b"idle"]),
        ("peak", [b"seats", b"jobs", b"calls", b"idle"]),
        ("name", [b"calls", b"idle", b"jobs", b"seats"]),
    ],
)
def test_counters_are_sorted(sort: str, expected: list[bytes]) -> None:
    assert names(Order(sort).choose(ENTRIES, 9)) == expected
    assert names(Order(sort).choose(ENTRIES, 2)) == expected[:2]
    turned = names(Order(sort, reverse=True).choose(ENTRIES, 9))
    assert turned[0] == expected[-1]
    assert turned != expected


def test_equal_ones_stay_in_the_order_of_names() -> None:
    same = [Entry(b"b", 1, 1), Entry(b"c", 1, 1), Entry(b"a", 1, 1)]
    assert names(Order().choose(same, 3)) == names(Order(reverse=True).choose(same, 3)) == [b"a", b"b", b"c"]


def test_the_filter_is_a_part_of_the_name() -> None:
    assert names(Order(filter="l").choose(ENTRIES, 9)) == [b"calls", b"idle"]
    assert names(Order(filter="ü").choose([Entry("bücher".encode(), 1, 1), *ENTRIES], 9)) == ["bücher".encode()]
    assert not Order(filter="no").choose(ENTRIES, 9)


def test_the_share_is_of_the_limit_or_of_the_peak() -> None:
    assert [share(entry) for entry in ENTRIES] == [0.5, 1.0, 1.0, 0.0]
    assert share(OldEntry(b"a", 2, 4)) == 0.5  # type: ignore[arg-type]
    assert share(Entry(b"a", 2, 2, 0)) == 1.0


def test_of_few_counters_all_are_kept() -> None:
    found = summary(ENTRIES, Order(filter="l"), 1.0, 0.5)  # type: ignore[arg-type]
    assert (found.total, found.matching, found.filter, found.entries) == (4, 2, "l", ENTRIES)


def test_of_many_those_that_come_first_are_kept() -> None:
    many = [Entry(b"%d" % number, number, number) for number in range(3 * KEPT_MAX)]
    found = summary(many, Order(), 1.0, 0.5)  # type: ignore[arg-type]
    assert (found.total, found.matching, len(found.entries)) == (3 * KEPT_MAX, 3 * KEPT_MAX, KEPT_MAX)
    assert found.entries[0].consumption == 3 * KEPT_MAX - 1
    found = summary(many, Order(filter="77"), 1.0, 0.5)  # type: ignore[arg-type]
    assert found.matching == sum(b"77" in entry.name for entry in many) < KEPT_MAX
    assert len(names(Order(filter="77").choose(found.entries, KEPT_MAX))) == found.matching  # type: ignore[arg-type]
    assert names(Order().choose(found.entries, 1)) == [b"%d" % (3 * KEPT_MAX - 1)], "and what the filter hides"  # type: ignore[arg-type]
    assert len(set(names(found.entries))) == len(found.entries)  # type: ignore[arg-type]


# ---- keys ----


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"sq", ["s", "q"]),
        (b"\x1b[C\x1b[D\x1bOC", ["right", "left", "right"]),
        (b"\x1b[1;5C", ["right"]),
        (b"\x1b[3~x", ["x"]),
        (b"\r\n\x7f\x08", ["enter", "enter", "backspace", "backspace"]),
        ("ü€".encode(), ["ü", "€"]),
        (b"\xff", ["\N{REPLACEMENT CHARACTER}"]),
        (b"\x1bq", ["escape", "q"]),
    ],
)
def test_keys(data: bytes, expected: list[str]) -> None:
    assert Keys().feed(data) == expected
    keys = Keys()
    assert [key for byte in data for key in keys.feed(bytes([byte]))] == expected
    assert not keys.waits


def test_an_escape_is_a_key_once_nothing_follows() -> None:
    keys = Keys()
    assert keys.feed(b"x\x1b") == ["x"]
    assert keys.waits
    assert keys.feed(b"", final=True) == ["escape"]
    assert not keys.waits
    assert keys.feed(b"\x1b[") == []
    assert keys.feed(b"C") == ["right"]


def pressed(*keys: str) -> View:
    view = View()
    for key in keys:
        view.press(key)
    return view


def test_the_sort_is_chosen() -> None:
    assert pressed("s").order.sort == pressed("right").order.sort == "share"
    assert pressed("left").order.sort == "name"
    assert pressed(*"ssss").order.sort == "in use"
    assert pressed("r").order.reverse
    assert not pressed("r", "r").order.reverse


def test_the_filter_is_typed() -> None:
    view = pressed("/", "d", "q", "backspace", "b")
    assert (view.typed, view.order.filter, view.listed().filter) == ("db", "", "db")
    assert not view.quits
    view.press("enter")
    assert (view.typed, view.order.filter) == (None, "db")
    for key in ("/", "x", "right", "escape"):
        view.press(key)
    assert (view.typed, view.order.filter, view.order.sort) == (None, "db", "in use")


def test_the_interval_has_steps() -> None:
    assert pressed("+").interval == 2.0
    assert pressed("-").interval == 0.5
    assert pressed(*"-" * 20).interval == INTERVALS_S[0]
    assert pressed(*"+" * 20).interval == INTERVALS_S[-1]
    view = View(interval=1.5)
    view.press("-")
    assert view.interval == 1.0


def test_pause_help_and_quit() -> None:
    assert pressed(" ").paused
    assert not pressed(" ", " ").paused
    assert pressed("h").helping
    assert pressed("?").helping
    view = pressed("h", "q")
    assert (view.helping, view.quits) == (False, False)
    assert pressed("q").quits


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
    return Shown("127.0.0.1:11215", pressed(*keys), 11.5, before, sample, listing)


def test_the_whole_screen() -> None:
    assert drawn(full()) == [
        "counterd 0.1.0 at 127.0.0.1:11215   up 1 d 02:03:04                    every 1 s",
        "",
        "requests     all          100/s   noop           0/s   acquire      100/s",
        "             dump           0/s",
        "refused      not available       10.0/s",
        "bytes        in        10,000/s   out            0/s",
        "connections  3 of 1,024, 1,200 since the start; rejected: max connections 7",
        "records      ━━━━━━━━━━━━━━━━━───  85 %   850 of 1,000",
        "holdings     ━───────────────────  <1 %   5 of 2,000,000",
        "",
        "name                       in use ▼      limit       peak  share",
        "calls                             5          -          5  ┅┅┅┅┅┅┅┅┅┅┅┅┅  ~100 %",
        "jobs                              5         10          9  ━━━━━━───────    50 %",
        "seats                             3          3         40  ━━━━━━━━━━━━━   100 %",
        "idle                              0          -          0  ─────────────    ~0 %",
        *[""] * 8,
        "4 counters; list 1.5 s old                      / filter  s sort  h help  q quit",
    ]


@pytest.mark.parametrize("columns", [1, 5, 20, 40, 60, 79, 132, 200, 300])
@pytest.mark.parametrize("rows", [1, 2, 5, 10, 25, 60])
@pytest.mark.parametrize("key", ["", "h", "/", " "])
def test_any_size_is_filled_and_not_exceeded(columns: int, rows: int, key: str) -> None:
    for plain in (False, True):
        drawn(full(*key), columns, rows, plain=plain)
    drawn(Shown("127.0.0.1:11215", pressed(*key)), columns, rows)


def test_a_narrow_one_shows_names_and_what_is_in_use() -> None:
    assert any(line.split() == ["jobs", "5"] for line in drawn(full(), 40))


def test_no_sign_but_ascii_where_there_is_nothing_else() -> None:
    what = full("s", "r")
    lines = drawn(what, plain=True)
    assert all(line.isascii() for line in lines)
    assert any("share ^" in line for line in lines)
    assert any("######-------" in line for line in lines)
    assert any("=============" in line for line in lines)


@pytest.mark.parametrize("sort", SORTS)
def test_the_column_that_is_sorted_by_is_marked(sort: str) -> None:
    keys = ["s"] * SORTS.index(sort)
    assert f"{sort} {'▲' if sort == 'name' else '▼'}" in "\n".join(drawn(full(*keys)))
    assert f"{sort} {'▼' if sort == 'name' else '▲'}" in "\n".join(drawn(full(*keys, "r")))


def test_names_do_no_harm() -> None:
    what = full()
    entries = [Entry(b"a\x1b[2J\n", 3, 3), Entry(b"[red]x[/nonsense]", 2, 2), Entry("日本".encode() * 30, 1, 1)]
    what.listing = summary(entries, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    text = "\n".join(drawn(what))
    assert r"a\x1b[2J\x0a " in text
    assert "[red]x[/nonsense] " in text
    assert "日 … " in text or "本… " in text, "cut at the end of a letter"


def test_of_long_names_only_the_beginning_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To cut one of 65,535 bytes took 0.2 s: a screen of them stood still for seconds, and showed no list."""
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
    assert [line[:4] for line in lines[11:14]] == [r"\x00", "日日日日", "xxxx"]
    assert all("…" in line for line in lines[11:14])


def test_what_the_filter_lists() -> None:
    assert drawn(full("/", "j"))[-1] == "filter: j"
    typed = drawn(full("/", "j", "enter"))
    assert typed[-1].startswith("4 counters, 1 with 'j'; list 1.5 s old")
    assert any(line.startswith("jobs") for line in typed)
    assert not any(line.startswith("seats") for line in typed)
    assert "no counter with 'zz'" in drawn(full("/", "z", "z", "enter"))


def test_a_count_that_is_not_known_yet_is_not_shown() -> None:
    what = full("/", "7", "enter")
    many = [Entry(b"%d" % number, number, number) for number in range(2 * KEPT_MAX)]
    what.listing = summary(many, Order(), 10.0, 0.1)  # type: ignore[arg-type]
    assert drawn(what)[-1].startswith("2,000 counters, those with '7'; list")
    what.listing = summary(many, Order(filter="7"), 10.0, 2.0)  # type: ignore[arg-type]
    assert drawn(what, 100)[-1].startswith("2,000 counters, 542 with '7'; list 1.5 s old, took 2.0 s")


def test_a_problem_has_a_line_and_moves_nothing() -> None:
    what = full()
    before = drawn(what)
    what.problem = "lost the connection"
    after = drawn(what)
    assert after[1] == "no answer: lost the connection"
    assert [*after[:1], *after[2:]] == [*before[:1], *before[2:]]


def test_before_anything_is_known() -> None:
    lines = drawn(Shown("/run/counterd.sock", View()))
    assert lines[0].startswith("/run/counterd.sock ")
    assert lines[-1].startswith("no list yet")


def test_rates_are_not_known_after_one_sample() -> None:
    what = full()
    what.before = None
    assert "             dump             -" in drawn(what)


def test_a_server_that_tells_less() -> None:
    """The reference's fifteen figures."""
    what = full()
    figures = {"objects": "1", "curr_connections": "1", "total_connections": "2", "command:noop": "1"}
    what.before, what.sample = None, Sample(11.0, figures)
    lines = drawn(what)
    assert lines[0].startswith("127.0.0.1:11215 ")
    assert "connections  1, 2 since the start" in lines
    assert "objects      1" in lines
    assert not any(line.startswith(("refused", "bytes", "records")) for line in lines)


def test_pause_and_help_are_seen() -> None:
    assert drawn(full(" "))[0].endswith("paused")
    text = "\n".join(drawn(full("h")))
    assert "quit" in text
    assert "seats" not in text


def test_large_numbers_keep_to_their_columns() -> None:
    what = full()
    what.listing = summary([Entry(b"huge", 4_000_000_000, 9_999_999, 4_294_967_295)], Order(), 10.0, 0.1)  # type: ignore[arg-type]
    assert any("huge" in line and "    4.00G      4.29G  9,999,999  " in line for line in drawn(what))


def test_full_is_full_and_something_is_not_nothing() -> None:
    what = full()
    nearly = [Entry(b"a", 999, 999, 1000), Entry(b"b", 1, 1, 1000), Entry(b"c", 11, 11, 10)]
    what.listing = summary(nearly, Order("name"), 10.0, 0.1)  # type: ignore[arg-type]
    text = "\n".join(drawn(what))
    assert "━━━━━━━━━━━━─   >99 %" in text
    assert "━────────────    <1 %" in text
    assert "━━━━━━━━━━━━━   110 %" in text
