"""A lender of permits that records what it lends, and a pump for a store that borrows from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kit.pump import Pump


@dataclass
class Waiting:
    """A request that waits for a permit."""

    place: int
    name: bytes
    maximum: int
    ticket: int


class Permits:
    """A contract.Lender: first come, first served.

    held: permits by name, lent or taken by others. lent: those that the store has. room: how many may wait. draining:
    nothing is lent any more.
    """

    number = 1

    def __init__(self, store: Any) -> None:
        self.store = store
        self.held: Counter[bytes] = Counter()
        self.lent: Counter[bytes] = Counter()
        self.waiting: list[Waiting] = []
        self.room = 1 << 20
        self.draining = False
        self.asked = 0  # calls of acquire() and enqueue()
        self._places = 0
        store.borrow(self)

    # ---- as a lender ----

    def acquire(self, name: bytes, maximum: int, _now_ns: int) -> bool:
        assert maximum >= 1
        self.asked += 1
        if self.draining or self.held[name] >= maximum or any(each.name == name for each in self.waiting):
            return False
        return self.retake(name, maximum, _now_ns)

    def retake(self, name: bytes, _maximum: int, _now_ns: int) -> bool:
        self.held[name] += 1
        self.lent[name] += 1
        return True

    def release(self, name: bytes, _now_ns: int) -> None:
        assert self.lent[name] > 0, f"a permit of {name!r} that was not lent is given back"
        self.held[name] -= 1
        self.lent[name] -= 1

    def enqueue(self, name: bytes, maximum: int, ticket: int, _now_ns: int) -> int:
        assert all(each.ticket != ticket for each in self.waiting), f"group {ticket} waits twice"
        self.asked += 1
        if self.draining or len(self.waiting) >= self.room:
            return 0
        self._places += 1
        self.waiting.append(Waiting(self._places, name, maximum, ticket))
        return self._places

    def amend(self, place: int, maximum: int, _now_ns: int) -> None:
        (found,) = (each for each in self.waiting if each.place == place)
        found.maximum = maximum

    def cancel(self, place: int, _now_ns: int) -> None:
        (found,) = (each for each in self.waiting if each.place == place)
        self.waiting.remove(found)

    # ---- as its store, and its clients ----

    def take(self, name: bytes, amount: int = 1) -> None:
        self.held[name] += amount

    def give(self, name: bytes, amount: int = 1) -> None:
        self.held[name] -= amount

    def turn(self) -> bool:
        """Grants what there is room for, or refuses all in a drain. Returns True if something waited no longer."""
        done = False
        for each in list(self.waiting):
            is_first = next(other for other in self.waiting if other.name == each.name) is each
            if self.draining or (is_first and self.held[each.name] < each.maximum):
                self.waiting.remove(each)
                if not self.draining:
                    self.retake(each.name, each.maximum, 0)
                self.store.settled(each.ticket, not self.draining)
                done = True
        return done


class LentPump(Pump):
    """A pump whose store borrows permits. permits: the lender."""

    def __init__(self, store: Any, **others: Any) -> None:
        super().__init__(store, **others)
        self.permits = Permits(store)

    def turn(self) -> tuple[bool, bool]:
        is_due, has_output = super().turn()
        granted = self.permits.turn()
        return is_due or granted, has_output or granted
