"""Makes histories: clients that call concurrently, are killed and come again, on a clock of their own.

A `Server` does one call after the other, so its histories are right by construction: each call starts before the moment
at which it is done, and ends after it. `CounterTable` is the counter protocol in a few lines; `CounterEngine`,
`ThrottrEngine`, `SentinelEngine` and `BeanstalkEngine` are counterd's, in memory.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from conformance.beanstalk.engine import make_store as make_beanstalk_store
from conformance.sentinel.engine import make_store as make_sentinel_store
from conformance.throttr.engine import make_store as make_throttr_store
from counterd.protocols.beanstalk import wire as beanstalk_wire
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel_wire
from counterd.protocols.throttr import wire as throttr_wire
from history import Closed, Operation, beanstalk, counter, sentinel, throttr
from kit.counters import make_store, settle
from kit.pump import START_NS, Pump

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from counterd.protocols.sentinel.rules import Rules
    from kit.pump import Peer

CALL_NS = 100_000  # that a request, or an answer, takes at most
CUT_NS = 3_000_000  # after which a connection that was cut is given up, at most
SWEEP_NS = 200_000  # between two sweeps of the sentinel protocol
SWEPT_NS = SWEEP_NS + (1 << 20)  # within which one finds a lease that is over: it is due at a tick of the wheel
RECENT = 12  # tokens, and jobs, that are asked about
VALUES = tuple(map(sentinel_wire.encode_value, ("one", "two", 3)))


class Server(Protocol):
    def do(self, client: int, call: Any, now_ns: int) -> Any: ...
    def close(self, client: int, now_ns: int) -> None: ...


def crowd(
    rng: Random,
    server: Server,
    choose: Callable[[Random], Any],
    *,
    clients: int = 5,
    calls: int = 100,
    dying: float = 0.02,
    pause_ns: int = CALL_NS,
    taken: Callable[[Any, Any], object] = lambda call, answer: None,
) -> list[Operation]:
    """The history of so many simulated clients, each of which makes one call at a time.

    dying: the probability that a client is killed during a call. taken: called with each call and its answer, once that
    arrived.
    """
    operations: list[Operation] = []
    under_way: dict[int, Operation] = {}  # by client
    order, names = count(), count(1)
    events: list[tuple[int, int, Callable[[int], None]]] = []

    def soon(at: int, event: Callable[[int], None]) -> None:
        heapq.heappush(events, (at, next(order), event))

    def call(client: int, started: int) -> None:
        request = choose(rng)
        under_way[client] = Operation(client, request, started)
        soon(started + rng.randint(1, CALL_NS), lambda now: serve(client, request, now))

    def serve(client: int, request: Any, now: int) -> None:
        dies = rng.random() < dying
        if not dies or rng.random() < 0.5:
            answer = server.do(client, request, now)
        if dies:
            operations.append(under_way[client])
            under_way[client] = Operation(client, Closed(), now)
            soon(now + rng.randint(1, rng.choice((CALL_NS, CUT_NS))), lambda gone: leave(client, gone))
            return
        soon(now + rng.randint(1, CALL_NS), lambda ended: take(client, ended, answer))

    def take(client: int, ended: int, answer: Any) -> None:
        operations.append(under_way.pop(client)._replace(ended=ended, answer=answer))
        taken(operations[-1].call, answer)
        soon(ended + rng.randint(1, pause_ns), lambda now: call(client, now))

    def leave(client: int, gone: int) -> None:
        server.close(client, gone)
        operations.append(under_way.pop(client)._replace(ended=gone + rng.randint(1, CALL_NS)))
        call(next(names), gone + rng.randint(1, CALL_NS))

    for _ in range(clients):
        soon(START_NS + rng.randint(1, CALL_NS), lambda now: call(next(names), now))
    while len(operations) < calls:
        now, _, event = heapq.heappop(events)
        event(now)
    return [*operations, *under_way.values()]


def counter_calls(names: int = 1, maximum: int = 6) -> Callable[[Random], Any]:
    """Random Acquires and Releases of a few resources, and queries."""

    def choose(rng: Random) -> Any:
        name = b"%d" % rng.randrange(names)
        kind = rng.random()
        if kind < 0.4:
            return counter.Acquire(name, rng.randint(1, 3), maximum)
        return counter.Release(name, rng.randint(0, 3)) if kind < 0.75 else counter.Get(name)

    return choose


def throttr_calls(keys: int = 1, ttl_max: int = 40) -> Callable[[Random], Any]:
    """Random calls of all kinds, with TTLs of milliseconds. Half of them change or query a quota."""

    def choose(rng: Random) -> Any:
        key = b"%d" % rng.randrange(keys)
        ttl = rng.randint(0, ttl_max)
        kind = rng.random()
        if kind < 0.25:
            return throttr.Update(key, throttr.Attribute.QUOTA, rng.randint(0, 2), rng.randint(0, 9))
        if kind < 0.55:
            return throttr.Query(key)
        if kind < 0.65:
            return throttr.Update(key, throttr.Attribute.TTL, rng.randint(0, 2), ttl)
        kinds = (throttr.Get(key), throttr.Purge(key), throttr.Insert(key, rng.randint(0, 20), ttl, 3))
        return rng.choice((*kinds, throttr.Set(key, b"%d" % ttl, ttl, 3)))

    return choose


class Known(Protocol):
    """What a client of the sentinel protocol knows. granted: the tokens that any client was granted, with their
    flows."""

    granted: list[tuple[int, int]]


def sentinel_calls(
    known: Known, kinds: str = "tokens window values namespace", flows: int = 2
) -> Callable[[Random], Any]:
    """Random calls for these kinds of objects. Any client releases or keeps any client's tokens, also repeatedly."""

    def choose(rng: Random) -> Any:
        flow, dice = rng.randint(1, flows), rng.random()
        kind = rng.choice(kinds.split())
        if kind == sentinel.WINDOW:
            return sentinel.Flow(flow, rng.choice((1, 1, 2)), rng.random() < 0.4)
        if kind == sentinel.VALUES:
            return sentinel.Param(flow, 1, tuple(rng.choice(VALUES) for _ in range(rng.choice((1, 1, 1, 2, 3)))))
        if kind == sentinel.NAMESPACE:
            return sentinel.Ping(b"namespace %d" % flow)
        if dice < 0.5 or not known.granted:
            return sentinel.Acquire(flow, rng.choice((1, 1, 2)))
        return (sentinel.Release if dice < 0.8 else sentinel.Keep)(*rng.choice(known.granted[-RECENT:]))

    return choose


