"""The parameters of tables, and the values of figures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from counterd.settings import choice, integer
from counterd.tables import ROWS, ROWS_MAX, Figure, Table, name_of_bytes, read_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

READERS: Mapping[str, Any] = {"match": name_of_bytes, "sort": choice("up", "down"), "limit": integer(1, 10)}


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
        ({"limt": "1"}, "unknown parameter 'limt', expected match, sort, limit"),
        ({"limit": "11"}, "limit: 11 is out of range, expected 1 to 10"),
        ({"sort": "left"}, "sort: expected one of up, down, not 'left'"),
        ({"match": "\u20ac"}, "match: expected bytes, percent-encoded"),
        ({"sort": "up", "limit": "1"}, "the parameter match is missing"),
    ],
)
def test_each_wrong_parameter_has_its_message(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_parameters(parameters, READERS, {})


NAMED, MATCHED, NUMBERED = {"name": name_of_bytes}, {"match": name_of_bytes}, {"number": integer(1, 9)}
SORTS = ("up", "down")


@pytest.mark.parametrize(
    ("sorts", "readers", "has_match", "parameters", "expected"),
    [
        (SORTS, {}, True, {}, {"limit": ROWS}),
        (
            SORTS, {}, True, {"match": "a", "sort": "down", "limit": str(ROWS_MAX)},
            {"match": b"a", "sort": 1, "limit": ROWS_MAX},
        ),
        (SORTS, NUMBERED, True, {"number": "7", "sort": "up"}, {"number": 7, "sort": 0, "limit": ROWS}),
        (SORTS, NUMBERED, True, {"x": ""}, "unknown parameter 'x', expected match, number, sort, limit"),
        (SORTS, NUMBERED, False, {"match": ""}, "unknown parameter 'match', expected number, sort, limit"),
        (SORTS, {}, True, {"sort": "left"}, "sort: expected one of up, down, not 'left'"),
        ((), MATCHED, True, {}, {"limit": ROWS}),
        ((), MATCHED, True, {"match": "\xff"}, {"match": b"\xff", "limit": ROWS}),
        ((), NAMED, True, {"name": "a"}, {"name": b"a", "limit": ROWS_MAX}),
        ((), NAMED, True, {}, "the parameter name is missing"),
        ((), NAMED, True, {"match": "a"}, "unknown parameter 'match', expected name, limit"),
        ((), NAMED, True, {"name": "a", "limit": str(ROWS_MAX + 1)}, "limit: 1001 is out of range, expected 1 to 1000"),
    ],
)  # fmt: skip
def test_a_walk_gets_the_parameters_of_its_table(
    sorts: tuple[str, ...], readers: Any, has_match: bool, parameters: dict[str, str], expected: dict[str, Any] | str
) -> None:
    """Only those that are given, but always a limit."""
    given: list[Any] = []
    table = Table("a", "A.", (), sorts, lambda store, **values: given.append((store, values)), readers, has_match)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            table.open("store", parameters)
        assert given == []
    else:
        table.open("store", parameters)
        assert given == [("store", expected)]
