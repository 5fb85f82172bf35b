"""The connection table: which connections are in it, under which number, and since when."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter._session import open_store
from kit.counters import make_store
from unit.net.fakes import Net, Peer, nets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd._core import Session, Store
    from counterd.protocols.counter._store import CounterStore


@pytest.fixture
def make_net() -> Iterator[Callable[..., Net]]:
    with nets() as make:
        yield make


def test_a_connection_is_found_by_its_id_until_it_ends(make_net: Callable[..., Net]) -> None:
    net = make_net()
    first, second = net.connect(), net.connect()
    assert list(net.server.connections) == [first.connection.number, second.connection.number]
    assert [net.server.find(peer.connection.id) for peer in (first, second)] == [first.connection, second.connection]
    gone, number = first.connection.id, first.connection.number
    first.lose()
    net.loop.run()
    third = net.connect()
    assert third.connection.number == number
    assert third.connection.id != gone
    for wrong in (gone, "", "-", "1", "x-1", f"{number}-", f"{number}-x", f"0{third.connection.id}", "9-9-9"):
        assert net.server.find(wrong) is None
    assert net.server.find(third.connection.id) is third.connection


def test_a_connection_stays_although_its_number_was_given_to_another(make_net: Callable[..., Net]) -> None:
    """The engine frees the number of a connection that has ended; that connection still gets its replies."""
    net = make_net()
    net.fill(6000)
    ended = net.connect()
    ended.send(wire.dump(1))
    ended.connection.input_ended()
    number = ended.connection.number
    while number not in [peer.connection.number for peer in net.peers[1:]]:
        net.connect()
    assert len(net.server.connections) == len(net.peers)
    assert net.server.connections[number] is net.peers[-1].connection
    assert net.server.find(ended.connection.id) is ended.connection
    assert len(ended.finish()) == 6000 * 36 + 12
    for peer in net.peers:
        peer.lose()
    assert net.server.connections == {}


def counted(make_net: Callable[..., Net]) -> tuple[Net, CounterStore]:
    store = make_store()
    store.limit_resumptions(60)
    return make_net(store), store


def token(peer: Peer) -> bytes:
    """Lets a connection hold something, and have a token."""
    peer.send(wire.acquire(1, b"p", 1, 1) + wire.resume(2, 1000))
    return wire.decode_resumption(wire.ResponseParser().feed(peer.recv())[1].body).token


@pytest.mark.parametrize("is_open", [True, False])
def test_a_resumed_connection_gets_the_number_of_the_old_one(make_net: Callable[..., Net], is_open: bool) -> None:
    net, _ = counted(make_net)
    first, second = net.connect(), net.connect()
    one, other = first.connection.number, second.connection.number
    stay = token(first)
    if not is_open:
        first.lose()
        net.loop.run()
    second.send(wire.resume(3, 1000, stay))
    net.loop.run()
    assert second.recv()[2] == 0
    assert second.connection.number == one
    expected = {one: second.connection, other: first.connection} if is_open else {one: second.connection}
    assert net.server.connections == expected
    assert all(net.server.find(connection.id) is connection for connection in expected.values())
    assert net.connect().connection.number == (3 if is_open else other)
    for peer in net.peers[1 - is_open :]:
        peer.lose()
    assert net.server.connections == {}


def test_a_killed_connection_keeps_no_holdings(make_net: Callable[..., Net]) -> None:
    net, store = counted(make_net)
    first, second = net.connect(), net.connect()
    token(first)
    net.server.kill(first.connection)
    net.loop.run()
    assert store.snapshot()["kept"] == 0
    second.send(wire.acquire(1, b"p", 1, 1))
    assert second.recv()[2] == 0


def test_the_descriptor_of_a_refused_connection_is_closed_at_once(make_net: Callable[..., Net]) -> None:
    """Not at the end of the batch: the next connection may need it."""
    net = make_net(max_connections=1)
    net.connect()
    ours, theirs = socket.socketpair()
    with ours:
        number = theirs.detach()
        net.protocol_port().accepted(number, None, 0)
        assert ours.recv(1) == b""
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(number)


def test_an_exception_during_admission_closes_that_connection(make_net: Callable[..., Net]) -> None:
    def mistaken(_store: Store) -> Session:
        raise ValueError("a mistake of ours")

    sizes = {"buckets": 1, "holdings": 1, "name_memory": 0, "hash_key": bytes(16), "figures": dict}
    net = make_net(open_store(make_session=mistaken, **sizes))
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(ValueError, match="a mistake of ours"):
            net.protocol_port().accepted(theirs.detach(), None, 0)
        net.loop.run()
        assert ours.recv(1) == b""
    assert len(net.server._table) == 0


def test_an_invalid_tls_context_closes_that_connection(make_net: Callable[..., Net]) -> None:
    net = make_net()
    net.server._table.context = object()
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(AttributeError):
            net.protocol_port(secure=True).accepted(theirs.detach(), None, 0)
        assert ours.recv(1) == b""
    assert len(net.server._table) == 0


# ---- with whom a peer shares -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "whom"),
    [
        ("192.0.2.1", (b"\xc0\0\2\1", False)),
        ("127.0.0.2", (b"\x7f\0\0\2", True)),
        ("::1", (bytes(15) + b"\1", True)),
        ("2001:db8:1:2:3:4:5:6", (b"\x20\x01\x0d\xb8\0\1\0\2", False)),
        ("2001:db8:1:2::", (b"\x20\x01\x0d\xb8\0\1\0\2", False)),
        (None, (b"user %d" % os.geteuid(), True)),
    ],
)
def test_connections_are_grouped_by_address_network_or_user(
    make_net: Callable[..., Net], address: str | None, whom: tuple[bytes, bool]
) -> None:
    net = make_net()
    ours, theirs = socket.socketpair()
    with ours:
        packed = ipaddress.ip_address(address).packed if address else None
        net.protocol_port().accepted(theirs.detach(), packed, 0)
        (connection,) = net.server.connections.values()
        assert connection.whom() == whom
