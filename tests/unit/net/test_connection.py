"""A connection between a session and a stream: when it writes and reads, and how it ends."""

from __future__ import annotations

import functools
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.net.connection import peer_process
from counterd.net.poller import READ_MAX
from counterd.protocols.counter import wire
from counterd.protocols.counter._session import CounterSession
from counterd.protocols.counter._session import open_store as open_counters
from counterd.protocols.throttr._session import open_store
from counterd.protocols.throttr.wire import Attribute, Change, Encoder, TTLType, ValueSize
from kit.counters import KEY, NO_MEMORY, Client, frames_of, make_store
from native import build, load
from unit.net.fakes import FakeClock, Net, nets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd._core import Session, Store
    from unit.net.fakes import Peer

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)
HOLD = wire.acquire(1, b"held", 1, 9)
BROKEN = b"\x55" * 12
ENCODER = Encoder(ValueSize.UINT32)
LINGER_BYTES = 1 << 20


@pytest.fixture
def make_net() -> Iterator[Callable[..., Net]]:
    """A server with one pull per turn: the driver's slice is over when it reads the clock for the second time."""
    with nets() as make:
        yield functools.partial(make, clock=FakeClock(600_000).monotonic_ns)


@pytest.fixture
def net(make_net: Callable[..., Net]) -> Net:
    return make_net()


# ---- writing --------------------------------------------------------------------------------------------------------


def test_one_write_per_read(net: Net) -> None:
    peer = net.connect()
    peer.send(NOOP * 100 + wire.get(2, b"a") + NOOP[:5])
    assert [frame[8:12] for frame in frames_of(peer.recv())] == [b"\0\0\0\1"] * 100 + [b"\0\0\0\2"]
    assert peer.recv() == b""
    peer.send(NOOP[5:])
    assert peer.recv() == REPLY
    assert peer.queued == 0
    assert peer.reading
    assert net.loop.pending() == 0


def test_nothing_is_written_without_a_reply(net: Net) -> None:
    peer = net.connect()
    peer.send(NOOP[:5])
    assert peer.recv() == b""


def test_reading_stops_while_output_is_queued(net: Net) -> None:
    peer, answer = net.clog()
    assert not peer.reading
    assert peer.connection.queued == peer.queued
    assert peer.recv_all() + peer.drain() == answer
    assert peer.reading
    assert peer.connection.queued == 0
    peer.send(NOOP)
    assert peer.recv() == REPLY


def test_output_for_a_full_socket_is_queued(net: Net) -> None:
    peer = net.connect()
    peer.stuff()
    peer.send(NOOP)
    assert peer.queued == len(REPLY)
    assert peer.drain().endswith(REPLY)


def test_replies_go_behind_queued_output(net: Net) -> None:
    """One more read can be under way when reading is paused."""
    peer, answer = net.clog()
    sent = peer.recv_all()
    peer.connection.received(NOOP)
    assert peer.recv() == b""
    assert sent + peer.drain() == answer + REPLY


def test_a_connection_whose_peer_is_gone_is_closed(net: Net) -> None:
    peer = net.connect()
    peer.send(HOLD)
    peer.socket.close()
    peer.connection.received(NOOP)
    assert peer.closed
    assert peer.queued == 0
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1


# ---- what others post -----------------------------------------------------------------------------------------------


@pytest.fixture
def channels(make_net: Callable[..., Net]) -> Net:
    """A server of a protocol in which connections send things to each other; nobody may leave more than 64 KiB."""
    return make_net(
        open_store(
            value_size=4,
            memory_limit=1 << 20,
            max_message=1 << 20,
            max_queued=1 << 16,
            expiry_grace_ns=0,
            hash_key=bytes(16),
            now_ns=time.monotonic_ns(),
        )
    )


def publish(payload: bytes) -> bytes:
    return b"\x13\x01" + len(payload).to_bytes(4, "little") + b"c" + payload


