"""What Takes mean: rates, who holds and waits for what, what may be settled, and what each request has to be answered.

Written from docs/protocols/counter.md, with sums that are added up anew, times that are fractions, and no list of
anybody's in the order of the engine's. Where either of two replies is right, the one that was given decides.
takes_both.py holds a store against it; so do the property test, the fuzzer and the simulation.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import counters
from kit.counters import ACQUIRE, GET, NO_MEMORY, NOT_ACQUIRED, NOT_AVAILABLE, NOT_FOUND, OK, RELEASE
from kit.promises import MS, SECOND, Violation
from property.takes_turns import Shares

if TYPE_CHECKING:
    from collections.abc import Iterable

    from property.takes_requests import Request

FULL = NO_MEMORY
TAKE, CANCEL, SETTLE, RESUME, GOODBYE, WHO, HELD = range(0x20, 0x27)
CANCELLED = 0x23
TEXTS = {**counters.TEXTS, CANCELLED: b"Cancelled"}
DRAINING, OVER = b"Draining", b"More than the limit of the server"
NO_TIME = 0xFFFFFFFF

_SHORT = struct.Struct(">BIII")  # the item that is short, what is left of it, its maximum, and when it will be there
TENTH = SECOND // 10


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
    client: Any
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
    client: Any
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
        if used > taken or (used < taken and bucket.fulls == charge.fulls):
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


# ---- what requests have to be answered ----------------------------------------------------------------------------


def short_body(books: Books, limited: list[Limited], at: int, ms: int) -> bytes:
    return _SHORT.pack(at, books.left(limited[at]), limited[at].most, ms)


def short_text(body: bytes) -> bytes:
    return body[_SHORT.size :]


def decide(books: Books, party: Party, request: Request, status: int) -> tuple[int, bytes]:
    """What a request has to be answered. status: as it was; where either is right, it decides."""
    name, amount = request.name, request.amount
    held = party.held.get(name, 0)
    opcode, verdict, body = request.opcode, OK, b""
    if opcode == ACQUIRE:
        return decide_acquire(books, party, request, status)
    if opcode == RELEASE:
        if status == NOT_FOUND and not books.total(name):
            verdict = NOT_FOUND
        elif amount > held:
            verdict = NOT_ACQUIRED
        elif amount:
            books.release(party, name, amount)
    elif opcode == GET:
        verdict = OK if books.total(name) or status != NOT_FOUND else NOT_FOUND
        body = books.total(name).to_bytes(4, "big") if verdict == OK else b""
    elif opcode == HELD:
        body = held.to_bytes(4, "big")
    elif opcode == CANCEL:
        verdict = OK if request.is_done else NOT_FOUND
        if any(wait.opaque == request.take for wait in books.waits_of(party)):
            raise Violation("waits", f"{request} has ended no wait, and the Take waits")
    elif opcode == SETTLE:
        verdict = decide_settle(books, party, request, status)
    elif opcode == GOODBYE:
        if books.waits_of(party):
            raise Violation("replies", f"connection {party.number} has said goodbye, and waits on")
        books.give_back(party)
        party.token, party.former = b"", (b"", 0)
    return verdict, body or (TEXTS[verdict] if verdict else b"")


def decide_acquire(books: Books, party: Party, request: Request, status: int) -> tuple[int, bytes]:
    name = request.name
    item = Item(name, False, request.amount, request.maximum)
    limited = books.limited(item)
    if books.draining:
        return NOT_AVAILABLE, DRAINING
    if not limited.is_possible:
        return NOT_AVAILABLE, OVER + b": %d" % limited.most
    verdict = OK
    if status == FULL and (
        not books.has_holdings(party, [name]) or books.records_may_lack([(name, False)])
    ):  # fmt: skip
        verdict = FULL
    elif not books.is_there(limited) or books.is_awaited((name, False)):
        verdict = NOT_AVAILABLE
    elif not books.has_holdings(party, [name]):
        verdict = FULL
    else:
        books.grant(party, [limited], 0)
    return verdict, TEXTS[verdict] if verdict else request.amount.to_bytes(4, "big")


def decide_settle(books: Books, party: Party, request: Request, status: int) -> int:
    for charge in books.charges_of(party):
        if charge.grant == request.grant and charge.item.name == request.name:
            has_more = request.amount > charge.item.amount
            if status == FULL and has_more and books.records_may_lack([(request.name, True)]):
                return FULL
            books.settle(charge, request.amount)
            return OK
    return NOT_FOUND


def short_items(books: Books, items: tuple[Item, ...]) -> list[Limited]:
    """The items of which there is too little for a newcomer."""
    limited = [books.limited(item) for item in items]
    return [
        each for each in limited if not books.is_there(each) or books.is_awaited(each.item.thing)
    ]  # fmt: skip


def decide_take(
    books: Books, party: Party, request: Request, told: int | None, *, is_over: bool
) -> tuple[int | None, bytes, list[Limited]]:
    """The status of a Take, None if it has to wait, the body of a refusal, and its items as they are limited.

    told: as it was answered. is_over: the peer sends nothing more, so that it cannot wait.
    """
    limited = [books.limited(item) for item in request.items]
    impossible = why_impossible(books, limited)
    if impossible is not None:
        return (*impossible, limited)
    lacks = told == FULL and books.records_may_lack(each.item.thing for each in limited)
    books.see(request.items)  # whatever becomes of the Take
    short = [] if lacks else short_items(books, request.items)
    if short and request.wait_ms and not is_over and books.can_wait(party, request.items):
        return None, b"", limited
    if short and (is_over or not request.wait_ms):
        at = limited.index(short[0])
        ms = NO_TIME if books.is_there(short[0]) else books.retry_ms(short[0])
        return NOT_AVAILABLE, short_body(books, limited, at, ms) + TEXTS[NOT_AVAILABLE], limited
    charges = sum(each.item.on_death > 0 for each in limited)
    names = [each.item.name for each in limited if not each.item.is_rate]
    if lacks or short or not books.has_holdings(party, names) or not books.has_charges(charges):
        return FULL, TEXTS[FULL], limited
    return OK, b"", limited


def why_impossible(books: Books, limited: list[Limited], wanted: int = 0) -> tuple[int, bytes] | None:
    """How a Take is refused that cannot be granted whatever is given back, or None. wanted: the item it waited for."""
    if books.draining:
        return NOT_AVAILABLE, short_body(books, limited, wanted, NO_TIME) + DRAINING
    for at, each in enumerate(limited):
        if not each.is_known:
            return NOT_FOUND, b"No limit for the rate of item %d: send one, or add it to counter.limits" % at
        if not each.is_possible:
            return NOT_AVAILABLE, short_body(books, limited, at, NO_TIME) + OVER
    return None
