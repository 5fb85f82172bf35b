"""The throttr room's store: ids, memory, time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd._core import Store, siphash
from counterd.protocols.throttr._store import region_extra
from counterd.protocols.throttr.wire import Change, Reply, TTLType
from unit.protocols.throttr.rooms import (
    BLOCK,
    KEY,
    KEY_COST,
    MINUTE,
    SECOND,
    START,
    TICK,
    UNIX,
    Connection,
    Room,
    fill,
    key,
    own_channel,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_an_id_is_a_number_and_what_nobody_can_guess(make_room: Callable[..., Room]) -> None:
    """It looks like a random UUID."""
    room = make_room()
    for number in (1, 2):
        client = room.connect()
        halves = (siphash(KEY, number.to_bytes(8, "little") + half.to_bytes(8, "little")) for half in range(2))
        id = bytearray(b"".join(half.to_bytes(8, "little") for half in halves))
        id[:4] = number.to_bytes(4, "little")
        id[6], id[8] = id[6] & 0x0F | 0x40, id[8] & 0x3F | 0x80
        assert client.ask(room.encoder.whoami()) == id


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_over_the_limit_nothing_is_added_and_all_that_is_there_goes_on(make_room: Callable[..., Room]) -> None:
    room = make_room(memory_limit=1 << 16, value_size=4)
    client = room.connect()
    count = 0
    while client.ask(room.encoder.set(b"%d" % count, bytes(500), 60)):
        count += 1
    assert count == (1 << 16) // (KEY_COST + 9 * BLOCK)
    assert not client.ask(room.encoder.set(b"0", bytes(5000), 60))
    assert client.ask(room.encoder.get(b"0")).value == bytes(500)
    assert client.ask(room.encoder.set(b"0", b"small", 60))
    assert client.ask(room.encoder.set(b"other", bytes(300), 60))
    assert client.ask(room.encoder.update(b"1", 1, Change.PATCH, 100))
    assert client.ask(room.encoder.purge(b"1"))
    figures = room.store.snapshot()
    assert figures["used_memory"] <= figures["memory_limit"] == 1 << 16


@pytest.mark.parametrize(("lacking", "fits"), [(0, True), (1, False)])
def test_the_limit_is_met_to_the_byte(make_room: Callable[..., Room], lacking: int, fits: bool) -> None:
    client = make_room(memory_limit=KEY_COST + 5 * BLOCK - lacking).connect()
    assert client.ask(client.room.encoder.set(b"k", bytes(5 * 60 - 4), 60)) == fits


def test_keys_take_half_of_the_memory_at_most(make_room: Callable[..., Room]) -> None:
    room = make_room(memory_limit=1 << 20)
    client = room.connect()
    assert room.store.snapshot()["keys_max"] == 4096
    fill(client, 4096)
    room.now += SECOND
    client.send(*(room.encoder.insert(b"one more", 1, 60) for _ in range(1000)))
    assert [reply.result for reply in client.received] == [False] * 1000  # at once: there is nothing to make room of
    assert client.ask(room.encoder.subscribe(b"c"))
    assert client.ask(room.encoder.purge(key(7)))
    assert client.ask(room.encoder.insert(b"one more", 1, 60))


def test_the_region_has_a_place_for_each_key_channel_and_subscription() -> None:
    size = region_extra(4, 64, 64)
    assert region_extra(4, 128, 64) - size == 64 * 24
    assert region_extra(4, 64, 128) - size == 64 * 32
    assert region_extra(5, 64, 64) - size == 16 * 8 + 8 * 96


def test_there_is_a_channel_beside_each_record_and_a_subscription_beside_each_holding(
    make_room: Callable[..., Room],
) -> None:
    sizes: dict[str, Any] = {"buckets": 2 << 16, "holdings": 4 << 16, "name_memory": 1 << 16, "hash_key": KEY}
    store = Store(**sizes, extra=region_extra(9, sizes["buckets"], sizes["holdings"]))
    assert make_room(memory_limit=1 << 16).store.snapshot()["region"] == store.snapshot()["region"]


@pytest.mark.parametrize("limit", [1024 * BLOCK, 1025 * BLOCK, 1026 * BLOCK])
def test_subscriptions_count_and_those_that_all_have_do_not(make_room: Callable[..., Room], limit: int) -> None:
    room = make_room(memory_limit=limit)
    clients = [room.connect() for _ in range(200)]
    assert room.store.snapshot()["used_memory"] == 0
    count = 0
    while clients[0].ask(room.encoder.subscribe(b"%d" % count)):
        count += 1
    assert count == limit // (3 * BLOCK)
    assert not clients[1].ask(room.encoder.set(b"k", bytes(100), 60))
    clients[0].close()
    assert clients[1].ask(room.encoder.set(b"k", bytes(100), 60))


def test_subscriptions_leave_room_for_connections(room: Room, client: Connection) -> None:
    """However many channels a connection is subscribed to, others can come and have theirs."""
    encoder, count = room.encoder, 0
    for _ in range(200):
        client.send(*(encoder.subscribe(b"%d" % number) for number in range(count, count + 1000)))
        room.settle()
        count += 1000
    answers = [got.result for got in client.received if isinstance(got, Reply)]
    assert answers == sorted(answers, reverse=True)  # it is full at some time
    assert not answers[-1]
    assert answers.count(True) > 65_000
    others = [room.connect() for _ in range(100)]
    assert others[-1].ask(encoder.channel(own_channel(others[-1])))


def test_a_value_that_is_no_longer_than_before_always_fits(make_room: Callable[..., Room]) -> None:
    """Even where connections that were subscribed to nothing have gone, and what is used is beyond the limit."""
    room = make_room(memory_limit=1 << 16)
    client, other, others = room.connect(), room.connect(), [room.connect() for _ in range(20)]
    for connection in others:
        assert connection.ask(room.encoder.unsubscribe(own_channel(connection)))
        assert connection.ask(room.encoder.unsubscribe(b"*"))
    for number in range(40):
        assert other.ask(room.encoder.subscribe(b"%d" % number))
    while client.ask(room.encoder.set(b"%d" % room.store.snapshot()["keys"], bytes(500), 60)):
        pass
    for connection in others:
        connection.close()
    room.settle()
    assert room.store.snapshot()["used_memory"] > 1 << 16
    assert client.ask(room.encoder.set(b"0", b"y" * 500, 60))
    assert client.ask(room.encoder.set(b"1", b"y" * 300, 60))
    assert room.store.snapshot()["used_memory"] > 1 << 16
    assert not client.ask(room.encoder.set(b"0", b"y" * 600, 60))
    assert client.ask(room.encoder.get(b"0")).value == b"y" * 500


@pytest.mark.parametrize(("limit", "keys", "count"), [(1 << 20, 4096, 500), (1 << 13, 32, 10)])
def test_keys_that_have_expired_make_room_before_the_tick(
    make_room: Callable[..., Room], limit: int, keys: int, count: int
) -> None:
    """As many as one request can look at, and more."""
    room = make_room(memory_limit=limit)
    client = room.connect()
    fill(client, keys, ttl=1)
    room.now += 2 * SECOND
    client.send(*(room.encoder.insert(b"new-%d" % number, 1, 60) for number in range(count)))
    room.settle()
    assert [got.result for got in client.received] == [True] * count


def test_an_expired_key_whose_name_is_taken_before_the_tick_has_expired(room: Room, client: Connection) -> None:
    for request in (room.encoder.insert(b"k", 1, 1), room.encoder.set(b"k", b"v", 1)):
        client.send(request)
        room.now += SECOND
    client.send(room.encoder.insert(b"k", 1, 1))
    assert [got.result for got in client.received if isinstance(got, Reply)] == [True, True, True]
    assert room.store.snapshot()["expired"] == 2


def test_a_request_that_has_room_leaves_what_has_expired_to_the_tick(room: Room, client: Connection) -> None:
    fill(client, 10, ttl=1)
    room.now += 2 * SECOND
    client.send(room.encoder.insert(b"k", 1, 60))
    assert room.store.snapshot()["expired"] == 0
    room.settle()
    assert room.store.snapshot()["expired"] == 10


def test_nobody_is_subscribed_to_one_channel_without_end(room: Room, client: Connection) -> None:
    answers = [client.ask(room.encoder.subscribe(b"c")) for _ in range(20)]
    assert answers == [True] * 16 + [False] * 4
    assert client.ask(room.encoder.info()).subscriptions == 18
    assert client.ask(room.encoder.publish(b"c", b"x"))
    assert client.events() == [b"x"] * 16
    assert client.ask(room.encoder.unsubscribe(b"c"))
    assert client.ask(room.encoder.info()).subscriptions == 2


def test_who_was_subscribed_more_than_once_and_goes_takes_that_with_him(room: Room, client: Connection) -> None:
    for _ in range(3):
        assert client.ask(room.encoder.subscribe(b"c"))
    other = room.connect()
    for _ in range(2):
        assert other.ask(room.encoder.subscribe(b"c"))
    assert room.store.snapshot()["subscriptions"] == 2 + 3 + 2 + 2
    client.session.eof(room.now)
    client.close()
    room.settle()
    assert room.store.snapshot()["subscriptions"] == 2 + 2
    assert other.ask(room.encoder.unsubscribe(b"c"))
    other.close()
    room.settle()
    assert room.store.snapshot()["subscriptions"] == 0


@pytest.mark.parametrize("limit", [0, 1, 2048, 4096, 1 << 28])
def test_any_limit_makes_a_room(make_room: Callable[..., Room], limit: int) -> None:
    client = make_room(memory_limit=limit).connect()
    assert client.ask(client.room.encoder.insert(b"k", 1, 60)) == (limit >= KEY_COST)


def test_the_bytes_of_a_connection_are_all_that_it_sent_and_got(room: Room, client: Connection) -> None:
    sent = received = 0
    for request in (room.encoder.whoami(), b"".join(room.encoder.insert(key(n), 1, 60) for n in range(3000)), b"\x07"):
        output = client.session.receive(bytes(request), room.now)
        while client.session.more:
            output += client.session.take_output(room.now)
        sent, received = sent + len(request), received + len(output)
    (told,) = (told for told in room.connect().ask(room.encoder.connections()) if told.whoami_requests)
    assert (told.read_bytes, told.write_bytes) == (sent, received)


# ---- time -----------------------------------------------------------------------------------------------------------


def test_the_next_deadline_is_known_when_it_has_come_nearer(room: Room, client: Connection) -> None:
    assert room.store.next_deadline() == -1
    client.ask(room.encoder.insert(b"far", 1, 50))
    assert START < room.store.next_deadline() <= START + 50 * SECOND + (1 << 20)
    client.ask(room.encoder.insert(b"near", 1, 5, TTLType.MILLISECONDS))
    assert START < room.store.next_deadline() <= START + 5_000_000 + (1 << 20)


def test_many_that_expire_at_once_are_freed_in_slices_and_seen_by_nobody(room: Room, client: Connection) -> None:
    fill(client, 20_000, ttl=1)
    room.now += SECOND + TICK
    ticks = 0
    while 0 <= room.store.next_deadline() <= room.now:
        before = room.store.snapshot()["expired"]
        room.store.tick(room.now)
        assert room.store.snapshot()["expired"] - before <= 2048
        client.send(room.encoder.query(key(19_999 - ticks)))
        assert client.received.pop().result is None
        ticks += 1
        assert ticks < 100
    assert room.store.snapshot()["expired"] == 20_000
    assert client.ask(room.encoder.info()).keys == 0


def test_info_waits_until_what_has_expired_is_counted(room: Room, client: Connection) -> None:
    fill(client, 5000, ttl=1)
    room.now += SECOND + TICK
    client.send(room.encoder.info())
    assert client.received == []
    room.settle()
    assert client.received.pop().result.keys == 0


def test_figures_per_minute_are_those_of_the_last_whole_minute(room: Room, client: Connection) -> None:
    encoder = room.encoder
    client.ask(encoder.insert(b"k", 1, 60000))
    for _ in range(3):
        client.ask(encoder.query(b"k"))
    client.ask(encoder.update(b"k", 0, Change.INCREASE, 1))
    assert client.ask(encoder.stat(b"k")) == (0, 0, 4, 1)
    room.now += MINUTE
    assert client.ask(encoder.stat(b"k")) == (5, 1, 5, 1)
    info = client.ask(encoder.info())
    assert (info.query_requests, info.query_per_minute, info.info_per_minute) == (3, 3, 0)
    assert info.read_bytes_per_minute > 0
    room.now += MINUTE
    assert client.ask(encoder.stat(b"k")) == (1, 0, 6, 1)
    room.now += 2 * MINUTE
    assert client.ask(encoder.stat(b"k")) == (0, 0, 7, 1)
    info = client.ask(encoder.info())
    assert (info.query_per_minute, info.query_requests) == (0, 3)
    assert (info.stat_per_minute, info.stat_requests) == (0, 4)


@pytest.mark.parametrize("minute", [0, 1])
def test_a_new_key_has_not_been_used_in_the_clock_s_first_minutes_either(
    make_room: Callable[..., Room], minute: int
) -> None:
    client = make_room(start=minute * MINUTE).connect()
    encoder = client.room.encoder
    for _ in range(2):  # the second has the record of the first
        assert client.ask(encoder.insert(b"k", 1, 600))
        assert client.ask(encoder.stat(b"k")) == (0, 0, 0, 0)
        assert client.ask(encoder.update(b"k", 0, Change.INCREASE, 1))
        assert client.ask(encoder.purge(b"k"))


@pytest.mark.parametrize("start", [0, START])
def test_unix_time_is_what_the_caller_says(make_room: Callable[..., Room], start: int) -> None:
    room = make_room(start=start)
    client = room.connect()
    room.now += 5 * SECOND
    later = room.connect()
    info = later.ask(room.encoder.info())
    assert (info.timestamp, info.running_since) == (UNIX // SECOND + 5, UNIX)
    connected = {connection.id: connection.connected_at for connection in later.ask(room.encoder.connections())}
    assert connected[later.ask(room.encoder.whoami())] == UNIX + 5 * SECOND
    assert connected[client.ask(room.encoder.whoami())] == UNIX
    subscribed = {subscriber.id: subscriber.subscribed_at for subscriber in later.ask(room.encoder.channel(b"*"))}
    assert subscribed == connected
    later.ask(room.encoder.insert(b"k", 1, 10))
    room.store.set_wall(UNIX, room.now)  # somebody has set the clock back
    (entry,) = later.ask(room.encoder.list())
    assert entry.expires_at == UNIX + 10 * SECOND
    assert later.ask(room.encoder.info()).running_since == UNIX - 5 * SECOND


def test_a_ttl_without_end_ends_in_2262(make_room: Callable[..., Room]) -> None:
    client = make_room(value_size=8).connect()
    assert client.ask(client.room.encoder.insert(b"k", 1, (1 << 64) - 1, TTLType.HOURS))
    (entry,) = client.ask(client.room.encoder.list())
    assert entry.expires_at == (1 << 63) - 1


def test_the_longest_ttl_has_its_own_end(make_room: Callable[..., Room]) -> None:
    """A second more, and it ends when all do that have none."""
    client = make_room(value_size=8).connect()
    longest = ((1 << 63) - 1 - 60 * MINUTE - START) // SECOND
    for ttl, left in ((longest, longest - 1), (longest + 1, longest), (longest + 9, longest)):
        assert client.ask(client.room.encoder.insert(b"%d" % ttl, 1, ttl))
        assert client.ask(client.room.encoder.query(b"%d" % ttl)).ttl == left
