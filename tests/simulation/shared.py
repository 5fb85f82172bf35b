"""Daemons that share limits, beside books of everything that their applications hold, and beside an ideal counter.

The authority's script, and the policy of the daemons, are the real ones; Redis is that of tests/kit. The stores are
the daemon's, driven by bytes, or, where there are many, those of tests/kit. The world has the network, each machine's
clock, and what goes wrong: calls and answers are late or lost, machines are cut off, daemons are killed and start
again, and the authority fails over to a replica that lacks the last writes, is replaced only for a moment, or forgets
everything.

What is promised:

- Nothing is granted above its maximum, except after a split: if two masters answer for longer than the margin of a
  lease, up to twice the maximum may be in use, from the end of learning to the end of the last lease that the old
  master renewed.
- Whoever waits is served within the bound that cluster/lease_policy.py states.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from counterd.cluster import lease_protocol
from counterd.cluster.lease_policy import MARGIN, LeasePolicy
from counterd.protocols.counter import leased_limits, wire
from kit.counters import make_store
from kit.lua_redis import LuaRedis
from kit.pump import Pump
from kit.shared_store import Request, SharedStore
from kit.takes import Taker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MS = 1_000_000
SECOND = 1_000 * MS
PATIENCE_NS = SECOND
START_NS = 1_000 * SECOND


class Violation(Exception):
    pass


@dataclass(frozen=True)
class Demand:
    """A request of an application, for both worlds. wait_ns: 0: it does not wait."""

    at_ns: int
    host: int
    name: bytes
    amount: int
    maximum: int
    wait_ns: int
    hold_ns: int


@dataclass(eq=False)
class Client:
    """An application with one request, and then a hold."""

    demand: Demand
    request: Request
    host: Host
    life: int
    asked_ns: int = 0
    holds: bool = False


class Model(SharedStore):
    """A host's store, in Python."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.granted, host.refused, host.dropped)
        self.limits: Any = self

    def next_deadline(self) -> int:
        return min((until_ns for until_ns in self.until_ns if until_ns), default=0)


class Daemon:
    """A host's store, as counterd has it. Each request has a connection of its own."""

    def __init__(self, host: Host) -> None:
        self.host = host
        now_ns = host.clock()
        self.store = make_store(waiters=4096, now_ns=now_ns)
        self.pump = Pump(self.store, now_ns=now_ns)
        self.limits = leased_limits(self.store, b"")
        self.limits.set_policy("closed", True)
        self.asking: dict[Request, tuple[Taker, int]] = {}  # with the opaque of a Take
        self.holding: dict[Request, Taker] = {}

    def ask(self, request: Request, now_ns: int) -> None:
        self.pump.now_ns = now_ns
        taker, take = Taker(self.pump.connect()), 0
        if request.stays:
            take = taker.take(wire.Permit(request.name, request.amount, request.maximum), wait_ms=3_600_000)
        else:
            taker.send(wire.acquire(0, request.name, request.amount, request.maximum))
        self.asking[request] = taker, take

    def give_up(self, request: Request) -> None:
        taker, _ = self.asking.pop(request)
        taker.close()

    def release(self, name: bytes, amount: int, now_ns: int) -> None:
        """By somebody whom the host has forgotten."""
        self.pump.now_ns = now_ns
        request = next(
            each
            for each in self.holding
            if (each.name, each.amount) == (name, amount) and each not in self.host.clients
        )
        taker = self.holding.pop(request)
        if not taker.session.closing:
            assert taker.release(name, amount) == wire.Status.NO_ERROR
        taker.close()

    def next_deadline(self) -> int:
        return max(self.store.next_deadline(), 0)

    def turn(self, now_ns: int) -> None:
        """Tells the host what it was answered, and who was dropped."""
        self.pump.now_ns = now_ns
        self.pump.settle()
        for request, (taker, take) in [*self.asking.items()]:
            answers = taker.answers
            if take in answers.takes or answers.others:
                del self.asking[request]
                granted = taker.has(take) if take else answers.others[0].status == wire.Status.NO_ERROR
                if granted:
                    self.holding[request] = taker
                    self.host.granted(request)
                else:
                    self.host.refused(request)
                    taker.close()
        lost = [request for request, taker in self.holding.items() if taker.session.closing]
        if lost:
            self.host.dropped([], lost)


