"""counterbench with faulty servers and machines with too few resources: it reports errors, and no good figures."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Opcode
from kit.daemon import PATIENCE, wait_until
from kit.loading import load, load_fails, other_server, plan_of, running, wait_for_loads
from kit.scripted import Hangup, Peer
from kit.scripted.counter import Request, Server, refusal, response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit import daemon

SHORT = {"counterd.bench._load.GRACE_S": 0.2, "counterd.bench._load.SETTLE_S": 0.2}  # waits for what never comes
RIGHT = 10  # requests that a scripted server answers before it does wrong


class Scripted(Server):
    """Answers RIGHT requests of its first connection correctly, then gives the first of `wrong`, then answers correctly
    again.
    """

    def __init__(self, wrong: Callable[[Peer, Request], bytes]) -> None:
        super().__init__()
        self.wrong = wrong
        self.done = False

    def answer(self, request: Request) -> bytes:
        peer = self.peer_of(request)
        if peer.requests <= RIGHT or self.done:
            return self.right_answer(request)
        self.done = True
        return self.wrong(peer, request)


class Raw(Server):
    """Sends the same bytes whatever is received, whole or byte by byte."""

    def __init__(self, data: bytes, *, slowly: bool = False) -> None:
        super().__init__()
        self.data = data
        self.pieces = [bytes([byte]) for byte in data] if slowly else [data]

    def serve(self, peer: Peer) -> None:
        while peer.socket.recv(1 << 16):
            for piece in self.pieces:
                peer.socket.sendall(piece)


# ---- answers that cannot be ----


WRONG = {
    "another opaque": lambda request: response(request._replace(opaque=request.opaque ^ 1)),
    "another opcode": lambda request: response(request._replace(opcode=1)),
    "a wrong magic": lambda request: b"\x90" + response(request)[1:],
    "a body where none belongs": lambda request: response(request, b"1234"),
    "a body too long": lambda request: wire.frame(0, request.opaque, magic=0x91, body_length=1 << 31),
    "text": lambda _: b"-ERR unknown command\r\n",
    "one byte": lambda _: b"\n",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_counted_and_ends_its_connection(wrong: str) -> None:
    with Scripted(lambda _, request: WRONG[wrong](request)) as server:
        run = load(server, requests=1000, connections=1, work="noop")
        assert run.errors == {"wrong answer": 1, "unanswered": 1}
        assert run.requests == run.outcomes["answered"] == 999
        assert len(run.evidence) == 1
        assert run.evidence[0].startswith("an impossible reply to noop: b")
        assert len([peer for peer in server.peers if peer.requests]) == 2, "connected again"
        assert run.failed()


def test_a_surplus_answer_is_a_wrong_answer() -> None:
    with Scripted(lambda _, request: response(request) * 2) as server:
        run = load(server, requests=100, connections=1, work="noop")
        assert run.errors["wrong answer"] == 1
        assert run.requests + run.errors.get("unanswered", 0) == 100


@pytest.mark.parametrize(
    ("work", "status"), [("noop", 0x01), ("get", 0x21), ("get", 0x22), ("acquire", 0x01), ("acquire", 0x22),
                         ("release", 0x21), ("acquire", 0x82), ("get", 0x81), ("noop", 0x7F)],
)  # fmt: skip
def test_an_error_reply_is_an_error(work: str, status: int) -> None:
    def complain(_: Peer, request: Request) -> bytes:
        return wire.frame(request.opcode, request.opaque, b"no", magic=0x91, flags=status)

    with Scripted(complain) as server:
        run = load(server, requests=100, connections=1, work=work)
        assert (run.errors, run.requests, sum(run.outcomes.values())) == ({"error reply": 1}, 99, 99)
        assert run.latency.get_total_count() == 99
        assert run.evidence[0].startswith(f"an error to {work}: b")


@pytest.mark.parametrize(("work", "status", "outcome"), [
    ("get", 0x01, "no such name"), ("release", 0x01, "no such name"), ("acquire", 0x21, "refused"),
    ("release", 0x22, "not held"),
])  # fmt: skip
def test_a_refusal_counts_as_an_answer(work: str, status: int, outcome: str) -> None:
    with Scripted(lambda _, request: refusal(request, status)) as server:
        run = load(server, requests=100, connections=1, work=work)
        assert (run.requests, run.errors) == (100, {})
        assert run.outcomes[outcome] >= 1


@pytest.mark.parametrize(
    ("protocol", "work", "reply", "outcome"),
    [
        ("redis", "acquire", b":1\r\n", "granted"),
        ("redis", "release", b":-1\r\n", "released"),
        ("redis", "noop", b"+PONG\r\n", "answered"),
        ("redis", "get", b"$2\r\n12\r\n", "read"),
        ("redis", "get", b"$-1\r\n", "no such name"),
        ("redis", "query", b"$2\r\n12\r\n", "read"),
        ("redis", "update", b":12\r\n", "updated"),
        ("redis", "insert", b"+OK\r\n", "written"),
        ("redis", "set", b"+OK\r\n", "written"),
        ("redis", "mix:get=1,set=0", b"$100\r\n" + b"12" * 50 + b"\r\n", "read"),
        ("throttr", "noop", b"\1" + bytes(16), "answered"),
        ("throttr", "query", b"\1\1\0\6\1\0", "read"),
        ("throttr", "update", b"\1", "updated"),
        ("throttr", "insert", b"\1", "written"),
        ("throttr", "set", b"\1", "written"),
        ("throttr", "get", b"\1\6\1\0\x64\0" + bytes(100), "read"),
    ],
)
@pytest.mark.parametrize("slowly", [False, True], ids=["whole", "byte by byte"])
def test_answers_of_redis_and_throttr(protocol: str, work: str, reply: bytes, outcome: str, slowly: bool) -> None:
    with Raw(reply, slowly=slowly) as server:
        run = load(server, requests=20, connections=1, protocol=protocol, work=work)
        assert (run.requests, run.outcomes, run.errors) == (20, {outcome: 20}, {})


@pytest.mark.parametrize(
    ("work", "reply"),
    [
        ("get", b"$2" + b" " * 100_000 + b"\r\n"),
        ("get", b"$2" + b" " * 2000 + b"\r\n12\r\n"),
        ("get", b"$21\r\n" + b"1" * 21 + b"\r\n"),
        ("get", b"$2\r\n1x\r\n"),
        ("get", b":1\r\n"),
        ("acquire", b":\r\n"),
        ("acquire", b":1\n"),
        ("acquire", b":12345678901234567890\r\n"),
        ("acquire", b"1" * 100_000),
        ("acquire", b"$-1\r\n"),
        ("noop", b"\0" * 5000),
        ("noop", b"\n"),
    ],
    ids=range(12),
)
def test_invalid_answers_of_redis_are_wrong_answers(work: str, reply: bytes) -> None:
    with Raw(reply) as server:
        run = load(server, requests=3, connections=1, protocol="redis", work=work)
        assert (run.requests, run.outcomes) == (0, {})
        assert run.errors["wrong answer"] >= 1


@pytest.mark.parametrize(
    ("protocol", "work", "reply"),
    [
        ("throttr", "query", b"\2"),
        ("throttr", "query", b"\1\1\0\0\1\0"),
        ("throttr", "query", b"\1\1\0\7\1\0"),
        ("throttr", "get", b"\1\6\1\0\x63\0" + bytes(100)),
        ("throttr", "get", b"\1\6\1\0\xff\xff" + bytes(65535)),
        ("throttr", "get", b"\1\0\1\0\x64\0" + bytes(100)),
        ("throttr", "set", b"+OK\r\n"),
        ("redis", "mix:get=1,set=0", b"$99\r\n" + b"1" * 99 + b"\r\n"),
        ("redis", "mix:get=1,set=0", b"$100\r\n" + b"1" * 102),
        ("redis", "insert", b"$-1\r\n"),
        ("redis", "update", b"+OK\r\n"),
    ],
    ids=range(11),
)
def test_invalid_answers_of_stores_of_keys_are_wrong_answers(protocol: str, work: str, reply: bytes) -> None:
    with Raw(reply) as server:
        run = load(server, requests=3, connections=1, protocol=protocol, work=work)
        assert (run.requests, run.outcomes) == (0, {})
        assert run.errors["wrong answer"] >= 1


@pytest.mark.parametrize(
    ("protocol", "work", "reply"),
    [
        *(("throttr", op, b"\0") for op in ("noop", "query", "update", "insert", "set", "get")),
        *(("redis", op, b"$-1\r\n") for op in ("query", "mix:get=1,set=0")),
        *(("redis", op, b"-OOM\r\n") for op in ("query", "update", "insert", "set")),
    ],
    ids=str,
)
def test_a_missing_key_is_an_error(protocol: str, work: str, reply: bytes) -> None:
    with Raw(reply) as server:
        run = load(server, requests=20, connections=1, protocol=protocol, work=work)
        assert (run.requests, run.outcomes, run.errors) == (0, {}, {"error reply": 20})
        assert run.evidence[0].startswith("an error to ")


def test_a_purge_of_an_expired_key_is_no_error() -> None:
    with Raw(b"\0") as server:
        run = load(server, requests=20, connections=1, protocol="throttr", work="purge")
        assert (run.outcomes, run.errors) == ({"no such name": 10}, {"error reply": 10})


@pytest.mark.parametrize(
    "reply",
    [b"hello\r\n", b"\n", b"M\n", b"VALUE\r\n", b"1 2\r\n", b"STORED \r\n" * 40_000, b"E" * 100_000],
    ids=range(7),
)
def test_invalid_answers_of_memcached_are_wrong_answers(reply: bytes) -> None:
    with Raw(reply) as server:
        said = load_fails(server, connections=1, protocol="memcached")
        assert said.startswith(
            "LoadError: no connection is left before the load has begun: wrong answer (1), unanswered"
        )
        assert "an impossible reply to fill: b" in said


def test_a_load_that_cannot_be_prepared_does_not_begin() -> None:
    """Although the broken connection could be opened again: there is time for that when the wrong answer comes."""

    class Late(Raw):
        def serve(self, peer: Peer) -> None:
            peer.socket.recv(1)
            time.sleep(0.2)
            super().serve(peer)

    with Late(b"hello\r\n") as server:
        said = load_fails(server, connections=1, protocol="memcached")
        assert said.startswith("LoadError: no connection is left before the load has begun: wrong answer (1), ")
        said = load_fails(server, connections=2, prefill=True, churn=5.0)  # one more only watches
        assert said.startswith("LoadError: no connection is left before the load has begun: wrong answer (2), ")


@pytest.mark.parametrize(
    "reply", [b"ERROR\r\n", b"CLIENT_ERROR no\r\n", b"SERVER_ERROR out of memory\r\n", b"NOT_FOUND\r\n"], ids=range(4)
)
def test_error_replies_of_memcached_are_errors(reply: bytes) -> None:
    with Raw(reply) as server:
        run = load(server, requests=5, connections=1, protocol="memcached")
        assert (run.requests, run.outcomes, run.errors) == (0, {}, {"error reply": 5 + 1})
        assert run.evidence[0].startswith("an error to fill: b")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["redis", "memcached"])
def test_short_names_are_not_replaced_in_other_words(protocol: str, size: int) -> None:
    """ "0" and "10" are the end of other words in a request, too."""
    seen: list[bytes] = []

    class Listening(Server):
        def serve(self, peer: Peer) -> None:
            while data := peer.socket.recv(1 << 16):
                seen.append(data)
                peer.socket.sendall(b"+OK\r\n" if protocol == "redis" else b"STORED\r\n")

    with Listening() as server:
        load(server, protocol=protocol, name_size=size, connections=1, prefill=True, resources=100, requests=1)
    name = b"0" * size
    if protocol == "redis":
        fill = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$1\r\n0\r\n" % (size, name)
        acquire = b"*3\r\n$6\r\nINCRBY\r\n$%d\r\n%b\r\n$3\r\n100\r\n" % (size, name)
    else:
        fill = b"set %b 0 0 1\r\n0\r\n" % name
        acquire = b"incr %b 100\r\n" % name
    assert seen == [fill, acquire]


# ---- answers that do not come ----


class Mute(Server):
    """Reads, and never answers."""

    def serve(self, peer: Peer) -> None:
        while peer.socket.recv(1 << 16):
            pass


@pytest.mark.parametrize("options", [{"duration": 0.1}, {"duration": 0.1, "rate": 100.0}, {"requests": 2}], ids=str)
def test_a_server_that_never_answers(options: dict[str, float]) -> None:
    with Mute() as server:
        run = load(server, patches=SHORT, **options)
        assert (run.requests, run.outcomes, run.errors) == (0, {}, {"unanswered": 2})
        assert (run.rate, run.latency.get_total_count()) == (0.0, 0)
        assert run.failed()


@pytest.mark.parametrize("options", [{"prefill": True}, {"churn": 10.0}, {"protocol": "memcached"}], ids=str)
def test_a_server_that_never_answers_the_preparation(options: dict[str, object]) -> None:
    with Mute() as server:
        run = load(server, patches=SHORT, duration=0.1, **options)
        assert run.requests == 0
        assert run.errors["unanswered"] >= 2


def test_connections_that_are_not_accepted_are_errors(short_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)

        class Place:
            address = listener.getsockname()

        with running(plan_of(Place, connections=10, duration=0.1, work="noop"), SHORT) as bench:
            run = bench.result()
    assert run.requests == 0
    assert 7 <= run.errors["network error"] + run.errors.get("unanswered", 0) <= 30
    assert run.errors["network error"] >= 7, "the queue has room for two, and for the one that was a probe"
    assert run.evidence == ["network error: Connection timed out"]


# ---- connections that are killed ----


def test_churn_resets_connections_and_measures_the_give_back() -> None:
    with Server() as server:
        run = load(server, duration=0.5, connections=5, depth=2, churn=100.0, names=3)
        assert run.errors == {}
        assert run.give_back is not None
        assert 0 < run.give_back.get_total_count() <= 51
        assert server.ends.count("reset") == run.give_back.get_total_count()
        markers = [request.name for request in server.asked(Opcode.ACQUIRE) if request.name.startswith(b"k")]
        assert len(set(markers)) == len(markers) == run.give_back.get_total_count() + 5


def test_a_number_of_requests_is_exact_however_many_connections_die() -> None:
    with Server() as server:
        run = load(server, requests=20_000, connections=5, depth=20, churn=500.0)
        assert (run.requests, run.errors) == (20_000, {})
        assert run.give_back is not None
        assert run.give_back.get_total_count() > 0


def test_a_late_give_back_is_measured() -> None:
    class Late(Server):
        def give_back(self, peer: Peer) -> None:
            time.sleep(0.1)
            super().give_back(peer)

    measured = 0
    while not measured:  # on a busy machine few end in time
        with Late() as server:
            run = load(server, duration=0.3, churn=20.0)
        assert run.errors == {}
        assert run.give_back is not None
        measured = run.give_back.get_total_count()
    assert run.give_back.get_min_value() >= 99e6


def test_many_killed_connections_are_checked_together() -> None:
    """The time until permits are back is measured, not the time until the check comes round."""

    class Far(Server):
        def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
            time.sleep(0.02)
            super().send(peer, replies)

    with Far() as server:
        run = load(server, duration=0.6, connections=100, churn=300.0)
        assert run.errors == {}
        assert run.give_back is not None
        assert run.give_back.get_total_count() > 0.6 / 0.02, "as many as one after the other can be"


def test_permits_that_never_come_back_are_an_error() -> None:
    class Forgetful(Server):
        def give_back(self, peer: Peer) -> None:
            pass

    with Forgetful() as server:
        for patches in (SHORT, {**SHORT, "counterd.bench._load.GIVE_BACK_S": 0.05}):
            duration, forgotten = 0.1, 0
            while forgotten < 2 and duration < 10.0:  # a run in which the load had no core is no answer
                duration *= 2
                run = load(server, duration=duration, churn=20.0, patches=patches)
                forgotten = run.errors.get("not given back", 0)
            assert 2 <= forgotten <= 20 * duration + 2
            assert run.give_back is not None
            assert run.give_back.get_total_count() == 0


def test_time_without_answers_counts_for_the_rate() -> None:
    """The rate is for the requested time, not for the part that went well."""

    class Tiring(Server):
        def answer(self, request: Request) -> bytes:
            return self.right_answer(request) if len(self.seen) <= 100 else b""

    with Tiring() as server:
        for options in ({"duration": 0.3}, {"duration": 0.3, "requests": 1000}):
            server.seen.clear()
            run = load(server, work="noop", connections=1, patches=SHORT, **options)
            assert (run.requests, run.errors) == (100, {"unanswered": 1})
            assert run.seconds >= 0.3
        server.seen.clear()
        with running(plan_of(server, work="noop", connections=1, duration=60.0), SHORT) as bench:
            wait_until(lambda: len(server.seen) > 100, "all answers")
            time.sleep(0.2)
            bench.interrupt()
            run = bench.result()
        assert (run.requests, run.errors) == (100, {"unanswered": 1})
        assert 0.2 <= run.seconds < PATIENCE


@pytest.mark.parametrize("warmup", [0.0, 60.0])
def test_an_interrupt_before_there_are_any_figures(warmup: float) -> None:
    with Mute() as server:
        with running(plan_of(server, connections=1, duration=60.0, warmup=warmup), SHORT) as bench:
            wait_until(lambda: server.seen or len(server.peers) > 1, "a connection")
            bench.interrupt(signal.SIGTERM)
            run = bench.result()
        assert (run.requests, run.rate) == (0, 0.0)
        assert 0 <= run.seconds < PATIENCE


# ---- what only a look at the server's own figures shows ----


FORGETFUL_SHORT = {"counterd.bench.dialects.counter.GIVE_BACK_S": 0.2}


def test_a_server_that_grants_too_much_is_a_violation() -> None:
    class Generous(Server):
        def limit(self, request: Request) -> int:
            return request.maximum + 1

    with Generous() as server:
        run = load(server, duration=0.2, connections=4, maximum=2, hold="fixed:20ms", verify=True)
        assert run.violations is not None
        assert run.violations[0].startswith("a counter was above its maximum ")
        assert "nnnnnnnn00000000: 3 were held at the same time, with a maximum of 2" in run.violations[0]
        assert "nnnnnnnn00000000: 3 were in use, with a maximum of 2" in run.violations
        assert (run.errors, run.failed()) == ({}, True)


def test_each_grant_above_the_maximum_counts_once() -> None:
    class Generous(Server):
        def limit(self, request: Request) -> int:
            return request.maximum + 2

    with Generous() as server:  # four acquires, and the first of their releases
        run = load(server, requests=5, connections=4, maximum=2, hold="fixed:50ms", verify=True)
        assert run.outcomes == {"granted": 4, "released": 1}
        text = "nnnnnnnn00000000: 3 were held at the same time, with a maximum of 2"
        assert run.violations is not None
        assert run.violations[0] == f"a counter was above its maximum 2 times; the first time: {text}"


def test_a_server_that_does_not_give_back_is_a_violation() -> None:
    class Forgetful(Server):
        def give_back(self, peer: Peer) -> None:
            pass

    with Forgetful() as server:
        run = load(server, requests=101, connections=1, resources=7, verify=True, patches=FORGETFUL_SHORT)
        assert run.violations == ["nnnnnnnn00000000: 7 still in use, 0.2 s after the last connection was closed"]
        assert run.failed()


def test_an_interrupt_while_waiting_for_permits_keeps_the_figures() -> None:
    class Forgetful(Server):
        def give_back(self, peer: Peer) -> None:
            pass

    with Forgetful() as server, running(plan_of(server, requests=1, connections=1, verify=True)) as bench:
        wait_until(lambda: len([each for each in server.seen if each.opcode == Opcode.DUMP]) > 4, "a few looks")
        bench.interrupt()
        run = bench.result()
    assert run.requests == 1
    assert run.violations == ["it is not known whether everything was given back, because the run was interrupted"]


def test_a_server_that_shows_more_than_the_maximum_is_a_violation() -> None:
    class Boastful(Server):
        def answer(self, request: Request) -> bytes:
            if request.opcode == Opcode.GET:
                return response(request, (11).to_bytes(4, "big"))
            return self.right_answer(request)

    with Boastful() as server:
        run = load(server, requests=50, work="get", maximum=10, verify=True)
        text = "nnnnnnnn00000000: 11 were in use, with a maximum of 10"
        assert run.violations == [f"a counter was above its maximum 50 times; the first time: {text}"]


def test_a_server_that_counts_more_than_is_held_is_a_violation() -> None:
    class Miscounting(Server):
        def answer(self, request: Request) -> bytes:
            if request.opcode == Opcode.RELEASE and self.peer_of(request).requests == 50:
                return response(request)
            return self.right_answer(request)

    with Miscounting() as server:
        run = load(server, requests=100, connections=1, verify=True, patches=FORGETFUL_SHORT)
        assert run.violations == ["nnnnnnnn00000000: 1 in use, but 0 are held"]


def test_a_server_that_loses_permits_is_a_violation() -> None:
    class Losing(Server):
        def answer(self, request: Request) -> bytes:
            answer = self.right_answer(request)
            if request.opcode == Opcode.ACQUIRE:
                self.used[request.name] = self.peer_of(request).held[request.name] = 0
            return answer

    with Losing() as server:
        run = load(server, requests=1, connections=1, verify=True, patches=FORGETFUL_SHORT)
        assert run.violations == ["nnnnnnnn00000000: 0 in use, but 1 are held"]


def test_permits_of_a_closed_connection_may_come_back_late() -> None:
    class Late(Server):
        def give_back(self, peer: Peer) -> None:
            time.sleep(0.2)
            super().give_back(peer)

        def answer(self, request: Request) -> bytes:
            if self.peer_of(request).requests == 2:
                raise Hangup
            return self.right_answer(request)

    with Late() as server:
        run = load(server, requests=4, connections=2, work="acquire", verify=True)
        assert run.violations == []


def test_verification_needs_dump() -> None:
    class Simple(Server):
        def right_answer(self, request: Request) -> bytes:
            return refusal(request, 0x81) if request.opcode == Opcode.DUMP else super().right_answer(request)

    with Simple() as server:
        assert (
            load_fails(server, verify=True)
            == "LoadError: --verify needs a reply to Dump: Unknown command (status 0x81)\n"
        )


def test_a_server_that_stops_answering_dumps_keeps_the_figures() -> None:
    class Simple(Server):
        def right_answer(self, request: Request) -> bytes:
            wrong = request.opcode == Opcode.DUMP and len(self.seen) > 50
            return refusal(request, 0x82) if wrong else super().right_answer(request)

    with Simple() as server:
        run = load(server, requests=100, verify=True)
        assert run.requests == 100
        assert run.violations == ["it is not known how much is in use: OutOfMemory (status 0x82)"] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"work": "mix:get=1,acquire=3,release=3", "depth": 8},
        {"work": "mix:get=1,acquire=3,release=2", "maximum": 20, "resources": 3},
        {"work": "acquire", "churn": 40.0},
        {"hold": "exp:5ms", "depth": 20, "maximum": 50},
        {"hold": "fixed:10s", "depth": 20, "churn": 40.0},
        {"churn": 60.0, "depth": 3},
        {"keep_alive": False},
        {"rate": 3000.0, "depth": 4, "maximum": 3},
        {"rate": 3000.0, "hold": "exp:3ms", "churn": 30.0, "maximum": 5},
    ],
    ids=str,
)
def test_the_real_server_has_no_violations(options: dict[str, object], start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    run = load(counterd, duration=0.3, connections=6, processes=2, names=5, verify=True, prefill=True, **options)
    assert (run.violations, run.errors, run.unsent) == ([], {}, 0)
    assert run.requests > 100
    assert (run.give_back is not None and run.give_back.get_total_count() >= 5) == ("churn" in options)


# ---- connections that break, and machines that have too little ----


def hang_up(_: Peer, __: Request) -> bytes:
    raise Hangup


def reset(peer: Peer, _: Request) -> bytes:
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raise Hangup


def half_an_answer(peer: Peer, request: Request) -> bytes:
    peer.socket.sendall(response(request)[:7])
    raise Hangup


@pytest.mark.parametrize(
    ("how", "kind"),
    [(hang_up, "closed by the server"), (reset, "connection reset"), (half_an_answer, "closed by the server")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_connection_is_an_error_and_opened_again(how: Callable[[Peer, Request], bytes], kind: str) -> None:
    with Scripted(how) as server:
        run = load(server, requests=500, connections=2, work="noop")
        assert run.errors == {kind: 1, "unanswered": 1}
        assert run.requests == 499
        assert run.latency.get_total_count() == 499


@pytest.mark.parametrize("options", [{}, {"rate": 500.0}, {"hold": "exp:5ms"}, {"keep_alive": False}], ids=str)
def test_a_server_that_closes_at_once(options: dict[str, object]) -> None:
    class Closing(Server):
        def serve(self, peer: Peer) -> None:
            if peer.number:
                raise Hangup

    with Closing() as server, running(plan_of(server, duration=0.3, **options), SHORT) as bench:
        bench.process.join(10)
        if bench.process.exitcode:  # it was closed before the load began, or then
            assert "no connection is left before the load has begun: " in bench.said()
        else:
            run = bench.result()
            assert run.requests == 0
            assert run.errors.get("closed by the server", 0) + run.errors.get("connection reset", 0) >= 1
        assert len(server.peers) < 50, "it does not try all the time"


def test_a_server_that_restarts_during_the_load(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    with running(plan_of(counterd, duration=60.0, rate=1000.0, connections=4)) as bench:
        wait_until(lambda: counterd.stats()["command:acquire"] > 100, "the load")
        assert counterd.stop(signal.SIGINT) == 0
        again = start({"counter.port": str(counterd.address.port)})
        wait_until(lambda: again.stats()["command:acquire"] > 100, "the load is back")
        bench.interrupt()
        run = bench.result()
    assert run.errors.get("closed by the server", 0) + run.errors.get("connection reset", 0) >= 4
    assert run.requests > 200


def test_answers_in_pieces_and_several_in_one_read() -> None:
    class Pieces(Server):
        def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
            for byte in b"".join(replies):
                peer.socket.sendall(bytes([byte]))

    with Pieces() as server:
        run = load(server, requests=60, connections=2, depth=10, work="mix:get=1,acquire=1,noop=1")
        assert (run.requests, run.errors) == (60, {})


def test_the_error_if_no_server_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))

        class Place:
            address = unused.getsockname()

        text = f"LoadError: cannot connect to 127.0.0.1:{Place.address[1]}: Connection refused\n"
        assert load_fails(Place) == text


@pytest.mark.parametrize(("path", "why"), [("/nowhere/s", "No such file or directory"), ("/" + "s" * 200, "107 bytes")])
def test_the_error_without_a_unix_socket(path: str, why: str) -> None:
    class Place:
        pass

    Place.path = path  # type: ignore[attr-defined]
    assert why in load_fails(Place)


def test_the_error_with_too_few_descriptors() -> None:
    with Server() as server:
        text = "LoadError: 365 files would be open, and the limit is 256: raise it (ulimit -Hn 365), or use --threads\n"
        assert load_fails(server, connections=300, limit=256) == text
        assert load(server, requests=300, connections=100, limit=256).errors == {}


def test_a_killed_load_process_is_an_error() -> None:
    with Server() as server, running(plan_of(server, connections=4, processes=2, duration=60.0)) as bench:
        first, _ = wait_for_loads(bench, 2)
        wait_until(lambda: len([peer for peer in server.peers if peer.requests]) == 4, "all connections")
        os.kill(first, signal.SIGKILL)
        assert bench.said() == f"LoadError: a load process ({first}) died\n"
        server.wait_for_ends(4)


def test_load_processes_end_with_their_parent() -> None:
    with Server() as server, running(plan_of(server, connections=4, processes=2, duration=60.0)) as bench:
        wait_for_loads(bench, 2)
        wait_until(lambda: len([peer for peer in server.peers if peer.requests]) == 4, "all connections")
        os.kill(bench.pid, signal.SIGKILL)
        server.wait_for_ends(4)


# ---- the other protocols, against those who made them ----


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param("redis", marks=pytest.mark.needs("redis-server")),
        pytest.param("memcached", marks=pytest.mark.needs("memcached")),
    ],
)
def test_a_server_of_another_protocol(protocol: str, short_path: Path) -> None:
    with other_server(protocol, short_path) as server:
        run = load(
            server, protocol=protocol, requests=3000, depth=10, names=10, connections=4, processes=2, prefill=True
        )
        assert (run.requests, run.errors, set(run.outcomes)) == (3000, {}, {"granted", "released"})
        run = load(server, protocol=protocol, requests=1000, names=10, work="mix:noop=1,get=1,acquire=2,release=1")
        assert (run.requests, run.errors) == (1000, {})
        assert set(run.outcomes) == {"answered", "read", "granted", "released"}
        run = load(
            server, protocol=protocol, requests=64, names=16, name_size=1, resources=100, keys="seq", prefill=True
        )
        assert (run.requests, run.errors) == (64, {})
        run = load(server, protocol=protocol, requests=200, rate=2000.0, hold="exp:1ms", names=3)
        assert (run.requests, run.errors) == (200, {})
        run = load(server, protocol=protocol, requests=50, work="get", keep_alive=False)
        assert (run.requests, run.errors) == (50, {})


@pytest.mark.needs("redis-server")
def test_a_missing_name_in_redis_is_an_answer(short_path: Path) -> None:
    with other_server("redis", short_path) as server:
        assert load(server, protocol="redis", requests=50, work="get").outcomes == {"no such name": 50}