class Jobs:
    """The jobs that some client knows of, because it has put or reserved them."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self._bodies = count()

    def taken(self, call: Any, answer: beanstalk.Answer) -> None:
        if isinstance(call, beanstalk.Put | beanstalk.Reserve) and answer[1] is not None:
            self.known.append(answer[1])

    def choose(self, rng: Random, tubes: int = 1, timeout_max: int = 0) -> Any:
        """Chooses a Put, a Reserve, or any command for one of the jobs reserved most recently, whoever has it."""
        tube, dice = b"%d" % rng.randrange(tubes), rng.random()
        if dice < 0.25 or not self.known:
            times = rng.choice((0, 0, 0, 1)), rng.choice((1, 1, 60))
            return beanstalk.Put(tube, rng.randint(1, 4), *times, b"job %d" % next(self._bodies))
        if dice < 0.55:
            return beanstalk.Reserve(tube, rng.randint(0, timeout_max))
        job, priority = rng.choice(self.known[-RECENT:]), rng.randint(1, 4)
        return rng.choice(
            (
                beanstalk.Delete(job), beanstalk.Release(job, priority, rng.choice((0, 0, 1))), beanstalk.Touch(job),
                beanstalk.Bury(job, priority), beanstalk.KickJob(job), beanstalk.Peek(job),
            )
        )  # fmt: skip


class CounterTable:
    """The counter protocol's rules written with dicts: who holds how much of which counter."""

    def __init__(self) -> None:
        self.counters: dict[bytes, dict[int, int]] = defaultdict(dict)

    def do(self, client: int, call: Any, now_ns: int) -> tuple[int, int | None]:
        del now_ns
        holders = self.counters[call.name]
        consumption, mine = sum(holders.values()), holders.get(client, 0)
        if isinstance(call, counter.Get):
            return (0, consumption) if consumption else (0x01, None)
        if isinstance(call, counter.Acquire):
            if consumption + call.resources > call.maximum:
                return 0x21, None
            holders[client] = mine + call.resources
            return 0, call.resources
        if call.resources > mine:
            return 0x22, None
        holders[client] = mine - call.resources
        return 0, None

    def close(self, client: int, now_ns: int) -> None:
        del now_ns
        for holders in self.counters.values():
            holders.pop(client, None)


