"""The throttr room: long replies in pieces, events and who gets them when, memory, time. Each request's reply, byte by
byte, is in tests/conformance/throttr."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from counterd.protocols.throttr._room import open_store
from counterd.protocols.throttr.wire import Change, Encoder, Event, Parser, Reply, Request, TTLType, ValueSize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
START = 1000 * MINUTE
UNIX = 1_700_000_000 * SECOND
TURNS_MAX = 10_000
TICK = 1 << 20  # of the wheel: what has expired is counted no later
KEY_COST, BLOCK = 112, 64


class Room:
    """A store, driven as net would: what is due is done, and whoever has more is asked again."""

    def __init__(self, **options: Any) -> None:
        settings = {
            "value_size": 2,
            "memory_limit": 64 << 20,
            "max_message": 1 << 20,
            "max_queued": 1 << 20,
            "expiry_grace_ns": 0,
            "hash_key": bytes(range(16)),
        } | options
        self.encoder = Encoder(ValueSize(settings["value_size"]))
        self.store = open_store(**settings)
        self.now = START
        self.store.set_wall(UNIX, START)
        self.connections: dict[Any, Connection] = {}

    def connect(self) -> Connection:
        connection = Connection(self)
        self.connections[connection.session] = connection
        return connection

    def turn(self) -> bool:
        """One turn of the driver; whether there was anything to do."""
        due = self.store.next_deadline()
        busy = 0 <= due <= self.now
        if busy:
            self.store.tick(self.now)
        for session in self.store.take_dirty():
            busy = True
            if session in self.connections:
                self.connections[session].pull()
        for connection in list(self.connections.values()):
            busy = busy or (connection.session.more and not connection.deaf)
            connection.pull()
        return busy

    def settle(self) -> None:
        for _ in range(TURNS_MAX):
            if not self.turn():
                return
        raise AssertionError("it never comes to its end")


class Connection:
    """One of its sessions, and what it was sent. deaf: its peer takes nothing."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.session = room.store.session(room.now)
        self.parser = Parser(room.encoder.size)
        self.received: list[Reply | Event] = []
        self.deaf = False

    def send(self, *requests: Request[Any]) -> None:
        for request in requests:
            self.parser.expect(request)
        self.take(self.session.receive(b"".join(requests), self.room.now))

    def take(self, output: bytes) -> None:
        self.received += self.parser.feed(output)

    def pull(self) -> None:
        if self.deaf:
            self.session.wait()
        else:
            self.take(self.session.take_output(self.room.now))

    def events(self) -> list[bytes]:
        """The payloads of those that came since the last call."""
        payloads = [got.payload for got in self.received if isinstance(got, Event)]
        self.received = [got for got in self.received if not isinstance(got, Event)]
        return payloads

    def ask(self, request: Request[T]) -> T:
        """Sends it and returns what its reply tells. Replies that came before are forgotten."""
        self.received = [got for got in self.received if isinstance(got, Event)]
        self.send(request)
        self.room.settle()
        (reply,) = (got for got in self.received if isinstance(got, Reply))
        self.received.remove(reply)
        return reply.result

    def close(self) -> None:
        del self.room.connections[self.session]
        self.session.closed(self.room.now)


@pytest.fixture
def make_room() -> Iterator[Callable[..., Room]]:
    """Makes rooms, which are audited in the end."""
    rooms: list[Room] = []

    def made(**options: Any) -> Room:
        rooms.append(Room(**options))
        return rooms[-1]

    yield made
    for room in rooms:
        room.settle()
        room.store.audit()


@pytest.fixture
def room(make_room: Callable[..., Room]) -> Room:
    return make_room()


@pytest.fixture
def client(room: Room) -> Connection:
    return room.connect()


def key(number: int) -> bytes:
    return b"key-%012d" % number


def fill(client: Connection, count: int, ttl: int = 60000, ttl_type: int = TTLType.SECONDS, start: int = 0) -> None:
    """So many counters; all of them must be accepted."""
    encoder = client.room.encoder
    for first in range(start, start + count, 5000):
        numbers = range(first, min(first + 5000, start + count))
        client.send(*(encoder.insert(key(number), 1, ttl, ttl_type) for number in numbers))
        client.room.settle()
    assert all(got.result for got in client.received if isinstance(got, Reply))
    client.received.clear()


def own_channel(connection: Connection) -> bytes:
    id = connection.ask(connection.room.encoder.whoami())
    return id.hex().encode()


