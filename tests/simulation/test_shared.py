"""Daemons that share limits: nothing is granted above a maximum, nobody starves, and little is left unused.

Each promise is broken once, by the script, the policy or the store, and the world notices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from counterd.cluster import lease_policy, lease_protocol
from counterd.cluster.lease_policy import HEARTBEAT_NS, LONG_TURN_NS, NEVER, LeasePolicy
from counterd.cluster.lease_protocol import Mode
from kit.machine import examples
from simulation.shared import MS, SECOND, Daemon, Demand, Host, Ideal, Load, Model, Sizes, Violation, World, trouble

if TYPE_CHECKING:
    from collections.abc import Callable

STORES = {"daemon": Daemon, "model": Model}


def troubled(seed: int, store: Callable[[Host], Any], *, splits: bool = False, forgets: bool = False) -> World:
    """A small world in which much goes wrong."""
    draw, seconds = Random(seed), 20
    hosts = draw.choice((2, 4, 8))
    maximum = draw.choice((1, 2, 5, 12))
    load = Load(
        maximum,
        load=draw.choice((0.7, 1.5)),
        waits=draw.random(),
        hold_ms=draw.choice((300, 1000, 4000)),
        wait_ms=5000,
        amount=min(draw.choice((1, 3)), maximum),
        names=draw.choice((1, 3)),
        others=draw.choice((0, 0.2)),
    )
    sizes = Sizes(hosts, lease_ms=2000, drift=draw.choice((0, 0.045)), loss=draw.choice((0, 0.01, 0.1)))
    world = World(seed, sizes, load.demands(seed, hosts, seconds * SECOND), store)
    trouble(world, splits=splits, forgets=forgets)
    world.run(seconds * SECOND)
    return world


@pytest.mark.parametrize("kind", STORES)
def test_nothing_is_granted_above_its_maximum(kind: str) -> None:
    """Although writes are lost in failovers, machines are cut off, clocks are wrong, and daemons are killed."""
    seen = Counter[str]()
    for seed in range(6):
        world = troubled(seed, STORES[kind], forgets=seed % 2 == 1)
        seen += world.seen
        assert world.over_max == 0
        assert world.granted > 0
    troubles = {"refused", "no answer", "gave up", "cut", "failover", "failback", "flush", "dropped", "killed"}
    assert troubles <= set(seen)


@pytest.mark.parametrize("kind", STORES)
def test_nothing_is_granted_above_a_smaller_maximum(kind: str) -> None:
    """Although others may be granted more."""
    assert all(mixed(seed, STORES[kind]) for seed in range(examples(4)))


@pytest.mark.parametrize(("split_ms", "most"), [(100, 0), (3000, 10)])
def test_after_a_split_there_is_at_most_twice_the_maximum(split_ms: int, most: int) -> None:
    """One host talks to the old master, and gets there what the new one gives to another host after its recovery."""

    def want(at_ms: int, host: int, amount: int) -> Demand:
        return Demand(at_ms * MS, host, b"n0", amount, 10, 60 * SECOND, 60 * SECOND)

    world = World(1, Sizes(2, lease_ms=2000), [want(150, 0, 10), want(160, 1, 10)], Model)

    def split() -> None:
        world.fail_over(split_ms * MS)
        assert world.old is not None
        world.old[1].clear()
        world.old[1].add(0)

    world.later(100 * MS, split)
    world.run(2 * SECOND)
    assert world.used[b"n0"] == 10
    world.run(8 * SECOND)
    assert world.used[b"n0"] == 10, "the lease of the old master is over"
    assert world.over_max == most


def test_a_server_that_knows_nothing_is_told_everything() -> None:
    forgotten()


def test_a_master_that_was_a_replica_for_a_moment_recovers() -> None:
    replaced()


def test_splits() -> None:
    for seed in range(100, 103):
        troubled(seed, Model, splits=True)  # the world itself checks how much may be in use


def test_hundreds_of_daemons() -> None:
    hosts, seconds = 300, 2
    demands = Load(60, load=1.5, waits=0.5, hold_ms=100).demands(1, hosts, seconds * SECOND)
    world = World(1, Sizes(hosts, delay_ms=(0.2, 2)), demands, Model)
    world.run(seconds * SECOND)
    assert world.over_max == 0
    assert world.granted > 0.8 * Ideal().run(demands, seconds * SECOND)
    assert world.server.redis.calls / seconds < 2000 + 10 * hosts


# ---- how much is used -----------------------------------------------------------------------------------------------


def utilisation(maximum: int, seconds: int, store: Callable[[Host], Any] = Model, **others: Any) -> float:
    """Grants as a part of those of an ideal counter, of all loads together."""
    granted = ideal = 0
    for load, waits in itertools.product((0.8, 1.2), (0.0, 0.5, 1.0)):
        demands = Load(maximum, load=load, waits=waits, **others).demands(1, 20, seconds * SECOND)
        world = World(1, Sizes(), demands, store)
        world.run(seconds * SECOND)
        granted += world.granted
        ideal += Ideal().run(demands, seconds * SECOND)
    return granted / ideal


@pytest.mark.parametrize(
    ("maximum", "seconds", "least"),
    [(2, 12, 0.8), (5, 6, 0.8), (30, 3, 0.8), (99, 2, 0.8), (100, 2, 0.95), (300, 1, 0.95)],
)
def test_few_permits_are_left_unused(maximum: int, seconds: int, least: float) -> None:
    assert utilisation(maximum, seconds) >= least


def test_few_permits_are_left_unused_by_daemons() -> None:
    assert utilisation(100, 1, Daemon) >= 0.95
    assert utilisation(10, 3, Daemon) >= 0.8


@pytest.mark.parametrize(("kind", "maximum"), [("model", 1), ("model", 5), ("model", 30), ("daemon", 5)])
def test_few_permits_are_left_unused_while_a_server_recovers(kind: str, maximum: int) -> None:
    """By the daemons that have them when it begins."""
    hosts, lease_ms = 4, 3000
    demands = Load(maximum, waits=1, shift_ms=1e6).demands(1, hosts, 4 * SECOND)
    world = World(1, Sizes(hosts, lease_ms=lease_ms), demands, STORES[kind])
    world.run(SECOND)
    world.fail_over()
    before = world.granted
    world.run(SECOND + lease_ms * MS)
    assert world.granted - before > 0.7 * Ideal().run(demands, lease_ms * MS)


def test_calls_are_bounded_by_ticks() -> None:
    """Not by requests: of these there are 10,000 a second."""
    hosts, seconds = 4, 3
    demands = Load(20_000, load=0.1, waits=0, hold_ms=200, shift_ms=1e6).demands(1, hosts, seconds * SECOND)
    world = World(1, Sizes(hosts), demands, Model)
    world.run(seconds * SECOND)
    assert world.granted == len(demands) > 25_000
    calls = sum(host.policy.figures(world.now_ns)["calls"] for host in world.hosts)
    assert calls < hosts * seconds * 40


# ---- waiting --------------------------------------------------------------------------------------------------------


class Patient(World):
    """Each host has clients that want a permit at all times, and hold it for a while: some hosts one, others eight.

    least: the maximum of half of these eight.
    """

    def __init__(self, hosts: int, maximum: int, least: int, hold_ns: int, store: Callable[[Host], Any]) -> None:
        first = [
            Demand(
                0, host, b"n0", maximum if host == 0 else 1, least if client % 2 else maximum, 3600 * SECOND, hold_ns
            )
            for host in range(hosts)
            for client in range(8 if host % 2 else 1)
        ]
        super().__init__(1, Sizes(hosts), first, store)
        self.served = Counter[int]()

    def on_grant(self, client: Any) -> None:
        super().on_grant(client)
        self.served[client.host.number] += 1
        self.later(client.demand.hold_ns + MS, client.host.ask, client.demand)


@pytest.mark.parametrize(
    ("kind", "maximum", "least"),
    [("model", 1, 1), ("model", 3, 3), ("model", 20, 20), ("daemon", 3, 3), ("model", 3, 1), ("daemon", 3, 2)],
)
def test_nobody_starves(kind: str, maximum: int, least: int) -> None:
    """The first daemon wants the whole maximum at once, each other one has one client or eight."""
    hosts, hold_ns, seconds = 5, 50 * MS, 12  # longer than the bound
    world = Patient(hosts, maximum, least, hold_ns, STORES[kind])
    world.run(seconds * SECOND)
    bound_ns = hosts * (HEARTBEAT_NS + LONG_TURN_NS + hold_ns + 100 * MS)
    assert set(world.served) == set(range(hosts))
    assert max(world.waits_ns) < bound_ns
    waiting = [client for host in world.hosts for client in host.clients.values() if not client.holds]
    assert max(world.now_ns - client.asked_ns for client in waiting) < bound_ns


# ---- that the world notices -----------------------------------------------------------------------------------------


def in_script(before: str, after: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        source = lease_protocol.script()
        assert source.count(before.encode()) == 1
        patch.setattr(lease_protocol, "script", lambda: source.replace(before.encode(), after.encode()))

    return plant


def said(
    change: Callable[[lease_protocol.LeaseRequest], lease_protocol.LeaseRequest],
) -> Callable[[pytest.MonkeyPatch], None]:
    """What is said, but not what is done."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = lease_protocol.arguments
        patch.setattr(
            lease_protocol, "arguments",
            lambda name, call, lease_ms, requests, rates: plain(
                name, call, lease_ms, [change(request) for request in requests], rates
            ),
        )  # fmt: skip

    return plant


