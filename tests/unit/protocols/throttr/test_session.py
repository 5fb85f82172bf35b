"""The throttr session: long work, and when subscribers get events.

Each request's reply, byte by byte, is in tests/conformance/throttr."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any

import pytest

from counterd._core import siphash
from counterd.protocols.throttr._session import open_store
from counterd.protocols.throttr.wire import Event, Reply, Request, TTLType
from unit.protocols.throttr.rig import (
    KEY,
    SECOND,
    Connection,
    Rig,
    fill,
    own_channel,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# ---- work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "waits"), [(4095, False), (4096, True), (50_000, True)])
def test_requests_behind_much_work_wait_for_a_turn(rig: Rig, steps: int, waits: bool) -> None:
    session = rig.store.session(rig.now)
    flood = bytes(rig.encoder.whoami()) * steps
    alone = len(session.receive(bytes(rig.encoder.whoami()), rig.now))
    output = session.receive(flood + bytes(rig.encoder.info()), rig.now)
    assert (len(output) <= steps * alone) == session.more == waits
    while session.more:
        output += session.take_output(rig.now)
    assert len(output) > steps * alone
    session.closed(rig.now)


def test_the_output_is_filled_to_the_last_byte(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(value_size=4)
    client = rig.connect()
    assert client.ask(rig.encoder.set(b"k", bytes((1 << 16) - 10), 60))
    output = client.session.receive(bytes(rig.encoder.get(b"k")) * 4 + bytes(rig.encoder.whoami()), rig.now)
    assert len(output) == 1 << 18
    assert client.session.more
    assert len(client.session.take_output(rig.now)) == 17


# ---- events ---------------------------------------------------------------------------------------------------------


def test_an_event_for_many_subscribers_is_delivered_in_slices(rig: Rig) -> None:
    publisher, *subscribers = [rig.connect() for _ in range(8000)]
    for subscriber in subscribers:
        subscriber.send(rig.encoder.subscribe(b"c"))
    publisher.send(rig.encoder.publish(b"c", b"payload"))
    assert publisher.received.pop().result is True
    ticks = 0
    while rig.store.next_deadline() == 0:
        ticks += 1
        rig.store.tick(rig.now)
        publisher.send(rig.encoder.query(b"nothing"))
        assert publisher.received.pop().result is None
        told = rig.store.take_dirty()
        assert len(told) <= 2200
        outputs = [session.take_output(rig.now) for session in told]
        assert len({id(output) for output in outputs}) == 1  # one object for all: the payload was copied once
    assert 3 < ticks < 20


def test_the_delivery_of_an_event_goes_on_while_keys_expire(rig: Rig, client: Connection) -> None:
    subscribers = [rig.connect() for _ in range(300)]
    for subscriber in subscribers:
        assert subscriber.ask(rig.encoder.subscribe(b"c"))
    fill(client, 20_000, ttl=500, ttl_type=TTLType.MILLISECONDS)
    rig.now += SECOND
    client.send(rig.encoder.publish(b"c", b"payload"))
    rig.store.tick(rig.now)
    assert rig.store.snapshot()["expired"] < 20_000
    assert len(rig.store.take_dirty()) == 300


def test_all_subscribers_get_events_in_the_same_order(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(500)]
    for client in clients:
        assert client.ask(rig.encoder.subscribe(b"c"))
    for client in clients[:10]:
        client.send(*(rig.encoder.publish(b"c", b"%d" % number) for number in range(3)))
    rig.settle()
    heard = [client.events() for client in clients]
    assert len(heard[0]) == 30
    assert all(events == heard[0] for events in heard)


def test_a_request_after_a_publish_is_answered_after_its_own_event(rig: Rig, client: Connection) -> None:
    """In one read with it: the reply may not overtake the event."""
    assert client.ask(rig.encoder.subscribe(b"c"))
    publish = rig.encoder.publish(b"c", b"payload")
    output = client.session.receive(publish + rig.encoder.query(b"k"), rig.now)
    while client.session.more:
        output += client.session.take_output(rig.now)
    assert output == b"\x19" + publish[1:] + b"\x01" + b"\x00"


def test_a_publish_waits_for_the_one_before_it(rig: Rig) -> None:
    one, other, *subscribers = [rig.connect() for _ in range(3000)]
    for subscriber in subscribers:
        subscriber.send(rig.encoder.subscribe(b"c"))
    one.send(rig.encoder.publish(b"c", b"first"))
    other.send(rig.encoder.publish(b"c", b"second"), rig.encoder.query(b"k"))
    assert len(one.received) == 1
    assert other.received == []
    rig.settle()
    assert [got.result for got in other.received] == [True, None]
    assert all(subscriber.events() == [b"first", b"second"] for subscriber in subscribers)


def test_subscribers_that_leave_during_a_delivery_are_skipped(rig: Rig) -> None:
    publisher, *subscribers = [rig.connect() for _ in range(1000)]
    for subscriber in subscribers:
        assert subscriber.ask(rig.encoder.subscribe(b"c"))
    publisher.send(rig.encoder.publish(b"c", b"payload"))
    chosen = random.Random(3)
    chosen.shuffle(subscribers)
    for subscriber in subscribers[:300]:
        subscriber.close()
    for subscriber in subscribers[300:600]:
        subscriber.send(rig.encoder.unsubscribe(b"c"))
    rig.settle()
    assert all(subscriber.events() == [b"payload"] for subscriber in subscribers[600:])
    assert len(publisher.ask(rig.encoder.channel(b"c"))) == 399


def test_a_delivery_goes_on_if_the_next_subscriber_unsubscribes(rig: Rig) -> None:
    """Its record is at once used by another subscription, on another channel."""
    publisher, outsider, *subscribers = [rig.connect() for _ in range(102)]
    for subscriber in subscribers:
        assert subscriber.ask(rig.encoder.subscribe(b"c"))
    publisher.send(rig.encoder.publish(b"c", b"payload"))
    rig.store.take_dirty()  # the last 64 have it, and the next in turn is:
    subscribers[-65].send(rig.encoder.unsubscribe(b"c"))
    outsider.send(rig.encoder.subscribe(b"other"))
    rig.settle()
    assert outsider.events() == subscribers[-65].events() == []
    assert all(other.events() == [b"payload"] for other in subscribers if other is not subscribers[-65])


def test_a_subscriber_that_a_delivery_waits_for_is_asked_again(make_rig: Callable[..., Rig]) -> None:
    """It got a piece of its output, and the caller has not come back for the rest, as its socket is full."""
    rig = make_rig(max_queued=4096)
    publisher, reader = rig.connect(), rig.connect()
    for _ in range(16):
        assert reader.ask(rig.encoder.subscribe(b"c"))
    publisher.send(rig.encoder.publish(b"c", bytes(30_000)))
    assert rig.store.take_dirty() == [reader.session]
    reader.take(reader.session.take_output(rig.now))
    assert reader.session.more
    publisher.send(rig.encoder.publish(b"c", b"next"))
    assert rig.store.take_dirty() == [reader.session]
    reader.session.wait()
    assert reader.session.dropped


def test_an_event_never_comes_within_a_listing(rig: Rig, client: Connection) -> None:
    fill(client, 20_000)
    other = rig.connect()
    client.send(rig.encoder.list())
    assert client.session.more
    other.send(rig.encoder.publish(b"*", b"meanwhile"))
    rig.settle()
    assert [type(got) for got in client.received] == [Reply, Event]
    assert len(client.received[0].result) == 20_000


def test_a_subscriber_that_does_not_read_is_dropped_and_others_get_all_events(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_queued=4096)
    publisher, deaf, listener = rig.connect(), rig.connect(), rig.connect()
    deaf.deaf = True
    for _ in range(5):
        assert publisher.ask(rig.encoder.publish(b"*", bytes(1000)))
    assert deaf.session.dropped
    assert deaf.session.closing
    assert rig.store.snapshot()["dropped_subscribers"] == 1
    assert len(listener.events()) == 5
    assert len(publisher.ask(rig.encoder.connections())) == 2


def test_a_subscriber_whose_turn_is_due_is_not_dropped(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_queued=4096)
    publisher, other = rig.connect(), rig.connect()
    channel = own_channel(other)
    publisher.send(*[rig.encoder.publish(channel, bytes(1000))] * 9)
    assert len(publisher.received) == 4  # the fourth is given, and the fifth heard, once the others were fetched
    rig.settle()
    assert len(publisher.received) == 9
    assert len(other.events()) == 9
    assert rig.store.snapshot()["dropped_subscribers"] == 0


def test_a_subscriber_that_stops_reading_delays_no_others(rig: Rig) -> None:
    """The caller is asked again whether the subscriber can take output, and then says that it cannot."""
    publisher, deaf, listener = rig.connect(), rig.connect(), rig.connect()
    channel = own_channel(listener)
    for _ in range(16):
        assert deaf.ask(rig.encoder.subscribe(b"c"))
    publisher.send(rig.encoder.publish(b"c", bytes(60_000)))
    rig.turn()  # fetches some of them, which the kernel does not take: nothing else tells of it
    assert deaf.session.more
    deaf.deaf = True
    publisher.send(rig.encoder.publish(b"c", bytes(60_000)))
    rig.settle()
    assert deaf.session.dropped
    assert publisher.ask(rig.encoder.publish(channel, b"still served"))
    assert listener.events() == [b"still served"]


def test_a_subscriber_without_room_for_output_is_asked_again_for_the_next_event(rig: Rig) -> None:
    publisher, other = rig.connect(), rig.connect()
    channel = own_channel(other)
    other.session.wait()
    publisher.send(rig.encoder.publish(channel, b"x"))
    assert rig.store.take_dirty() == [other.session]


def test_a_half_closed_subscriber_gets_posted_events(rig: Rig) -> None:
    publisher, subscriber = rig.connect(), rig.connect()
    channel = own_channel(subscriber)
    publisher.send(rig.encoder.publish(channel, b"last"))
    subscriber.take(subscriber.session.eof(rig.now))
    rig.settle()
    assert subscriber.events() == [b"last"]
    assert subscriber.session.closing
    assert not publisher.ask(rig.encoder.publish(channel, b"nobody"))


def test_a_waiting_request_within_an_event_is_answered_once(rig: Rig) -> None:
    one, other, *_ = [rig.connect() for _ in range(3000)]
    one.send(rig.encoder.publish(b"*", b"first"))
    other.send(rig.encoder.event(b"", rig.encoder.publish(b"*", b"second")))
    rig.settle()
    replies = [got for got in other.received if isinstance(got, Reply)]
    assert [got.result.result for got in replies] == [True]
    assert other.events() == [b"first", b"second"]
    assert one.ask(rig.encoder.info()).publish_requests == 2


def test_nested_events_cannot_produce_long_replies(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(value_size=4, max_message=1 << 16)
    client = rig.connect()
    request: Request[Any] = rig.encoder.insert(b"k", 1, 60)
    for _ in range(16):
        request = rig.encoder.event(b"", request)
    assert client.session.receive(bytes(request), rig.now) == b"\1" * 17
    request = rig.encoder.event(b"", request)
    assert client.session.receive(bytes(request), rig.now) == b"\1" * 16 + b"\0"
    deepest = b"\x19\0\0\0\0\0" * 10_000
    deepest = b"".join(b"\x19\0" + (len(deepest) - at - 6).to_bytes(4, "little") for at in range(0, len(deepest), 6))
    assert client.session.receive(deepest, rig.now) == b"\1" * 16 + b"\0"


def test_a_request_within_a_long_event_does_not_wait_for_ever(make_rig: Callable[..., Rig]) -> None:
    """The rest of the event is ignored. At 64 bytes a step it is more than a turn has steps."""
    rig = make_rig(value_size=4)
    client = rig.connect()
    for request in (rig.encoder.info(), rig.encoder.channel(b"*"), rig.encoder.list()):
        assert client.ask(rig.encoder.event(b"c", Request(request + bytes(300_000)))) is not None


def test_an_own_event_does_not_come_within_the_reply_that_published_it(rig: Rig, client: Connection) -> None:
    request = rig.encoder.event(b"", rig.encoder.event(b"", rig.encoder.publish(b"*", b"x")))
    client.send(request)
    rig.settle()
    assert [type(got) for got in client.received] == [Event, Reply]
    assert client.received[1].result.result.result is True
    (connection,) = client.ask(rig.encoder.connections())
    assert (connection.published_bytes, connection.received_bytes) == (1, 0)


def test_a_delivery_does_not_wait_for_a_connection_with_a_long_listing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_queued=4096)
    lister, publisher = rig.connect(), rig.connect()
    fill(lister, 20_000)
    channel = own_channel(lister)
    lister.send(rig.encoder.list())
    assert lister.session.more
    publisher.send(*[rig.encoder.publish(channel, bytes(1000))] * 5)
    assert len(publisher.received) == 5
    assert lister.session.dropped


def test_every_event_within_an_event_is_a_request(rig: Rig, client: Connection) -> None:
    client.ask(rig.encoder.event(b"", rig.encoder.event(b"", rig.encoder.whoami())))
    figures = rig.store.snapshot()
    assert (figures["command:event"], figures["command:whoami"]) == (2, 1)


def test_both_subscriptions_of_a_connection_count_the_bytes_read(rig: Rig, client: Connection) -> None:
    """Their sum is what the channel shows."""
    for _ in range(2):
        client.ask(rig.encoder.subscribe(b"news"))
    client.ask(rig.encoder.publish(b"news", b"four"))
    assert [entry.read_bytes for entry in client.ask(rig.encoder.channel(b"news"))] == [4, 4]
    assert [entry.read_bytes for entry in client.ask(rig.encoder.channels()) if entry.channel == b"news"] == [8]


def test_an_ended_connection_is_not_listed_before_the_next_tick(rig: Rig, client: Connection) -> None:
    other = rig.connect()
    own_channel(other)
    own = own_channel(client)
    other.close()
    client.send(rig.encoder.channels())
    (reply,) = client.received
    assert {(entry.channel, entry.subscriptions) for entry in reply.result} == {(b"*", 1), (own, 1)}


def test_ids_reveal_nothing_about_the_hashes_of_names() -> None:
    """A client that knew the hashes of names could aim all of them at one run of slots."""
    rig = Rig()
    ids = [rig.connect().ask(rig.encoder.whoami()) for _ in range(100)]
    for serial, found in enumerate(ids, 1):
        for word in range(2):
            name = struct.pack("<QQ", serial, word)  # what ids were once made of, under the key of the tables
            tag = siphash(KEY, name) >> 32
            assert tag.to_bytes(4, "little") != found[12:]
            assert tag >> 24 != found[7] or tag & 0xFFFF != int.from_bytes(found[4:6], "little")
    assert len({found[4:] for found in ids}) == len(ids)


@pytest.mark.parametrize("size", [0, 3, 5, 16, -2])
def test_only_four_value_sizes(size: int) -> None:
    with pytest.raises(ValueError, match=f"value_size must be 1, 2, 4 or 8 bytes, not {size}"):
        open_store(
            value_size=size,
            memory_limit=1 << 20,
            max_message=512,
            max_queued=512,
            expiry_grace_ns=0,
            hash_key=bytes(16),
            now_ns=0,
        )


def test_outcomes_are_counted_by_request_and_a_drain_changes_nothing(rig: Rig, client: Connection) -> None:
    encoder = rig.encoder
    client.send(encoder.insert(b"a", 1, 60), encoder.insert(b"a", 1, 60), encoder.query(b"b"), encoder.subscribe(b"c"))
    rig.store.begin_drain()
    client.send(encoder.unsubscribe(b"c"), encoder.unsubscribe(b"c"), encoder.insert(b"b", 1, 60), encoder.whoami())
    rig.settle()
    rig.connect().session.receive(b"\xff", rig.now)
    assert sorted(rig.store.outcomes()) == [
        ("insert", "ok", 2),
        ("insert", "refused", 1),
        ("query", "refused", 1),
        ("subscribe", "ok", 1),
        ("unknown", "framing_lost", 1),
        ("unsubscribe", "ok", 1),
        ("unsubscribe", "refused", 1),
        ("whoami", "ok", 1),
    ]


def test_a_drain_does_not_wait_for_subscriptions(rig: Rig, client: Connection) -> None:
    assert client.ask(rig.encoder.subscribe(b"c"))
    assert (rig.store.held(), rig.store.holdings_of(1), rig.store.leases(10)) == (0, 0, [])
