"""Makes histories of Takes: clients that wait for several at once, go on meanwhile, cancel, settle and die.

As crowd.py does, but a reply comes when the server has one: a `Server` is asked, has its turns, and leaves replies.
`TakeTable` is the counter protocol with Takes in a page of dicts and lists, which tests break; `TakeEngine` is
counterd's store, in memory. Time goes from event to event.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import count
from math import ceil, floor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import OnDeath, Permit, Rate
from history import Closed, Operation
from history.counter import INVALID, NOT_ACQUIRED, NOT_AVAILABLE, NOT_FOUND, OK, Acquire, Get, Release
from history.resumptions import Goodbye, Held, Resume
from history.takes import CANCELLED, NS_PER_MS, Cancel, Settle, Take, items_of, part_of, parts_of, span
from kit.counters import make_store
from kit.pump import START_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction
    from random import Random

    from history.takes import Part

CALL_NS = 100_000  # that a request, or a reply, takes at most
CUT_NS = 3_000_000  # after which a connection that was cut is given up, at most
TURN_NS = 20_000  # by which the server's turn is late, at most
LATE_NS = 2 * CALL_NS + 3 * NS_PER_MS  # by which a reply is late, at most: two ticks of the wheel too
TAKES = 3  # of a client, that wait at once
WAITS_MS = (0, 1, 5, 20, 50)
MAXIMUM = 4
GRACES_MS = (1, 4, 16)
RESUMING = 5  # times as probably one is killed while it presents a token
AWAY_NS = (CALL_NS, CUT_NS, 12_000_000, 40_000_000)  # after which a client connects again, at most
LIMIT, PERIOD_US, BURST = 7, 10_000, 5  # of rates: a unit comes in 10/7 of a millisecond


class Server(Protocol):
    """The server under test. replies: (client, token, answer), which the crowd takes out."""

    replies: list[tuple[int, int, Any]]

    def ask(self, client: int, token: int, call: Any, now_ns: int) -> None: ...
    def close(self, client: int, now_ns: int) -> None: ...
    def due_ns(self) -> int: ...
    def turn(self, now_ns: int) -> None: ...


@dataclass
class Client:
    """A connection, and what its client knows.

    blocked_by: the token of the call that it waits for before it asks again. grace_ms: of its end; 0: it has no token.
    presents: the connection whose token it presents, until it is answered.
    """

    number: int
    grace_ms: int = 0
    presents: int = 0
    under_way: dict[int, Operation] = field(default_factory=dict)
    held: Counter[bytes] = field(default_factory=Counter)
    charges: list[tuple[int, Rate]] = field(default_factory=list)
    blocked_by: int = 0
    is_open: bool = True
    comes_again: bool = False
    latest_in: int = 0
    latest_out: int = 0

    def waiting(self) -> list[int]:
        return [token for token, one in self.under_way.items() if isinstance(one.call, Take)]

    def told(self, call: Any, answer: Any) -> None:
        if isinstance(call, Goodbye) or (isinstance(call, Resume) and call.old and answer[0] != OK):
            self.held.clear()
            self.charges.clear()
            self.grace_ms = self.presents = 0
        if answer[0] != OK:
            return
        if isinstance(call, Resume):
            self.grace_ms, self.presents = answer[1], 0
        if isinstance(call, Acquire):
            self.held[call.name] += call.resources
        elif isinstance(call, Release):
            self.held[call.name] -= call.resources
        elif isinstance(call, Take):
            for item in items_of(call):
                if isinstance(item, Permit):
                    self.held[item.name] += item.amount
                elif item.on_death != OnDeath.FINAL:
                    self.charges.append((answer[1][0], item))


class Crowd:
    """So many simulated clients. dying: the probability that one is killed during a call. history: what they saw."""

    def __init__(
        self,
        rng: Random,
        server: Server,
        choose: Callable[[Random, Client, int], Any],
        *,
        clients: int = 5,
        dying: float = 0.02,
    ) -> None:
        self.rng, self.server, self.choose, self.dying = rng, server, choose, dying
        self.history: list[Operation] = []
        self.clients: dict[int, Client] = {}
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._order, self._numbers, self._tokens = count(), count(1), count(1)
        self._turn_ns = -1
        for _ in range(clients):
            self._soon(START_NS, CALL_NS, self._come)

    def run(self, calls: int) -> list[Operation]:
        """The history of so many calls; those that are still under way have no answer."""
        while len(self.history) < calls:
            now_ns, _, event = heapq.heappop(self._events)
            event(now_ns)
            self._read(now_ns)
        return [*self.history, *(one for client in self.clients.values() for one in client.under_way.values())]

    # ---- inside ----

    def _soon(self, now_ns: int, most_ns: int, event: Callable[[int], None], *, after_ns: int = 0) -> int:
        at = max(now_ns + self.rng.randint(1, most_ns), after_ns)
        heapq.heappush(self._events, (at, next(self._order), event))
        return at

    def _read(self, now_ns: int) -> None:
        """Delivers the server's replies, and lets it run its ticks."""
        replies, self.server.replies = self.server.replies, []
        for number, token, answer in replies:
            client = self.clients.get(number)
            if client is not None:

                def deliver(ended: int, client: Client = client, token: int = token, answer: Any = answer) -> None:
                    self._answered(client, token, answer, ended)

                client.latest_out = self._soon(now_ns, CALL_NS, deliver, after_ns=client.latest_out + 1)
        due = self.server.due_ns()
        if due >= 0 and (self._turn_ns < 0 or max(now_ns, due) + TURN_NS < self._turn_ns):
            self._turn_ns = self._soon(max(now_ns, due), TURN_NS, self._turn)

    def _turn(self, now_ns: int) -> None:
        self._turn_ns = -1
        self.server.turn(now_ns)

    def _come(self, now_ns: int) -> None:
        client = Client(next(self._numbers))
        self.clients[client.number] = client
        self._ask(client, now_ns)

    def _come_again(self, old: Client, now_ns: int) -> None:
        """Connects anew, and presents the token of the connection before."""
        client = Client(next(self._numbers), presents=old.presents or old.number)
        client.held, client.charges = Counter(old.held), [*old.charges]
        self.clients[client.number] = client
        self._ask(client, now_ns, Resume(self.rng.choice(GRACES_MS), client.presents))

    def _ask(self, client: Client, now_ns: int, call: Any = None) -> None:
        if not client.is_open:
            return
        token = next(self._tokens)
        call = call or self.choose(self.rng, client, token)
        client.under_way[token] = Operation(client.number, call, now_ns)
        client.latest_in = self._soon(
            now_ns, CALL_NS, lambda now: self._serve(client, token, call, now), after_ns=client.latest_in + 1
        )
        waits = isinstance(call, Take) and call.wait_ms
        if waits and len(client.waiting()) < TAKES and self.rng.random() < 0.6:
            self._soon(now_ns, CALL_NS, lambda now: self._ask(client, now))
        else:
            client.blocked_by = token

    def _serve(self, client: Client, token: int, call: Any, now_ns: int) -> None:
        if not client.is_open:
            if self.rng.random() < 0.5:
                self.server.ask(client.number, token, call, now_ns)
            return
        if self.rng.random() < self.dying * (RESUMING if client.presents else 1):
            client.is_open = False
            if (client.grace_ms or client.presents) and self.rng.random() < 0.8:
                client.comes_again = True
                self._soon(now_ns, self.rng.choice(AWAY_NS), lambda now: self._come_again(client, now))
            self.history += client.under_way.values()
            client.under_way = {0: Operation(client.number, Closed(), now_ns)}
            client.latest_in = self._soon(
                now_ns, self.rng.choice((CALL_NS, CUT_NS)), lambda gone: self._leave(client, gone),
                after_ns=client.latest_in + 1,
            )  # fmt: skip
        if client.is_open or self.rng.random() < 0.5:
            self.server.ask(client.number, token, call, now_ns)

    def _answered(self, client: Client, token: int, answer: Any, now_ns: int) -> None:
        if not client.is_open:
            return
        one = client.under_way.pop(token)
        self.history.append(one._replace(ended=now_ns, answer=answer))
        client.told(one.call, answer)
        if client.blocked_by == token:
            client.blocked_by = 0
            self._soon(now_ns, CALL_NS, lambda now: self._ask(client, now))

    def _leave(self, client: Client, gone_ns: int) -> None:
        self.server.close(client.number, gone_ns)
        self.history.append(client.under_way[0]._replace(ended=gone_ns + TURN_NS + self.rng.randint(1, CALL_NS)))
        del self.clients[client.number]
        if not client.comes_again:
            self._soon(gone_ns, CALL_NS, self._come)


