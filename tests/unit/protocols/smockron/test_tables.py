"""The smockron protocol's tables: delayed identifiers and domains."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.smockron.engine import Pump, make_store
from counterd.protocols.smockron import PROTOCOL, wire
from counterd.protocols.smockron.wire import SocketType, Status

TABLES = {table.name: table for table in PROTOCOL.tables()}


@pytest.fixture
def bench() -> Pump:
    made = Pump(make_store())
    gate = made.connect_by_name("gate")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    gate.send(
        b"".join(
            wire.accounting(domain, Status.ACCEPTED, identifier, 0)
            for domain, identifier, times in (
                (b"second", b"one", 12), (b"second", b"two", 10), (b"fifty", b"one", 30), (b"day", b"three", 1),
            )
            for _ in range(times)
        )
    )  # fmt: skip
    gate.send(wire.accounting(b"day", Status.DELAYED, b"three", 0, 1_700_000_000_000))
    gate.send(wire.accounting(b"day", Status.REJECTED, b"three", 0))
    return made


def rows(bench: Pump, table: str, **parameters: str) -> tuple[list[tuple[Any, ...]], int]:
    walk = TABLES[table].open(bench.store, parameters)
    while not walk.step():
        pass
    return walk.rows(), walk.total


def test_delayed_identifiers(bench: Pump) -> None:
    three, one, other = (b"three", b"day", 172_800.0), (b"one", b"second", 2.0), (b"one", b"fifty", 0.5)
    assert rows(bench, "throttled") == ([three, one, other], 3)
    assert rows(bench, "throttled", match="on") == ([one, other], 2)
    assert rows(bench, "throttled", limit="1") == ([three], 3)
    bench.advance(600_000_000)
    bench.store.tick(bench.now_ns)  # a table shows the time of the last call
    found, total = rows(bench, "throttled", match="one")
    assert (found, total) == ([(b"one", b"second", 1.4)], 1)


def test_a_row_for_each_domain(bench: Pump) -> None:
    found, total = rows(bench, "domains")
    assert total == 7
    by_name = {row[0]: row[1:] for row in found}
    assert by_name[b"second"] == (1.0, 10.0, 2, 22, 0, 0, 2)
    assert by_name[b"day"] == (86_400.0, 0.0, 1, 1, 1, 1, 2)
    assert by_name[b"fifty"] == (0.05, 1.0, 1, 30, 0, 0, 10)
    assert [row[0] for row in found[:1]] == [b"fifty"]
    bench.happen("changed")
    found, total = rows(bench, "domains", match="da")
    assert (found, total) == ([(b"day", 0.0, 0.0, 1, 1, 1, 1, 2)], 1)


@pytest.mark.parametrize(
    ("sort", "column"), [("told", 7), ("accepted", 4), ("delayed", 5), ("rejected", 6), ("identifiers", 3)]
)
def test_domains_are_sorted(bench: Pump, sort: str, column: int) -> None:
    found, _ = rows(bench, "domains", sort=sort)
    values = [row[column] for row in found]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0


def test_invalid_parameters_are_refused() -> None:
    for table, parameters in (
        ("throttled", {"sort": "told"}),
        ("throttled", {"limit": "0"}),
        ("domains", {"sort": "x"}),
    ):
        with pytest.raises(ValueError, match=r"."):
            TABLES[table].open(make_store(), parameters)