class Host:
    """A machine: a daemon with its clock, and its applications. life: how often it was started."""

    def __init__(self, world: World, number: int, speed: float) -> None:
        self.world = world
        self.number = number
        self.speed = speed
        self.life = 0
        self.is_cut = False
        self.start()

    def start(self) -> None:
        self.life += 1
        self.clients: dict[Request, Client] = {}
        self.busy: dict[int, int] = {}  # the call under way, by partition
        self.decided_ns = 0  # when the authority has made the answer that is being settled
        self.due_ns = 0
        self.store = self.world.store(self)
        self.policy = LeasePolicy(self.store.limits, self.world.new_name, self.world.lease_ms)
        self.world.later(0, self.turn)

    def clock(self) -> int:
        return int(self.world.now_ns * self.speed)

    # ---- applications ----

    def ask(self, demand: Demand) -> None:
        request = Request(demand.name, demand.amount, demand.maximum, demand.wait_ns > 0)
        client = self.clients[request] = Client(demand, request, self, self.life, self.world.now_ns)
        if demand.wait_ns:
            self.world.later(demand.wait_ns, lambda: self.give_up(client))
        self.store.ask(request, self.clock())
        self.turn()

    def give_up(self, client: Client) -> None:
        if client.life == self.life and self.clients.get(client.request) is client and not client.holds:
            del self.clients[client.request]
            self.store.give_up(client.request)
            self.world.seen["gave up"] += 1
            self.turn()

    def granted(self, request: Request) -> None:
        client = self.clients[request]
        client.holds = True
        self.world.on_grant(client)
        self.world.later(client.demand.hold_ns, lambda: self.release(client))

    def refused(self, request: Request) -> None:
        del self.clients[request]
        self.world.seen["refused"] += 1

    def release(self, client: Client) -> None:
        if client.holds and client.life == self.life:
            self.end(client)
            self.store.release(client.request.name, client.request.amount, self.clock())
            self.turn()

    def dropped(self, names: list[bytes], requests: Iterable[Request] = ()) -> None:
        """The lease is over: the connections that hold permits are closed."""
        for client in [*self.clients.values()]:
            if client.holds and (client.request.name in names or client.request in requests):
                self.end(client)
                self.store.release(client.request.name, client.request.amount, self.clock())
                self.world.seen["dropped"] += 1

    def end(self, client: Client) -> None:
        client.holds = False
        del self.clients[client.request]
        self.world.use(client.request.name, -client.request.amount)

    def kill(self) -> None:
        self.world.seen["killed"] += 1
        for client in [*self.clients.values()]:
            if client.holds:
                self.end(client)
        self.start()

    # ---- calls, as control/cluster.py makes them ----

    def turn(self) -> None:
        self.store.turn(self.clock())
        due_ns = self.store.next_deadline()
        for partition in self.world.partitions:
            if partition in self.busy:
                continue
            if self.clock() >= self.policy.next_call_ns(partition):
                server = self.world.server_of(self)
                found = self.policy.call(partition, server.run, self.clock())
                if found is not None:
                    self.send(partition, server, *found)
                    continue
            next_ns = self.policy.next_call_ns(partition)
            due_ns = min(due_ns or next_ns, next_ns)
        if due_ns and (self.due_ns <= self.clock() or due_ns < self.due_ns):
            self.due_ns = max(due_ns, self.clock() + 1000)
            self.world.later(int((self.due_ns - self.clock()) / self.speed) + 1000, self.wake, self.life, self.due_ns)

    def wake(self, life: int, due_ns: int) -> None:
        if life == self.life and due_ns == self.due_ns:
            self.due_ns = 0
            self.turn()

    def send(self, partition: int, server: Server, keys: list[str], arguments: list[Any]) -> None:
        world, life = self.world, self.life
        number = self.busy[partition] = next(world.numbers)

        def arrive() -> None:
            if server.is_up and not self.is_cut:
                found = server.tick(keys, arguments)
                if world.draw.random() >= world.loss:
                    world.later(world.delay(), answer, found, world.now_ns)

        def answer(found: list[Any], decided_ns: int) -> None:
            if self.life == life and self.busy.get(partition) == number and not self.is_cut:
                del self.busy[partition]
                self.decided_ns = decided_ns
                self.policy.answered(partition, found, self.clock())
                self.store.turn(self.clock())
                self.decided_ns = 0
                self.turn()

        def lose_patience() -> None:
            if self.life == life and self.busy.get(partition) == number:
                del self.busy[partition]
                self.policy.failed(partition, self.clock())
                world.seen["no answer"] += 1
                self.turn()

        if world.draw.random() >= world.loss:
            world.later(world.delay() if world.draw.random() >= world.loss else 3 * PATIENCE_NS, arrive)
        world.later(int(PATIENCE_NS / self.speed), lose_patience)


