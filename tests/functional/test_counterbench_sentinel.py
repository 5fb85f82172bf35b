"""counterbench against the sentinel protocol of a real daemon, a scripted one, and redis with scripts."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from counterd.bench.dialects import redis_lua
from counterd.bench.dialects.redis import resp
from counterd.bench.dialects.sentinel import FIRST_RATE, PARAM_FLOW, rules_of
from counterd.protocols.sentinel.wire import MessageType, Status
from kit import daemon
from kit.loading import Place, load, load_fails, other_server
from kit.scripted.sentinel import Asked, Tokens, response

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from counterd.bench.result import Run

PLAN = {"protocol": "sentinel", "names": 20}


@contextlib.contextmanager
def sentinel(directory: Path, maximum: int = 1_000_000, **settings: str) -> Iterator[Place]:
    """A daemon with the sentinel protocol, and rules for a load of 20 names."""
    place = Place(str(directory / "s"))
    rules = directory / "rules.json"
    rules.write_text(rules_of(20, maximum, resourceTimeout=60_000, clientOfflineTime=50))
    fixed = {"sentinel.enable": "true", "sentinel.port": "0", "sentinel.bind": "127.0.0.1",
             "sentinel.socket": place.path, "sentinel.rules": str(rules), "sentinel.sweep_interval": "10"}  # fmt: skip
    more = {"sentinel.max_allowed_qps": "1000000000"} | {f"sentinel.{key}": value for key, value in settings.items()}
    with daemon.running(directory, {**fixed, **more}):
        yield place


OUTCOMES = {
    "acquire-release": {"granted", "released"},
    "noop": {"answered"},
    "acquire": {"granted"},
    "release": {"not held"},
    "flow": {"granted"},
    "param": {"granted"},
    "keep": {"not held"},
    "mix:acquire=1,keep=3,release=1,flow=1,param=1": {"granted", "released", "updated"},
}


def test_every_kind_of_request(short_path: Path) -> None:
    with sentinel(short_path) as server:
        for work, outcomes in OUTCOMES.items():
            for depth, processes in ((1, 1), (50, 2)):
                run = load(server, requests=2000, connections=4, depth=depth, processes=processes, work=work, **PLAN)
                assert (run.requests, run.errors, set(run.outcomes)) == (2000, {}, outcomes)


SCRIPTED = {
    "acquire-release": {"granted", "released"},
    "noop": {"answered"},
    "release": {"not held"},
    "flow": {"granted"},
    "counts": {"granted"},
}


@pytest.mark.needs("redis-server")
def test_every_kind_of_request_with_scripts(short_path: Path) -> None:
    with other_server("redis", short_path) as server:
        for work, outcomes in SCRIPTED.items():
            run = load(server, requests=2000, connections=4, depth=50, work=work, protocol="redis-lua", names=20)
            assert (run.requests, run.errors, set(run.outcomes)) == (2000, {}, outcomes)


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("work", ["acquire", "flow", "counts"])
def test_refusals_of_scripts(work: str, short_path: Path) -> None:
    with other_server("redis", short_path) as server:
        run = load(server, requests=100, depth=50, work=work, protocol="redis-lua", maximum=30)
        assert (run.errors, set(run.outcomes)) == ({}, {"granted", "refused"})
        assert run.outcomes["granted"] == 30 or work != "acquire"


@pytest.mark.needs("redis-server")
def test_a_permit_of_scripts_ends_with_its_lease(short_path: Path) -> None:
    def ask(*words: bytes) -> bytes:
        connection.sendall(resp(*words))
        return connection.recv(100)

    with other_server("redis", short_path) as server:
        load(server, requests=1, work="noop", protocol="redis-lua")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server.path)
            acquire = [b"EVALSHA", redis_lua.digest("acquire"), b"1", b"held", b"1"]
            assert ask(*acquire, b"1", b"first") == b":1\r\n"
            daemon.wait_until(lambda: ask(*acquire, b"60000", b"second") == b":1\r\n", "the lease ended")
            assert ask(*acquire, b"60000", b"third") == b":0\r\n"
            assert ask(b"ZREM", b"held", b"second") == b":1\r\n"
            assert ask(*acquire, b"60000", b"third") == b":1\r\n"


def test_verification_finds_no_violation(short_path: Path) -> None:
    with sentinel(short_path, maximum=3) as server:
        for more in ({"depth": 5}, {"work": "mix:acquire=2,release=1,keep=1"}, {"hold": "exp:1ms", "depth": 4}):
            run = load(server, requests=3000, connections=10, processes=2, verify=True, maximum=3, **PLAN, **more)
            assert (run.violations, run.errors) == ([], {})
            assert {"granted", "released", "refused"} <= set(run.outcomes)


def test_a_namespace_over_its_request_rate(short_path: Path) -> None:
    with sentinel(short_path, max_allowed_qps="100") as server:
        run = load(server, requests=1000, depth=100, work="flow", **PLAN)
        assert (run.errors, set(run.outcomes)) == ({}, {"granted", "too many requests"})


def test_flows_without_rules_are_errors(short_path: Path) -> None:
    with sentinel(short_path, maximum=5) as server:
        run = load(server, requests=100, work="acquire", protocol="sentinel", names=40, keys="seq")
        assert (run.requests, run.errors) == (60, {"error reply": 40})
        text = "LoadError: --verify: flow 1: 0 of 6 are held, and the other 6 cannot be acquired: the count of each"
        patches = {"counterd.bench.dialects.sentinel.LOOK_S": 0.0}
        assert text in load_fails(server, requests=1, protocol="sentinel", maximum=6, verify=True, patches=patches)
        text = "LoadError: --verify: flow 21: 0 of 5 are held, and the answer is status 3: the count of each rule"
        assert text in load_fails(server, requests=1, protocol="sentinel", names=40, maximum=5, verify=True)


# ---- what is asked ----


@pytest.fixture
def server() -> Iterator[Tokens]:
    with Tokens() as started:
        yield started


def test_acquires_and_releases_alternate(server: Tokens) -> None:
    run = load(server, requests=12, connections=1, depth=4, protocol="sentinel", names=9, resources=3)
    acquire, release = MessageType.ACQUIRE, MessageType.RELEASE
    assert [each.type for each in server.seen] == [acquire] * 4 + [release, acquire] * 4
    assert [each.id for each in server.of(release)] == [-5, -4, -3, -2]
    assert {each.count for each in server.of(acquire)} == {3}
    assert {each.id for each in server.of(acquire)} <= set(range(1, 10))
    assert [each.xid for each in server.seen] == list(range(12))
    assert run.outcomes == {"granted": 8, "released": 4}


def test_with_depth_1_each_acquire_is_released_at_once(server: Tokens) -> None:
    load(server, requests=100, connections=1, protocol="sentinel")
    assert [each.type for each in server.seen] == [MessageType.ACQUIRE, MessageType.RELEASE] * 50
    assert server.tokens == {}


def test_kept_tokens_stay_held(server: Tokens) -> None:
    load(server, requests=200, connections=1, work="mix:acquire=1,keep=3", protocol="sentinel")
    assert {each.id for each in server.of(MessageType.KEEP)} <= server.tokens.keys()
    assert len({each.id for each in server.of(MessageType.KEEP)}) > 10


def test_permits_are_held_for_a_time(server: Tokens) -> None:
    run = load(server, requests=100, depth=10, hold="fixed:1ms", protocol="sentinel")
    assert run.outcomes["released"] >= 40
    assert "not held" not in run.outcomes


def test_rates_and_values(server: Tokens) -> None:
    load(server, requests=50, work="flow", protocol="sentinel", names=5, resources=7)
    load(server, requests=50, work="param", protocol="sentinel", names=5, name_size=10, resources=7)
    flows, values = server.of(MessageType.FLOW), server.of(MessageType.PARAM)
    assert {(each.id, each.count) for each in flows} == {(FIRST_RATE + number, 7) for number in range(5)}
    assert {(each.id, each.count) for each in values} == {(PARAM_FLOW, 7)}
    named = {struct.pack(">ibi", 1, 7, 10) + b"nn%08x" % number for number in range(5)}
    assert {each.body[12:] for each in values} == named


# ---- what cannot be ----


def judged(server: Tokens, **options: object) -> Run:
    short = {"counterd.bench.dialects.sentinel.GIVE_BACK_S": 0.1}
    plan = {"requests": 100, "connections": 2, "depth": 5, "verify": True, "maximum": 1000, **options}
    return load(server, protocol="sentinel", patches=short, **plan)


def test_a_server_that_grants_too_much_is_a_violation() -> None:
    class Generous(Tokens):
        def answer(self, asked: Asked) -> bytes:
            self.limits = 4 if asked.count > 1 or self.used[asked.id] > 6 else 7
            return self.right_answer(asked)

    with Generous() as server:
        run = judged(server, requests=10, connections=1, depth=10, work="acquire", maximum=4)
        assert run.violations is not None
        assert run.violations[0].startswith(
            "a limit was exceeded, or a token was granted twice, 3 times; the first time: "
        )
        assert run.violations[0].endswith("flow 1: 5 were held at the same time, with a maximum of 4")
        assert "flow 1: 4 of 4 are held, and 1 more were granted" not in run.violations


def test_a_duplicate_token_is_a_violation() -> None:
    class Forgetful(Tokens):
        def grant(self, asked: Asked) -> int:
            token = super().grant(asked)
            if token == 15:
                self.tokens[14] = self.tokens.pop(15)
            return min(token, 14) if token <= 15 else token

    with Forgetful(1000) as server:
        run = judged(server)
        text = "a limit was exceeded, or a token was granted twice, 1 times; the first time: token 14 was granted twice"
        assert run.violations is not None
        assert run.violations[0] == text


def test_a_server_that_keeps_released_tokens_is_a_violation() -> None:
    class Keeping(Tokens):
        def answer(self, asked: Asked) -> bytes:
            found = self.right_answer(asked)
            if asked.type == MessageType.RELEASE and asked.id == 20:
                self.used[1] += 1
            return found

    with Keeping(1000) as server:
        run = judged(server)
        assert run.violations is not None
        assert any("cannot be acquired" in text for text in run.violations)


@pytest.mark.parametrize(
    "wrong",
    [(Status.OK, bytes(8)), (Status.OK, b"\1" * 4), (Status.BLOCKED, b""), (Status.OK, bytes(9))],
)
def test_invalid_answers_are_errors(wrong: tuple[Status, bytes]) -> None:
    class Wrong(Tokens):
        def answer(self, asked: Asked) -> bytes:
            return response(asked, *wrong)

    with Wrong() as server:
        run = load(server, requests=1, connections=1, work="acquire", protocol="sentinel")
        assert (run.requests, set(run.errors)) == (0, {"wrong answer", "unanswered"})
        assert "an impossible reply to acquire" in run.evidence[0]


def test_a_reply_with_the_wrong_xid_is_a_wrong_answer() -> None:
    class Mixed(Tokens):
        def answer(self, asked: Asked) -> bytes:
            return self.right_answer(asked._replace(xid=asked.xid ^ 1))

    with Mixed() as server:
        run = load(server, requests=1, connections=1, work="flow", protocol="sentinel")
        assert set(run.errors) == {"wrong answer", "unanswered"}


@pytest.mark.parametrize("status", [Status.NOT_AVAILABLE, Status.NO_RULE, Status.BAD_REQUEST, Status.SHOULD_WAIT, 9])
def test_statuses_that_are_failures(status: int) -> None:
    class Failing(Tokens):
        def answer(self, asked: Asked) -> bytes:
            return response(asked, status, bytes(8))

    with Failing() as server:
        run = load(server, requests=20, work="flow", protocol="sentinel")
        assert (run.requests, run.errors) == (0, {"error reply": 20})


def test_redis_without_scripts() -> None:
    class Old(Tokens):
        def serve(self, peer: object) -> None:
            peer.socket.recv(10_000)  # type: ignore[attr-defined]
            peer.socket.sendall(b"-ERR unknown command 'SCRIPT'\r\n")  # type: ignore[attr-defined]

    with Old() as server:
        said = load_fails(server, requests=1, protocol="redis-lua")
        assert said == "LoadError: the server does not accept scripts: b\"-ERR unknown command 'SCRIPT'\\r\\n\"\n"
