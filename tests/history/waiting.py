"""What is wrong with the waits of a history of Takes, and with the numbers of its grants: what needs no search.

`mistakes` finds, without an order of all calls:

- a number of a grant that was given twice, or does not rise;
- a wait that ends too early, or too late, and a Cancel whose Take was answered otherwise;
- Takes of one connection and key that were not served in the order of their arrival;
- somebody who was granted at once what a Take waited for all the while;
- a *sleeper*: a Take that waits although there is room for it, and for all that wait for a part of the same.

Each is certain: how much is held is an upper bound, from the start of each call that may take something to the end of
the one that gives it back. late_ns is by how much a reply, and what is due, may be late.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter.wire import Permit, Rate
from history.counter import NOT_AVAILABLE, NOT_FOUND, OK, Acquire, Release
from history.operations import Closed
from history.takes import (
    CANCELLED,
    FULL,
    NS_PER_MS,
    PERMITS,
    Cancel,
    Settle,
    Take,
    ends_of,
    is_granted,
    items_of,
    narrowed,
    part_of,
    parts_of,
    span,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from fractions import Fraction

    from history.operations import Operation
    from history.takes import Part

STRETCH = 3  # times late_ns: for so long a sleeper has to sleep, as both ends of a wait are known to one of these


def mistakes(operations: Iterable[Operation], *, late_ns: int, slow: Collection[int] = ()) -> list[str]:
    """What is wrong, for people. slow: clients that may have read their replies later than that."""
    history = sorted(operations, key=lambda operation: operation.started)
    found = [*numbers(history), *ends(history, late_ns, slow), *cancels(history), *turns(history)]
    return [*found, *passed(history, late_ns, slow), *Sleepers(history, late_ns, slow).found()]


def numbers(history: Sequence[Operation]) -> Iterator[str]:
    """Numbers that are there twice, or that contradict the times."""
    grants = sorted(filter(is_granted, history), key=lambda operation: operation.answer[1][0])
    for one, other in pairwise(grants):
        if one.answer[1][0] == other.answer[1][0]:
            yield f"two grants have one number: {one} and {other}"
    for grant, (started, ended) in narrowed(history).items():
        if started > ended:
            yield f"its number does not lie between those of grants before and after it: {grant}"


def closings(history: Iterable[Operation]) -> dict[int, Operation]:
    return {operation.client: operation for operation in history if isinstance(operation.call, Closed)}


def ends(history: Sequence[Operation], late_ns: int, slow: Collection[int]) -> Iterator[str]:
    """Waits that were over too early, or too late."""
    closed = closings(history)
    for one in history:
        if isinstance(one.call, Take) and one.call.wait_ms and one.ended is not None:
            over = one.started + one.call.wait_ms * NS_PER_MS
            is_leaving = one.client in closed and closed[one.client].started <= one.ended
            if one.answer[0] == NOT_AVAILABLE and one.ended < over and not is_leaving:
                yield f"refused before its time was over: {one}"
            if one.ended > over + late_ns and one.client not in slow:
                yield f"answered too late: {one}"


def cancels(history: Sequence[Operation]) -> Iterator[str]:
    """Takes that were cancelled and nobody asked for it, and Cancels that say something else than their Take."""
    takes = {(one.client, one.call.opaque): one for one in history if isinstance(one.call, Take)}
    wanted = set()
    for one in history:
        if not isinstance(one.call, Cancel):
            continue
        take = takes.get((one.client, one.call.take))
        wanted.add(take)
        if one.answer is None or take is None:
            continue
        is_cancelled = take.answer is not None and take.answer[0] == CANCELLED
        if take.answer is None or take.ended > one.ended:
            yield f"{one} was answered before its {take}"
        elif one.answer[0] not in (OK, NOT_FOUND) or is_cancelled != (one.answer[0] == OK):
            yield f"{one} is not how it ended: {take}"
    for take in takes.values():
        if take.answer is not None and take.answer[0] == CANCELLED and take not in wanted:
            yield f"nobody cancelled it: {take}"


def turns(history: Sequence[Operation]) -> Iterator[str]:
    """Takes of one item, connection, key and priority that were not served in the order in which they came."""
    before: dict[Any, Operation] = {}
    for one in history:
        if not isinstance(one.call, Take) or len(one.call.items) > 1 or not one.call.wait_ms:
            continue
        if is_granted(one):
            queue = one.client, one.call.key, one.call.priority, *parts_of(one.call)
            other = before.get(queue)
            if other is not None and other.answer[1][0] > one.answer[1][0]:
                yield f"{one} was served before {other}, which came before it"
            before[queue] = one


def passed(history: Sequence[Operation], late_ns: int, slow: Collection[int]) -> Iterator[str]:
    """Grants at once of what a Take certainly waited for, all the while: only one of one item says for which."""
    waits: dict[Part, list[Operation]] = defaultdict(list)
    for one in history:
        if isinstance(one.call, Take) and one.call.wait_ms and len(one.call.items) == 1 and one.client not in slow:
            waits[parts_of(one.call)[0]].append(one)
    for one in history:
        at_once = isinstance(one.call, Acquire) or (isinstance(one.call, Take) and not one.call.wait_ms)
        if not at_once or one.answer is None or one.answer[0] != OK:
            continue
        for part in parts_of(one.call):
            for other in waits[part]:
                if other.started + late_ns < one.started and ends_of(one) < (other.ended or 0) - late_ns:
                    yield f"{one} passed {other}"


class Sleepers:
    """Sweeps a history for those who wait and need not.

    held: the most that may be held of each counter, by client. next: of each rate, the latest that its next unit may
    be on time. fits: since when there was room for a waiting Take, if there is. changed: since when the same Takes
    have waited for each part.
    """

    def __init__(self, history: Sequence[Operation], late_ns: int, slow: Collection[int]) -> None:
        self.late_ns = late_ns
        self.slow = slow
        self.held: dict[Part, Counter[int]] = defaultdict(Counter)
        self.next: dict[Part, Fraction | float] = {}
        self.waiting: dict[Operation, None] = {}
        self.fits: dict[Operation, int] = {}
        self.changed: dict[Part, int] = {}
        self.asleep: set[Operation] = set()
        self.closed = closings(history)
        self.grants = {one.answer[1][0]: one.call for one in history if is_granted(one)}
        self.times = narrowed(history)
        self.events = sorted(self._events(history), key=lambda event: event[0])

    def found(self) -> Iterator[str]:
        for (now_ns, step), (next_ns, _) in pairwise([*self.events, (self.events[-1][0] if self.events else 0, None)]):
            if step is not None:
                step(now_ns)
            if next_ns > now_ns:
                yield from self._look(now_ns, next_ns)

    # ---- inside ----

    def _events(self, history: Sequence[Operation]) -> Iterator[tuple[int, Any]]:
        for one in history:
            call = one.call
            last = self._gone_ns(one) if one.ended is None else one.ended
            may_have = one.answer is None or one.answer[0] == OK
            if isinstance(call, Closed):
                if one.ended is not None:
                    yield one.ended, lambda now_ns, client=one.client: self._leave(client)
            elif isinstance(call, Acquire) and may_have:
                permit = Permit(call.name, call.resources, call.maximum)
                yield one.started, lambda now_ns, one=one, permit=permit: self._take(one, permit, inf)
            elif isinstance(call, Release) and one.answer is not None and one.answer[0] == OK:
                yield one.ended, lambda now_ns, one=one: self._release(one)
            elif isinstance(call, Settle) and may_have:
                yield one.started, lambda now_ns, one=one, last=last: self._settle(one, last)
            elif isinstance(call, Take):
                if may_have:
                    yield self._granted_ns(one), lambda now_ns, one=one, last=last: self._grant(one, last)
                if call.wait_ms:
                    yield one.started, lambda now_ns, one=one: self._wait(one, now_ns)
                    if last < inf:
                        yield last, lambda now_ns, one=one: self._end(one, now_ns)

    def _gone_ns(self, one: Operation) -> Any:
        return ends_of(self.closed[one.client]) if one.client in self.closed else inf

    def _granted_ns(self, one: Operation) -> int:
        """From when on it may have what it was granted."""
        if one.answer is None or one.ended is None:
            return one.started
        started = min(self.times[one][0], one.ended)
        return started if one.client in self.slow else max(started, one.ended - self.late_ns)

    def _take(self, one: Operation, item: Permit | Rate, last: float) -> None:
        part = part_of(item)
        if isinstance(item, Permit):
            self.held[part][one.client] += item.amount
        elif last == inf:
            self.next[part] = inf
        else:
            begin = max(self.next.get(part, FULL), last - span(item, item.burst))
            self.next[part] = begin + span(item, item.amount)

    def _grant(self, one: Operation, last: float) -> None:
        for item in items_of(one.call):
            self._take(one, item, last)

    def _release(self, one: Operation) -> None:
        self.held[PERMITS, one.call.name][one.client] -= one.call.resources

    def _settle(self, one: Operation, last: float) -> None:
        take = self.grants.get(one.call.grant)
        for item in items_of(take) if take else []:
            if isinstance(item, Rate) and item.name == one.call.name and one.call.used > item.amount:
                self._take(one, item._replace(amount=one.call.used - item.amount), last)

    def _leave(self, client: int) -> None:
        for held in self.held.values():
            held.pop(client, None)

    def _wait(self, one: Operation, now_ns: int) -> None:
        self.waiting[one] = None
        self.changed.update(dict.fromkeys(parts_of(one.call), now_ns))

    def _end(self, one: Operation, now_ns: int) -> None:
        del self.waiting[one]
        self.fits.pop(one, None)
        self.changed.update(dict.fromkeys(parts_of(one.call), now_ns))

    def _look(self, now_ns: int, next_ns: int) -> Iterator[str]:
        """Whether there is room from now on, until something happens next."""
        for one in self.waiting:
            due = max(map(self._there_ns, items_of(one.call)))
            if due == inf:
                self.fits.pop(one, None)
            else:
                self.fits[one] = max(self.fits.get(one, now_ns), ceil(due))
        for group in self._groups():
            if all(one in self.fits for one in group):
                since = max(self.fits[one] for one in group)
                since = max(since, *(self.changed[part] for one in group for part in parts_of(one.call)))
                certain = [one for one in group if one.answer is not None and one.client not in self.slow]
                if next_ns - since > STRETCH * self.late_ns and certain and not self.asleep.issuperset(certain):
                    self.asleep.update(certain)
                    yield f"slept for {(next_ns - since) // NS_PER_MS} ms although there was room: {certain}"

    def _there_ns(self, item: Permit | Rate) -> Any:
        """From when on there is enough of an item, if nobody else takes any; inf: not yet."""
        part = part_of(item)
        if isinstance(item, Rate):
            return self.next.get(part, FULL) + span(item, item.amount)
        return inf if self.held[part].total() > item.maximum - item.amount else 0

    def _groups(self) -> Iterator[list[Operation]]:
        """Those that wait, with all that wait for a part of the same."""
        left = list(self.waiting)
        while left:
            group = [left.pop(0)]
            for one in group:
                parts = set(parts_of(one.call))
                others = [other for other in left if not parts.isdisjoint(parts_of(other.call))]
                left = [other for other in left if other not in others]
                group += others
            yield group
