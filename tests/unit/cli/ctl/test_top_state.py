"""The state of `counterctl top`: the order of a list, the cursor, the page, and the connection to be killed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from counterd.cli.ctl.admin import Table
from counterd.cli.ctl.top_state import (
    CONNECTIONS,
    COUNTERS,
    HOLDERS,
    HOLDINGS,
    INTERVALS_S,
    QUEUE,
    WAITS,
    Cursor,
    Keys,
    Order,
    TopState,
    share,
)


class Entry(NamedTuple):
    """An entry of a Dump, from a server that tells the limit or does not."""

    name: bytes
    consumption: int
    peak: int
    limit: int | None = None


class OldEntry(NamedTuple):
    """An entry of a Dump, from a client that knows no limits."""

    name: bytes
    consumption: int
    peak: int


ENTRIES = [Entry(b"jobs", 5, 9, 10), Entry(b"calls", 5, 5), Entry(b"seats", 3, 40, 3), Entry(b"idle", 0, 0)]


def names(entries: list[Entry]) -> list[bytes]:
    return [entry.name for entry in entries]


# ---- the order ----


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


def test_equal_counters_are_ordered_by_name() -> None:
    same = [Entry(b"b", 1, 1), Entry(b"c", 1, 1), Entry(b"a", 1, 1)]
    assert names(Order().choose(same, 3)) == names(Order(reverse=True).choose(same, 3)) == [b"a", b"b", b"c"]


def test_the_filter_matches_a_part_of_the_name() -> None:
    assert names(Order(filter="l").choose(ENTRIES, 9)) == [b"calls", b"idle"]
    assert names(Order(filter="ü").choose([Entry("bücher".encode(), 1, 1), *ENTRIES], 9)) == ["bücher".encode()]
    assert not Order(filter="no").choose(ENTRIES, 9)


def test_the_share_is_of_the_limit_or_of_the_peak() -> None:
    assert [share(entry) for entry in ENTRIES] == [0.5, 1.0, 1.0, 0.0]
    assert share(OldEntry(b"a", 2, 4)) == 0.5  # type: ignore[arg-type]
    assert share(Entry(b"a", 2, 2, 0)) == 1.0


# ---- keys ----


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"sq", ["s", "q"]),
        (b"\x1b[C\x1b[D\x1bOC", ["right", "left", "right"]),
        (b"\x1b[1;5C", ["right"]),
        (b"\x1b[3~x", ["x"]),
        (b"\x1b[A\x1bOB\t", ["up", "down", "tab"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\r\n\x7f\x08", ["enter", "enter", "backspace", "backspace"]),
        ("ü€".encode(), ["ü", "€"]),
        (b"\xff", ["\N{REPLACEMENT CHARACTER}"]),
        (b"\x1bq", ["escape", "q"]),
    ],
)
def test_keys_are_read(data: bytes, expected: list[str]) -> None:
    assert Keys().feed(data) == expected
    keys = Keys()
    assert [key for byte in data for key in keys.feed(bytes([byte]))] == expected
    assert not keys.waits


def test_a_lone_escape_is_a_key() -> None:
    keys = Keys()
    assert keys.feed(b"x\x1b") == ["x"]
    assert keys.waits
    assert keys.feed(b"", final=True) == ["escape"]
    assert not keys.waits
    assert keys.feed(b"\x1b[") == []
    assert keys.feed(b"C") == ["right"]


def pressed(*keys: str) -> TopState:
    state = TopState()
    for key in keys:
        state.press(key)
    return state


def test_the_sort_is_chosen() -> None:
    assert pressed("s").order.sort == pressed("right").order.sort == "share"
    assert pressed("left").order.sort == "name"
    assert pressed(*"ssss").order.sort == "in use"
    assert pressed("r").order.reverse
    assert not pressed("r", "r").order.reverse


def test_the_filter_is_typed() -> None:
    state = pressed("/", "d", "q", "backspace", "b")
    assert (state.typed, state.order.filter, state.listed().filter) == ("db", "", "db")
    assert not state.quits
    state.press("enter")
    assert (state.typed, state.order.filter) == (None, "db")
    for key in ("/", "x", "right", "escape"):
        state.press(key)
    assert (state.typed, state.order.filter, state.order.sort) == (None, "db", "in use")


def test_the_interval_has_steps() -> None:
    assert pressed("+").interval == 2.0
    assert pressed("-").interval == 0.5
    assert pressed(*"-" * 20).interval == INTERVALS_S[0]
    assert pressed(*"+" * 20).interval == INTERVALS_S[-1]
    state = TopState(interval=1.5)
    state.press("-")
    assert state.interval == 1.0


def test_pause_help_and_quit() -> None:
    assert pressed(" ").paused
    assert not pressed(" ", " ").paused
    assert pressed("h").helping
    assert pressed("?").helping
    state = pressed("h", "q")
    assert (state.helping, state.quits) == (False, False)
    assert pressed("q").quits


# ---- the cursor and the pages ----


def test_a_cursor_stays_on_its_row_once_it_was_moved() -> None:
    cursor = Cursor()
    cursor.settle([b"a", b"b", b"c"], 2)
    assert (cursor.on, cursor.index) == (b"a", 0)
    cursor.settle([b"x", b"a", b"b"], 2)
    assert cursor.on == b"x", "it has not been moved: the first is what one looks at"
    cursor.press("down")
    cursor.settle([b"x", b"a", b"b"], 2)
    cursor.settle([b"b", b"x", b"a"], 2)
    assert (cursor.on, cursor.index, cursor.top) == (b"a", 2, 1)
    cursor.settle([b"b"], 2)
    assert (cursor.on, cursor.index, cursor.top) == (b"b", 0, 0)
    cursor.settle([], 2)
    assert (cursor.on, cursor.index) == (None, 0)


def test_a_cursor_moves_among_rows_with_the_same_id() -> None:
    """Such as the waits of one connection. Its place among them is remembered."""
    cursor = Cursor()
    rows = ["x", *("a" for _ in range(50)), "b"]
    cursor.settle(rows, 10)
    for index in range(1, 52):
        cursor.press("down")
        cursor.settle(rows, 10)
        assert cursor.index == index
    for _ in range(3):
        cursor.press("up")
        cursor.settle(rows, 10)
    assert (cursor.on, cursor.index) == ("a", 48)
    cursor.settle(["y", *rows], 10)
    assert cursor.index == 49
    cursor.settle(["a", "b", "a", "b"], 10)
    assert cursor.index == 2, "47 with its id were before it, and now there is only one other"
    cursor.settle(["b"], 10)
    assert cursor.index == 0


def test_a_cursor_moves_by_pages_and_to_the_ends() -> None:
    rows = [b"%d" % number for number in range(100)]
    cursor = Cursor()
    cursor.settle(rows, 10)
    for key, index, top in (
        ("page down", 9, 0), ("page down", 18, 9), ("end", 99, 90), ("down", 99, 90), ("page up", 90, 90),
        ("up", 89, 89), ("home", 0, 0), ("up", 0, 0),
    ):  # fmt: skip
        assert cursor.press(key)
        cursor.settle(rows, 10)
        assert (cursor.index, cursor.top) == (index, top), key
    assert not cursor.press("x")
    for key in ("down", "down", "up"):  # typed faster than it is drawn
        cursor.press(key)
    assert cursor.on == b"1"


def on(state: TopState, row: bytes | str) -> TopState:
    state.cursor.settle([row], 5)
    return state


def test_keys_change_the_page() -> None:
    state = pressed("tab")
    assert state.page == CONNECTIONS
    state.press("tab")
    assert state.page == COUNTERS
    state.press("enter")
    assert state.page == COUNTERS, "there is nothing under the cursor"
    on(state, b"db").press("enter")
    assert (state.page, state.name) == (HOLDERS, b"db")
    for key in ("escape", "left", "backspace"):
        assert pressed("tab", key).page == COUNTERS
    on(state, "").press("enter")
    assert state.page == HOLDERS, "a holding that is being given back has no connection"
    on(state, "counter-1-2").press("enter")
    assert (state.page, state.name) == (HOLDINGS, b"counter-1-2")
    on(state, "a name").press("enter")
    assert state.page == HOLDINGS
    state.press("k")
    assert state.doomed == "counter-1-2"
    state.press("n")
    state.press("tab")
    assert (state.page, state.name) == (CONNECTIONS, b"")
    on(state, "counter-1-2").press("enter")
    assert state.page == HOLDINGS
    state.press("escape")
    assert (state.page, state.name) == (COUNTERS, b"")


def test_keys_show_the_waiters() -> None:
    state = pressed("w")
    assert state.page == COUNTERS, "there is nothing under the cursor"
    on(state, b"db").press("w")
    assert (state.page, state.name) == (QUEUE, b"db")
    state.press("w")
    assert (state.page, state.name) == (HOLDERS, b"db")
    state.press("w")
    on(state, "counter-1-2").press("k")
    assert state.doomed == "counter-1-2"
    state.press("n")
    state.press("enter")
    assert (state.page, state.name) == (HOLDINGS, b"counter-1-2")
    state.press("w")
    assert (state.page, state.name) == (WAITS, b"counter-1-2")
    on(state, "a name").press("k")
    assert state.doomed == "counter-1-2"
    state.press("n")
    state.press("w")
    assert state.page == HOLDINGS
    assert pressed("tab", "w").page == CONNECTIONS


def test_tables_of_other_protocols_are_pages_with_an_order() -> None:
    state = pressed("tab")
    state.tables = (
        Table("keys", "one", [], ["value", "ttl"], []),
        Table("tubes", "two", [], ["ready", "oldest", "buried"], []),
    )
    pages = []
    for _ in range(4):
        state.press("tab")
        pages.append((state.page, state.name))
    assert pages == [("keys", b"value"), ("tubes", b"ready"), (COUNTERS, b""), (CONNECTIONS, b"")]
    assert state.table is None
    state.press("tab")
    state.press("tab")
    assert state.table is state.tables[1]
    orders = []
    for key in ("s", "right", "s", "left", "k", "enter", "r"):
        state.press(key)
        orders.append(state.name)
    assert orders == [b"oldest", b"buried", b"ready", b"buried", b"buried", b"buried", b"buried"]
    assert (state.page, state.doomed) == ("tubes", "")
    on(state, "a row").press("s")
    assert state.cursor.rows == (), "whoever sorts sees the first rows"
    state.press("escape")
    assert (state.page, state.name) == (COUNTERS, b"")


def test_a_kill_is_confirmed_with_a_key() -> None:
    state = on(pressed("tab"), "counter-1-2")
    state.press("k")
    assert (state.doomed, state.kills) == ("counter-1-2", [])
    state.press("q")
    assert (state.doomed, state.kills, state.quits) == ("", [], False)
    state.press("k")
    state.press("y")
    assert (state.doomed, state.kills) == ("", ["counter-1-2"])
    on(state, "").press("k")
    assert state.doomed == "", "a holding that is being given back has no connection"
    state = on(pressed(), b"db")
    state.press("k")
    assert (state.doomed, "Enter" in state.note) == ("", True)
    state.press("r")
    assert state.note == ""


def test_sorting_shows_the_first_rows() -> None:
    for key in ("s", "r"):
        state = pressed()
        state.cursor.settle([b"a", b"b"], 5)
        state.press("down")
        assert state.cursor.follows
        state.press(key)
        assert (state.cursor.index, state.cursor.follows) == (0, False)
