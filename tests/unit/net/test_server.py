"""Server: which connections it admits, which slow readers it cuts off, and what it counts."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from conformance.sentinel import engine as sentinel
from counterd.net.access import Access
from counterd.net.admission import Limits
from counterd.net.server import STUCK_CHECK_S, Server
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp
from counterd.protocols.counter import wire
from counterd.protocols.counter._session import CounterSession, open_store
from counterd.protocols.counter._store import CounterStore
from counterd.protocols.sentinel import wire as tokens
from kit.counters import KEY, TURNS_MAX, make_store
from unit.net.fakes import FakeClock, Net, nets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from counterd._core import Session, Store
    from unit.net.fakes import Peer

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)
S = 1_000_000_000


@pytest.fixture
def clock() -> FakeClock:
    """The clock that the server reads; connections read the real one."""
    clock = FakeClock()
    clock.now_ns = time.monotonic_ns()
    return clock


@pytest.fixture
def make_net(clock: FakeClock) -> Iterator[Callable[..., Net]]:
    with nets() as make:
        yield functools.partial(make, clock=clock.monotonic_ns)


def pass_seconds(net: Net, clock: FakeClock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now_ns += S
        net.loop.fire()


def test_no_more_connections_than_the_limit(make_net: Callable[..., Net]) -> None:
    net = make_net(max_connections=2)
    peers = [net.connect() for _ in range(4)]
    assert [peer.closed for peer in peers] == [False, False, True, True]
    assert net.reports == ["rejected:max_connections"] * 2
    net.limit(max_connections=3)
    assert not net.connect().closed
    net.limit(max_connections=1)
    assert net.connect().closed
    assert not any(peer.closed for peer in peers[:2])
    figures = net.server.figures()
    assert (figures["connections_max"], figures["rejected:max_connections"]) == (1, 3)


def test_a_store_without_room_for_a_session_refuses(make_net: Callable[..., Net]) -> None:
    def full(_store: Store) -> Session:
        raise MemoryError("1048576 connections are open or ending")

    net = make_net(open_store(make_session=full, buckets=1, holdings=1, name_memory=0, hash_key=KEY, figures=dict))
    assert net.connect().closed
    assert net.server.figures()["rejected:memory"] == 1
    assert net.reports == ["rejected:memory"]
    assert net.server.connections == {}


def test_holdings_of_a_refused_session_are_given_back(make_net: Callable[..., Net]) -> None:
    class Late(CounterStore):
        def session(self, now_ns: int = 0, port: int = 0) -> Session:
            session = CounterStore.session(self)
            session.receive(wire.acquire(1, b"a", 1, 1), now_ns)
            session.closed(now_ns)
            raise MemoryError("no room for its second")

    sizes = {"buckets": 1, "holdings": 1, "name_memory": 0, "hash_key": KEY, "figures": dict}
    net = make_net(Late(make_session=CounterSession, **sizes))
    assert net.connect().closed
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1


@pytest.mark.parametrize(("patience", "seconds"), [("user_timeout", 25), ("write_timeout", 5)])
def test_a_peer_that_reads_nothing_for_too_long_is_cut_off(
    make_net: Callable[..., Net], clock: FakeClock, patience: str, seconds: int
) -> None:
    net = make_net()
    peer, _ = net.clog(patience)
    assert net.loop.live_timers() == [STUCK_CHECK_S]
    assert net.server.figures()["stuck_outputs"] == 1
    pass_seconds(net, clock, seconds)
    assert not peer.closed
    pass_seconds(net, clock, 1)
    assert peer.closed
    assert net.loop.live_timers() == []
    peer.lose()
    figures = net.server.figures()
    assert (figures["slow_readers"], figures["stuck_outputs"], figures["vanished_peers"]) == (1, 0, 0)
    assert net.reports == ["slow_reader"]


def test_a_peer_that_reads_a_little_now_and_then_stays(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("write_timeout")
    for _ in range(5):
        pass_seconds(net, clock, 3)
        peer.take(4096)
        assert not peer.closed
    pass_seconds(net, clock, 7)
    assert peer.closed


def test_a_peer_that_reads_more_slowly_than_output_comes_stays(make_net: Callable[..., Net], clock: FakeClock) -> None:
    """Output that is queued behind older output is no reason to cut off a peer that reads."""
    net = make_net()
    peer, _ = net.clog("write_timeout")
    for _ in range(5):
        peer.connection.received(NOOP * 100)
    for _ in range(20):
        peer.take(4096)
        pass_seconds(net, clock, 1)
    assert not peer.closed


def test_the_time_limit_for_slow_readers_can_change(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("user_timeout")
    pass_seconds(net, clock, 10)
    net.limit(user_timeout=9)
    pass_seconds(net, clock, 1)
    assert peer.closed


def test_sent_output_no_longer_counts_as_stuck(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("user_timeout")
    peer.recv_all()
    peer.drain()
    assert net.server.figures()["stuck_outputs"] == 0
    pass_seconds(net, clock, 100)
    assert not peer.closed
    assert net.loop.live_timers() == []


def test_a_lost_connection_no_longer_counts_as_stuck(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("user_timeout")
    peer.lose(ConnectionResetError())
    pass_seconds(net, clock, 100)
    assert (net.server.figures()["slow_readers"], net.reports) == (0, [])


@pytest.mark.parametrize(
    ("error", "owed", "slow", "vanished"),
    [
        (TimeoutError(), True, 1, 0),
        (TimeoutError(), False, 0, 1),
        (ConnectionResetError(), True, 0, 0),
        (ConnectionResetError(), False, 0, 0),
        (None, False, 0, 0),
    ],
)
def test_lost_connections_are_counted_by_cause(
    make_net: Callable[..., Net], *, error: Exception | None, owed: bool, slow: int, vanished: int
) -> None:
    net = make_net()
    peer = net.clog()[0] if owed else net.connect()
    peer.lose(error)
    figures = net.server.figures()
    assert (figures["slow_readers"], figures["vanished_peers"]) == (slow, vanished)
    assert net.reports == ["slow_reader"] * slow + ["vanished"] * vanished


# ---- who may connect ------------------------------------------------------------------------------------------------


class Reached(Net):
    """A server that listens on 127.0.0.1, where a test connects from any address of that network."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.listening = open_tcp("127.0.0.1", 0, Keepalive(10, 5, 3, 25))
        self.server.listen(self.listening)
        self.batch = self.server._poller.run
        self.clients: list[socket.socket] = []

    def reach(self, address: str = "127.0.0.1") -> socket.socket:
        self.clients.append(socket.create_connection(self.listening.getsockname(), source_address=(address, 0)))
        self.clients[-1].settimeout(5)
        self.batch()
        return self.clients[-1]

    def addresses(self) -> list[str]:
        return [connection.peer()[0] for connection in self.server.connections.values()]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.batch()
        self.loop.run()
        self.server.part()
        assert sum(self.server.addresses.values()) == len(self.server.connections)
        assert 0 not in self.server.addresses.values()
        super().close()


