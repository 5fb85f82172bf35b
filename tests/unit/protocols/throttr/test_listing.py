"""The listings of the throttr protocol: long replies in pieces, while keys and connections come and go."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest

from counterd.protocols.throttr.wire import TTLType
from unit.protocols.throttr.rig import SECOND, Connection, Rig, fill, key


def test_a_long_listing_comes_in_pieces_and_others_are_served_between(rig: Rig, client: Connection) -> None:
    fill(client, 30_000)
    other = rig.connect()
    client.send(rig.encoder.list())
    turns = 0
    while client.session.more:
        turns += 1
        other.send(rig.encoder.query(key(turns)))
        assert other.received.pop().result.quota == 1
        rig.turn()
    assert turns > 10
    (reply,) = client.received
    assert sorted(entry.key for entry in reply.result) == [key(number) for number in range(30_000)]


@pytest.mark.parametrize("opcode", ["list", "stats"])
def test_keys_that_exist_throughout_a_listing_appear_once(rig: Rig, opcode: str) -> None:
    client, other = rig.connect(), rig.connect()
    fill(client, 12_000)
    chosen = random.Random(7)
    gone, made = set(), 12_000
    client.send(getattr(rig.encoder, opcode)())
    while client.session.more:
        for _ in range(40):
            number = chosen.randrange(12_000)
            gone.add(key(number))
            other.send(rig.encoder.purge(key(number)), rig.encoder.insert(key(made), 1, 9))
            made += 1
        rig.turn()
    rig.store.audit()
    (reply,) = client.received
    listed = [entry.key for entry in reply.result]
    assert len(set(listed)) == len(listed)
    assert {key(number) for number in range(12_000)} - gone <= set(listed)
    assert set(listed) <= {key(number) for number in range(12_000)}


def test_keys_that_expire_during_a_listing_leave_fragments_empty(rig: Rig, client: Connection) -> None:
    fill(client, 6000, ttl=500, ttl_type=TTLType.MILLISECONDS)
    fill(client, 10, start=6000)
    client.send(rig.encoder.list())
    assert client.session.more
    rig.now += SECOND
    rig.settle()
    (reply,) = client.received
    assert {key(number) for number in range(6000, 6010)} <= {entry.key for entry in reply.result}
    assert len(reply.result) < 6000


def test_all_connections_and_channels_are_listed(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(300)]
    for number, client in enumerate(clients):
        assert client.ask(rig.encoder.subscribe(b"channel-%d" % (number % 100)))
    ids = {client.ask(rig.encoder.whoami()) for client in clients}
    assert len(ids) == 300
    told = clients[0].ask(rig.encoder.connections())
    assert [len(told), {connection.id for connection in told}] == [300, ids]
    channels = {entry.channel: entry.subscriptions for entry in clients[0].ask(rig.encoder.channels())}
    assert channels == {b"*": 300} | {id.hex().encode(): 1 for id in ids} | {b"channel-%d" % n: 3 for n in range(100)}


def test_a_channel_with_more_subscribers_than_a_piece_has_room_for(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(3000)]
    ids = {client.ask(rig.encoder.whoami()) for client in clients[:5]}
    told = clients[0].ask(rig.encoder.channel(b"*"))
    assert len(told) == len({subscriber.id for subscriber in told}) == 3000
    assert ids < {subscriber.id for subscriber in told}


def test_a_subscriber_that_ends_during_a_listing_leaves_an_entry_without_id(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(3000)]
    clients[0].send(rig.encoder.channel(b"*"))
    gone = 0
    while clients[0].session.more:
        clients.pop().close()
        gone += 1
        rig.turn()
    (reply,) = clients[0].received
    assert 3000 - gone <= len(reply.result) <= 3000
    ids = [subscriber.id for subscriber in reply.result if subscriber.id != bytes(16)]
    assert len(set(ids)) == len(ids) >= 3000 - gone > 2000
    rig.settle()


def test_a_subscription_made_during_a_listing_replaces_no_entry(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(3000)]
    for client in clients:
        client.send(rig.encoder.whoami())  # answered at once: to settle would look at all of them, each time
    ids = {client.received.pop().result for client in clients}
    other = clients.pop()
    clients[0].send(rig.encoder.channel(b"*"))
    while clients[0].session.more:
        for client in clients[1:300]:
            client.send(rig.encoder.subscribe(b"*"))
        rig.turn()
    told = clients[0].received.pop().result
    assert {subscriber.id for subscriber in told} >= ids
    assert other.session in rig.connections


class Owner:
    """Owns a session, as a connection does. When it is asked for its peer, it runs the garbage collector."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def peer(self) -> tuple[str, int]:
        gc.collect()
        return "::1", 7


def test_a_connection_whose_session_is_collected_while_it_is_listed_has_no_address(rig: Rig) -> None:
    """The next tick removes it."""
    client, gone = rig.connect(), rig.connect()
    for connection in (client, gone):
        connection.session.owner = Owner(connection.session)
    gc.disable()
    del rig.connections[gone.session], gone, connection
    client.send(rig.encoder.connections())
    gc.enable()
    (reply,) = client.received
    assert [entry.port for entry in reply.result] == [7, 0]
    rig.settle()
    assert len(client.ask(rig.encoder.connections())) == 1
