"""How fairly keys are served: bounds in units of what is asked for, against an ideal fair queue. No clock decides.

An ideal fair queue serves all keys that wait at the same time, each in proportion to its weight. Requests are served as
a whole, so two keys that both wait all the while differ by at most the largest request of each, divided by its weight:
in any such interval, not only from the start. (Goyal, Vin and Cheng, 1996, theorem 1.) To that the queue adds what it
rounds: a request ends up to 1 / 4096 of a unit too early.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from fractions import Fraction

import pytest

from counterd.protocols.counter.wire import Permit, Rate
from kit.takes import Desk, Taker

MAXIMUM = 12
ROUNDING = Fraction(1, 4096)
FOREVER_MS = 1 << 30
STEPS = 250


@dataclass
class Key:
    """name: by number. waiting: its Takes without a reply, with their amounts, in order. got: units, by weight."""

    name: int
    taker: Taker
    weight: int
    largest: int
    priority: int = 0
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    got: Fraction = Fraction(0)
    requests: int = 0

    def ask(self, amount: int, *, is_rate: bool) -> None:
        item = Rate(b"p", amount, 1, 1_000, MAXIMUM) if is_rate else Permit(b"p", amount, MAXIMUM)
        options = {"key": b"%d" % self.name, "weight": self.weight, "priority": self.priority}
        self.waiting.append((self.taker.take(item, wait_ms=FOREVER_MS, **options), amount))
        self.requests += 1


class Contest:
    """Keys that want the same. served: the key and amount of each grant, in order."""

    def __init__(self, seed: int, weights: tuple[int, ...], *, is_rate: bool, priorities: tuple[int, ...] = ()) -> None:
        self.draw = random.Random(seed)
        self.desk = Desk(waiters=4096, posted_max=1 << 20)
        self.is_rate = is_rate
        self.keys = [
            Key(number, self.desk.taker(), weight, self.draw.randint(1, MAXIMUM // 2), priority)
            for number, (weight, priority) in enumerate(itertools.zip_longest(weights, priorities, fillvalue=0))
        ]
        self.held: list[tuple[Taker, int]] = []
        self.served: list[tuple[Key, int]] = []

    def ask(self, key: Key) -> None:
        key.ask(self.draw.randint(1, key.largest), is_rate=self.is_rate)
        self.look()

    def free(self) -> None:
        """Lets something be there: a holder gives back, or time passes."""
        if self.is_rate:
            self.desk.wait(1)
        elif self.held:
            taker, amount = self.held.pop(self.draw.randrange(len(self.held)))
            taker.release(b"p", amount)
        self.look()

    def look(self) -> None:
        """Notes what was granted, by the numbers of the grants."""
        granted = [
            (key.taker.of(opaque).number, key, opaque, amount)  # type: ignore[union-attr]
            for key in self.keys for opaque, amount in key.waiting if key.taker.has(opaque)
        ]  # fmt: skip
        for _, key, opaque, amount in sorted(granted, key=lambda grant: grant[0]):
            assert key.waiting.popleft() == (opaque, amount), "a key is served in the order in which it asked"
            key.got += Fraction(amount, key.weight)
            self.served.append((key, amount))
            if not self.is_rate:
                self.held.append((key.taker, amount))


@pytest.mark.parametrize("is_rate", [False, True], ids=["permits", "rate"])
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (5, 2, 1), (1, 10, 100, 1000), (1,) * 8])
@pytest.mark.parametrize("seed", range(2))
def test_two_keys_that_wait_differ_by_a_request_of_each(weights: tuple[int, ...], seed: int, is_rate: bool) -> None:
    """In each interval in which both wait, however often they come and go before."""
    contest = Contest(seed, weights, is_rate=is_rate)
    pairs = list(itertools.combinations(contest.keys, 2))
    spans: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}  # how far one was ahead, at least and at most
    intervals = 0
    for _ in range(STEPS):
        if contest.draw.random() < 0.5:
            key = contest.draw.choice(contest.keys)
            for _ in range(contest.draw.choice((1, 1, 8))):
                contest.ask(key)
        else:
            contest.free()
        for one, other in pairs:
            pair = one.name, other.name
            if not (one.waiting and other.waiting):
                spans.pop(pair, None)
                continue
            intervals += pair not in spans
            ahead = one.got - other.got
            least, most = spans.get(pair, (ahead, ahead))
            spans[pair] = least, most = min(least, ahead), max(most, ahead)
            bound = Fraction(one.largest, one.weight) + Fraction(other.largest, other.weight)
            assert most - least <= bound + (one.requests + other.requests) * ROUNDING
    assert intervals >= len(pairs), "or the bound was hardly tried"
    assert len(contest.served) > STEPS // 8


@pytest.mark.parametrize("is_rate", [False, True], ids=["permits", "rate"])
@pytest.mark.parametrize("seed", range(6))
def test_a_request_of_a_new_key_waits_for_one_request_of_each_other_key(seed: int, is_rate: bool) -> None:
    """However large it is, however large those are, and however many the others ask for. Then it is first."""
    contest = Contest(seed, (3, 1, 7, 2, 1), is_rate=is_rate)
    *others, new = contest.keys
    new.largest = MAXIMUM
    for _ in range(40):
        contest.ask(contest.draw.choice(others))
    for _ in range(contest.draw.randint(0, 30)):
        contest.free()
    for key in others:
        contest.ask(key)
    before = len(contest.served)
    new.ask(MAXIMUM if seed % 2 else 1, is_rate=is_rate)
    while new.waiting:
        contest.ask(contest.draw.choice(others))
        contest.free()
    served = [key.name for key, _ in contest.served[before:]]
    passed = Counter(served[: served.index(new.name)])
    assert max(passed.values(), default=0) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_a_higher_priority_is_always_served_first(seed: int) -> None:
    contest = Contest(seed, (1, 5, 1, 1000), is_rate=False, priorities=(0, 0, 3, 200))
    for _ in range(STEPS):
        if contest.draw.random() < 0.5:
            contest.ask(contest.draw.choice(contest.keys))
            continue
        waiting = [key.priority for key in contest.keys if key.waiting]
        before = len(contest.served)
        contest.free()
        for key, _ in contest.served[before : before + 1]:
            assert key.priority == max(waiting)
    assert {key.name for key, _ in contest.served} == {0, 1, 2, 3}
