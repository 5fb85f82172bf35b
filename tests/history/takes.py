"""Takes: docs/protocols/counter.md as a model, with several names at once, rates, and Takes that wait.

    operations = load(paths)
    assert mistakes(operations, late_ns=...) == []          # waiting.py
    history = prepared(operations)
    assert check(history, TakeModel(history)) is None

Answers are (status, value): value is (number of the grant, what is left of each item) of a Take that was granted, and
(item, what is left of it, milliseconds or None) of one that was refused for a shortage; else None, or as counter.py has
it. A Take starts with its request and ends with its reply, which may come after those to later requests.

Several names at once stay fast in three ways:

- names are in one *group* only if a Take of the history names both, or others connect them; each group is an object of
  its own. So let clients take together what belongs together, a few names each;
- within a group the search lets only those calls take effect that share names with the one that ends (Model.parts);
- the numbers of grants rise, so they say in which order all grants took effect, over all names: `prepared` narrows the
  time within which each did, to that after the start of all earlier grants and before the end of all later ones.
  A Take that waits for a second is thereby under way for hardly longer than an Acquire.

What is exact: permits; all or nothing; numbers; that nobody is refused what is there and nobody else waits for; that
what a dead connection had comes back once. A rate is as exact as the moments of the calls are known: the model keeps
within which time the next unit is on time, in fractions of a nanosecond, and accepts hardly more than is possible. That
a refusal is excused by somebody who waits is believed of each Take that may have waited then. When a Take has to be
granted, and whose turn it is, is in waiting.py.

A connection that is resumed hands over what it has of a group at one moment, and of another group at another;
resumptions.py says when what nobody has resumed is given back.

Not modelled: counter.settle_time, and more charges than the server has room for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from fractions import Fraction
from functools import cache
from math import ceil, floor, inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.counter.wire import OnDeath, Permit, Rate
from history.counter import (
    NOT_AVAILABLE,
    NOT_FOUND,
    OK,
    OUT_OF_MEMORY,
    Acquire,
    CounterModel,
    Get,
    Release,
    changed,
    held,
)  # fmt: skip
from history.model import Model
from history.operations import Closed, Operation
from history.resumptions import Goodbye, Held, Lines, Resume, may_resume

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
__all__ = [
    "Acquire", "Cancel", "Closed", "Get", "Goodbye", "Held", "Release", "Resume", "Settle", "Take", "TakeModel",
    "prepared",
]  # fmt: skip

CANCELLED = 0x23
NEVER = 1 << 63  # ns
NS_PER_US, NS_PER_MS = 1000, 1_000_000
LONGEST_NS = 316_224_000 * 1_000_000_000  # that a burst or a debt can be: ten years
FULL = Fraction(-(1 << 90))  # `next` of a rate of which nobody ever took anything
NOTHING_SEEN: Mapping[int, int] = MappingProxyType({})
UNKNOWN = 0  # the number of a grant that was never answered
PERMITS, RATE, NUMBERS, MOVED, LOANS = 1, 2, 0, 3, 4
GRANTS = (NUMBERS, b"")  # the part that all grants share

Item = tuple[Any, ...]  # the fields of a Permit or a Rate
# PERMITS, RATE or LOANS (loans.py), and the name; or MOVED, and the connection whose token it was.
Part = tuple[int, Any]


class Take(NamedTuple):
    """A Take. items: as plain tuples. awaited: others may have waited for the item that was short; prepared() fills it
    in.
    """

    opaque: int
    items: tuple[Item, ...]
    wait_ms: int = 0
    key: bytes = b""
    weight: int = 1
    priority: int = 0
    awaited: bool = False


class Cancel(NamedTuple):
    """A Cancel. take: the opaque of the Take."""

    take: int


class Settle(NamedTuple):
    grant: int
    name: Any
    used: int


def items_of(take: Take) -> list[Permit | Rate]:
    return [Permit(*item) if len(item) == len(Permit._fields) else Rate(*item) for item in take.items]


def part_of(item: Permit | Rate) -> Part:
    return (PERMITS if isinstance(item, Permit) else RATE), item.name


def parts_of(call: Any) -> list[Part]:
    """The counters and rates that a call names."""
    if isinstance(call, Take):
        return [part_of(item) for item in items_of(call)]
    if isinstance(call, Resume | Goodbye):
        return list(call.parts) if isinstance(call, Resume) else [call.part]
    return [(RATE if isinstance(call, Settle) else PERMITS, call.name)]


def is_granted(operation: Operation) -> bool:
    return isinstance(operation.call, Take) and operation.answer is not None and operation.answer[0] == OK


def ends_of(operation: Operation) -> float:
    return inf if operation.ended is None else operation.ended


# ---- before the search ----------------------------------------------------------------------------------------------


def narrowed(operations: Iterable[Operation]) -> dict[Operation, tuple[int, int]]:
    """The time within which each grant took effect: its number places it between the grants before and after it.

    If the numbers contradict the times, it is a time that ends before it starts.
    """
    grants = sorted(filter(is_granted, operations), key=lambda operation: operation.answer[1][0])
    starts, ends = [], []
    latest, soonest = 0, NEVER
    for grant in grants:
        latest = max(latest, grant.started)
        starts.append(latest)
    for grant in reversed(grants):
        soonest = min(soonest, grant.ended or 0)
        ends.append(soonest)
    return dict(zip(grants, zip(starts, reversed(ends), strict=True), strict=True))


def prepared(
    operations: Iterable[Operation],
    *,
    late_ns: int = NEVER,
    slow: Collection[int] = (),
    seen_ns: Mapping[int, int] = NOTHING_SEEN,
) -> list[Operation]:
    """The history as TakeModel wants it: without what has no effect, and with the times that the rules leave.

    late_ns: by how much a reply may be late, but of clients that are slow, and the end of a grace time. So a Take
    without a reply can only have been granted in the last time of its connection. seen_ns: when what a connection had
    was seen to have been given back, of those with a grace time.
    """
    operations = sorted(operations, key=lambda operation: operation.started)
    lines = Lines(operations)
    closed = {one.client: one for one in operations if isinstance(one.call, Closed)}
    times = narrowed(operations)
    waiting = defaultdict(list)
    for one in operations:
        if isinstance(one.call, Take) and one.call.wait_ms:
            last = min(ends_of(one), ends_of(closed[one.client]) if one.client in closed else inf)
            for part in parts_of(one.call):
                waiting[part].append((one, last))

    starts = {part: [one.started for one, _ in takes] for part, takes in waiting.items()}

    def is_awaited(part: Part, asked: Operation) -> bool:
        """Whether another Take may have waited for the part during this call. The latest are examined first, as the
        most likely.
        """
        end = bisect_right(starts.get(part, []), ends_of(asked))
        return any(one is not asked and asked.started <= last for one, last in reversed(waiting[part][:end]))

    found = lines.given_back(late_ns, seen_ns)
    for one in operations:
        call, status = one.call, OK if one.answer is None else one.answer[0]
        if isinstance(call, Acquire) and status == NOT_AVAILABLE and is_awaited((PERMITS, call.name), one):
            continue
        if isinstance(call, Take):
            if is_granted(one):
                started, ended = times[one]
                found.append(one._replace(started=min(started, ended), ended=ended))
            elif one.answer is None:
                is_known = one.client in closed and one.client not in slow
                since = closed[one.client].started - late_ns if is_known else 0
                found.append(one._replace(started=max(one.started, since)))
            elif status == NOT_AVAILABLE:
                short = part_of(items_of(call)[one.answer[1][0]])
                over = one.started + call.wait_ms * NS_PER_MS
                started = over if over <= ends_of(one) else one.started
                found.append(one._replace(started=started, call=call._replace(awaited=is_awaited(short, one))))
        elif not isinstance(call, Cancel | Closed) and not (isinstance(call, Held) and one.answer is None):
            found.append(one)
    return list(spread((bounded(one, closed) for one in found), lines))


def bounded(one: Operation, closed: Mapping[int, Operation]) -> Operation:
    """A call without an answer, which takes effect before its connection's end; that may be long before the end of the
    grace time.
    """
    if one.answer is not None or isinstance(one.call, Closed) or one.client not in closed:
        return one
    ended = closed[one.client].ended
    return one._replace(ended=None if ended is None else max(ended, one.started))


def spread(operations: Iterable[Operation], lines: Lines) -> Iterator[Operation]:
    """The history with each Resume that may have had an effect once for each group, and each Goodbye once for each part
    that it concerns.
    """
    operations = list(operations)
    groups = groups_of(operations)
    touched: dict[int, set[Part]] = defaultdict(set)
    for one in operations:
        if not isinstance(one.call, Closed | Resume | Goodbye):
            touched[lines.root(one.client)].update(parts_of(one.call))
    for one in operations:
        if not isinstance(one.call, Goodbye | Resume):
            yield one
            continue
        parts = sorted(touched[lines.root(one.client)])
        if isinstance(one.call, Goodbye):
            for part in parts:
                yield one._replace(call=Goodbye(part))
        elif may_resume(one):
            for group in sorted({groups[part] for part in parts}):
                concerned = tuple(part for part in parts if groups[part] == group)
                yield one._replace(call=one.call._replace(parts=concerned))


def groups_of(operations: Iterable[Operation]) -> dict[Part, tuple[Part, ...]]:
    """For each part, all the parts that Takes connect with it."""
    groups: dict[Part, tuple[Part, ...]] = {}
    for operation in operations:
        if not isinstance(operation.call, Closed | Resume | Goodbye):
            parts = parts_of(operation.call)
            group = {part for each in parts for part in (each, *groups.get(each, ()))}
            groups.update(dict.fromkeys(group, tuple(sorted(group))))
    return groups


# ---- rates ----------------------------------------------------------------------------------------------------------


class Charge(NamedTuple):
    """A charge of a client's Take. is_void: the rate has been full since, so nothing can be refunded."""

    client: int
    number: int
    item: Rate
    is_void: bool = False