def event(payload: bytes) -> bytes:
    return b"\x19" + publish(payload)[1:]


def subscribed(peer: Peer) -> Peer:
    peer.send(b"\x11\x01c")
    assert peer.recv() == b"\x01"
    return peer


@pytest.mark.parametrize(
    "request_",
    [
        ENCODER.update(b"counter", Attribute.TTL, Change.PATCH, 1),
        ENCODER.set(b"buffer", b"", 1, TTLType.HOURS),
        ENCODER.set(b"other", b"", 1, TTLType.HOURS),
        ENCODER.insert(b"other", 0, 1, TTLType.HOURS),
    ],
)
def test_a_new_first_expiry_sets_an_earlier_timer(channels: Net, request_: bytes) -> None:
    peer = channels.connect()
    peer.send(bytes(ENCODER.insert(b"counter", 0, 10_000, TTLType.HOURS)))
    peer.send(bytes(ENCODER.set(b"buffer", b"", 10_000, TTLType.HOURS)))
    (later,) = channels.loop.live_timers()
    peer.send(bytes(request_))
    (sooner,) = channels.loop.live_timers()
    assert sooner < later


def test_the_first_expiry_sets_a_timer(channels: Net) -> None:
    peer = channels.connect()
    channels.server.driver.wake()
    channels.loop.run()
    assert not channels.loop.live_timers()
    peer.send(bytes(ENCODER.insert(b"counter", 0, 1, TTLType.HOURS)))
    assert len(channels.loop.live_timers()) == 1


def test_posted_output_is_written_once_and_before_later_replies(channels: Net) -> None:
    publisher, reader = channels.connect(), subscribed(channels.connect())
    publisher.send(publish(b"1") + publish(b"2"))
    assert publisher.recv() == b"\x01\x01"
    reader.send(b"\x12\x01c")
    assert reader.recv() == b""
    channels.loop.run()
    assert [reader.recv() for _ in range(3)] == [event(b"1") + event(b"2"), b"\x01", b""]


def test_posted_output_waits_until_queued_output_is_sent(channels: Net) -> None:
    publisher = channels.connect()
    reader = subscribed(channels.connect(kind=socket.SOCK_STREAM))
    reader.shorten()
    for _ in range(2):
        publisher.send(publish(bytes(30_000)))
        channels.loop.run()
    queued = reader.queued
    assert queued > 0
    publisher.send(publish(b"next"))
    channels.loop.run()
    assert reader.queued == queued
    assert reader.finish() == event(bytes(30_000)) * 2 + event(b"next")


def test_a_subscriber_that_does_not_read_is_dropped_at_the_bound(channels: Net) -> None:
    publisher, other = channels.connect(), subscribed(channels.connect(kind=socket.SOCK_STREAM))
    reader = subscribed(channels.connect(kind=socket.SOCK_STREAM))
    reader.shorten()
    received = b""
    for number in range(4):
        assert not reader.closed
        publisher.send(publish(bytes([number]) * 30_000))
        channels.loop.run()
        received += other.finish()
    assert reader.closed
    assert channels.server.slow_readers == 1
    assert channels.reports == ["slow_reader"]
    assert channels.store.sessions_dropped == 1
    assert received == b"".join(event(bytes([number]) * 30_000) for number in range(4))
    reader.lose()
    publisher.send(publish(b"after"))
    channels.loop.run()
    assert other.recv_all() == event(b"after")


def test_a_lingering_connection_holds_back_no_publisher(channels: Net) -> None:
    """It has no more to send, and its peer has not seen the end yet."""
    publisher, parting = channels.connect(), subscribed(channels.connect())
    parting.connection.part()
    assert parting.output_ended
    for _ in range(5):
        publisher.send(publish(bytes(30_000)))
        channels.loop.run()
        assert publisher.recv() == b"\x01"
    assert parting.recv_all() == b""


def test_a_connection_knows_the_address_of_its_peer(net: Net) -> None:
    assert net.connect().connection.peer() == ("", 0)