class Server:
    """A master. skew_us: of its clock. speed: likewise."""

    def __init__(self, world: World, run: str, state: Any = None) -> None:
        self.world = world
        self.run = run
        self.is_up = True
        self.skew_us = world.draw.randint(-5_000_000, 5_000_000) if state is not None else 0
        self.redis = LuaRedis()
        self.redis.history = run
        if state is not None:
            self.redis.restore(state)
        self.copies: deque[Any] = deque(maxlen=2)  # what replicas have

    def tick(self, keys: list[str], arguments: list[Any]) -> list[Any]:
        self.redis.now_us = 1_700_000_000_000_000 + self.skew_us + self.world.now_ns // 1000
        self.redis.expire()
        return self.redis.tick(keys, arguments)


@dataclass(frozen=True)
class Sizes:
    """delay_ms: of a message, at least and as a rule at most. drift: of clocks. loss: of messages."""

    hosts: int = 20
    lease_ms: int = 10_000
    delay_ms: tuple[float, float] = (0.1, 0.5)
    drift: float = 0.0
    loss: float = 0.0


class World:
    """used: permits in use, by name. late_ns: when up to twice the maximum may be in use, after a split. waits_ns: of
    all requests that were granted after waiting."""

    def __init__(
        self, seed: int, sizes: Sizes, demands: Iterable[Demand], store: Callable[[Host], Any] = Model
    ) -> None:
        self.draw = Random(seed)
        self.store = store
        self.sizes = sizes
        self.lease_ms, self.loss = sizes.lease_ms, sizes.loss
        self.now_ns = START_NS
        self.numbers = itertools.count(1)
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.used: Counter[bytes] = Counter()
        self.history: dict[bytes, deque[tuple[int, int]]] = {}  # when this changed, and how
        self.seen: Counter[str] = Counter()
        self.granted = self.over_max = 0
        self.waits_ns: list[int] = []
        self.splits: list[tuple[int, int]] = []
        self.demands = [*demands]
        self.partitions = sorted({lease_protocol.partition_of(demand.name) for demand in self.demands})
        self.server = Server(self, "run0")
        for partition in self.partitions:  # it has recovered
            meta = lease_protocol.keys(partition, "")[1].encode()
            self.server.redis.data[meta] = {b"history": b"run0", b"learns": b"0"}
        self.old: tuple[Server, set[int]] | None = None  # after a split: who still talks to the former master
        self.hosts = [Host(self, number, 1 + sizes.drift * self.draw.uniform(-1, 1)) for number in range(sizes.hosts)]
        for demand in self.demands:
            self.later(demand.at_ns, self.hosts[demand.host].ask, demand)
        self.later(0, self.copy)

    def new_name(self) -> str:
        return f"s{next(self.numbers)}"

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, next(self.numbers), action, arguments))

    def delay(self) -> int:
        low, high = self.sizes.delay_ms
        slow = 100 if self.draw.random() < 0.001 else 1
        return int(self.draw.uniform(low, high) * slow * MS)

    def run(self, duration_ns: int) -> None:
        end_ns = START_NS + duration_ns
        while self._events and self._events[0][0] <= end_ns:
            self.now_ns, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)

    # ---- books ----

    def use(self, name: bytes, amount: int) -> None:
        self.used[name] += amount
        history = self.history.setdefault(name, deque([(0, 0)]))
        history.append((self.now_ns, self.used[name]))
        while len(history) > 2 and history[1][0] < self.now_ns - PATIENCE_NS:
            history.popleft()

    def least(self, name: bytes, since_ns: int) -> int:
        """Returns the least that was in use since then."""
        found = self.used[name]
        for at_ns, used in reversed(self.history.get(name, ())):
            found = min(found, used)
            if at_ns <= since_ns:
                break
        return found

    def on_grant(self, client: Client) -> None:
        """What was asked for is granted when the authority decides, and others may be granted more meanwhile."""
        name, amount, maximum = client.request.name, client.request.amount, client.request.maximum
        over = self.least(name, client.host.decided_ns or self.now_ns) + amount - maximum
        self.use(name, amount)
        self.granted += 1
        if client.demand.wait_ns:
            self.waits_ns.append(self.now_ns - client.asked_ns)
        if over > 0:
            self.over_max = max(self.over_max, over)
            self.seen["over"] += 1
            if over > maximum or not any(begin <= self.now_ns <= end for begin, end in self.splits):
                raise Violation(f"{self.used[name]} of {maximum} at {(self.now_ns - START_NS) / SECOND:.3f} s")

    # ---- what goes wrong ----

    def server_of(self, host: Host) -> Server:
        if self.old is not None and host.number in self.old[1]:
            return self.old[0]
        return self.server

    def copy(self) -> None:
        """Replication, which lags."""
        self.server.copies.append(self.server.redis.snapshot())
        self.later(int(self.draw.uniform(1, 200) * MS), self.copy)

    def fail_over(self, split_ns: int = 0) -> None:
        """The replica takes over, without the last writes. In a split some still talk to the old master for a while."""
        old = self.server
        self.server = Server(self, f"run{next(self.numbers)}", self.draw.choice(old.copies))
        self.server.copies.append(self.server.redis.snapshot())
        self.seen["failover"] += 1
        if not split_ns:
            old.is_up = False
            return
        self.old = old, {host.number for host in self.hosts if self.draw.random() < 0.5}
        lease_ns = self.lease_ms * MS
        ends_ns = self.now_ns + split_ns + PATIENCE_NS  # a call that was sent to it may still be under way
        if split_ns + PATIENCE_NS > lease_ns // MARGIN:
            self.splits.append((self.now_ns + lease_ns, ends_ns + lease_ns))

        def end() -> None:
            old.is_up = False
            self.old = None

        self.later(split_ns, end)

    def fail_back(self, state: Any) -> None:
        """Another master took over, with this state, and then the former one again. Nobody has called the other one."""
        self.server.redis.restore(state)
        self.server.redis.history = f"history{next(self.numbers)}"
        self.seen["failback"] += 1

    def flush(self) -> None:
        """FLUSHALL."""
        self.server.redis.restore(({}, {}))
        self.seen["flush"] += 1

    def cut(self, host: Host, duration_ns: int) -> None:
        host.is_cut = True
        self.seen["cut"] += 1
        self.later(duration_ns, lambda: setattr(host, "is_cut", False))


