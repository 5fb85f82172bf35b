"""The authority for shared limits in a real Redis, compared with what the applications of random daemons hold.

Answers are lost, leases end, and the server forgets its last changes. No time passes: a lease takes an hour, and
the tests end leases, and the server's recovery, by hand."""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import redis

from counterd.cluster import lease_protocol
from counterd.cluster.lease_protocol import (
    Answer,
    LeaseGrant,
    LeaseLost,
    LeaseRequest,
    Mode,
    RateGrant,
    RateRequest,
    StaleCall,
)
from kit.loading import other_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.needs("redis-server")

HOUR_MS = 3_600_000
PARTITION = 3
EXTRA = 3  # rights that a daemon wants beyond what it needs
MAXIMA = (1, 4, 9)  # of the counters, by name
NAMES = tuple(b"%d" % maximum for maximum in MAXIMA)
OTHER = 0.1  # of the requests have another maximum,
TEN_YEARS_US = 316_224_000_000_000
LARGEST = 12  # up to this
STAYS = 0.7  # of the requests wait on if they are refused
KEYS = lease_protocol.keys(PARTITION, "")
PREFIX = KEYS[0].removesuffix("leases")


@pytest.fixture
def server(short_path: Path) -> Iterator[redis.Redis]:
    with other_server("redis", short_path) as place, redis.Redis(unix_socket_path=place.path) as connected:
        connected.function_load(patient(lease_protocol.library()))
        yield connected


def patient(source: bytes) -> bytes:
    """The script, but a daemon keeps its place until a test takes it."""
    changed = source.replace(b"local PLACE_MS = 200 ", b"local PLACE_MS = 1e9 ")
    assert changed != source
    return changed


class Authority:
    """The server, as daemons reach it."""

    def __init__(self, server: redis.Redis, *, functions: bool = True) -> None:
        self.server = server
        self._script = None if functions else server.register_script(patient(lease_protocol.script()).decode())
        self._forgotten: dict[bytes, bytes] = {}

    def call(
        self,
        daemon: str,
        call: int,
        *requests: LeaseRequest,
        rates: Sequence[RateRequest] = (),
        lease_ms: int = HOUR_MS,
    ) -> Answer:
        keys = lease_protocol.keys(PARTITION, daemon)
        arguments = lease_protocol.arguments(daemon, call, lease_ms, requests, rates)
        if self._script is not None:
            return lease_protocol.answer(self._script(keys, arguments))
        return lease_protocol.answer(self.server.fcall(lease_protocol.LIBRARY, len(keys), *keys, *arguments))

    def recover(self) -> None:
        self.server.hset(KEYS[1], "learns", 0)

    def end_lease(self, daemon: str) -> None:
        self.server.zadd(KEYS[0], {daemon: 1})

    def end_place(self, daemon: str) -> None:
        """Ends a daemon's place in the queue, as if its last refused request were long ago."""
        key = lease_protocol.keys(PARTITION, daemon)[-1]
        for name, packed in self.server.hgetall(key).items():
            self.server.hset(key, name, packed[:40] + bytes(8))

    def remember(self) -> None:
        """Saves the state, as a replica has it that becomes the master later."""
        self._forgotten = {key: self.server.dump(key) for key in self.server.scan_iter()}

    def fail_over(self) -> None:
        """Loses everything since remember(), as if another master had been in charge meanwhile."""
        self.server.flushall()
        for key, value in self._forgotten.items():
            self.server.restore(key, 0, value)
        self.promote()

    def promote(self) -> None:
        """Makes it a replica for a moment, of a master that it does not reach."""
        self.server.replicaof("127.0.0.1", 1)
        self.server.replicaof("NO", "ONE")

    def totals(self) -> dict[bytes, list[int]]:
        return {name: numbers(packed) for name, packed in self.server.hgetall(KEYS[2]).items()}

    def blocks(self) -> Iterator[tuple[bytes, list[int]]]:
        for key in self.server.scan_iter(lease_protocol.keys(PARTITION, "*")[-1].replace("{", "[{]")):
            for name, packed in self.server.hgetall(key).items():
                yield name, numbers(packed)


def numbers(packed: bytes) -> list[int]:
    return [int(each) for (each,) in struct.iter_unpack("<d", packed)]


@dataclass
class Share:
    """A daemon's state of a counter. asked: permits and maximum of the first request that waits here."""

    rights: int = 0
    used: int = 0
    mode: Mode = Mode.PLENTY
    maximum: int = 0
    waited_for: bool = False
    asked: tuple[int, int] | None = None
    stays: bool = True