@pytest.fixture
def make_reached() -> Iterator[Callable[..., Reached]]:
    made: list[Reached] = []
    yield lambda **limits: made.append(Reached(**limits)) or made[-1]  # type: ignore[func-returns-value]
    for each in made:
        each.close()


def networks(*texts: str) -> Access:
    return Access(tuple(map(ipaddress.ip_network, texts)))


def test_only_addresses_that_are_allowed_may_connect(make_reached: Callable[..., Reached]) -> None:
    net = make_reached(access=networks("127.0.0.2", "127.3.0.0/16"))
    for address in ("127.0.0.1", "127.0.0.2", "127.3.255.1", "127.4.0.1"):
        net.reach(address)
    assert net.addresses() == ["127.0.0.2", "127.3.255.1"]
    assert net.clients[0].recv(1) == b""
    assert net.reports == ["rejected:allow"] * 2
    assert net.server.figures()["rejected:allow"] == 2
    net.limit(access=networks("127.0.0.1"))
    net.reach()
    assert net.addresses() == ["127.0.0.2", "127.3.255.1", "127.0.0.1"]


def test_connections_of_an_address_are_counted_before_a_limit_is_set(make_reached: Callable[..., Reached]) -> None:
    net = make_reached()
    first, _ = net.reach("127.0.0.2"), net.reach("127.0.0.2")
    net.limit(max_per_address=2)
    assert net.reach("127.0.0.2").recv(1) == b""
    net.reach("127.0.0.3")
    assert net.server.figures()["rejected:per_address"] == 1
    assert net.addresses() == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
    first.close()
    net.batch()
    net.reach("127.0.0.2")
    assert net.addresses() == ["127.0.0.2", "127.0.0.3", "127.0.0.2"]


