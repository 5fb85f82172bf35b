"""The throttr protocol's store: ids, memory, time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd._core import siphash
from counterd.protocols.throttr._session import ThrottrSession
from counterd.protocols.throttr._store import ThrottrStore
from counterd.protocols.throttr.wire import Change, Reply, TTLType
from unit.protocols.throttr.rig import (
    BLOCK,
    KEY,
    KEY_COST,
    MINUTE,
    SECOND,
    START,
    TICK,
    UNIX,
    Connection,
    Rig,
    fill,
    key,
    own_channel,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_connection_id_is_the_keyed_hash_of_a_number(make_rig: Callable[..., Rig]) -> None:
    """It looks like a random UUID; its key is derived from a text that is too long to be a name."""
    rig = make_rig()
    id_key = b"".join(siphash(KEY, bytes([half, *bytes(255)])).to_bytes(8, "little") for half in range(2))
    for number in (1, 2):
        client = rig.connect()
        halves = (siphash(id_key, number.to_bytes(8, "little") + half.to_bytes(8, "little")) for half in range(2))
        id = bytearray(b"".join(half.to_bytes(8, "little") for half in halves))
        id[:4] = number.to_bytes(4, "little")
        id[6], id[8] = id[6] & 0x0F | 0x40, id[8] & 0x3F | 0x80
        assert client.ask(rig.encoder.whoami()) == id


class Curious:
    """Owns a session, and reads the store when it is asked for its peer."""

    def __init__(self, store: ThrottrStore) -> None:
        self.store = store

    def peer(self) -> tuple[str, int]:
        self.store.snapshot()
        return "", 0


def test_the_store_refuses_a_nested_call(rig: Rig, client: Connection) -> None:
    client.session.owner = Curious(rig.store)
    with pytest.raises(RuntimeError, match="a call is in progress"):
        client.session.receive(bytes(rig.encoder.connections()), rig.now)
    client.close()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_beyond_the_memory_limit_nothing_is_added_and_existing_keys_go_on(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(memory_limit=1 << 16, value_size=4)
    client = rig.connect()
    count = 0
    while client.ask(rig.encoder.set(b"%d" % count, bytes(500), 60)):
        count += 1
    assert count == (1 << 16) // (KEY_COST + 9 * BLOCK)
    assert not client.ask(rig.encoder.set(b"0", bytes(5000), 60))
    assert client.ask(rig.encoder.get(b"0")).value == bytes(500)
    assert client.ask(rig.encoder.set(b"0", b"small", 60))
    assert client.ask(rig.encoder.set(b"other", bytes(300), 60))
    assert client.ask(rig.encoder.update(b"1", 1, Change.PATCH, 100))
    assert client.ask(rig.encoder.purge(b"1"))
    figures = rig.store.snapshot()
    assert figures["used_memory"] <= figures["memory_limit"] == 1 << 16


@pytest.mark.parametrize(("lacking", "fits"), [(0, True), (1, False)])
def test_the_memory_limit_is_met_to_the_byte(make_rig: Callable[..., Rig], lacking: int, fits: bool) -> None:
    client = make_rig(memory_limit=KEY_COST + 5 * BLOCK - lacking).connect()
    assert client.ask(client.rig.encoder.set(b"k", bytes(5 * 60 - 4), 60)) == fits


def test_keys_use_at_most_half_of_the_memory(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(memory_limit=1 << 20)
    client = rig.connect()
    assert rig.store.snapshot()["keys_max"] == 4096
    fill(client, 4096)
    rig.now += SECOND
    client.send(*(rig.encoder.insert(b"one more", 1, 60) for _ in range(1000)))
    assert [reply.result for reply in client.received] == [False] * 1000  # at once: there is nothing to make room of
    assert client.ask(rig.encoder.subscribe(b"c"))
    assert client.ask(rig.encoder.purge(key(7)))
    assert client.ask(rig.encoder.insert(b"one more", 1, 60))


def small_store(**sizes: Any) -> ThrottrStore:
    """Makes a store as open_store() does, with other sizes."""
    usual = {"value_size": 2, "memory_limit": 1 << 20, "max_message": 512, "expiry_grace_ns": 0, "keys": 1 << 12}
    places = {"channels": 1 << 12, "subscriptions": 1 << 13, "make_session": ThrottrSession}
    memory = {"hash_key": KEY, "reply_max": 1 << 16, "posted_max": 1 << 12}
    return ThrottrStore(**(usual | places | memory | sizes))


def test_the_region_has_room_for_each_key_channel_and_subscription() -> None:
    """Twice as many, so that the rounded sizes are the same."""
    sizes = {name: small_store(**{name: 1 << 14}).snapshot()["region"] for name in ("keys", "channels")}
    region = small_store().snapshot()["region"]
    assert sizes["keys"] - region == 3 * (1 << 12) * (96 + 2 * 8)
    assert sizes["channels"] - region == 3 * (1 << 12) * (64 + 2 * 8 + 24 + 296)  # a connection has one of them
    assert small_store(subscriptions=1 << 14).snapshot()["region"] - region == (1 << 13) * (32 + 2 * 8 + 32)
    assert small_store(memory_limit=1 << 21).snapshot()["region"] - region == 1 << 20


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_message": (1 << 26) + 1, "reply_max": 1 << 27}, "max_message must be at most 67108864 bytes"),
        ({"reply_max": (1 << 16) - 1}, "reply_max of 65535 is too small"),
        ({"max_message": 1 << 16}, "with a max_message of 65536, the reply_max of 65536 is too small"),
        ({"expiry_grace_ns": 3600 * SECOND + 1}, "the grace must be 0 to 3600000000000 ns, not 3600000000001"),
        ({"expiry_grace_ns": -1}, "the grace must be 0 to"),
        ({"keys": (1 << 30) + 1}, "at most 1073741824 keys"),
        ({"subscriptions": (1 << 30) + 1}, "at most 1073741824 holdings"),
        ({"memory_limit": 1 << 38}, "at most 4294967294 blocks"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        small_store(**sizes)


def test_no_more_connections_than_channels_for_them() -> None:
    """Even if they have no subscriptions any more."""
    store = small_store(channels=4)
    sessions = [store.session(0) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room for another connection's subscriptions"):
            store.session(0)
        store.tick(0)
        store.audit()
    for session in sessions:
        whoami = session.receive(b"\x18", 0)
        assert session.receive(b"\x12\1*\x12\x20" + whoami[1:].hex().encode(), 0) == b"\1\1"
    sessions.append(store.session(0))
    assert sessions[-1].receive(b"\x12\1*", 0) == b"\1"
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room for another connection: 4 connections can have a channel"):
            store.session(0)
        store.audit()
    assert store.snapshot()["curr_connections"] == 4
    number = sessions[1].number
    sessions[1].closed(0)
    store.tick(0)
    assert store.session(0).number == number
    store.audit()


@pytest.mark.parametrize("limit", [1024 * BLOCK, 1025 * BLOCK, 1026 * BLOCK])
def test_subscriptions_use_memory_except_those_of_every_connection(make_rig: Callable[..., Rig], limit: int) -> None:
    rig = make_rig(memory_limit=limit)
    clients = [rig.connect() for _ in range(200)]
    assert rig.store.snapshot()["used_memory"] == 0
    count = 0
    while clients[0].ask(rig.encoder.subscribe(b"%d" % count)):
        count += 1
    assert count == limit // (3 * BLOCK)
    assert not clients[1].ask(rig.encoder.set(b"k", bytes(100), 60))
    clients[0].close()
    assert clients[1].ask(rig.encoder.set(b"k", bytes(100), 60))


def test_subscriptions_leave_room_for_connections(rig: Rig, client: Connection) -> None:
    """However many subscriptions a connection has, others can connect and have theirs."""
    encoder, count = rig.encoder, 0
    for _ in range(200):
        client.send(*(encoder.subscribe(b"%d" % number) for number in range(count, count + 1000)))
        rig.settle()
        count += 1000
    answers = [got.result for got in client.received if isinstance(got, Reply)]
    assert answers == sorted(answers, reverse=True)  # it is full at some time
    assert not answers[-1]
    assert answers.count(True) > 65_000
    others = [rig.connect() for _ in range(100)]
    assert others[-1].ask(encoder.channel(own_channel(others[-1])))


def test_a_value_that_is_no_longer_than_before_always_fits(make_rig: Callable[..., Rig]) -> None:
    """Also after connections without subscriptions have ended, when the memory in use is beyond the limit."""
    rig = make_rig(memory_limit=1 << 16)
    client, other, others = rig.connect(), rig.connect(), [rig.connect() for _ in range(20)]
    for connection in others:
        assert connection.ask(rig.encoder.unsubscribe(own_channel(connection)))
        assert connection.ask(rig.encoder.unsubscribe(b"*"))
    for number in range(40):
        assert other.ask(rig.encoder.subscribe(b"%d" % number))
    while client.ask(rig.encoder.set(b"%d" % rig.store.snapshot()["keys"], bytes(500), 60)):
        pass
    for connection in others:
        connection.close()
    rig.settle()
    assert rig.store.snapshot()["used_memory"] > 1 << 16
    assert client.ask(rig.encoder.set(b"0", b"y" * 500, 60))
    assert client.ask(rig.encoder.set(b"1", b"y" * 300, 60))
    assert rig.store.snapshot()["used_memory"] > 1 << 16
    assert not client.ask(rig.encoder.set(b"0", b"y" * 600, 60))
    assert client.ask(rig.encoder.get(b"0")).value == b"y" * 500


@pytest.mark.parametrize(("limit", "keys", "count"), [(1 << 20, 4096, 500), (1 << 13, 32, 10)])
def test_expired_keys_make_room_before_the_tick(
    make_rig: Callable[..., Rig], limit: int, keys: int, count: int
) -> None:
    """As many as one request can examine, and more."""
    rig = make_rig(memory_limit=limit)
    client = rig.connect()
    fill(client, keys, ttl=1)
    rig.now += 2 * SECOND
    client.send(*(rig.encoder.insert(b"new-%d" % number, 1, 60) for number in range(count)))
    rig.settle()
    assert [got.result for got in client.received] == [True] * count


def test_an_expired_key_replaced_before_the_tick_counts_as_expired(rig: Rig, client: Connection) -> None:
    for request in (rig.encoder.insert(b"k", 1, 1), rig.encoder.set(b"k", b"v", 1)):
        client.send(request)
        rig.now += SECOND
    client.send(rig.encoder.insert(b"k", 1, 1))
    assert [got.result for got in client.received if isinstance(got, Reply)] == [True, True, True]
    assert rig.store.snapshot()["expired"] == 2


def test_a_request_with_room_leaves_expired_keys_to_the_tick(rig: Rig, client: Connection) -> None:
    fill(client, 10, ttl=1)
    rig.now += 2 * SECOND
    client.send(rig.encoder.insert(b"k", 1, 60))
    assert rig.store.snapshot()["expired"] == 0
    rig.settle()
    assert rig.store.snapshot()["expired"] == 10


def test_repeated_subscriptions_to_a_channel_are_bounded(rig: Rig, client: Connection) -> None:
    answers = [client.ask(rig.encoder.subscribe(b"c")) for _ in range(20)]
    assert answers == [True] * 16 + [False] * 4
    assert client.ask(rig.encoder.info()).subscriptions == 18
    assert client.ask(rig.encoder.publish(b"c", b"x"))
    assert client.events() == [b"x"] * 16
    assert client.ask(rig.encoder.unsubscribe(b"c"))
    assert client.ask(rig.encoder.info()).subscriptions == 2


def test_all_repeated_subscriptions_end_with_their_connection(rig: Rig, client: Connection) -> None:
    for _ in range(3):
        assert client.ask(rig.encoder.subscribe(b"c"))
    other = rig.connect()
    for _ in range(2):
        assert other.ask(rig.encoder.subscribe(b"c"))
    assert rig.store.snapshot()["subscriptions"] == 2 + 3 + 2 + 2
    client.session.eof(rig.now)
    client.close()
    rig.settle()
    assert rig.store.snapshot()["subscriptions"] == 2 + 2
    assert other.ask(rig.encoder.unsubscribe(b"c"))
    other.close()
    rig.settle()
    assert rig.store.snapshot()["subscriptions"] == 0


def test_many_subscriptions_are_given_back_a_slice_per_tick(rig: Rig, client: Connection) -> None:
    client.send(*(rig.encoder.subscribe(b"%d" % number) for number in range(5000)))
    rig.settle()
    client.close()
    for left in (True, True, False):
        assert rig.store.next_deadline() == 0
        rig.store.tick(rig.now)
        assert (rig.store.snapshot()["subscriptions"] > 0) == left
    assert rig.store.next_deadline() == -1


@pytest.mark.parametrize("limit", [0, 1, 2048, 4096, 1 << 28])
def test_any_memory_limit_makes_a_store(make_rig: Callable[..., Rig], limit: int) -> None:
    client = make_rig(memory_limit=limit).connect()
    assert client.ask(client.rig.encoder.insert(b"k", 1, 60)) == (limit >= KEY_COST)


def test_the_counted_bytes_of_a_connection_are_all_sent_and_received(rig: Rig, client: Connection) -> None:
    sent = received = 0
    for request in (rig.encoder.whoami(), b"".join(rig.encoder.insert(key(n), 1, 60) for n in range(3000)), b"\x07"):
        output = client.session.receive(bytes(request), rig.now)
        while client.session.more:
            output += client.session.take_output(rig.now)
        sent, received = sent + len(request), received + len(output)
    (told,) = (told for told in rig.connect().ask(rig.encoder.connections()) if told.whoami_requests)
    assert (told.read_bytes, told.write_bytes) == (sent, received)


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("up_s", [0, 60, 3 * 86_400, 400 * 86_400, 20_000 * 86_400])
@pytest.mark.parametrize("ttl_ns", [1, 1 << 20, 50_000_000, SECOND, 100 * SECOND, 86_400 * SECOND, 1 << 60])
def test_a_deadline_is_not_in_the_past_however_long_the_machine_is_up(
    make_rig: Callable[..., Rig], up_s: int, ttl_ns: int
) -> None:
    start = up_s * SECOND + 12345
    rig = make_rig(start=start, value_size=8)
    client = rig.connect()
    assert rig.store.next_deadline() == -1
    client.send(rig.encoder.insert(b"k", 1, ttl_ns, TTLType.NANOSECONDS))
    assert start <= rig.store.next_deadline() <= start + ttl_ns + TICK


def test_an_earlier_expiry_moves_the_next_deadline(rig: Rig, client: Connection) -> None:
    assert rig.store.next_deadline() == -1
    client.ask(rig.encoder.insert(b"far", 1, 50))
    assert START < rig.store.next_deadline() <= START + 50 * SECOND + (1 << 20)
    client.ask(rig.encoder.insert(b"near", 1, 5, TTLType.MILLISECONDS))
    assert START < rig.store.next_deadline() <= START + 5_000_000 + (1 << 20)


def test_many_expired_keys_are_freed_in_slices_and_invisible(rig: Rig, client: Connection) -> None:
    fill(client, 20_000, ttl=1)
    rig.now += SECOND + TICK
    ticks = 0
    while 0 <= rig.store.next_deadline() <= rig.now:
        before = rig.store.snapshot()["expired"]
        rig.store.tick(rig.now)
        assert rig.store.snapshot()["expired"] - before <= 2048
        client.send(rig.encoder.query(key(19_999 - ticks)))
        assert client.received.pop().result is None
        ticks += 1
        assert ticks < 100
    assert rig.store.snapshot()["expired"] == 20_000
    assert client.ask(rig.encoder.info()).keys == 0


def test_info_waits_until_expired_keys_are_freed(rig: Rig, client: Connection) -> None:
    fill(client, 5000, ttl=1)
    rig.now += SECOND + TICK
    client.send(rig.encoder.info())
    assert client.received == []
    rig.settle()
    assert client.received.pop().result.keys == 0


def test_figures_per_minute_are_those_of_the_last_whole_minute(rig: Rig, client: Connection) -> None:
    encoder = rig.encoder
    client.ask(encoder.insert(b"k", 1, 60000))
    for _ in range(3):
        client.ask(encoder.query(b"k"))
    client.ask(encoder.update(b"k", 0, Change.INCREASE, 1))
    assert client.ask(encoder.stat(b"k")) == (0, 0, 4, 1)
    rig.now += MINUTE
    assert client.ask(encoder.stat(b"k")) == (5, 1, 5, 1)
    info = client.ask(encoder.info())
    assert (info.query_requests, info.query_per_minute, info.info_per_minute) == (3, 3, 0)
    assert info.read_bytes_per_minute > 0
    rig.now += MINUTE
    assert client.ask(encoder.stat(b"k")) == (1, 0, 6, 1)
    rig.now += 2 * MINUTE
    assert client.ask(encoder.stat(b"k")) == (0, 0, 7, 1)
    info = client.ask(encoder.info())
    assert (info.query_per_minute, info.query_requests) == (0, 3)
    assert (info.stat_per_minute, info.stat_requests) == (0, 4)


@pytest.mark.parametrize("minute", [0, 1])
def test_a_new_key_is_unused_in_the_clocks_first_minutes_too(make_rig: Callable[..., Rig], minute: int) -> None:
    client = make_rig(start=minute * MINUTE).connect()
    encoder = client.rig.encoder
    for _ in range(2):  # the second has the record of the first
        assert client.ask(encoder.insert(b"k", 1, 600))
        assert client.ask(encoder.stat(b"k")) == (0, 0, 0, 0)
        assert client.ask(encoder.update(b"k", 0, Change.INCREASE, 1))
        assert client.ask(encoder.purge(b"k"))


@pytest.mark.parametrize("start", [0, START])
def test_the_caller_sets_the_unix_time(make_rig: Callable[..., Rig], start: int) -> None:
    rig = make_rig(start=start)
    client = rig.connect()
    rig.now += 5 * SECOND
    later = rig.connect()
    info = later.ask(rig.encoder.info())
    assert (info.timestamp, info.running_since) == (UNIX // SECOND + 5, UNIX)
    connected = {connection.id: connection.connected_at for connection in later.ask(rig.encoder.connections())}
    assert connected[later.ask(rig.encoder.whoami())] == UNIX + 5 * SECOND
    assert connected[client.ask(rig.encoder.whoami())] == UNIX
    subscribed = {subscriber.id: subscriber.subscribed_at for subscriber in later.ask(rig.encoder.channel(b"*"))}
    assert subscribed == connected
    rig.store.set_wall(UNIX + 5 * SECOND + 591, rig.now)  # the process had to wait between its looks at two clocks
    assert later.ask(rig.encoder.info()).running_since == UNIX
    later.ask(rig.encoder.insert(b"k", 1, 10))
    rig.store.set_wall(UNIX, rig.now)  # somebody has set the clock back
    (entry,) = later.ask(rig.encoder.list())
    assert entry.expires_at == UNIX + 10 * SECOND
    assert later.ask(rig.encoder.info()).running_since == UNIX - 5 * SECOND


def test_an_unlimited_ttl_ends_in_2262(make_rig: Callable[..., Rig]) -> None:
    client = make_rig(value_size=8).connect()
    assert client.ask(client.rig.encoder.insert(b"k", 1, (1 << 64) - 1, TTLType.HOURS))
    (entry,) = client.ask(client.rig.encoder.list())
    assert entry.expires_at == (1 << 63) - 1


def test_the_longest_ttl_has_its_own_end(make_rig: Callable[..., Rig]) -> None:
    """With a second more, it ends like an unlimited one."""
    client = make_rig(value_size=8).connect()
    longest = ((1 << 63) - 1 - 60 * MINUTE - START) // SECOND
    for ttl, left in ((longest, longest - 1), (longest + 1, longest), (longest + 9, longest)):
        assert client.ask(client.rig.encoder.insert(b"%d" % ttl, 1, ttl))
        assert client.ask(client.rig.encoder.query(b"%d" % ttl)).ttl == left
