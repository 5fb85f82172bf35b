"""What is wrong with the waits of a history of Takes, and with the numbers of its grants: what needs no search.

`mistakes` finds, without an order of all calls:

- a number of a grant that was given twice, or does not rise;
- a wait that ends too early, or too late, and a Cancel whose Take was answered otherwise;
- Takes of one connection and key that were not served in the order of their arrival;
- somebody who was granted at once what a Take waited for all the while;
- a *sleeper*: a Take that waits although there is room for it, and for all that wait for a part of the same.

Each is certain: how much is held is an upper bound, from the start of each call that may take something to the end of
the one that gives it back. late_ns is by how much a reply, and what is due, may be late. That of a client which may
have begun to go can be later, as nobody knows whether it still reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter.wire import Permit, Rate
from history.counter import NOT_AVAILABLE, NOT_FOUND, OK, Acquire, Release
from history.operations import Closed
from history.resumptions import Goodbye, Lines, may_resume, mistakes_of_resumptions
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

STRETCH = 2  # times late_ns: for so long a sleeper has to sleep, as its request and its reply may both be late


def mistakes(operations: Iterable[Operation], *, late_ns: int, slow: Collection[int] = ()) -> list[str]:
    """Complaints about Takes that wait, as text for people. slow: clients that may have read their replies later than
    late_ns.
    """
    history = sorted(operations, key=lambda operation: operation.started)
    closed = closings(history)
    late = {one for one in history if one.client in slow or is_leaving(one, closed.get(one.client))}
    found = [*numbers(history), *ends(history, late_ns, late), *cancels(history), *turns(history)]
    found += mistakes_of_resumptions(history, late_ns=late_ns)
    return [*found, *passed(history, late_ns, late), *Sleepers(history, late_ns, late).found()]


def numbers(history: Sequence[Operation]) -> Iterator[str]:
    """Complaints about numbers of grants that occur twice, or that contradict the times."""
    grants = sorted(filter(is_granted, history), key=lambda operation: operation.answer[1][0])
    for one, other in pairwise(grants):
        if one.answer[1][0] == other.answer[1][0]:
            yield f"two grants have one number: {one} and {other}"
    for grant, (started, ended) in narrowed(history).items():
        if started > ended:
            yield f"its number does not lie between those of grants before and after it: {grant}"


def closings(history: Iterable[Operation]) -> dict[int, Operation]:
    return {operation.client: operation for operation in history if isinstance(operation.call, Closed)}


def is_leaving(one: Operation, closed: Operation | None) -> bool:
    """Whether its client may have begun to close its connection when the call was answered."""
    return closed is not None and one.ended is not None and closed.started <= one.ended


def ends(history: Sequence[Operation], late_ns: int, slow: Collection[Operation]) -> Iterator[str]:
    """Complaints about waits that ended too early, or too late."""
    for one in history:
        if isinstance(one.call, Take) and one.call.wait_ms and one.ended is not None and one not in slow:
            over = one.started + one.call.wait_ms * NS_PER_MS
            if one.answer[0] == NOT_AVAILABLE and one.ended < over:
                yield f"refused before its time was over: {one}"
            if one.ended > over + late_ns:
                yield f"answered too late: {one}"


def cancels(history: Sequence[Operation]) -> Iterator[str]:
    """Complaints about Takes that were cancelled although nobody asked for it, and about Cancels whose answers
    contradict their Take's.
    """
    asked: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    ended: dict[int, list[Operation]] = defaultdict(list)  # by what may cancel all Takes of a connection
    for one in history:
        if isinstance(one.call, Cancel):
            asked[one.client, one.call.take].append(one)
        elif isinstance(one.call, Goodbye) or may_resume(one):
            ended[one.client if isinstance(one.call, Goodbye) else one.call.old].append(one)
    for take in history:
        if not isinstance(take.call, Take):
            continue
        cancelled = asked[take.client, take.call.opaque]
        is_cancelled = take.answer is not None and take.answer[0] == CANCELLED
        is_ended = any(one.started <= ends_of(take) and take.started <= ends_of(one) for one in ended[take.client])
        answers = [one.answer[0] for one in cancelled if one.answer is not None]
        if (
            is_cancelled
            and not is_ended
            and (answers.count(OK) > 1 or len(answers) == len(cancelled) != answers.count(NOT_FOUND) + 1)
        ):
            yield f"it was cancelled by none of these, or by several: {take}, {cancelled}"
        if not is_cancelled and answers.count(NOT_FOUND) < len(answers):
            yield f"it was not cancelled, and one of these says so: {take}, {cancelled}"
        for one in cancelled:
            if one.ended is not None and (take.ended is None or take.ended > one.ended):
                yield f"{one} was answered before its {take}"


def turns(history: Sequence[Operation]) -> Iterator[str]:
    """Complaints about Takes of the same single item, connection, key and priority that were not served in order."""
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


def passed(history: Sequence[Operation], late_ns: int, slow: Collection[Operation]) -> Iterator[str]:
    """Complaints about immediate grants of an item for which a Take certainly waited all the while: only a Take of one
    item says for which.
    """
    waits: dict[Part, list[Operation]] = defaultdict(list)
    for one in history:
        is_long = one.ended is not None and one.ended > one.started + 2 * late_ns
        if isinstance(one.call, Take) and one.call.wait_ms and len(one.call.items) == 1 and is_long and one not in slow:
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
    """Sweeps a history for Takes that wait although there is room for them.

    held: by counter, the most that may be held, by the first of the clients that may have resumed each other. next: by
    rate, the latest time at which its next unit may be on time. fits: by waiting Take, since when there has been room
    for it, if there is. changed: by part, since when the same Takes have waited for it.
    """

    def __init__(self, history: Sequence[Operation], late_ns: int, slow: Collection[Operation]) -> None:
        self.late_ns = late_ns
        self.slow = slow
        self.held: dict[Part, Counter[int]] = defaultdict(Counter)
        self.next: dict[Part, Fraction | float] = {}
        self.waiting: dict[Part, dict[Operation, None]] = defaultdict(dict)
        self.fits: dict[Operation, int] = {}
        self.changed: dict[Part, int] = {}
        self.asleep: set[Operation] = set()
        self.closed = closings(history)
        self.lines = Lines(history)
        self.grants = {one.answer[1][0]: one.call for one in history if is_granted(one)}
        self.times = narrowed(history)
        self.events = sorted(self._events(history), key=lambda event: event[0])

    def found(self) -> Iterator[str]:
        """Complaints about each such Take. Examines those that wait now and then: no wait that is half as long again is
        missed.
        """
        looked_ns = 0
        for (now_ns, step, arguments), (next_ns, *_) in pairwise([*self.events, (self.late_ns << 8, None, ())]):
            for part in step(*arguments):
                for one in self.waiting[part]:
                    self._fit(one, now_ns)
            if next_ns > looked_ns + self.late_ns // 2:
                looked_ns = next_ns
                yield from self._look(next_ns)

    # ---- inside ----

    def _events(self, history: Sequence[Operation]) -> Iterator[tuple[int, Any, tuple[Any, ...]]]:
        """When to call which method with which arguments. Each method returns the parts of which more, or less, is
        there then.
        """
        for one in history:
            call = one.call
            last = self._gone_ns(one) if one.ended is None else one.ended
            may_have = one.answer is None or one.answer[0] == OK
            if isinstance(call, Goodbye) and one.ended is not None:
                root = self.lines.root(one.client)
                others = [self.closed.get(other) for other in self.lines.families[root] if other != one.client]
                if all(other is not None and ends_of(other) < one.started for other in others):
                    yield one.ended, self._leave, (root,)
            elif isinstance(call, Acquire) and may_have:
                yield one.started, self._take, (one, Permit(call.name, call.resources, call.maximum), inf)
            elif isinstance(call, Release) and one.answer is not None and one.answer[0] == OK:
                yield one.ended or 0, self._release, (one,)
            elif isinstance(call, Settle) and may_have:
                yield one.started, self._settle, (one, last)
            elif isinstance(call, Take):
                if may_have:
                    for item in items_of(call):
                        yield self._granted_ns(one), self._take, (one, item, last)
                if call.wait_ms:
                    yield one.started, self._wait, (one, one.started)
                    if last < inf:
                        yield last, self._end, (one, last)
        gone: dict[int, float] = defaultdict(float)  # when the last of a family had given back
        for one in self.lines.given_back(self.late_ns, {}):
            root = self.lines.root(one.client)
            gone[root] = max(gone[root], ends_of(one))
        for root, last in gone.items():
            if last < inf and self.closed.keys() >= set(self.lines.families[root]):
                yield int(last), self._leave, (root,)

    def _gone_ns(self, one: Operation) -> Any:
        return ends_of(self.closed[one.client]) if one.client in self.closed else inf

    def _granted_ns(self, one: Operation) -> int:
        """The time from which the client may have what it was granted."""
        if one.answer is None or one.ended is None:
            return one.started
        started = min(self.times[one][0], one.ended)
        return started if one in self.slow else max(started, one.ended - self.late_ns)

    def _take(self, one: Operation, item: Permit | Rate, last: float) -> Iterable[Part]:
        part = part_of(item)
        if isinstance(item, Permit):
            self.held[part][self.lines.root(one.client)] += item.amount
        elif last == inf:
            self.next[part] = inf
        else:
            begin = max(self.next.get(part, FULL), last - span(item, item.burst))
            self.next[part] = begin + span(item, item.amount)
        return (part,)

    def _release(self, one: Operation) -> Iterable[Part]:
        part = PERMITS, one.call.name
        self.held[part][self.lines.root(one.client)] -= one.call.resources
        return (part,)

    def _settle(self, one: Operation, last: float) -> Iterable[Part]:
        take = self.grants.get(one.call.grant)
        for item in items_of(take) if take else []:
            if isinstance(item, Rate) and item.name == one.call.name and one.call.used > item.amount:
                return self._take(one, item._replace(amount=one.call.used - item.amount), last)
        return ()

    def _leave(self, client: int) -> Iterable[Part]:
        return [part for part, held in self.held.items() if held.pop(client, None)]

    def _wait(self, one: Operation, now_ns: int) -> Iterable[Part]:
        for part in parts_of(one.call):
            self.waiting[part][one] = None
            self.changed[part] = now_ns
        return parts_of(one.call)

    def _end(self, one: Operation, now_ns: int) -> Iterable[Part]:
        for part in parts_of(one.call):
            del self.waiting[part][one]
            self.changed[part] = now_ns
        self.fits.pop(one, None)
        return ()

    def _fit(self, one: Operation, now_ns: int) -> None:
        """Notes since when there has been room for a Take that waits."""
        due = max(map(self._there_ns, items_of(one.call)))
        if due == inf:
            self.fits.pop(one, None)
        else:
            self.fits[one] = max(self.fits.get(one, now_ns), ceil(due))

    def _there_ns(self, item: Permit | Rate) -> Any:
        """The time from which enough of an item is there, if nobody else takes any; inf: not yet."""
        part = part_of(item)
        if isinstance(item, Rate):
            return self.next.get(part, FULL) + span(item, item.amount)
        return inf if self.held[part].total() > item.maximum - item.amount else 0

    def _look(self, until_ns: int) -> Iterator[str]:
        """Complains about the Takes for which there has been room for long until then."""
        for group in self._groups():
            since = max(self.fits[one] for one in group)
            since = max(since, *(self.changed[part] for one in group for part in parts_of(one.call)))
            certain = [one for one in group if one.answer is not None and one not in self.slow]
            if until_ns - since > STRETCH * self.late_ns and certain and not self.asleep.issuperset(certain):
                self.asleep.update(certain)
                yield f"slept for {(until_ns - since) // NS_PER_MS} ms although there was room: {certain}"

    def _groups(self) -> Iterator[list[Operation]]:
        """The Takes that wait for the same parts, directly or by way of each other, if there is room for each."""
        seen: set[Operation] = set()
        for first in self.fits:
            if first in seen:
                continue
            group = [first]
            seen.add(first)
            for one in group:
                others = {other for part in parts_of(one.call) for other in self.waiting[part]} - seen
                group += sorted(others)
                seen |= others
            if all(one in self.fits for one in group):
                yield group
