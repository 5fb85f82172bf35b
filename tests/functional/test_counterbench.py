"""counterbench: the requests that it sends to a server, and the results that it reports."""

from __future__ import annotations

import itertools
import re
import socket
import ssl
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.counter.wire import Opcode
from kit.certificates import server_context
from kit.daemon import PATIENCE, wait_until
from kit.loading import load, load_fails, plan_of, running
from kit.scripted import Hangup, Peer
from kit.scripted.counter import Request, Server, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hdrh.histogram import HdrHistogram

    from kit import daemon
    from kit.certificates import Files


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def count_below(values: HdrHistogram, bound: float) -> int:
    """How many of the values are below this."""
    return sum(item.count_added_in_this_iter_step for item in values.get_recorded_iterator()
               if item.value_iterated_to < bound)  # fmt: skip


def names_of(requests: list[Request]) -> list[int]:
    return [int(request.name[-8:], 16) for request in requests]


# ---- how many ----


@pytest.mark.parametrize(
    ("requests", "connections", "depth", "processes"),
    [(1, 1, 1, 1), (3, 10, 1, 1), (100, 7, 1, 1), (1000, 4, 16, 1), (1001, 5, 3, 2), (50, 4, 1, 4), (100, 3, 200, 1)],
)
def test_a_number_of_requests_is_exact(
    requests: int, connections: int, depth: int, processes: int, server: Server
) -> None:
    run = load(server, requests=requests, connections=connections, depth=depth, processes=processes)
    assert (run.requests, len(server.asked()), run.errors) == (requests, requests, {})
    assert sum(run.outcomes.values()) == run.latency.get_total_count() == requests
    assert sum(moment.requests for moment in run.series) == requests
    assert run.seconds > 0


def test_zero_requests(server: Server) -> None:
    run = load(server, requests=0)
    assert (run.requests, server.asked(), run.failed()) == (0, [], False)


def test_a_duration_and_its_warmup(server: Server) -> None:
    begun = time.monotonic()
    run = load(server, duration=0.4, warmup=0.3, work="noop")
    assert 0.4 <= run.seconds <= time.monotonic() - begun - 0.3
    assert len(server.asked()) > run.requests > 0, "those of the warm-up are not counted"
    assert run.rate == run.requests / run.seconds


def test_a_duration_of_zero(server: Server) -> None:
    run = load(server, duration=0.0)
    assert (run.requests, run.rate, run.errors, run.unsent) == (0, 0.0, {}, 0)


@pytest.mark.parametrize("depth", [1, 7, 1000])
def test_depth_is_the_number_of_unanswered_requests(depth: int) -> None:
    class Late(Server):
        def serve(self, peer: Peer) -> None:
            """Answers only when all requests of a batch are there."""
            buffer = b""
            waiting: list[Request] = []
            while data := peer.socket.recv(1 << 18):
                requests, buffer = self.cut(peer, buffer + data)
                waiting += requests
                assert len(waiting) <= depth
                if len(waiting) == depth:
                    peer.batches.append(depth)
                    self.send(peer, map(self.reply, waiting))
                    waiting = []

    with Late() as server:
        run = load(server, requests=4 * depth, connections=1, depth=depth)
        assert (run.requests, run.errors, server.wait_for_ends(2)) == (4 * depth, {}, ["closed", "closed"])
        assert server.peers[1].batches == [depth] * 4


def test_a_connection_for_each_request(server: Server) -> None:
    run = load(server, requests=50, connections=3, keep_alive=False, work="noop")
    assert (run.requests, run.outcomes, run.errors) == (50, {"answered": 50}, {})
    assert Counter(peer.requests for peer in server.peers) == {1: 50, 0: len(server.peers) - 50}
    assert len(server.asked()) == 50


def test_a_server_that_reads_slowly_gets_everything() -> None:
    class Slow(Server):
        def serve(self, peer: Peer) -> None:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            time.sleep(0.2)
            super().serve(peer)

    with Slow() as server:
        run = load(server, requests=400, connections=2, depth=200, name_size=65535, work="get")
        assert (run.requests, run.errors) == (400, {})
        assert {len(request.name) for request in server.asked()} == {65535}
        assert run.latency.get_max_value() >= 150e6