# ---- listings -------------------------------------------------------------------------------------------------------


def test_a_listing_of_many_comes_in_pieces_and_others_are_served_between(room: Room, client: Connection) -> None:
    fill(client, 30_000)
    other = room.connect()
    client.send(room.encoder.list())
    turns = 0
    while client.session.more:
        turns += 1
        other.send(room.encoder.query(key(turns)))
        assert other.received.pop().result.quota == 1
        room.turn()
    assert turns > 10
    (reply,) = client.received
    assert sorted(entry.key for entry in reply.result) == [key(number) for number in range(30_000)]


@pytest.mark.parametrize("opcode", ["list", "stats"])
def test_what_exists_throughout_a_listing_appears_once_whatever_comes_and_goes(room: Room, opcode: str) -> None:
    client, other = room.connect(), room.connect()
    fill(client, 12_000)
    chosen = random.Random(7)
    gone, made = set(), 12_000
    client.send(getattr(room.encoder, opcode)())
    while client.session.more:
        for _ in range(40):
            number = chosen.randrange(12_000)
            gone.add(key(number))
            other.send(room.encoder.purge(key(number)), room.encoder.insert(key(made), 1, 9))
            made += 1
        room.turn()
    room.store.audit()
    (reply,) = client.received
    listed = [entry.key for entry in reply.result]
    assert len(set(listed)) == len(listed)
    assert {key(number) for number in range(12_000)} - gone <= set(listed)
    assert set(listed) <= {key(number) for number in range(12_000)}


def test_keys_that_expire_during_a_listing_leave_fragments_empty(room: Room, client: Connection) -> None:
    fill(client, 6000, ttl=500, ttl_type=TTLType.MILLISECONDS)
    fill(client, 10, start=6000)
    client.send(room.encoder.list())
    assert client.session.more
    room.now += SECOND
    room.settle()
    (reply,) = client.received
    assert {key(number) for number in range(6000, 6010)} <= {entry.key for entry in reply.result}
    assert len(reply.result) < 6000


def test_all_connections_and_all_channels_are_told_of(room: Room) -> None:
    clients = [room.connect() for _ in range(300)]
    for number, client in enumerate(clients):
        assert client.ask(room.encoder.subscribe(b"channel-%d" % (number % 100)))
    ids = {client.ask(room.encoder.whoami()) for client in clients}
    assert len(ids) == 300
    told = clients[0].ask(room.encoder.connections())
    assert [len(told), {connection.id for connection in told}] == [300, ids]
    channels = {entry.channel: entry.subscriptions for entry in clients[0].ask(room.encoder.channels())}
    assert channels == {b"*": 300} | {id.hex().encode(): 1 for id in ids} | {b"channel-%d" % n: 3 for n in range(100)}


def test_a_channel_with_more_subscribers_than_are_told_of_at_once(room: Room) -> None:
    clients = [room.connect() for _ in range(3000)]
    ids = {client.ask(room.encoder.whoami()) for client in clients[:5]}
    told = clients[0].ask(room.encoder.channel(b"*"))
    assert len(told) == len({subscriber.id for subscriber in told}) == 3000
    assert ids < {subscriber.id for subscriber in told}


def test_whoever_goes_while_a_channel_is_told_of_leaves_an_entry_without_id(room: Room) -> None:
    clients = [room.connect() for _ in range(3000)]
    clients[0].send(room.encoder.channel(b"*"))
    gone = 0
    while clients[0].session.more:
        clients.pop().close()
        gone += 1
        room.turn()
    (reply,) = clients[0].received
    assert 3000 - gone <= len(reply.result) <= 3000
    ids = [subscriber.id for subscriber in reply.result if subscriber.id != bytes(16)]
    assert len(set(ids)) == len(ids) >= 3000 - gone > 2000
    room.settle()


def test_who_subscribes_again_while_a_channel_is_told_of_takes_nobodys_place(room: Room) -> None:
    clients = [room.connect() for _ in range(3000)]
    ids = {client.ask(room.encoder.whoami()) for client in clients}
    other = clients.pop()
    clients[0].send(room.encoder.channel(b"*"))
    while clients[0].session.more:
        for client in clients[1:300]:
            client.send(room.encoder.subscribe(b"*"))
        room.turn()
    told = clients[0].received.pop().result
    assert {subscriber.id for subscriber in told} >= ids
    assert other.session in room.connections