@dataclass
class Daemon:
    name: str
    calls: int = 0
    shares: dict[bytes, Share] = field(default_factory=lambda: {name: Share() for name in NAMES})
    told: bool = True  # it has said everything since the run began


class World:
    """Daemons, and the permits that their applications hold. grants: here; asked: at the authority."""

    def __init__(self, authority: Authority, rng: Random, daemons: int) -> None:
        self.authority = authority
        self.rng = rng
        self._numbers = itertools.count(1)
        self.daemons = [self.new() for _ in range(daemons)]
        self.seen: Counter[str] = Counter()

    def new(self) -> Daemon:
        return Daemon(f"s{next(self._numbers)}")

    # ---- applications ----

    def used(self, name: bytes) -> int:
        return sum(daemon.shares[name].used for daemon in self.daemons)

    def grant(self, daemon: Daemon, name: bytes, permits: int, maximum: int, how: str) -> None:
        share = daemon.shares[name]
        share.used += permits
        self.seen[how] += 1
        assert share.used <= share.rights
        assert self.used(name) <= maximum, (name, how)

    def acquire(self, daemon: Daemon, name: bytes) -> None:
        share = daemon.shares[name]
        if share.asked is not None:
            return
        maximum = int(name) if self.rng.random() > OTHER else self.rng.randint(1, LARGEST)
        permits = self.rng.randint(1, min(maximum, 3))
        if share.mode == Mode.PLENTY and maximum == share.maximum and share.used + permits <= share.rights:
            self.grant(daemon, name, permits, maximum, "here")
        else:
            share.asked = permits, maximum
            share.stays = self.rng.random() < STAYS

    def release(self, daemon: Daemon, name: bytes) -> None:
        share = daemon.shares[name]
        if share.used:
            share.used -= self.rng.randint(1, share.used)

    # ---- calls ----

    def request(self, name: bytes, share: Share) -> LeaseRequest:
        permits, maximum = share.asked or (0, share.maximum or int(name))
        if maximum == int(name):
            mode, extra = Mode.PLENTY, self.rng.randint(0, EXTRA)
        else:
            mode, extra = Mode.EXACT, 0
        least = share.used + permits
        want = least + extra
        if mode == Mode.EXACT or maximum != share.maximum:
            share.mode, share.maximum = Mode.EXACT, maximum
        # What it grants from until it is answered.
        grants = share.asked is None and share.mode == Mode.PLENTY and not share.waited_for
        share.rights = min(share.rights, want) if grants else share.used
        return LeaseRequest(name, maximum, least, want, share.rights, share.used, mode, share.stays)

    def call(self, daemon: Daemon, *, may_fail: bool = True) -> None:
        requests = [self.request(name, share) for name, share in daemon.shares.items()]
        self.rng.shuffle(requests)
        daemon.calls += 1
        number = daemon.calls
        fate = self.rng.random() if may_fail else 1
        if fate < 0.1:
            self.seen["never came"] += 1
            return
        try:
            answer = self.authority.call(daemon.name, number, *requests)
        except LeaseLost:
            self.seen["lost"] += 1
            self.lose(daemon)
            return
        daemon.told = True
        if fate < 0.2:
            self.seen["not answered"] += 1
            return
        if fate < 0.3:
            with pytest.raises(StaleCall):
                self.authority.call(daemon.name, self.rng.randint(1, number), *requests)
        for request, grant in zip(requests, answer.counters, strict=True):
            self.told(daemon, request, grant)

    def told(self, daemon: Daemon, request: LeaseRequest, grant: LeaseGrant) -> None:
        share = daemon.shares[request.name]
        assert share.used <= grant.rights <= max(request.want, share.used)
        share.rights, share.mode, share.maximum = grant.rights, grant.mode, request.maximum
        share.waited_for = grant.waited_for
        if grant.waited_for:
            self.seen["waited for"] += 1
        if share.asked is not None and request.least <= grant.rights:
            self.grant(daemon, request.name, *share.asked, "asked")
            share.asked = None
        elif share.asked is not None and not share.stays:
            self.seen["refused"] += 1
            share.asked = None

    # ---- what goes wrong ----

    def lose(self, daemon: Daemon) -> None:
        """Ends a daemon's lease, which it knows before the server does: it drops what its applications hold."""
        self.authority.end_lease(daemon.name)
        self.daemons[self.daemons.index(daemon)] = self.new()

    def fail_over(self) -> None:
        self.authority.fail_over()
        for daemon in self.daemons:
            daemon.told = False
        self.seen["failover"] += 1

    def recover(self) -> None:
        """Ends the recovery, one lease after the start of the run: daemons that have not reported since have lost
        theirs.
        """
        for daemon in [*self.daemons]:
            if not daemon.told:
                self.lose(daemon)
        alive = {daemon.name for daemon in self.daemons}
        for name in self.authority.server.zrange(KEYS[0], 0, -1):
            if name.decode() not in alive:
                self.authority.end_lease(name.decode())
        self.authority.recover()

    # ---- what has to be true ----

    def audit(self) -> None:
        sums: dict[bytes, list[int]] = {}
        for name, (rights, used, mode, need, *_) in self.authority.blocks():
            of = sums.setdefault(name, [0, 0, 0, 0])
            of[0] += rights
            of[1] += rights if mode == Mode.PLENTY else 0
            of[2] += used
            of[3] += need > 0
        lines = {name: self.authority.server.zcard(PREFIX + "line:" + name.decode()) for name in sums}
        assert lines == {name: of[3] for name, of in sums.items()}
        totals = {name: [*total[:3], total[4]] for name, total in self.authority.totals().items()}
        assert {name: total for name, total in sums.items() if any(total)} == totals