def test_all_requests_are_waited_for_while_answers_come() -> None:
    class Slow(Server):
        def answer(self, request: Request) -> bytes:
            time.sleep(0.1)
            return self.right_answer(request)

        def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
            for reply in replies:
                peer.socket.sendall(reply)

    with Slow() as server:
        run = load(
            server, requests=8, connections=1, depth=8, work="noop", patches={"counterd.bench._load.GRACE_S": 0.3}
        )
        assert (run.requests, run.errors) == (8, {})


# ---- names ----


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 250, 65535])
def test_sizes_of_names(size: int, server: Server) -> None:
    run = load(server, requests=64, names=16, name_size=size, keys="seq", work="get")
    assert (run.requests, run.errors) == (64, {})
    digits = min(size, 8)
    expected = {b"n" * (size - digits) + f"{number:0{digits}x}".encode() for number in range(16)}
    assert Counter(request.name for request in server.asked()) == dict.fromkeys(expected, 4)


@pytest.mark.parametrize(("names", "processes"), [(10, 1), (10, 2), (7, 2), (1000, 3)])
def test_a_sequence_has_all_names(names: int, processes: int, server: Server) -> None:
    load(server, requests=names * processes, names=names, keys="seq", work="get", connections=3, processes=processes)
    assert set(names_of(server.asked())) == set(range(names))


def test_uniform_names_are_spread(server: Server) -> None:
    load(server, requests=20_000, depth=100, names=10, work="get", seed=3)
    counts = Counter(names_of(server.asked()))
    assert set(counts) == set(range(10))
    chi_square = sum((count - 2000) ** 2 / 2000 for count in counts.values())
    assert chi_square < 27.9, "1 in 1000 for 9 degrees of freedom; the seed is fixed"


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.03, 2.0])
def test_zipf_names_follow_the_law(exponent: float, server: Server) -> None:
    load(server, requests=20_000, depth=100, names=50, work="get", keys=f"zipf:{exponent}", seed=5)
    counts = Counter(names_of(server.asked()))
    weights = [rank**-exponent for rank in range(1, 51)]
    expected = [20_000 * weight / sum(weights) for weight in weights]
    chi_square = sum((counts[name] - wanted) ** 2 / wanted for name, wanted in enumerate(expected))
    assert set(counts) <= set(range(50))
    assert chi_square < 85.4, "1 in 1000 for 49 degrees of freedom; the seed is fixed"


@pytest.mark.parametrize("exponent", [0.01, 10])
def test_zipf_with_extreme_exponents(exponent: float, server: Server) -> None:
    run = load(server, requests=2000, depth=100, names=1 << 30, work="get", keys=f"zipf:{exponent}")
    assert run.errors == {}
    assert max(names_of(server.asked())) < 1 << 30


def test_a_seed_gives_the_same_names_again(server: Server) -> None:
    for seed in (1, 1, 2, -1, 1 << 70):
        load(server, requests=100, connections=1, names=1000, work="get", seed=seed)
    names = names_of(server.asked())
    first, again, other, *_ = (names[start : start + 100] for start in range(0, 500, 100))
    assert first == again != other


# ---- work ----


def test_acquire_and_release_in_turn(server: Server) -> None:
    run = load(server, requests=100, connections=1, names=5, resources=3, maximum=30)
    asked = server.asked()
    assert [request.opcode for request in asked] == [Opcode.ACQUIRE, Opcode.RELEASE] * 50
    assert all(first.name == second.name for first, second in zip(asked[::2], asked[1::2], strict=True))
    assert {(request.resources, request.maximum) for request in asked} == {(3, 30), (3, 0)}
    assert run.outcomes == {"granted": 50, "released": 50}
    assert sum(server.used.values()) == 0