def test_the_peer_process_of_a_unix_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_process(ours.fileno()) == (os.getpid(), os.geteuid(), {os.getegid(), *os.getgroups()})
    with pytest.raises(OSError, match="descriptor"):
        peer_process(-1)


# ---- long output ----------------------------------------------------------------------------------------------------


def test_a_long_reply_is_pulled_in_pieces_and_nothing_is_read_meanwhile(net: Net) -> None:
    net.fill(6000)
    peer = net.connect()
    peer.send(wire.dump(2) + NOOP)
    pieces = [peer.recv()]
    while not peer.reading:
        assert net.loop.pending() == 1
        assert net.loop.turn() == 1
        pieces.append(peer.recv())
        assert peer.recv() == b""
    assert len(pieces) >= 4
    assert len(list(frames_of(b"".join(pieces)))) == 6002
    assert pieces[-1].endswith(REPLY)
    assert net.loop.pending() == 0


def test_the_next_piece_waits_until_the_last_one_is_sent(net: Net) -> None:
    net.fill(6000)
    peer = net.connect(kind=socket.SOCK_STREAM)
    peer.shorten()
    peer.send(wire.dump(2) + NOOP)
    received = b""
    while not peer.reading:
        net.loop.run()
        queued = peer.queued
        assert queued > 0
        peer.connection.pull()
        net.loop.run()
        assert peer.queued == queued
        received += peer.recv_all() + peer.drain()
    received += peer.recv_all()
    assert len(list(frames_of(received))) == 6002
    assert received.endswith(REPLY)


def test_input_during_a_long_reply_is_answered_after_it(net: Net) -> None:
    net.fill(3000)
    peer = net.connect()
    peer.send(wire.dump(2))
    assert not peer.reading
    peer.connection.received(wire.get(3, b"name-%09d" % 1))
    frames = list(frames_of(peer.finish()))
    assert [frame[1] for frame in frames] == [0x11] * 3001 + [0x01]
    assert peer.reading


def test_requests_of_several_turns_are_answered_in_order(net: Net) -> None:
    peers = [net.connect(), net.connect()]
    for peer in peers:
        name = b"%d" % id(peer)  # to make a counter is much work
        peer.send(b"".join(wire.acquire(number, name + b"%d" % number, 1, 1) for number in range(700)))
        assert not peer.reading
    outputs = [b"", b""]
    while net.loop.turn():
        for number, peer in enumerate(peers):
            outputs[number] += peer.recv_all()
    for output, peer in zip(outputs, peers, strict=True):
        assert [int.from_bytes(frame[8:12], "big") for frame in frames_of(output)] == list(range(700))
        assert peer.reading


# ---- what is known of it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 5, 12, 100])
def test_requests_are_counted_however_they_are_cut(cut: int) -> None:
    client = Client(make_store(10, 10))
    data = wire.noop(1) * 200 + wire.get(1, b"nobody") + b"\x55" * 12  # the last breaks the framing, and is answered
    client.raw(data[:cut])
    client.raw(data[cut:])
    assert client.session.requests == 202
    client.raw(wire.noop(1))
    assert client.session.requests == 202


def test_requests_that_wait_for_a_turn_are_counted_when_they_are_executed() -> None:
    client = Client(make_store(10, 10))
    client.session.receive(wire.noop(1) * 10_000, 0)
    assert 4096 <= client.session.requests < 10_000
    client.raw(b"")
    assert client.session.requests == 10_000


def test_a_connection_has_a_number_until_it_leaves() -> None:
    first = Client(make_store(10, 10))
    second = Client(first.store)
    assert 0 < first.session.number != second.session.number > 0
    first.session.closed(0)
    assert first.session.number == 0


# ---- the end --------------------------------------------------------------------------------------------------------


