"""Linked lists keep the order of a Python list after any changes, from both ends, and the audit notices damage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.machine import examples
from native import load

Lists = load("_lists").Lists

RECORDS = 12
FIRST_ONLY, WITH_ENDS = (0, 1), (2, 3)


def made_of(which: int, *numbers: int):
    """Lists, of which one has these records in this order."""
    lists = Lists(RECORDS)
    for number in reversed(numbers):
        lists.push(which, number)
    return lists


def test_zeroed_memory_is_empty_lists():
    lists = Lists(3)
    assert lists.audit() == [0, 0, 0, 0]
    assert [lists.numbers(which) for which in range(4)] == [[], [], [], []]


@pytest.mark.parametrize("which", range(4))
def test_pushed_records_come_first(which: int):
    lists = made_of(which, 3, 1, 2)
    assert lists.numbers(which) == [3, 1, 2]
    assert lists.audit()[which] == 3


def test_appended_records_come_last():
    lists = Lists(3)
    for number in (3, 1, 2):
        lists.append(2, number)
        lists.audit()
    assert lists.numbers(2) == [3, 1, 2]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_any_record_can_be_removed(which: int, order: tuple[int, ...]):
    lists = made_of(which, 1, 2, 3)
    left = [1, 2, 3]
    for number in order:
        lists.remove(which, number)
        left.remove(number)
        assert lists.numbers(which) == left
        assert lists.audit()[which] == len(left)


def test_a_list_that_has_become_empty_can_be_used_again():
    lists = made_of(2, 1)
    lists.remove(2, 1)
    lists.append(2, 2)
    lists.append(2, 1)
    assert lists.numbers(2) == [2, 1]
    assert lists.audit() == [0, 0, 2, 0]


def test_only_the_links_are_written():
    """Records may have any size, with the links anywhere in them."""
    for stride, offset in ((16, 0), (20, 4), (64, 48)):
        lists = Lists(RECORDS, stride=stride, offset=offset)
        for number in range(1, RECORDS + 1):
            lists.push(0, number)
            lists.append(2, number)
        assert lists.audit() == [RECORDS, 0, RECORDS, 0]
        assert lists.numbers(0) == list(reversed(lists.numbers(2)))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    ("number", "what", "value", "said"),
    [
        (0, "first", 2, "2 follows 0, but names 1"),
        (0, "first", 13, "13 is not a record"),
        (1, "prev", 3, "1 follows 0, but names 3"),
        (2, "prev", 0, "2 follows 1, but names 0"),
        (1, "next", 3, "3 follows 1, but names 2"),
        (2, "next", 99, "99 is not a record"),
        (3, "next", 1, "1 follows 3, but names 0"),
        (3, "next", 3, "3 follows 3, but names 2"),
        (3, "next", 2, "2 follows 3, but names 1"),
    ],
)
def test_the_audit_notices_damage(which: int, number: int, what: str, value: int, said: str):
    lists = made_of(which, 1, 2, 3)
    lists.damage(which, number, what, value)
    with pytest.raises(AssertionError, match=said):
        lists.audit()


@pytest.mark.parametrize("which", WITH_ENDS)
@pytest.mark.parametrize(("what", "value"), [("last", 2), ("last", 0), ("first", 0)])
def test_the_audit_notices_a_wrong_end(which: int, what: str, value: int):
    lists = made_of(which, 1, 2, 3)
    lists.damage(which, 0, what, value)
    with pytest.raises(AssertionError, match="the last record is"):
        lists.audit()


class ListsAndLists(RuleBasedStateMachine):
    """Four lists over the same records, beside lists of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = Lists(RECORDS)
        self.models: list[list[int]] = [[], [], [], []]

    def is_free(self, which: int, number: int) -> bool:
        """Whether the record is in no list that uses the same links."""
        return not any(number in self.models[each] for each in (FIRST_ONLY if which in FIRST_ONLY else WITH_ENDS))

    @rule(which=st.integers(0, 3), number=st.integers(1, RECORDS))
    def push(self, which: int, number: int) -> None:
        if self.is_free(which, number):
            self.lists.push(which, number)
            self.models[which].insert(0, number)

    @rule(which=st.sampled_from(WITH_ENDS), number=st.integers(1, RECORDS))
    def append(self, which: int, number: int) -> None:
        if self.is_free(which, number):
            self.lists.append(which, number)
            self.models[which].append(number)

    @rule(which=st.integers(0, 3), place=st.integers(0, RECORDS - 1))
    def remove(self, which: int, place: int) -> None:
        if place < len(self.models[which]):
            self.lists.remove(which, self.models[which].pop(place))

    @invariant()
    def orders_and_lengths_are_those_of_the_models(self) -> None:
        assert self.lists.audit() == [len(model) for model in self.models]
        assert [self.lists.numbers(which) for which in range(4)] == self.models


TestListsAndLists = ListsAndLists.TestCase
TestListsAndLists.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