def play(authority: Authority, seed: int, steps: int) -> World:
    rng = Random(seed)
    world = World(authority, rng, rng.randint(2, 6))
    world.call(world.daemons[0])
    world.recover()
    authority.remember()
    for _ in range(steps):
        daemon, name = rng.choice(world.daemons), rng.choice(NAMES)
        dice = rng.random()
        if dice < 0.3:
            world.acquire(daemon, name)
        elif dice < 0.5:
            world.release(daemon, name)
        elif dice < 0.96:
            world.call(daemon)
        elif dice < 0.965:
            world.lose(daemon)
        elif dice < 0.97:
            authority.end_place(daemon.name)
        elif dice < 0.98:
            authority.remember()
        elif dice < 0.985:
            world.fail_over()
        else:
            world.recover()
        if dice > 0.9:
            world.audit()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_no_grant_is_above_its_maximum(server: redis.Redis, seed: int) -> None:
    seen = Counter[str]()
    for part in range(4):
        server.flushdb()
        seen += play(Authority(server, functions=part % 2 == 0), seed * 4 + part, 400).seen
    assert {"here", "asked", "never came", "not answered", "refused", "waited for", "failover"} <= set(seen)


def test_waiting_requests_are_served(server: redis.Redis) -> None:
    """Whatever has happened: once the others hold nothing, each request that can be granted is."""
    for seed in range(8):
        server.flushdb()
        world = play(Authority(server), seed, 200)
        for _ in range(2 * len(world.daemons) + 2):  # of those that wait, one is served, and gives back in the next
            world.recover()
            for daemon in [*world.daemons]:
                for share in daemon.shares.values():
                    share.used = 0
                world.call(daemon, may_fail=False)
        shares = [share for daemon in world.daemons for share in daemon.shares.values()]
        assert [share for share in shares if share.asked is not None] == []


# ---- one thing at a time -------------------------------------------------------------------------------------------


@pytest.fixture
def ready(server: redis.Redis) -> Authority:
    """A server that has recovered."""
    made = Authority(server)
    made.call("first", 1)
    made.recover()
    return made


def plenty(maximum: int, least: int, want: int, keep: int = 0, used: int = 0) -> LeaseRequest:
    return LeaseRequest(b"n", maximum, least, want, keep, used, Mode.PLENTY)


def exact(maximum: int, least: int, used: int = 0) -> LeaseRequest:
    return LeaseRequest(b"n", maximum, least, least, used, used, Mode.EXACT)


def rights(answer: Answer) -> list[tuple[int, Mode]]:
    return [(grant.rights, grant.mode) for grant in answer.counters]


def test_rights_never_add_up_to_more_than_the_maximum(ready: Authority) -> None:
    assert rights(ready.call("a", 1, plenty(10, 1, 6))) == [(6, Mode.PLENTY)]
    assert ready.call("b", 1, plenty(10, 1, 6)).counters == [LeaseGrant(4, Mode.PLENTY, 10, 2, False)]
    assert ready.call("a", 2, plenty(10, 2, 3, 3, 2)).counters == [LeaseGrant(3, Mode.PLENTY, 7, 3, False)]
    assert ready.call("b", 2, plenty(10, 1, 9, 4, 1)).counters == [LeaseGrant(7, Mode.PLENTY, 10, 3, False)]