def test_a_broken_frame_is_answered_before_the_connection_closes(net: Net) -> None:
    peer = net.connect(kind=socket.SOCK_STREAM)
    peer.send(HOLD + BROKEN + NOOP)
    output = peer.recv()
    assert [frame[2] for frame in frames_of(output)] == [0, 4]
    assert peer.output_ended
    assert peer.at_end()
    assert peer.reading
    assert not peer.closed
    peer.send(NOOP)
    assert peer.recv() == b""
    assert net.loop.live_timers() == [1.0]
    net.loop.fire()
    assert peer.closed
    peer.lose()
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1


def test_a_peer_that_closes_after_its_broken_frame_is_closed_at_once(net: Net) -> None:
    peer = net.connect()
    peer.send(BROKEN)
    assert not peer.closed
    peer.end()
    assert peer.closed
    assert net.loop.live_timers() == []


def test_a_peer_that_keeps_sending_after_a_broken_frame_is_cut_off(net: Net) -> None:
    peer = net.connect()
    peer.send(BROKEN)
    for _ in range(LINGER_BYTES // READ_MAX):
        peer.send(bytes(READ_MAX))
    assert not peer.closed
    peer.send(b"\0")
    assert peer.closed
    peer.lose()
    assert net.loop.live_timers() == []


def test_a_half_closed_peer_gets_its_replies_and_is_closed(net: Net) -> None:
    peer = net.connect()
    peer.send(HOLD)
    peer.send(NOOP[:7])
    assert peer.recv()
    peer.connection.input_ended()
    assert peer.closed
    assert not peer.output_ended
    assert peer.recv() == b""
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1
    peer.lose()
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1
    assert net.server.connections == {}


def test_a_half_closed_peer_gets_a_long_reply_to_its_end(net: Net) -> None:
    net.fill(6000)
    peer = net.connect()
    peer.send(HOLD + wire.dump(2) + NOOP)
    peer.connection.input_ended()
    assert not peer.closed
    frames = list(frames_of(peer.finish()))
    assert len(frames) == 1 + 6002 + 1
    assert frames[-1] == REPLY
    assert peer.closed
    assert net.store.snapshot()["given_back"] == 1


def test_a_half_closed_peer_is_closed_only_when_all_output_is_sent(net: Net) -> None:
    peer, _ = net.clog()
    peer.connection.input_ended()
    assert not peer.closed
    peer.drain()
    assert peer.closed
    assert not peer.reading


def test_the_reply_to_a_broken_frame_goes_behind_queued_output(net: Net) -> None:
    peer, answer = net.clog()
    peer.connection.received(BROKEN)
    assert not peer.output_ended
    net.loop.fire()
    received = peer.recv_all() + peer.drain()
    assert received[: len(answer)] == answer
    assert received.endswith(b"Invalid arguments")
    assert peer.output_ended
    assert peer.reading
    assert not peer.closed
    net.loop.fire()
    assert peer.closed


def test_parting_closes_an_idle_connection(net: Net) -> None:
    peer = net.connect(kind=socket.SOCK_STREAM)
    for _ in range(2):
        peer.connection.part()
    assert peer.output_ended
    assert peer.at_end()
    peer.send(HOLD)
    assert peer.recv() == b""
    assert net.store.snapshot()["busy"] == 0
    assert net.loop.live_timers() == [1.0]
    peer.lose()
    peer.connection.part()
    peer.connection.abort()
    assert net.loop.live_timers() == []


def test_parting_waits_for_replies(net: Net) -> None:
    net.fill(6000)
    peer = net.connect()
    peer.send(wire.dump(2) + NOOP)
    peer.connection.part()
    assert not peer.output_ended
    assert peer.finish().endswith(REPLY)
    assert peer.output_ended


def test_parting_waits_for_queued_output(net: Net) -> None:
    peer, _ = net.clog()
    peer.connection.part()
    assert not peer.output_ended
    peer.drain()
    assert peer.output_ended


def test_a_lost_connection_gives_back_its_holdings_and_frees_its_session(make_net: Callable[..., Net]) -> None:
    sessions: list[Session] = []

    def recorded(store: Store) -> Session:
        sessions.append(CounterSession(store))
        return sessions[-1]

    sizes = {"buckets": 8, "holdings": 8, "name_memory": 0, "hash_key": KEY, "figures": dict}
    net = make_net(open_counters(make_session=recorded, **sizes))
    peer = net.connect()
    assert sessions[0].owner is peer.connection
    peer.send(HOLD)
    assert net.loop.pending() == 0
    peer.lose(ConnectionResetError())
    assert sessions[0].closing
    assert sessions[0].owner is None
    assert peer.connection.fd == -1
    assert peer.connection.queued == 0
    assert (net.server.connections, net.store.sessions_open) == ({}, 0)
    assert net.store.snapshot()["holdings_leaving"] == 1
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1
    peer.connection.abort()
    peer.connection.pull()


def test_a_connection_lost_during_a_long_reply_is_pulled_no_more(net: Net) -> None:
    net.fill(6000)
    peer = net.connect()
    peer.send(wire.dump(2))
    peer.lose()
    assert net.loop.pending() >= 1
    net.loop.run()
    assert peer.queued == 0


def test_a_refused_connection_is_closed_and_not_counted_as_open(make_net: Callable[..., Net]) -> None:
    net = make_net(max_connections=1)
    first, second = net.connect(), net.connect()
    assert not first.closed
    assert second.closed
    assert second.at_end()
    assert list(net.server.connections.values()) == [first.connection]
    assert net.store.sessions_open == 1
    assert net.server.figures()["rejected:max_connections"] == 1
    assert net.reports == ["rejected:max_connections"]
    first.lose()
    third = net.connect()
    assert not third.closed


# ---- mistakes and the store -----------------------------------------------------------------------------------------


class MistakenSession(CounterSession):
    """A protocol with a bug, which must harm only the connection `mistaken`."""

    mistaken: Any = ()

    def receive(self, data: bytes, now_ns: int) -> bytes:
        if data == b"mistake":
            raise ValueError("a mistake of ours")
        return super().receive(data, now_ns)

    def take_output(self, now_ns: int) -> bytes:
        if self.owner is self.mistaken:
            raise ValueError("a mistake of ours")
        return super().take_output(now_ns)


@pytest.fixture
def mistaken(make_net: Callable[..., Net]) -> Net:
    sizes = {"buckets": 8000, "holdings": 9000, "name_memory": 0, "hash_key": KEY, "figures": dict}
    return make_net(open_counters(make_session=MistakenSession, **sizes))


def test_an_exception_in_a_long_reply_closes_its_connection_and_no_other(
    mistaken: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised in a turn of the driver, where the loop does not know which connection it belongs to."""
    net = mistaken
    net.fill(6000)
    peers = [net.connect() for _ in range(3)]
    outputs = {}
    for peer in peers:
        peer.send(HOLD + wire.dump(2))
    monkeypatch.setattr(MistakenSession, "mistaken", peers[0].connection)
    for peer in peers:
        outputs[peer] = peer.finish()
    assert [str(error) for error in net.loop.errors] == ["a mistake of ours"]
    assert [peer.closed for peer in peers] == [True, False, False]
    for peer in peers[1:]:
        assert len(list(frames_of(outputs[peer]))) == 6003
        assert peer.reading


def test_an_exception_in_a_session_reaches_the_loop_and_its_holdings_come_back(mistaken: Net) -> None:
    net = mistaken
    peer = net.connect()
    peer.send(HOLD)
    assert peer.recv()
    peer.send(b"mistake")
    assert [str(error) for error in net.loop.errors] == ["a mistake of ours"]
    assert peer.closed
    net.loop.run()
    assert net.store.snapshot()["given_back"] == 1


def test_a_request_that_makes_the_store_due_wakes_its_driver(make_net: Callable[..., Net]) -> None:
    """An Acquire that found no room for its counter leaves a sweep behind."""
    net = make_net(make_store(100, 300))
    peer = net.connect()
    names = [b"name-%d" % number for number in range(100)]
    for request in (wire.acquire, wire.release, wire.acquire):
        arguments = (1,) if request is wire.release else (1, 1)
        peer.send(b"".join(request(1, name, *arguments) for name in names))
    peer.recv()
    assert net.loop.pending() == 0
    peer.recv()
    peer.recv()
    peer.send(wire.acquire(1, b"new", 1, 1))
    assert peer.recv()[2] == NO_MEMORY
    assert net.loop.pending() == 1
    net.loop.run()
    assert net.store.snapshot()["gc_count"] == 1


def test_a_new_window_is_swept_after_the_next_request(net: Net) -> None:
    peer = net.connect()
    peer.send(HOLD + wire.release(1, b"held", 1))
    net.store.begin_window(1)
    assert net.loop.pending() == 0
    peer.send(NOOP)
    net.loop.run()
    assert net.store.snapshot()["expired"] == 1


@pytest.mark.parametrize("wrong", [None, "text", bytearray(b"bytes"), memoryview(b"bytes")])
def test_received_accepts_only_bytes(net: Net, wrong: object) -> None:
    with pytest.raises(TypeError):
        net.connect().connection.received(wrong)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_parting_answers_every_waiting_request(make_net: Callable[..., Net], count: int) -> None:
    """Also on the connection that holds what the others wait for."""
    net = make_net(make_store(waiters=200))
    holder, other = (net.connect(kind=socket.SOCK_STREAM) for _ in range(2))
    holder.send(HOLD)
    holder.recv()
    for peer in (holder, other):
        peer.send(b"".join(wire.take(1 + i, [wire.Permit(b"held", 9, 9)], 60_000) for i in range(count)))
        assert peer.recv() == b""
    net.server.part()
    for peer in (holder, other):
        answers = [*wire.ResponseParser().feed(peer.finish())]
        assert [wire.decode_shortage(answer.body).text for answer in answers] == ["Draining"] * count
        assert peer.output_ended


# ---- requests that wait: a protocol made up for that, see tests/unit/_waiting.pyx ------------------------------------


@pytest.fixture
def waiting_net() -> Iterator[Net]:
    waiting = load("_waiting", build("_waiting", Path(__file__).parents[1]))
    store = waiting.WaitingStore(hash_key=bytes(16), make_session=waiting.WaitingSession, reply_max=200_000)
    store.wait_ns = 10**15
    with nets() as make:
        yield make(store, max_connections=200, clock=FakeClock(1000).monotonic_ns)


def waits(net: Net, behind: bytes = b"Ea") -> Peer:
    """A peer whose request waits, followed by requests that were read, and others that were not."""
    peer = net.connect(kind=socket.SOCK_STREAM)
    peer.send(b"W" + behind)
    assert not peer.reading
    peer.socket.send(b"Eb")
    return peer


def turns(net: Net) -> int:
    """Runs everything that is due; returns how many calls of the loop that took."""
    net.poller.run()
    before = net.loop.turns
    net.loop.run()
    return net.loop.turns - before


def test_a_waiting_connection_with_a_request_behind_causes_no_turns(waiting_net: Net) -> None:
    peers = [waits(waiting_net) for _ in range(100)]
    turns(waiting_net)
    for _ in range(10):
        assert turns(waiting_net) == 1, "a look that finds nothing"
        assert waiting_net.loop.pending() == 0
    assert [peer.recv() for peer in peers] == [b""] * 100


def test_an_event_ends_the_wait_and_later_requests_are_answered(waiting_net: Net) -> None:
    peer, other = waits(waiting_net), waiting_net.connect(kind=socket.SOCK_STREAM)
    other.send(b"G")
    assert (other.recv(), peer.finish()) == (b"g", b"Ga")
    assert peer.reading
    waiting_net.poller.run()
    assert peer.recv() == b"b"


def test_a_half_close_is_noticed_while_a_request_waits(waiting_net: Net) -> None:
    """What was sent before it is answered too, and then the connection ends."""
    peer = waits(waiting_net)
    turns(waiting_net)
    peer.socket.shutdown(socket.SHUT_WR)
    received = b""
    for _ in range(10):
        waiting_net.poller.run()
        received += peer.finish()
    assert received == b"Hab"
    assert peer.closed
    assert waiting_net.store.waiters == []


def test_a_reset_ends_the_wait(waiting_net: Net) -> None:
    peer, other = waits(waiting_net), waiting_net.connect(kind=socket.SOCK_STREAM)
    turns(waiting_net)
    peer.socket.close()
    for _ in range(10):
        waiting_net.poller.run()
        waiting_net.loop.run()
    assert waiting_net.store.waiters == []
    other.send(b"G")
    assert other.recv() == b"g"


def test_a_drain_ends_the_wait(waiting_net: Net) -> None:
    peer = waits(waiting_net)
    waiting_net.store.begin_drain()
    waiting_net.server.driver.wake()
    assert peer.finish() == b"Da"


def test_parting_ends_the_wait_and_answers_received_requests(waiting_net: Net) -> None:
    peer = waits(waiting_net)
    turns(waiting_net)
    waiting_net.server.part()
    received = b""
    for _ in range(10):
        received += peer.finish()
        waiting_net.poller.run()
    assert received == b"Hab"
    assert peer.output_ended or peer.closed


def test_replies_that_wait_for_the_journal_keep_the_connection_and_cause_no_turns(waiting_net: Net) -> None:
    peer = waiting_net.connect(kind=socket.SOCK_STREAM)
    peer.send(b"JEa")
    assert peer.reading
    peer.socket.shutdown(socket.SHUT_WR)
    waiting_net.poller.run()
    turns(waiting_net)
    assert turns(waiting_net) == 1
    assert (peer.recv(), peer.closed) == (b"", False)
    waiting_net.store.reach(1, 10**15)
    waiting_net.server.driver.wake()
    assert peer.finish() == b"Ja"
    assert peer.closed


def test_a_throttled_and_half_closed_connection_does_not_wait(waiting_net: Net) -> None:
    """The end was seen while its last request was unread, and is not seen again while that request waits."""
    waiting_net.limit(requests_per_second=1)
    peer = waiting_net.connect(kind=socket.SOCK_STREAM)
    peer.send(b"EaEa")
    assert not peer.reading
    peer.socket.send(b"WEb")
    peer.socket.shutdown(socket.SHUT_WR)
    received = b""
    for _ in range(10):
        waiting_net.poller.run()
        received += peer.finish()
    assert received == b"aaHb"
    assert peer.closed
    assert waiting_net.store.waiters == []


def test_parting_answers_requests_still_in_the_kernel(waiting_net: Net) -> None:
    """Also one behind such a request."""
    peer = waiting_net.connect(kind=socket.SOCK_STREAM)
    peer.socket.send(b"WWEa")
    waiting_net.server.part()
    received = b""
    for _ in range(10):
        waiting_net.poller.run()
        received += peer.finish()
    assert received == b"HHa"
    assert (waiting_net.store.waiters, peer.output_ended or peer.closed) == ([], True)


def test_parting_and_the_idle_timeout_wait_for_the_journal(waiting_net: Net) -> None:
    peer = waiting_net.connect(kind=socket.SOCK_STREAM)
    peer.send(b"JEa")
    later_ns = time.monotonic_ns() + 10**9
    assert waiting_net.server._table.idle_among(0, 100, later_ns) == ([], False)
    waiting_net.server.part()
    for _ in range(3):
        waiting_net.poller.run()
        assert (peer.finish(), peer.output_ended, peer.closed) == (b"", False, False)
    waiting_net.store.reach(1, 10**15)
    waiting_net.server.driver.wake()
    assert peer.finish() == b"Ja"
    assert peer.output_ended
