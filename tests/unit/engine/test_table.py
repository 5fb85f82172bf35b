"""The table of names: index and name memory, inlined in _core and driven through sessions of the counter protocol."""

from __future__ import annotations

import itertools
import random

import pytest

from counterd._core import siphash
from counterd.protocols.counter import wire
from kit.counters import (
    KEY,
    NO_MEMORY,
    NOT_ACQUIRED,
    NOT_FOUND,
    OK,
    Client,
    acquire_all,
    figures,
    holders_of,
    make_store,
    release_all,
    settle,
)


def home(name: bytes, slots: int) -> int:
    """The slot a name belongs in; slots: of the index, a power of two."""
    return siphash(KEY, name) >> (64 - (slots.bit_length() - 1))


def names_at(slot: int, slots: int, count: int) -> list[bytes]:
    """The first `count` names, shorter than 9 bytes, that belong in a slot."""
    found = (name for name in (b"%d" % number for number in itertools.count()) if home(name, slots) == slot)
    return list(itertools.islice(found, count))


@pytest.fixture(scope="module")
def twins() -> list[tuple[bytes, bytes]]:
    """Pairs of names with the same 32-bit tag: the index cannot tell them apart.

    They differ in names of less than eight bytes; in the first eight bytes, the middle and the last bytes of names
    that are in their record; in the prefix, in a middle block and in the last of longer ones.
    """
    pairs = []
    for template in (
        b"%d", b"%06d" + b"x" * 14, b"x" * 9 + b"%06d" + b"x" * 15, b"x" * 10 + b"%06d", b"x" * 13 + b"%06d",
        b"%06d" + b"x" * 90, b"x" * 100 + b"%06d" + b"x" * 60, b"x" * 160 + b"%06d",
    ):  # fmt: skip
        tags: dict[int, bytes] = {}
        for number in range(200_000):
            name = template % number
            other = tags.setdefault(siphash(KEY, name) >> 32, name)
            if other is not name:
                pairs.append((other, name))
        assert any(len(found) == len(other) == len(template % 100_000) for found, other in pairs)
    return pairs


# ---- the index ------------------------------------------------------------------------------------------------------


def test_every_bucket_can_be_used_whatever_the_hashes() -> None:
    client = Client(make_store(16, 64))
    names = names_at(31, 32, 16)
    for count, name in enumerate(names, 1):
        assert client.acquire(name, count) == OK
        assert figures(client.store, "objects", "conflicts", "longest_probe") == [count, count - 1, count - 1]
    assert client.acquire(b"one more") == NO_MEMORY
    assert [client.get(name) for name in names] == list(range(1, 17))
    assert client.get(names_at(31, 32, 17)[16]) is None


@pytest.mark.parametrize("slots_of_names", [(7, 7, 7, 7), (7, 7, 0, 0), (6, 7, 7, 1), (6, 6, 7, 0), (7, 0, 7, 1)])
def test_removal_moves_later_entries_back_also_around_the_end(slots_of_names: tuple[int, ...]) -> None:
    """In every order of creation and of removal."""
    spare = {slot: iter(names_at(slot, 8, 4)) for slot in set(slots_of_names)}
    names = [next(spare[slot]) for slot in slots_of_names]
    store = make_store(4, 16)
    client = Client(store)
    window = 0
    for created in itertools.permutations(names):
        for removed in itertools.permutations(range(4)):
            acquire_all(client, created)
            for count, place in enumerate(removed, 1):
                assert client.release(created[place]) == OK
                window += 1
                store.begin_window(window)
                settle(store)
                gone = {created[other] for other in removed[:count]}
                there = client.responses(b"".join(wire.get(0, name) for name in names))
                assert [response.status for response in there] == [NOT_FOUND if name in gone else OK for name in names]
            assert figures(store, "records", "conflicts") == [0, 0]