# ---- the ideal counter ----------------------------------------------------------------------------------------------


@dataclass
class Ideal:
    """One counter that everybody reaches at once, with one queue: first come, first served."""

    used: Counter[bytes] = field(default_factory=Counter)
    granted: int = 0

    def run(self, demands: list[Demand], duration_ns: int) -> int:
        """Returns how many requests are granted."""
        events: list[tuple[int, int, str, Demand]] = []
        numbers = itertools.count()
        queues: dict[bytes, deque[Demand]] = {demand.name: deque() for demand in demands}
        for demand in demands:
            heapq.heappush(events, (demand.at_ns, next(numbers), "ask", demand))
        while events and events[0][0] <= duration_ns:
            now_ns, _, what, demand = heapq.heappop(events)
            queue = queues[demand.name]
            if what == "release":
                self.used[demand.name] -= demand.amount
            elif queue or self.used[demand.name] + demand.amount > demand.maximum:
                if demand.wait_ns:
                    queue.append(demand)
            else:
                queue.append(demand)
            while queue:
                first = queue[0]
                if first.wait_ns and first.at_ns + first.wait_ns <= now_ns:
                    queue.popleft()
                    continue
                if self.used[first.name] + first.amount > first.maximum:
                    break
                queue.popleft()
                self.used[first.name] += first.amount
                self.granted += 1
                heapq.heappush(events, (now_ns + first.hold_ns, next(numbers), "release", first))
        return self.granted