def test_different_maximums_of_a_name_allow_the_smaller_one(ready: Authority) -> None:
    """Others may grant under the first maximum meanwhile; anything above it would break their promise."""
    ready.call("a", 1, plenty(10, 1, 6))
    assert rights(ready.call("b", 1, plenty(20, 5, 9))) == [(0, Mode.EXACT)]
    assert rights(ready.call("b", 2, plenty(20, 4, 9))) == [(4, Mode.EXACT)]
    assert rights(ready.call("c", 1, exact(3, 1))) == [(0, Mode.EXACT)]
    assert rights(ready.call("c", 2, exact(3, 0))) == [(0, Mode.EXACT)]
    assert rights(ready.call("a", 2, exact(10, 1))) == [(1, Mode.EXACT)]
    assert rights(ready.call("b", 3, plenty(20, 5, 9, 4, 4))) == [(9, Mode.PLENTY)]
    assert rights(ready.call("a", 3, exact(10, 2, 1))) == [(1, Mode.EXACT)], "1 and 9 are there, and 10 is the maximum"


def test_no_daemon_has_plenty_below_the_total_of_rights(ready: Authority) -> None:
    """Rights for one request serve no other when the permits come back, as all daemons may have more by then."""
    assert rights(ready.call("a", 1, exact(10, 5))) == [(5, Mode.EXACT)]
    assert rights(ready.call("b", 1, exact(20, 9))) == [(9, Mode.EXACT)]
    assert rights(ready.call("a", 2, plenty(10, 5, 5, 5, 5))) == [(5, Mode.EXACT)]
    ready.call("b", 2, exact(20, 5, 5))
    assert rights(ready.call("a", 3, plenty(10, 5, 5, 5, 5))) == [(5, Mode.PLENTY)]


def test_small_requests_do_not_starve_a_large_one(ready: Authority) -> None:
    ready.call("a", 1, plenty(10, 9, 9))
    assert ready.call("b", 1, plenty(10, 5, 5)).counters == [LeaseGrant(0, Mode.PLENTY, 9, 9, False)]
    ready.call("a", 2, plenty(10, 6, 6, 6, 6))
    assert rights(ready.call("c", 1, plenty(10, 1, 3))) == [(0, Mode.PLENTY)], "4 are free, and the first needs 5"
    ready.call("a", 3, plenty(10, 2, 2, 2, 2))
    assert rights(ready.call("c", 2, plenty(10, 1, 3))) == [(1, Mode.PLENTY)], "no more than it needs, as another waits"
    assert ready.call("b", 2, plenty(10, 5, 5)).counters == [LeaseGrant(5, Mode.PLENTY, 8, 8, False)]


def test_rights_the_first_waiter_has_are_not_reserved_again(ready: Authority) -> None:
    ready.call("a", 1, plenty(10, 4, 4))
    ready.call("b", 1, plenty(10, 6, 6))
    assert rights(ready.call("a", 2, plenty(10, 5, 5, 4, 4))) == [(4, Mode.PLENTY)]
    ready.call("b", 2, plenty(10, 4, 4, 4, 4))
    assert rights(ready.call("c", 1, plenty(10, 1, 1))) == [(1, Mode.PLENTY)], "one of the two that are free"


def test_a_large_holder_does_not_get_its_own_freed_rights_first(ready: Authority) -> None:
    """A permit that comes back goes to the first waiter, even if its holder has a request of its own."""
    ready.call("a", 1, plenty(10, 10, 10))
    ready.call("b", 1, plenty(10, 1, 1))
    assert ready.call("a", 2, plenty(10, 10, 10, 9, 9)).counters == [LeaseGrant(9, Mode.PLENTY, 9, 9, True)]
    assert ready.call("b", 2, plenty(10, 1, 1)).counters == [LeaseGrant(1, Mode.PLENTY, 10, 10, True)]


