"""TLS between a server and peers of all kinds: what is answered, what is counted, and how it ends.

The sockets and OpenSSL on both sides are real; batches run when a test says so, and the loop is a fake."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.net.connection import Connection
from counterd.net.sockets import UnixSocket
from counterd.protocols.counter import wire
from counterd.protocols.counter._session import open_store as open_counters
from counterd.protocols.throttr._session import open_store
from kit.certificates import certificate, client_context, server_context
from kit.counters import TURNS_MAX
from unit.net.polled import ENDLESS_NS
from unit.net.secured import Peer, Site, sites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd._core import Session, Store

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)
HOLD = wire.acquire(1, b"held", 1, 9)
RESET = struct.pack("ii", 1, 0)
READ_BEYOND = 512  # bytes


@pytest.fixture
def make_site() -> Iterator[Callable[..., Site]]:
    with sites() as make:
        yield make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


def versions() -> list[ssl.TLSVersion]:
    return [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


# ---- what is answered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions())
def test_requests_are_answered(site: Site, version: ssl.TLSVersion) -> None:
    context = client_context()
    context.minimum_version = context.maximum_version = version
    peer = site.peer(context)
    assert site.server.figures()["handshakes"] == 1
    assert peer.connection.tls() == ("", "", "")
    peer.shake()
    assert site.server.figures()["handshakes"] == 0
    assert site.loop.live_timers() == []
    assert peer.ask(NOOP * 3) == REPLY * 3
    assert peer.ask(NOOP) == REPLY
    assert peer.connection.tls() == (peer.ssl.version(), peer.ssl.cipher()[0], "")
    assert peer.connection.requests == 4


def test_requests_that_come_with_the_end_of_the_handshake_are_answered(site: Site) -> None:
    peer = site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        peer.ssl.do_handshake()
    peer.flush()
    site.turn()
    peer.fetch()
    peer.ssl.do_handshake()
    assert peer.ask(NOOP) == REPLY


def test_a_byte_at_a_time(site: Site) -> None:
    peer = site.peer()
    for _ in range(TURNS_MAX):
        with contextlib.suppress(ssl.SSLWantReadError):
            peer.ssl.do_handshake()
            break
        for byte in peer.outgoing.read():
            peer.socket.send(bytes([byte]))
            site.turn()
        peer.fetch()
    peer.ssl.write(NOOP)
    sent = peer.outgoing.read()
    for byte in sent:
        assert peer.read() == b""
        peer.socket.send(bytes([byte]))
        site.turn()
    assert peer.read() == REPLY


def test_the_records_of_one_read_are_one_batch(site: Site) -> None:
    peer = site.connect()
    for _ in range(12):
        peer.ssl.write(NOOP)
    before = site.server.histograms()["batch_bytes"]
    assert peer.ask(b"") == REPLY * 12
    after = site.server.histograms()["batch_bytes"]
    assert (sum(after.counts) - sum(before.counts), after.sum - before.sum) == (1, 12 * len(NOOP))


@pytest.mark.parametrize("version", versions())
def test_a_read_completes_a_record_and_decrypts_few_further_ones(site: Site, version: ssl.TLSVersion) -> None:
    """So a peer that sends empty records, which are much work, keeps no other waiting for long."""
    context = client_context()
    context.minimum_version = context.maximum_version = version
    peer = site.peer(context)
    peer.shake()
    peer.ssl.write(NOOP * 1300)
    for _ in range(100):
        peer.ssl.write(NOOP)
    peer.flush()
    site.turn()
    assert peer.connection.requests == 0  # nothing was known of the record yet
    site.turn()
    assert 1300 < peer.connection.requests <= 1300 + READ_BEYOND // 34
    for _ in range(100 * 41 // READ_BEYOND):
        site.turn()
    assert peer.connection.requests == 1400


def slow_down(site: Site, requests: int) -> Peer:
    """A peer that has sent so many requests in records of 16 KiB, and was read for the first time; a piece of a record
    is 42 of them.
    """
    peer = site.connect()
    peer.send(NOOP * requests)
    for _ in range(40):
        if not peer.connection.requests:
            site.turn()
    assert not peer.connection.stream.reading
    assert peer.connection.requests == 42
    return peer


def forgive(site: Site) -> None:
    """Sets another limit: requests under the last one do not count."""
    site.net.limit(requests_per_second=site.server.limits.requests_per_second + 1)
    site.loop.fire()
    for _ in range(3):
        site.turn()


def test_a_large_record_counts_as_a_short_read_for_a_limited_connection(make_site: Callable[..., Site]) -> None:
    site = make_site(requests_per_second=10)
    peer = slow_down(site, 1300)
    for pieces in (2, 3, 4):
        forgive(site)
        assert peer.connection.requests == 512 * pieces // len(NOOP)
    assert peer.read() == REPLY * 170
    assert site.server.figures()["slowed"] == 4
    site.net.limit(requests_per_second=0)
    site.loop.fire()
    for _ in range(3):
        site.turn()
    assert peer.read() == REPLY * 1130


def test_a_limited_connection_of_a_killed_peer_ends_with_the_next_piece(make_site: Callable[..., Site]) -> None:
    """Its end is behind more than the kernel accepts from it: only a reply causes a reset."""
    site = make_site(requests_per_second=10)
    peer = site.connect()
    while peer.outgoing.pending < 16 << 20:
        peer.ssl.write(NOOP * 1365)
    assert peer.socket.send(peer.outgoing.read()) < 16 << 20
    for _ in range(40):
        site.turn()
    assert len(peer.read()) > 0
    assert peer.connection.requests < 100
    peer.socket.close()
    site.turn()
    assert site.there() == 1
    forgive(site)
    assert site.there() == 0
    assert peer.connection.requests < 200


@pytest.mark.parametrize("end", ["fin", "close_notify", "part"])
def test_decrypted_input_is_answered_at_the_end(make_site: Callable[..., Site], end: str) -> None:
    site = make_site(requests_per_second=1)
    peer = slow_down(site, 3000)
    if end == "part":
        peer.connection.part()
    else:
        if end == "close_notify":
            with pytest.raises(ssl.SSLWantReadError):
                peer.ssl.unwrap()
            peer.flush()
        peer.socket.shutdown(socket.SHUT_WR)
    for _ in range(200):
        site.turn()
    assert peer.connection.requests == 3000
    assert peer.closed()


def test_decrypted_input_is_dropped_after_a_reset(make_site: Callable[..., Site]) -> None:
    site = make_site(requests_per_second=1)
    peer = slow_down(site, 1300)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.socket.close()
    site.turn()
    assert site.there() == 0
    assert peer.connection.requests == 42
    assert site.loop.live_timers() == []


def test_large_transfers_in_both_directions(site: Site) -> None:
    """More than a record, and more than the first reads take."""
    peer = site.connect()
    received = peer.ask(NOOP * 5000)
    while len(received) < 5000 * len(REPLY):
        site.turn()
        received += peer.read()
    assert received == REPLY * 5000


def test_queued_output_stops_reading(site: Site) -> None:
    site.net.fill(8000)
    peer = site.connect()
    with socket.socket(fileno=os.dup(peer.connection.fd)) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    peer.send(wire.dump(2) + NOOP)
    for _ in range(5):
        site.turn()
    assert 0 < peer.connection.queued < 400_000
    assert site.server.figures()["stuck_outputs"] == 1
    assert peer.connection.requests == 1  # the other waits behind the Dump
    peer.send(NOOP)
    received = bytearray()
    while not received.endswith(REPLY * 2):
        received += peer.read()
        site.turn()
    assert len(received) == 8000 * (12 + 24) + 12 + 2 * len(REPLY)
    assert site.server.figures()["stuck_outputs"] == 0


def test_a_new_context_concerns_later_connections(site: Site, tmp_path: Path) -> None:
    first = site.connect()
    site.server.context = None
    with socket.create_connection(site.listening.getsockname()) as plain:
        plain.sendall(NOOP)
        site.turn()
        site.turn()
        assert plain.recv(100) == REPLY
        assert list(site.server.connections.values())[-1].tls() is None
        site.server.context = server_context()
        assert site.connect().ask(NOOP) == REPLY
        assert first.ask(NOOP) == REPLY


def test_a_unix_socket_has_no_tls(site: Site, tmp_path: Path) -> None:
    path = os.path.relpath(tmp_path / "s")
    site.server.listen(UnixSocket(path, 0o600).socket)
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(path)
        plain.sendall(NOOP)
        site.turn()
        site.turn()
        assert plain.recv(100) == REPLY
        assert next(iter(site.server.connections.values())).tls() is None


# ---- before the handshake is over -----------------------------------------------------------------------------------


def publish(payload: bytes) -> bytes:
    """Publishes to the channel to which every connection of the throttr protocol is subscribed."""
    return b"\x13\x01" + len(payload).to_bytes(4, "little") + b"*" + payload


def test_connections_in_their_handshake_get_no_events(make_site: Callable[..., Site]) -> None:
    """An event for every connection goes to none whose handshake is not done, and does it no harm."""
    store = open_store(
        value_size=4,
        memory_limit=1 << 20,
        max_message=1 << 20,
        max_queued=1 << 16,
        expiry_grace_ns=0,
        hash_key=bytes(16),
        now_ns=time.monotonic_ns(),
    )
    site = make_site(store=store)
    publisher, other = site.connect(), site.connect()
    silent, halfway = site.peer(), site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        halfway.ssl.do_handshake()
    halfway.flush()
    site.turn()
    assert store.snapshot()["curr_connections"] == len(site.server.connections) == 2
    assert site.server.figures()["handshakes"] == 2
    publisher.ask(publish(b"early"))
    site.turn()
    assert other.read().endswith(b"early")
    assert site.failed() == {}
    for peer in (silent, halfway):
        peer.fetch()
        peer.shake()
        assert peer.read() == b""
    assert store.snapshot()["curr_connections"] == len(site.server.connections) == 4
    publisher.ask(publish(b"late"))
    site.turn()
    assert [peer.read()[-4:] for peer in (other, silent, halfway)] == [b"late"] * 3
    assert site.failed() == {}


def test_connections_in_their_handshake_count_for_max_connections(make_site: Callable[..., Site]) -> None:
    site = make_site(max_connections=2)
    silent, second = site.peer(), site.peer()
    refused = site.peer()
    assert refused.closed()
    assert site.net.reports == ["rejected:max_connections"]
    silent.socket.close()
    site.turn()
    assert not site.peer().closed()
    second.shake()
    assert len(site.server.connections) == 1
    assert site.peer().closed()


def test_connections_in_their_handshake_count_for_their_address(make_site: Callable[..., Site]) -> None:
    site = make_site(max_per_address=1)
    silent = site.peer()
    assert site.peer().closed()
    assert site.net.reports == ["rejected:per_address"]
    silent.socket.close()
    site.turn()
    assert site.server.addresses == {}
    site.connect()
    assert site.peer().closed()


def test_a_session_without_room_after_the_handshake_is_refused(make_site: Callable[..., Site]) -> None:
    def full(_store: Store) -> Session:
        raise MemoryError("no room for another connection")

    sizes = {"buckets": 1, "holdings": 1, "name_memory": 0, "hash_key": bytes(16), "figures": dict}
    site = make_site(store=open_counters(make_session=full, **sizes))
    peer = site.peer()
    assert not peer.closed()
    peer.shake()
    assert peer.closed()
    assert site.there() == 0
    assert site.server.figures()["rejected:memory"] == 1
    assert site.failed() == {}
    assert site.net.reports == ["rejected:memory"]


def test_a_connection_is_open_after_its_handshake(site: Site) -> None:
    told: list[Any] = []
    site.server.watch = lambda event, connection: told.append((event, connection))
    gone, peer = site.peer(), site.peer()
    gone.socket.close()
    site.turn()
    assert told == []
    assert not peer.connection.number
    assert site.server._table.idle_among(0, 100, time.monotonic_ns()) == ([], False)
    accepted_ns = peer.connection.since_ns
    peer.shake()
    assert peer.connection.number
    assert peer.connection.entered_ns > peer.connection.since_ns == accepted_ns
    assert told == [("opened", peer.connection)]
    site.server.kill(peer.connection)
    site.loop.run()
    assert told[1:] == [("closed", peer.connection)]


# ---- certificates ---------------------------------------------------------------------------------------------------


def test_the_name_in_a_clients_certificate_is_known(make_site: Callable[..., Site]) -> None:
    site = make_site(clients=ssl.CERT_REQUIRED)
    peer = site.connect(own=certificate("worker"))
    assert peer.ask(NOOP) == REPLY
    assert "commonName=worker" in peer.connection.tls()[2]


@pytest.mark.parametrize("own", [None, ("stranger", "theirs")])
@pytest.mark.parametrize("version", versions())
def test_a_client_without_a_valid_certificate_is_refused(
    make_site: Callable[..., Site], own: tuple[str, str] | None, version: ssl.TLSVersion
) -> None:
    site = make_site(clients=ssl.CERT_REQUIRED)
    context = client_context(own=certificate(*own) if own else None)
    context.minimum_version = context.maximum_version = version
    peer = site.peer(context)
    with contextlib.suppress(ssl.SSLError):  # in the newer version it hears of it only after its handshake
        peer.shake()
    assert site.failed() == {"certificate": 1}
    assert site.net.reports == ["handshake:certificate"]
    if version == ssl.TLSVersion.TLSv1_3:
        assert "ALERT" in peer.alert()
    assert peer.closed()


def test_a_client_that_does_not_trust_the_server_is_counted(site: Site) -> None:
    peer = site.peer(trusts="theirs")
    with pytest.raises(ssl.SSLCertVerificationError):
        peer.shake()
    peer.flush()
    site.turn()
    assert site.failed() == {"certificate": 1}


# ---- what is no TLS -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [NOOP * 10, b"GET / HTTP/1.0\r\n\r\n", bytes(3000), b"\x16\x03\x01\xff\xff" + bytes(50)]
)
def test_a_peer_without_tls_is_closed(site: Site, data: bytes) -> None:
    peer = site.peer()
    peer.socket.sendall(data)
    site.turn()
    site.turn()
    assert site.failed() == {"protocol": 1}
    assert site.net.reports == ["handshake:protocol"]
    assert site.server.figures()["handshakes"] == 0
    assert peer.connection.tls() == ("", "", "")
    assert peer.closed()
    assert site.loop.live_timers() == [1.0]
    site.loop.fire()
    site.loop.run()
    assert site.there() == 0


def test_garbage_after_the_handshake_ends_the_connection(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.socket.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    site.turn()
    assert site.failed() == {"protocol": 1}
    assert peer.connection.tls() == ("", "", "")
    assert peer.alert()
    assert peer.closed()
    peer.socket.sendall(bytes(1 << 16))
    for _ in range(TURNS_MAX):
        site.turn()
        if not site.loop.live_timers():
            break
        site.loop.fire()
    assert site.net.store.snapshot()["given_back"] == 1


def test_endless_garbage_in_a_handshake_is_cut_off(site: Site) -> None:
    peer = site.peer()
    for _ in range(TURNS_MAX):
        if not site.there():
            break
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            peer.socket.send(bytes(1 << 16))
        site.turn()
    assert site.there() == 0
    assert site.failed() == {"protocol": 1}


def test_an_incomplete_handshake_times_out(make_site: Callable[..., Site]) -> None:
    site = make_site(handshake_timeout=7)
    peer = site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        peer.ssl.do_handshake()
    peer.flush()
    site.turn()
    assert site.loop.live_timers() == [7]
    site.loop.fire()
    site.loop.run()
    assert site.failed() == {"timeout": 1}
    assert (site.there(), site.server.handshakes) == (0, 0)
    assert peer.closed()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_peer_that_closes_before_its_handshake(site: Site, *, said: bytes, reset: bool) -> None:
    """One that never sent anything only checked whether the port is open."""
    peer = site.peer()
    peer.socket.sendall(said)
    site.turn()
    if reset:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.socket.close()
    site.turn()
    assert (site.there(), site.server.handshakes) == (0, 0)
    assert site.failed() == ({"protocol": 1} if said else {})


def test_handshakes_run_between_batches_in_order(site: Site) -> None:
    """The epoll set does not report those that wait, else it would report others later. One of them ends meanwhile."""
    served = site.connect()
    peers = [site.peer() for _ in range(6)]
    third = peers[2].connection
    for peer in peers:
        with pytest.raises(ssl.SSLWantReadError):
            peer.ssl.do_handshake()
        peer.flush()
    answered = []
    while len(answered) < 5:
        served.send(NOOP)
        site.poller.batch_ns = ENDLESS_NS
        site.batch()  # which reads for nobody who is in a handshake
        assert served.read() == REPLY
        assert not any(peer.fetch() for number, peer in enumerate(peers) if number not in {2, *answered})
        if not answered:
            site.server.kill(third)
        site.poller.batch_ns = 0  # a turn ends after its first handshake
        site.loop.turn()
        answered += [number for number, peer in enumerate(peers) if number != 2 and peer.fetch()]
    assert answered == [0, 1, 3, 4, 5]


# ---- the end --------------------------------------------------------------------------------------------------------


def test_close_notify_of_the_peer_is_its_half_close(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.ssl.write(NOOP)
    with pytest.raises(ssl.SSLWantReadError):
        peer.ssl.unwrap()
    peer.flush()
    site.turn()
    peer.fetch()
    with pytest.raises(ssl.SSLError, match="APPLICATION_DATA_AFTER_CLOSE_NOTIFY"):
        peer.ssl.unwrap()  # the answer to its last request
    assert peer.closed()
    assert site.there() == 0
    assert site.net.store.snapshot()["given_back"] == 1


@pytest.mark.parametrize("cut", [False, True])
def test_an_end_without_close_notify_is_a_half_close(site: Site, *, cut: bool) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.ssl.write(NOOP)
    peer.flush()
    if cut:
        peer.ssl.write(HOLD)
        peer.socket.sendall(peer.outgoing.read()[:-1])
    peer.socket.shutdown(socket.SHUT_WR)
    for _ in range(3):
        site.turn()
    assert peer.read() == REPLY
    assert peer.at_end()
    assert peer.closed()
    assert site.net.store.snapshot()["given_back"] == 1
    assert site.failed() == {}


def test_a_reset_gives_the_holdings_back(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(HOLD)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.socket.close()
    site.turn()
    assert site.there() == 0
    assert site.net.store.snapshot()["given_back"] == 1
    assert site.failed() == {}


def test_killed_and_closed_connections(site: Site) -> None:
    killed = site.connect()
    site.server.kill(killed.connection)
    site.loop.run()
    assert killed.closed()
    closed = site.connect()
    closed.connection.close()
    site.loop.run()
    closed.fetch()
    assert closed.at_end()
    assert closed.closed()


def fill(peer: Peer) -> None:
    """Fills the socket of the server with data that is not TLS."""
    with socket.socket(fileno=os.dup(peer.connection.fd)) as ours, contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))


def test_closing_does_not_wait_until_close_notify_is_sent(site: Site) -> None:
    peer = site.connect()
    fill(peer)
    peer.connection.close()
    site.loop.run()
    assert site.there() == 0


def test_the_end_follows_a_delayed_close_notify(site: Site) -> None:
    peer = site.connect()
    fill(peer)
    peer.connection.part()
    assert peer.connection.queued > 0
    assert site.server.figures()["stuck_outputs"] == 0  # LINGER_S is what ends it otherwise
    for _ in range(TURNS_MAX):
        if peer.closed():
            break
        site.turn()
    assert peer.connection.queued == 0


def test_parting_closes_an_idle_connection(site: Site) -> None:
    peer = site.connect()
    peer.connection.part()
    peer.fetch()
    assert peer.at_end()
    assert peer.closed()
    assert site.loop.live_timers() == [1.0]
    peer.send(NOOP)  # which nobody reads any more
    site.turn()
    peer.socket.close()
    site.turn()
    assert site.there() == 0


def test_requests_that_arrived_before_parting_are_answered(site: Site) -> None:
    """More than one read, and all of it is still encrypted in the kernel."""
    peer = site.connect()
    for _ in range(150):
        peer.ssl.write(NOOP)
    peer.flush()
    peer.connection.part()
    received = b""
    for _ in range(14):
        site.turn()
        received += peer.read()
    assert received == REPLY * 150
    assert peer.at_end()


def test_parting_ends_a_handshake(site: Site) -> None:
    silent, halfway = site.peer(), site.peer()
    with pytest.raises(ssl.SSLWantReadError):
        halfway.ssl.do_handshake()
    halfway.flush()
    site.server.part()
    for _ in range(3):
        site.turn()
    assert silent.closed()
    assert halfway.closed()
    assert (site.there(), site.server.handshakes) == (0, 0)


def test_a_broken_frame_is_answered_and_then_close_notify_comes(site: Site) -> None:
    peer = site.connect()
    assert peer.ask(b"\x55" * 12).endswith(b"Invalid arguments")
    assert peer.at_end()
    assert peer.closed()


# ---- before and instead ---------------------------------------------------------------------------------------------


def test_a_refused_connection_begins_no_handshake(make_site: Callable[..., Site]) -> None:
    site = make_site(max_connections=1)
    site.connect()
    refused = site.peer()
    assert refused.closed()
    assert site.server.figures()["handshakes"] == 0
    assert site.net.reports == ["rejected:max_connections"]


def test_a_closed_connection_leaves_no_memory(site: Site) -> None:

    def left() -> tuple[int, int]:
        gc.collect()
        objects = sum(isinstance(each, (ssl.SSLObject, Connection)) for each in gc.get_objects())
        return objects, len(list(Path("/proc/self/fd").iterdir()))

    before = left()
    for said in (HOLD, b"\x55" * 12, b""):
        peer = site.connect()
        peer.ask(said)
        peer.socket.close()
        site.turn()
        broken = site.peer()
        broken.socket.sendall(NOOP)
        broken.socket.close()
        for _ in range(3):
            site.turn()
            site.loop.fire()
        del peer, broken
    assert left() == before


def test_renegotiation_is_off(site: Site) -> None:
    assert site.server.context is not None
    assert site.server.context.options & ssl.OP_NO_RENEGOTIATION