def test_a_refusal_names_the_first_limit_that_was_reached(make_reached: Callable[..., Reached]) -> None:
    net = make_reached(max_connections=1, max_per_address=1, access=networks("127.0.0.1", "127.0.0.2"))
    for address in ("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.3"):
        net.reach(address)
    net.limit(max_connections=2)
    net.reach("127.0.0.1")
    assert net.reports == [
        f"rejected:{cause}" for cause in ("max_connections", "max_connections", "allow", "per_address")
    ]


@pytest.mark.parametrize(
    ("users", "groups", "allowed"),
    [
        ({os.geteuid()}, (), True),
        ((), {os.getegid()}, True),
        ({os.geteuid() + 1}, {os.getegid() + 1_000_000}, False),
        ((), {os.getgroups()[-1]} if os.getgroups() else {os.getegid()}, True),
    ],
)
def test_only_processes_that_are_allowed_may_connect(
    make_net: Callable[..., Net], *, users: set[int], groups: set[int], allowed: bool
) -> None:
    net = make_net(access=Access(networks("203.0.113.0/24").networks, frozenset(users), frozenset(groups)))
    peer = net.connect()
    assert peer.closed is not allowed
    assert net.reports == [] if allowed else ["rejected:allow"]
    if allowed:
        assert peer.connection.origin() == f"unix uid={os.geteuid()} pid={os.getpid()}"


# ---- who is there ---------------------------------------------------------------------------------------------------


def test_killed_connections_are_counted(make_net: Callable[..., Net]) -> None:
    net = make_net()
    peer = net.connect()
    net.server.kill(peer.connection)
    assert peer.closed
    assert net.server.figures()["killed"] == 1


def test_the_address_of_a_closed_connection_is_known(make_reached: Callable[..., Reached]) -> None:
    net = make_reached()
    port = net.reach("127.0.0.7").getsockname()[1]
    (connection,) = net.server.connections.values()
    net.server.kill(connection)
    net.loop.run()
    assert connection.peer() == ("127.0.0.7", port)
    assert connection.origin() == f"127.0.0.7:{port}"


@pytest.mark.needs("ipv6")
def test_an_ipv4_address_on_an_ipv6_socket_matches_ipv4_networks(make_net: Callable[..., Net]) -> None:
    net = make_net(access=networks("127.0.0.0/8", "::1"))
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        listening.setblocking(False)
        net.server.listen(listening)
        batch = net.server._poller.run
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as old, socket.create_connection(("::1", port)) as new:
            batch()
            origins = [connection.origin() for connection in net.server.connections.values()]
            assert origins == [f"127.0.0.1:{old.getsockname()[1]}", f"[::1]:{new.getsockname()[1]}"]
        batch()
        net.loop.run()
        net.server.part()


# ---- how much, and how often ----------------------------------------------------------------------------------------


def frozen(net: Net, peer: Peer) -> float | None:
    """For how long reading has been suspended, if it is; checked once a second."""
    timers = net.loop.live_timers()
    assert bool(timers) is not peer.reading
    left = (peer.connection.paid_ns - time.monotonic_ns()) / S
    assert timers == ([pytest.approx(min(1, left), abs=0.1)] if timers else [])
    return left if timers else None