def test_a_request_with_a_smaller_maximum_does_not_starve(ready: Authority) -> None:
    ready.call("a", 1, exact(20, 9))
    assert rights(ready.call("b", 1, exact(5, 1))) == [(0, Mode.EXACT)]
    assert rights(ready.call("a", 2, exact(20, 9, 8))) == [(8, Mode.EXACT)], "until the first one's request fits"
    ready.call("a", 3, exact(20, 4, 4))
    assert rights(ready.call("b", 2, exact(5, 1))) == [(1, Mode.EXACT)]


def test_a_waiting_larger_maximum_goes_before_a_smaller_one(ready: Authority) -> None:
    """Else a daemon that goes on to get rights for both would starve it."""
    ready.call("a", 1, exact(2, 2))
    assert rights(ready.call("b", 1, plenty(2, 1, 1))) == [(0, Mode.PLENTY)]
    assert rights(ready.call("a", 2, plenty(1, 1, 1, 1, 1))) == [(1, Mode.EXACT)]
    assert rights(ready.call("b", 2, plenty(2, 1, 1))) == [(1, Mode.PLENTY)]


def test_a_server_with_an_old_state_ends_no_lease(ready: Authority) -> None:
    """It has only forgotten that the lease was renewed."""
    ready.call("a", 1, plenty(10, 4, 6))
    ready.end_lease("a")
    ready.remember()
    ready.fail_over()
    assert rights(ready.call("b", 1, plenty(10, 1, 9))) == [(0, Mode.PLENTY)]
    with pytest.raises(StaleCall):  # it knows which calls it has had
        ready.call("a", 1, plenty(10, 1, 1))
    assert rights(ready.call("a", 2, plenty(10, 4, 6, 6, 4))) == [(6, Mode.PLENTY)]


def test_a_withdrawn_request_waits_no_more(ready: Authority) -> None:
    ready.call("a", 1, plenty(2, 2, 2))
    ready.call("b", 1, plenty(2, 1, 1))
    assert ready.call("a", 2, plenty(2, 2, 2)).counters[0].waited_for
    ready.call("b", 2, plenty(2, 0, 0))
    assert not ready.call("a", 3, plenty(2, 2, 2)).counters[0].waited_for


def test_a_request_that_is_not_repeated_loses_its_place(ready: Authority) -> None:
    """As of a killed process. The others need not wait for its lease to end."""
    ready.call("a", 1, plenty(10, 10, 10))
    ready.call("b", 1, plenty(10, 9, 9))
    ready.call("c", 1, plenty(10, 8, 8))
    ready.end_place("b")
    assert rights(ready.call("a", 2, plenty(10, 0, 0))) == [(0, Mode.PLENTY)]
    assert rights(ready.call("c", 2, plenty(10, 8, 9))) == [(9, Mode.PLENTY)]
    assert ready.call("b", 2, plenty(10, 9, 9)).counters == [LeaseGrant(0, Mode.PLENTY, 9, 8, False)]
    ready.call("c", 3, plenty(10, 0, 0))
    assert rights(ready.call("b", 3, plenty(10, 9, 10))) == [(10, Mode.PLENTY)]


def test_a_place_number_that_is_too_large(ready: Authority) -> None:
    """As after a script that a moving slot has ended in the middle. Others would wait for ever."""
    ready.call("a", 1, plenty(10, 10, 10))
    ready.call("b", 1, plenty(10, 9, 9))
    ready.server.delete(PREFIX + "line:n")
    assert not ready.call("a", 2, plenty(10, 10, 10)).counters[0].waited_for
    assert ready.totals()[b"n"][4] == 0


def test_a_place_number_that_is_too_small(ready: Authority) -> None:
    ready.call("a", 1, plenty(10, 10, 10))
    ready.call("b", 1, plenty(10, 9, 9))
    ready.call("c", 1, plenty(10, 8, 8))
    total = ready.totals()[b"n"]
    ready.server.hset(KEYS[2], b"n", struct.pack("<7d", *total[:4], 1, *total[5:]))
    ready.end_place("b")
    assert ready.call("a", 2, plenty(10, 0, 3)).counters[0].waited_for, "by c"
    assert ready.totals()[b"n"][4] == 1


def test_a_request_that_does_not_wait_has_no_place(ready: Authority) -> None:
    """But other daemons hear of it, and its own daemon hears only of the others."""
    ready.call("a", 1, plenty(10, 10, 10))
    assert not ready.call("b", 1, plenty(10, 9, 9)._replace(stays=False)).counters[0].waited_for
    assert ready.call("a", 2, plenty(10, 5, 5)).counters[0].waited_for
    assert rights(ready.call("c", 1, plenty(10, 5, 5))) == [(5, Mode.PLENTY)]
    for daemon, call in (("b", 2), ("c", 2)):
        ready.call(daemon, call, plenty(10, 6, 6)._replace(stays=False))
    assert ready.call("b", 3, plenty(10, 6, 6)._replace(stays=False)).counters[0].waited_for, "by c"