# ---- events ---------------------------------------------------------------------------------------------------------


def test_an_event_for_many_is_given_in_slices_and_others_are_served_between(room: Room) -> None:
    publisher, *subscribers = [room.connect() for _ in range(8000)]
    for subscriber in subscribers:
        subscriber.send(room.encoder.subscribe(b"c"))
    publisher.send(room.encoder.publish(b"c", b"payload"))
    assert publisher.received.pop().result is True
    ticks = 0
    while room.store.next_deadline() == 0:
        ticks += 1
        room.store.tick(room.now)
        publisher.send(room.encoder.query(b"nothing"))
        assert publisher.received.pop().result is None
        told = room.store.take_dirty()
        assert len(told) <= 2200
        outputs = [session.take_output(room.now) for session in told]
        assert len({id(output) for output in outputs}) == 1  # one object for all: the payload was copied once
    assert 3 < ticks < 20


def test_an_event_goes_on_however_much_expires(room: Room, client: Connection) -> None:
    subscribers = [room.connect() for _ in range(300)]
    for subscriber in subscribers:
        assert subscriber.ask(room.encoder.subscribe(b"c"))
    fill(client, 20_000, ttl=500, ttl_type=TTLType.MILLISECONDS)
    room.now += SECOND
    client.send(room.encoder.publish(b"c", b"payload"))
    room.store.tick(room.now)
    assert room.store.snapshot()["expired"] < 20_000
    assert len(room.store.take_dirty()) == 300


def test_events_of_a_channel_come_in_one_order_to_all(room: Room) -> None:
    clients = [room.connect() for _ in range(500)]
    for client in clients:
        assert client.ask(room.encoder.subscribe(b"c"))
    for client in clients[:10]:
        client.send(*(room.encoder.publish(b"c", b"%d" % number) for number in range(3)))
    room.settle()
    heard = [client.events() for client in clients]
    assert len(heard[0]) == 30
    assert all(events == heard[0] for events in heard)


def test_a_publish_waits_for_the_one_before_it(room: Room) -> None:
    one, other, *subscribers = [room.connect() for _ in range(3000)]
    for subscriber in subscribers:
        subscriber.send(room.encoder.subscribe(b"c"))
    one.send(room.encoder.publish(b"c", b"first"))
    other.send(room.encoder.publish(b"c", b"second"), room.encoder.query(b"k"))
    assert len(one.received) == 1
    assert other.received == []
    room.settle()
    assert [got.result for got in other.received] == [True, None]
    assert all(subscriber.events() == [b"first", b"second"] for subscriber in subscribers)


def test_who_goes_or_unsubscribes_while_an_event_is_given_is_stepped_over(room: Room) -> None:
    publisher, *subscribers = [room.connect() for _ in range(1000)]
    for subscriber in subscribers:
        assert subscriber.ask(room.encoder.subscribe(b"c"))
    publisher.send(room.encoder.publish(b"c", b"payload"))
    chosen = random.Random(3)
    chosen.shuffle(subscribers)
    for subscriber in subscribers[:300]:
        subscriber.close()
    for subscriber in subscribers[300:600]:
        subscriber.send(room.encoder.unsubscribe(b"c"))
    room.settle()
    assert all(subscriber.events() == [b"payload"] for subscriber in subscribers[600:])
    assert len(publisher.ask(room.encoder.channel(b"c"))) == 399


def test_an_event_goes_on_behind_whoever_unsubscribes_when_it_is_his_turn(room: Room) -> None:
    """His subscription's place in the ledger is at once another's, on another channel."""
    publisher, outsider, *subscribers = [room.connect() for _ in range(102)]
    for subscriber in subscribers:
        assert subscriber.ask(room.encoder.subscribe(b"c"))
    publisher.send(room.encoder.publish(b"c", b"payload"))
    room.store.take_dirty()  # the last 64 have it, and the next in turn is:
    subscribers[-65].send(room.encoder.unsubscribe(b"c"))
    outsider.send(room.encoder.subscribe(b"other"))
    room.settle()
    assert outsider.events() == subscribers[-65].events() == []
    assert all(other.events() == [b"payload"] for other in subscribers if other is not subscribers[-65])


