"""Daemons that share limits, of a store and a policy, and a Redis in memory with a clock that the tests set."""

from __future__ import annotations

import itertools
from typing import Any

from counterd.cluster import lease_protocol
from counterd.cluster.lease_policy import MS, SECOND, LeasePolicy
from kit.lua_redis import LuaRedis
from kit.shared_store import Request, SharedStore

LEASE_MS = 10_000
NAME = b"n"
PART = lease_protocol.partition_of(NAME)
START_NS = 100 * SECOND


class Server(LuaRedis):
    """A server that has recovered, with the test's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.run = "run-0"
        self.now_ns = START_NS
        self.numbers = itertools.count(1)
        for partition in range(lease_protocol.PARTITIONS):
            self.data[lease_protocol.keys(partition, "")[1].encode()] = {b"history": b"0", b"learns": b"0"}

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.now_us += duration_ns // 1000
        self.expire()


class Machine:
    """A daemon. grants: what was granted, in order. refusals: likewise."""

    def __init__(self, server: Server, *, drops: bool = True) -> None:
        self.server = server
        self.grants: list[Request] = []
        self.refusals: list[Request] = []
        self.dropped: list[bytes] = []
        self.store = SharedStore(self.grants.append, self.refusals.append, self.drop if drops else None)
        self.policy = LeasePolicy(self.store, lambda: f"s{next(server.numbers)}", LEASE_MS)

    def drop(self, names: list[bytes]) -> None:
        for name in names:
            self.dropped.append(name)
            self.store.share(name).used = 0

    def ask(self, amount: int = 1, maximum: int = 100, *, name: bytes = NAME, stays: bool = False) -> Request:
        request = Request(name, amount, maximum, stays)
        self.store.ask(request, self.server.now_ns)
        return request

    def release(self, amount: int = 1, name: bytes = NAME) -> None:
        self.store.release(name, amount, self.server.now_ns)

    def send(self) -> tuple[list[str], list[Any]] | None:
        self.store.turn(self.server.now_ns)
        return self.policy.call(PART, self.server.run, self.server.now_ns)

    def turn(self) -> bool:
        """Makes a call if the machine has something to say."""
        call = self.send()
        if call is not None:
            self.policy.answered(PART, self.server.tick(*call), self.server.now_ns)
        return call is not None

    @property
    def rights(self) -> int:
        return self.store.share(NAME).rights

    @property
    def used(self) -> int:
        return self.store.share(NAME).used


def pass_time(server: Server, duration_ns: int, *machines: Machine) -> int:
    """Lets time pass, with calls when they are due. Returns how many there were."""
    end_ns, calls = server.now_ns + duration_ns, 0
    while server.now_ns < end_ns:
        server.advance(MS)
        for machine in machines:
            if server.now_ns >= machine.policy.next_call_ns(PART):
                calls += machine.turn()
    return calls


def pair(server: Server) -> tuple[Machine, Machine]:
    """Makes two machines that the server knows."""
    both = Machine(server), Machine(server)
    for machine in both:
        machine.ask(maximum=1000)
        machine.turn()
        machine.release()
    pass_time(server, 2 * SECOND, *both)
    assert [machine.used for machine in both] == [0, 0]
    for machine in both:
        machine.grants.clear()
    return both


def fill(server: Server, names: int, maximum: int = 100, size: int = 0) -> tuple[Machine, list[bytes]]:
    """Makes a machine with a permit of each of many counters in one partition. size: the least size of a name, in
    bytes.
    """
    machine = Machine(server)
    numbers = (b"n%d" % number + b"-" * size for number in itertools.count())
    found = [*itertools.islice((name for name in numbers if lease_protocol.partition_of(name) == PART), names)]
    for name in found:
        machine.ask(maximum=maximum, name=name)
    while len(machine.grants) < names:
        server.advance(3 * MS)
        machine.turn()
    return machine, found
