"""The authority in tests/kit/lua_redis.py beside a real Redis, and its rates beside exact arithmetic."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import redis

from counterd.cluster import lease_protocol
from counterd.cluster.lease_protocol import UINT32_MAX, LeaseRequest, RateRequest
from counterd.protocols.counter.wire import LIMIT_MAX, PERIOD_MAX_US
from kit.loading import other_server
from kit.lua_redis import LuaRedis

if TYPE_CHECKING:
    from pathlib import Path

PARTITION = 3
LEASE_MS = 10_000
PREFIX = lease_protocol.keys(PARTITION, "")[0].removesuffix("leases").encode()
GLOB = PREFIX.replace(b"{", b"[{]") + b"*"
# The real server reads the time, and what INFO says, from keys, and keys live for long in its own time.
CHANGES = {
    b"redis.call('TIME')": b"redis.call('HMGET', 'clock', 's', 'us')",
    b"redis.call('INFO', 'replication')": b"redis.call('GET', 'info')",
    b"(us - now) / 1000 + 1": b"1e9",
    b"redis.call('PEXPIRE', waited, call.place)": b"redis.call('PEXPIRE', waited, 1e9)",
}


def with_clock(source: bytes) -> str:
    for before, after in CHANGES.items():
        assert source.count(before) == 1
        source = source.replace(before, after)
    return source.decode()


def state(server: redis.Redis) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for key in server.scan_iter(GLOB):
        kind = server.type(key)
        if kind == b"hash":
            found[key] = server.hgetall(key)
        else:
            found[key] = dict(server.zrange(key, 0, -1, withscores=True)) if kind == b"zset" else server.get(key)
    return found


def expire(server: redis.Redis, model: LuaRedis) -> None:
    model.expire()
    for key in {*server.scan_iter(GLOB)} - model.data.keys():
        assert key.startswith((PREFIX + b"waited", PREFIX + b"rate:")), "only these expire"
        server.delete(key)


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_a_real_redis_does(short_path: Path, seed: int) -> None:
    """Answers and data are the same, for requests that make sense and for others."""
    draw = random.Random(seed)
    model = LuaRedis()
    calls: dict[str, int] = {}
    with other_server("redis", short_path) as place, redis.Redis(unix_socket_path=place.path) as server:
        script = server.register_script(with_clock(lease_protocol.script()))
        for _ in range(400):
            model.now_us += int(draw.choice((0.1, 5, 100, 3000)) * draw.random() * 1000)
            server.hset("clock", mapping={"s": model.now_us // 1_000_000, "us": model.now_us % 1_000_000})
            model.history = draw.choice(("one", "another")) if draw.random() < 0.02 else model.history
            server.set("info", model.info(b"replication"))
            daemon = f"s{draw.randrange(5)}"
            if draw.random() < 0.05:
                calls[daemon] = 0
            calls[daemon] = calls.get(daemon, 0) + draw.choice((0, 1, 1, 1, 1, 1))
            keys = lease_protocol.keys(PARTITION, daemon)
            names = [b"n%d" % number for number in range(4) if draw.random() < 0.5]
            given = lease_protocol.arguments(
                daemon,
                calls[daemon],
                LEASE_MS if draw.random() < 0.95 else 0,
                [
                    LeaseRequest(name, *(draw.randint(0, 9) for _ in range(5)), draw.randint(0, 1), True)
                    for name in names
                ],
                [RateRequest(name, 7, 1_000_000, 9, 1, draw.randint(1, 12), draw.randint(-2, 2)) for name in names[:2]],
            )
            assert model.tick(keys, given) == script(keys, given)
            expire(server, model)
            assert state(server) == model.data


def number(draw: random.Random, most: int) -> int:
    """Often one of the smallest or largest ones."""
    size = draw.randint(0, most.bit_length() - 1)
    return draw.choice((0, 1, 2, most - 1, most, draw.randint(0, most), draw.randint(0, 1 << size)))


def odd_request(draw: random.Random, name: bytes) -> LeaseRequest:
    """All that clients can bring about: up to 65,536 of them wait, each for up to 2^32 - 1 permits."""
    used, first, rights = (number(draw, UINT32_MAX) for _ in range(3))
    least = used + first
    want = least + number(draw, UINT32_MAX << 16)
    keep = draw.choice((used, min(max(rights, used), want)))
    return LeaseRequest(
        name, number(draw, UINT32_MAX), least, want, keep, used, draw.randint(0, 1), draw.random() < 0.7
    )  # type: ignore[arg-type]


def odd_rate(draw: random.Random, name: bytes) -> RateRequest:
    """Likewise. A debt may be of many Settles."""
    limit, period_us = max(number(draw, LIMIT_MAX), 1), max(number(draw, PERIOD_MAX_US), 1)
    if draw.random() < 0.1:
        limit = 0  # a rate that is gone
    burst = max(number(draw, UINT32_MAX), 1)
    least = min(number(draw, UINT32_MAX), burst)
    want = least + number(draw, UINT32_MAX << 16)
    give = draw.choice((0, 0, number(draw, UINT32_MAX), -number(draw, UINT32_MAX << 16)))
    return RateRequest(name, limit, period_us, burst, least, want, give)


ODD_NAMES = (b"", b"{", b"}{", b"\0", b"\xff" * 65535, b"%d%s", b"n\r\n", b" ", b"meta", b"line:", b"1e999")


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_an_error(short_path: Path, seed: int) -> None:
    """A call with odd requests is answered, with numbers that a store can have. So no name stands in others' way."""
    draw = random.Random(seed)
    model = LuaRedis()
    calls, granted = Counter[str](), Counter[str]()
    with other_server("redis", short_path) as place, redis.Redis(unix_socket_path=place.path) as server:
        script = server.register_script(with_clock(lease_protocol.script()))
        server.set("info", model.info(b"replication"))
        server.hset(PREFIX + b"meta", mapping={"history": model.history, "learns": 0})  # it has recovered
        model.data[PREFIX + b"meta"] = {b"history": model.history.encode(), b"learns": b"0"}
        for _ in range(300):
            model.now_us += number(draw, 1 << 30)
            server.hset("clock", mapping={"s": model.now_us // 1_000_000, "us": model.now_us % 1_000_000})
            daemon = draw.choice("abc")
            keys = lease_protocol.keys(PARTITION, daemon)
            names = draw.sample(ODD_NAMES, draw.randint(1, 4))
            requests = [odd_request(draw, name) for name in names]
            rates = [odd_rate(draw, name) for name in names]
            calls[daemon] += 1
            given = lease_protocol.arguments(daemon, calls[daemon], LEASE_MS << 15, requests, rates)
            found, same = script(keys, given), model.tick(keys, given)
            answer = lease_protocol.answer(found)
            assert lease_protocol.answer(same) == answer
            for request, grant in zip(requests, answer.counters, strict=True):
                assert grant.rights <= max(request.maximum, request.keep)
                granted["permits"] += grant.rights >= request.least > request.keep
            for rate, units in zip(rates, answer.rates, strict=True):
                assert units.units == 0 or rate.least <= units.units <= min(rate.want, rate.burst)
                granted["units"] += units.units > 0
            expire(server, model)
    assert min(granted["permits"], granted["units"]) > 50


class Rate:
    """What a rate is: the moment from which on all units are there."""

    def __init__(self, limit: int, period_us: int, burst: int) -> None:
        self.limit, self.period_us, self.burst = limit, period_us, burst
        self.one_us = Fraction(period_us, limit)
        self.full_us = Fraction(0)

    def pour(self, now_us: int, request: RateRequest) -> tuple[int, int]:
        self.full_us = max(max(self.full_us, now_us) - request.give * self.one_us, Fraction(now_us))
        there = (now_us - self.full_us) / self.one_us + self.burst
        granted = max(min(int(there // 1), request.want), 0)
        if granted >= request.least:
            self.full_us += granted * self.one_us
            return granted, 0
        return 0, -int(-(request.least - there) * self.one_us // 1)


@pytest.mark.parametrize("seed", range(6))
def test_rates_are_exact(seed: int) -> None:
    """For the largest numbers as well."""
    draw = random.Random(seed)
    largest = (1 << draw.choice((3, 12, 31))) - 1
    for _ in range(30):
        server = LuaRedis()
        limit = draw.randint(1, largest)
        period_us = draw.choice((1, 997, 1_000_000, 86_400_000_000, 31_622_400_000_000))
        burst = draw.randint(1, max(min((1 << 31) - 1, 316_224_000_000_000 * limit // period_us), 1))
        rate = Rate(limit, period_us, burst)
        for call in range(1, 30):
            server.now_us += int(draw.random() ** 4 * period_us * burst // limit)
            least = draw.randint(0, burst) if draw.random() < 0.5 else draw.randint(0, min(burst, 3))
            want = draw.randint(least, burst)
            give = draw.choice((0, 0, 0, 1, -1, draw.randint(-burst, burst)))
            request = RateRequest(b"n", limit, period_us, burst, least, want, give)
            arguments = lease_protocol.arguments("a", call, LEASE_MS, (), [request])
            answered = server.tick(lease_protocol.keys(PARTITION, "a"), arguments)
            if answered[0] == 1:
                break
            assert tuple(lease_protocol.answer(answered).rates[0]) == rate.pour(server.now_us, request), (request, call)


def test_another_limit_grants_nothing_twice() -> None:
    server = LuaRedis()

    def ask(call: int, limit: int) -> int:
        request = RateRequest(b"n", limit, 1_000_000, 10, 0, 20)
        arguments = lease_protocol.arguments("a", call, LEASE_MS, (), [request])
        return lease_protocol.answer(server.tick(lease_protocol.keys(PARTITION, "a"), arguments)).rates[0].units

    assert ask(1, 7) == 10
    assert ask(2, 11) == 0
    server.now_us += 1_000_000 * 10 // 7
    assert ask(3, 7) == 9, "the rest of a microsecond was rounded up"
    server.now_us += 1
    assert ask(4, 7) == 1
