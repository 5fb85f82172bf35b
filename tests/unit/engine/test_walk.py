"""Walks through a table: which rows, in which order, in which slices. The tests use the counter protocol's table.

Changes between two slices are tested in tests/property/test_tables.py."""

from __future__ import annotations

import random
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from counterd.engine.walk import RankedWalk, percent_encoded
from counterd.protocols.counter import PROTOCOL, wire
from kit.counters import make_store

NAMES_MAX = 4 << 20
(COUNTERS,) = (table for table in PROTOCOL.tables() if table.name == "counters")


def filled(amounts: dict[bytes, int], **options: Any) -> tuple[Any, Any]:
    """A store with these counters, made in this order, and the session that holds them all."""
    store = make_store(len(amounts) + 1, len(amounts) + 1, **options)
    session = store.session()
    for name, amount in amounts.items():
        reply = session.receive(wire.acquire(0, name, amount, 0xFFFFFFFF), 1_000_000_000 * store.held())
        assert reply[2] == 0
    return store, session


def walked(
    store: Any, match: bytes = b"", limit: int = 1000, sort: str = "consumption"
) -> tuple[Any, int, list[bytes]]:
    """The finished walk, the number of its steps, and the names."""
    walk = COUNTERS.walk(store, limit, match=match, sort=COUNTERS.sorts.index(sort))
    steps = 1
    while not walk.step():
        steps += 1
        assert steps < 1000, "it never comes to its end"
    return walk, steps, [row[0] for row in walk.rows()]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 8, 100, 499, 500, 501])
@pytest.mark.parametrize("spread", [1, 3, 1000])
def test_rows_are_sorted_and_equal_ones_ordered_by_record(limit: int, spread: int) -> None:
    chosen = random.Random(limit * spread)
    amounts = {b"%d" % number: chosen.randint(1, spread) for number in range(500)}
    store, _session = filled(amounts)
    walk, _, names = walked(store, limit=limit)
    assert names == sorted(amounts, key=lambda name: -amounts[name])[:limit]
    assert walk.total == 500


@pytest.mark.parametrize("size", [1, 4, 35, 36, 37, 60, 88, 89, 500, 65535])
def test_a_pattern_matches_anywhere_in_a_name(size: int) -> None:
    """Inline, in a chain of blocks, and across their edges; not in the remains of a longer name in its place."""
    name = bytes(random.Random(size).randrange(1, 250) for _ in range(size))
    store, _session = filled({name: 1, b"\xff\xfe": 1, b"\0": 1}, name_memory=1 << 20)
    for start in {0, 1, 20, 27, 28, 29, 86, 87, 88, 89, size // 2, size - 2, size - 1}:
        part = name[max(start, 0) : max(start, 0) + 20]
        if part:
            assert name in walked(store, part)[2]
    assert walked(store, name)[2] == [name]
    assert walked(store, name + b"\xff")[2] == []
    assert walked(store, b"\xff")[2] == [b"\xff\xfe"]
    assert walked(store, b"\0")[2] == [b"\0"]


def test_a_slice_is_bounded_by_records_and_bytes_of_names() -> None:
    amounts = {b"%d" % number: 1 for number in range(30_000)}
    store, session = filled(amounts)
    walk, steps, names = walked(store, limit=10)
    assert (walk.total, steps, names) == (30_000, 3, [b"%d" % number for number in range(10)])
    assert walked(store, b"77", limit=1)[1] > 6
    session.closed(0)
    store, session = filled({b"%d" % digit + b"x" * 65534: 1 for digit in range(9)}, name_memory=1 << 20)
    assert walked(store, b"none")[1] == 10


def test_the_bytes_of_all_names_are_bounded_and_the_first_rows_kept() -> None:
    amounts = {b"%03d" % number + b"x" * 65532: number for number in range(1, 71)}
    store, _session = filled(amounts, name_memory=8 << 20)
    walk, _, names = walked(store)
    assert names == [b"%03d" % number + b"x" * 65532 for number in range(70, 70 - NAMES_MAX // 65535, -1)]
    assert walk.total == 70


def test_a_freed_or_reused_record_is_no_row() -> None:
    """Both at once: the blocks of two names are reused by one, and so is the record of one of the two."""
    names = [b"x%d" % digit + b"-" * 32798 for digit in range(2)]
    store, session = filled({names[0]: 1, names[1]: 1, b"x": 1}, name_memory=2 * 547 * 64)
    walk = COUNTERS.open(store, {"match": "x", "limit": "10", "sort": "limit"})
    assert not walk.step()
    assert walk.total == 2
    for request in (wire.release(0, names[0], 1), wire.release(0, names[1], 1), wire.acquire(0, b"y" * 65535, 1, 1)):
        assert session.receive(request, 10_000_000_000)[2] == 0
    assert (store.snapshot()["records"], store.snapshot()["reclaimed"]) == (2, 2)
    while not walk.step():
        pass
    assert walk.rows() == [(b"x", 1, 0xFFFFFFFF, 1, 0, None)]
    assert walk.total == 3


def test_a_walk_keeps_its_store_alive() -> None:
    store, session = filled({b"a": 3})
    walk = COUNTERS.open(store, {"limit": "1", "sort": "peak"})
    session.closed(0)
    del store, session
    assert walk.step()
    assert walk.rows() == [(b"a", 3, 0xFFFFFFFF, 3, 0, None)]
    assert walk.step()
    assert len(walk.rows()) == 1


def test_arguments_of_a_walk_are_checked() -> None:
    store, _session = filled({b"a": 1})
    with pytest.raises(TypeError):
        COUNTERS.walk(None, 1)
    with pytest.raises(TypeError):
        COUNTERS.walk(store, 1, match=None)
    with pytest.raises(ValueError, match=r"^limit must be at least 1$"):
        COUNTERS.walk(store, 0)
    assert isinstance(COUNTERS.walk(store, 1), RankedWalk)


@pytest.mark.parametrize("name", [b"", b"plain-._~0", bytes(range(256)), b"\xff" * 65_535, b"a/" * 32_767])
def test_names_are_percent_encoded(name: bytes) -> None:
    assert percent_encoded(name) == quote_from_bytes(name, safe="")