def the_lease_is_longer_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease_policy, "MARGIN", -3)


def a_new_server_is_not_told(patch: pytest.MonkeyPatch) -> None:
    plain = LeasePolicy.call

    def call(self: LeasePolicy, partition: int, run: str, now_ns: int) -> Any:
        self._partitions[partition].run, self._partitions[partition].recovered_ms = run, NEVER
        return plain(self, partition, run, now_ns)

    patch.setattr(LeasePolicy, "call", call)


def what_is_for_one_request_is_for_others(patch: pytest.MonkeyPatch) -> None:
    """Rights for a request with another maximum stay when that has ended."""
    plain = Model.apply

    def apply(self: Model, partition: int, update: Any, now_ns: int) -> None:
        counters = [each._replace(yields=False) for each in update.counters]
        plain(self, partition, update._replace(counters=counters), now_ns)

    patch.setattr(Model, "apply", apply)


UNSAFE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a new server does not recover": in_script("recovered = now + longest", "recovered = now"),
    "a former master does not recover": in_script("known[1] ~= history", "not known[1]"),
    "old calls are done": in_script("if number <= tonumber(known[4] or 0) then", "if false then"),
    "leases are short": in_script("('ZADD', leases, now + lease, daemon)", "('ZADD', leases, now + 300, daemon)"),
    "the lease is longer here": the_lease_is_longer_here,
    "a new server is not told": a_new_server_is_not_told,
    "less is kept than said": said(lambda request: request._replace(keep=0)),
    "every request has the usual maximum": said(lambda request: request._replace(mode=Mode.PLENTY, maximum=12)),
    "what is for one request is for others": what_is_for_one_request_is_for_others,
}  # fmt: skip