class Level(NamedTuple):
    """The level of a rate. low, high: bounds of the time at which the next unit would be on time. since: the last
    change.
    """

    low: Fraction = FULL
    high: Fraction = FULL
    since: int = 0
    charges: tuple[Charge, ...] = ()


@cache
def span(rate: Rate, units: int) -> Fraction:
    """The time that so many units of the rate take."""
    return min(Fraction(units * rate.period_us * NS_PER_US, rate.limit), Fraction(LONGEST_NS))


def in_parts_of(level: Level, rate: Rate) -> Level:
    """The level with its times rounded up to the fraction of a nanosecond with which the rate counts."""
    return level._replace(low=rounded(level.low, rate.limit), high=rounded(level.high, rate.limit))


def rounded(time: Fraction, parts: int) -> Fraction:
    return time if parts % time.denominator == 0 else Fraction(ceil(time * parts), parts)


def voided(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    return tuple(charge._replace(is_void=True) for charge in charges)


def charged(level: Level, charge: Charge, first: int, last: int, left: int | None) -> Iterator[Level]:
    """The levels after the units of the charge were taken within that time.

    left: what the answer says is left. If the rate may have been full, or not, both are returned.
    """
    item = charge.item
    cost, burst, unit = span(item, item.amount), span(item, item.burst), span(item, 1)
    more = () if item.on_death == OnDeath.FINAL else (charge,)
    if level.low <= last - burst and left in (None, item.burst - item.amount):
        begin = max(Fraction(first), level.low + burst) - burst + cost
        yield Level(begin, last - burst + cost, first, tuple(sorted((*voided(level.charges), *more))))
    low, high = max(level.low, first - burst), min(level.high, last - cost)
    if left is not None:
        low, high = max(low, first - cost - (left + 1) * unit), min(high, last - cost - left * unit)
    if level.high > first - burst and low <= high:
        yield Level(low + cost, high + cost, first, tuple(sorted((*level.charges, *more))))


def settled(level: Level, charge: Charge, used: int, first: int, last: int) -> Iterator[Level]:
    """The levels after a charge was replaced by what was used, within that time."""
    item = charge.item
    burst = span(item, item.burst)
    others = list(level.charges)
    others.remove(charge)
    level = in_parts_of(level._replace(charges=tuple(others), since=first), item)
    low, high = max(level.low, first - burst), max(level.high, last - burst)
    if used >= item.amount:
        more = span(item, used - item.amount)
        if level.low <= last - burst:
            yield level._replace(low=low + more, high=high + more, charges=voided(level.charges))
        if level.high > first - burst:
            yield level._replace(low=low + more, high=high + more)
    elif charge.is_void:
        yield level
    else:
        less = span(item, item.amount - used)
        yield level._replace(low=max(low - less, first - burst), high=max(high - less, last - burst))


def left_by(level: Level, client: int, first: int, last: int) -> Iterator[Level]:
    """The levels after a connection's end: what is to be refunded is, once."""
    charge = next((charge for charge in level.charges if charge.client == client), None)
    if charge is None:
        yield level
        return
    if charge.item.on_death == OnDeath.REFUNDED:
        without = settled(level, charge, 0, first, last)
    else:
        without = iter([level._replace(charges=tuple(one for one in level.charges if one is not charge))])
    for after in without:
        yield from left_by(after, client, first, last)


def may_be_left(level: Level, item: Rate, left: int, first: int, last: int) -> bool:
    """Whether so much may be left of a rate within that time."""
    least = min(item.burst, max(0, floor((first - level.high) / span(item, 1))))
    most = min(item.burst, max(0, floor((last - level.low) / span(item, 1))))
    return least <= left <= most


# ---- the model ------------------------------------------------------------------------------------------------------

AT_FIRST: dict[int, Any] = {PERMITS: (0, ()), RATE: Level(), NUMBERS: UNKNOWN, MOVED: 0, LOANS: ()}
Group = tuple[tuple[Part, Any], ...]  # parts that are not as at first, in order; what each is


def value_of(state: Group, part: Part) -> Any:
    """The value of a part: of a counter its State, of a rate its Level, of NUMBERS the last number, of MOVED who has
    it, of LOANS all loans.
    """
    for other, value in state:
        if other == part:
            return value
    return AT_FIRST[part[0]]


def with_value(state: Group, part: Part, value: Any) -> Group:
    place = 0
    while place < len(state) and state[place][0] < part:
        place += 1
    is_there = place < len(state) and state[place][0] == part
    mine = ((part, value),) if value != AT_FIRST[part[0]] else ()
    return state[:place] + mine + state[place + is_there :]


class TakeModel(Model):
    """Model of counters and rates that are taken together, for a history that prepared() returns.

    draining: the daemon may have refused any Acquire or Take, as it was stopping.
    """

    def __init__(self, history: Iterable[Operation], *, draining: bool = False) -> None:
        self.counters = CounterModel(draining=draining)
        self.draining = draining
        self.groups = groups_of(history)

    def key(self, call: Any) -> Hashable:
        return self.groups[parts_of(call)[0]]

    def parts(self, operation: Operation) -> frozenset[Part]:
        call = operation.call
        also: Iterable[Part] = ((MOVED, call.old),) if isinstance(call, Resume) else ()
        return frozenset((*parts_of(call), *((GRANTS,) if is_granted(operation) else also)))

    def leaves(self, operation: Operation) -> frozenset[Part]:
        """Without the parts of which the call took nothing, and the rates of which the charge stays at the connection's
        end.
        """
        call, answer = operation.call, operation.answer
        if isinstance(call, Resume):
            return frozenset(call.parts)
        if answer is None:
            return self.parts(operation)
        if answer[0] != OK or not isinstance(call, Acquire | Take):
            return frozenset()
        if isinstance(call, Acquire):
            return self.parts(operation)
        return frozenset(
            part_of(item) for item in items_of(call) if getattr(item, "on_death", None) in (None, OnDeath.REFUNDED)
        )

    def initial(self) -> Group:
        return ()

    def step(self, state: Group, operation: Operation) -> Iterable[Group]:
        call = operation.call
        if isinstance(call, Take):
            return self._take(state, operation)
        if isinstance(call, Settle):
            return self._settle(state, operation)
        if isinstance(call, Resume):
            return self._resume(state, operation)
        if isinstance(call, Held):
            is_right = held(value_of(state, (PERMITS, call.name))[1], operation.client) == operation.answer[1]
            return (state,) if is_right else ()
        ends = isinstance(call, Closed | Goodbye)
        part = call.part if ends else (PERMITS, call.name)
        if part[0] == PERMITS:
            one = operation._replace(call=Closed()) if ends else operation
            return [with_value(state, part, after) for after in self.counters.step(value_of(state, part), one)]
        return self._close(state, part, operation)

    def observes(self, operation: Operation) -> bool:
        call = operation.call
        if isinstance(call, Take | Settle):
            return operation.answer is not None and operation.answer[0] != OK
        return isinstance(call, Held) or (not isinstance(call, Resume | Goodbye) and self.counters.observes(operation))

    def clears(self, operation: Operation) -> bool:
        return isinstance(operation.call, Goodbye)

    def alike(self, operation: Operation) -> Hashable | None:
        return self.counters.alike(operation) if isinstance(operation.call, Acquire | Release | Get) else None

    def describe(self, state: Group) -> str:
        return "; ".join(
            f"{name!r}: {self.counters.describe(value)}" if kind == PERMITS else f"{name!r}: {value}"
            for (kind, name), value in state
        )

    # ---- inside ----

    def _take(self, state: Group, operation: Operation) -> Iterable[Group]:
        call, answer = operation.call, operation.answer
        if answer is None:
            return self._granted(state, operation, UNKNOWN, [None] * len(call.items))
        status, value = answer
        if status == OK:
            number, left = value
            return self._granted(state, operation, number, left) if number > value_of(state, GRANTS) else ()
        is_right = status == OUT_OF_MEMORY or (status == NOT_AVAILABLE and self._is_short(state, operation))
        return (state,) if is_right else ()

    def _granted(self, state: Group, operation: Operation, number: int, left: Sequence[int | None]) -> Iterable[Group]:
        items = items_of(operation.call)
        first, last = operation.started, NEVER if operation.ended is None else operation.ended
        for item in items:
            before = value_of(state, part_of(item))
            if isinstance(item, Rate):
                before = in_parts_of(before, item)
                first = max(first, before.since, ceil(before.low + span(item, item.amount)))
        if first > last:
            return ()
        states = [with_value(state, GRANTS, number)] if number else [state]
        grant = operation.client, number
        for item, told in zip(items, left, strict=True):
            states = [after for each in states for after in one_taken(each, item, told, grant, (first, last))]
        return states

    def _is_short(self, state: Group, operation: Operation) -> bool:
        """Whether the item can have been short, and those before it not, in a Take that was refused at once."""
        call, (item, left, wait_ms) = operation.call, operation.answer[1]
        if self.draining and (left, wait_ms) == (0, None):
            return True
        items = items_of(call)
        first, last = operation.started, operation.ended or 0
        before = items[:item] if call.wait_ms == 0 else []
        if not all(may_be_there(state, each, first, last) for each in before):
            return False
        is_needed = call.wait_ms == 0 and not call.awaited
        return may_be_short(state, items[item], (left, wait_ms), first, last, is_needed=is_needed)

    def _settle(self, state: Group, operation: Operation) -> Iterable[Group]:
        call, part = operation.call, (RATE, operation.call.name)
        level = value_of(state, part)
        mine = [one for one in level.charges if (one.client, one.number) == (operation.client, call.grant)]
        if operation.answer is not None and operation.answer[0] != OK:
            status = operation.answer[0]
            return (state,) if status == OUT_OF_MEMORY or (status == NOT_FOUND and not mine) else ()
        first, last = max(operation.started, level.since), NEVER if operation.ended is None else operation.ended
        if not mine or first > last:
            return ()
        return [with_value(state, part, after) for after in settled(level, mine[0], call.used, first, last)]

    def _resume(self, state: Group, operation: Operation) -> Iterable[Group]:
        """Gives a connection that has nothing the holdings of another one. If that got no answer, the next to ask gets
        them.
        """
        call, successor = operation.call, operation.client
        moved = MOVED, call.old
        owner = value_of(state, moved) or call.old
        for part in call.parts:
            value = value_of(state, part)
            if part[0] == PERMITS:
                amount = held(value[1], owner)
                value = changed(changed(value, owner, -amount), successor, amount)
            else:
                charges = (one._replace(client=successor) if one.client == owner else one for one in value.charges)
                value = value._replace(charges=tuple(sorted(charges)))
            state = with_value(state, part, value)
        return (with_value(state, moved, successor if operation.answer is None else 0),)

    def _close(self, state: Group, part: Part, operation: Operation) -> Iterable[Group]:
        """Refunds the charges that are to be refunded at the connection's end, once."""
        level = value_of(state, part)
        first, last = max(operation.started, level.since), NEVER if operation.ended is None else operation.ended
        return [with_value(state, part, each) for each in left_by(level, operation.client, first, max(first, last))]


def one_taken(
    state: Group, item: Permit | Rate, left: int | None, grant: tuple[int, int], times: tuple[int, int]
) -> Iterator[Group]:
    """The states after an item was granted within that time. left: what the answer says is left. grant: its client and
    number.
    """
    part = part_of(item)
    before = value_of(state, part)
    if isinstance(item, Rate):
        for level in charged(in_parts_of(before, item), Charge(*grant, item), *times, left):
            yield with_value(state, part, level)
    elif before[0] <= item.maximum - item.amount and left in (None, item.maximum - before[0] - item.amount):
        yield with_value(state, part, changed(before, grant[0], item.amount))


def may_be_there(state: Group, item: Permit | Rate, first: int, last: int) -> bool:
    before = value_of(state, part_of(item))
    if isinstance(item, Permit):
        return bool(before[0] <= item.maximum - item.amount)
    return bool(in_parts_of(before, item).low + span(item, item.amount) <= last)


def may_be_short(
    state: Group, item: Permit | Rate, told: tuple[int, int | None], first: int, last: int, *, is_needed: bool
) -> bool:
    """Whether the answer may tell this of an item. is_needed: it is the item that was short."""
    left, wait_ms = told
    before = value_of(state, part_of(item))
    if isinstance(item, Permit):
        is_short = before[0] > item.maximum - item.amount
        return wait_ms is None and left == item.maximum - min(item.maximum, before[0]) and (is_short or not is_needed)
    level = in_parts_of(before, item)
    first = max(first, level.since)
    if first > last or not may_be_left(level, item, left, first, last):
        return False
    if wait_ms is None:
        return not is_needed
    due_low, due_high = (ceil(each + span(item, item.amount)) for each in (level.low, level.high))
    least, most = -((last - due_low) // NS_PER_MS), -((first - due_high) // NS_PER_MS)
    return due_high > first and max(0, least) <= wait_ms <= most