def test_the_answer_names_counters_with_waiters(ready: Authority) -> None:
    """Also to daemons that sent nothing about them."""
    ready.call("a", 1, plenty(10, 10, 10))
    assert ready.call("b", 1).waited == []
    ready.call("c", 1, plenty(10, 1, 1))
    assert ready.call("b", 2).waited == [b"n"]
    ready.call("c", 2, *[LeaseRequest(b"%d" % number, 1, 2, 2, 0, 0, Mode.PLENTY) for number in range(99)])
    assert len(ready.call("b", 3).waited) == 32


def test_the_answer_has_the_number_of_daemons(ready: Authority) -> None:
    """And how long to wait before the next call: the more daemons there are, the longer."""
    assert [ready.call(f"s{number}", 1).daemons for number in range(3)] == [2, 3, 4]
    assert ready.call("a", 1).again_ms == 5
    for number in range(3, 98):
        ready.call(f"s{number}", 1)
    assert ready.call("a", 2).again_ms == 50


def test_a_call_with_a_lease_of_0_ends_the_lease(ready: Authority) -> None:
    ready.call("a", 1, plenty(10, 6, 6))
    assert ready.call("a", 2, lease_ms=0).counters == []
    assert rights(ready.call("b", 1, plenty(10, 10, 10))) == [(10, Mode.PLENTY)]
    with pytest.raises(LeaseLost):
        ready.call("a", 3, plenty(10, 1, 1))
    ready.call("stranger", 1, lease_ms=0)
    assert ready.call("b", 2).daemons == 2


def test_a_server_recovers_for_the_longest_lease(ready: Authority) -> None:
    """Even if the first call comes from a daemon with a shorter one."""
    ready.promote()
    assert ready.call("a", 1, lease_ms=1000).recovering_ms == HOUR_MS


def test_a_lease_from_another_clock_does_not_go_on(ready: Authority) -> None:
    ready.server.zadd(KEYS[0], {"ghost": 1e15})
    ready.promote()
    ready.call("a", 1)
    assert ready.server.zscore(KEYS[0], "ghost") == float(ready.server.hget(KEYS[1], "learns"))


def test_a_master_that_was_a_replica_for_a_moment_recovers(ready: Authority) -> None:
    """The other master may have lacked its last writes. Its process and its data are the same."""
    before = ready.call("a", 1, plenty(10, 4, 4))
    assert before.recovering_ms == 0
    ready.promote()
    answer = ready.call("b", 1, plenty(10, 1, 1))
    assert rights(answer) == [(0, Mode.PLENTY)]
    assert answer.recovering_ms == HOUR_MS
    assert answer.recovered_ms > before.recovered_ms
    assert ready.call("a", 2, plenty(10, 4, 4, 4, 4)).recovered_ms == answer.recovered_ms, "it recovers once"


def test_setting_the_clock_back_does_not_extend_a_recovery(ready: Authority) -> None:
    ready.server.hset(KEYS[1], "learns", 10**15)
    assert ready.call("a", 1).recovering_ms == HOUR_MS
    assert ready.call("a", 2).recovering_ms <= HOUR_MS


def test_units_of_a_rate_are_granted_once(ready: Authority) -> None:
    """In ten years there are ten; none comes while the test runs."""

    def ask(daemon: str, call: int, least: int, want: int, give: int = 0) -> RateGrant:
        request = RateRequest(b"n", 10, TEN_YEARS_US, 10, least, want, give)
        return ready.call(daemon, call, rates=[request]).rates[0]

    assert ask("a", 1, 1, 6) == RateGrant(6, 0)
    assert ask("b", 1, 1, 6) == RateGrant(4, 0)
    refused = ask("a", 2, 1, 1)
    assert refused.units == 0
    assert 0 < refused.wait_us <= 31_622_400_000_000
    assert ask("b", 2, 0, 0, give=3) == RateGrant(0, 0)
    assert ask("a", 3, 2, 9, give=-1) == RateGrant(2, 0)