NOTICED_IN = {"old calls are done": 34, "what is for one request is for others": 8}  # which world, if late


@pytest.mark.parametrize("defect", UNSAFE)
def test_a_defect_is_noticed(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    UNSAFE[defect](monkeypatch)
    with pytest.raises((Violation, AssertionError)):
        many(NOTICED_IN.get(defect, 0))


def many(first: int) -> None:
    """A world with an empty new server, worlds in which much goes wrong, and others with several maxima."""
    forgotten()
    replaced()
    for seed in range(first, first + 60):
        troubled(seed, Model)
        mixed(seed, Model)


def forgotten() -> None:
    """A host holds everything, and has nothing new to say of it, when a server that knows nothing takes over."""
    demands = [Demand(at_ms * MS, host, b"n0", 10, 10, 60 * SECOND, 60 * SECOND) for at_ms, host in ((0, 0), (8000, 1))]
    world = World(1, Sizes(2, lease_ms=2000), demands, Model)

    def fail_over() -> None:
        world.fail_over()
        world.server.redis.data.clear()

    world.later(2 * SECOND, fail_over)
    world.run(12 * SECOND)
    assert world.used[b"n0"] == 10
    assert world.seen["dropped"] == 0


def replaced() -> None:
    """A host gets all permits in a write that another master lacks. Nobody has called that one."""
    demands = [Demand(at_ms * MS, host, b"n0", 10, 10, 60 * SECOND, 60 * SECOND) for at_ms, host in ((50, 0), (100, 1))]
    world = World(1, Sizes(2, lease_ms=2000), demands, Model)
    before = world.server.redis.snapshot()
    world.later(80 * MS, lambda: world.fail_back(before))
    world.run(12 * SECOND)
    assert (world.granted, world.used[b"n0"]) == (1, 10)
    assert world.seen["dropped"] == 0


def mixed(seed: int, store: Callable[[Host], Any]) -> int:
    """Nothing goes wrong, but messages take long, holds are short, and half of the requests have another maximum."""
    draw = Random(seed)
    load = Load(12, load=1.2, waits=draw.choice((0, 0.3)), hold_ms=draw.choice((5, 20, 200)), others=0.5)
    world = World(seed, Sizes(4, delay_ms=(0.1, 3)), load.demands(seed, 4, 2 * SECOND), store)
    world.run(2 * SECOND)
    return world.granted


def test_turns_that_never_end_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeasePolicy, "_turn_is_over", staticmethod(lambda _part, _lease, _now_ns: False))
    with pytest.raises(AssertionError):
        test_nobody_starves("model", 3, 3)


def test_rights_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For two seconds, even if others wait."""
    monkeypatch.setattr(lease_policy, "TICK_NS", 2 * SECOND)
    monkeypatch.setattr(lease_policy, "FEW", 0)
    monkeypatch.setattr(LeasePolicy, "_yield", lambda *_: [])
    assert utilisation(5, 5) < 0.8
