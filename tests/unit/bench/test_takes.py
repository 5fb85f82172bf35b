"""The options of a load of Takes."""

from __future__ import annotations

from typing import Any

import pytest

from counterd.bench.takes import RATE_LIMIT, Items, Take, read_numbers


@pytest.mark.parametrize(
    "text", ["", "permits", "permits=", "permits=0", "permits=17", "permits=9,rates=8", "permits=1,permits=1", "jobs=1",
             "permits=1,", "permits=-1", "permits=1 "]
)  # fmt: skip
def test_invalid_items_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected 1 to 16 items, such as permits=2,rates=2, not "):
        Items.read(text)


def test_items_are_read_and_written() -> None:
    assert Items.read("permits=2,rates=3") == Items.read("rates=3,permits=2") == Items(2, 3)
    assert Items.read("rates=16") == Items(0, 16)
    assert [Items.read(text).text for text in ("rates=0,permits=1", "rates=2")] == ["permits=1", "rates=2"]


def test_each_item_has_a_name_of_its_own() -> None:
    assert Items().names(b"n") == ([b"n"], [])
    assert Items(3, 2).names(b"n") == ([b"n", b"n:1", b"n:2"], [b"n:r0", b"n:r1"])
    assert Items(0, 1).names(b"n") == ([], [b"n:r0"])


@pytest.mark.parametrize("text", ["", ",", "1,", "1,,2", "a", "-1", "12345", "1 2"])
def test_invalid_lists_of_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected numbers such as 1,1,2, not "):
        read_numbers(text)


def test_keys_with_weights_and_priorities() -> None:
    assert read_numbers("1,20,300") == (1, 20, 300)
    assert Take().keys == 0
    weighted, urgent = Take(weights=(1, 5)), Take(priorities=(0, 9, 0))
    assert (weighted.keys, weighted.weight(1), weighted.priority(1)) == (2, 5, 0)
    assert (urgent.keys, urgent.weight(1), urgent.priority(1)) == (3, 1, 9)


def test_the_default_burst_is_the_limit() -> None:
    assert (Take().per_second, Take().units_max) == (RATE_LIMIT, RATE_LIMIT)
    assert (Take(limit=7).units_max, Take(limit=7, burst=3).units_max) == (7, 3)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"wait": -1.0}, "can wait 0 to 1e+06 seconds"),
        ({"wait": 2e6}, "can wait 0 to 1e+06 seconds"),
        ({"wait": float("nan")}, "can wait 0 to 1e+06 seconds"),
        ({"limit": 0}, "limit of a rate must be 1 to 2147483647"),
        ({"limit": 1 << 31}, "limit of a rate must be 1 to 2147483647"),
        ({"burst": 0}, "burst of a rate must be 1 to 4294967295"),
        ({"burst": 1 << 32}, "burst of a rate must be 1 to 4294967295"),
        ({"weights": (1,) * 1001}, "can be 1000 fairness keys, not 1001"),
        ({"weights": (1, 2), "priorities": (1,)}, "2 weights and 1 priorities"),
        ({"weights": (1, 0)}, "a weight must be 1 to 1000"),
        ({"weights": (1001,)}, "a weight must be 1 to 1000"),
        ({"priorities": (0, 256)}, "a priority must be 0 to 255"),
    ],
)
def test_mistakes_are_found(fields: dict[str, Any], text: str) -> None:
    found = [said for wrong, said in Take(**fields).mistakes() if wrong]
    assert text in found[0]


def test_valid_options_have_no_mistakes() -> None:
    for take in (Take(), Take(weights=(1, 1000), priorities=(0, 255)), Take(limit=(1 << 31) - 1, burst=(1 << 32) - 1)):
        assert not [text for wrong, text in take.mistakes() if wrong]


def test_takes_are_described() -> None:
    assert Take().describe() == ["Takes of permits=1"]
    take = Take(wait=2.0, items=Items(1, 1), limit=5, weights=(1, 2))
    assert take.describe() == ["Takes of permits=1,rates=1", "waiting up to 2.00 s", "2 fairness keys"]
    assert take.as_options() == {
        "items": "permits=1,rates=1", "limit": 5, "burst": 5, "weights": "1,2", "priorities": None,
    }  # fmt: skip
    assert Take(priorities=(3, 4)).as_options() == {
        "items": "permits=1", "limit": None, "burst": None, "weights": None, "priorities": "3,4",
    }  # fmt: skip