def take_calls(
    groups: int = 2,
    *,
    permits: int = 2,
    rates: bool = True,
    most: int = 3,
    waits_ms: Sequence[int] = WAITS_MS,
    keys: Sequence[bytes] = (b"k",),
    graces_ms: Sequence[int] = (),
) -> Callable[[Random, Client, int], Any]:
    """Random Takes and all other calls.

    groups: of names that are taken together, each of so many permits and a rate. most: the maximum number of items of a
    Take. graces_ms: the grace times that connections ask for, if any.
    """

    def item(rng: Random, name: bytes) -> tuple[Any, ...]:
        if name[:1] == b"r":
            return tuple(Rate(name, rng.randint(1, BURST), LIMIT, PERIOD_US, BURST, rng.choice([*OnDeath])))
        return tuple(Permit(name, rng.choice((1, 1, 2, MAXIMUM)), MAXIMUM))

    def choose(rng: Random, client: Client, token: int) -> Any:
        group = rng.randrange(groups)
        counters = [b"%d%d" % (group, number) for number in range(permits)]
        names = [*counters, *([b"r%d" % group] if rates else [])]
        dice = rng.random()
        held = sorted(+client.held)
        if dice < 0.4 and held:
            name = rng.choice(held)
            return Release(name, rng.randint(1, client.held[name]))
        if dice < 0.5 and client.charges:
            number, rate = client.charges[-1] if rng.random() < 0.2 else client.charges.pop()
            return Settle(number, rate.name, rng.randint(0, 2 * rate.amount))
        if dice < 0.52 and client.waiting():
            return Cancel(rng.choice(client.waiting()))
        if dice < 0.56:
            return Get(rng.choice(counters))
        if dice < 0.64:
            return Acquire(rng.choice(counters), rng.randint(1, 2), MAXIMUM)
        chosen = rng.sample(names, min(len(names), most, rng.choice((1, 1, 2, 3))))
        wait_ms, priority = rng.choice(waits_ms), rng.choice((0, 0, 0, 1))
        return Take(token, tuple(item(rng, name) for name in chosen), wait_ms, rng.choice(keys), 1, priority)

    def choose_also(rng: Random, client: Client, token: int) -> Any:
        name = b"%d%d" % (rng.randrange(groups), rng.randrange(permits))
        return resume_call(rng, client, name, graces_ms) or choose(rng, client, token)

    return choose_also if graces_ms else choose


