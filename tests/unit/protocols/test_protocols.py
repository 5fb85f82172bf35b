"""What rooms register: that it fits what their stores tell, and the parameters of tables."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from counterd.protocols import Figure, Room, Table, check_tables, find_rooms, name_of_bytes, read_parameters
from counterd.settings import choice, integer, settings_of

ROOMS = find_rooms()
READERS = {"match": name_of_bytes, "sort": choice("up", "down"), "limit": integer(1, 10)}


def store_of(room: Room) -> Any:
    return room.make_store(room.settings(), dict, 0)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_figures_are_in_the_snapshot_and_named_as_metrics_are(room: Room) -> None:
    snapshot = store_of(room).snapshot()
    assert room.figures
    assert len({(figure.name, *figure.labels.items()) for figure in room.figures}) == len(room.figures)
    for figure in room.figures:
        assert {figure.key, figure.over or figure.key} <= snapshot.keys()
        assert isinstance(figure.value(snapshot), (int, float))
        assert re.fullmatch(r"[a-z_]+", figure.name)
        assert figure.name.endswith("_total") == (figure.kind == "counter")
        assert figure.help.endswith(".")
        alike = [other for other in room.figures if other.name == figure.name]
        assert {(other.kind, other.help, *other.labels) for other in alike} == {
            (figure.kind, figure.help, *figure.labels)
        }


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_tables_open_with_every_sort_and_refuse_what_they_do_not_know(room: Room) -> None:
    store = store_of(room)
    required = {"holders": {"name": "a"}}
    assert room.tables
    for table in room.tables:
        assert re.fullmatch(r"[a-z]+", table.name)
        given = required.get(table.name, {})
        for parameters in ({}, *({"sort": sort} for sort in table.sorts)):
            walk = table.open(store, given | parameters)
            while not walk.step():
                pass
            assert (walk.rows(), walk.total) == ([], 0)
        for wrong in ({"sort": "wrong"}, {"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"other": "1"}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
                table.open(store, given | wrong)
        if given:
            with pytest.raises(ValueError, match="the parameter name is missing"):
                table.open(store, {})


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_what_comes_from_outside_is_named_by_settings_of_the_room(room: Room) -> None:
    settings = {setting.key: setting for setting in settings_of(room.settings, f"{room.name}.")}
    for key in (*room.files, *room.extensions):
        assert settings[key].default == ""
    assert all(settings[key].reload for key in room.files)
    assert not any(settings[key].reload for key in room.extensions)


def test_a_figure_can_be_a_part_of_another() -> None:
    assert Figure("a", "a", "gauge", "A.").value({"a": 3, "b": 4}) == 3
    assert Figure("a", "a", "gauge", "A.", over="b").value({"a": 3, "b": 4}) == 0.75


def test_parameters_are_read_and_have_defaults() -> None:
    assert read_parameters({}, READERS, {"match": b"", "sort": "up", "limit": 3}) == {
        "match": b"",
        "sort": "up",
        "limit": 3,
    }
    assert read_parameters({"match": "\0\xff", "sort": "down", "limit": "10"}, READERS, {}) == {
        "match": b"\0\xff",
        "sort": "down",
        "limit": 10,
    }


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"limt": "1"}, "there is no parameter 'limt', only match, sort, limit"),
        ({"limit": "11"}, "limit: 11 is out of range, expected 1 to 10"),
        ({"sort": "left"}, "sort: expected one of up, down, not 'left'"),
        ({"match": "\u20ac"}, "match: expected bytes, percent-encoded"),
        ({"sort": "up", "limit": "1"}, "the parameter match is missing"),
    ],
)
def test_parameters_that_are_wrong_are_told_apart(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_parameters(parameters, READERS, {})


def test_tables_have_names_of_their_own() -> None:
    check_tables(ROOMS)
    table = Table("keys", "", (), (), lambda store, _: store)
    rooms = [dataclasses.replace(ROOMS[0], name=name, tables=(table,)) for name in ("a", "b")]
    with pytest.raises(ValueError, match="both a and b have a table keys"):
        check_tables(tuple(rooms))


def test_what_is_registered_needs_nothing_that_is_compiled() -> None:
    code = "import sys, counterd.protocols as p; p.find_rooms(); sys.exit('counterd._core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