def test_refused_acquires_are_not_released() -> None:
    class Refusing(Server):
        def answer(self, request: Request) -> bytes:
            if request.opcode == Opcode.ACQUIRE and request.name.endswith((b"1", b"3")):
                return refusal(request, 0x21)
            return self.right_answer(request)

    with Refusing() as server:
        run = load(server, requests=300, names=4)
        assert not [request for request in server.asked(Opcode.RELEASE) if request.name.endswith((b"1", b"3"))]
        assert run.outcomes["refused"] > 10
        assert run.outcomes["granted"] - run.outcomes["released"] in range(3)
        assert run.failed() is False


def test_a_mix_has_its_shares(server: Server) -> None:
    work = "mix:noop=1,get=2,acquire=4,release=3"
    run = load(server, requests=20_000, depth=50, work=work, names=10, prefill=True)
    shares = {name: count / 20_000 for name, count in run.outcomes.items()}
    assert shares == pytest.approx({"answered": 0.1, "read": 0.2, "granted": 0.4, "released": 0.3}, abs=0.02)


@pytest.mark.parametrize("work", ["noop", "get", "acquire", "release"])
def test_one_kind_of_work(work: str, server: Server) -> None:
    run = load(server, requests=50, work=work)
    outcome = {"noop": "answered", "get": "no such name", "acquire": "granted", "release": "not held"}[work]
    assert run.outcomes == {outcome: 50}
    assert {request.opcode for request in server.asked()} == {Opcode[work.upper()]}


def test_a_mix_releases_granted_permits(server: Server) -> None:
    run = load(server, requests=5000, depth=10, connections=4, work="mix:acquire=1,release=1", names=20)
    assert set(run.outcomes) == {"granted", "released"}


