"""That Takes which wait keep their turns, and that their keys get their shares: of queues in which nobody has moved."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kit.promises import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from property.takes_model import Wait

KEY_STEP = 4096  # parts of a unit, to which the engine rounds the end of a request of weight above 1


class Pair:
    """What one key got more than another, divided by their weights, since both wait; and the extremes of that."""

    __slots__ = ("grants", "high", "largest", "low", "more", "weights")

    def __init__(self, weights: tuple[int, int]) -> None:
        self.weights = weights
        self.more = self.low = self.high = Fraction(0)
        self.largest = [0, 0]
        self.grants = 0


class Shares:
    """In any interval in which two keys wait, if all have the same priority, what they got, each divided by
    its weight, differs by at most the largest request of each, divided likewise. Of the requests of a key, the last one
    that was served before counts too.
    """

    def __init__(self) -> None:
        self.pairs: dict[tuple[Any, ...], Pair] = {}
        self.last: dict[tuple[Any, Any], int] = {}  # of each key in each queue: the last request that was served
        self.priorities: dict[tuple[bytes, bool], set[int]] = {}  # with which somebody has waited
        self.closest = Fraction(0)  # how near anybody came to the bound

    @staticmethod
    def firsts(thing: tuple[bytes, bool], waits: Iterable[Wait]) -> list[Wait]:
        """Those of which one is the first: of the highest priority, and of each key the one that has waited longest."""
        here = [wait for wait in waits if wait.queue == thing]
        top = max((wait.priority for wait in here), default=0)
        found: dict[Any, Wait] = {}
        for wait in here:
            if wait.priority == top:
                found.setdefault(("moves", wait.serial) if wait.may_move else wait.key, wait)
        return list(found.values())

    def claim_turns(self, before: list[Wait], granted: list[Wait], still: set[int]) -> None:
        """Nobody was passed who did not move: neither by who came later with the same key, nor by a lower priority."""
        for wait in granted:
            for other in before:
                if other.serial not in still or other.queue != wait.queue:
                    continue
                if wait.may_move or other.may_move:
                    continue
                if other.priority > wait.priority:
                    raise Violation("turn", f"{wait} was served, and {other} has a higher priority")
                is_behind = other.key == wait.key and other.priority == wait.priority and other.serial < wait.serial
                if is_behind:
                    raise Violation("turn", f"{wait} was served, and {other} came first with the same key")

    def settle(self, before: list[Wait], granted: list[Wait], still: set[int], mixed: set[tuple[bytes, bool]]) -> None:
        """After a tick. mixed: counters and rates for which Takes of several items have waited."""
        for thing in {wait.queue: None for wait in before if wait.queue not in mixed}:
            self.settle_queue(thing, before, granted, still)

    def settle_queue(self, thing: tuple[bytes, bool], before: list[Wait], granted: list[Wait], still: set[int]) -> None:
        here = [wait for wait in before if wait.queue == thing]
        self.priorities.setdefault(thing, set()).update(wait.priority for wait in here)
        largest: dict[Any, int] = {}  # of each key that waits on
        weights = {wait.key: wait.weight for wait in here}
        got: dict[Any, list[int]] = {}
        for wait in granted:
            if wait.queue == thing:
                got.setdefault(wait.key, []).append(wait.wanted.amount)
        for key in {wait.key: None for wait in here if wait.serial in still}:
            # If it comes again shortly after it was served, it is behind by what it got then.
            asked = [wait.wanted.amount for wait in here if wait.key == key]
            largest[key] = max(*asked, self.last.get((thing, key), 0))
        pairs = {}
        for one, other in itertools.combinations(largest if len(self.priorities[thing]) == 1 else (), 2):
            ends = (one, other) if (thing, one, other) in self.pairs else (other, one)
            name = (thing, *ends)
            pairs[name] = pair = self.pairs.get(name) or Pair((weights[ends[0]], weights[ends[1]]))
            self.settle_pair(pair, ends, {key: sum(amounts) for key, amounts in got.items()}, largest)
        for name in [name for name in self.pairs if name[0] == thing]:
            del self.pairs[name]
        self.pairs.update(pairs)
        self.last.update({(thing, key): max(amounts) for key, amounts in got.items()})

    def settle_pair(self, pair: Pair, ends: Any, got: dict[Any, int], largest: dict[Any, int]) -> None:
        one, other = ends
        pair.largest = [max(most, largest[key]) for most, key in zip(pair.largest, ends, strict=True)]
        pair.grants += (one in got) + (other in got)
        pair.more += Fraction(got.get(one, 0), pair.weights[0]) - Fraction(got.get(other, 0), pair.weights[1])
        pair.low, pair.high = min(pair.low, pair.more), max(pair.high, pair.more)
        bound = sum(Fraction(most, weight) for most, weight in zip(pair.largest, pair.weights, strict=True))
        slack = Fraction(pair.grants, KEY_STEP)
        self.closest = max(self.closest, (pair.high - pair.low) / bound)
        if pair.high - pair.low > bound + slack:
            raise Violation("shares", f"{one} and {other} got {float(pair.high - pair.low)} apart, of {float(bound)}")

    def end(self, thing: tuple[bytes, bool], key: Any) -> None:
        """A key does not wait any more, and begins anew."""
        for name in [name for name in self.pairs if name[0] == thing and key in name[1:]]:
            del self.pairs[name]