def test_whoever_an_event_waits_for_is_asked_again(make_room: Callable[..., Room]) -> None:
    """He was given a piece of what waits, and the caller has not come back for the rest: his socket is full."""
    room = make_room(max_queued=4096)
    publisher, reader = room.connect(), room.connect()
    for _ in range(16):
        assert reader.ask(room.encoder.subscribe(b"c"))
    publisher.send(room.encoder.publish(b"c", bytes(30_000)))
    assert room.store.take_dirty() == [reader.session]
    reader.take(reader.session.take_output(room.now))
    assert reader.session.more
    publisher.send(room.encoder.publish(b"c", b"next"))
    assert room.store.take_dirty() == [reader.session]
    reader.session.wait()
    assert reader.session.dropped


def test_an_event_never_lies_within_a_listing(room: Room, client: Connection) -> None:
    fill(client, 20_000)
    other = room.connect()
    client.send(room.encoder.list())
    assert client.session.more
    other.send(room.encoder.publish(b"*", b"meanwhile"))
    room.settle()
    assert [type(got) for got in client.received] == [Reply, Event]
    assert len(client.received[0].result) == 20_000


def test_who_does_not_read_is_dropped_and_the_others_get_everything(make_room: Callable[..., Room]) -> None:
    room = make_room(max_queued=4096)
    publisher, deaf, listener = room.connect(), room.connect(), room.connect()
    deaf.deaf = True
    for _ in range(5):
        assert publisher.ask(room.encoder.publish(b"*", bytes(1000)))
    assert deaf.session.dropped
    assert deaf.session.closing
    assert room.store.snapshot()["dropped_subscribers"] == 1
    assert len(listener.events()) == 5
    assert len(publisher.ask(room.encoder.connections())) == 2


def test_who_has_not_been_asked_yet_is_not_dropped_but_waited_for(make_room: Callable[..., Room]) -> None:
    room = make_room(max_queued=4096)
    publisher, other = room.connect(), room.connect()
    channel = own_channel(other)
    publisher.send(*[room.encoder.publish(channel, bytes(1000))] * 9)
    assert len(publisher.received) == 4  # the fourth is given, and the fifth heard, once the others were fetched
    room.settle()
    assert len(publisher.received) == 9
    assert len(other.events()) == 9
    assert room.store.snapshot()["dropped_subscribers"] == 0


def test_who_stops_reading_in_the_middle_of_his_events_keeps_nobody_waiting(room: Room) -> None:
    """The caller is asked again whether it can take something, which is when it says that it cannot."""
    publisher, deaf, listener = room.connect(), room.connect(), room.connect()
    channel = own_channel(listener)
    for _ in range(16):
        assert deaf.ask(room.encoder.subscribe(b"c"))
    publisher.send(room.encoder.publish(b"c", bytes(60_000)))
    room.turn()  # fetches some of them, which the kernel does not take: nothing else tells of it
    assert deaf.session.more
    deaf.deaf = True
    publisher.send(room.encoder.publish(b"c", bytes(60_000)))
    room.settle()
    assert deaf.session.dropped
    assert publisher.ask(room.encoder.publish(channel, b"still served"))
    assert listener.events() == [b"still served"]


def test_who_could_not_take_output_when_there_was_none_is_told_of_the_next(room: Room) -> None:
    publisher, other = room.connect(), room.connect()
    channel = own_channel(other)
    other.session.wait()
    publisher.send(room.encoder.publish(channel, b"x"))
    assert room.store.take_dirty() == [other.session]


def test_a_half_closed_subscriber_gets_what_was_posted(room: Room) -> None:
    publisher, subscriber = room.connect(), room.connect()
    channel = own_channel(subscriber)
    publisher.send(room.encoder.publish(channel, b"last"))
    subscriber.take(subscriber.session.eof(room.now))
    room.settle()
    assert subscriber.events() == [b"last"]
    assert subscriber.session.closing
    assert not publisher.ask(room.encoder.publish(channel, b"nobody"))


def test_a_request_within_an_event_that_has_to_wait_is_answered_once(room: Room) -> None:
    one, other, *_ = [room.connect() for _ in range(3000)]
    one.send(room.encoder.publish(b"*", b"first"))
    other.send(room.encoder.event(b"", room.encoder.publish(b"*", b"second")))
    room.settle()
    replies = [got for got in other.received if isinstance(got, Reply)]
    assert [got.result.result for got in replies] == [True]
    assert other.events() == [b"first", b"second"]
    assert one.ask(room.encoder.info()).publish_requests == 2


