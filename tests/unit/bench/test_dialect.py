"""The names in requests, and properties of all dialects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterd.bench.dialect import names_of
from counterd.bench.dialects import DIALECTS
from counterd.bench.plan import Plan, read_work


def test_names_of_numbers_buffers_and_new_keys() -> None:
    plan = Plan()
    assert names_of(plan, 0xF0001234) == {"number": b"nnnnnnnn", "buffer": b"bbbbbbbb", "new": b"i4321000"}
    assert names_of(replace(plan, name_size=11), 0x1234)["new"] == b"i43"
    assert set(names_of(replace(plan, name_size=8), 0x1234).values()) == {b""}


@pytest.mark.parametrize("protocol", [name for name, dialect in DIALECTS.items() if dialect.kind != "jobs"])
def test_requests_of_one_kind_differ_only_in_the_name(protocol: str) -> None:
    """Load processes rely on that."""
    plan = Plan(protocol=protocol, resources=7, work=read_work("noop"))
    requests_of = plan.dialect.requests
    for first, second in zip(requests_of(plan, b"aaaa").values(), requests_of(plan, b"bbbb").values(), strict=True):
        assert first.replace(b"aaaa", b"bbbb") == second
        assert first.count(b"aaaa") <= 1
