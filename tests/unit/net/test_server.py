"""A server's books: who is let in, who is cut off for reading too slowly, and what it counts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from counterd.net.server import STUCK_CHECK_S, Limits, Server
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp
from counterd.protocols.counter import wire
from counterd.protocols.counter._room import CounterSession, CounterStore
from property.model import KEY, make_store
from unit.net.fakes import FakeClock, Net, nets

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from counterd._core import Session

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)
S = 1_000_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("counterd.net.server.time", clock)
    return clock


@pytest.fixture
def make_net() -> Iterator[Callable[..., Net]]:
    with nets() as make:
        yield make


def pass_seconds(net: Net, clock: FakeClock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now_ns += S
        net.loop.fire()


def test_no_more_connections_than_the_limit(make_net: Callable[..., Net]) -> None:
    net = make_net(max_connections=2)
    peers = [net.connect() for _ in range(4)]
    assert [peer.transport.aborted for peer in peers] == [False, False, True, True]
    assert net.reports == ["rejected:max_connections"] * 2
    net.limit(max_connections=3)
    assert not net.connect().transport.aborted
    net.limit(max_connections=1)
    assert net.connect().transport.aborted
    assert not any(peer.transport.aborted for peer in peers[:2])
    figures = net.server.figures()
    assert (figures["connections_max"], figures["rejected:max_connections"]) == (1, 3)


def test_a_store_without_room_for_a_session_refuses(make_net: Callable[..., Net]) -> None:
    class Full(CounterStore):
        def session(self, now_ns: int = 0) -> Session:
            raise MemoryError("1048576 connections are open or leaving")

    net = make_net(Full(buckets=1, holdings=1, name_memory=0, hash_key=KEY, figures=dict))
    assert net.connect().transport.aborted
    assert net.server.figures()["rejected:memory"] == 1
    assert net.reports == ["rejected:memory"]
    assert net.server.connections == {}


def test_what_a_refused_session_had_already_is_given_back(make_net: Callable[..., Net]) -> None:
    class Late(CounterStore):
        def session(self, now_ns: int = 0) -> Session:
            session = CounterStore.session(self)
            session.receive(wire.acquire(1, b"a", 1, 1), now_ns)
            session.closed(now_ns)
            raise MemoryError("no room for its second")

    net = make_net(Late(buckets=1, holdings=1, name_memory=0, hash_key=KEY, figures=dict))
    assert net.connect().transport.aborted
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1


@pytest.mark.parametrize(("patience", "seconds"), [("user_timeout", 25), ("write_timeout", 5)])
def test_a_peer_that_takes_nothing_for_too_long_is_cut_off(
    make_net: Callable[..., Net], clock: FakeClock, patience: str, seconds: int
) -> None:
    net = make_net()
    peer, _ = net.clog(patience)
    assert net.loop.live_timers() == [STUCK_CHECK_S]
    assert net.server.figures()["stuck_outputs"] == 1
    pass_seconds(net, clock, seconds)
    assert not peer.transport.aborted
    pass_seconds(net, clock, 1)
    assert peer.transport.aborted
    assert net.loop.live_timers() == []
    peer.lose()
    figures = net.server.figures()
    assert (figures["slow_readers"], figures["stuck_outputs"], figures["vanished_peers"]) == (1, 0, 0)
    assert net.reports == ["slow_reader"]


def test_a_peer_that_takes_a_little_now_and_then_stays(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("write_timeout")
    for _ in range(5):
        pass_seconds(net, clock, 5)
        peer.transport.take(1)
        pass_seconds(net, clock, 1)
        assert not peer.transport.aborted
    pass_seconds(net, clock, 6)
    assert peer.transport.aborted


def test_a_peer_that_takes_less_than_comes_in_stays_too(make_net: Callable[..., Net], clock: FakeClock) -> None:
    """Output that is queued behind what was owed is no reason to cut off a peer that reads."""
    net = make_net()
    peer, _ = net.clog("write_timeout")
    for _ in range(5):
        peer.connection.data_received(NOOP * 100)
    for _ in range(20):
        peer.transport.take(1200)
        pass_seconds(net, clock, 1)
    assert not peer.transport.aborted


def test_the_patience_can_change(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("user_timeout")
    pass_seconds(net, clock, 10)
    net.limit(user_timeout=9)
    pass_seconds(net, clock, 1)
    assert peer.transport.aborted


def test_output_that_has_gone_out_is_stuck_no_more(make_net: Callable[..., Net], clock: FakeClock) -> None:
    net = make_net()
    peer, _ = net.clog("user_timeout")
    peer.recv_all()
    peer.transport.drain()
    assert net.server.figures()["stuck_outputs"] == 0
    pass_seconds(net, clock, 100)
    assert not peer.transport.aborted
    assert net.loop.live_timers() == []


def test_a_connection_that_is_lost_is_stuck_no_more(make_net: Callable[..., Net], clock: FakeClock) -> None:
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
def test_why_a_connection_was_lost_is_counted(
    make_net: Callable[..., Net], *, error: Exception | None, owed: bool, slow: int, vanished: int
) -> None:
    net = make_net()
    peer = net.clog()[0] if owed else net.connect()
    peer.lose(error)
    figures = net.server.figures()
    assert (figures["slow_readers"], figures["vanished_peers"]) == (slow, vanished)
    assert net.reports == ["slow_reader"] * slow + ["vanished"] * vanished


# ---- on a real loop -------------------------------------------------------------------------------------------------


def run(test: Callable[[asyncio.AbstractEventLoop], object]) -> None:
    """A coroutine function on uvloop."""
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(test(loop), 5))
    finally:
        loop.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_it_serves_and_is_empty_when_the_last_has_gone(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
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


def test_an_exception_out_of_a_session_closes_its_connection_and_no_other() -> None:
    class Mistaken(CounterSession):
        def receive(self, data: bytes, now_ns: int) -> bytes:
            if data == b"mistake":
                raise ValueError("a mistake of ours")
            return super().receive(data, now_ns)

    class Store(CounterStore):
        def session(self, now_ns: int = 0) -> Session:
            return Mistaken(self)

    async def test(loop: asyncio.AbstractEventLoop) -> None:
        errors: list[object] = []
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        store = Store(buckets=8, holdings=8, name_memory=0, hash_key=KEY, figures=dict)
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
    """A socket, and which limit its connections have."""
    if kind == "unix":
        return UnixSocket(str(path), 0o600).socket, "write_timeout"
    return open_tcp("127.0.0.1", 0, Keepalive(10, 5, 3, 25)), "user_timeout"


async def connect(kind: str, address: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if kind == "unix":
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address)
