"""Random histories of a store that shares limits, with books of its own about what may be granted.

The authority is played at random: it gives rights and units or refuses them, answers late or never, ends leases, and
cannot be reached for a while. The store is audited at each turn.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from counterd.cluster.lease_protocol import PARTITIONS, partition_of
from counterd.contract import CounterUpdate, RateUpdate, Scope, Update
from counterd.protocols.counter import leased_limits, wire
from counterd.protocols.counter.wire import OnDeath, Permit, Rate, Status
from kit.takes import MS, Desk, Taker

if TYPE_CHECKING:
    from random import Random

    from counterd.contract import CounterChange, RateChange

NAMES = [b"a", b"b", b"c" * 50]
MAXIMUM = 6
LEASE_MS = 5000
PERIOD_US = 1_000_000
POLICIES = ("closed", "share", "open")
DAEMONS = 2


class Client:
    """A connection, what it was granted, and the request of which it waits for the answer."""

    def __init__(self, taker: Taker) -> None:
        self.taker = taker
        self.held: Counter[bytes] = Counter()
        self.asked: tuple[str, Any, int] | None = None  # kind, what, and how many answers there were before
        self.is_gone = False


class History:
    """draw: a source of chance, such as random.Random."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        self.desk = Desk(buckets=16, name_memory=4096)
        self.desk.store.limit_resumptions(60)
        self.limits = leased_limits(self.desk.store, b"")
        self.policy = draw.choice(POLICIES)
        self.limits.set_policy(self.policy, draw.random() < 0.5)
        self.rights: Counter[bytes] = Counter()
        self.units: Counter[bytes] = Counter()
        self.taken: Counter[bytes] = Counter()  # of rates: units that were granted to clients
        self.was_away = False
        self.on_death = draw.choice([OnDeath.FINAL, OnDeath.REFUNDED])
        self.calls: dict[int, tuple[list[CounterChange], list[RateChange]]] = {}  # under way, by partition
        self.clients = [Client(self.desk.taker()) for _ in range(4)]
        for partition in range(PARTITIONS):
            self.update(partition, lease_ns=self.lease_ns(), daemons=DAEMONS)

    def update(self, partition: int, **what: Any) -> None:
        self.limits.apply(partition, Update(**what), self.desk.pump.now_ns)
        self.desk.pump.settle()

    def lease_ns(self) -> int:
        return self.desk.pump.now_ns + LEASE_MS * MS

    # ---- one step ----

    def step(self) -> None:
        self.draw.choice(
            [self.ask, self.ask, self.ask, self.take, self.release, self.release, self.call, self.call, self.answer,
             self.answer, self.answer, self.leave, self.rest, self.end_lease, self.lose_answer, self.travel, self.want]
        )()  # fmt: skip
        self.read()

    def ask(self) -> None:
        """An Acquire."""
        client, name = self.draw.choice(self.clients), self.draw.choice(NAMES)
        if client.asked is None:
            amount = self.draw.randint(1, 2)
            client.asked = "acquire", (name, amount), len(client.taker.answers.others)
            client.taker.send(wire.acquire(0, name, amount, MAXIMUM))

    def take(self) -> None:
        """A Take of a permit, of units, or of both."""
        client = self.draw.choice(self.clients)
        if client.asked is None:
            items: list[Permit | Rate] = [Permit(self.draw.choice(NAMES), 1, MAXIMUM)]
            if self.draw.random() < 0.5:
                items.append(Rate(self.draw.choice(NAMES), 1, 10, PERIOD_US, 10, self.on_death))
            if self.draw.random() < 0.3:
                items.pop(0)
            items = items or [Permit(NAMES[0], 1, MAXIMUM)]
            wait_ms = self.draw.choice([0, 0, 100, 10_000])
            client.asked = "take", items, client.taker.take(*items, wait_ms=wait_ms)

    def release(self) -> None:
        client = self.draw.choice(self.clients)
        if client.asked is None and client.held:
            name = self.draw.choice(sorted(client.held))
            client.taker.send(wire.release(0, name, 1))
            client.held = +(client.held - Counter([name]))

    def leave(self) -> None:
        """A connection ends, in one way or another."""
        place = self.draw.randint(0, len(self.clients) - 1)
        if self.draw.random() < 0.5:
            self.clients[place].taker.peer.half_close()
        else:
            self.clients[place].taker.close()
        self.desk.wait(0)
        self.clients[place] = Client(self.desk.taker())

    def rest(self) -> None:
        self.desk.wait(self.draw.choice([1, 50, 1000]))

    def call(self) -> None:
        """Makes a call about a partition, unless one is under way."""
        partition = partition_of(self.draw.choice(NAMES))
        if partition in self.calls:
            return
        scope = self.draw.choice([*Scope, Scope.BACKGROUND, Scope.BACKGROUND])
        changes = self.limits.changes(partition, self.draw.randint(1, 3), scope)
        kept: list[tuple[int, int, bool]] = []
        unchanged: list[int] = []
        counters = []
        for change in changes.blocking + changes.background:
            if not change.first and self.draw.random() < 0.1:
                unchanged.append(change.number)
                continue
            keep = max(change.used, self.draw.randint(0, change.rights)) if change.rights else change.used
            kept.append((change.number, keep, self.draw.random() < 0.2))
            self.rights[change.name] = min(self.rights[change.name], keep)
            counters.append(change)
        for rate in changes.rates:
            if rate.units > 0 and self.draw.random() < 0.5:
                kept.append((rate.number, 0, False))
                self.give_back(rate.name, rate.units)
        self.update(partition, kept=kept, unchanged=unchanged)
        self.calls[partition] = counters, changes.rates

    def give_back(self, name: bytes, units: int) -> None:
        self.units[name] -= units
        assert self.units[name] >= 0, "no more than there came"

    def answer(self) -> None:
        if not self.calls:
            return
        partition = self.draw.choice(sorted(self.calls))
        asked, rates = self.calls.pop(partition)
        counters, poured = [], []
        for change in asked:
            rights = max(change.used, self.draw.randint(0, MAXIMUM))
            self.rights[change.name] = rights
            all_used = change.used + self.draw.randint(0, 3)
            is_refused = rights < change.used + change.first
            yields = self.draw.random() < 0.3
            counters.append(CounterUpdate(change.number, rights, MAXIMUM, all_used, yields, is_refused))
        for rate in rates:
            units = self.draw.choice([0, rate.first, rate.first + 3])
            wait_us = 0 if units else self.draw.choice([0, 50_000])
            debt = -min(rate.units, 0)
            self.units[rate.name] += units + debt
            poured.append(RateUpdate(rate.number, units + debt, rate.first, wait_us))
        self.update(partition, lease_ns=self.lease_ns(), is_reachable=True, counters=counters, rates=poured)

    def lose_answer(self) -> None:
        """A call has no answer; then the authority cannot be reached."""
        if self.calls:
            partition = self.draw.choice(sorted(self.calls))
            self.was_away = True
            self.update(partition, forgotten=self.forgotten(partition), is_reachable=False)

    def forgotten(self, partition: int) -> list[int]:
        """The numbers in a call."""
        counters, rates = self.calls.pop(partition, ([], []))
        return [change.number for change in counters] + [rate.number for rate in rates]

    def travel(self) -> None:
        self.update(partition_of(self.draw.choice(NAMES)), is_reachable=True)

    def end_lease(self) -> None:
        partition = partition_of(self.draw.choice(NAMES))
        for name in NAMES:
            if partition_of(name) == partition:
                self.rights[name] = 0
        self.update(partition, lease_ns=0)

    def want(self) -> None:
        """Other daemons wait for rights."""
        name = self.draw.choice(NAMES)
        self.update(partition_of(name), wanted=[name, b"unknown"])

    # ---- what was answered ----

    def read(self) -> None:
        """Reads all answers, and compares each grant with the rights."""
        for client in self.clients:
            if client.taker.session.dropped:
                client.asked, client.held = None, Counter()
                client.is_gone = True
            elif client.asked is not None:
                self.hear(client)
        self.clients = [Client(self.desk.taker()) if each.is_gone else each for each in self.clients]

    def hear(self, client: Client) -> None:
        assert client.asked is not None
        kind, what, place = client.asked
        granted: Counter[bytes] = Counter()
        if kind == "acquire":
            answers = client.taker.answers.others[place:]
            if not answers:
                return
            assert len(answers) == 1, "one answer"
            if answers[0].status == Status.NO_ERROR:
                granted[what[0]] = what[1]
        else:
            answer = client.taker.of(place)
            if answer is None:
                return
            if isinstance(answer, wire.Grant):
                granted.update(item.name for item in what if isinstance(item, Permit))
                self.taken.update(item.name for item in what if isinstance(item, Rate))
        client.asked = None
        client.held += granted
        for name in granted:
            used = self.used(name)
            assert used <= MAXIMUM
            assert used <= self.rights[name] or (self.was_away and self.policy != "closed"), (name, used, self.rights)
        if self.on_death == OnDeath.FINAL and (not self.was_away or self.policy == "closed"):
            assert all(self.taken[name] <= self.units[name] for name in self.taken), (self.taken, self.units)

    def used(self, name: bytes) -> int:
        """What the store says that is in use."""
        return sum(amount for _, held, amount, _ in self.desk.store.leases(1000) if held == name)

    # ---- the end ----

    def end(self) -> None:
        """All leave, and the authority takes everything back: no record remains in use."""
        for client in self.clients:
            client.taker.close()
        self.desk.wait(120_000)
        for partition in {partition_of(name) for name in NAMES}:
            self.update(partition, is_reachable=True, forgotten=self.forgotten(partition))
            for _ in range(3):
                changes = self.limits.changes(partition, 9, Scope.BACKGROUND)
                counters = changes.blocking + changes.background
                assert all(change.used == 0 for change in counters), "nothing is in use"
                kept = []
                for rate in changes.rates:
                    self.give_back(rate.name, rate.units)
                    if rate.units > 0:
                        kept.append((rate.number, 0, False))
                self.update(partition, kept=kept)
                self.update(
                    partition,
                    counters=[CounterUpdate(change.number, 0, 0, 0, False, False) for change in counters],
                    rates=[RateUpdate(rate.number, -min(rate.units, 0), 0, 0) for rate in changes.rates],
                )
            assert self.limits.changes(partition, 9, Scope.REPORT) == ([], [], [], True)
        self.desk.wait(120_000)
        assert self.desk.store.held() == 0
        assert self.desk.store.snapshot()["rates"] == 0