def test_events_within_events_are_no_way_to_long_replies(make_room: Callable[..., Room]) -> None:
    room = make_room(value_size=4, max_message=1 << 16)
    client = room.connect()
    request: Request[Any] = room.encoder.insert(b"k", 1, 60)
    for _ in range(16):
        request = room.encoder.event(b"", request)
    assert client.session.receive(bytes(request), room.now) == b"\1" * 17
    request = room.encoder.event(b"", request)
    assert client.session.receive(bytes(request), room.now) == b"\1" * 16 + b"\0"
    deepest = b"\x19\0\0\0\0\0" * 10_000
    deepest = b"".join(b"\x19\0" + (len(deepest) - at - 6).to_bytes(4, "little") for at in range(0, len(deepest), 6))
    assert client.session.receive(deepest, room.now) == b"\1" * 16 + b"\0"


def test_a_request_within_a_long_event_does_not_wait_for_ever(make_room: Callable[..., Room]) -> None:
    """What follows it is ignored. With 64 bytes a step there is more of it than a turn has steps."""
    room = make_room(value_size=4)
    client = room.connect()
    for request in (room.encoder.info(), room.encoder.channel(b"*"), room.encoder.list()):
        assert client.ask(room.encoder.event(b"c", Request(request + bytes(300_000)))) is not None


def test_an_event_to_oneself_is_not_within_the_reply_to_the_event_that_published_it(
    room: Room, client: Connection
) -> None:
    request = room.encoder.event(b"", room.encoder.event(b"", room.encoder.publish(b"*", b"x")))
    client.send(request)
    room.settle()
    assert [type(got) for got in client.received] == [Event, Reply]
    assert client.received[1].result.result.result is True
    (connection,) = client.ask(room.encoder.connections())
    assert (connection.published_bytes, connection.received_bytes) == (1, 0)


def test_who_reads_a_long_listing_is_not_waited_for(make_room: Callable[..., Room]) -> None:
    room = make_room(max_queued=4096)
    lister, publisher = room.connect(), room.connect()
    fill(lister, 20_000)
    channel = own_channel(lister)
    lister.send(room.encoder.list())
    assert lister.session.more
    publisher.send(*[room.encoder.publish(channel, bytes(1000))] * 5)
    assert len(publisher.received) == 5
    assert lister.session.dropped


def test_every_event_within_an_event_is_a_request(room: Room, client: Connection) -> None:
    client.ask(room.encoder.event(b"", room.encoder.event(b"", room.encoder.whoami())))
    figures = room.store.snapshot()
    assert (figures["command:event"], figures["command:whoami"]) == (2, 1)


def test_who_is_subscribed_twice_is_told_twice_of_what_was_read(room: Room, client: Connection) -> None:
    """Which both together are what the channel tells."""
    for _ in range(2):
        client.ask(room.encoder.subscribe(b"news"))
    client.ask(room.encoder.publish(b"news", b"four"))
    assert [entry.read_bytes for entry in client.ask(room.encoder.channel(b"news"))] == [4, 4]
    assert [entry.read_bytes for entry in client.ask(room.encoder.channels()) if entry.channel == b"news"] == [8]


def test_who_has_gone_is_not_listed_before_the_next_tick(room: Room, client: Connection) -> None:
    other = room.connect()
    own_channel(other)
    own = own_channel(client)
    other.close()
    client.send(room.encoder.channels())
    (reply,) = client.received
    assert {(entry.channel, entry.subscriptions) for entry in reply.result} == {(b"*", 1), (own, 1)}


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


def test_keys_take_half_of_the_memory_at_most(make_room: Callable[..., Room]) -> None:
    room = make_room(memory_limit=1 << 20)
    client = room.connect()
    assert room.store.snapshot()["keys_max"] == 4096
    fill(client, 4096)
    assert not client.ask(room.encoder.insert(b"one more", 1, 60))
    assert client.ask(room.encoder.purge(key(7)))
    assert client.ask(room.encoder.insert(b"one more", 1, 60))


def test_subscriptions_count_and_those_that_all_have_do_not(make_room: Callable[..., Room]) -> None:
    room = make_room(memory_limit=1 << 16)
    clients = [room.connect() for _ in range(200)]
    assert room.store.snapshot()["used_memory"] == 0
    count = 0
    while clients[0].ask(room.encoder.subscribe(b"%d" % count)):
        count += 1
    assert count == (1 << 16) // (3 * BLOCK)
    assert not clients[1].ask(room.encoder.insert(b"k", 1, 60))
    clients[0].close()
    assert clients[1].ask(room.encoder.insert(b"k", 1, 60))


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