def test_a_connection_over_its_request_rate_is_paused(make_net: Callable[..., Net]) -> None:
    net = make_net(requests_per_second=10)
    peer = net.connect()
    peer.send(NOOP * 10)
    assert peer.recv() == REPLY * 10
    assert frozen(net, peer) is None
    peer.send(NOOP * 20)
    assert peer.recv() == REPLY * 20  # what was read is answered
    assert frozen(net, peer) == pytest.approx(2, abs=0.2)
    assert net.server.figures()["slowed"] == 1
    assert net.reports == ["slowed"]
    net.loop.fire()  # the loop's time is not the connection's, by which nothing has passed
    assert frozen(net, peer) == pytest.approx(2, abs=0.2)
    assert net.server.figures()["slowed"] == 1


def test_a_connection_within_its_request_rate_is_never_paused(make_net: Callable[..., Net]) -> None:
    net = make_net(requests_per_second=1_000_000)
    peer = net.connect()
    for _ in range(100):
        peer.send(NOOP * 100)
        assert peer.recv() == REPLY * 100
    assert frozen(net, peer) is None
    net.limit(requests_per_second=2)
    peer.send(NOOP)  # what it sent before is not held against it
    assert frozen(net, peer) is None
    net.limit(requests_per_second=0)
    peer.send(NOOP * 100)
    assert frozen(net, peer) is None


def test_requests_executed_in_later_turns_count_for_the_rate(make_net: Callable[..., Net]) -> None:
    net = make_net(requests_per_second=100)
    peer = net.connect()
    peer.send(b"".join(wire.acquire(1, b"%d" % number, 1, 1) for number in range(1000)))  # of new names: much work
    assert not peer.reading
    assert peer.recv().count(b"\x91\x02") < 1000
    peer.finish()
    assert not peer.reading
    net.loop.fire()  # the timer was for the first of them
    assert frozen(net, peer) == pytest.approx(9, abs=0.9)
    net.limit(requests_per_second=0)
    net.loop.fire()
    assert peer.reading


@pytest.mark.parametrize("rate", [0, 500])
def test_a_changed_rate_ends_the_pause(make_net: Callable[..., Net], rate: int) -> None:
    net = make_net(requests_per_second=1)
    peer = net.connect()
    peer.send(NOOP * 900)
    net.limit(requests_per_second=rate)
    before = time.monotonic_ns()
    net.loop.fire()
    assert frozen(net, peer) is None
    assert peer.connection.active_ns >= before  # it was kept from sending
    peer.send(NOOP * 400)
    assert frozen(net, peer) is None


@pytest.mark.parametrize("last", [0, 1, 200])
def test_a_throttled_connection_is_read_at_once_after_a_half_close(
    make_reached: Callable[..., Reached], last: int
) -> None:
    """The peer may be gone, and its holdings have to come back; all its earlier requests are still answered."""
    net = make_reached(requests_per_second=1)
    client = net.reach()
    client.sendall(NOOP * 42)
    net.batch()
    assert len(client.recv(1000)) == 42 * len(REPLY)
    client.sendall(NOOP * last + NOOP[:11])
    for _ in range(3):
        net.loop.fire()
        net.batch()
    (connection,) = net.server.connections.values()
    assert connection.requests == 42
    client.shutdown(socket.SHUT_WR)
    for _ in range(TURNS_MAX):
        if net.server.connections:
            net.batch()
    assert net.server.connections == {}
    assert net.loop.live_timers() == []
    assert connection.requests == 42 + last
    assert net.server.figures()["slowed"] == 1
    with client.makefile("rb") as replies:
        assert replies.read() == REPLY * last


def test_a_throttled_connection_that_is_reset_ends_at_once(make_reached: Callable[..., Reached]) -> None:
    net = make_reached(requests_per_second=1)
    client = net.reach()
    client.sendall(NOOP * 100)
    net.batch()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    net.batch()
    assert net.server.connections == {}
    assert net.loop.live_timers() == []


def test_the_half_close_is_watched_only_while_throttled(make_net: Callable[..., Net]) -> None:
    net = make_net(requests_per_second=1)
    peer = net.connect()
    peer.send(NOOP * 9)
    assert peer.connection.stream.heeding
    net.limit(requests_per_second=0)
    net.loop.fire()
    assert peer.reading
    assert not peer.connection.stream.heeding


