"""The order of waiting Takes: within a key, between queues, and with very many keys."""

from __future__ import annotations

import pytest

from counterd.protocols.counter import PROTOCOL
from counterd.protocols.counter.wire import Permit, Rate, Status
from kit.takes import Desk

FOREVER_MS = 60_000
MOVES = 4  # after which a Take goes before others of its key
KEYS = 1000  # so many that some have the same place in the index


@pytest.fixture
def desk() -> Desk:
    return Desk()


def permit(name: bytes, amount: int = 1, maximum: int = 1) -> Permit:
    return Permit(name, amount, maximum)


def test_within_a_key_the_higher_priority_goes_first(desk: Desk) -> None:
    holder, one = desk.some(2)
    assert holder.acquire(b"a") == Status.NO_ERROR
    low, high, other = (one.take(permit(b"a"), wait_ms=FOREVER_MS, priority=priority) for priority in (0, 2, 1))
    assert holder.release(b"a") == Status.NO_ERROR
    assert [one.has(take) for take in (low, high, other)] == [False, True, False]
    assert one.release(b"a") == Status.NO_ERROR
    assert [one.has(take) for take in (low, high, other)] == [False, True, True]


def test_a_take_does_not_pass_an_older_one_of_its_key_in_another_queue(desk: Desk) -> None:
    """The free amount of b is too small for the older one."""
    holder, one = desk.some(2)
    assert holder.acquire(b"a") == holder.acquire(b"b", 1, 2) == Status.NO_ERROR
    older = one.take(permit(b"b", 2, 2), wait_ms=FOREVER_MS)
    later = one.take(permit(b"a"), permit(b"b", 1, 2), wait_ms=FOREVER_MS)
    assert holder.release(b"a") == Status.NO_ERROR
    assert (one.of(older), one.of(later)) == (None, None)
    assert holder.release(b"b") == Status.NO_ERROR
    assert (one.has(older), one.of(later)) == (True, None)


def test_an_older_take_of_a_key_is_not_passed_in_its_own_queue(desk: Desk) -> None:
    """It would be the first of its key in the queue of the younger one, so it need not move there."""
    holder, one, third = desk.some(3)
    assert holder.acquire(b"a") == holder.acquire(b"b", 1, 2) == Status.NO_ERROR
    older = one.take(permit(b"a"), permit(b"b", 1, 2), wait_ms=FOREVER_MS)
    younger = one.take(permit(b"b", 2, 2), wait_ms=FOREVER_MS)
    behind = third.take(permit(b"a"), wait_ms=FOREVER_MS)
    assert holder.release(b"a") == Status.NO_ERROR
    assert (one.has(older), one.has(younger), third.has(behind)) == (True, False, False)


def test_a_take_that_moved_often_goes_before_older_ones_of_its_key(desk: Desk) -> None:
    holder, one, other = desk.some(3)
    here, there = b"p", b"q"
    assert holder.acquire(here) == holder.acquire(b"r") == Status.NO_ERROR
    older = other.take(permit(b"r"), wait_ms=FOREVER_MS, key=b"k")
    moved = one.take(permit(b"p"), permit(b"q"), permit(b"r"), wait_ms=FOREVER_MS, key=b"k")
    for _ in range(MOVES):
        assert holder.acquire(there) == holder.release(here) == Status.NO_ERROR
        here, there = there, here
    assert holder.release(here) == Status.NO_ERROR
    assert (one.of(moved), other.of(older)) == (None, None)
    assert holder.release(b"r") == Status.NO_ERROR
    assert (one.has(moved), other.of(older)) == (True, None)


def test_very_many_keys_are_kept_apart() -> None:
    desk = Desk(waiters=KEYS)
    desk.store.limit_takes(KEYS, 60)
    holder, one = desk.some(2)
    assert holder.acquire(b"a") == Status.NO_ERROR
    for number in range(KEYS):
        one.take(permit(b"a"), wait_ms=FOREVER_MS, key=b"%d" % number)
    (table,) = (table for table in PROTOCOL.tables() if table.name == "waiters")
    walk = table.open(desk.store, {"limit": str(KEYS)})
    while not walk.step():
        pass
    place = [column.name for column in table.columns].index("key")
    assert {row[place] for row in walk.rows()} == {b"%d" % number for number in range(KEYS)}


def test_rates_use_at_most_half_of_the_records() -> None:
    desk = Desk(buckets=2)
    (one,) = desk.some(1)
    assert one.has(one.take(Rate(b"a", 1, 10, 1_000_000, 5)))
    assert one.of(one.take(Rate(b"b", 1, 10, 1_000_000, 5), permit(b"c"))) == Status.OUT_OF_MEMORY
    assert desk.store.snapshot()["records"] == 1, "nothing was made for the item behind the rate"
    assert one.has(one.take(permit(b"c")))