def test_keys_that_have_expired_make_room_before_the_tick(make_room: Callable[..., Room]) -> None:
    room = make_room(memory_limit=1 << 20)
    client = room.connect()
    fill(client, 4096, ttl=1)
    room.now += 2 * SECOND
    client.send(*(room.encoder.insert(b"new-%d" % number, 1, 60) for number in range(500)))
    room.settle()
    assert [got.result for got in client.received] == [True] * 500


def test_an_expired_key_whose_name_is_taken_before_the_tick_has_expired(room: Room, client: Connection) -> None:
    for request in (room.encoder.insert(b"k", 1, 1), room.encoder.set(b"k", b"v", 1)):
        client.send(request)
        room.now += SECOND
    client.send(room.encoder.insert(b"k", 1, 1))
    assert [got.result for got in client.received if isinstance(got, Reply)] == [True, True, True]
    assert room.store.snapshot()["expired"] == 2


def test_nobody_is_subscribed_to_one_channel_without_end(room: Room, client: Connection) -> None:
    answers = [client.ask(room.encoder.subscribe(b"c")) for _ in range(20)]
    assert answers == [True] * 16 + [False] * 4
    assert client.ask(room.encoder.info()).subscriptions == 18
    assert client.ask(room.encoder.publish(b"c", b"x"))
    assert client.events() == [b"x"] * 16
    assert client.ask(room.encoder.unsubscribe(b"c"))
    assert client.ask(room.encoder.info()).subscriptions == 2


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


def test_unix_time_is_what_the_caller_says(room: Room, client: Connection) -> None:
    room.now += 5 * SECOND
    later = room.connect()
    info = later.ask(room.encoder.info())
    assert (info.timestamp, info.running_since) == (UNIX // SECOND + 5, UNIX)
    connected = {connection.id: connection.connected_at for connection in later.ask(room.encoder.connections())}
    assert connected[later.ask(room.encoder.whoami())] == UNIX + 5 * SECOND
    assert connected[client.ask(room.encoder.whoami())] == UNIX
    later.ask(room.encoder.insert(b"k", 1, 10))
    room.store.set_wall(UNIX, room.now)  # somebody has set the clock back
    (entry,) = later.ask(room.encoder.list())
    assert entry.expires_at == UNIX + 10 * SECOND


def test_a_ttl_without_end_ends_in_2262(make_room: Callable[..., Room]) -> None:
    client = make_room(value_size=8).connect()
    assert client.ask(client.room.encoder.insert(b"k", 1, (1 << 64) - 1, TTLType.HOURS))
    (entry,) = client.ask(client.room.encoder.list())
    assert entry.expires_at == (1 << 63) - 1


@pytest.mark.parametrize("size", [0, 3, 5, 16, -2])
def test_only_four_widths(size: int) -> None:
    with pytest.raises(ValueError, match=f"value_size must be 1, 2, 4 or 8 bytes, not {size}"):
        open_store(
            value_size=size,
            memory_limit=1 << 20,
            max_message=512,
            max_queued=512,
            expiry_grace_ns=0,
            hash_key=bytes(16),
        )


def test_outcomes_tell_requests_apart_and_a_drain_changes_nothing(room: Room, client: Connection) -> None:
    encoder = room.encoder
    client.send(encoder.insert(b"a", 1, 60), encoder.insert(b"a", 1, 60), encoder.query(b"b"), encoder.subscribe(b"c"))
    room.store.begin_drain()
    client.send(encoder.unsubscribe(b"c"), encoder.unsubscribe(b"c"), encoder.insert(b"b", 1, 60), encoder.whoami())
    room.settle()
    room.connect().session.receive(b"\xff", room.now)
    assert sorted(room.store.outcomes()) == [
        ("insert", "ok", 2),
        ("insert", "refused", 1),
        ("query", "refused", 1),
        ("subscribe", "ok", 1),
        ("unknown", "framing_lost", 1),
        ("unsubscribe", "ok", 1),
        ("unsubscribe", "refused", 1),
        ("whoami", "ok", 1),
    ]


def test_subscriptions_are_not_holdings_to_wait_for(room: Room, client: Connection) -> None:
    assert client.ask(room.encoder.subscribe(b"c"))
    assert (room.store.held(), room.store.holdings_of(1), room.store.leases(10)) == (0, 0, [])
