"""counterbench with Takes: several items at once, waits in the queue of a real daemon, and fairness of keys."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from counterd.bench.dialects import redis_lua
from counterd.bench.dialects.redis import resp
from counterd.bench.plan import Plan
from counterd.bench.run import jain, shares
from counterd.bench.takes import Items, Take
from counterd.protocols.counter.wire import Opcode
from kit import daemon
from kit.daemon import PATIENCE
from kit.loading import load, other_server
from kit.scripted.counter import Request, Server, response

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.daemon import Daemon

WAITING = Take(wait=PATIENCE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Daemon]:
    with daemon.running(tmp_path) as started:
        yield started


# ---- several items ----


@pytest.mark.parametrize("items", [Items(), Items(3, 0), Items(2, 2), Items(16, 0), Items(1, 15)])
@pytest.mark.parametrize(("depth", "processes"), [(1, 1), (50, 2)])
def test_items_are_taken_and_given_back(items: Items, depth: int, processes: int, server: Daemon) -> None:
    plan = {"depth": depth, "processes": processes, "connections": 4, "names": 20, "resources": 2}
    run = load(server, requests=2000, take=Take(items=items), verify=True, **plan)
    assert (run.requests, run.errors, run.violations) == (2000, {}, [])
    assert set(run.outcomes) == {"granted", "released"}
    assert run.queue is None


def test_every_item_is_taken(server: Daemon) -> None:
    load(server, requests=30, connections=1, work="acquire", names=2, keys="seq", take=Take(items=Items(3, 0)))
    with server.client() as client:
        found = {entry.name: entry.peak for entry in client.dump()}
    assert found == {b"nnnnnnnn0000000%d%b" % (name, item): 15 for name in (0, 1) for item in (b"", b":1", b":2")}


@pytest.mark.parametrize("name_size", [1, 8, 9, 300])
def test_sizes_of_names(name_size: int, server: Daemon) -> None:
    take = Take(items=Items(2, 2), wait=PATIENCE)
    run = load(server, requests=200, names=16, name_size=name_size, take=take, verify=True)
    assert (run.requests, run.errors, run.violations) == (200, {}, [])


def test_refusals_take_nothing_of_any_item(server: Daemon) -> None:
    take = Take(items=Items(2, 1))
    run = load(server, requests=4000, connections=4, depth=5, maximum=2, take=take, verify=True)
    assert (run.requests, run.errors, run.violations) == (4000, {}, [])
    assert set(run.outcomes) == {"granted", "refused", "released", "not held"}


def test_a_used_up_rate_refuses(server: Daemon) -> None:
    take = Take(items=Items(0, 2), limit=1, burst=10)
    run = load(server, requests=1000, depth=50, work="acquire", take=take)
    assert (run.requests, run.errors, set(run.outcomes)) == (1000, {}, {"granted", "refused"})
    assert run.outcomes["granted"] >= 10


def test_prefill_creates_the_names(server: Daemon) -> None:
    run = load(server, requests=10, prefill=True, names=50, take=Take(items=Items(2, 1), wait=PATIENCE))
    assert run.errors == {}
    with server.client() as client:
        assert len(client.dump()) == 100


# ---- waiting ----


def test_grants_follow_the_weights(server: Daemon) -> None:
    take = Take(wait=PATIENCE, weights=(1, 2, 5))
    run = load(server, requests=4000, connections=30, maximum=2, hold="fixed:1us", take=take, verify=True)
    assert (run.errors, run.violations) == ({}, [])
    assert set(run.outcomes) == {"granted", "released"}
    assert run.shares is not None
    assert (run.shares.of, sum(run.shares.grants)) == ("keys", run.outcomes["granted"])
    assert run.shares.jain > 0.99, "each key waits all the time"
    assert run.queue is not None
    assert run.service is not None
    waited, served = run.queue.get_total_count(), run.service.get_total_count()
    assert (waited, served) == (run.outcomes["granted"], run.outcomes["released"])


def test_the_highest_priority_is_served_first(server: Daemon) -> None:
    take = Take(wait=PATIENCE, priorities=(0, 9))
    run = load(server, requests=2000, connections=20, maximum=1, take=take)
    assert run.shares is not None
    low, high = run.shares.grants
    assert high > 10 * max(low, 1), "the ten connections of the high priority never let the queue run empty"


@pytest.mark.parametrize(
    "more",
    [{"depth": 4}, {"depth": 4, "processes": 2}, {"hold": "exp:200us", "depth": 3}, {"hold": "exp:1ms", "churn": 50.0},
     {"hold": "exp:200us", "rate": 2000.0}, {"work": "mix:acquire=1,release=1,get=1", "depth": 3}],
    ids=str,
)  # fmt: skip
def test_replies_may_come_in_any_order(more: dict[str, Any], server: Daemon) -> None:
    take = Take(wait=PATIENCE, items=Items(2, 1))
    plan = {"connections": 10, "names": 3, "maximum": 3, "verify": True, "take": take, "duration": 0.5}
    run = load(server, **{**plan, **more})
    assert (run.errors, run.violations) == ({}, [])
    assert run.outcomes["granted"] > 0
    assert "refused" not in run.outcomes


def test_takes_that_wait_at_the_end_are_cancelled_and_not_counted(server: Daemon) -> None:
    with server.client() as client:
        client.acquire("nnnnnnnn00000000", maximum=1)
        run = load(server, duration=0.2, connections=5, depth=3, maximum=1, take=WAITING)
        assert (run.requests, run.outcomes, run.errors) == (0, {}, {})
        server.wait_for_stats(waiters=0, waits=15)


def test_waiting_takes_time_out(server: Daemon) -> None:
    with server.client() as client:
        client.acquire("nnnnnnnn00000000", maximum=1)
        run = load(server, requests=33, connections=3, maximum=1, take=Take(wait=0.005))
        refused = run.outcomes["refused"]
        assert (run.outcomes, run.errors) == ({"refused": refused}, {})
        assert 30 <= refused <= 33, "the last three are cancelled, unless their time is over first"
        assert run.queue is not None
        assert run.queue.get_min_value() >= 4.99e6


# ---- servers that are wrong ----


class Taking(Server):
    """Gives the same answer to each Take."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body = body

    def reply(self, request: Request) -> bytes:
        return response(request, self._body) if request.opcode == Opcode.TAKE else super().reply(request)