def test_names_with_the_same_tag_are_distinguished(twins: list[tuple[bytes, bytes]]) -> None:
    for first, second in twins:
        store = make_store(4, 8, name_memory=8 * 64)
        one, two = Client(store), Client(store)
        assert one.acquire(first, 3) == OK
        assert two.get(second) is None
        assert two.release(second) == NOT_FOUND
        assert two.acquire(second, 5) == OK
        assert one.acquire(second, 7) == OK
        assert (one.get(first), one.get(second)) == (3, 12)
        assert one.release(first, 4) == NOT_ACQUIRED
        assert two.release(first, 1) == NOT_ACQUIRED
        assert two.release(second, 6) == NOT_ACQUIRED
        assert one.dump() == {first: (3, 3), second: (12, 12)}
        assert one.release(second, 7) == OK
        assert (one.get(first), one.get(second)) == (3, 5)
        assert [amount for _, amount, _ in holders_of(store, second)] == [5]


def test_removing_one_of_two_names_with_the_same_tag_keeps_the_other(twins: list[tuple[bytes, bytes]]) -> None:
    for first, second in (*twins, *((second, first) for first, second in twins)):
        store = make_store(4, 8, name_memory=8 * 64)
        one, two = Client(store), Client(store)
        assert one.acquire(first, 1) == OK
        assert two.acquire(second, 2) == OK
        one.close()
        settle(store)
        store.begin_window(1)
        settle(store)
        assert figures(store, "records", "expired") == [1, 1]
        assert (two.get(first), two.get(second)) == (None, 2)
        assert two.release(second, 2) == OK
        assert two.get(second) == 0


# ---- names ----------------------------------------------------------------------------------------------------------


def test_name_memory_runs_out_and_is_freed() -> None:
    store = make_store(8, 8, name_memory=5 * 64 + 63)
    client = Client(store)
    first, second, third = b"1" * 88, b"2" * 148, b"3" * 208
    assert client.acquire(first) == OK
    assert client.acquire(second) == OK
    assert client.acquire(third) == NO_MEMORY
    assert client.acquire(b"4" * 89) == OK
    assert figures(store, "name_memory", "name_memory_max") == [5 * 64, 5 * 64]
    assert client.acquire(b"5" * 37) == NO_MEMORY
    assert client.acquire(b"5" * 36) == OK
    assert client.acquire(first) == OK
    assert client.get(second) == 1
    assert client.release(second) == OK
    store.begin_window(1)
    settle(store)
    assert store.snapshot()["name_memory"] == 3 * 64
    assert client.acquire(third) == NO_MEMORY
    assert client.acquire(second) == OK
    assert client.get(first) == 2
    client.close()
    settle(store)
    store.begin_window(2)
    settle(store)
    assert figures(store, "name_memory", "records", "used_memory") == [0, 0, 0]
    client = Client(store)
    assert client.acquire(third) == OK
    assert client.dump() == {third: (1, 1)}


def test_a_name_longer_than_all_name_memory_reclaims_no_counter() -> None:
    client = Client(make_store(2, 8, name_memory=2 * 64))
    assert client.acquire(b"idle") == OK
    assert client.release(b"idle") == OK
    assert client.acquire(b"x" * 149) == NO_MEMORY
    assert client.get(b"idle") == 0
    assert figures(client.store, "reclaimed", "expired") == [0, 0]
    assert client.acquire(b"x" * 148) == OK
    assert client.acquire(b"y" * 148) == NO_MEMORY
    assert client.release(b"x" * 148) == OK
    assert client.acquire(b"y" * 148) == OK
    assert (client.get(b"x" * 148), client.get(b"idle")) == (None, 0)


def test_name_memory_does_not_fragment() -> None:
    """Names of every length come and go; at the end all of it can be used by one name."""
    numbers = random.Random(2)
    store = make_store(20, 64, name_memory=100 * 64)
    client = Client(store)
    for window in range(1, 501):
        names = {numbers.randbytes(numbers.choice((1, 36, 37, 88, 89, 500, 1500, 3000))) for _ in range(8)}
        granted = {name for name in sorted(names) if client.acquire(name) == OK}
        assert all(client.get(name) == 1 for name in granted)
        release_all(client, granted)
        store.begin_window(window)
        settle(store)
        assert store.snapshot()["name_memory"] == 0
    assert client.acquire(b"x" * (28 + 100 * 60)) == OK