@pytest.mark.parametrize("rate", [None, 500.0])
def test_permits_are_held_for_the_given_time(rate: float | None, server: Server) -> None:
    run = load(server, duration=1, depth=20, hold="fixed:200ms", rate=rate, names=1 << 20, keys="seq")
    acquired = {request.name: request.seconds for request in server.asked(Opcode.ACQUIRE)}
    held = [request.seconds - acquired[request.name] for request in server.asked(Opcode.RELEASE)]
    assert len(held) >= 20
    assert min(held) > 0.199
    assert sorted(held)[len(held) // 2] < 1
    assert (run.errors, set(run.outcomes)) == ({}, {"granted", "released"})


def test_exponential_holds_have_the_given_mean(server: Server) -> None:
    load(server, duration=2, depth=300, hold="exp:300ms", names=1 << 20, keys="seq")
    acquired = {request.name: request.seconds for request in server.asked(Opcode.ACQUIRE)}
    held = sorted(request.seconds - acquired[request.name] for request in server.asked(Opcode.RELEASE))
    assert len(held) > 300
    quarter, most = held[len(held) // 4], held[-len(held) // 20]
    assert most > 0.45, "one in twenty is longer than 3 times the mean"
    assert quarter < most / 2, "a quarter is shorter than 0.29 of the mean"


def test_a_number_of_requests_is_exact_with_holds_too(server: Server) -> None:
    run = load(server, requests=501, depth=50, hold="fixed:20ms", names=10)
    assert (run.requests, len(server.asked()), run.errors) == (501, 501, {})


def test_refused_holds_are_not_released(server: Server) -> None:
    run = load(server, duration=0.2, connections=4, hold="fixed:10ms", maximum=1)
    assert run.outcomes["refused"] > 10
    assert set(run.outcomes) == {"granted", "released", "refused"}
    assert len(server.asked(Opcode.RELEASE)) == run.outcomes["released"]


def test_very_many_held_permits_do_not_slow_down_churn(server: Server) -> None:
    """Closing a connection does not search for its permits among all others."""
    begun = time.monotonic()
    run = load(server, duration=1.0, connections=200, depth=200, hold="fixed:100s", work="acquire-release", names=9)
    assert (set(run.outcomes), run.errors) == ({"granted"}, {})
    assert time.monotonic() - begun < PATIENCE
    assert sum(server.counters.most.values()) == len(server.asked(Opcode.ACQUIRE)) >= run.requests > 10_000


# ---- an open loop ----


@pytest.mark.parametrize(("arrivals", "processes"), [("constant", 1), ("constant", 2), ("poisson", 1)])
def test_a_rate_is_kept(arrivals: str, processes: int, server: Server) -> None:
    run = load(server, rate=800, duration=0.5, work="noop", connections=4, arrivals=arrivals, processes=processes)
    assert (run.errors, run.unsent, run.rate_wanted) == ({}, 0, 800)
    assert run.requests == pytest.approx(400, abs=1 if arrivals == "constant" else 80)
    assert run.service is not None
    assert run.service.get_total_count() == run.requests


def test_requests_are_sent_at_their_intended_times(server: Server) -> None:
    load(server, rate=20, duration=1, work="noop", connections=5)
    seconds = [request.seconds for request in server.asked()]
    gaps = sorted(later - sooner for sooner, later in itertools.pairwise(seconds))
    assert gaps[len(gaps) // 2] == pytest.approx(0.05, rel=0.4)


def test_a_slow_rate_with_processes_is_not_exceeded(server: Server) -> None:
    run = load(server, rate=4, duration=0.2, work="noop", processes=2)
    assert (run.requests, run.unsent, run.errors) == (1, 0, {})


def test_a_stall_counts_for_every_request_that_waited() -> None:
    class Stalling(Server):
        def answer(self, request: Request) -> bytes:
            if len(self.seen) == 50:
                time.sleep(0.3)
            return self.right_answer(request)

    with Stalling() as server:
        run = load(server, rate=200, duration=1.0, work="noop", connections=1)
    assert run.service is not None
    assert run.latency.get_max_value() >= 290e6
    assert run.service.get_max_value() >= 290e6
    waited = [values.get_total_count() - count_below(values, 50e6) for values in (run.latency, run.service)]
    assert waited[0] >= 40, "50 were meant to start within the first 250 ms of it"
    assert waited[1] <= 5, "one was under way"
    assert run.late >= 40
    assert (run.requests, run.unsent, run.errors) == (200, 0, {})


def test_unsent_requests_are_reported() -> None:
    class Slow(Server):
        def answer(self, request: Request) -> bytes:
            time.sleep(0.05)
            return self.right_answer(request)

    with Slow() as server:
        short = {"counterd.bench._load.GRACE_S": 0.3}
        run = load(server, rate=10_000, duration=0.5, work="noop", connections=1, patches=short)
        assert run.requests + run.unsent == 5000
        assert run.unsent > 4900
        assert run.failed()
        run = load(server, rate=10_000, duration=0.1, warmup=0.3, work="noop", connections=1, patches=short)
        assert (run.requests, run.unsent) == (0, 1000), "of the measured time"


def test_pending_requests_are_waited_for_after_the_backlog_is_dropped() -> None:
    class Slow(Server):
        def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
            answers = list(replies)
            time.sleep(0.1 if answers and peer.number else 0)
            super().send(peer, iter(answers))

    with Slow() as server:
        # What connecting left of its time must not be what saves them.
        short = {"counterd.bench._load.SETTLE_S": 0.2, "counterd.bench._load.GRACE_S": 0.3}
        run = load(server, rate=10_000, duration=0.5, work="noop", connections=4, depth=8, patches=short)
    assert run.unsent > 0
    assert run.errors == {}


# ---- addresses ----


def test_a_load_over_a_unix_socket(short_path: Path) -> None:
    with Server(path=str(short_path / "s")) as server:
        run = load(server, requests=100, verify=True)
        assert (run.requests, run.errors, run.violations) == (100, {}, [])


def test_more_connections_than_the_queue_of_a_unix_socket_holds(short_path: Path) -> None:
    class Few(Server):
        BACKLOG = 2

    with Few(path=str(short_path / "s")) as server:
        run = load(server, requests=1000, connections=100)
        assert (run.requests, run.errors) == (1000, {})
        assert len([peer for peer in server.peers if peer.requests]) == 100


@pytest.mark.needs("ipv6")
def test_a_load_over_ipv6() -> None:
    with Server(family=socket.AF_INET6) as server:
        run = load(server, requests=100, verify=True)
        assert (run.requests, run.errors, run.violations) == (100, {}, [])


# ---- a run that is ended ----


@pytest.mark.parametrize("options", [{}, {"rate": 2000.0}, {"hold": "exp:5ms"}, {"churn": 50.0}], ids=str)
def test_an_interrupt_ends_a_run_with_figures(options: dict[str, object], server: Server) -> None:
    with running(plan_of(server, duration=60.0, **options)) as bench:
        wait_until(lambda: len(server.asked()) > 500, "500 requests")
        bench.interrupt()
        run = bench.result()
    assert run.requests > 400
    assert run.latency.get_total_count() == run.requests
    assert 0 < run.seconds < PATIENCE
    assert run.errors == {}
    assert run.unsent == 0 or "rate" in options  # on a busy machine an open loop may be behind when it is ended


def test_a_load_on_the_real_server(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    run = load(counterd, requests=20_000, depth=16, names=100, processes=2, connections=4)
    assert (run.requests, run.errors) == (20_000, {})
    assert counterd.stats()["curr_connections"] == 1


# ---- TLS ----


@pytest.mark.parametrize(
    "options",
    [
        {"requests": 500, "depth": 3, "connections": 3},
        {"requests": 4000, "depth": 2000, "connections": 2, "processes": 2, "names": 100},
        {"requests": 20, "keep_alive": False},
        {"requests": 60, "hold": "fixed:2ms", "churn": 50, "rate": 2000.0, "verify": True},
    ],
)
def test_a_load_over_tls(options: dict[str, Any], pem: Files) -> None:
    with Server(context=server_context()) as server:
        run = load(server, tls=True, cacert=pem.cacert, **options)
        assert (run.requests, run.errors, run.failed()) == (options["requests"], {}, False)
        assert (run.label.count("TLS"), run.options["tls"]) == (1, True)


def test_a_client_certificate(pem: Files) -> None:
    with Server(context=server_context(clients=ssl.CERT_REQUIRED)) as server:
        files = {"cacert": pem.cacert, "cert": pem.cert, "key": pem.key}
        assert not load(server, tls=True, requests=10, **files).failed()
    context = server_context(clients=ssl.CERT_REQUIRED)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # which refuses within the handshake, 1.3 a moment after it
    with Server(context=context) as server:
        said = load_fails(server, tls=True, requests=10, cacert=pem.cacert)
    assert re.search("cannot connect to 127.0.0.1:[0-9]+: TLS handshake: ", said)


@pytest.mark.parametrize(
    ("file", "why"), [("other", "TLS handshake: .*CERTIFICATE_VERIFY_FAILED"), ("none", "/none: No such file or dir")]
)
def test_untrusted_servers_are_refused(file: str, why: str, pem: Files) -> None:
    with Server(context=server_context()) as server:
        said = load_fails(server, tls=True, requests=10, cacert=getattr(pem, file, "/none"))
        assert re.search(f"cannot connect to 127.0.0.1:[0-9]+: {why}", said)


def test_a_server_without_tls(server: Server) -> None:
    server.serve = lambda peer: peer.socket.recv(1)  # type: ignore[method-assign,assignment,return-value]
    assert "it may not use TLS, have no room, or not allow this address" in load_fails(server, tls=True, requests=10)


def test_failed_handshakes_during_the_load_are_errors(pem: Files) -> None:
    """The connections are opened again."""

    class Hostile(Server):
        def secure(self, peer: Peer, context: ssl.SSLContext) -> None:
            if peer.number % 3 == 2:
                peer.socket.sendall(b"no TLS at all" * 10 * (peer.number % 2))
                raise Hangup
            super().secure(peer, context)

    with Hostile(context=server_context()) as server:
        run = load(server, tls=True, cacert=pem.cacert, requests=50, connections=4)
        assert run.requests == 50
        assert run.errors.keys() == {"network error"}
        assert run.evidence[0].startswith("TLS: ")
