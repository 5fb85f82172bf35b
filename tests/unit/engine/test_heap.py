"""Heaps return the first key after any insertions and removals, in bounded steps, compared with a sorted list."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.machine import examples
from native import load

Heaps = load("_heaps").Heaps

RECORDS = 24


def drained(heaps, which: int = 0) -> list[int]:
    """All items of a heap, in its order."""
    numbers = []
    while number := heaps.first(which):
        heaps.remove(which, number)
        numbers.append(number)
    return numbers


def test_an_empty_heap_has_no_first():
    heaps = Heaps(3, 2)
    assert (heaps.first(0), heaps.first(1), heaps.audit()) == (0, 0, [0, 0])


@pytest.mark.parametrize("order", [sorted, lambda keys: sorted(keys, reverse=True), lambda keys: keys])
def test_keys_come_out_in_order(order):
    keys = order(random.Random(7).sample(range(1000), 300))
    heaps = Heaps(300)
    for number, key in enumerate(keys, 1):
        heaps.insert(0, number, key, 0)
        assert heaps.audit() == [number]
    assert [keys[number - 1] for number in drained(heaps)] == sorted(keys)


def test_of_equal_keys_the_lower_serial_comes_first():
    heaps = Heaps(5)
    for number, serial in enumerate((5, 1, 4, 2, 3), 1):
        heaps.insert(0, number, 9, serial)
    assert drained(heaps) == [2, 4, 5, 3, 1]


def test_keys_are_compared_as_64_bits():
    heaps = Heaps(3)
    for number, key in enumerate((2**64 - 1, 2**32, 2**32 - 1), 1):
        heaps.insert(0, number, key, 0)
    assert drained(heaps) == [3, 2, 1]


@pytest.mark.parametrize("count", [1, 2, 1000, 20000])
@pytest.mark.parametrize("rising", [True, False])
def test_the_length_of_a_spine_is_logarithmic(count: int, rising: bool):
    heaps = Heaps(count)
    for number in range(1, count + 1):
        heaps.insert(0, number, number if rising else count - number, 0)
    assert 1 <= heaps.spine() <= math.log2(count + 1)
    assert heaps.audit() == [count]


def test_any_node_can_be_removed():
    for removed in range(1, 32):
        heaps = Heaps(31)
        for number in range(1, 32):
            heaps.insert(0, number, number * 7 % 31, 0)
        heaps.remove(0, removed)
        assert heaps.audit() == [30]
        left = sorted((number * 7 % 31, number) for number in range(1, 32) if number != removed)
        assert drained(heaps) == [number for _, number in left]


@pytest.mark.parametrize(
    ("number", "what", "value", "said"),
    [
        (1, "parent", 2, "has a parent"),
        (2, "parent", 0, "is not a child"),
        (2, "key", 0, "its parent"),
        (1, "spine", 9, "spine of 9"),
        (1, "left", 0, "leans"),
        (1, "left", 99, "is not a child"),
        (1, "right", 2, "twice"),
        (3, "left", 1, "is not a child"),
    ],
)
def test_the_audit_notices_damage(number: int, what: str, value: int, said: str):
    heaps = Heaps(3)
    for node in (1, 2, 3):
        heaps.insert(0, node, node, 0)
    heaps.damage(number, what, value)
    with pytest.raises(AssertionError, match=said):
        heaps.audit()


class HeapsAndLists(RuleBasedStateMachine):
    """Two heaps over the same records, beside two lists that are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.heaps = Heaps(RECORDS, 2)
        self.inside: dict[int, tuple[int, int, int]] = {}

    @rule(which=st.integers(0, 1), number=st.integers(1, RECORDS), key=st.integers(0, 5), serial=st.integers(0, 5))
    def insert(self, which: int, number: int, key: int, serial: int) -> None:
        if number not in self.inside:
            self.heaps.insert(which, number, key, serial)
            self.inside[number] = which, key, serial

    @rule(number=st.integers(1, RECORDS))
    def remove(self, number: int) -> None:
        if number in self.inside:
            self.heaps.remove(self.inside.pop(number)[0], number)

    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        if number := self.heaps.first(which):
            self.heaps.remove(which, number)
            del self.inside[number]

    @invariant()
    def firsts_and_sizes_are_those_of_the_lists(self) -> None:
        for which, count in enumerate(self.heaps.audit()):
            entries = sorted(entry[1:] for entry in self.inside.values() if entry[0] == which)
            assert count == len(entries)
            first = self.heaps.first(which)
            assert self.inside[first][1:] == entries[0] if entries else first == 0


TestHeapsAndLists = HeapsAndLists.TestCase
TestHeapsAndLists.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
