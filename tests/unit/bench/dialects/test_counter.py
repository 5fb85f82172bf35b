"""The counter dialect: requests byte for byte, and the comparison of a Dump with the permits known to be held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from counterd.bench.dialects import counter
from counterd.bench.plan import Plan, read_work
from counterd.bench.takes import Items, Take
from counterd.client import DumpEntry
from counterd.protocols.counter import wire

PLAN = Plan(protocol="counter", names=100, maximum=10, verify=True)


class Dumps:
    """A client of a server that answers with these Dumps, the last again and again."""

    def __init__(self, *dumps: dict[int | bytes, tuple[int, int]]) -> None:
        self.dumps = [[DumpEntry(name if isinstance(name, bytes) else name_of(name), *figures)
                       for name, figures in dump.items()] for dump in dumps]  # fmt: skip
        self.asked = 0

    def __call__(self, _: Plan) -> Dumps:
        return self

    def __enter__(self) -> Dumps:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked += 1

    def dump(self) -> list[DumpEntry]:
        return self.dumps[min(self.asked, len(self.dumps) - 1)]


def name_of(number: int) -> bytes:
    return f"nnnnnnnn{number:08x}".encode()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "GIVE_BACK_S", 0.05)
    monkeypatch.setattr(counter, "PAUSE_S", 0.001)


def judged(monkeypatch: pytest.MonkeyPatch, held: dict[int, int], *dumps: Any, before: Any = None) -> list[str]:
    board: Any = SimpleNamespace(all_held=lambda: held)
    monkeypatch.setattr(counter, "_client", Dumps(before or {}))
    state = counter.look(PLAN)
    monkeypatch.setattr(counter, "_client", Dumps(*dumps))
    return counter.while_held(PLAN, board, state)


def test_matching_counters_are_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, {}, {}) == []
    assert judged(monkeypatch, {1: 3, 0x2A: 10}, {1: (3, 9), 0x2A: (10, 10), 7: (0, 10)}) == []


def test_counters_of_others_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {b"jobs": (99, 99), b"nnnnnnnn00000064": (99, 99), b"nnnnnnnn0000002A": (99, 99), b"n": (99, 99),
              b"nnnnnnnn0000_001": (99, 99), b"nnnnnnnn  000001": (99, 99), b"nnnnnnnn000000-1": (9, 9),
              b"xnnnnnnn00000001": (99, 99), b"nnnnnnnnnnnnnnnn": (9, 9), b"\xff" * 16: (9, 9)}  # fmt: skip
    assert judged(monkeypatch, {}, others) == []


def test_permits_held_before_the_load_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {1: (2, 12), 2: (1, 1)}
    assert judged(monkeypatch, {1: 3}, {1: (5, 12), 2: (1, 1)}, before=before) == []
    assert judged(monkeypatch, {}, {1: (2, 12)}, before=before) == [], "the others have given the other name back"


def test_differences_are_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, {1: 3}, {1: (4, 4)}) == ["nnnnnnnn00000001: 4 in use, but 3 are held"]
    assert judged(monkeypatch, {1: 3}, {1: (2, 4)}) == ["nnnnnnnn00000001: 2 in use, but 3 are held"]
    assert judged(monkeypatch, {1: 3}, {}) == ["nnnnnnnn00000001: 0 in use, but 3 are held"]
    assert judged(monkeypatch, {}, {1: (0, 11)}) == ["nnnnnnnn00000001: 11 were in use, with a maximum of 10"]


def test_permits_that_come_back_in_time_are_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, {1: 3}, {1: (5, 5)}, {1: (4, 5)}, {1: (3, 5)}) == []


def test_missing_permits_are_a_violation_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, {1: 3}, {1: (2, 5)}, {1: (3, 5)}) == ["nnnnnnnn00000001: 2 in use, but 3 are held"]


def test_many_violations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, dict.fromkeys(range(50), 1), {})
    assert len(found) == 11
    assert found[-1] == "and 40 more"


def test_after_the_load_no_permits_may_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "_client", Dumps({1: (2, 9)}, {1: (1, 9)}, {1: (0, 9)}, {1: (5, 9)}))
    assert counter.when_gone(PLAN, {}) == []
    monkeypatch.setattr(counter, "_client", Dumps({1: (2, 9), b"jobs": (5, 5)}))
    text = "nnnnnnnn00000001: 2 still in use, 0.05 s after the last connection was closed"
    assert counter.when_gone(PLAN, {}) == [text]
    assert counter.when_gone(PLAN, {name_of(1): DumpEntry(name_of(1), 2, 2)}) == []


@pytest.mark.parametrize("size", [1, 3, 8, 9, 300])
def test_names_are_numbered_and_recognized(size: int) -> None:
    plan = Plan(names=16, name_size=size)
    for number in range(16):
        assert counter._is_ours(plan, counter._name(plan, number))
    assert not counter._is_ours(plan, b"n" * size)


def test_requests_byte_for_byte() -> None:
    plan = Plan(protocol="counter", resources=3, maximum=0x01020304)
    assert counter.requests_of(plan, b"jobs") == {
        "noop": bytes.fromhex("90 00 00 00 00000000 00000000"),
        "get": bytes.fromhex("90 01 00 00 00000006 00000000 0004") + b"jobs",
        "acquire": bytes.fromhex("90 02 00 00 0000000e 00000000 00000003 01020304 0004") + b"jobs",
        "release": bytes.fromhex("90 03 00 00 0000000a 00000000 00000003 0004") + b"jobs",
    }


def test_requests_of_takes_byte_for_byte() -> None:
    take = Take(wait=1.5, items=Items(2, 1), limit=60, burst=7, weights=(1, 5), priorities=(0, 9))
    plan = Plan(protocol="counter", resources=3, maximum=12, take=take)
    items = [wire.Permit(b"jobs", 3, 12), wire.Permit(b"jobs:1", 3, 12), wire.Rate(b"jobs:r0", 1, 60, 1_000_000, 7)]
    found = counter.requests_of(plan, b"jobs")
    assert found["acquire"] == wire.take(0, items, 1500, key=b"key 0")
    assert counter.take_of(plan, 1, b"jobs") == wire.take(0, items, 1500, key=b"key 1", weight=5, priority=9)
    assert found["release"] == wire.release(0, b"jobs", 3) + wire.release(0, b"jobs:1", 3)
    assert found["cancel"] == wire.cancel(0, 0)


def test_a_take_without_keys_and_permits() -> None:
    plan = Plan(protocol="counter", take=Take(items=Items(0, 1), limit=5), work=read_work("acquire"))
    found = counter.requests_of(plan, b"calls")
    assert found["acquire"] == wire.take(0, [wire.Rate(b"calls:r0", 1, 5, 1_000_000, 5)])
    assert "release" not in found


@pytest.mark.parametrize("rates", [0, 1, 8])
def test_the_longest_names_of_a_take(rates: int) -> None:
    items = Items(8, rates)
    suffixes = sum(len(name) for names in items.names(b"") for name in names)
    size = (counter.NAMES_SIZE_MAX - suffixes) // (8 + rates)
    counter.requests_of(Plan(take=Take(items=items, weights=(1,)), name_size=size), b"n" * size)
    with pytest.raises(ValueError, match=f"at most {counter.NAMES_SIZE_MAX} bytes together"):
        Plan(take=Take(items=items, weights=(1,)), name_size=size + 1)


def test_all_counters_of_a_take_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(protocol="counter", names=100, maximum=10, verify=True, take=Take(items=Items(2, 1)))
    board: Any = SimpleNamespace(all_held=lambda: {1: 3})
    second = name_of(1) + b":1"
    others = {name_of(1) + b":2": (7, 7), name_of(1) + b":r0": (7, 7), b":1": (7, 7)}
    monkeypatch.setattr(counter, "_client", Dumps({1: (3, 3), second: (3, 3), **others}))
    assert counter.while_held(plan, board, {}) == []
    monkeypatch.setattr(counter, "_client", Dumps({1: (3, 3), second: (4, 4), **others}))
    assert counter.while_held(plan, board, {}) == ["nnnnnnnn00000001:1: 4 in use, but 3 are held"]