def test_throttling_ends_with_the_connection(make_net: Callable[..., Net]) -> None:
    net = make_net(requests_per_second=1)
    lost, parting, ended, broken = [net.connect() for _ in range(4)]
    for peer in (lost, parting):
        peer.send(NOOP * 9)
        assert not peer.reading
    lost.lose()
    parting.connection.part()
    assert parting.output_ended
    assert parting.reading
    ended.send(NOOP * 9)
    ended.connection.input_ended()
    assert ended.closed
    broken.send(NOOP * 9 + b"\x55" * 12)
    assert broken.reading
    assert broken.output_ended
    for peer in (parting, ended, broken):
        peer.lose()
    assert net.loop.live_timers() == []


def test_parting_from_a_throttled_connection_answers_received_requests(make_reached: Callable[..., Reached]) -> None:
    net = make_reached(requests_per_second=1)
    client = net.reach()
    client.sendall(NOOP * 100)
    net.batch()
    net.server.part()
    for _ in range(3):
        net.batch()
    with client.makefile("rb") as replies:
        assert replies.read() == REPLY * 100


def test_reads_of_rate_limited_connections_are_short(make_reached: Callable[..., Reached]) -> None:
    net = make_reached(requests_per_second=50)
    net.reach().sendall(NOOP * 2000)
    for requests in (50, 100):
        net.batch()
        (connection,) = net.server.connections.values()
        assert connection.requests == requests
    net.limit(requests_per_second=0)
    net.loop.fire()
    net.batch()
    assert connection.requests == 2000


# ---- those that say nothing -----------------------------------------------------------------------------------------


