"""The parameters of tables, and the values of figures."""

from __future__ import annotations

import re

import pytest

from counterd.listing import ROWS, ROWS_MAX, Figure, name_of_bytes, ranked_parameters, read_parameters
from counterd.settings import choice, integer

READERS = {"match": name_of_bytes, "sort": choice("up", "down"), "limit": integer(1, 10)}


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


def test_a_table_with_an_order_has_defaults() -> None:
    assert ranked_parameters({}, ("up", "down")) == (b"", "up", ROWS)
    given = {"match": "a", "sort": "down", "limit": str(ROWS_MAX)}
    assert ranked_parameters(given, ("up", "down")) == (b"a", "down", ROWS_MAX)