def test_when_a_rate_is_full(ready: Authority) -> None:
    name = next(
        name for name in (b"%d" % number for number in range(999)) if lease_protocol.partition_of(name) == PARTITION
    )
    assert ready.server.get(lease_protocol.rate_key(name)) is None
    ready.call("a", 1, rates=[RateRequest(name, 100, HOUR_MS * 1000, 100, 25, 25)])
    seconds, micros = ready.server.time()
    full_us = lease_protocol.full_us(ready.server.get(lease_protocol.rate_key(name))) - seconds * 1e6 - micros
    assert 0 < full_us <= HOUR_MS * 1000 / 4


def test_no_time_of_a_rate_exceeds_ten_years(ready: Authority) -> None:
    """Its key does not live longer either."""
    most = 2**32 - 1

    def ask(call: int, limit: int, burst: int, least: int, give: int = 0) -> RateGrant:
        request = RateRequest(b"n", limit, TEN_YEARS_US, burst, least, least, give)
        return ready.call("a", call, rates=[request]).rates[0]

    assert ask(1, 1, most, most) == RateGrant(most, 0)
    refused = ask(2, 1, most, most)
    assert refused.units == 0
    assert 0.99 * TEN_YEARS_US < refused.wait_us <= TEN_YEARS_US
    for call in range(3, 6):
        assert ask(call, 1, 0, 0, -most) == RateGrant(0, 0), "a debt"
    assert 0.99 * TEN_YEARS_US < ask(6, 1, 1, 1).wait_us <= TEN_YEARS_US
    assert ready.server.pttl(PREFIX + "rate:n") <= TEN_YEARS_US / 1000 + 1


def test_units_of_an_unknown_rate_change_nothing(ready: Authority) -> None:
    """They came for a request that was gone, so the daemon does not know the rate's limit any more."""
    request = RateRequest(b"n", 10, TEN_YEARS_US, 10, 10, 10)
    assert ready.call("a", 1, rates=[request]).rates == [RateGrant(10, 0)]
    assert ready.call("a", 2, rates=[RateRequest(b"n", 0, 0, 0, 0, 0, 10)]).rates == [RateGrant(0, 0)]
    assert ready.call("a", 3, rates=[request]).rates[0].units == 0


def test_an_expired_lease_loses_its_rights(ready: Authority) -> None:
    ready.call("a", 1, plenty(10, 6, 6))
    ready.call("b", 1, plenty(10, 9, 9))
    for daemon in "ab":
        ready.end_lease(daemon)
    with pytest.raises(LeaseLost):  # although only that of the other one was taken back
        ready.call("b", 2, plenty(10, 9, 9))
    assert ready.call("c", 1, plenty(10, 10, 10)).counters == [LeaseGrant(10, Mode.PLENTY, 10, 10, False)]
    for daemon in "ab":
        with pytest.raises(LeaseLost):
            ready.call(daemon, 3, plenty(10, 1, 1))
    assert sorted(ready.server.scan_iter()) == [key.encode() for key in sorted(lease_protocol.keys(PARTITION, "c"))]


def test_rights_of_an_expired_daemon_come_back_in_parts(ready: Authority) -> None:
    for call in range(1, 13):
        many = [LeaseRequest(b"%d n%d" % (call, number), 2, 1, 1, 0, 1, Mode.PLENTY) for number in range(1000)]
        ready.call("a", call, *many)
    ready.end_lease("a")
    calls = 0
    while ready.totals():
        calls += 1
        ready.call("b", calls)
    assert calls == 12_000 / 500


def test_a_server_that_forgot_what_it_granted_recovers(ready: Authority) -> None:
    ready.remember()
    ready.call("a", 1, plenty(10, 4, 6))
    ready.fail_over()
    assert ready.call("b", 1, plenty(10, 1, 9)).counters == [LeaseGrant(0, Mode.PLENTY, 0, 0, False)]
    answer = ready.call("a", 2, plenty(10, 5, 9, 6, 5))
    assert (answer.recovering_ms > 0, rights(answer)) == (True, [(6, Mode.PLENTY)])
    ready.recover()
    assert rights(ready.call("b", 2, plenty(10, 1, 9))) == [(4, Mode.PLENTY)]


def test_rights_in_an_old_state_are_not_believed(ready: Authority) -> None:
    """They are from before the daemon gave them back, and others may have had them since."""
    ready.call("a", 1, plenty(10, 4, 9))
    ready.remember()
    ready.call("a", 2, plenty(10, 1, 1, 1, 1))
    ready.fail_over()
    assert rights(ready.call("a", 3, plenty(10, 1, 9, 1, 1))) == [(1, Mode.PLENTY)]