def test_an_idle_connection_is_closed_after_idle_timeout(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net(idle_timeout=60)
    quiet = [net.connect() for _ in range(3)]
    assert net.loop.live_timers() == [7.5]
    clock.now_ns += 59 * S
    net.loop.fire()
    assert not any(peer.closed for peer in quiet)
    clock.now_ns += 2 * S
    net.loop.fire()
    assert all(peer.closed for peer in quiet)
    assert net.server.figures()["idle_closed"] == 3
    assert net.reports == ["idle"] * 3


def test_a_connection_with_a_waiting_request_is_not_idle(make_net: Callable[..., Net], clock: FakeClock) -> None:
    store = sentinel.make_store(now_ns=clock.now_ns)
    calls: list[Any] = []
    store.delegate(calls.extend, 1000 * S)
    net = make_net(store, idle_timeout=60)
    peer = net.connect()
    peer.send(tokens.acquire(1, 1, 1))
    store.tick(clock.now_ns)
    clock.now_ns += 1000 * S
    assert net.server._table.idle_among(0, 100, clock.now_ns) == ([], False)
    store.answer(calls[0].ticket, 1, 0, clock.now_ns)
    assert net.server._table.idle_among(0, 100, clock.now_ns) == ([peer.connection], False)


def test_a_connection_that_the_server_does_not_read_is_not_idle(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net(idle_timeout=60, requests_per_second=1)
    net.fill(4000)
    clogged, _ = net.clog()
    slowed, parting, active, waiting = [net.connect() for _ in range(4)]
    slowed.send(NOOP * 9)
    waiting.send(wire.dump(1))  # the rest of which comes in later turns
    parting.connection.part()
    clock.now_ns += 1000 * S
    idle, more = net.server._table.idle_among(0, 100, clock.now_ns)
    assert (idle, more) == ([active.connection], False)
    assert net.server._table.idle_among(0, 100, time.monotonic_ns() - S) == ([], False)
    clogged.recv_all()
    clogged.drain()
    assert clogged.connection.active_ns > active.connection.active_ns


def test_a_connection_with_unread_requests_is_not_idle(make_net: Callable[..., Net], clock: FakeClock) -> None:
    """Input that came while the process was stopped for longer than the timeout is read after the timers."""
    net = make_net(idle_timeout=60)
    waiting, idle = net.connect(), net.connect()
    clock.now_ns += 1000 * S
    waiting.socket.send(NOOP)
    assert net.server._table.idle_among(0, 100, clock.now_ns) == ([idle.connection], False)
    net.poller.run()
    assert len(waiting.recv()) == wire.HEADER_SIZE


def test_idle_connections_are_looked_for_in_slices(
    make_net: Callable[..., Net], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterd.net.server.IDLE_CHECKS", 2)
    net = make_net(idle_timeout=1)
    quiet = [net.connect() for _ in range(5)]
    clock.now_ns += 2 * S
    net.loop.fire()
    looked_at = [sum(peer.closed for peer in quiet)]
    while net.loop.turn():
        looked_at.append(sum(peer.closed for peer in quiet))
    assert looked_at[:3] == [1, 3, 5]
    assert net.loop.live_timers() == [0.25]


def test_idle_timeout_can_change(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer = net.connect()
    clock.now_ns += 10 * S
    assert net.loop.live_timers() == []
    net.limit(idle_timeout=8)
    assert net.loop.live_timers() == [1.0]
    net.loop.fire()
    assert peer.closed
    net.limit(idle_timeout=0)
    assert net.loop.live_timers() == []
    net.limit(idle_timeout=8)
    net.server.part()
    assert 1.0 not in net.loop.live_timers()


# ---- on a real loop -------------------------------------------------------------------------------------------------


def run(test: Callable[[asyncio.AbstractEventLoop], object]) -> None:
    """Runs a coroutine function on uvloop."""
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(test(loop), 5))
    finally:
        loop.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_server_is_empty_when_its_last_connection_has_ended(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        store = make_store()
        server = Server(loop, store, Limits(10, 25, 25), lambda *_: None)
        path = tmp_path_factory.mktemp("s") / "s"
        listening, patience = open_listening(kind, path)
        address = listening.getsockname()
        server.listen(listening)
        await server.emptied()
        reader, writer = await connect(kind, address)
        writer.write(wire.acquire(1, b"a", 1, 1) + NOOP)
        assert (await reader.readexactly(28))[16:] == REPLY
        assert [connection.patience for connection in server.connections.values()] == [patience]
        server.part()
        writer.close()
        await server.emptied()
        assert server.connections == {}
        await asyncio.sleep(0)  # the driver's turn
        assert store.snapshot()["given_back"] == 1
        with pytest.raises(OSError, match="refused"):
            await connect(kind, address)

    run(test)


def test_an_exception_in_a_session_closes_its_connection_and_no_other() -> None:
    class Mistaken(CounterSession):
        def receive(self, data: bytes, now_ns: int) -> bytes:
            if data == b"mistake":
                raise ValueError("a mistake of ours")
            return super().receive(data, now_ns)

    async def test(loop: asyncio.AbstractEventLoop) -> None:
        errors: list[object] = []
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        sizes = {"buckets": 8, "holdings": 8, "name_memory": 0, "hash_key": KEY, "figures": dict}
        store = open_store(make_session=Mistaken, **sizes)
        server = Server(loop, store, Limits(10, 25, 25), lambda *_: None)
        listening, _ = open_listening("tcp", None)
        address = listening.getsockname()
        server.listen(listening)
        mistaken, other = await connect("tcp", address), await connect("tcp", address)
        for reader, writer in (mistaken, other):
            writer.write(wire.acquire(1, b"a", 1, 2))
            assert len(await reader.readexactly(16)) == 16
        mistaken[1].write(b"mistake")
        assert await mistaken[0].read() == b""
        other[1].write(wire.get(1, b"a"))
        assert (await other[0].readexactly(16))[-4:] == b"\0\0\0\1"
        assert [str(error) for error in errors] == ["a mistake of ours"]
        for _, writer in (mistaken, other):
            writer.close()
        server.part()
        await server.emptied()

    run(test)


def open_listening(kind: str, path: Path | None) -> tuple[socket.socket, str]:
    """A listening socket, and which limit applies to its connections."""
    if kind == "unix":
        return UnixSocket(str(path), 0o600).socket, "write_timeout"
    return open_tcp("127.0.0.1", 0, Keepalive(10, 5, 3, 25)), "user_timeout"


async def connect(kind: str, address: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if kind == "unix":
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address)
