"""The checker on histories of counters: it accepts those of a correct server, and finds every defect of a wrong one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history import Closed, Operation, check
from history.counter import Acquire, CounterModel, Get, Release
from history.crowd import CounterEngine, CounterTable, counter_calls, crowd

GRANTED, DONE, REFUSED, NOT_HELD, ABSENT = (0, 1), (0, None), (0x21, None), (0x22, None), (0x01, None)
ONE = Acquire("a", 1, 1)


def said(*rows: tuple[Any, ...]) -> list[Operation]:
    return [Operation(*row) for row in rows]


# ---- right ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32).map(Random), st.integers(1, 8), st.integers(1, 3), st.sampled_from([3, 6, 30]))
def test_right_histories_pass(rng: Random, clients: int, names: int, maximum: int) -> None:
    operations = crowd(rng, CounterTable(), counter_calls(names, maximum), clients=clients, calls=80)
    assert check(operations, CounterModel()) is None


@pytest.mark.parametrize("seed", range(4))
def test_engine_has_an_order_for_everything(seed: int) -> None:
    operations = crowd(Random(seed), CounterEngine(), counter_calls(3), clients=8, calls=800, dying=0.05)
    assert check(operations, CounterModel()) is None


def test_an_unanswered_call_may_have_taken_effect_or_not() -> None:
    start = said((1, ONE, 0), (1, Closed(), 50, 60))
    assert check([*start, *said((2, Get("a"), 10, 20, GRANTED))], CounterModel()) is None
    assert check([*start, *said((2, Get("a"), 10, 20, ABSENT), (2, Get("a"), 30, 40, GRANTED))], CounterModel()) is None
    assert check([*start, *said((2, ONE, 10, 20, GRANTED))], CounterModel()) is None


def test_any_acquire_may_be_refused_for_memory_or_while_draining() -> None:
    assert check(said((1, ONE, 0, 1, (0x82, None))), CounterModel()) is None
    assert check(said((1, ONE, 0, 1, REFUSED)), CounterModel(draining=True)) is None
    assert check(said((1, ONE, 0, 1, REFUSED)), CounterModel()) is not None


def test_counter_at_zero_exists_or_not() -> None:
    rows = [(1, Release("a", 0), 0, 1, ABSENT), (1, Get("a"), 2, 3, (0, 0)), (1, Release("a", 1), 4, 5, NOT_HELD)]
    assert check(said(*rows, (1, Release("a", 0), 6, 7, DONE), (1, Get("a"), 8, 9, ABSENT)), CounterModel()) is None


# ---- wrong ----------------------------------------------------------------------------------------------------------

WRONG = {
    "lost release": said((1, ONE, 0, 1, GRANTED), (1, Release("a", 1), 2, 3, DONE), (2, ONE, 4, 5, REFUSED)),
    "double grant": said((1, ONE, 0, 5, GRANTED), (2, ONE, 1, 6, GRANTED)),
    "each has its own maximum": said((1, ONE, 0, 5, GRANTED), (2, Acquire("a", 2, 2), 6, 7, (0, 2))),
    "release seen late": said(
        (1, ONE, 0, 1, GRANTED), (1, Release("a", 1), 2, 3, DONE), (2, Get("a"), 4, 5, GRANTED), (2, ONE, 6, 7, GRANTED)
    ),
    "release seen, then not": said(
        (1, ONE, 0, 1, GRANTED),
        (1, Release("a", 1), 2, 9, DONE),
        (2, Get("a"), 3, 4, ABSENT),
        (2, Get("a"), 5, 6, GRANTED),
    ),
    "grant seen before it was asked for": said((2, Get("a"), 0, 1, GRANTED), (1, ONE, 2, 3, GRANTED)),
    "wrapped sum": said(
        (1, Acquire("a", 2**32 - 1, 2**32 - 1), 0, 1, (0, 2**32 - 1)),
        (2, Acquire("a", 2, 2**32 - 1), 2, 3, (0, 2)),
    ),
    "wrapped sum told": said(
        (1, Acquire("a", 2**32 - 1, 2**32 - 1), 0, 1, (0, 2**32 - 1)), (2, Get("a"), 2, 3, (0, (2**32 - 1 + 2) % 2**32))
    ),
    "holdings survive their connection": said((1, ONE, 0, 1, GRANTED), (1, Closed(), 2, 5), (2, ONE, 6, 7, REFUSED)),
    "holdings gone before their connection": said(
        (1, ONE, 0, 1, GRANTED), (2, ONE, 2, 3, GRANTED), (1, Closed(), 4, 5)
    ),
    "holdings back, then not": said(
        (1, ONE, 0, 1, GRANTED), (1, Closed(), 2, 9), (2, Get("a"), 3, 4, ABSENT), (2, Get("a"), 5, 6, GRANTED)
    ),
    "unanswered, seen after its connection's end": said(
        (1, ONE, 0), (1, Closed(), 1, 9), (2, Get("a"), 2, 3, ABSENT), (2, Get("a"), 10, 11, GRANTED)
    ),
    "answered, seen after its connection's end": said(
        (1, ONE, 0, 20, GRANTED), (1, Closed(), 1, 5), (2, Get("a"), 6, 7, GRANTED)
    ),
    "unanswered, half of it": said((1, Acquire("a", 2, 2), 0), (2, Get("a"), 2, 3, GRANTED)),
    "unanswered, twice": said((1, Acquire("a", 1, 2), 0), (2, Get("a"), 2, 3, (0, 2))),
    "release of what another holds": said((1, ONE, 0, 1, GRANTED), (2, Release("a", 1), 2, 3, DONE)),
    "release of more than is held": said((1, ONE, 0, 1, GRANTED), (1, Release("a", 2), 2, 3, DONE)),
    "release of what is held refused": said((1, ONE, 0, 1, GRANTED), (1, Release("a", 1), 2, 3, NOT_HELD)),
    "counter in use not found": said((1, ONE, 0, 1, GRANTED), (2, Get("a"), 2, 3, ABSENT)),
    "granted less": said((1, Acquire("a", 2, 2), 0, 1, GRANTED)),
    "more than the maximum at once": said((1, Acquire("a", 2, 1), 0, 1, (0, 2))),
    "a status that means nothing": said((1, Get("a"), 0, 1, (0x22, None))),
    "answer of another name": said((1, ONE, 0, 1, GRANTED), (2, Get("b"), 2, 3, GRANTED)),
}


@pytest.mark.parametrize("operations", WRONG.values(), ids=WRONG.keys())
def test_wrong_history_is_caught(operations: list[Operation]) -> None:
    assert check(operations, CounterModel()) is not None


OTHERWISE = {
    (Acquire, 0): lambda call: REFUSED,
    (Acquire, 0x21): lambda call: (0, call.resources),
    (Release, 0): lambda call: NOT_HELD,
    (Release, 0x22): lambda call: DONE,
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32).map(Random), st.data())
def test_any_other_answer_is_caught(rng: Random, data: st.DataObject) -> None:
    """With one client alone, as then there is no other order."""
    operations = crowd(rng, CounterTable(), counter_calls(), clients=1, calls=40, dying=0)[:40]
    place = data.draw(st.sampled_from([n for n, one in enumerate(operations) if one.call != Release(b"0", 0)]))
    call, answer = operations[place].call, operations[place].answer
    other = OTHERWISE[type(call), answer[0]](call) if type(call) is not Get else (0, (answer[1] or 0) + 1)
    operations[place] = operations[place]._replace(answer=other)
    violation = check(operations, CounterModel())
    assert violation is not None
    assert violation.stuck.started >= operations[place].started


# ---- wrong servers --------------------------------------------------------------------------------------------------


class Faulty(CounterTable):
    """A server that sometimes makes a mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = Random(7)
        self.late: list[tuple[int, int, Any]] = []

    def slips(self) -> bool:
        return self.rng.random() < 0.1