def test_the_script_does_what_the_function_does(server: redis.Redis) -> None:
    """For servers that have no Functions."""
    made = [Authority(server, functions=functions) for functions in (True, False)]
    answers = []
    for each in made:
        server.flushdb()
        each.call("first", 1)
        each.recover()
        answers.append([each.call("a", 1, plenty(10, 1, 6)), each.call("b", 1, plenty(10, 1, 6))])
    assert answers[0] == answers[1]


def test_each_name_has_one_partition() -> None:
    found = Counter(lease_protocol.partition_of(b"%d" % number) for number in range(16_000))
    assert len(found) == lease_protocol.PARTITIONS
    assert min(found.values()) > 800
    assert lease_protocol.partition_of(b"foobar") == 0xBF9CF968 % lease_protocol.PARTITIONS, (
        "as the authors of FNV-1a have it"
    )
    slots = {key[key.index("{") : key.index("}")] for key in lease_protocol.keys(7, "a")}
    assert slots == {f"{{{lease_protocol.TAGS[7]}"}


# ---- answers, as a daemon reads them -------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")
ODD = (None, b"5", "5", [], [5], {}, -1, 1 << 32, INF, -INF, NAN, ValueError("ERR"))
ODD_RIGHTS = (
    *((odd, 0, 1, 1, 0) for odd in (-1, 1 << 32, INF, NAN)),
    *((1, odd, 1, 1, 0) for odd in (-1, 2, INF, NAN)),
    *((1, 0, odd, 1, 0) for odd in (INF, NAN)),
    *((1, 0, 1, odd, 0) for odd in (INF, NAN)),
)
ODD_UNITS = ((-1, 0), (1 << 32, 0), (INF, 0), (NAN, 0), (0, INF), (0, NAN))


RIGHT = struct.pack("<5d", 1, 0, 1, 1, 0)


@pytest.mark.parametrize(
    "found",
    [
        *(None, b"", b"12345678", 2, 2.0, {}, "OK", [[2, 0, 9, 1, 5, [], RIGHT, b""]], [3, 0, 9, 1, 5, [], RIGHT, b""]),
        *([2, odd, 9, 1, 5, [], RIGHT, b""] for odd in ODD),
        *([2, 0, odd, 1, 5, [], RIGHT, b""] for odd in (*ODD[:7], *ODD[8:], 1 << 54)),
        *([2, 0, 9, odd, 5, [], RIGHT, b""] for odd in ODD),
        *([2, 0, 9, 1, odd, [], RIGHT, b""] for odd in ODD),
        *([2, 0, 9, 1, 5, odd, RIGHT, b""] for odd in (None, 7, b"a", [1], [[b"a"]], [None], "a")),
        *([2, 0, 9, 1, 5, [], odd, b""] for odd in (None, 7, "a", [], [1, 2, 3, 4, 5])),
        *([2, 0, 9, 1, 5, [], RIGHT, odd] for odd in (None, 7, "a", [1, 2])),
        *([2, 0, 9, 1, 5, [], struct.pack("<5d", *numbers), b""] for numbers in ODD_RIGHTS),
        *([2, 0, 9, 1, 5, [], RIGHT, struct.pack("<2d", *numbers)] for numbers in ODD_UNITS),
    ],
)
def test_answers_of_wrong_types_are_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="the authority answered"):
        lease_protocol.answer(found)


def test_a_deeply_nested_answer_is_refused() -> None:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    with pytest.raises(ValueError, match=r"the authority answered \[\[\[\["):
        lease_protocol.answer(found)


def test_numbers_beyond_a_stores_range_are_clamped() -> None:
    """Sums over all daemons, and times until a rate of a client has enough, have no bound."""
    rights, units = struct.pack("<5d", 1, 0, 1e300, -1, 1), struct.pack("<2d", 0, 1e300)
    answer = lease_protocol.answer([2, 0, 1 << 41, 1, 5, [b"a"], rights, units])
    assert answer.counters == [lease_protocol.LeaseGrant(1, lease_protocol.Mode.PLENTY, 0xFFFFFFFF, 0, True)]
    assert answer.rates == [lease_protocol.RateGrant(0, lease_protocol.WAIT_MAX_US)]
    assert answer[:5] == (0, 1 << 41, 1, 5, [b"a"])
