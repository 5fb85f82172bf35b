"""Takes of several connections, drawn at random, and bookkeeping that knows nothing of how the engine works.

Connections have tokens, end with them or say goodbye, and go on with what another one holds.

After each step the engine is audited, and these promises are checked:

- every Take is answered once, by its deadline at the latest;
- nothing is granted beyond a maximum, all or nothing, and what connections hold is what they were granted;
- a rate never grants more than its limit allows since any earlier time, exactly;
- nobody waits for what is there, unless others wait for a part of it;
- what a connection with a token held stays for its grace time, belongs to who presents the token, once, and is then
  given back.

A LimitedHistory also has limits of the server, which change: nothing is granted beyond them, they never take anything
back, and nobody waits for what they make impossible.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from counterd.protocols.counter.limits import parse_limits
from counterd.protocols.counter.wire import Grant, OnDeath, Permit, Rate, Shortage, Status, Stay
from kit.takes import MS, Desk, Taker

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE_NS = 3 * MS  # a tick of the wheel, and one of cascading
MAXIMA = {b"a": 1, b"b": 3, b"c": 10}
RATES = {b"x": (7, 1_000_000, 3), b"y": (1000, 60_000_000, 200), b"z": (1, 250_000, 1)}
KEYS = (b"", b"k", b"l")
WAITS = (0, 0, 1, 30, 500, 100_000)
GRACES_MS = (1, 30, 500, 5_000)
RESUME_MAX_S = 2
TICK_SHIFT = 20  # the engine looks at grace times when a tick of so many bits of nanoseconds begins


@dataclass
class Bucket:
    """A rate as people explain it: a bucket of units that fills steadily, up to the burst."""

    limit: int
    period_us: int
    burst: int
    units: Fraction = Fraction(0)
    at_ns: int = 0
    fulls: int = 0  # how often it was found full

    def __post_init__(self) -> None:
        self.units = Fraction(self.burst)

    def fill(self, now_ns: int) -> None:
        grown = Fraction((now_ns - self.at_ns) * self.limit, self.period_us * 1000)
        self.units = min(Fraction(self.burst), self.units + grown)
        self.fulls += self.units == self.burst
        self.at_ns = now_ns


@dataclass
class Asked:
    """A Take that was sent."""

    taker: Taker
    opaque: int
    items: tuple[Permit | Rate, ...]
    ends_ns: int
    waits: bool = True


@dataclass
class Books:
    """What should be held, and what is in the buckets."""

    held: dict[Taker, Counter[bytes]] = field(default_factory=dict)
    buckets: dict[bytes, Bucket] = field(default_factory=lambda: {name: Bucket(*rate) for name, rate in RATES.items()})
    charges: dict[tuple[Taker, int, bytes], tuple[Rate, int]] = field(default_factory=dict)  # with Bucket.fulls
    stays: dict[Taker, Stay] = field(default_factory=dict)
    former: dict[Taker, tuple[bytes, int]] = field(default_factory=dict)  # the token presented last, and the attempt
    kept: dict[Taker, int] = field(default_factory=dict)  # those that have ended: until when what they held stays
    asked: list[Asked] = field(default_factory=list)

    def consumption(self, name: bytes) -> int:
        return sum(book[name] for book in self.held.values())

    def charges_of(self, taker: Taker) -> list[tuple[Taker, int, bytes]]:
        return [charge for charge in self.charges if charge[0] is taker]

    def number(self, taker: Taker) -> int:
        """The number of its connection in the engine, also of one that is kept: then the token has it."""
        return int.from_bytes(self.stays[taker].token[:4], "big") if taker in self.kept else taker.session.number

    def hand_over(self, taker: Taker, other: Taker) -> None:
        """Gives one what another held, and nothing of the reverse."""
        self.held[taker] = self.held[other]
        self.held[other] = Counter()
        for charge in self.charges_of(other):
            self.charges[(taker, *charge[1:])] = self.charges.pop(charge)
        del self.stays[other]
        self.former.pop(other, None)

    def is_there(self, item: Permit | Rate) -> bool:
        if isinstance(item, Permit):
            return self.consumption(item.name) + item.amount <= item.maximum
        return self.buckets[item.name].units >= item.amount


class History:
    """A desk, its books, and what is drawn for them. random: a random.Random, or what draws like one."""

    def __init__(self, random: Any) -> None:
        self.random = random
        self.desk = Desk(buckets=16, holdings=256, waiters=32)
        self.desk.store.limit_stays(RESUME_MAX_S)
        self.books = Books()
        for _ in range(4):
            self.come()

    def come(self) -> None:
        self.books.held[self.desk.taker()] = Counter()

    def step(self) -> None:
        chosen = self.random.choice([taker for taker in self.books.held if taker not in self.books.kept])
        often = [self.take] * 4 + [self.release] * 2 + [self.wait] * 2
        seldom = [self.cancel, self.settle, self.leave, self.acquire, self.ask, self.resume, self.goodbye]
        self.random.choice([*often, *seldom])(chosen)
        self.check()

    # ---- what happens ----

    def take(self, taker: Taker) -> None:
        draw = self.random
        names = draw.sample([*MAXIMA, *RATES], draw.choice((1, 1, 1, 2, 3)))
        items: list[Permit | Rate] = []
        for name in names:
            items.append(self.permit(name) if name in MAXIMA else self.rate(name))
        wait_ms = draw.choice(WAITS)
        options = {"key": draw.choice(KEYS), "weight": draw.choice((1, 2, 1000)), "priority": draw.choice((0, 0, 0, 9))}
        opaque = taker.take(*items, wait_ms=wait_ms, **options)
        self.books.asked.append(Asked(taker, opaque, tuple(items), self.desk.pump.now_ns + wait_ms * MS, wait_ms > 0))

    def permit(self, name: bytes) -> Permit:
        return Permit(name, self.random.randint(1, MAXIMA[name]), MAXIMA[name])

    def rate(self, name: bytes) -> Rate:
        limit, period, burst = RATES[name]
        amount, on_death = self.random.randint(1, burst), self.random.choice([*OnDeath])
        return Rate(name, amount, limit, period, burst, on_death)

    def acquire(self, taker: Taker) -> None:
        name = self.random.choice([*MAXIMA])
        status = taker.acquire(name, 1, MAXIMA[name])
        if status == Status.NO_ERROR:
            assert self.books.is_there(Permit(name, 1, MAXIMA[name]))
            self.books.held[taker][name] += 1
        else:
            assert status == Status.RESOURCE_NOT_AVAILABLE
            is_awaited = any(name == item.name for asked in self.waiting() for item in asked.items)
            assert is_awaited or not self.books.is_there(Permit(name, 1, MAXIMA[name]))

    def release(self, taker: Taker) -> None:
        held = +self.books.held[taker]
        if held:
            name = self.random.choice([*held])
            amount = self.random.randint(1, held[name])
            self.books.held[taker][name] -= amount
            assert taker.release(name, amount) == Status.NO_ERROR

    def cancel(self, taker: Taker) -> None:
        waiting = [asked for asked in self.waiting() if asked.taker is taker]
        if waiting:
            chosen = self.random.choice(waiting)
            assert taker.cancel(chosen.opaque) == Status.NO_ERROR
            assert taker.of(chosen.opaque) == Status.CANCELLED

    def settle(self, taker: Taker) -> None:
        charges = self.books.charges_of(taker)
        if charges:
            charge = self.random.choice(charges)
            _, grant, name = charge
            item, fulls = self.books.charges.pop(charge)
            used = self.random.randint(0, 2 * item.amount)
            self.refund(item, fulls, used)
            assert taker.status(wire.settle(0, grant, name, used)) == Status.NO_ERROR

    def refund(self, item: Rate, fulls: int, used: int) -> None:
        """Nothing comes back into a bucket that has been full since: what was taken has come back in time."""
        bucket = self.books.buckets[item.name]
        bucket.fill(self.desk.pump.now_ns)
        if used > item.amount or bucket.fulls == fulls:
            bucket.units = min(Fraction(bucket.burst), bucket.units + item.amount - used)

    def leave(self, taker: Taker) -> None:
        books = self.books
        if self.random.random() < 0.5:
            return
        if taker in books.stays and (+books.held[taker] or books.charges_of(taker)):
            books.kept[taker] = self.desk.pump.now_ns + min(books.stays[taker].grace_ms, RESUME_MAX_S * 1000) * MS
        else:
            self.give_back(taker)
            del books.held[taker]
        books.asked = [asked for asked in books.asked if asked.taker is not taker]
        taker.close()
        self.come()

    def give_back(self, taker: Taker) -> None:
        for charge in self.books.charges_of(taker):
            item, fulls = self.books.charges.pop(charge)
            if item.on_death == OnDeath.REFUNDED:
                self.refund(item, fulls, 0)
        self.books.held[taker] = Counter()
        self.books.stays.pop(taker, None)
        self.books.former.pop(taker, None)

    def ask(self, taker: Taker) -> None:
        grace_ms = self.random.choice(GRACES_MS)
        stay = taker.resume(grace_ms)
        assert isinstance(stay, Stay)
        assert stay.grace_ms == min(grace_ms, RESUME_MAX_S * 1000)
        self.books.stays[taker] = stay
        self.books.former.pop(taker, None)

    def resume(self, taker: Taker) -> None:
        """Presents a token: of another one, or a former one with the number of any attempt."""
        books, draw = self.books, self.random
        others = [other for other in books.stays if other is not taker]
        if not others:
            return
        other, attempt = draw.choice(others), draw.choice((0, 1, 2, 65537))
        token, is_right = books.stays[other].token, True
        if other in books.former and draw.random() < 0.3:
            token, last = books.former[other]
            is_right = attempt > last and attempt >> 16 == last >> 16
        stay = taker.resume(draw.choice(GRACES_MS), token, attempt)
        waiting = any(asked.taker is taker for asked in self.waiting())
        if +books.held[taker] or books.charges_of(taker) or waiting:
            assert stay == Status.INVALID_ARGUMENTS
        elif not is_right:
            assert stay == Status.NOT_FOUND
        else:
            assert isinstance(stay, Stay)
            self.end_waits(other)
            books.hand_over(taker, other)
            books.stays[taker], books.former[taker] = stay, (token, attempt)
            if books.kept.pop(other, None) is not None:
                del books.held[other]

    def end_waits(self, taker: Taker) -> None:
        """All that waited of it has been cancelled, if it has not ended."""
        for asked in [asked for asked in self.books.asked if asked.taker is taker]:
            assert taker.of(asked.opaque) == Status.CANCELLED
            self.books.asked.remove(asked)

    def goodbye(self, taker: Taker) -> None:
        assert taker.status(wire.goodbye(0)) == Status.NO_ERROR
        self.end_waits(taker)
        self.give_back(taker)

    def wait(self, taker: Taker) -> None:
        """Lets time pass, and looks each time that something happens."""
        until = self.desk.pump.now_ns + self.random.choice((0, 1, MS, 40 * MS, 300 * MS, 5_000 * MS))
        while 0 <= (due := self.desk.store.next_deadline()) <= until:
            self.desk.pump.now_ns = max(self.desk.pump.now_ns, due)
            self.desk.pump.settle()
            self.check()
        self.desk.pump.now_ns = until
        self.desk.pump.settle()

    # ---- what has to be so ----

    def waiting(self) -> Iterator[Asked]:
        return (asked for asked in self.books.asked if asked.taker.of(asked.opaque) is None)

    def check(self) -> None:
        books, now_ns = self.books, self.desk.pump.now_ns
        for bucket in books.buckets.values():
            bucket.fill(now_ns)
        for taker in [taker for taker, ends in books.kept.items() if now_ns >> TICK_SHIFT >= -(-ends >> TICK_SHIFT)]:
            self.give_back(taker)
            del books.kept[taker], books.held[taker]
        granted = []
        for asked in list(books.asked):
            reply = asked.taker.of(asked.opaque)
            assert reply is not None or (asked.waits and now_ns <= asked.ends_ns + LATE_NS)
            if reply is not None:
                books.asked.remove(asked)
            if isinstance(reply, Grant):
                granted.append((reply.number, asked))
        for number, asked in sorted(granted, key=lambda each: each[0]):
            self.grant(asked, number)
        for name, maximum in MAXIMA.items():
            assert books.consumption(name) <= maximum
        leases = Counter[tuple[int, bytes]]()
        for connection, name, amount, _ in self.desk.store.leases(1000):
            leases[connection, name] += amount
        assert leases == {
            (books.number(taker), name): amount
            for taker, book in books.held.items() for name, amount in (+book).items()
        }  # fmt: skip
        assert self.desk.store.snapshot()["kept"] == len(books.kept)
        self.check_that_nobody_sleeps()

    def grant(self, asked: Asked, number: int) -> None:
        for item in asked.items:
            assert self.books.is_there(item)
            if isinstance(item, Permit):
                self.books.held[asked.taker][item.name] += item.amount
            else:
                self.books.buckets[item.name].units -= item.amount
                if item.on_death != OnDeath.FINAL:
                    charge = item, self.books.buckets[item.name].fulls
                    self.books.charges[asked.taker, number, item.name] = charge

    def check_that_nobody_sleeps(self) -> None:
        waiting = list(self.waiting())
        wanted = Counter((type(item), item.name) for asked in waiting for item in asked.items)
        for asked in waiting:
            alone = all(wanted[type(item), item.name] == 1 for item in asked.items)
            # A timer may be late, by as much.
            late = [self.books.buckets[item.name] for item in asked.items if isinstance(item, Rate)]
            early = [bucket.units for bucket in late]
            for bucket in late:
                bucket.units -= Fraction(LATE_NS * bucket.limit, bucket.period_us * 1000)
            assert not (alone and all(map(self.books.is_there, asked.items)))
            for bucket, units in zip(late, early, strict=True):
                bucket.units = units

    def end(self) -> None:
        """All go. Nothing is left, and rates are forgotten once they are full."""
        for taker in [taker for taker in self.books.held if taker not in self.books.kept]:
            taker.close()
        self.desk.wait(RESUME_MAX_S * 1000 + 3)
        figures = self.desk.store.snapshot()
        assert [figures[name] for name in ("busy", "waiters", "holdings", "charges", "kept")] == [0] * 5
        self.desk.wait(3_600_000)
        assert self.desk.store.snapshot()["rates"] == 0


@dataclass
class LimitedBooks(Books):
    """caps: maxima of the server. known: the rates that it knows, with the numbers of RATES."""

    caps: dict[bytes, int] = field(default_factory=dict)
    known: set[bytes] = field(default_factory=set)

    def is_there(self, item: Permit | Rate) -> bool:
        if isinstance(item, Permit):
            item = item._replace(maximum=min(item.maximum, self.caps.get(item.name, item.maximum)))
        return not self.is_impossible(item) and super().is_there(item)

    def is_impossible(self, item: Permit | Rate) -> bool:
        if isinstance(item, Permit):
            return item.amount > self.caps.get(item.name, item.amount)
        return item.limit == 0 and item.name not in self.known


class LimitedHistory(History):
    """A History in which the server has limits."""

    books: LimitedBooks

    def __init__(self, random: Any) -> None:
        super().__init__(random)
        self.books = LimitedBooks(self.books.held)

    def step(self) -> None:
        if self.random.random() < 0.1:
            self.reload()
            self.check()
        super().step()

    def reload(self) -> None:
        draw, books = self.random, self.books
        books.caps = {name: draw.randint(0, most) for name, most in MAXIMA.items() if draw.random() < 0.5}
        books.known = {name for name in RATES if draw.random() < 0.7}
        rates = {name: dict(zip(("limit", "period", "burst"), RATES[name], strict=True)) for name in books.known}
        document = {
            "permits": [{"name": name.decode(), "maximum": cap} for name, cap in books.caps.items()],
            "rates": [
                {"name": name.decode(), **rate, "period": rate["period"] / 1_000_000} for name, rate in rates.items()
            ],
        }
        self.desk.store.load_limits(parse_limits(json.dumps(document)))
        self.desk.pump.settle()

    def rate(self, name: bytes) -> Rate:
        drawn = super().rate(name)
        return Rate(name, drawn.amount, on_death=drawn.on_death) if self.random.random() < 0.6 else drawn

    def take(self, taker: Taker) -> None:
        super().take(taker)
        asked = self.books.asked[-1]
        unknown = [isinstance(item, Rate) and self.books.is_impossible(item) for item in asked.items]
        over = [isinstance(item, Permit) and self.books.is_impossible(item) for item in asked.items]
        reply = asked.taker.of(asked.opaque)
        if any(unknown + over):
            first = next(at for at, wrong in enumerate(zip(unknown, over, strict=True)) if any(wrong))
            assert reply == Status.NOT_FOUND if unknown[first] else isinstance(reply, Shortage) and reply.item == first

    def check(self) -> None:
        super().check()
        assert not any(self.books.is_impossible(item) for asked in self.waiting() for item in asked.items)
