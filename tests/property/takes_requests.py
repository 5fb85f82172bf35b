"""What clients that take ask: by themselves, at random, knowing only what they were told.

An Asker makes the requests of all clients. Those that have gone leave their tokens to those that come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from kit.counters import ACQUIRE, GET, RELEASE
from property.takes_model import CANCEL, GOODBYE, HELD, RESUME, SETTLE, TAKE, WHO, Item, Pace, Sizes

if TYPE_CHECKING:
    import random

    from property.takes_model import Party, Wait

WAITS_MS = (0, 0, 1, 30, 500, 5_000, 20_000)
GRACES_MS = (1, 30, 500, 5_000)
# What is asked, and how often.
ASKED = (
    (TAKE, 30), (RELEASE, 40), (SETTLE, 12), (CANCEL, 5), (ACQUIRE, 5), (GET, 3), (HELD, 3), (RESUME, 6),
    (GOODBYE, 1.5), (WHO, 1),
)  # fmt: skip
QUEUED = 3  # Takes of a client that does nothing else
PERIOD_US = 100_000
PACES = (Pace(7, PERIOD_US, 3), Pace(1000, 1_000_000, 200), Pace(1, 40_000, 1), Pace(3, 20_000_000, 9))
TITLES = ("billing-3", "x", "Zähler", "n" * 64)
BAD_NAMES = (b"", b"\n", b"\xff", b"n" * 65)
SHARES = ((100, 100), (50, 100), (20, 60))  # in percent: of a peer elsewhere, and on this machine


@dataclass(eq=False)
class Request:
    """end: where it ends in the input. is_done: a Cancel whose Take was told. is_bad: its body is wrong."""

    opcode: int
    opaque: int
    data: bytes = b""
    end: int = 0
    name: bytes = b""
    amount: int = 0
    maximum: int = 0
    items: tuple[Item, ...] = ()
    wait_ms: int = 0
    key: bytes = b""
    weight: int = 1
    priority: int = 0
    take: int = 0
    grant: int = 0
    token: bytes = b""
    attempt: int = 0
    grace_ms: int = 0
    title: str = ""
    is_bad: bool = False
    is_done: bool = False

    def __repr__(self) -> str:
        told = {name: value for name, value in vars(self).items() if value and name not in ("data", "opcode", "end")}
        return f"{self.opcode:#x} {told}"


@dataclass(eq=False)
class Client:
    """One connection. The first fields are those of takes_both.py: who it is to the server, what was sent and is not
    executed or answered yet, its Takes that wait, and those that have ended and are yet to be answered. fed: bytes that
    the server has read. executed: requests. hangs_up: it sends nothing more. The rest is what the client knows: what it
    holds, what it may settle."""

    session: Any = None
    party: Party | None = None
    todo: deque[Request] = field(default_factory=deque)
    waits: dict[int, Wait] = field(default_factory=dict)
    owed: dict[int, Any] = field(default_factory=dict)
    sent: int = 0
    fed: int = 0
    executed: int = 0
    hangs_up: bool = False
    title: str = ""
    asked: int = 0
    known: dict[bytes, int] = field(default_factory=dict)
    grants: list[tuple[int, bytes, int]] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)  # opaques of its Takes
    token: bytes = b""
    presented: tuple[bytes, int] | None = None  # a token, with the number of the attempt, until that is answered

    def __str__(self) -> str:
        return f"connection {self.party.number if self.party else 0}"

    def said_goodbye(self) -> None:
        self.known.clear()
        self.grants.clear()
        self.token = b""

    def learn(self, what: Any, status: int, told: Any) -> None:
        """A reply has arrived. what: the items of a Take that was granted, or a request."""
        if isinstance(what, Request):
            if what.opcode == RESUME and what.token:
                self.presented = None
            if what.opcode == RESUME and status == 0:
                self.token = told
            if what.opcode == ACQUIRE and status == 0:
                self.known[what.name] = self.known.get(what.name, 0) + what.amount
            if what.opcode == GOODBYE:
                self.said_goodbye()
        elif status == 0:
            for item in what:
                if not item.is_rate:
                    self.known[item.name] = self.known.get(item.name, 0) + item.amount
                elif item.on_death:
                    self.grants.append((told, item.name, item.amount))


class Asker:
    """The names that there are, and what becomes of the tokens of clients that go."""

    def __init__(self, draw: random.Random, shares: tuple[int, int]) -> None:
        self.draw = draw
        # tight: there is little of everything, and a connection has one Take that waits at most. narrow: who does not
        # read is dropped soon, and only permits are waited for. So it can be told from outside what was granted.
        self.tight = tight = draw.random() < 0.25
        self.narrow = not tight and draw.random() < 0.2
        self.sizes = Sizes(
            buckets=draw.choice((3, 6, 10)) if tight else 256,
            holdings=draw.choice((4, 8, 20)) if tight else 20_000,
            per_connection=draw.choice((0, 1, 3)) if tight else 0,
            waiters=draw.choice((1, 4, 16)) if tight else 64,
            waiters_per_connection=draw.choice((0, 2, 10)),
            settle_s=draw.choice((1, 3, 3600)),
            resume_s=draw.choice((0, 1, 5, 5)),
            shares=shares,
        )
        count = draw.choice((1, 2, 4))
        long = b"l" * draw.choice((1, 40, 300))
        self.plain = [b"p%d" % number for number in range(count)]
        self.mixed = [b"m%d%b" % (number, long if number == 3 else b"") for number in range(draw.choice((2, 4, 16)))]
        self.paces = {name: draw.choice(PACES) for name in [*self.plain, *self.mixed[:4]]}
        top = draw.choice((1, 3, 10))
        self.maxima = {name: draw.randint(1, top) for name in [*self.plain, *self.mixed]}
        self.firm = draw.random() < 0.7  # everybody has the same maximum in mind
        self.several = draw.choice((0.0, 0.3, 0.6))  # Takes of several items
        self.rates = draw.choice((0.1, 0.5, 0.8, 0.8))
        self.priorities = draw.choice(((0,), (0, 0, 0, 9), (0, 1, 255)))
        self.keys = {key: draw.choice((1, 1, 2, 4, 1000)) for key in (b"k", b"l", b"m" * 40)}
        self.keyed = draw.choice((0.0, 0.5, 1.0))
        self.patience = draw.choice((WAITS_MS, (0, 5_000, 20_000), (20_000,)))
        self.queues = draw.random() < 0.4 and not tight
        if self.queues:  # many wait for the same counter or rate, for long, and do little else
            self.several, self.rates, self.patience = 0.0, draw.choice((0.0, 1.0)), (20_000,)
            self.plain, self.priorities = self.plain[:1], (0,)
        self.told: set[bytes] = set()  # rates of the server, since the last reload
        self.heirs: list[tuple[bytes, int]] = []  # tokens of those that have gone, with the number of the attempt

    def batch(self, client: Client, count: int) -> bytes:
        """So many requests, which are noted as sent."""
        requests = [self.request(client) for _ in range(count)]
        for request in requests:
            self.note(client, request)
        return b"".join(request.data for request in requests)

    def note(self, client: Client, request: Request) -> None:
        client.sent += len(request.data)
        request.end = client.sent
        client.todo.append(request)

    def request(self, client: Client) -> Request:
        draw = self.draw
        client.asked += 1
        request = Request(0, client.asked)
        if client.asked == 1 and self.heirs and draw.random() < 0.7:
            opcode = RESUME
        else:
            codes, weights = zip(*ASKED, strict=True)
            opcode = draw.choices(codes, weights)[0]
            useless = {RELEASE: not client.known, SETTLE: not client.grants, CANCEL: not client.takes}
            if useless.get(opcode, False) and draw.random() < 0.9:
                opcode = TAKE
            if opcode == TAKE and client.known and draw.random() < 0.6:
                opcode = RELEASE
        request.opcode = opcode
        body = {
            TAKE: self.take, RELEASE: self.release, SETTLE: self.settle, CANCEL: self.cancel, RESUME: self.resume,
            ACQUIRE: self.acquire, GET: self.named, HELD: self.named, GOODBYE: self.goodbye, WHO: self.who,
        }[opcode](client, request)  # fmt: skip
        if draw.random() < 0.01 and opcode > ACQUIRE:
            request.is_bad = True
            body += b"!" if opcode != WHO else b"\n"
        request.data = wire.frame(opcode, request.opaque, body)
        return request

    def has_nothing_to_do(self, client: Client) -> bool:
        """Until one of its Takes is answered."""
        return self.queues and not client.known and len(client.waits) >= QUEUED and self.draw.random() < 0.95

    def nonsense(self, client: Client) -> Request:
        client.asked += 1
        request = Request(GET, client.asked, b"\x91" + wire.get(client.asked, b"n")[1:12], is_bad=True)
        self.note(client, request)
        return request

    def leave(self, client: Client) -> None:
        """It goes, and may come back; more than once if it does not know what became of an attempt."""
        if client.presented is not None:
            token, attempt = client.presented
            self.heirs.append((token, attempt + 1))
        elif client.token:
            self.heirs.append((client.token, self.draw.randrange(4)))
        client.token = b""
        del self.heirs[:-20]

    # ---- each kind ----

    def take(self, client: Client, request: Request) -> bytes:
        draw = self.draw
        if draw.random() < self.several:
            names = draw.sample(self.mixed, min(len(self.mixed), draw.choice((2, 2, 3, 16))))
            items = tuple(self.item(name) for name in names)
            if draw.random() < 0.2 and names[0] in self.paces:  # a counter and a rate of the same name
                both = [self.permit(names[0]), self.rate(names[0])]
                items = (*both, *(item for item in items if item.name != names[0]))[:16]
        else:
            items = (self.item(draw.choice(self.plain if draw.random() < 0.9 else self.mixed)),)
        request.wait_ms = draw.choice(self.patience)
        if self.tight and any(item.on_death for item in items):
            request.wait_ms = 0
        if request.wait_ms and self.tight:
            request.wait_ms *= not client.takes and not client.waits
        if request.wait_ms and self.narrow and any(item.is_rate for item in items):
            request.wait_ms = 0
        if request.wait_ms:
            client.takes.append(request.opaque)
        if draw.random() < self.keyed:
            request.key, request.weight = draw.choice(list(self.keys.items()))
        request.priority = draw.choice(self.priorities)
        request.items = items
        told = [
            wire.Rate(item.name, item.amount, *(item.pace or (0, 0, 0)), wire.OnDeath(item.on_death))
            if item.is_rate else wire.Permit(item.name, item.amount, item.maximum)
            for item in items
        ]  # fmt: skip
        data = wire.take(
            0, told, request.wait_ms, key=request.key, weight=request.weight, priority=request.priority
        )  # fmt: skip
        return data[12:]

    def item(self, name: bytes) -> Item:
        is_rate = name in self.paces and self.draw.random() < self.rates
        return self.rate(name) if is_rate else self.permit(name)

    def permit(self, name: bytes) -> Item:
        draw, maximum = self.draw, self.maxima[name]
        if not self.firm and draw.random() < 0.3:
            maximum = draw.randint(1, maximum)
        return Item(name, False, 1 + int(draw.random() ** 2 * maximum), maximum)

    def rate(self, name: bytes) -> Item:
        draw, pace = self.draw, self.paces[name]
        is_named = draw.random() < (0.8 if name in self.told else 0.1)
        amount = 1 + int(draw.random() ** 2 * pace.burst)
        return Item(name, True, amount, 0, None if is_named else pace, draw.choice((0, 1, 2)))

    def acquire(self, _client: Client, request: Request) -> bytes:
        item = self.permit(self.draw.choice(self.plain + self.mixed))
        request.name, request.amount, request.maximum = item.name, item.amount, item.maximum
        return wire.acquire(0, item.name, item.amount, item.maximum)[12:]

    def release(self, client: Client, request: Request) -> bytes:
        """Mostly of what it holds, as far as it knows; else of what it does not hold."""
        draw = self.draw
        request.name = draw.choice(list(client.known) or self.plain)
        known = client.known.get(request.name, 0)
        request.amount = known if draw.random() < 0.8 else draw.randint(0, known + 1)
        left = known - request.amount
        if left > 0:
            client.known[request.name] = left
        else:
            client.known.pop(request.name, None)
        return wire.release(0, request.name, request.amount)[12:]

    def settle(self, client: Client, request: Request) -> bytes:
        draw = self.draw
        grant, name, amount = 1, draw.choice(self.plain), 1
        if client.grants:
            grant, name, amount = client.grants.pop(draw.randrange(len(client.grants)))
            if draw.random() < 0.1:
                client.grants.append((grant, name, amount))  # it settles again later
        request.grant, request.name = grant, name
        more = amount + draw.randint(1, 9)
        request.amount = more if self.tight else draw.choice((0, amount, draw.randint(0, amount), more))
        return wire.settle(0, grant, name, request.amount)[12:]

    def cancel(self, client: Client, request: Request) -> bytes:
        request.take = self.draw.choice(client.takes) if client.takes else 77
        if request.take in client.takes:
            client.takes.remove(request.take)
        return wire.cancel(0, request.take)[12:]

    def resume(self, client: Client, request: Request) -> bytes:
        draw = self.draw
        request.grace_ms = draw.choice(GRACES_MS)
        if self.heirs and (client.asked == 1 or draw.random() < 0.1):
            at = draw.randrange(len(self.heirs))
            request.token, request.attempt = self.heirs[at]
            if draw.random() < 0.1:
                request.attempt = draw.choice((0, request.attempt + (1 << 16)))
            elif draw.random() < 0.8:
                self.heirs.pop(at)
            client.presented = request.token, request.attempt
        elif client.token and draw.random() < 0.05:
            request.token = client.token  # its own
        return wire.resume(0, request.grace_ms, request.token, request.attempt)[12:]

    def named(self, client: Client, request: Request) -> bytes:
        request.name = self.draw.choice(list(client.known) or self.plain)
        return wire.get(0, request.name)[12:]

    def goodbye(self, _client: Client, _request: Request) -> bytes:
        return b""

    def who(self, _client: Client, request: Request) -> bytes:
        if self.draw.random() < 0.3:
            request.is_bad = True
            return self.draw.choice(BAD_NAMES)
        request.title = self.draw.choice(TITLES)
        return request.title.encode()

    # ---- the server's limits ----

    def limits(self, awaited: list[Item]) -> dict[str, list[dict[str, Any]]]:
        """A document: some names, some beginnings, and beginnings of beginnings. Often something that is waited for
        cannot be had any more."""
        draw = self.draw
        hurt = draw.choice(awaited) if awaited and draw.random() < 0.7 else None
        names = [name.decode() for name in [*self.plain, *self.mixed] if len(name) < 256]
        permits = {name: draw.randint(0, 8) for name in [*names, "m*", "p*", "m1*", "*"] if draw.random() < 0.3}
        rates = [name for name in self.paces if len(name) < 256 and draw.random() < 0.5]
        if hurt is not None and hurt.is_rate:
            rates = [name for name in rates if name != hurt.name]
        elif hurt is not None and len(hurt.name) < 256:
            permits[hurt.name.decode()] = hurt.amount - 1
        numbers = []
        self.told = set(rates)
        for name in rates:
            limit, period_us, burst = self.paces[name]
            times = draw.choice((1, 1, 2, 3))  # the time in which it is full again is the same
            numbers.append(
                {"name": name.decode(), "limit": limit * times, "period": period_us / 1_000_000, "burst": burst * times}
            )
        return {"permits": [{"name": name, "maximum": most} for name, most in permits.items()], "rates": numbers}