class LosesReleases(Faulty):
    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if isinstance(call, Release) and call.resources and self.slips():
            return DONE if call.resources <= self.counters[call.name].get(client, 0) else NOT_HELD
        return super().do(client, call, now_ns)


class GrantsTooMuch(Faulty):
    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if isinstance(call, Acquire) and self.slips():
            return super().do(client, call._replace(maximum=call.maximum + 3), now_ns)
        return super().do(client, call, now_ns)


class WrapsSums(Faulty):
    """Counts with two bits."""

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        answer = super().do(client, call, now_ns)
        return (0, answer[1] % 4) if isinstance(call, Get) and answer[1] else answer


class KeepsHoldings(Faulty):
    def close(self, client: int, now_ns: int) -> None:
        pass


class LosesHoldings(Faulty):
    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if self.slips():
            super().close(client, now_ns)
        return super().do(client, call, now_ns)


class MixesNames(Faulty):
    def do(self, client: int, call: Any, now_ns: int) -> Any:
        other = b"1" if call.name == b"0" else b"0"
        return super().do(client, call._replace(name=other) if self.slips() else call, now_ns)


class ReleasesLate(Faulty):
    """Releases a millisecond after the answer."""

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        while self.late and self.late[0][0] <= now_ns:
            _, releaser, release = self.late.pop(0)
            super().do(releaser, release, now_ns)
        if isinstance(call, Release) and call.resources <= self.counters[call.name].get(client, 0) and self.slips():
            self.late.append((now_ns + 1_000_000, client, call))
            return DONE
        return super().do(client, call, now_ns)


FAULTY = [LosesReleases, GrantsTooMuch, WrapsSums, KeepsHoldings, LosesHoldings, MixesNames, ReleasesLate]


@pytest.mark.parametrize("server", FAULTY)
@pytest.mark.parametrize("seed", range(3))
def test_wrong_server_is_caught(server: type[Faulty], seed: int) -> None:
    operations = crowd(Random(seed), server(), counter_calls(names=2), clients=4, calls=400, dying=0.05)
    assert check(operations, CounterModel()) is not None
