"""The throttr dialect: requests byte for byte."""

from __future__ import annotations

import pytest

from counterd.bench.dialects.throttr import requests_of, ttl_of
from counterd.bench.plan import Plan, read_work


def test_requests_byte_for_byte() -> None:
    plan = Plan(protocol="throttr", work=read_work("query"), number_type="uint32", ttl=1.5, value_size=3)
    assert requests_of(plan, b"jobs") == {
        "noop": b"\x18",
        "query": b"\x02\x04jobs",
        "update": bytes.fromhex("03 00 01 01000000 04") + b"jobs",
        "lower": bytes.fromhex("03 00 02 01000000 04") + b"jobs",
        "insert": bytes.fromhex("01 00000000 03 dc050000 04") + b"jobs",
        "purge": b"\x04\x04jobs",
        "set": bytes.fromhex("05 06 64000000 04 03000000") + b"jobsvvv",
        "get": b"\x06\x04jobs",
        "fill": bytes.fromhex("01 00000000 06 64000000 04") + b"jobs",
        "clear": b"\x04\x04jobs",
    }


@pytest.mark.parametrize(("number_type", "size"), [("uint8", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8)])
def test_the_size_of_numbers(number_type: str, size: int) -> None:
    plan = Plan(protocol="throttr", work=read_work("query"), number_type=number_type)
    found = requests_of(plan, b"jobs")
    assert [len(found[op]) for op in ("update", "insert", "set")] == [8 + size, 7 + 2 * size, 107 + 2 * size]


@pytest.mark.parametrize(
    ("seconds", "number_type", "expected"),
    [(0.1, "uint16", (3, 100)), (60.0, "uint8", (5, 1)), (7200.0, "uint16", (6, 2)), (90.0, "uint16", (4, 90)),
     (1.5, "uint16", (3, 1500)), (2e-6, "uint8", (2, 2)), (3e-9, "uint64", (1, 3))],
)  # fmt: skip
def test_a_ttl_uses_the_largest_unit_in_which_it_is_whole(
    seconds: float, number_type: str, expected: tuple[int, int]
) -> None:
    plan = Plan(protocol="throttr", work=read_work("insert"), ttl=seconds, number_type=number_type)
    assert ttl_of(plan) == expected