GRANT = struct.pack(">QI", 7, 0)


def test_a_server_without_takes() -> None:
    with Server() as server:
        run = load(server, requests=10, take=Take(), work="acquire")
        assert (run.outcomes, run.errors) == ({}, {"error reply": 10})


@pytest.mark.parametrize("body", [b"", GRANT[:-1], GRANT + bytes(4)])
def test_an_invalid_grant_is_a_wrong_answer(body: bytes) -> None:
    with Taking(body) as server:
        run = load(server, requests=2, connections=1, take=Take(), work="acquire")
        assert "wrong answer" in run.errors


def test_a_grant_with_a_wrong_number_is_a_violation() -> None:
    with Taking(GRANT) as server:
        run = load(server, requests=2, connections=1, take=Take(), work="acquire", verify=True, patches=SHORT)
        assert run.violations is not None
        assert "token 7 was granted twice" in run.violations[0]


SHORT = {"counterd.bench.dialects.counter.GIVE_BACK_S": 0.05}


# ---- the same with scripts ----


@pytest.mark.needs("redis-server")
def test_scripts_take_several_items(short_path: Path) -> None:
    with other_server("redis", short_path) as server:
        plan = {"protocol": "redis-lua", "connections": 4, "depth": 50, "names": 20}
        for items in (Items(), Items(2, 0), Items(2, 2)):
            run = load(server, requests=2000, take=Take(items=items), **plan)
            assert (run.requests, run.errors, set(run.outcomes)) == (2000, {}, {"granted", "released"})
        run = load(server, requests=2000, take=Take(items=Items(0, 1)), work="acquire", **plan)
        assert (run.requests, run.errors, run.outcomes) == (2000, {}, {"granted": 2000})


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("items", [Items(2, 0), Items(0, 1), Items(1, 2)])
def test_refusals_of_scripts(items: Items, short_path: Path) -> None:
    with other_server("redis", short_path) as server:
        take = Take(items=items, **({"limit": 1, "burst": 5} if items.rates else {}))
        run = load(server, requests=1000, depth=50, work="acquire", protocol="redis-lua", maximum=5, take=take)
        assert (run.errors, set(run.outcomes)) == ({}, {"granted", "refused"})
        assert run.outcomes["granted"] == 5 or items.rates, "a rate has more units after a second"
        assert run.outcomes["granted"] >= 5


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("limit", [1, 7, 600_000, 1_000_000, 2_000_000, redis_lua.LIMIT_MAX])
@pytest.mark.parametrize("items", [Items(0, 1), Items(1, 1)])
def test_scripts_count_units_exactly(items: Items, limit: int, short_path: Path) -> None:
    """In ticks, of which a second has as many as the limit: a unit is one, and a burst is that many."""

    def ask(*words: bytes) -> bytes:
        connection.sendall(resp(*words))
        return connection.recv(1000)

    with other_server("redis", short_path) as server:
        burst = 100 * limit
        take = Take(items=items, limit=limit, burst=burst)
        plan = {"connections": 1, "work": "acquire", "protocol": "redis-lua", "maximum": 1000, "take": take}
        run = load(server, requests=10, **plan)
        assert (run.errors, run.outcomes) == ({}, {"granted": 10})
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server.path)
            key = b"rate:nnnnnnnn00000000:r0"
            now = int(ask(b"TIME").split(b"\r\n")[2])
            for ahead_s, granted in ((50, 20), (200, 0)):  # of 100 that the burst has
                assert ask(b"SET", key, b"%d" % ((now + ahead_s) * limit)) == b"+OK\r\n"
                run = load(server, requests=20, **plan)
                assert (run.errors, run.outcomes) == ({}, {"granted": 20} if granted else {"refused": 20})
                assert float(ask(b"GET", key).split(b"\r\n")[1]) == (now + ahead_s) * limit + granted


# ---- how fair it was ----


def test_jains_index() -> None:
    assert jain([3]) == jain([5, 5, 5]) == 1
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([1, 3]) == pytest.approx(0.8)


def test_shares_of_keys_and_of_connections() -> None:
    weighed = Plan(connections=5, take=Take(weights=(1, 2)))
    found = shares(weighed, [2, 5, 2, 5, 1])
    assert found is not None
    assert (found.of, found.grants, found.jain) == ("keys", [5, 10], 1.0)
    plain = shares(Plan(connections=2), [4, 4])
    assert plain is not None
    assert (plain.of, plain.grants, plain.jain) == ("connections", [], 1.0)
    assert shares(Plan(connections=2), [0, 0]) is None
    assert shares(Plan(connections=1), [4]) is None