def resume_call(rng: Random, client: Client, name: bytes, graces_ms: Sequence[int]) -> Any:
    """A random call about the connection itself: Resume, Goodbye or Held; mostly none."""
    dice = rng.random()
    if dice < 0.2 and not client.grace_ms:
        return Resume(rng.choice(graces_ms))
    if dice < 0.02:
        return Goodbye()
    return Held(name) if dice < 0.06 else None


# ---- a right server -------------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    client: int
    token: int
    call: Take
    ends_ns: int


class TakeTable:
    """The rules of Takes written plainly: who holds how much of what, and who waits, in the order of priority and
    arrival. Nobody overtakes anybody.
    """

    def __init__(self) -> None:
        self.replies: list[tuple[int, int, Any]] = []
        self.counters: dict[bytes, Counter[int]] = defaultdict(Counter)
        self.next: dict[bytes, Fraction] = {}
        self.fulls: Counter[bytes] = Counter()  # how often each rate was found full
        self.charges: dict[tuple[int, int, bytes], tuple[Rate, int]] = {}
        self.queue: list[Waiting] = []
        self.graces_ms: dict[int, int] = {}  # of connections that have a token
        self.former: dict[int, int] = {}  # who presented a token last that was not heard of since, by whose it was
        self.kept: dict[int, int] = {}  # connections in their grace time, and its end
        self.number = 0
        self.now_ns = START_NS
        self.to_serve = False

    # ---- what the crowd calls ----

    def ask(self, client: int, token: int, call: Any, now_ns: int) -> None:
        self.now_ns = now_ns
        answer = getattr(self, type(call).__name__.lower())(client, token, call)
        if answer is not None:
            self.reply(client, token, answer)

    def close(self, client: int, now_ns: int) -> None:
        self.now_ns = now_ns
        self.queue = [one for one in self.queue if one.client != client]
        holds = any(holders[client] for holders in self.counters.values())
        if client in self.graces_ms and (holds or any(charge[0] == client for charge in self.charges)):
            self.kept[client] = now_ns + self.graces_ms[client] * NS_PER_MS
        else:
            self.give_back(client)
        self.to_serve = True

    def give_back(self, client: int) -> None:
        """Gives back everything that the client holds. Its token is not valid any more."""
        self.graces_ms.pop(client, None)
        self.kept.pop(client, None)
        for holders in self.counters.values():
            holders.pop(client, None)
        for charge in [charge for charge in self.charges if charge[0] == client]:
            item, fulls = self.charges.pop(charge)
            if item.on_death == OnDeath.REFUNDED:
                self.refund(item, fulls, 0)
        self.to_serve = True

    def due_ns(self) -> int:
        if self.to_serve:
            return self.now_ns
        dues = [one.ends_ns for one in self.queue]
        dues += self.kept.values()
        dues += [due for one in self.queue if (due := self.ready_ns(one.call)) > self.now_ns]
        return min(dues, default=-1)

    def turn(self, now_ns: int) -> None:
        self.now_ns = now_ns
        for client in [client for client, ends_ns in self.kept.items() if ends_ns <= now_ns]:
            self.give_back(client)
        for one in [one for one in self.queue if one.ends_ns <= now_ns]:
            self.queue.remove(one)
            item = next(filter(lambda item: not self.is_there(item), items_of(one.call)), items_of(one.call)[0])
            self.reply(one.client, one.token, self.shortage(one.call, item))
        self.serve()

    # ---- the protocol ----

    def get(self, client: int, token: int, call: Get) -> Any:
        del client, token
        consumption = self.counters[call.name].total()
        return (OK, consumption) if consumption else (NOT_FOUND, None)

    def acquire(self, client: int, token: int, call: Acquire) -> Any:
        del token
        item = Permit(call.name, call.resources, call.maximum)
        if call.resources > call.maximum:
            return INVALID, None
        if self.is_awaited(item) or not self.is_there(item):
            return NOT_AVAILABLE, None
        self.counters[call.name][client] += call.resources
        return OK, call.resources

    def release(self, client: int, token: int, call: Release) -> Any:
        del token
        if self.counters[call.name][client] < call.resources:
            return NOT_ACQUIRED, None
        self.counters[call.name][client] -= call.resources
        self.to_serve = True
        return OK, None

    def take(self, client: int, token: int, call: Take) -> Any:
        short = [item for item in items_of(call) if self.is_awaited(item) or not self.is_there(item)]
        if not short:
            return self.granted(client, call)
        if not call.wait_ms:
            return self.shortage(call, short[0])
        self.queue.append(Waiting(client, token, call, self.now_ns + call.wait_ms * NS_PER_MS))
        self.queue.sort(key=lambda one: -one.call.priority)
        return None

    def cancel(self, client: int, token: int, call: Cancel) -> Any:
        del token
        found = [one for one in self.queue if (one.client, one.token) == (client, call.take)]
        for one in found:
            self.queue.remove(one)
            self.reply(client, one.token, (CANCELLED, None))
            self.to_serve = True
        return (OK if found else NOT_FOUND), None

    def settle(self, client: int, token: int, call: Settle) -> Any:
        del token
        charge = self.charges.pop((client, call.grant, call.name), None)
        if charge is None:
            return NOT_FOUND, None
        self.refund(*charge, call.used)
        self.to_serve = True
        return OK, None

    def held(self, client: int, token: int, call: Held) -> Any:
        del token
        return OK, self.counters[call.name][client]

    def goodbye(self, client: int, token: int, call: Goodbye) -> Any:
        del token, call
        self.end_waits(client)
        self.give_back(client)
        return OK, None

    def resume(self, client: int, token: int, call: Resume) -> Any:
        del token
        if call.old:
            owner = call.old if call.old in self.graces_ms else self.former.get(call.old, 0)
            if owner not in self.graces_ms:
                return NOT_FOUND, None
            self.end_waits(owner)
            self.move(owner, client)
            self.graces_ms.pop(owner, None)
            self.kept.pop(owner, None)
            self.former = {old: new for old, new in self.former.items() if new != owner} | {call.old: client}
        self.graces_ms[client] = call.grace_ms
        return OK, call.grace_ms

    def end_waits(self, client: int) -> None:
        for one in [one for one in self.queue if one.client == client]:
            self.queue.remove(one)
            self.reply(client, one.token, (CANCELLED, None))
            self.to_serve = True

    # ---- what tests break ----

    def move(self, owner: int, client: int) -> None:
        """Moves everything that one client holds to another."""
        for holders in self.counters.values():
            if amount := holders.pop(owner, 0):
                holders[client] = amount
        self.charges = {
            ((client if holder == owner else holder), number, name): charge
            for (holder, number, name), charge in self.charges.items()
        }

    def reply(self, client: int, token: int, answer: Any) -> None:
        self.replies.append((client, token, answer))

    def serve(self) -> None:
        self.to_serve = False
        blocked: set[Part] = set()
        for one in list(self.queue):
            parts = parts_of(one.call)
            if blocked.isdisjoint(parts) and all(map(self.is_there, items_of(one.call))):
                self.queue.remove(one)
                self.reply(one.client, one.token, self.granted(one.client, one.call))
            else:
                blocked.update(parts)

    def granted(self, client: int, call: Take) -> Any:
        self.number += 1
        for item in items_of(call):
            self.charge(client, item)
        return OK, (self.number, tuple(map(self.left, items_of(call))))

    def charge(self, client: int, item: Permit | Rate) -> None:
        if isinstance(item, Permit):
            self.counters[item.name][client] += item.amount
            return
        self.next[item.name] = self.level(item) + span(item, item.amount)
        if item.on_death != OnDeath.FINAL:
            self.charges[client, self.number, item.name] = item, self.fulls[item.name]

    def refund(self, item: Rate, fulls: int, used: int) -> None:
        level = self.level(item)
        if used >= item.amount:
            self.next[item.name] = level + span(item, used - item.amount)
        elif self.fulls[item.name] == fulls:
            first = self.now_ns - span(item, item.burst)
            self.next[item.name] = max(first, level - span(item, item.amount - used))

    # ---- figures ----

    def level(self, item: Rate) -> Fraction:
        """The `next` of a rate; counts how often it is found full."""
        first = self.now_ns - span(item, item.burst)
        if self.next.get(item.name, first) <= first:
            self.fulls[item.name] += 1
            self.next[item.name] = first
        return self.next[item.name]

    def is_awaited(self, item: Permit | Rate) -> bool:
        return any(part_of(item) in parts_of(one.call) for one in self.queue)

    def is_there(self, item: Permit | Rate) -> bool:
        if isinstance(item, Permit):
            return self.counters[item.name].total() + item.amount <= item.maximum
        return self.level(item) + span(item, item.amount) <= self.now_ns

    def left(self, item: Permit | Rate) -> int:
        if isinstance(item, Permit):
            return item.maximum - min(item.maximum, self.counters[item.name].total())
        return max(0, floor((self.now_ns - self.level(item)) / span(item, 1)))

    def shortage(self, call: Take, item: Permit | Rate) -> Any:
        wait_ms = None
        if isinstance(item, Rate) and not self.is_there(item):
            due_ns = ceil(self.level(item) + span(item, item.amount))
            wait_ms = -((self.now_ns - due_ns) // NS_PER_MS)
        return NOT_AVAILABLE, (items_of(call).index(item), self.left(item), wait_ms)

    def ready_ns(self, call: Take) -> int:
        """When enough of its rates may be there, if the Take waits for nothing else; else -1."""
        if not all(self.is_there(item) for item in items_of(call) if isinstance(item, Permit)):
            return -1
        rates = [item for item in items_of(call) if isinstance(item, Rate)]
        return max((ceil(self.level(item) + span(item, item.amount)) for item in rates), default=-1)


# ---- counterd -------------------------------------------------------------------------------------------------------


class TakeEngine:
    """Sessions of counterd's counter store."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, int, Any]] = []
        self.store = make_store(waiters=64, posted_max=1 << 18, now_ns=START_NS)
        self.store.limit_resumptions(60)
        self.sessions: dict[int, Any] = {}
        self.parsers: dict[int, wire.ResponseParser] = {}
        self.tokens: dict[int, bytes] = {}
        self.now_ns = START_NS

    def ask(self, client: int, token: int, call: Any, now_ns: int) -> None:
        if client not in self.sessions:
            self.sessions[client] = self.store.session(now_ns)
            self.parsers[client] = wire.ResponseParser()
        presented = self.tokens.get(call.old, b"") if isinstance(call, Resume) else b""
        data = request(token, call, presented, client)  # whoever asks later has a higher number
        self._read(client, self.sessions[client].receive(data, now_ns))
        self._go_on(now_ns)

    def close(self, client: int, now_ns: int) -> None:
        if client in self.sessions:
            self.sessions.pop(client).closed(now_ns)

    def due_ns(self) -> int:
        return self.store.next_deadline()

    def turn(self, now_ns: int) -> None:
        while 0 <= self.store.next_deadline() <= now_ns:
            self.store.tick(now_ns)
            self.store.audit()
            self._go_on(now_ns)

    def _go_on(self, now_ns: int) -> None:
        """Continues the sessions that have something to send, and the requests that wait for a tick of the store."""
        self.store.take_dirty()
        while going := [(client, session) for client, session in self.sessions.items() if session.more]:
            for client, session in going:
                self._read(client, session.take_output(now_ns))
            if any(session.more for _, session in going):
                self.store.tick(now_ns)

    def _read(self, client: int, data: bytes) -> None:
        for response in self.parsers[client].feed(data):
            if response.opcode == wire.Opcode.RESUME and response.status == OK:
                self.tokens[client] = wire.decode_resumption(response.body).token
            self.replies.append((client, response.opaque, told(response)))


def request(opaque: int, call: Any, token: bytes = b"", attempt: int = 0) -> bytes:
    """The bytes of a call. token, attempt: those that a Resume presents."""
    if isinstance(call, Resume):
        return wire.resume(opaque, call.grace_ms, token, attempt)
    if isinstance(call, Goodbye):
        return wire.goodbye(opaque)
    if isinstance(call, Take):
        options = {"key": call.key, "weight": call.weight, "priority": call.priority}
        return wire.take(opaque, items_of(call), call.wait_ms, **options)
    return getattr(wire, type(call).__name__.lower())(opaque, *call)


def told(response: wire.Response) -> tuple[int, Any]:
    """The answer, as histories have it, that a reply stands for."""
    if response.opcode == wire.Opcode.TAKE and response.status == OK:
        return OK, tuple(wire.decode_grant(response.body))
    if response.opcode == wire.Opcode.TAKE and response.status == NOT_AVAILABLE:
        shortage = wire.decode_shortage(response.body)
        return NOT_AVAILABLE, (shortage.item, shortage.left, shortage.retry_ms)
    if response.opcode == wire.Opcode.RESUME and response.status == OK:
        return OK, wire.decode_resumption(response.body).grace_ms
    tells = response.status == OK and response.opcode in (wire.Opcode.ACQUIRE, wire.Opcode.GET, wire.Opcode.HELD)
    return response.status, wire.decode_consumption(response.body) if tells else None