class CounterEngine:
    """Sessions of counterd's counter store."""

    def __init__(self) -> None:
        self.store = make_store()
        self.sessions: dict[int, Any] = {}

    def do(self, client: int, call: Any, now_ns: int) -> tuple[int, int | None]:
        if client not in self.sessions:
            self.sessions[client] = self.store.session(now_ns)
        encode = getattr(wire, type(call).__name__.lower())
        (response,) = wire.ResponseParser().feed(self.sessions[client].receive(encode(0, *call), now_ns))
        tells = response.status == 0 and not isinstance(call, counter.Release)
        return response.status, wire.decode_consumption(response.body) if tells else None

    def close(self, client: int, now_ns: int) -> None:
        if client in self.sessions:
            self.sessions.pop(client).closed(now_ns)
            settle(self.store, now_ns)


class ThrottrEngine:
    """Sessions of counterd's throttr store, with the smallest value size."""

    def __init__(self) -> None:
        self.size = throttr_wire.ValueSize.UINT8
        self.encoder = throttr_wire.Encoder(self.size)
        self.store = make_throttr_store(value_size=1)
        self.sessions: dict[int, Any] = {}

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        if client not in self.sessions:
            self.sessions[client] = self.store.session(now_ns)
        request = getattr(self.encoder, type(call).__name__.lower())(*call)
        parser = throttr_wire.Parser(self.size)
        parser.expect(request)
        (reply,) = parser.feed(self.sessions[client].receive(bytes(request), now_ns))
        return False if reply.result is None else reply.result

    def close(self, client: int, now_ns: int) -> None:
        if client in self.sessions:
            self.sessions.pop(client).closed(now_ns)


class SentinelEngine:
    """Sessions of counterd's sentinel store, which runs its ticks before each call. granted: tokens and their flows."""

    def __init__(self, rules: Rules) -> None:
        self.granted: list[tuple[int, int]] = []
        self.sessions: dict[int, Any] = {}
        self.store = make_sentinel_store(rules, sweep_interval_ns=SWEEP_NS, max_allowed_qps=1e9)

    def do(self, client: int, call: Any, now_ns: int) -> Any:
        self.turn(now_ns)
        if client not in self.sessions:
            self.sessions[client] = self.store.session(now_ns)
        (response,) = sentinel_wire.ResponseParser().feed(self.sessions[client].receive(sentinel.request(call), now_ns))
        return sentinel.told(call, response)

    def taken(self, call: Any, answer: Any) -> None:
        """Nobody knows of a token before this, and of some nobody ever does."""
        if isinstance(call, sentinel.Acquire) and answer[0] == sentinel_wire.Status.OK:
            self.granted.append((call.flow, answer[1]))

    def close(self, client: int, now_ns: int) -> None:
        self.turn(now_ns)
        if client in self.sessions:
            self.sessions.pop(client).closed(now_ns)
            self.turn(now_ns)

    def turn(self, now_ns: int) -> None:
        """All that is due. Nobody asks meanwhile, so it makes no difference that it may have been due before."""
        while 0 <= self.store.next_deadline() <= now_ns:
            self.store.tick(now_ns)


class BeanstalkEngine:
    """Connections to counterd's beanstalk store, which runs its ticks before each call."""

    def __init__(self) -> None:
        self.bench = Pump(make_beanstalk_store())
        self.peers: dict[int, Peer] = {}

    def do(self, client: int, call: Any, now_ns: int) -> beanstalk.Answer:
        self.bench.advance(now_ns - self.bench.now_ns)
        if client not in self.peers:
            self.peers[client] = self.bench.connect()
        if tube := getattr(call, "tube", b""):
            self._ask(client, beanstalk_wire.use(tube))
            self._ask(client, beanstalk_wire.watch(tube))
            for other in beanstalk_wire.read_list(self._ask(client, beanstalk_wire.list_tubes_watched()).body):
                if other != tube:
                    self._ask(client, beanstalk_wire.ignore(other))
        return beanstalk.told(self._ask(client, beanstalk.request(call)))

    def close(self, client: int, now_ns: int) -> None:
        self.bench.advance(now_ns - self.bench.now_ns)
        if client in self.peers:
            self.peers.pop(client).close()

    def _ask(self, client: int, data: bytes) -> beanstalk_wire.Reply:
        peer = self.peers[client]
        peer.send(data)
        (reply,) = beanstalk_wire.Parser().feed(peer.recv_exactly(len(peer.output)))
        return reply