@dataclass(frozen=True)
class Load:
    """load: of what the maximum allows. waits: the part of the requests that wait. hold_ms: about. amount: at most.
    shift_ms: from one time to the next at which other hosts are busy. others: the part with a smaller maximum."""

    maximum: int
    load: float = 1.2
    waits: float = 0.5
    hold_ms: float = 100
    wait_ms: float = 1000
    amount: int = 1
    names: int = 1
    shift_ms: float = 2000
    others: float = 0

    def demands(self, seed: int, hosts: int, duration_ns: int) -> list[Demand]:
        draw = Random(seed)
        found: list[Demand] = []
        assert self.amount <= self.maximum
        rate = self.load * self.maximum / ((1 + self.amount) / 2) / (self.hold_ms * MS)
        for number in range(self.names):
            at_ns, shifted_ns, weights = 0.0, 0.0, [1.0] * hosts
            while at_ns < duration_ns:
                if at_ns >= shifted_ns:
                    weights = [draw.random() ** 4 for _ in range(hosts)]
                    shifted_ns += self.shift_ms * MS
                host = draw.choices(range(hosts), weights)[0]
                waits = self.wait_ms * MS if draw.random() < self.waits else 0
                hold_ns = max(draw.expovariate(1 / self.hold_ms), 0.01) * MS
                hold_ns = min(hold_ns, 5 * self.hold_ms * MS)
                amount = draw.randint(1, self.amount)
                maximum = self.maximum
                if draw.random() < self.others:
                    maximum = draw.randint(amount, self.maximum)
                found.append(Demand(int(at_ns), host, b"n%d" % number, amount, maximum, int(waits), int(hold_ns)))
                at_ns += draw.expovariate(rate)
        return sorted(found, key=lambda demand: demand.at_ns)


def trouble(world: World, *, splits: bool, forgets: bool) -> None:
    """Has things go wrong all the time, each about once a lease somewhere. forgets: also what hardly ever happens."""
    lease_ns = world.lease_ms * MS

    def again(mean_ns: float, action: Callable[[], None]) -> None:
        def happen() -> None:
            action()
            world.later(int(world.draw.expovariate(1 / mean_ns)), happen)

        world.later(int(world.draw.expovariate(1 / mean_ns)), happen)

    def anybody() -> Host:
        return world.draw.choice(world.hosts)

    again(lease_ns / 2, lambda: world.cut(anybody(), int(world.draw.choice((0.1, 0.5, 1.5)) * lease_ns)))
    again(lease_ns, lambda: anybody().kill())
    again(lease_ns * 3, lambda: world.fail_over(int(world.draw.choice((0, 0, 0.05, 0.6)) * lease_ns) if splits else 0))
    if forgets:
        again(lease_ns * 3, lambda: world.fail_back(world.draw.choice(world.server.copies)))
        again(lease_ns * 3, world.flush)
