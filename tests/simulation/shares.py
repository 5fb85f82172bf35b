"""What the world of Takes knows by itself: rates, who holds and waits for what, what may be settled, and shares.

Written from docs/protocols/counter.md, with sums that are added up anew, times that are fractions, and no list of
anybody's in the order of the engine's. `Books` says what each request has to be answered, and what a tick has to do.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from simulation.world import MS, SECOND, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

TENTH = SECOND // 10
KEY_STEP = 4096  # parts of a unit, to which the engine rounds the end of a request of weight above 1


class Pace(NamedTuple):
    """Numbers of a rate: units in a period, microseconds, and units at once after a pause."""

    limit: int
    period_us: int
    burst: int

    def span(self, units: int) -> Fraction:
        """In which so many units come back, ns."""
        return Fraction(units * self.period_us * 1000, self.limit)


class Bucket:
    """A rate. next: from when on the next unit would be on time. fulls: how often it was seen to be full."""

    __slots__ = ("fulls", "limit", "next", "seen")

    def __init__(self) -> None:
        self.next = Fraction(-(1 << 80))
        self.limit = 1
        self.fulls = 0
        self.seen = 0  # until when there may be a record of it

    def at(self, pace: Pace, now: int) -> Fraction:
        """`next` in the parts of a nanosecond that these numbers have, and never more than the burst behind now."""
        following = self.next
        if self.limit != pace.limit:
            following = Fraction(math.ceil(following * pace.limit), pace.limit)
        return max(following, now - pace.span(pace.burst))

    def due(self, pace: Pace, units: int, now: int) -> Fraction:
        """From when on so many units are there."""
        return self.at(pace, now) + pace.span(units)

    def left(self, pace: Pace, now: int) -> int:
        return min(pace.burst, max(0, math.floor((now - self.at(pace, now)) / pace.span(1))))

    def look(self, pace: Pace, now: int) -> None:
        self.fulls += self.at(pace, now) == now - pace.span(pace.burst)

    def move(self, pace: Pace, units: int, now: int) -> None:
        """Takes units, or gives some back if there are fewer than none."""
        self.next = max(self.at(pace, now) + pace.span(units), now - pace.span(pace.burst))
        self.limit = pace.limit
        self.seen = max(self.seen, math.ceil(self.next + pace.span(pace.burst)) + 1)


class Item(NamedTuple):
    """Of a Take. pace: of a rate that the request describes. is_rate without a pace: the server has the numbers."""

    name: bytes
    is_rate: bool
    amount: int
    maximum: int = 0
    pace: Pace | None = None
    on_death: int = 0

    @property
    def thing(self) -> tuple[bytes, bool]:
        return self.name, self.is_rate


class Limited(NamedTuple):
    """An item with the numbers that apply to it. is_known: the server knows the rate, or does not have to."""

    item: Item
    most: int  # that can ever be had at once
    pace: Pace | None
    is_known: bool

    @property
    def is_possible(self) -> bool:
        return self.is_known and self.item.amount <= self.most


@dataclass(eq=False)
class Charge:
    """What a Take has taken of a rate, as long as it can be settled. grant: 0 as long as nobody was told."""

    party: Party
    item: Item
    pace: Pace
    grant: int
    tenths: int
    fulls: int


@dataclass(eq=False)
class Wait:
    """A Take that waits. queue: the counter or rate for which it does."""

    party: Party
    link: Any
    opaque: int
    items: tuple[Item, ...]
    until: int
    key: Any
    weight: int
    priority: int
    serial: int
    queue: tuple[bytes, bool]
    charges: list[Charge] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Take {self.serial} of {self.party.number}, key {self.key!r}, for {self.items} in {self.queue}"

    @property
    def may_move(self) -> bool:
        """From one queue to another, also there and back in one tick: then it is behind those with the same key."""
        return len(self.items) > 1

    @property
    def wanted(self) -> Item:
        return next(item for item in self.items if item.thing == self.queue)


@dataclass(eq=False)
class Party:
    """Who holds something: a connection, or what has stayed of one. number: the engine's.

    peer: as Connection.whom() says.
    state: open, kept (for its grace time) or leaving (to be given back in the next tick).
    """

    number: int
    link: Any
    peer: tuple[bytes, bool]
    held: dict[bytes, int] = field(default_factory=dict)
    token: bytes = b""
    former: tuple[bytes, int] = (b"", 0)
    grace_ms: int = 0
    state: str = "open"
    until: int = 0
    title: str = ""


@dataclass
class Sizes:
    buckets: int
    holdings: int
    per_connection: int  # 0: as many as there are
    waiters: int
    waiters_per_connection: int
    settle_s: int
    resume_s: int
    shares: tuple[int, int]  # in percent: of a peer elsewhere, and on this machine


class Books:
    """All that a store should know. The world tells it what happens, in the order in which the engine does it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.now = 0
        self.parties: list[Party] = []
        self.waits: dict[int, Wait] = {}  # by serial
        self.charges: list[Charge] = []  # the oldest first
        self.buckets: dict[bytes, Bucket] = {}
        self.caps: dict[bytes, int] = {}  # limits of the server, by name or beginning with *
        self.paces: dict[bytes, Pace] = {}
        self.rules: dict[tuple[bytes, bool], Any] = {}  # of names that were looked up since
        self.draining = False
        self.serial = 0
        self.stale = False  # limits are new, or a drain has begun: what waits is looked at in the next tick
        self.shares = Shares()
        self.events: list[tuple[str, str]] = []  # what has happened, for who counts it

    # ---- what there is ----

    def total(self, name: bytes) -> int:
        return sum(party.held.get(name, 0) for party in self.parties)

    def holdings(self) -> int:
        return sum(len(party.held) for party in self.parties)

    def bucket(self, name: bytes) -> Bucket:
        return self.buckets.setdefault(name, Bucket())

    def waits_of(self, party: Party) -> list[Wait]:
        return [wait for wait in self.waits.values() if wait.party is party]

    def charges_of(self, party: Party) -> list[Charge]:
        return [charge for charge in self.charges if charge.party is party]

    def kept(self) -> list[Party]:
        return [party for party in self.parties if party.state == "kept"]

    def is_awaited(self, thing: tuple[bytes, bool]) -> bool:
        return any(wait.queue == thing for wait in self.waits.values())

    def rule(self, name: bytes, is_rate: bool) -> Any:
        rules: dict[bytes, Any] = self.paces if is_rate else self.caps
        beginnings = (rules.get(name[:end] + b"*") for end in range(len(name), -1, -1))
        return rules.get(name, next((rule for rule in beginnings if rule is not None), None))

    def load(self, caps: dict[bytes, int], paces: dict[bytes, Pace]) -> None:
        """Limits of the server, which apply at once; what waits is looked at in the next tick."""
        self.caps, self.paces, self.stale = caps, paces, True
        self.rules.clear()

    def limited(self, item: Item) -> Limited:
        """With the most specific limit of the server: the name itself, else the longest beginning."""
        if item.thing not in self.rules:
            self.rules[item.thing] = self.rule(*item.thing)
        rule = self.rules[item.thing]
        if not item.is_rate:
            return Limited(item, item.maximum if rule is None else min(item.maximum, rule), None, True)
        pace = rule or item.pace
        return Limited(item, pace.burst if pace else 0, pace, pace is not None)

    def due(self, limited: Limited) -> Fraction | None:
        """From when on an item is there, whoever waits for it; None: nobody knows."""
        item = limited.item
        if limited.pace is not None:
            return self.bucket(item.name).due(limited.pace, item.amount, self.now)
        return Fraction(0) if self.total(item.name) + item.amount <= limited.most else None

    def is_there(self, limited: Limited) -> bool:
        due = self.due(limited)
        return due is not None and due <= self.now

    def left(self, limited: Limited) -> int:
        if not limited.is_known:
            return 0
        if limited.pace is not None:
            return self.bucket(limited.item.name).left(limited.pace, self.now)
        return limited.most - min(limited.most, self.total(limited.item.name))

    def retry_ms(self, limited: Limited) -> int:
        due = self.due(limited)
        if limited.pace is None or due is None or due <= self.now:
            return 0xFFFFFFFF
        return -(-(math.ceil(due) - self.now) // MS)

    # ---- what may have run out ----

    def records_may_lack(self, things: Iterable[tuple[bytes, bool]]) -> bool:
        """Whether there may be no record for one of these. What is idle makes room, and the ends of rates are late."""
        wanted = set(things)
        used = {(name, False) for party in self.parties for name in party.held}
        used |= {item.thing for wait in self.waits.values() for item in wait.items}
        rates = {name for name, bucket in self.buckets.items() if bucket.seen + 2 * (1 << 20) > self.now}
        used |= {(name, True) for name in rates} | wanted
        rates |= {name for name, is_rate in used if is_rate}
        return len(used) > self.sizes.buckets or len(rates) > max(1, self.sizes.buckets // 2)

    def has_holdings(self, party: Party, names: Iterable[bytes]) -> bool:
        new = sum(name not in party.held for name in names)
        most = self.sizes.per_connection or self.sizes.holdings
        return new == 0 or (
            self.holdings() + new <= self.sizes.holdings and len(party.held) + new <= most
        )  # fmt: skip

    def has_charges(self, count: int) -> bool:
        """Makes room for charges. Ends the oldest for that, of which the units stay taken anyway."""
        while len(self.charges) + count > self.sizes.holdings:
            if not self.charges or self.charges[0].item.on_death == 2:
                return False
            self.charges.pop(0)
            self.events.append(("charge", "dropped"))
        return True

    def share(self, party: Party, places: int) -> int:
        """How many of these places its peer can have."""
        return max(1, places * self.sizes.shares[party.peer[1]] // 100)

    def can_wait(self, party: Party, items: tuple[Item, ...]) -> bool:
        sizes, more = self.sizes, len(items) - 1
        others = [wait for wait in self.waits.values() if wait.party.peer == party.peer]
        most = self.share(party, sizes.waiters)
        if len(self.waits) >= sizes.waiters or further_items(self.waits.values()) + more > sizes.waiters:
            return False
        if len(self.waits_of(party)) >= (sizes.waiters_per_connection or sizes.waiters):
            return False
        if len(others) < most and (not more or further_items(others) + more <= most):
            return True
        self.events.append(("share", "waits"))
        return False

    def can_stay(self, party: Party) -> bool:
        kept, held = self.kept(), len(party.held)
        others = [other for other in kept if other.peer == party.peer]
        most, most_held = 2 * self.sizes.holdings, (self.sizes.holdings + 1) // 2
        if len(kept) >= most or sum(len(other.held) for other in kept) + held > most_held:
            return False
        of_peer = sum(len(other.held) for other in others) + held
        if len(others) < self.share(party, most) and (not held or of_peer <= self.share(party, most_held)):
            return True
        self.events.append(("share", "stays"))
        return False

    # ---- what happens ----

    def grant(self, party: Party, items: Iterable[Limited], number: int) -> list[Charge]:
        """Gives all of them, and notes what may be settled. There has to be enough."""
        made = []
        for limited in items:
            item, pace = limited.item, limited.pace
            if not self.is_there(limited):
                raise Violation("limit", f"{item} was granted to {party.number}, with {self.left(limited)} left")
            if pace is None:
                party.held[item.name] = party.held.get(item.name, 0) + item.amount
                continue
            bucket = self.bucket(item.name)
            bucket.look(pace, self.now)
            bucket.move(pace, item.amount, self.now)
            if item.on_death:
                made.append(Charge(party, item, pace, number, self.now // TENTH, bucket.fulls))
        self.charges += made
        return made

    def settle(self, charge: Charge, used: int) -> None:
        """Ends a charge. Nothing comes back of what has been full since."""
        self.charges.remove(charge)
        bucket, taken = self.bucket(charge.item.name), charge.item.amount
        bucket.look(charge.pace, self.now)
        if used > taken or bucket.fulls == charge.fulls:
            bucket.move(charge.pace, used - taken, self.now)

    def release(self, party: Party, name: bytes, amount: int) -> None:
        party.held[name] -= amount
        if not party.held[name]:
            del party.held[name]

    def give_back(self, party: Party) -> None:
        """Everything, at once."""
        for charge in self.charges_of(party):
            if charge.item.on_death == 2:
                self.settle(charge, 0)
                self.events.append(("charge", "refunded"))
            else:
                self.charges.remove(charge)
        party.held.clear()

    def end(self, party: Party) -> None:
        """Its connection has ended: what it holds stays for its grace time, or is given back in the next tick."""
        holds = bool(party.held or self.charges_of(party))
        if holds and party.token and self.sizes.resume_s and not self.draining and self.can_stay(party):
            party.state = "kept"
            party.until = self.now + min(party.grace_ms, self.sizes.resume_s * 1000) * MS
        elif holds or self.waits_of(party):
            party.state = "leaving"
        else:
            self.parties.remove(party)
        if party.state != "kept":
            party.token, party.former = b"", (b"", 0)

    def see(self, items: Iterable[Item]) -> None:
        """There may be records of these rates until the next tick but one, full or not."""
        for item in items:
            if item.is_rate:
                self.bucket(item.name).seen = max(self.bucket(item.name).seen, self.now + 1)

    def end_wait(self, wait: Wait) -> None:
        del self.waits[wait.serial]
        self.see(wait.items)
        if not any(other.key == wait.key and other.queue == wait.queue for other in self.waits.values()):
            self.shares.end(wait.queue, wait.key)

    def find(self, token: bytes, attempt: int) -> Party | None:
        """Whose token it is."""
        for party in self.parties:
            last = party.former[1]
            follows = attempt > last and attempt >> 16 == last >> 16
            if party.token and token in (party.token, party.former[0] if follows else b""):
                return party
        return None

    # ---- a tick ----

    def leave(self) -> list[Wait]:
        """What has ended is given back; the Takes that are removed with it."""
        for party in self.kept():
            if party.until <= self.now or self.draining:
                party.state, party.token = "leaving", b""
                self.events.append(("grace", "over"))
        gone = [wait for wait in self.waits.values() if wait.party.state != "open"]
        for party in [party for party in self.parties if party.state == "leaving"]:
            self.give_back(party)
            self.parties.remove(party)
        return gone

    def expire_charges(self) -> None:
        while self.charges and self.now // TENTH - self.charges[0].tenths > self.sizes.settle_s * 10:
            self.charges.pop(0)
            self.events.append(("charge", "expired"))

    def dues(self) -> list[int]:
        """When something ends."""
        return [*(wait.until for wait in self.waits.values()), *(party.until for party in self.kept())]

    def claim_awake(self, due: int) -> None:
        """Nobody sleeps in whose turn there is enough, and the engine wants its turn in time. due: when it does."""
        late = (1 << 20) + self.now if due < 0 else due
        soonest = min(self.dues(), default=None)
        if soonest is not None and (due < 0 or due > max(soonest + (1 << 20), self.now)):
            raise Violation("late", f"something ends at {soonest}, and the engine waits until {due}")
        leaving = any(party.state == "leaving" for party in self.parties)
        if (leaving or (self.stale and self.waits)) and not 0 <= due <= self.now:
            raise Violation("late", f"something is to be done now, and the engine waits until {due}")
        if 0 <= due <= self.now:
            return
        for thing in {wait.queue: None for wait in self.waits.values()}:
            dues = [self.due(self.limited(wait.wanted)) for wait in self.shares.firsts(thing, self.waits.values())]
            latest = max((each for each in dues if each is not None), default=Fraction(0))
            if None not in dues and (due < 0 or late > max(math.ceil(latest) + 2 * (1 << 20), self.now)):
                raise Violation("asleep", f"somebody waits for {thing}, of which there was enough at {float(latest)}")


def further_items(waits: Iterable[Wait]) -> int:
    """The items of these Takes after the first of each."""
    return sum(len(wait.items) - 1 for wait in waits)


class Pair:
    """What one key got more than another, divided by their weights, since both wait; and the extremes of that."""

    __slots__ = ("grants", "high", "largest", "low", "more", "weights")

    def __init__(self, weights: tuple[int, int]) -> None:
        self.weights = weights
        self.more = self.low = self.high = Fraction(0)
        self.largest = [0, 0]
        self.grants = 0


class Shares:
    """That turns are kept, and that keys get their shares, in queues in which nobody has moved.

    In any interval in which two keys wait, if all have the same priority, what they got, each divided by
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
